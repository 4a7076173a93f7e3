"""The emulator held against the GPU, one instruction at a time.

`python -m tests.hardware.record` runs every snippet on the GPU of this machine and keeps what came
out in recorded.npz; tests/unit/test_emulate_hardware.py compares.
"""
