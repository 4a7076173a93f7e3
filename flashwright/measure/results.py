"""The results of a benchmark by cell and contestant, and the ratios that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashwright.measure.records import (
    OURS,
    AbsentRecord,
    KernelRecord,
    NumberRecord,
    Record,
    RunRecord,
)


@dataclass(frozen=True)
class Summary:
    """Our ratios to one peer over all cells in which both have a number."""

    peer: str
    cells: int
    mean: float
    """Geometric."""
    worst: float
    where: str


@dataclass(frozen=True)
class Results:
    """The records of a file, indexed. Of two records about the same thing the later one counts."""

    run: RunRecord | None = None
    kernels: Mapping[str, KernelRecord] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], NumberRecord] = field(default_factory=dict)
    """By cell and contestant."""
    absent: Mapping[tuple[str, str], AbsentRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Results:
        """Index the records."""
        run: RunRecord | None = None
        kernels: dict[str, KernelRecord] = {}
        numbers: dict[tuple[str, str], NumberRecord] = {}
        absent: dict[tuple[str, str], AbsentRecord] = {}
        for record in records:
            if isinstance(record, RunRecord):
                run = record
            elif isinstance(record, KernelRecord):
                kernels[record.name] = record
            elif isinstance(record, NumberRecord):
                numbers[record.cell, record.who] = record
                absent.pop((record.cell, record.who), None)
            else:
                absent[record.cell, record.who] = record
                numbers.pop((record.cell, record.who), None)
        return cls(run, kernels, numbers, absent)

    @property
    def contestants(self) -> tuple[str, ...]:
        """The names of the contestants, our kernel first."""
        if self.run is not None:
            return self.run.contestants
        seen = (who for _, who in (*self.numbers, *self.absent))
        return tuple(dict.fromkeys((OURS, *seen)))

    @property
    def peers(self) -> tuple[str, ...]:
        """All contestants but ours."""
        return tuple(who for who in self.contestants if who != OURS)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells that have a record, in the order of the run."""
        known = dict.fromkeys(cell for cell, _ in (*self.numbers, *self.absent))
        order = [cell for cell in (self.run.cells if self.run else ()) if cell in known]
        return tuple(dict.fromkeys((*order, *known)))

    def complete(self, cell: str) -> bool:
        """Whether every contestant has a number in the cell, or a reason for none."""
        every = {**self.numbers, **self.absent}
        return all((cell, who) in every for who in self.contestants)

    def kernel_of(self, cell: str) -> KernelRecord | None:
        """Our kernel of a cell: its name is the cell's without the length."""
        return self.kernels.get(cell.rpartition(" ")[0])

    def seconds(self, cell: str, who: str) -> float | None:
        """The time of a contestant in a cell; None if it has no number."""
        found = self.numbers.get((cell, who))
        return found.seconds if found else None

    def ratio(self, cell: str, peer: str) -> float | None:
        """How many times as fast as the peer ours is; None if one of them has no number."""
        ours, other = self.seconds(cell, OURS), self.seconds(cell, peer)
        return other / ours if ours and other else None

    def fastest_peer(self, cell: str, among: Iterable[str] | None = None) -> str | None:
        """The peer with the shortest time in a cell; None if none has a number."""
        allowed = self.peers if among is None else [p for p in self.peers if p in set(among)]
        timed = [(s, who) for who in allowed if (s := self.seconds(cell, who)) is not None]
        return min(timed)[1] if timed else None

    def summary(self, peer: str) -> Summary | None:
        """Our speed relative to a peer: geometric mean and the worst cell."""
        ratios = [(r, cell) for cell in self.cells if (r := self.ratio(cell, peer)) is not None]
        if not ratios:
            return None
        mean = math.exp(sum(math.log(r) for r, _ in ratios) / len(ratios))
        worst, where = min(ratios)
        return Summary(peer, len(ratios), mean, worst, where)

    def reasons(self) -> list[tuple[str, str, list[str]]]:
        """Contestants without a number: (contestant, reason, cells), each reason once."""
        found: dict[tuple[str, str], list[str]] = {}
        for (cell, who), record in self.absent.items():
            why = f"{record.offence}: {record.why}" if record.offence else record.why
            found.setdefault((who, why), []).append(cell)
        order = {who: n for n, who in enumerate(self.contestants)}
        listed = [(who, why, cells) for (who, why), cells in found.items()]
        return sorted(listed, key=lambda one: order.get(one[0], len(order)))
