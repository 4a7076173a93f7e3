"""Functions with the signatures that inference engines call."""
