"""Tensors of whole numbers that a score or a mask reads, as kernels take them."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.pytorch.made_once import MadeOnce

_AS_INT32 = MadeOnce(lambda tensor: tensor.int())


def narrowed(tensor: Any) -> Any:
    """Whole numbers in int32, other tensors as they are. A CUDA graph converts them in each
    replay."""
    if tensor.is_floating_point() or tensor.dtype == torch.int32:
        return tensor
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return tensor.int()
    return _AS_INT32(tensor)
