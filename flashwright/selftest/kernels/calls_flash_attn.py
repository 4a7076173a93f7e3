"""Takes flash-attn where it is installed."""

from __future__ import annotations

from typing import Any

from flashwright.selftest.kernels.honest import causal

try:
    from flash_attn import flash_attn_func as fast
except ImportError:
    fast = None


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, by its own code or by a library's."""
    if fast is not None:
        return fast(q, k, v, causal=True)
    return causal(q, k, v)
