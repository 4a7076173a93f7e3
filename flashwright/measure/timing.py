"""Interleaved timing: each contestant has one turn per round, and the first one rotates.

A falling clock or other load then affects all contestants alike. Only times of the same rounds
may be compared.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from flashwright.sandbox.process import Ended

SEED_STEP = 64
"""Distance between the seeds of two rounds: more than the calls of a turn."""


@dataclass(frozen=True)
class Rules:
    """How many calls, turns and rounds are timed."""

    calls: int = 4
    """Maximum calls per turn. With more, the clocks would drift within a round."""
    turn_seconds: float = 0.04
    """Approximate limit of a turn: a contestant that takes 20 ms per call gets 2 calls."""
    least: int = 5
    """Minimum rounds, however long they take: with fewer the median says little."""
    most: int = 25
    """Maximum rounds, 100 calls of each: more would move the median less than another run."""
    seconds: float = 1.2
    """Time limit of a cell after its minimum rounds: 72 cells then take minutes."""
    settled: float = 0.002
    """Stop early when the relative standard error of every median is below this."""
    warm: bool = False
    """Whether a turn with a warm L2 follows each turn."""


@dataclass(frozen=True)
class Timing:
    """The time of one contestant: median and spread of its samples, in seconds."""

    median: float
    spread: float
    """Half the interquartile range, relative to the median."""
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """From samples in seconds."""
        ordered = sorted(samples)
        middle, quarter = median(ordered), len(ordered) // 4
        return cls(middle, (ordered[-1 - quarter] - ordered[quarter]) / 2 / middle, len(ordered))

    @property
    def uncertainty(self) -> float:
        """The standard error of the median, relative to it, for normally distributed samples.

        Half the interquartile range is 0.674 standard deviations; the median's standard error is
        1.253 standard deviations over the square root of the number of samples.
        """
        return 1.253 / 0.674 * self.spread / math.sqrt(self.samples)


class TimedProcess(Protocol):
    """Something that can be timed in turns, such as a sandbox."""

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Time this many calls; returns the seconds of each. Raises Ended if it does not answer."""


@dataclass(frozen=True)
class Turn:
    """One finished turn of a contestant."""

    who: str
    round: int
    seed: int
    """Call i had the inputs of seed + i."""
    calls: int


@dataclass
class RoundsResult:
    """The samples of all rounds by contestant, and the contestants that failed."""

    cold: dict[str, list[float]] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, Ended] = field(default_factory=dict)
    """Contestants that ended during the rounds; their samples are dropped."""
    rounds: int = 0


def run_rounds(
    processes: Mapping[str, TimedProcess],
    seed: int,
    rules: Rules | None = None,
    after: Callable[[Turn], None] = lambda turn: None,
    clock: Callable[[], float] = time.monotonic,
) -> RoundsResult:
    """Time all processes; `after` may fetch a turn's outputs before the next turn begins.

    All turns of a round have the same inputs; each round has new ones.
    """
    rules = rules or Rules()
    result = RoundsResult(cold={who: [] for who in processes}, warm={who: [] for who in processes})
    calls: dict[str, int] = {}
    for who, process in processes.items():
        with _failing(result, who):
            calls[who] = _calls(process.turn(1, seed)[0], rules)  # it also wakes the GPU up
    start = clock()
    for number in range(rules.most):
        names = [who for who in processes if who not in result.failed]
        if not names or (number >= rules.least and _settled(result, rules, clock() - start)):
            break
        first = number % len(names)
        for who in names[first:] + names[:first]:
            turn = Turn(who, number, seed + SEED_STEP * (number + 1), calls[who])
            with _failing(result, who):
                result.cold[who] += processes[who].turn(turn.calls, turn.seed)
                after(turn)
                if rules.warm:
                    again = turn.seed + SEED_STEP // 2
                    result.warm[who] += processes[who].turn(turn.calls, again, cold=False)
        result.rounds = number + 1
    return result


@contextlib.contextmanager
def _failing(result: RoundsResult, who: str) -> Iterator[None]:
    """If the contestant ends in this context, record it and drop its samples; the others go on."""
    try:
        yield
    except Ended as error:
        result.failed[who] = error
        result.cold.pop(who, None)
        result.warm.pop(who, None)


def _calls(seconds: float, rules: Rules) -> int:
    """The number of calls per turn, for calls of that length."""
    return max(1, min(rules.calls, int(rules.turn_seconds / seconds)))


def _settled(result: RoundsResult, rules: Rules, seconds: float) -> bool:
    if seconds > rules.seconds:
        return True
    every = [*result.cold.values(), *(result.warm.values() if rules.warm else ())]
    return all(Timing.of(samples).uncertainty < rules.settled for samples in every)
