"""Measuring kernels beside the libraries, in one run."""
