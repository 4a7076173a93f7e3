"""Sparse attention: operators of several kernels (native sparse attention)."""
