"""Selection: which candidates reach the second round, and which kernel serves which lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby

NOISE = 0.02
"""Relative time difference below which two kernels count as equal."""
NEAR = 0.06
"""A kernel this close to the best in the short round may be the best in the long one."""
FINALISTS = 8

Times = Mapping[int, Mapping[str, float]]
"""Seconds by length and candidate."""


def finalists(times: Times, present: str) -> list[str]:
    """Candidates near the best at some length, the nearest first, and always the present kernel."""
    nearest: dict[str, float] = {}
    for found in times.values():
        best = min(found.values(), default=math.inf)
        for name, seconds in found.items():
            nearest[name] = min(nearest.get(name, math.inf), seconds / best)
    order = sorted(nearest, key=lambda name: (nearest[name], name))
    near = [name for name in order if nearest[name] <= 1 + NEAR and name != present]
    here = [present] if present in nearest else []
    return [*here, *near[: FINALISTS - len(here)]]


def fastest(times: Times, present: str, noise: float = NOISE) -> str:
    """The fastest over all lengths (geometric mean); the present kernel if it is within the noise.

    Only candidates timed at every length count; empty if there is none.
    """
    everywhere = [set(found) for found in times.values()]
    names = sorted(set.intersection(*everywhere)) if everywhere else []

    def slower(name: str) -> float:
        ratios = [found[name] / min(found.values()) for found in times.values()]
        return math.exp(sum(math.log(r) for r in ratios) / len(ratios))

    best = min(names, key=slower, default="")
    if present in names and slower(present) <= slower(best) * (1 + noise):
        return present
    return best


def serving(times: Times, main: str, noise: float = NOISE) -> dict[int, str]:
    """The kernel for each length: `main`, unless another is faster by more than the noise.

    The kernel of the previous length is preferred among equals, to need fewer kernels.
    """
    chosen: dict[int, str] = {}
    before = main
    for length in sorted(times):
        found = times[length]
        best = min(found.values())
        good = [name for name, seconds in found.items() if seconds <= best * (1 + noise)]
        kept = [name for name in (main, before) if name in good]
        before = chosen[length] = kept[0] if kept else min(good, key=lambda name: found[name])
    return chosen


def merged(chosen: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Merge adjacent lengths with the same kernel into classes: (lengths, kernel)."""
    groups = groupby(sorted(chosen), key=lambda length: chosen[length])
    return [(list(lengths), name) for name, lengths in groups]
