"""Differential testing: random TL programs, the interpreter against the emulated kernel."""
