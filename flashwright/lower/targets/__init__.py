"""What each GPU multiplies and copies with."""
