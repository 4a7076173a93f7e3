"""The funnel of a study: how many samples reached each level, by operator and way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

from flashwright.study.operators import Operator
from flashwright.study.outcome import SampleOutcome, read
from flashwright.study.sample import Sample
from flashwright.study.settings import Settings
from flashwright.study.ways import Way

SPEEDS = (1.0, 1.5)
"""The values of p for fast_p: speed relative to the best peer."""
ALL = "all"


@dataclass(frozen=True)
class LevelCount:
    """How many samples reached a level, and how many have an unknown result."""

    passed: int
    failed: int
    unknown: int = 0
    at: tuple[float, ...] = ()
    """pass@k for k = 1, 2, ...: the probability that one of k samples reaches the level. Empty if a
    result is unknown: early failures are known first, so the known results would be biased."""

    @property
    def total(self) -> int:
        """The number of finished samples."""
        return self.passed + self.failed + self.unknown

    @property
    def share(self) -> float | None:
        """The fraction of samples that reached the level; None if a result is unknown."""
        return self.passed / self.total if self.total and not self.unknown else None


@dataclass(frozen=True)
class FunnelRow:
    """All samples of one operator by one way."""

    operator: str
    way: Way
    planned: int
    outcomes: tuple[SampleOutcome, ...]
    levels: Mapping[str, LevelCount]
    fast: Mapping[float, float] | None
    """fast_p: the fraction of samples that are right and more than p times as fast as the best
    peer. None if a sample that is or may be right was not timed."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """The number of right samples by kind of verdict."""
        return Counter(o.kind for o in self.outcomes if o.passed["right"])

    @property
    def speed(self) -> float | None:
        """The geometric mean of the speed over the best peer's, of all timed samples."""
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
    """The unbiased estimate of pass@k: the probability that at least one of k samples is right."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"no pass@{k} of {right} in {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def rows(settings: Settings, root: Path) -> list[FunnelRow]:
    """A row for each operator and way; then, if there are several operators, for all of them."""
    every = [
        _row(settings, operator, way, root)
        for operator in settings.operators
        for way in settings.ways
    ]
    if len(settings.operators) < 2:
        return every
    return [
        *every,
        *(_all_operators(way, [r for r in every if r.way == way]) for way in settings.ways),
    ]


def _row(settings: Settings, operator: Operator, way: Way, root: Path) -> FunnelRow:
    samples = [Sample(operator, way, number) for number in range(1, settings.samples + 1)]
    outcomes = tuple(o for sample in samples if (o := read(sample, root)) is not None)
    levels = {level: _level([o.passed[level] for o in outcomes]) for level in way.levels}
    return FunnelRow(operator.name, way, len(samples), outcomes, levels, _fast(outcomes))


def _level(found: Sequence[bool | None]) -> LevelCount:
    passed, failed = found.count(True), found.count(False)
    total, unknown = len(found), found.count(None)
    at = () if unknown else tuple(pass_at(total, passed, k) for k in range(1, total + 1))
    return LevelCount(passed, failed, unknown, at)


def _fast(outcomes: Sequence[SampleOutcome]) -> Mapping[float, float] | None:
    may_be_right = [o for o in outcomes if o.passed["right"] is not False]
    ratios = [o.ratio for o in may_be_right if o.ratio is not None]
    if not outcomes or len(ratios) < len(may_be_right):
        return None
    return {p: sum(ratio > p for ratio in ratios) / len(outcomes) for p in SPEEDS}


def _all_operators(way: Way, parts: Sequence[FunnelRow]) -> FunnelRow:
    """A way's row over all operators: counts are summed, pass@k is averaged."""
    levels = {}
    for name in way.levels:
        each = [part.levels[name] for part in parts if part.levels[name].total]
        longest = min((len(level.at) for level in each), default=0)
        at = tuple(fmean(level.at[k] for level in each) for k in range(longest))
        passed, failed = sum(e.passed for e in each), sum(e.failed for e in each)
        levels[name] = LevelCount(passed, failed, sum(e.unknown for e in each), at)
    outcomes = tuple(o for part in parts for o in part.outcomes)
    planned = sum(part.planned for part in parts)
    return FunnelRow(ALL, way, planned, outcomes, levels, _fast(outcomes))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
