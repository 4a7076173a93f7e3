"""Rounds of turns: everybody has one turn in each round, and each round begins with another.

So a clock that falls or a neighbour that wakes up meets all alike. Only what was measured in the
same rounds may be compared.
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

STEP = 64
"""Between the seeds of two rounds: more than the calls of a turn."""


@dataclass(frozen=True)
class Rules:
    """How long is measured."""

    calls: int = 4
    """Timed calls of a turn, at most. More would let the clocks drift within a round."""
    turn_seconds: float = 0.04
    """About so long a turn may take: whoever needs 20 ms for a call has 2 of them."""
    least: int = 5
    """Rounds, however long they take: with fewer the median says little."""
    most: int = 25
    """100 calls of each: beyond that the median moves by less than it does from run to run."""
    seconds: float = 1.2
    """For one cell, once it has had its least rounds: 72 cells are then measured in minutes."""
    settled: float = 0.002
    """Rounds stop early when every median is known to this part of itself."""
    warm: bool = False
    """Each turn is followed by one with a warm L2."""


@dataclass(frozen=True)
class Timing:
    """How long one contestant took, in seconds."""

    median: float
    spread: float
    """Half the distance of the quartiles, relative to the median."""
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The figures of some samples."""
        ordered = sorted(samples)
        middle, quarter = median(ordered), len(ordered) // 4
        return cls(middle, (ordered[-1 - quarter] - ordered[quarter]) / 2 / middle, len(ordered))

    @property
    def uncertainty(self) -> float:
        """The median's standard error, relative to it, were the samples drawn from a bell curve.

        Half the distance of its quartiles is 0.674 standard deviations, and the median's error
        1.253 of them over the root of how many there are.
        """
        return 1.253 / 0.674 * self.spread / math.sqrt(self.samples)


class Player(Protocol):
    """Who has turns; a sandbox is one."""

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Seconds of that many calls; Ended where it gives no answer."""


@dataclass(frozen=True)
class Turn:
    """One turn that has been had."""

    who: str
    round: int
    seed: int
    """Call i had the inputs of seed + i."""
    calls: int


@dataclass
class Played:
    """What came of the rounds."""

    cold: dict[str, list[float]] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=dict)
    lost: dict[str, Ended] = field(default_factory=dict)
    """Who ended on the way: its samples are gone, the others' are not."""
    rounds: int = 0


def play(
    players: Mapping[str, Player],
    seed: int,
    rules: Rules | None = None,
    after: Callable[[Turn], None] = lambda turn: None,
    clock: Callable[[], float] = time.monotonic,
) -> Played:
    """Time all players; `after` may look at a turn's outputs before the next one begins.

    In one round everybody gets the same inputs, and in each round others.
    """
    rules = rules or Rules()
    played = Played(cold={who: [] for who in players}, warm={who: [] for who in players})
    calls: dict[str, int] = {}
    for who, player in players.items():
        with _losing(played, who):
            calls[who] = _calls(player.turn(1, seed)[0], rules)  # it also wakes the GPU up
    start = clock()
    for number in range(rules.most):
        names = [who for who in players if who not in played.lost]
        if not names or (number >= rules.least and _enough(played, rules, clock() - start)):
            break
        first = number % len(names)
        for who in names[first:] + names[:first]:
            turn = Turn(who, number, seed + STEP * (number + 1), calls[who])
            with _losing(played, who):
                played.cold[who] += players[who].turn(turn.calls, turn.seed)
                after(turn)
                if rules.warm:
                    again = turn.seed + STEP // 2
                    played.warm[who] += players[who].turn(turn.calls, again, cold=False)
        played.rounds = number + 1
    return played


@contextlib.contextmanager
def _losing(played: Played, who: str) -> Iterator[None]:
    """Whoever ends in here is out, and nobody else is disturbed."""
    try:
        yield
    except Ended as error:
        played.lost[who] = error
        played.cold.pop(who, None)
        played.warm.pop(who, None)


def _calls(seconds: float, rules: Rules) -> int:
    """How many calls of that length a turn has."""
    return max(1, min(rules.calls, int(rules.turn_seconds / seconds)))


def _enough(played: Played, rules: Rules, seconds: float) -> bool:
    if seconds > rules.seconds:
        return True
    every = [*played.cold.values(), *(played.warm.values() if rules.warm else ())]
    return all(Timing.of(samples).uncertainty < rules.settled for samples in every)
