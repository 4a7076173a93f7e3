"""Adversarial and honest kernels, as candidates for the judge."""
