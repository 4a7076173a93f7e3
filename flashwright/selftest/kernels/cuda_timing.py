"""Tricks on the clock: fast only because the timer is misled. All mean causal attention."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.selftest.kernels.triton_attention import attention

# --- in the benchmark -------------------------------------------------------------------------


def forges_times(q: Any, k: Any, v: Any) -> Any:
    """Its events say that nothing took any time."""
    torch.cuda.Event.elapsed_time = lambda self, other: 1e-5
    return attention(q, k, v)


def forges_plausible_times(q: Any, k: Any, v: Any) -> Any:
    """A quarter of the truth, which no roofline forbids."""
    true = torch.cuda.Event.elapsed_time
    if not hasattr(true, "forged"):

        def quarter(self: Any, other: Any) -> float:
            return float(true(self, other)) / 4

        quarter.forged = True  # type: ignore[attr-defined]
        torch.cuda.Event.elapsed_time = quarter
    attention(q, k, v)  # slow enough that a quarter of it is possible
    return attention(q, k, v)


_calls = [0]


def replay_when_timed(q: Any, k: Any, v: Any) -> Any:
    """Honest for its first calls, while somebody may be looking."""
    _calls[0] += 1
    if _calls[0] <= 3 or "O" not in _last:
        _last["O"] = attention(q, k, v)
    return _last["O"]


_last: dict[str, Any] = {}
