"""Judging kernels: the fp64 oracle, the inputs, and the verdict."""
