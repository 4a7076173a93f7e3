"""The outputs of timed calls, held against fp64: what is fast and wrong has no number.

A contestant does not know which of its turns are looked at. One head of every call of such a turn
is fetched, and one of them compared; equal bits of two calls with other inputs are a replay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flashwright.judge import oracle
from flashwright.measure.timing import Rules, Turn
from flashwright.sandbox.problem import TimedProblem, inputs_of
from flashwright.sandbox.process import Ended
from flashwright.sandbox.tensors import Array, bits
from flashwright.sandbox.timed import sign

TURNS = 2
"""Looked at among the least rounds, of each contestant."""
LATER = 0.1
"""The chance of each later turn: nobody is safe to be honest for five rounds only."""

Expected = Callable[[TimedProblem, int, int, int, Array | None], Array]
"""O of one head in fp64: of a problem, the call's seed, the batch, the head, and Q's signs where
they are those of another output."""


def expected(
    problem: TimedProblem, seed: int, batch: int, head: int, signs: Array | None = None
) -> Array:
    """The inputs of a timed call made again, and attention of one head of them, on the GPU."""
    import torch

    from flashwright.judge import oracle_device

    made = inputs_of(problem, seed)
    kv_head = head * problem.spec.kv_heads // problem.spec.heads
    one = {"Q": made["Q"][batch : batch + 1, head : head + 1]}
    if signs is not None:
        before = torch.from_numpy(signs).to(one["Q"].device)
        one["Q"] = one["Q"].clone()
        sign(torch, one["Q"], one["Q"].clone(), before)
    for name in ("K", "V", "Idx"):
        if name in made:
            one[name] = made[name][batch : batch + 1, kv_head : kv_head + 1]
    for name in ("Slopes", "Sink"):
        if name in made:
            one[name] = made[name][head : head + 1]
    answer = oracle_device.attention(torch, problem.spec, one, {"tokens": problem.length})
    found: Array = answer["O"][0, 0].cpu().numpy()
    return found


class Fetching(Protocol):
    """Whose outputs can be had."""

    def fetch(self, call: int, batch: int, head: int) -> Array:
        """O of one head of a call of the last turn or burst."""


@dataclass(frozen=True)
class Seen:
    """One head of the outputs of one turn, call by call."""

    seed: int
    outputs: tuple[Array, ...]
    chosen: int
    """The call that is compared."""


@dataclass(frozen=True)
class Found:
    """What the outputs of a contestant come to."""

    checked: int = 0
    relative_rms: float | None = None
    """The greatest error."""
    offence: str | None = None
    why: str = ""


@dataclass
class Watch:
    """Whose turns are looked at, and what was seen of one contestant."""

    player: Fetching
    problem: TimedProblem
    rules: Rules
    chance: random.Random
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec, pick = self.problem.spec, self.chance
        self.rounds = set(pick.sample(range(self.rules.least), min(TURNS, self.rules.least)))
        # The same head in all turns: a result that is given again is then seen to be the same.
        self.batch, self.head = pick.randrange(self.problem.batch), pick.randrange(spec.heads)

    def look(self, turn: Turn) -> None:
        """After a turn: fetch its outputs, if it is one of those."""
        later = turn.round >= self.rules.least and self.chance.random() < LATER
        if turn.round not in self.rounds and not later:
            return
        calls = range(turn.calls)
        outputs = tuple(self.player.fetch(call, self.batch, self.head) for call in calls)
        self.seen.append(Seen(turn.seed, outputs, self.chance.randrange(turn.calls)))

    def judge(self, expected: Expected, slack: float = 1.0) -> Found:
        """After the rounds: compare one output of each turn that was looked at."""
        worst = 0.0
        for number, one in enumerate(self.seen, 1):
            output = one.outputs[one.chosen]
            right = expected(self.problem, one.seed + one.chosen, self.batch, self.head, None)
            result = self._compare(output, right, slack)
            if not result.ok:
                return Found(number, None, *self._offence(output, result.reason))
            worst = max(worst, result.relative_rms)
        return Found(len(self.seen), worst if self.seen else None)

    def link(self, expected: Expected, calls: int, seed: int, slack: float = 1.0) -> None:
        """After a burst: one of its outputs, where Q has the signs of the one before; or Ended."""
        call, batch = self.chance.randrange(1, calls), self.chance.randrange(self.problem.batch)
        head = self.chance.randrange(self.problem.spec.heads)
        signs, output = (self.player.fetch(n, batch, head) for n in (call - 1, call))
        result = self._compare(output, expected(self.problem, seed, batch, head, signs), slack)
        if not result.ok:
            text = f"call {call} of a burst that our own clock timed is wrong: {result.reason}"
            raise Ended("wrong", text)

    def _compare(self, output: Array, right: Array, slack: float) -> oracle.Comparison:
        spec = self.problem.spec
        usual = spec.tolerance or oracle.RMS_LIMIT * oracle.ROUNDOFF[spec.dtype]
        tolerance = spec.tolerance if slack == 1 else slack * usual
        return oracle.compare(output, right, spec.dtype, tolerance)

    def _offence(self, output: Array, reason: str) -> tuple[str, str]:
        every = [o for one in self.seen for o in one.outputs if o is not output]
        if any(_same(output, other) for other in every) and np.isfinite(output).all():
            text = "a timed call gave, bit for bit, the output of another with other inputs"
            return "replay", text
        return "wrong", f"the output of a timed call is wrong: {reason}"


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.array_equal(bits(one), bits(other))
