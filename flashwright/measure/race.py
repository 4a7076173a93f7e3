"""A few contestants of one operator timed beside each other: who is faster, and by how much.

The same rounds as in a benchmark, with the same watch over the outputs of timed calls; only what
was timed in one race may be compared.
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
from flashwright.measure.bench import Contest, Tools
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import of_spec
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import NumberRecord, RunRecord
from flashwright.measure.timing import Rules, Timing
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec

LENGTHS = (1024, 4096)
"""One short and one long: what is faster at one of them alone is no gain."""
LEAST = 0.01
"""A gain below this is not worth a change."""
CERTAIN = 3.0
"""Standard errors that a gain must exceed: of many attempts at no gain, few look like one."""


@dataclass(frozen=True)
class Figure:
    """How long one contestant took at one length."""

    seconds: float
    uncertainty: float
    """Of the median, relative to it."""
    tflops: float


@dataclass(frozen=True)
class Raced:
    """What came of a race."""

    times: Mapping[str, Mapping[int, Figure]] = field(default_factory=dict)
    """By contestant and length: those who were timed at every length."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Why the others have no figures."""

    def ratio(self, one: str, other: str) -> float:
        """The time that one takes for what takes the other 1 (geometric mean over the lengths)."""
        ours, theirs = self.times[one], self.times[other]
        logs = [math.log(ours[n].seconds / theirs[n].seconds) for n in ours]
        return math.exp(sum(logs) / len(logs))

    def noise(self, one: str, other: str) -> float:
        """The standard error of that ratio, relative to it."""
        every = [f.uncertainty**2 for who in (one, other) for f in self.times[who].values()]
        return math.sqrt(sum(every)) / len(self.times[one])

    def faster(self, one: str, other: str) -> bool:
        """Whether one is faster than the other, by more than chance and than it matters."""
        needed = max(LEAST, CERTAIN * self.noise(one, other))
        return self.ratio(one, other) < 1 - needed

    def record(self) -> dict[str, Any]:
        """The figures as plain data, for JSON."""
        times = {
            who: {str(length): vars(figure) for length, figure in found.items()}
            for who, found in self.times.items()
        }
        return {"times": times, "lost": dict(self.lost)}


def read(record: Mapping[str, Any]) -> Raced:
    """From plain data; KeyError, TypeError or ValueError where it is none."""
    times = {
        who: {int(length): Figure(**figure) for length, figure in found.items()}
        for who, found in record["times"].items()
    }
    return Raced(times, dict(record["lost"]))


Race = Callable[[AttentionSpec, Sequence[Contestant]], Raced]
"""`race`, or a test's own."""


def package(name: str, folder: Path) -> Contestant:
    """A kernel package as a contestant; its times are held against the wall clock."""
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
    tools: Tools | None = None,
) -> Raced:
    """Time them all; Failed with FW851 where there is no GPU to do it on."""
    from flashwright.build import driver

    card = card or driver.cards()[0]
    cells = of_spec(spec, lengths)
    told = RunRecord(
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
    times: dict[str, dict[int, Figure]] = {c.name: {} for c in contestants}
    lost: dict[str, str] = {}
    contest = Contest(told, contestants, rules or Rules(), tools or Tools())
    try:
        for cell in cells:
            for line in contest.measure(cell):
                if isinstance(line, NumberRecord):
                    times[line.who][cell.length] = _figure(line)
                else:
                    lost.setdefault(line.who, f"with {cell.kv_len} keys: {line.why}")
    finally:
        contest.close()
    return Raced({who: found for who, found in times.items() if who not in lost}, lost)


def _figure(line: NumberRecord) -> Figure:
    timing = Timing(line.seconds, line.spread, line.samples)
    return Figure(line.seconds, timing.uncertainty, line.tflops)
