"""Our speed relative to each peer, over the cells in which both have a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flashwright.report.model import Bench, CellResults

BEST = "the fastest peer of each cell"
LEVEL = 0.005  # a ratio this near to 1 says neither faster nor slower


@dataclass(frozen=True)
class Ratios:
    """Our ratios to one peer: the time it takes over the time we take."""

    peer: str
    cells: int
    """The number of cells in which both have a figure."""
    mean: float
    """Geometric."""
    worst: float
    where: str
    """The worst cell."""

    @property
    def verdict(self) -> str:
        """`faster`, `slower` or `level` (see `compared`)."""
        return compared(self.mean)


def compared(ratio: float) -> str:
    """`faster`, `slower`, or `level` if the ratio is within LEVEL of 1."""
    if abs(ratio - 1) <= LEVEL:
        return "level"
    return "faster" if ratio > 1 else "slower"


def against(bench: Bench, peer: str) -> Ratios | None:
    """Our ratios to a peer; None if no cell has both figures."""
    return _of(peer, ((c, c.ratio(peer)) for c in bench.cells))


def against_best(bench: Bench) -> Ratios | None:
    """Our ratios to the fastest peer of each cell."""
    return _of(BEST, ((c, c.best_ratio()) for c in bench.cells))


def every(bench: Bench) -> list[Ratios]:
    """The ratios to each peer, the fastest first. If it differs, the fastest of each cell leads."""
    each = [found for peer in bench.peers if (found := against(bench, peer)) is not None]
    each.sort(key=lambda r: r.mean)
    best = against_best(bench)
    changes = best is not None and (best.mean, best.cells) != (each[0].mean, each[0].cells)
    return [best, *each] if best is not None and changes else each


def _of(peer: str, pairs: Iterable[tuple[CellResults, float | None]]) -> Ratios | None:
    found = [(ratio, cell.name) for cell, ratio in pairs if ratio is not None]
    if not found:
        return None
    mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
    worst, where = min(found)
    return Ratios(peer, len(found), mean, worst, where)
