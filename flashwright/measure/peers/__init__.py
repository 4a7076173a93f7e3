"""The peers: libraries that a kernel is compared with.

Each is a factory: `torch_flash(spec)` returns a callable that takes Q, K, V and the spec's other
inputs as (batch, heads, length, dim) and returns O. A peer that does not support a spec raises
Unable with the reason. Peers run in their own processes, which import them from here by name.
"""

from flashwright.measure.peers.backends import torch_cudnn, torch_efficient, torch_flash
from flashwright.measure.peers.flex import flex_attention
from flashwright.measure.peers.naive import naive_torch
from flashwright.measure.peers.nsa import flash_linear_attention
from flashwright.measure.peers.packages import flash_attention_2, flash_attention_3, flash_infer

__all__ = [
    "flash_attention_2",
    "flash_attention_3",
    "flash_infer",
    "flash_linear_attention",
    "flex_attention",
    "naive_torch",
    "torch_cudnn",
    "torch_efficient",
    "torch_flash",
]
