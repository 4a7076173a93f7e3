"""A benchmark run: every cell, all contestants in turns, each finished cell on disk at once."""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwright.measure import machine, spot
from flashwright.measure.ceilings import Ceilings, ceiling_of
from flashwright.measure.contest import Contestant, Make, Missing, Seat
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.records import AbsentRecord, NumberRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Played, Rules, Timing, play
from flashwright.measure.work import Work, bound_by_memory
from flashwright.sandbox import timed
from flashwright.sandbox.candidate import Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

BURST = (3, 10, 0.2)
"""Calls of a burst: at least, at most, and about so many seconds of them."""
HIDDEN_FACTOR, HIDDEN_SECONDS = 1.2, 250e-6
"""A call may take so many times its event time by our own clock, and so much more: one call behind
the other the GPU's clock is lower, a launch from Python takes tens of microseconds."""
TRIES = 5  # of a burst: a neighbour on the host must not make somebody a cheat

Line = NumberRecord | AbsentRecord


@dataclass(frozen=True)
class Tools:
    """What a run has from outside; tests bring their own."""

    make: Make = Sandbox
    expected: spot.Expected = spot.expected
    clock_mhz: Callable[[], float | None] = machine.clock_mhz
    linking: Callable[[TimedProblem], float] = timed.linking
    chance: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Step:
    """How far a run is."""

    done: int
    total: int
    cell: str
    lines: tuple[Line, ...] = ()
    """What was just found; none at the beginning."""
    left: float | None = None
    """Seconds, by what the cells so far have taken."""
    took: float | None = None
    """Seconds of the cell that was just done."""


def bench(
    run: RunRecord,
    cells: Sequence[Cell],
    contestants: Sequence[Contestant],
    journal: Journal,
    rules: Rules | None = None,
    tools: Tools | None = None,
    step: Callable[[Step], None] = lambda step: None,
) -> None:
    """Measure the cells that the journal does not have yet, and add their lines to it.

    A KeyboardInterrupt passes through; all that was added by then is in the journal.
    """
    known = Results.of(journal.records)
    wanted = [cell for cell in cells if not known.complete(cell.name)]
    contest = Contest(run, contestants, rules or Rules(), tools or Tools())
    clock, done = contest.tools.clock, len(cells) - len(wanted)
    start = clock()
    try:
        for number, cell in enumerate(wanted):
            left = (clock() - start) / number * (len(wanted) - number) if number else None
            step(Step(done + number, len(cells), cell.name, left=left))
            begun = clock()
            lines = tuple(contest.measure(cell))
            for line in lines:
                journal.add(line)
            left = (clock() - start) / (number + 1) * (len(wanted) - number - 1)
            took = clock() - begun
            step(Step(done + number + 1, len(cells), cell.name, lines, left, took))
    finally:
        contest.close()


class Contest:
    """The contestants of a run, with their processes."""

    def __init__(
        self, run: RunRecord, contestants: Sequence[Contestant], rules: Rules, tools: Tools
    ) -> None:
        self.run, self.rules, self.tools = run, rules, tools
        self.seats = {c.name: Seat(c, tools.make) for c in contestants}
        self.measured = Ceilings(run.matmul, run.copy_gbs)

    def close(self) -> None:
        """End the processes of all contestants."""
        for seat in self.seats.values():
            seat.close()

    def measure(self, cell: Cell) -> Iterator[Line]:
        """One cell: a line for each contestant, in their order."""
        seed = cell_seed(self.run.seed, cell)
        problem = problem_of(cell, self.run.layout, seed)
        work = cell.work(problem.extra.get("Idx"))
        absent = self._prepare(cell, problem)
        ready = {who: seat for who, seat in self.seats.items() if who not in absent}
        watches = {
            who: spot.Watch(seat, problem, self.rules, self.tools.chance)
            for who, seat in ready.items()
        }
        played = play(
            ready, seed, self.rules, lambda turn: watches[turn.who].look(turn), self.tools.clock
        )
        mhz = self.tools.clock_mhz() if played.rounds else None
        for who in self.seats:
            try:
                if who not in absent:
                    yield self._number(cell, seed, work, played, watches[who], who, mhz)
                    continue
            except Ended as error:
                absent[who] = self._absent(cell, who, error.message, error.offence)
            yield absent[who]

    def _prepare(self, cell: Cell, problem: TimedProblem) -> dict[str, AbsentRecord]:
        """Everybody gets ready at the same time; those who cannot say why."""
        begun = {who: seat.prepare(cell.kernel, problem) for who, seat in self.seats.items()}
        absent = {}
        for who, future in begun.items():
            try:
                future.result()
            except Unable as error:
                missing = self.seats[who].contestant.candidate(cell.kernel)
                offence = missing.offence if isinstance(missing, Missing) else None
                absent[who] = self._absent(cell, who, str(error), offence)
            except Ended as error:
                absent[who] = self._absent(cell, who, error.message, error.offence)
        return absent

    def _absent(self, cell: Cell, who: str, why: str, offence: str | None) -> AbsentRecord:
        return AbsentRecord(run=self.run.id, cell=cell.name, who=who, why=why, offence=offence)

    # --- what a contestant's turns come to ----------------------------------------------------

    def _number(
        self,
        cell: Cell,
        seed: int,
        work: Work,
        played: Played,
        watch: spot.Watch,
        who: str,
        mhz: float | None,
    ) -> NumberRecord:
        if who in played.lost:
            raise played.lost[who]
        seat = self.seats[who]
        timing = Timing.of(played.cold[who])
        self._refuse_speed(cell, work, timing.median)
        found = watch.judge(self.tools.expected, seat.contestant.slack)
        if found.offence is not None:
            raise Ended(found.offence, found.why)
        wall = None
        if seat.contestant.watched:
            wall = self._wall_seconds(watch, seat, timing.median)
        rate, warm = cell.tflops(timing.median, work), played.warm.get(who)
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
            gbs=self._gbs(cell.spec, work, timing.median),
            checked=found.checked,
            relative_rms=found.relative_rms,
            seed=seed,
            clock_mhz=mhz,
        )

    def _wall_seconds(self, watch: spot.Watch, seat: Seat, seconds: float) -> float:
        """Seconds of a call by our own clock; Ended where they do not bear the events out."""
        least, most, about = BURST
        wanted = max(least, min(most, math.ceil(about / seconds)))
        limit = HIDDEN_FACTOR * seconds + HIDDEN_SECONDS
        beside, best = self.tools.linking(watch.problem), math.inf
        for _ in range(TRIES):
            seed = self.tools.chance.getrandbits(30)
            burst = seat.burst(wanted, seed)
            watch.link(self.tools.expected, burst.calls, seed, seat.contestant.slack)
            best = min(best, max(0.0, burst.seconds / burst.calls - beside))
            if best <= limit:
                return best
        text = f"a call takes {best * 1e6:.4g} us by our clock and {seconds * 1e6:.4g} us by events"
        raise Ended("hidden_work", f"{text}: work is done where the events do not see it")

    def _gbs(self, spec: AttentionSpec, work: Work, seconds: float) -> float | None:
        """Bytes a second, where memory is the narrower of the two measured ceilings."""
        rate = self.measured.matmul.get(spec.dtype)
        bound = bound_by_memory(work, rate, self.measured.copy_gbs)
        return work.bytes / seconds / 1e9 if bound else None

    def _refuse_speed(self, cell: Cell, work: Work, seconds: float) -> None:
        """Ended where a time is below the roofline."""
        ceiling = ceiling_of(self.run.card, cell.spec, self.measured)
        if ceiling is None or seconds >= ceiling.least_seconds(work):
            return
        least = ceiling.least_seconds(work)
        text = f"{seconds * 1e6:.3g} us, where {least * 1e6:.3g} us is the least that can be"
        raise Ended("too_fast", f"{text} ({ceiling.source})")


# --- problems ---------------------------------------------------------------------------------


def cell_seed(seed: int, cell: Cell) -> int:
    """From which a cell's inputs are drawn: another for each, the same for every run of a seed."""
    return zlib.crc32(f"{seed} {cell.name}".encode()) >> 1


def problem_of(cell: Cell, layout: str, seed: int) -> TimedProblem:
    """What the contestants are given."""
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


def _extra(cell: Cell, seed: int) -> Mapping[str, Any]:
    """Slopes, Sink and Idx; they do not change from call to call."""
    spec = cell.spec
    if not (spec.alibi or spec.sink or spec.branch == "selected"):
        return {}
    from flashwright.judge.inputs import make_inputs

    # These do not depend on the width of Q and K, which would take long to draw.
    narrow = spec.model_copy(update={"head_dim": 8, "v_dim": 8, "scale": None})
    dims = {"batch": cell.batch, "q_len": cell.length, "kv_len": cell.kv_len}
    made = make_inputs(narrow, dims, seed)
    return {name: array for name, array in made.items() if name not in ("Q", "K", "V")}
