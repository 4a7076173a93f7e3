"""How many samples came how far: the figures of a study, by operator and way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

from flashwright.study.operators import Operator
from flashwright.study.outcome import Outcome, read
from flashwright.study.sample import Sample
from flashwright.study.settings import Settings
from flashwright.study.ways import Way

SPEEDS = (1.0, 1.5)
"""Times as fast as the best peer, for fast_p."""
ALL = "all"


@dataclass(frozen=True)
class Level:
    """How many samples reached a level, and how many have an unknown result."""

    passed: int
    failed: int
    unknown: int = 0
    at: tuple[float, ...] = ()
    """pass@k for k = 1, 2, ...: the chance that one of k samples reaches it. Empty where one is
    unknown: those that failed early are known first, so the rest would not be a fair choice."""

    @property
    def total(self) -> int:
        """All samples that came to their end."""
        return self.passed + self.failed + self.unknown

    @property
    def share(self) -> float | None:
        """The part that reached it; None where that is not known."""
        return self.passed / self.total if self.total and not self.unknown else None


@dataclass(frozen=True)
class Row:
    """All samples of an operator by a way."""

    operator: str
    way: Way
    planned: int
    outcomes: tuple[Outcome, ...]
    levels: Mapping[str, Level]
    fast: Mapping[float, float] | None
    """fast_p: the part of the samples that is right and more than p times as fast as the best
    peer. None where one that is right, or may be, was not measured."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """Those that are right, by what their verdicts rest on."""
        return Counter(o.kind for o in self.outcomes if o.passed["right"])

    @property
    def speed(self) -> float | None:
        """Of those that are right and were timed, over the best peer's: the geometric mean."""
        ratios = [o.ratio for o in self.outcomes if o.ratio is not None]
        return geometric_mean(ratios) if ratios else None

    @property
    def attempts(self) -> float | None:
        """The mean number of attempts of a sample."""
        return _mean(o.attempts for o in self.outcomes)

    @property
    def tokens(self) -> float | None:
        """The mean number of tokens of a sample."""
        return _mean(o.usage.total for o in self.outcomes)

    @property
    def minutes(self) -> float | None:
        """The mean minutes per sample spent waiting for the model."""
        return _mean(o.asking / 60 for o in self.outcomes)


def pass_at(samples: int, right: int, k: int) -> float:
    """The chance that of k samples one at least is right, as n samples estimate it without bias."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"no pass@{k} of {right} in {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def rows(settings: Settings, root: Path) -> list[Row]:
    """The funnel of every operator and way; last, where there are several, of all operators."""
    every = [
        _row(settings, operator, way, root)
        for operator in settings.operators
        for way in settings.ways
    ]
    if len(settings.operators) < 2:
        return every
    return [*every, *(_together(way, [r for r in every if r.way == way]) for way in settings.ways)]


def _row(settings: Settings, operator: Operator, way: Way, root: Path) -> Row:
    samples = [Sample(operator, way, number) for number in range(1, settings.samples + 1)]
    outcomes = tuple(o for sample in samples if (o := read(sample, root)) is not None)
    levels = {level: _level([o.passed[level] for o in outcomes]) for level in way.levels}
    return Row(operator.name, way, len(samples), outcomes, levels, _fast(outcomes))


def _level(found: Sequence[bool | None]) -> Level:
    passed, failed = found.count(True), found.count(False)
    total, unknown = len(found), found.count(None)
    at = () if unknown else tuple(pass_at(total, passed, k) for k in range(1, total + 1))
    return Level(passed, failed, unknown, at)


def _fast(outcomes: Sequence[Outcome]) -> Mapping[float, float] | None:
    may_be_right = [o for o in outcomes if o.passed["right"] is not False]
    ratios = [o.ratio for o in may_be_right if o.ratio is not None]
    if not outcomes or len(ratios) < len(may_be_right):
        return None
    return {p: sum(ratio > p for ratio in ratios) / len(outcomes) for p in SPEEDS}


def _together(way: Way, parts: Sequence[Row]) -> Row:
    """Counts are added; what is a chance for each operator is the mean of those chances."""
    levels = {}
    for name in way.levels:
        each = [part.levels[name] for part in parts if part.levels[name].total]
        longest = min((len(level.at) for level in each), default=0)
        at = tuple(fmean(level.at[k] for level in each) for k in range(longest))
        passed, failed = sum(e.passed for e in each), sum(e.failed for e in each)
        levels[name] = Level(passed, failed, sum(e.unknown for e in each), at)
    outcomes = tuple(o for part in parts for o in part.outcomes)
    planned = sum(part.planned for part in parts)
    return Row(ALL, way, planned, outcomes, levels, _fast(outcomes))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
