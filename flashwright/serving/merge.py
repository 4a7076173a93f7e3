"""Attention over two sets of keys, put together."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.serving.arguments import check_tensors


def merge_states(o1: Any, lse1: Any, o2: Any, lse2: Any) -> tuple[Any, Any]:
    """O and log-sum-exp over two sets of keys, from those over each, by PyTorch.

    O is (..., tokens, heads, dim), the log-sum-exp (..., heads, tokens), natural, as the functions
    for serving return them. Rows of -inf have no keys and count as nothing.
    """
    check_tensors({"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}, {}, "o1", "lse1", "o2", "lse2")
    for name, out, lse in (("1", o1, lse1), ("2", o2, lse2)):
        if out.ndim < 3:
            raise ValueError(f"o{name} must have the axes (..., tokens, heads, dim)")
        *outer, tokens, heads, _ = out.shape
        if tuple(lse.shape) != (*outer, heads, tokens):
            text = f"lse{name} must have the axes (..., heads, tokens) of o{name}"
            raise ValueError(f"{text}: {(*outer, heads, tokens)}, not {tuple(lse.shape)}")
    if o1.shape != o2.shape:
        raise ValueError(f"o1 and o2 must have one shape, not {[*o1.shape]} and {[*o2.shape]}")
    share = torch.sigmoid(lse1.float() - lse2.float())
    share = share.nan_to_num(0.0).transpose(-2, -1)[..., None]  # neither has a key
    out = torch.lerp(o2.float(), o1.float(), share).to(o1.dtype)
    return out, torch.logaddexp(lse1.float(), lse2.float())
