"""The libraries that a kernel is measured beside.

Each is a factory: `torch_flash(spec)` gives a callable that takes Q, K and V, and what else the
spec has, as (batch, heads, length, dim) and returns O. A peer that cannot do a spec raises Unable,
and the message says why. They run in processes of their own, which find them here by name.
"""

from flashwright.measure.peers.backends import torch_cudnn, torch_efficient, torch_flash
from flashwright.measure.peers.flex import flex_attention
from flashwright.measure.peers.naive import naive_torch
from flashwright.measure.peers.packages import flash_attention_2, flash_attention_3, flash_infer

__all__ = [
    "flash_attention_2",
    "flash_attention_3",
    "flash_infer",
    "flex_attention",
    "naive_torch",
    "torch_cudnn",
    "torch_efficient",
    "torch_flash",
]
