"""Spot checks: outputs of timed calls against fp64. A contestant with wrong output gets no timing.

A contestant cannot know which turns are sampled. One head of every call of a sampled turn is
fetched and one of these outputs is compared. Equal bits for different inputs are a replay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from flashwright.judge import nsa, oracle
from flashwright.measure.timing import Rules, Turn
from flashwright.sandbox.problem import TimedProblem, inputs_of
from flashwright.sandbox.process import Ended
from flashwright.sandbox.tensors import Array, bits
from flashwright.sandbox.timed import sign

TURNS = 2
"""Sampled turns of each contestant within the minimum rounds."""
LATER = 0.1
"""Probability that a later turn is sampled, so that cheating after five rounds is caught too."""

Heads = Mapping[int, Array]
"""O of some heads, by their number."""
Expected = Callable[[TimedProblem, int, int, int, Heads | None, Array | None, float], Array]
"""O of one head in fp64, from the problem, the call's seed, batch, head, the outputs whose signs Q
takes (None: Q is as drawn), the blocks that the call chose, and a factor on the usual limits.
Raises WrongChoice for blocks that may not be chosen."""


def expected(
    problem: TimedProblem,
    seed: int,
    batch: int,
    head: int,
    before: Heads | None = None,
    blocks: Array | None = None,
    slack: float = 1.0,
) -> Array:
    """Draw the inputs of a timed call again and compute one head's attention in fp64 on the GPU."""
    import torch

    from flashwright.judge import oracle_device

    made = inputs_of(problem, seed)
    device = made["Q"].device
    kv_head = head * problem.spec.kv_heads // problem.spec.heads
    heads = heads_of(problem, head)
    one = {"Q": made["Q"][batch : batch + 1, heads.start : heads.stop]}
    if before is not None:
        signs = torch.from_numpy(np.stack([before[h] for h in heads])).to(device)
        one["Q"] = one["Q"].clone()
        sign(torch, one["Q"], one["Q"].clone(), signs[None])
    if blocks is not None:
        one |= {n: made[n][batch : batch + 1, kv_head : kv_head + 1] for n in ("K", "V")}
        one["Idx"] = torch.from_numpy(blocks).to(device)[None, None]
        gates = nsa.GATES.values()
        one |= {n: made[n][batch : batch + 1, :, heads.start : heads.stop] for n in gates}
        out = nsa.attention(torch, problem.spec, one, head - heads.start, slack)
        return out.cpu().numpy()  # type: ignore[no-any-return]
    if problem.sequences:
        parts = list(_each_sequence(problem, made, one["Q"], batch, head))
        return torch.cat(parts).cpu().numpy()  # type: ignore[no-any-return]
    for name in ("K", "V", "Idx"):
        if name in made:
            one[name] = made[name][batch : batch + 1, kv_head : kv_head + 1]
    for name in ("Slopes", "Sink"):
        if name in made:
            one[name] = made[name][head : head + 1]
    answer = oracle_device.attention(torch, problem.spec, one, {"tokens": problem.length})
    found: Array = answer["O"][0, 0].cpu().numpy()
    return found


def _each_sequence(
    problem: TimedProblem, made: Mapping[str, Any], query: Any, batch: int, head: int
) -> Iterator[Any]:
    """O of one head in fp64: of all packed sequences in turn, else of the one at hand."""
    import torch

    from flashwright.judge import oracle_device

    spec, kv_head = problem.spec, head * problem.spec.kv_heads // problem.spec.heads
    first = 0
    for b, (queries, _) in enumerate(problem.sequences):
        if spec.packed:
            one = {"Q": query[:, :, first : first + queries]}
            first += queries
        elif b == batch:
            one = {"Q": query}
        else:
            continue
        for name in ("K", "V"):
            if name in made:
                one[name] = _keys_of(problem, made, name, b, kv_head)[None, None]
            if f"{name}Descale" in made:
                scales = made[f"{name}Descale"]
                one[f"{name}Descale"] = scales[b : b + 1, kv_head : kv_head + 1]
        one |= {n: made[n][head : head + 1] for n in ("Slopes", "Sink") if n in made}
        yield oracle_device.attention(torch, spec.each, one, {})["O"][0, 0]


def _keys_of(
    problem: TimedProblem, made: Mapping[str, Any], name: str, b: int, kv_head: int
) -> Any:
    """(keys, dim) of one sequence and head."""
    import torch

    tensor, many = made[name], problem.sequences[b][1]
    if "Table" not in made:
        first = int(made["StartsK"][b])
        return tensor[0, kv_head, first : first + many]
    size = tensor.shape[2]
    pages = made["Table"][b, : -(-many // size)].long()
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # no index else
    return plain[:, kv_head][pages].flatten(0, 1)[:many].view(tensor.dtype)


def heads_of(problem: TimedProblem, head: int) -> range:
    """The heads whose outputs the answer for one head needs."""
    if problem.spec.branch != "all":
        return range(head, head + 1)
    first = head - head % problem.spec.group
    return range(first, first + problem.spec.group)


class OutputSource(Protocol):
    """A process whose outputs can be fetched."""

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Array:
        """One head of an output, from a call of the last turn or burst."""


@dataclass(frozen=True)
class SampledTurn:
    """One head of the outputs of a sampled turn, by call."""

    seed: int
    outputs: tuple[Array, ...]
    blocks: tuple[Array | None, ...]
    chosen: int
    """The call that is compared."""


@dataclass(frozen=True)
class OutputCheck:
    """The result of the spot checks of one contestant."""

    checked: int = 0
    relative_rms: float | None = None
    """The greatest error."""
    offence: str | None = None
    why: str = ""


@dataclass
class OutputSampler:
    """Samples outputs of one contestant's timed calls and compares them with fp64."""

    source: OutputSource
    problem: TimedProblem
    rules: Rules
    chance: random.Random
    sampled: list[SampledTurn] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec, pick = self.problem.spec, self.chance
        self.rounds = set(pick.sample(range(self.rules.least), min(TURNS, self.rules.least)))
        # The same head in all turns, so that a replayed result has the same bits.
        self.batch, self.head = pick.randrange(self.problem.batch), pick.randrange(spec.heads)

    def sample(self, turn: Turn) -> None:
        """After a turn: fetch its outputs if the turn is to be sampled."""
        later = turn.round >= self.rules.least and self.chance.random() < LATER
        if turn.round not in self.rounds and not later:
            return
        calls = range(turn.calls)
        outputs = tuple(self.source.fetch(call, self.batch, self.head) for call in calls)
        blocks = tuple(self._blocks(call, self.batch, self.head) for call in calls)
        chosen = self.chance.randrange(turn.calls)
        self.sampled.append(SampledTurn(turn.seed, outputs, blocks, chosen))

    def _blocks(self, call: int, batch: int, head: int) -> Array | None:
        """The blocks that a call chose for a head's group, (tokens, top_k)."""
        if "Idx" not in self.problem.outputs:
            return None
        return self.source.fetch(call, batch, head // self.problem.spec.group, "Idx")

    def judge(self, expected: Expected, slack: float = 1.0) -> OutputCheck:
        """After the rounds: compare one output of each sampled turn with fp64."""
        worst = 0.0
        for number, one in enumerate(self.sampled, 1):
            output, blocks = one.outputs[one.chosen], one.blocks[one.chosen]
            call = (one.seed + one.chosen, self.batch, self.head)
            try:
                right = expected(self.problem, *call, None, blocks, slack)
            except nsa.WrongChoice as error:
                return OutputCheck(number, None, *self._offence(output, str(error)))
            result = self._compare(output, right, slack)
            if not result.ok:
                return OutputCheck(number, None, *self._offence(output, result.reason))
            worst = max(worst, result.relative_rms)
        return OutputCheck(len(self.sampled), worst if self.sampled else None)

    def check_burst(self, expected: Expected, calls: int, seed: int, slack: float = 1.0) -> None:
        """After a burst: compare one output, with Q's signs from the one before. Raises Ended."""
        call, batch = self.chance.randrange(1, calls), self.chance.randrange(self.problem.batch)
        head = self.chance.randrange(self.problem.spec.heads)
        heads = heads_of(self.problem, head)
        before = {h: self.source.fetch(call - 1, batch, h) for h in heads}
        output, blocks = self.source.fetch(call, batch, head), self._blocks(call, batch, head)
        try:
            right = expected(self.problem, seed, batch, head, before, blocks, slack)
            reason = self._compare(output, right, slack).reason
        except nsa.WrongChoice as error:
            reason = str(error)
        if reason:
            text = f"call {call} of a burst that our own clock timed is wrong: {reason}"
            raise Ended("wrong", text)

    def _compare(self, output: Array, right: Array, slack: float) -> oracle.Comparison:
        spec = self.problem.spec
        usual = spec.tolerance or oracle.RMS_LIMIT * oracle.ROUNDOFF[spec.dtype]
        tolerance = spec.tolerance if slack == 1 else slack * usual
        return oracle.compare(output, right, spec.dtype, tolerance)

    def _offence(self, output: Array, reason: str) -> tuple[str, str]:
        every = [o for one in self.sampled for o in one.outputs if o is not output]
        if any(_same_bits(output, other) for other in every) and np.isfinite(output).all():
            text = "a timed call gave, bit for bit, the output of another with other inputs"
            return "replay", text
        return "wrong", f"the output of a timed call is wrong: {reason}"


def _same_bits(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.array_equal(bits(one), bits(other))
