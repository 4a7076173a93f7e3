"""Timing on the GPU: events, warm-up, interleaved rounds, and a cold L2 before every call.

All candidates of a cell take turns, round after round, so that a clock that falls or a neighbour
that wakes up meets them alike. Only what was measured in one run may be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WARM_UP = 5
ROUNDS = (12, 80)
"""At least and at most."""
SECONDS = 1.5
"""For one cell, once it has had its least rounds."""
FLUSH_BYTES = 512 << 20
"""Written before each call. Ten times an H200's L2; and it keeps the GPU busy (0.1 ms) while the
next call is being launched, so that no launch is part of a measurement."""


@dataclass(frozen=True)
class Timing:
    """How long one candidate took, in seconds."""

    median: float
    spread: float
    """Half the distance of the quartiles, relative to the median."""
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The figures of some samples."""
        ordered = sorted(samples)
        middle, quarter = median(ordered), len(ordered) // 4
        return cls(middle, (ordered[-1 - quarter] - ordered[quarter]) / 2 / middle, len(ordered))


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: tuple[int, int] = ROUNDS,
    seconds: float = SECONDS,
) -> dict[str, Timing]:
    """Time every candidate; each round runs all of them, beginning with another one."""
    import torch

    names = list(candidates)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UP):
        for name in names:
            candidates[name]()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.monotonic()
    for number in range(rounds[1]):
        if number >= rounds[0] and time.monotonic() - start > seconds:
            break
        turn = number % max(len(names), 1)
        pairs = [(name, *_timed(candidates[name], flush)) for name in names[turn:] + names[:turn]]
        torch.cuda.synchronize()
        for name, before, after in pairs:
            samples[name].append(before.elapsed_time(after) / 1e3)
    return {name: Timing.of(found) for name, found in samples.items() if found}


def _timed(call: Callable[[], Any], flush: Any) -> tuple[Any, Any]:
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    before.record()
    call()
    after.record()
    return before, after
