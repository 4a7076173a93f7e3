"""A benchmark without a GPU: contestants that do as they are told, and a clock that they move."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashwright.build.driver import Card
from flashwright.judge.nsa import WrongChoice
from flashwright.judge.offences import offence
from flashwright.judge.oracle import Comparison
from flashwright.judge.verdict import Case, Verdict
from flashwright.measure.bench import BenchProgress, ContestDependencies
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell, Shape, cells
from flashwright.measure.kernels import KernelBuild
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import OURS, RunRecord
from flashwright.measure.session import SessionDependencies
from flashwright.measure.spot import Heads
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Burst, Ended
from flashwright.sandbox.tensors import Array
from flashwright.spec import AttentionSpec

H200 = Card(0, "NVIDIA H200", (9, 0))
MS = 1e-3


def right(
    problem: TimedProblem,
    seed: int,
    batch: int,
    head: int,
    before: Heads | None = None,
    blocks: Array | None = None,
    slack: float = 1.0,
) -> Array:
    """Stands for attention in fp64: numbers that nobody guesses. Only the first block may be
    chosen."""
    if blocks is not None and blocks.any():
        raise WrongChoice("query 0 reads blocks that are lighter than others")
    rng = np.random.default_rng([seed, batch, head])
    drawn = rng.standard_normal((8, problem.spec.value_dim))
    return drawn if before is None else np.roll(np.copysign(drawn, before[head]), 1, axis=0)


@dataclass
class Behaviour:
    """How a contestant behaves."""

    seconds: float | Callable[[TimedProblem, bool], float] = MS
    """Of a call, for the problem and whether the L2 is cold."""
    wall: float = 0.0
    """More of it by the wall clock."""
    linked: bool = True
    """Whether a call of a burst needs the one before."""
    output: Callable[[Array, int], Array] = lambda exact, call: exact
    """What becomes of the right answer to a call."""
    block: int = 0
    """The block that it chooses, where it chooses any."""
    ends: Callable[[str, Cell | None, int], str | None] = lambda what, problem, times: None
    """An offence, where it ends: what it is asked, for which problem, how often so far."""
    unable: str = ""
    unable_at: Callable[[TimedProblem], str] = lambda problem: ""


@dataclass
class World:
    """All contestants, what they were asked, and the time that has passed."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    time: float = 0.0
    interrupt: int | None = None
    """Ctrl-C at this many events."""

    def make(self, candidate: Candidate, spec: AttentionSpec) -> FakeProcess:
        return FakeProcess(self, candidate, spec)

    def event(self, *what: Any) -> None:
        self.log.append(what)
        if self.interrupt is not None and len(self.log) > self.interrupt:
            raise KeyboardInterrupt

    def asked(self, *beginning: Any) -> list[tuple[Any, ...]]:
        return [e for e in self.log if e[: len(beginning)] == beginning]

    def dependencies(self) -> ContestDependencies:
        return ContestDependencies(
            make=self.make,
            expected=right,
            linking=lambda problem: 0.0,
            clock_mhz=lambda: 1980.0,
            chance=random.Random(7),
            clock=lambda: self.time,
        )


class FakeProcess:
    """A sandbox without a process."""

    def __init__(self, world: World, candidate: Candidate, spec: AttentionSpec) -> None:
        self.world, self.candidate, self.spec = world, candidate, spec
        ours = candidate.kind == "package" and candidate.title not in world.behaviours
        self.name = OURS if ours else candidate.title
        self.does = world.behaviours.setdefault(self.name, Behaviour())
        self.problem: TimedProblem | None = None
        self.seed, self.in_burst = 0, False
        self.alive = False

    def _event(self, what: str, *more: Any) -> None:
        assert self.alive or what == "start", f"{self.name} is asked to {what} without a process"
        self.world.event(what, self.name, *more)
        times = len(self.world.asked(what, self.name))
        offence = self.does.ends(what, self.problem, times)  # type: ignore[arg-type]
        if offence:
            self.alive = False
            raise Ended(offence, f"at {what}")

    def start(self) -> None:
        self.alive = True
        self._event("start")
        if self.does.unable:
            raise Unable(self.does.unable)

    def switch(self, candidate: Candidate, spec: AttentionSpec) -> None:
        self.candidate, self.spec = candidate, spec
        self._event("switch")
        if self.does.unable:
            raise Unable(self.does.unable)

    def prepare(self, problem: TimedProblem) -> None:
        assert problem.spec == self.spec
        self.problem = problem
        self._event("prepare", problem.length)
        if why := self.does.unable_at(problem):
            raise Unable(why)

    def _seconds(self, cold: bool) -> float:
        assert self.problem is not None
        does = self.does.seconds
        return does if isinstance(does, float) else does(self.problem, cold)

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        self.seed, self.in_burst = seed, False
        self._event("turn", seed, calls, cold)
        one = self._seconds(cold)
        self.world.time += (calls + 1) * one
        return [one * (1 + 0.001 * n) for n in range(calls)]

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Array:
        assert self.problem is not None
        self._event("fetch", call, batch, head)
        if name == "Idx":
            return np.full((8, self.problem.spec.top_k), self.does.block, np.int32)
        return self._output(call, batch, head).astype(np.float32)

    def _output(self, call: int, batch: int, head: int) -> Array:
        """In a burst each call has the signs of the one before."""
        assert self.problem is not None
        signs, seed = None, self.seed + call
        if self.in_burst:
            seed = self.seed
            linked = call and self.does.linked
            signs = {head: self._output(call - 1, batch, head)} if linked else None
        return self.does.output(right(self.problem, seed, batch, head, signs), call)

    def burst(self, calls: int, seed: int) -> Burst:
        self.seed, self.in_burst = seed, True
        self._event("burst", calls)
        return Burst(calls, calls * (self._seconds(True) + self.does.wall))

    def close(self) -> None:
        self.alive = False


# --- what a run is made of --------------------------------------------------------------------


def small(*lengths: int, variants: Sequence[str] = ("mha",), **more: Any) -> list[Cell]:
    """A little grid: one kernel, causal, unless more are asked for."""
    shape = Shape(variants, (64,), lengths or (512, 1024), (True,), **more)
    return list(cells(shape))


def peer(name: str, **more: Any) -> Peer:
    return Peer(
        name, name, Candidate("python", "somewhere", name, factory=True, title=name), **more
    )


def contestants(*peers: str, kernel: str = "mha d64 causal") -> list[Contestant]:
    ours = {kernel: Candidate("package", "folder", title=kernel)}
    others = [Contestant(name, peer(name).candidate) for name in peers]
    return [Contestant(OURS, ours, watched=True), *others]


def run_record(wanted: Sequence[Cell], *peers: str, **more: Any) -> RunRecord:
    told: dict[str, Any] = {
        "id": "run",
        "started": "2026-01-01T00:00:00+00:00",
        "title": "grid",
        "card": H200.name,
        "arch": H200.arch,
        "translated_for": "a100",
        "layout": "bshd",
        "contestants": (OURS, *peers),
        "cells": tuple(cell.name for cell in wanted),
        "environment": {"torch": "2.11"},
        "matmul": {"bf16": 790.0, "fp16": 790.0},
        "copy_gbs": 4000.0,
        "settings": {"dtype": "bf16", "l2": "cold"},
        "seed": 5,
    }
    return RunRecord(**{**told, **more})


class Quiet:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.cells: list[BenchProgress] = []
        self.warnings: list[str] = []

    def phase(self, title: str) -> None:
        self.phases.append(title)

    def progress(self, done: int, total: int, text: str) -> None:
        pass

    def cell(self, step: BenchProgress) -> None:
        self.cells.append(step)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def made(spec: AttentionSpec, tl: str = "// TL\n", gpu: str = "a100") -> KernelBuild:
    """A kernel that nobody has compiled."""
    files: dict[str, str | bytes] = {
        "code.tl": tl,
        "spec.toml": "",
        "kernel.cu": "// CUDA\n",
        "kernel.map.json": '{"lines": []}',
        "launch.json": "{}",
        "kernel.cubin": f"{spec.variant} {spec.head_dim}".encode(),
        "build.json": "{}",
    }
    seconds = {"author": 0.5, "translate": 0.25, "build": 20.0}
    return KernelBuild(spec, gpu, files, "because", {"registers": 200}, seconds)


def verdict(*offences: str) -> Verdict:
    """What the judge would say."""
    spec = AttentionSpec.make(variant="any")
    good = Comparison(ok=True, reason="", relative_rms=1e-3)
    cases = (Case({"q_len": 5, "kv_len": 7}, "normal", "O", good, 2e-3),)
    found = tuple(offence(name, "seen") for name in offences)
    return Verdict("any", H200.name, H200.arch, spec, 3, cases, offences=found)


@dataclass
class Workshop:
    """Makes and judges kernels for a session, and counts."""

    world: World
    offences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    tl: str = "// TL\n"
    judged: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"torch": "2.11", "driver": "580"})

    def make(self, wanted: Sequence[AttentionSpec], gpu: str, *more: Any) -> Iterator[KernelBuild]:
        for spec in wanted:
            self.world.event("make", spec.variant)
            one = made(spec, self.tl, gpu)
            yield replace(one, why=self.why[one.name]) if one.name in self.why else one

    def judge(self, candidate: Candidate, spec: AttentionSpec) -> Any:
        self.world.event("judge", spec.variant)
        self.judged.append(candidate.title)
        return verdict(*self.offences.get(candidate.title, ()))

    def ceilings(self, dtypes: Any) -> Ceilings:
        self.world.event("ceilings")
        return Ceilings(dict.fromkeys(dtypes, 790.0), 4000.0)

    def dependencies(self) -> SessionDependencies:
        return SessionDependencies(
            contest=self.world.dependencies(),
            make=self.make,
            judge=self.judge,
            environment=lambda peers: dict(self.environment),
            clocks=lambda: {"sm_mhz": 1980.0},
            ceilings=self.ceilings,
            now=lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        )
