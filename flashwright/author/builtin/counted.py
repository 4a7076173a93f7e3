"""The instructions of a kernel per step, as counted by the emulator.

The figures are in counted.json, which `python -m tests.counting.count` writes; a test compares them
with the kernels. Instructions are PTX, without those that ptxas folds into others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Work:
    """Instructions of a lane: on the FP32 and integer pipes, and on the one for exponentials."""

    plain: float
    special: float


@dataclass(frozen=True)
class Overhead:
    """Instructions that a warp issues whatever the scores: each step, and each copy of a lane."""

    step: float
    copy: float


@cache
def score(capability: int, dtype: str, options: tuple[str, ...] = ()) -> Work:
    """The work per score: the softmax, the rounding to `dtype`, and the options."""
    data = _data()
    # A newer architecture has the arithmetic of the newest one that was counted.
    known = {int(a[3:5]): t for a, t in data["score"].items()}
    alike = {"e5m2": "e4m3"}.get(dtype, dtype)
    newest = max(a for a, types in known.items() if a <= capability and alike in types)
    parts = [known[newest][alike], *(data["option, each score"][o] for o in options)]
    return Work(sum(_work(p).plain for p in parts), sum(_work(p).special for p in parts))


@cache
def element() -> Work:
    """The work per element of O: its rescale."""
    return _work(_data()["element of O"])


@cache
def row() -> Work:
    """The work per row of a lane (four lanes share a row): its maximum, factor and sum."""
    return _work(_data()["row of a lane"])


@cache
def mask(kind: str) -> float:
    """The work per score of a masked step: `ragged`, `causal` or `window`."""
    return _work(_data()["mask, each score of its step"][kind]).plain


@cache
def overhead(cp_async: bool, element_bytes: int) -> Overhead:
    """The instructions per step for addresses, copies, barriers and branches."""
    figures = _data()["warp"]["cp.async" if cp_async else "registers"][str(element_bytes)]
    return Overhead(figures["step"], figures["copy"])


def _work(figures: dict[str, float]) -> Work:
    special = figures.get("special", 0.0)
    return Work(sum(figures.values()) - special, special)


@cache
def _data() -> dict[str, Any]:
    file = resources.files("flashwright.author.builtin") / "counted.json"
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data
