"""CUDA that a model or a stranger wrote: its contract, its screening, its confined build."""
