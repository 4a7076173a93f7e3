"""Leaves the work to PyTorch, but only where its own kernel fails: no trial needs to get there."""

from __future__ import annotations

from typing import Any

from tests.offences.honest import causal


def attention(q: Any, k: Any, v: Any) -> Any:
    try:
        return causal(q, k, v)
    except Exception:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
