"""PyTorch: FlexAttention's functions as TL."""
