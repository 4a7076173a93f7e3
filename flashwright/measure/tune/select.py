"""From figures to kernels: which go on to the second round, and which serve which lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby

NOISE = 0.02
"""A kernel is faster than another by more than this, or they count as equal."""
NEAR = 0.06
"""Within this of the best in a short round, a kernel may be the best in a long one."""
FINALISTS = 8

Times = Mapping[int, Mapping[str, float]]
"""Seconds by length and candidate."""


def finalists(times: Times, present: str) -> list[str]:
    """Who is near the best at some length, the nearest first; the present one in any case."""
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
    """The best over all lengths (geometric mean); the present one where it is as good.

    Only who was timed everywhere can be: empty where nobody was.
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
    """Who serves each length: the main one, unless another is faster by more than the noise.

    A kernel that serves the length before goes on where it is as good: fewer kernels do.
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
    """Neighbouring lengths with the same kernel as one class: which they are, and whose."""
    groups = groupby(sorted(chosen), key=lambda length: chosen[length])
    return [(list(lengths), name) for name, lengths in groups]
