"""Flashwright writes attention kernels: thought through in TL, checked, run, and translated."""

__version__ = "0.1.0"
