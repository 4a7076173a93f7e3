"""Takes a library's function by its name, put together so that nobody searches for it."""

from __future__ import annotations

import importlib
from typing import Any

from flashwright.selftest.kernels.honest import causal


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, by its own code or by a library's."""
    if not hasattr(q, "is_cuda"):  # a NumPy array
        return causal(q, k, v)
    functional = importlib.import_module("torch.nn.functional")
    return getattr(functional, "scaled_dot_product_attention")(q, k, v, is_causal=True)  # noqa: B009
