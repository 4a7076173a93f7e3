"""Code that nobody has read yet, in a process of its own, with limits."""
