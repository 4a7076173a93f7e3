"""Differentiation: the backward pass of a checked forward program, as TL."""
