"""Contestants for the benchmark's tests: honest ones, and those that are not."""

from __future__ import annotations

import os
from typing import Any

import torch

_calls = 0
_kept: list[Any] = []


def honest(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def twice(q: Any, k: Any, v: Any) -> Any:
    honest(q, k, v)
    return honest(q, k, v)


def wrong(q: Any, k: Any, v: Any) -> Any:
    return v.clone()


def replay(q: Any, k: Any, v: Any) -> Any:
    if not _kept or _kept[0].shape != q.shape:
        _kept[:] = [honest(q, k, v)]
    return _kept[0].clone()


def hidden(q: Any, k: Any, v: Any) -> Any:
    """Its work is on a stream that the events do not see."""
    _kept[:] = _kept or [torch.cuda.Stream()]
    with torch.cuda.stream(_kept[0]):
        for _ in range(20):
            found = honest(q, k, v)
    return found


def _later() -> bool:
    global _calls
    _calls += 1
    return _calls > 20


def hangs(q: Any, k: Any, v: Any) -> Any:
    while _later():
        pass
    return honest(q, k, v)


def crashes(q: Any, k: Any, v: Any) -> Any:
    if _later():
        os.abort()
    return honest(q, k, v)
