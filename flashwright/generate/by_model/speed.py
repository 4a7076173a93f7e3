"""The speed of a run's kernel: timed, compared with others, and in words for a prompt.

Only where there is a GPU; where there is none, `cannot` says why, and nothing is claimed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashwright.author.builtin.author import workload
from flashwright.author.builtin.cost import Cost, estimate
from flashwright.author.builtin.retile import tiling_of
from flashwright.build import driver
from flashwright.build.driver import Card
from flashwright.build.package import OWN, RECORD
from flashwright.generate.state import Run
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import kernels, race
from flashwright.measure.contest import Contestant
from flashwright.measure.peers import registry
from flashwright.measure.race import RaceFunction, RaceResult
from flashwright.program.program import Program
from flashwright.spec import AttentionSpec

KERNEL, BEFORE = "this kernel", "the kernel before"
BUILTIN = "the built-in author's kernel"
LONG = ("naive", "flex")
"""Peers that take long to get ready, or to run; where others do the operator, never the best."""
_GOAL = re.compile(r"(\d+(?:\.\d+)?)(?::(\S+))?")


def _peers() -> list[registry.Peer]:
    return [peer for peer in registry.choose(None) if peer.key not in LONG]


def card_here() -> Card:
    """The GPU here; Failed with FW851 where there is none, or no PyTorch to time kernels with."""
    from flashwright.judge.judge import need_torch

    card = driver.cards()[0]
    need_torch()
    return card


@dataclass(frozen=True)
class SpeedGoal:
    """How fast a kernel is to be: so many times as fast as the built-in author's, or a peer."""

    factor: float
    than: str = ""
    """A peer's key; empty: the built-in author."""

    @classmethod
    def parse(cls, text: str) -> SpeedGoal:
        """From `0.9` or `0.8:flash`; ValueError with the reason where it is neither."""
        found = _GOAL.fullmatch(text.strip())
        if found is None or not float(found[1]) > 0:
            raise ValueError(f"{text!r} is not X or X:PEER, as in 0.9 or 0.8:flash")
        if found[2]:
            registry.choose([found[2]])  # whether there is such a one
        return cls(float(found[1]), found[2] or "")

    @property
    def rival(self) -> str:
        """The name of who it is about, as races call it."""
        return registry.choose([self.than])[0].name if self.than else BUILTIN


@dataclass(frozen=True)
class Stopwatch:
    """What kernels are timed with; tests bring their own."""

    race: RaceFunction = race.race
    make: Callable[..., kernels.KernelBuild] = kernels.make
    peers: Callable[[], Sequence[registry.Peer]] = _peers
    card: Callable[[], Card] = card_here

    def cannot(self, run: Run) -> Diagnostic | None:
        """Why the kernel of a run cannot be timed here; None where it can."""
        if run.spec.reference is not None:
            text = "a spec with a reference of its own has no problems that are timed"
            return Diagnostic("FW904", text)
        try:
            card = self.card()
        except Failed as failed:
            return failed.diagnostics[0]
        if not card.takes(run.gpu.arch):
            text = f"a kernel for {run.gpu.title} cannot run on {card.name} ({card.arch})"
            return Diagnostic("FW851", text)
        return None

    def builtin(self, run: Run, folder: Path) -> Contestant:
        """The built-in author's kernel for the same operator, made in `folder` where it is not yet;
        Failed where it cannot be had."""
        if not (folder / RECORD).is_file():
            made = self.make(run.spec, run.gpu.name, self.card())
            if made.why:
                raise Failed(Diagnostic("FW904", f"{BUILTIN} cannot be had: {made.why}"))
            kernels.put(made, folder)
        return race.package(BUILTIN, folder)

    def rival(self, goal: SpeedGoal, run: Run, folder: Path) -> Contestant:
        """The contestant that a goal compares with."""
        if not goal.than:
            return self.builtin(run, folder)
        return race.peer(registry.choose([goal.than])[0])

    def against(self, run: Run, rival: Contestant) -> RaceResult:
        """The kernel of a run beside another."""
        return self.race(run.spec, [race.package(KERNEL, run.folder), rival])

    def twice(self, run: Run, other: Run) -> list[RaceResult]:
        """A run's kernel beside the one that it wants to replace. Where it is faster, once more,
        in other processes and the other order: memory that happens to lie well is no gain."""
        both = [race.package(KERNEL, run.folder), race.package(BEFORE, other.folder)]
        first = self.race(run.spec, both)
        if first.lost or not first.faster(KERNEL, BEFORE):
            return [first]
        return [first, self.race(run.spec, both[::-1])]


@dataclass(frozen=True)
class KernelSpeed:
    """What is known of a kernel's speed."""

    times: Mapping[int, race.RaceTime] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)
    """How many times as fast as each it is."""

    @classmethod
    def of(cls, raced: RaceResult) -> KernelSpeed:
        """From a race in which KERNEL took part."""
        if KERNEL not in raced.times:
            return cls()
        names = [who for who in raced.times if who != KERNEL]
        return cls(raced.times[KERNEL], {who: raced.ratio(who, KERNEL) for who in names})

    def after(self, raced: RaceResult) -> KernelSpeed:
        """Of the kernel that won such a race against this one."""
        gain = raced.ratio(BEFORE, KERNEL)
        return KernelSpeed(raced.times[KERNEL], {who: r * gain for who, r in self.others.items()})


def measured(
    stopwatch: Stopwatch, run: Run, folder: Path, goal: SpeedGoal | None = None
) -> RaceResult:
    """The kernel of a run beside the built-in author's, all peers at hand, and who a goal names."""
    contestants = [race.package(KERNEL, run.folder)]
    with contextlib.suppress(Failed):  # then it has one rival less
        contestants.append(stopwatch.builtin(run, folder))
    contestants += [race.peer(peer) for peer in stopwatch.peers()]
    if goal is not None and goal.rival not in {one.name for one in contestants}:
        contestants.append(stopwatch.rival(goal, run, folder))
    raced = stopwatch.race(run.spec, contestants)
    if KERNEL in raced.lost:
        raise Failed(Diagnostic("FW852", f"the kernel cannot be timed: {raced.lost[KERNEL]}"))
    return raced


# --- in words ---------------------------------------------------------------------------------


def in_words(speed: KernelSpeed, run: Run) -> str:
    """What a model is told of a kernel that is to become faster."""
    lines = [f"- {line}" for line in (*_times(speed), *_taken(run), *_bound(run))]
    return "\n".join(lines)


def _times(speed: KernelSpeed) -> list[str]:
    told = [
        f"{figure.seconds * 1e6:.1f} us with {length} keys: {figure.tflops:.0f} TFLOPS"
        for length, figure in speed.times.items()
    ]
    ordered = sorted(speed.others.items(), key=lambda one: one[1])
    return [*told, *(f"{ratio:.2f} times as fast as {who}" for who, ratio in ordered)]


def _taken(run: Run) -> list[str]:
    """What the compiled kernel takes of an SM."""
    built, translation, gpu = run.built, run.translation, run.gpu
    if built is None or translation is None:
        return []
    plan = translation.plan
    shared = plan.shared + built.shared
    blocks = min(
        gpu.shared_per_sm // (shared + gpu.shared_reserved),
        gpu.blocks_by_registers(built.registers, plan.threads // 32),
        gpu.threads_per_sm // plan.threads,
        gpu.max_blocks_per_sm,
    )
    return [
        f"{built.registers} registers a thread, {shared / 1024:.1f} KB of shared memory and "
        f"{plan.threads} threads a block: an SM holds {blocks} at a time"
    ]


def _bound(run: Run) -> list[str]:
    """What the cost model says is the narrowest, for a program that it can price."""
    program = run.programs.get(OWN)
    cost = estimated(program, run.spec, run.gpu) if program is not None else None
    if cost is None:
        return []
    return [
        f"estimated cycles of an SM for one tile of keys: tensor cores {cost.mma_cycles:.0f}, "
        f"softmax {cost.softmax_cycles:.0f}, shared memory {cost.shared_cycles:.0f}, "
        f"L2 {cost.load_cycles:.0f}, waiting for copies {cost.stall_cycles:.0f}; "
        f"the narrowest is {cost.limit}"
    ]


def estimated(program: Program, spec: AttentionSpec, gpu: Gpu) -> Cost | None:
    """What a program should cost; None where the model cannot say, as its tiles are not BM x BN."""
    tiling = tiling_of(program)
    if tiling is None:
        return None
    try:
        return estimate(workload(spec), tiling, gpu)
    except (ValueError, ZeroDivisionError):  # it does not fit as the built-in author would have it
        return None
