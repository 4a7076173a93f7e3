"""Leaves the work to PyTorch, but only where its own kernel fails: no trial needs to get there."""

from __future__ import annotations

from typing import Any

from flashwright.selftest.kernels.honest import causal


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, by its own code or by a library's."""
    try:
        return causal(q, k, v)
    except Exception:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
