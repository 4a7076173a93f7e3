"""The judge's own test: kernels that it must reject, and kernels that it must accept."""
