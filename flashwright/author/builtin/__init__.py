"""The built-in author: deterministic, without a model, a key or a network."""
