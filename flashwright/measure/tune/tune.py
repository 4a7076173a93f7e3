"""`flashwright tune`: many tilings of one program compiled, judged and timed, and the best kept.

All that is found is in the package's tuning.json at once; kernels and journals are in a folder
beside it until the end. Who goes on with a tuning does only what is not there yet.
"""

from __future__ import annotations

import datetime
import functools
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from flashwright.author.builtin.author import workload
from flashwright.author.builtin.needs import Workload
from flashwright.author.builtin.retile import Offer, offers, params_of, retiled
from flashwright.build import package
from flashwright.build.driver import Card
from flashwright.files import sha256
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import kernels, machine
from flashwright.measure.bench import Step, Tools, bench
from flashwright.measure.contest import Contestant, Hand
from flashwright.measure.grid import TOKENS, Cell, of_spec
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import Judge, Made
from flashwright.measure.records import AbsentRecord, NumberRecord, Record, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Rules
from flashwright.measure.tune import select
from flashwright.measure.tune.install import install
from flashwright.measure.tune.state import Figure, Kept, Tried, Tuning, differences
from flashwright.program.program import Program
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec

WORK = ".tuning"
FINAL = "final"
WHY = "set by flashwright tune"
TIME_UP = "not compiled: the time was up"
SHORT = Rules(least=3, most=5, seconds=0.4, settled=0.01)
"""Enough to tell who is far behind."""
GROUP = 8
"""Timed beside each other in the first round: each has a process, and gigabytes of the GPU."""
COMPILING = 0.5  # of the time allowed, at most


class OtherTuning(Exception):
    """What is there is another tuning than the one that is to go on; the message says why."""


class TimeUp(Exception):
    """The minutes that were allowed are over."""


class Watcher(Protocol):
    """Whoever shows the tuning to a person; cli/bench_show.py has one."""

    def phase(self, title: str) -> None:
        """Something else begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """It is this far."""

    def cell(self, step: Step) -> None:
        """A cell begins, or is done."""


@dataclass(frozen=True)
class Order:
    """What is to be tuned, and how."""

    folder: Path
    spec: AttentionSpec
    program: Program
    code: str
    """code.tl."""
    gpu: Gpu
    lengths: tuple[int, ...]
    wanted: int = 24
    minutes: float | None = None
    jobs: int = 0
    tokens: int = TOKENS

    @property
    def cells(self) -> list[Cell]:
        """The problems, a length each."""
        return of_spec(self.spec, self.lengths, self.tokens)

    def offers(self) -> list[Offer]:
        """The candidates in the order in which they are worth trying, the present one first."""
        problems = [_problem(cell) for cell in self.cells]
        return offers(self.program, self.gpu, problems)[: self.wanted]

    def text(self, offer: Offer, first: Offer) -> str:
        """A candidate's TL: the present one as it was written."""
        return self.code if offer == first else retiled(self.program.tree, offer.tiling, WHY)


def _problem(cell: Cell) -> Workload:
    """A cell as the cost model sees it."""
    usual = workload(cell.spec)
    # Where keys are selected, a query reads as many of them at every length.
    keys = usual.kv_len if cell.spec.branch == "selected" else cell.kv_len
    return replace(usual, batch=cell.batch, q_len=cell.length, kv_len=keys)


@dataclass(frozen=True)
class Parts:
    """What a tuning does its work with; tests bring their own."""

    tools: Tools = field(default_factory=Tools)
    make: Callable[[Sequence[Callable[[], Made]], int], Iterable[tuple[int, Made]]] = (
        kernels.in_processes
    )
    judge: Judge = kernels.judged
    environment: Callable[[], Mapping[str, str]] = lambda: machine.environment(())
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    clock: Callable[[], float] = time.monotonic


def tune(
    order: Order,
    card: Card,
    watcher: Watcher,
    seed: int,
    before: Tuning | None = None,
    parts: Parts | None = None,
) -> Tuning:
    """Tune a package, or go on with `before`. OtherTuning where that is another one.

    A KeyboardInterrupt passes through: what was found is in tuning.json.
    """
    return _Tuner(order, card, watcher, seed, before, parts or Parts()).run()


class _Tuner:
    def __init__(
        self,
        order: Order,
        card: Card,
        watcher: Watcher,
        seed: int,
        before: Tuning | None,
        parts: Parts,
    ) -> None:
        self.order, self.card, self.watcher, self.parts = order, card, watcher, parts
        self.work = order.folder / WORK
        self.offers = order.offers()
        self.present = self.offers[0].name
        self.end = None if order.minutes is None else 60 * order.minutes
        self.start = parts.clock()
        self.state = self._state(seed, before)
        self.tried = self.state.by_name()

    def run(self) -> Tuning:
        """Everything, in turn."""
        if self.state.complete:
            return self.state
        self._save()
        self._compile()
        self._judge()
        try:
            self._first_round()
            self._second_round()
        except TimeUp:
            self.state.note = "the time was up before everything was measured"
        if any(one.failure == TIME_UP for one in self.state.tried):
            self.state.note = "the time was up before everything was compiled"
        self._keep()
        return self.state

    # --- what is known ------------------------------------------------------------------------

    def _state(self, seed: int, before: Tuning | None) -> Tuning:
        order = self.order
        new = Tuning(
            gpu=order.gpu.name,
            card=self.card.name,
            environment=dict(self.parts.environment()),
            started=self.parts.now().isoformat(timespec="seconds"),
            spec=order.spec.model_dump(mode="json"),
            code=sha256(order.code),
            lengths=list(order.lengths),
            tokens=order.tokens,
            wanted=order.wanted,
            seed=seed,
            tried=[
                Tried(name=o.name, params=params_of(o.tiling), model_us=[*o.microseconds])
                for o in self.offers
            ],
        )
        if before is None:
            shutil.rmtree(self.work, ignore_errors=True)
            return new
        differing = differences(before, new)
        if not differing and [t.name for t in before.tried] != [t.name for t in new.tried]:
            differing = ["list of candidates"]
        if differing:
            raise OtherTuning(f"another {', '.join(differing)}")
        before.note = ""
        for one in before.tried:
            one.failure = "" if one.failure == TIME_UP else one.failure
            one.built &= (self.work / one.name / package.RECORD).is_file()
        return before

    def _save(self) -> None:
        self.state.save(self.order.folder)

    def _left(self, share: float = 1.0) -> bool:
        """Whether there is time left, of a part of all."""
        return self.end is None or self.parts.clock() - self.start < share * self.end

    def _running(self) -> list[Tried]:
        return [one for one in self.state.tried if not one.failure]

    # --- kernels ------------------------------------------------------------------------------

    def _compile(self) -> None:
        order, by_name = self.order, {o.name: o for o in self.offers}
        waiting = [one for one in self._running() if not one.built]
        self.watcher.phase(f"compiling {len(waiting)} candidates for {order.gpu.name}")
        texts = [order.text(by_name[one.name], self.offers[0]) for one in waiting]
        work = [
            functools.partial(kernels.from_tl, text, order.spec, order.gpu.name, self.card)
            for text in texts
        ]
        for done, (number, made) in enumerate(self.parts.make(work, order.jobs), 1):
            one = waiting[number]
            one.failure = made.why
            if not made.why:
                kernels.put(made, self.work / one.name)
                one.built, one.registers = True, made.ptxas.get("registers")
            self._save()
            self.watcher.progress(done, len(waiting), one.name)
            if not self._left(COMPILING):
                break
        for one in self._running():
            if not one.built:
                one.failure = TIME_UP
        self._alike()
        self._save()
        own = self.tried[self.present]
        if not own.built:  # then there is nothing that others could stand beside
            text = f"the package's own kernel cannot be had: {own.failure}"
            hint = "mend it first (flashwright build), or allow more --minutes"
            raise Failed(Diagnostic("FW852", text, help=hint))

    def _alike(self) -> None:
        """Two candidates that become the same source are one."""
        seen: dict[str, str] = {}
        for one in self._running():
            digest = sha256((self.work / one.name / "kernel.cu").read_bytes())
            if digest in seen:
                one.failure = f"the same kernel as {seen[digest]}"
            seen.setdefault(digest, one.name)

    def _judge(self) -> None:
        waiting = [one for one in self._running() if not one.judged]
        self.watcher.phase(f"judging {len(waiting)} kernels")
        hands = [Hand(f"judge {n}") for n in range(min(kernels.JUDGES, len(waiting)))]
        futures = {}
        for number, one in enumerate(waiting):
            work = functools.partial(self.parts.judge, self._candidate(one.name), self.order.spec)
            futures[hands[number % len(hands)].give(work)] = one
        for hand in hands:
            hand.rest()
        for done, future in enumerate(as_completed(futures), 1):
            one, verdict = futures[future], future.result()
            one.judged = True
            if not verdict.ok:
                named = ", ".join(o.name for o in verdict.offences) or "it is wrong"
                one.failure = f"the judge rejects it: {named}"
            self._save()
            self.watcher.progress(done, len(waiting), one.name)

    def _candidate(self, name: str) -> Candidate:
        return Candidate.package(self.work / name, name)

    # --- rounds -------------------------------------------------------------------------------

    def _first_round(self) -> None:
        """Everybody, a group after the other, each with the present one to compare by."""
        # Who failed while it was timed stays in its group: a tuning that goes on has the same ones.
        names = [o.name for o in self.state.tried if o.judged and (not o.failure or o.out)]
        others = [name for name in names if name != self.present]
        anchor = [self.present] if self.present in names else []
        size = GROUP - len(anchor)
        groups = [others[n : n + size] for n in range(0, len(others), size)] or [[]]
        for number, group in enumerate(groups, 1):
            title = f"timing all candidates, group {number} of {len(groups)}"
            self._time(f"first-{number}", [*anchor, *group], SHORT, title)

    def _second_round(self) -> None:
        """The best of them beside each other."""
        lengths = self.order.lengths
        whole = [one for one in self.state.tried if len(one.first) == len(lengths)]
        first = {n: {one.name: one.first[n].seconds for one in whole} for n in lengths}
        names = select.finalists(first, self.present)
        if len(names) > 1:
            self._time(FINAL, names, Rules(), f"timing the best {len(names)} again")

    def _time(self, folder: str, names: list[str], rules: Rules, title: str) -> None:
        self.watcher.phase(title)
        run, place = self._run(names), self.work / folder
        journal = Journal.resume(place)
        if (known := Results.of(journal.records).run) is None or known.contestants != tuple(names):
            journal, _ = Journal.begin(place)
            journal.add(run)
        contestants = [Contestant(name, self._candidate(name)) for name in names]

        def step(now: Step) -> None:
            self.watcher.cell(now)
            if now.lines:
                self._absorb(folder == FINAL, now.lines)
            if not self._left():
                raise TimeUp

        self._absorb(folder == FINAL, journal.records)
        bench(run, self.order.cells, contestants, journal, rules, self.parts.tools, step)

    def _run(self, names: Sequence[str]) -> RunRecord:
        order, state = self.order, self.state
        return RunRecord(
            id="tune",
            started=state.started,
            title="tune",
            card=self.card.name,
            arch=self.card.arch,
            translated_for=order.gpu.name,
            layout="bshd",
            contestants=tuple(names),
            cells=tuple(cell.name for cell in order.cells),
            environment=state.environment,
            seed=state.seed,
        )

    def _absorb(self, final: bool, lines: Sequence[Record]) -> None:
        """Keep what a cell's lines say. Who has no number somewhere is out."""
        numbers = [line for line in lines if isinstance(line, NumberRecord)]
        present = {n.length: n.seconds for n in numbers if n.who == self.present}
        for line in numbers:
            one = self.tried[line.who]
            scale = 1.0 if final else self._scale(line.length, present.get(line.length))
            told = Figure(seconds=line.seconds * scale, spread=line.spread, samples=line.samples)
            (one.final if final else one.first)[line.length] = told
        for absent in (line for line in lines if isinstance(line, AbsentRecord)):
            one = self.tried[absent.who]
            one.failure, one.out = one.failure or f"at {absent.cell}: {absent.why}", True
        self._save()

    def _scale(self, length: int, now: float | None) -> float:
        """Groups are timed one after the other: by the present one, who is in all of them, their
        times become those of the first group."""
        then = self.tried[self.present].first.get(length)
        return then.seconds / now if then and now else 1.0

    # --- the choice ---------------------------------------------------------------------------

    def _keep(self) -> None:
        """Decide, and put the kernels into the package."""
        state, lengths = self.state, self.order.lengths
        figures = {length: found for length in lengths if (found := state.at(length))}
        times = {n: {who: f.seconds for who, f in found.items()} for n, found in figures.items()}
        state.best = select.fastest(times, self.present)
        if not state.best:
            state.note = state.note or "no candidate was timed at every length"
            self._save()
            return
        merged = select.merged(select.serving(times, state.best))
        keys = {cell.length: cell.kv_len for cell in self.order.cells}
        bounds = [*(keys[served[-1]] for served, _ in merged[:-1]), None]
        classes = [(bound, name) for bound, (_, name) in zip(bounds, merged, strict=True)]
        rules = install(self.order.folder, self.work, classes, self.present)
        state.kept = [
            Kept(lengths=served, up_to=up_to, kernel=kernel, tried=name)
            for (up_to, kernel), (served, name) in zip(rules, merged, strict=True)
        ]
        state.complete = not state.note
        self._save()
        if state.complete:
            shutil.rmtree(self.work, ignore_errors=True)
