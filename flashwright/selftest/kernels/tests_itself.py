"""An honest kernel in a file whose own test compares it with a library."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.selftest.kernels.triton_attention import attention as own


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by its own kernel."""
    return own(q, k, v)


def test() -> None:
    """Run by its author, never by a caller."""
    made = [torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    right = torch.nn.functional.scaled_dot_product_attention(*made, is_causal=True)
    assert float((attention(*made) - right).abs().max()) < 1e-2


if __name__ == "__main__":
    test()
