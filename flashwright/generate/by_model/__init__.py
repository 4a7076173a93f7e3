"""The stages of `generate` that a language model does, and the race between its kernels."""
