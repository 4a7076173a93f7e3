"""A benchmark run: all contestants in turns, cell by cell; each result is written at once."""

from __future__ import annotations

import contextlib
import math
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashwright import gpu as gpus
from flashwright.gpu import Gpu
from flashwright.judge import nsa
from flashwright.measure import machine, spot
from flashwright.measure.ceilings import Ceilings, ceiling_of
from flashwright.measure.contest import Contestant, ContestantRunner, Missing, ProcessFactory
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.records import AbsentRecord, NumberRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.sequences import Pair, places_of, splits_of
from flashwright.measure.timing import RoundsResult, Rules, Timing, run_rounds
from flashwright.measure.work import Work, bound_by_memory
from flashwright.sandbox import timed
from flashwright.sandbox.candidate import Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

BURST = (3, 10, 0.2)
"""The calls of a burst: minimum, maximum, and the seconds that they should take together."""
HIDDEN_FACTOR, HIDDEN_SECONDS = 1.2, 250e-6
"""By the wall clock a call may take this many times its event time, plus this many seconds: in
back-to-back calls the GPU's clock is lower, and a launch from Python takes tens of microseconds."""
LAUNCHES = 10
"""How many times as many seconds a call of NSA as a whole may take: so many kernels are launched
from Python, one after the other."""
TRIES = 5  # of a burst: load from other processes on the host must not look like hidden work

CellRecord = NumberRecord | AbsentRecord


@dataclass(frozen=True)
class ContestDependencies:
    """The injected dependencies of a contest; tests replace them."""

    make: ProcessFactory = Sandbox
    expected: spot.Expected = spot.expected
    clock_mhz: Callable[[], float | None] = machine.clock_mhz
    linking: Callable[[TimedProblem], float] = timed.linking
    chance: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class BenchProgress:
    """The progress of a run, reported before and after each cell."""

    done: int
    total: int
    cell: str
    lines: tuple[CellRecord, ...] = ()
    """The records of the cell that was just measured; empty before it."""
    left: float | None = None
    """Estimated seconds to the end, from the mean time of the cells so far."""
    took: float | None = None
    """Seconds that the cell just measured took."""


def bench(
    run: RunRecord,
    cells: Sequence[Cell],
    contestants: Sequence[Contestant],
    journal: Journal,
    rules: Rules | None = None,
    dependencies: ContestDependencies | None = None,
    step: Callable[[BenchProgress], None] = lambda step: None,
) -> None:
    """Measure the cells that the journal does not have yet, and append their records to it.

    A KeyboardInterrupt propagates; the journal keeps the cells measured before it.
    """
    known = Results.of(journal.records)
    wanted = [cell for cell in cells if not known.complete(cell.name)]
    contest = Contest(run, contestants, rules or Rules(), dependencies or ContestDependencies())
    clock, done = contest.dependencies.clock, len(cells) - len(wanted)
    start = clock()
    try:
        for number, cell in enumerate(wanted):
            left = (clock() - start) / number * (len(wanted) - number) if number else None
            step(BenchProgress(done + number, len(cells), cell.name, left=left))
            begun = clock()
            lines = tuple(contest.measure(cell))
            for line in lines:
                journal.add(line)
            left = (clock() - start) / (number + 1) * (len(wanted) - number - 1)
            took = clock() - begun
            step(BenchProgress(done + number + 1, len(cells), cell.name, lines, left, took))
    finally:
        contest.close()


class Contest:
    """The contestants of a run and their processes; `measure` times all of them in one cell."""

    def __init__(
        self,
        run: RunRecord,
        contestants: Sequence[Contestant],
        rules: Rules,
        dependencies: ContestDependencies,
    ) -> None:
        self.run, self.rules, self.dependencies = run, rules, dependencies
        self.runners = {c.name: ContestantRunner(c, dependencies.make) for c in contestants}
        self.measured = Ceilings(run.matmul, run.copy_gbs)

    def close(self) -> None:
        """End the processes of all contestants."""
        for runner in self.runners.values():
            runner.close()

    def measure(self, cell: Cell) -> Iterator[CellRecord]:
        """Measure one cell: yields a record for each contestant, in their order."""
        seed = cell_seed(self.run.seed, cell)
        problem = problem_of(cell, self.run.layout, seed, _gpu_of(self.run))
        work = cell.work(problem.extra.get("Idx"))
        absent = self._prepare(cell, problem)
        ready = {who: runner for who, runner in self.runners.items() if who not in absent}
        samplers = {
            who: spot.OutputSampler(runner, problem, self.rules, self.dependencies.chance)
            for who, runner in ready.items()
        }
        timed = run_rounds(
            ready,
            seed,
            self.rules,
            lambda turn: samplers[turn.who].sample(turn),
            self.dependencies.clock,
        )
        mhz = self.dependencies.clock_mhz() if timed.rounds else None
        for who in self.runners:
            try:
                if who not in absent:
                    yield self._number(cell, seed, work, timed, samplers[who], who, mhz)
                    continue
            except Ended as error:
                absent[who] = self._absent(cell, who, error.message, error.offence)
            yield absent[who]

    def _prepare(self, cell: Cell, problem: TimedProblem) -> dict[str, AbsentRecord]:
        """Prepare all contestants in parallel; returns a record for each one that fails."""
        begun = {who: runner.prepare(cell.kernel, problem) for who, runner in self.runners.items()}
        absent = {}
        for who, future in begun.items():
            try:
                future.result()
            except Unable as error:
                missing = self.runners[who].contestant.candidate(cell.kernel)
                offence = missing.offence if isinstance(missing, Missing) else None
                absent[who] = self._absent(cell, who, str(error), offence)
            except Ended as error:
                absent[who] = self._absent(cell, who, error.message, error.offence)
        return absent

    def _absent(self, cell: Cell, who: str, why: str, offence: str | None) -> AbsentRecord:
        return AbsentRecord(run=self.run.id, cell=cell.name, who=who, why=why, offence=offence)

    # --- a contestant's figures ---------------------------------------------------------------

    def _number(
        self,
        cell: Cell,
        seed: int,
        work: Work,
        timed: RoundsResult,
        sampler: spot.OutputSampler,
        who: str,
        mhz: float | None,
    ) -> NumberRecord:
        if who in timed.failed:
            raise timed.failed[who]
        runner = self.runners[who]
        timing = Timing.of(timed.cold[who])
        self._refuse_speed(cell, work, timing.median)
        found = sampler.judge(self.dependencies.expected, runner.contestant.slack)
        if found.offence is not None:
            raise Ended(found.offence, found.why)
        wall = None
        if runner.contestant.watched:
            wall = self._wall_seconds(sampler, runner, timing.median)
        rate, warm = cell.tflops(timing.median, work), timed.warm.get(who)
        ceiling = self.measured.matmul.get(cell.spec.dtype)
        return NumberRecord(
            run=self.run.id,
            cell=cell.name,
            kernel=cell.kernel,
            length=cell.length,
            batch=cell.batch,
            who=who,
            seconds=timing.median,
            spread=timing.spread,
            samples=timing.samples,
            wall_seconds=wall,
            warm_seconds=Timing.of(warm).median if warm else None,
            tflops=rate,
            share=rate / ceiling if ceiling else None,
            gbs=gbs_of(cell.spec, work, timing.median, self.measured),
            checked=found.checked,
            relative_rms=found.relative_rms,
            seed=seed,
            clock_mhz=mhz,
        )

    def _wall_seconds(
        self, sampler: spot.OutputSampler, runner: ContestantRunner, seconds: float
    ) -> float:
        """Seconds per call by the wall clock; raises Ended if they contradict the event times."""
        least, most, about = BURST
        wanted = max(least, min(most, math.ceil(about / seconds)))
        launches = LAUNCHES if sampler.problem.spec.branch == "all" else 1
        limit = HIDDEN_FACTOR * seconds + HIDDEN_SECONDS * launches
        beside, best = self.dependencies.linking(sampler.problem), math.inf
        for _ in range(TRIES):
            seed = self.dependencies.chance.getrandbits(30)
            burst = runner.burst(wanted, seed)
            sampler.check_burst(
                self.dependencies.expected, burst.calls, seed, runner.contestant.slack
            )
            best = min(best, max(0.0, burst.seconds / burst.calls - beside))
            if best <= limit:
                return best
        text = f"a call takes {best * 1e6:.4g} us by our clock and {seconds * 1e6:.4g} us by events"
        raise Ended("hidden_work", f"{text}: work runs outside the events")

    def _refuse_speed(self, cell: Cell, work: Work, seconds: float) -> None:
        """Raises Ended if a time is below the roofline."""
        ceiling = ceiling_of(self.run.card, cell.spec, self.measured)
        if ceiling is None or seconds >= ceiling.least_seconds(work):
            return
        least = ceiling.least_seconds(work)
        text = f"{seconds * 1e6:.3g} us, below the roofline of {least * 1e6:.3g} us"
        raise Ended("too_fast", f"{text} ({ceiling.source})")


def gbs_of(spec: AttentionSpec, work: Work, seconds: float, measured: Ceilings) -> float | None:
    """The bandwidth in GB/s of a decode, or if the cell is memory-bound by the measured ceilings;
    else None."""
    bound = bound_by_memory(work, measured.matmul.get(spec.dtype), measured.copy_gbs)
    return work.bytes / seconds / 1e9 if bound or spec.decode is not None else None


# --- problems ---------------------------------------------------------------------------------


def cell_seed(seed: int, cell: Cell) -> int:
    """The seed of a cell's inputs: different for each cell, equal in runs with the same seed."""
    return zlib.crc32(f"{seed} {cell.name}".encode()) >> 1


def problem_of(cell: Cell, layout: str, seed: int, gpu: Gpu | None = None) -> TimedProblem:
    """The problem that the contestants solve in a cell. A decode is split as fits the GPU."""
    if cell.sequences is not None:
        return _of_sequences(cell, cell.sequences.pairs, layout, seed, gpu)
    compressed = cell.spec.branch == "compressed"
    return TimedProblem(
        cell.spec,
        cell.batch,
        cell.length,
        layout,
        _extra(cell, seed),
        cell.kv_len if compressed else None,
        {"tokens": cell.length} if compressed else {},
    )


def _of_sequences(
    cell: Cell, pairs: tuple[Pair, ...], layout: str, seed: int, gpu: Gpu | None
) -> TimedProblem:
    spec = cell.spec
    batch, length = (1, cell.length) if spec.packed else (cell.batch, pairs[0][0])
    split = spec.decode is not None and not spec.unsplit and gpu is not None
    return TimedProblem(
        spec,
        batch,
        length,
        layout,
        {**_extra(cell, seed), **places_of(spec, pairs, seed)},
        dims={"splits": splits_of(spec, pairs, gpu)} if split and gpu is not None else {},
        sequences=pairs,
    )


def _gpu_of(run: RunRecord) -> Gpu | None:
    """The GPU that a run is on; None if this version does not know it."""
    for name in (run.card, run.translated_for):
        with contextlib.suppress(gpus.UnknownGpu):
            return gpus.find(name)
    return None


def _extra(cell: Cell, seed: int) -> Mapping[str, Any]:
    """Slopes, Sink, Idx and gates, as far as the spec has them; they are the same in every call."""
    spec = cell.spec
    if spec.branch == "all":
        return dict(gates_of(spec, cell.batch, cell.length, seed))
    if not (spec.alibi or spec.sink or spec.branch == "selected"):
        return {}
    from flashwright.judge.inputs import make_inputs

    # These do not depend on the width of Q and K, which would take long to draw.
    small = {"head_dim": 8, "v_dim": 8, "scale": None, "kv_dtype": None}
    narrow = spec.each.model_copy(update=small)
    dims = {"batch": cell.batch, "q_len": cell.length, "kv_len": cell.kv_len}
    if spec.batch is not None:  # Slopes and Sink have heads alone
        dims = {"batch": 1, "q_len": 1, "kv_len": 1}
    made = make_inputs(narrow, dims, seed)
    return {name: array for name, array in made.items() if name not in ("Q", "K", "V")}


def gates_of(spec: AttentionSpec, batch: int, tokens: int, seed: int) -> Iterator[tuple[str, Any]]:
    """NSA's gates, (batch, tokens, heads): numbers in [0, 1) that fp16 and bf16 hold exactly."""
    rng = np.random.default_rng(seed)
    for name in nsa.GATES.values():
        drawn = rng.integers(0, 256, (batch, tokens, spec.heads)) / 256
        yield name, drawn.astype(np.float16)
