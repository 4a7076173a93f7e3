"""Tensors of whole numbers that a score or a mask reads, as kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN: Any = WeakTensorKeyDictionary()
"""By a tensor: its version, and the same in int32."""


def narrowed(tensor: Any) -> Any:
    """Whole numbers in int32, other tensors as they are. It is done once, unless the tensor is
    changed; a CUDA graph that is being captured does it in each replay."""
    if tensor.is_floating_point() or tensor.dtype == torch.int32:
        return tensor
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or tensor.is_inference() or isinstance(tensor, FakeTensor):
        return tensor.int()
    known = _KNOWN.get(tensor)
    if known is None or known[0] != tensor._version:
        known = _KNOWN[tensor] = (tensor._version, tensor.int())
    return known[1]
