"""A few contestants timed against each other on one operator: which one is faster, and by how much.

A race has the rounds and the spot checks of a benchmark. Only times of the same race may be
compared.
"""

from __future__ import annotations

import datetime
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashwright.build.driver import Card
from flashwright.measure.bench import Contest, ContestDependencies
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import of_spec
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import NumberRecord, RunRecord
from flashwright.measure.timing import Rules, Timing
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec

LENGTHS = (1024, 4096)
"""One short and one long: a kernel must be faster over both to count as a gain."""
LEAST = 0.01
"""The smallest relative gain that justifies a change."""
CERTAIN = 3.0
"""Standard errors that a gain must exceed, so that noise rarely looks like a gain."""


@dataclass(frozen=True)
class RaceTime:
    """The time of one contestant at one length."""

    seconds: float
    uncertainty: float
    """Standard error of the median, relative to it."""
    tflops: float


@dataclass(frozen=True)
class RaceResult:
    """The times of a race."""

    times: Mapping[str, Mapping[int, RaceTime]] = field(default_factory=dict)
    """By contestant and length, for the contestants that were timed at every length."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """By contestant: why it has no times."""

    def ratio(self, one: str, other: str) -> float:
        """The time of one over the time of the other (geometric mean over the lengths)."""
        ours, theirs = self.times[one], self.times[other]
        logs = [math.log(ours[n].seconds / theirs[n].seconds) for n in ours]
        return math.exp(sum(logs) / len(logs))

    def noise(self, one: str, other: str) -> float:
        """The standard error of `ratio`, relative to it."""
        every = [f.uncertainty**2 for who in (one, other) for f in self.times[who].values()]
        return math.sqrt(sum(every)) / len(self.times[one])

    def faster(self, one: str, other: str) -> bool:
        """Whether one is faster than the other by more than the noise and at least LEAST."""
        needed = max(LEAST, CERTAIN * self.noise(one, other))
        return self.ratio(one, other) < 1 - needed

    def record(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        times = {
            who: {str(length): vars(figure) for length, figure in found.items()}
            for who, found in self.times.items()
        }
        return {"times": times, "lost": dict(self.lost)}


def read(record: Mapping[str, Any]) -> RaceResult:
    """The result from plain data. Raises KeyError, TypeError or ValueError if it is invalid."""
    times = {
        who: {int(length): RaceTime(**figure) for length, figure in found.items()}
        for who, found in record["times"].items()
    }
    return RaceResult(times, dict(record["lost"]))


RaceFunction = Callable[[AttentionSpec, Sequence[Contestant]], RaceResult]
"""`race`, or a fake in tests."""


def package(name: str, folder: Path) -> Contestant:
    """A kernel package as a contestant; its times are checked against the wall clock."""
    return Contestant(name, Candidate.package(folder, name), watched=True)


def peer(one: Peer) -> Contestant:
    """A peer as a contestant."""
    return Contestant(one.name, one.candidate, slack=one.slack, watched=one.watched)


def race(
    spec: AttentionSpec,
    contestants: Sequence[Contestant],
    lengths: Sequence[int] = LENGTHS,
    card: Card | None = None,
    rules: Rules | None = None,
    dependencies: ContestDependencies | None = None,
) -> RaceResult:
    """Time all contestants at each length. Raises Failed with FW851 if there is no GPU."""
    from flashwright.build import driver

    card = card or driver.cards()[0]
    cells = of_spec(spec, lengths)
    record = RunRecord(
        id="race",
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        title="race",
        card=card.name,
        arch=card.arch,
        translated_for=card.name,
        layout="bshd",
        contestants=tuple(c.name for c in contestants),
        cells=tuple(cell.name for cell in cells),
        environment={},
        seed=secrets.randbits(31),
    )
    times: dict[str, dict[int, RaceTime]] = {c.name: {} for c in contestants}
    lost: dict[str, str] = {}
    contest = Contest(record, contestants, rules or Rules(), dependencies or ContestDependencies())
    try:
        for cell in cells:
            for line in contest.measure(cell):
                if isinstance(line, NumberRecord):
                    times[line.who][cell.length] = _race_time(line)
                else:
                    lost.setdefault(line.who, f"with {cell.kv_len} keys: {line.why}")
    finally:
        contest.close()
    return RaceResult({who: found for who, found in times.items() if who not in lost}, lost)


def _race_time(line: NumberRecord) -> RaceTime:
    timing = Timing(line.seconds, line.spread, line.samples)
    return RaceTime(line.seconds, timing.uncertainty, line.tflops)
