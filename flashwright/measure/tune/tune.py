"""`flashwright tune`: compiles, judges and times many tilings of one program, and keeps the best.

Each result is written to the package's tuning.json at once; kernels and journals stay in a work
folder until the end. A resumed tuning does only what is missing.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from flashwright.author.builtin.author import workload
from flashwright.author.builtin.needs import Workload
from flashwright.author.builtin.retile import Offer, offers, params_of, retiled
from flashwright.build import package
from flashwright.build.driver import Card
from flashwright.files import sha256
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.folders import packed
from flashwright.fleet.job import Job, JobPart, Need, plain
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import jobs, kernels
from flashwright.measure.bench import BenchProgress, ContestDependencies
from flashwright.measure.grid import TOKENS, Cell, of_spec
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import Judge, KernelBuild
from flashwright.measure.records import AbsentRecord, NumberRecord, Record, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Rules
from flashwright.measure.tune import select
from flashwright.measure.tune.install import install
from flashwright.measure.tune.state import (
    CandidateState,
    CandidateTime,
    LengthClass,
    Tuning,
    differences,
)
from flashwright.program.program import Program
from flashwright.spec import AttentionSpec

WORK = ".tuning"
FINAL = "final"
WHY = "set by flashwright tune"
TIME_UP = "not compiled: the time was up"
SHORT = Rules(least=3, most=5, seconds=0.4, settled=0.01)
"""The rules of the first round: enough to rule out slow candidates."""
GROUP = 8
"""Candidates timed together in the first round: each takes a process and gigabytes of memory."""
COMPILING = 0.5  # of the time allowed, at most


class OtherTuning(Exception):
    """The tuning to resume has other settings; the message names them."""


class TimeUp(Exception):
    """The time limit is reached."""


class TuneListener(Protocol):
    """Receives the progress of a tuning, for display (see cli/bench_show.py)."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Progress within the phase."""

    def cell(self, step: BenchProgress) -> None:
        """A cell begins or is done."""


@dataclass(frozen=True)
class TuneRequest:
    """The package to tune, and the settings."""

    folder: Path
    spec: AttentionSpec
    program: Program
    code: str
    """The text of code.tl."""
    gpu: Gpu
    lengths: tuple[int, ...]
    wanted: int = 24
    minutes: float | None = None
    jobs: int = 0
    tokens: int = TOKENS

    @property
    def cells(self) -> list[Cell]:
        """The problems to time: one for each length."""
        return of_spec(self.spec, self.lengths, self.tokens)

    def offers(self) -> list[Offer]:
        """The candidates in the order of their estimated time, the present tiling first."""
        problems = [_problem(cell) for cell in self.cells]
        return offers(self.program, self.gpu, problems)[: self.wanted]

    def text(self, offer: Offer, first: Offer) -> str:
        """A candidate's TL; for the present tiling the unchanged text of code.tl."""
        return self.code if offer == first else retiled(self.program.tree, offer.tiling, WHY)


def _problem(cell: Cell) -> Workload:
    """A cell as a workload for the cost model."""
    usual = workload(cell.spec)
    # With selected keys, the number of keys that a query reads does not depend on the length.
    keys = usual.kv_len if cell.spec.branch == "selected" else cell.kv_len
    return replace(usual, batch=cell.batch, q_len=cell.length, kv_len=keys)


@dataclass(frozen=True)
class TuneDependencies:
    """The injected dependencies of a tuning; tests replace them. Jobs take them along."""

    contest: Callable[[], ContestDependencies] = ContestDependencies
    compile: Callable[[str, AttentionSpec, str, Card], KernelBuild] = kernels.from_tl
    judge: Judge = kernels.judged
    environment: Callable[[], Mapping[str, str]] = jobs.environment
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    clock: Callable[[], float] = time.monotonic


def tune(
    request: TuneRequest,
    card: Card,
    fleet: Fleet,
    listener: TuneListener,
    seed: int,
    before: Tuning | None = None,
    dependencies: TuneDependencies | None = None,
) -> Tuning:
    """Tune a package on a fleet's cards of one kind, or resume `before`. Raises OtherTuning if its
    settings differ.

    A KeyboardInterrupt propagates; tuning.json keeps all results found before it.
    """
    dependencies = dependencies or TuneDependencies()
    return _Tuner(request, card, fleet, listener, seed, before, dependencies).run()


class _Tuner:
    def __init__(
        self,
        request: TuneRequest,
        card: Card,
        fleet: Fleet,
        listener: TuneListener,
        seed: int,
        before: Tuning | None,
        dependencies: TuneDependencies,
    ) -> None:
        self.request, self.card, self.fleet = request, card, fleet
        self.listener, self.dependencies = listener, dependencies
        self.gpus = Need(card.name)
        self.work = request.folder / WORK
        self.offers = request.offers()
        self.present = self.offers[0].name
        self.end = None if request.minutes is None else 60 * request.minutes
        self.start = dependencies.clock()
        self.state = self._state(seed, before)
        self.tried = self.state.by_name()

    def run(self) -> Tuning:
        """Compile, judge, time and install; returns the final state."""
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

    # --- state --------------------------------------------------------------------------------

    def _state(self, seed: int, before: Tuning | None) -> Tuning:
        request = self.request
        new = Tuning(
            gpu=request.gpu.name,
            card=self.card.name,
            environment=dict(self._environment()),
            started=self.dependencies.now().isoformat(timespec="seconds"),
            spec=request.spec.model_dump(mode="json"),
            code=sha256(request.code),
            lengths=list(request.lengths),
            tokens=request.tokens,
            wanted=request.wanted,
            seed=seed,
            tried=[
                CandidateState(name=o.name, params=params_of(o.tiling), model_us=[*o.microseconds])
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

    def _environment(self) -> Mapping[str, str]:
        """The software of the machines that time; a job refuses to run on one with another."""
        look = Job("versions", plain(self.dependencies.environment))
        (end,) = self.fleet.ends(self.gpus, [look])
        versions: Mapping[str, str] = end.result()
        return versions

    def _save(self) -> None:
        self.state.save(self.request.folder)

    def _left(self, share: float = 1.0) -> bool:
        """Whether time is left of this share of the limit."""
        return self.end is None or self.dependencies.clock() - self.start < share * self.end

    def _running(self) -> list[CandidateState]:
        return [one for one in self.state.tried if not one.failure]

    # --- kernels ------------------------------------------------------------------------------

    def _compile(self) -> None:
        request, by_name = self.request, {o.name: o for o in self.offers}
        waiting = [one for one in self._running() if not one.built]
        self.listener.phase(f"compiling {len(waiting)} candidates for {request.gpu.name}")
        work = {
            one.name: plain(
                self.dependencies.compile,
                request.text(by_name[one.name], self.offers[0]),
                request.spec,
                request.gpu.name,
                self.card,
            )
            for one in waiting
        }
        ends = self.fleet.ends(Need(jobs=request.jobs), [Job(*one) for one in work.items()])
        for done, end in enumerate(ends, 1):
            one = self.tried[end.name]
            try:
                self._built(one, end.result())
            except Failed as failed:  # its compiler takes the machine down
                one.failure = failed.diagnostics[0].message
            self._save()
            self.listener.progress(done, len(waiting), one.name)
            if not self._left(COMPILING):
                break
        for one in self._running():
            if not one.built:
                one.failure = TIME_UP
        self._alike()
        self._save()
        own = self.tried[self.present]
        if not own.built:  # the other candidates are compared with it
            text = f"the package's own kernel cannot be built: {own.failure}"
            hint = "fix it first (flashwright build), or allow more --minutes"
            raise Failed(Diagnostic("FW852", text, help=hint))

    def _built(self, one: CandidateState, made: KernelBuild) -> None:
        one.failure = made.why
        if not made.why:
            kernels.put(made, self.work / one.name)
            one.built, one.registers = True, made.ptxas.get("registers")

    def _alike(self) -> None:
        """Drop candidates whose source equals that of an earlier one."""
        seen: dict[str, str] = {}
        for one in self._running():
            digest = sha256((self.work / one.name / "kernel.cu").read_bytes())
            if digest in seen:
                one.failure = f"the same kernel as {seen[digest]}"
            seen.setdefault(digest, one.name)

    def _judge(self) -> None:
        waiting = {one.name: self.work / one.name for one in self._running() if not one.judged}
        self.listener.phase(f"judging {len(waiting)} kernels")
        work = jobs.judging(waiting, self.request.spec, self.dependencies.judge)
        done = set[str]()
        for part in self.fleet.parts(self.gpus, work):
            name, verdict = part.value
            one = self.tried[name]
            one.judged = True
            if not verdict.ok:
                named = ", ".join(o.name for o in verdict.offences) or "it is wrong"
                one.failure = f"the judge rejects it: {named}"
            self._save()
            done.add(name)
            self.listener.progress(len(done), len(waiting), name)

    # --- rounds -------------------------------------------------------------------------------

    def _first_round(self) -> None:
        """Time all candidates in groups; the present kernel is in each group as the reference."""
        # A candidate that failed while timed stays in its group, so a resumed tuning has the same.
        names = [o.name for o in self.state.tried if o.judged and (not o.failure or o.out)]
        others = [name for name in names if name != self.present]
        anchor = [self.present] if self.present in names else []
        size = GROUP - len(anchor)
        groups = [others[n : n + size] for n in range(0, len(others), size)] or [[]]
        rounds = {f"first-{n}": [*anchor, *group] for n, group in enumerate(groups, 1)}
        self._time(rounds, SHORT, f"timing all candidates, in {len(groups)} groups")

    def _second_round(self) -> None:
        """Time the best candidates of the first round against each other."""
        lengths = self.request.lengths
        whole = [one for one in self.state.tried if len(one.first) == len(lengths)]
        first = {n: {one.name: one.first[n].seconds for one in whole} for n in lengths}
        names = select.finalists(first, self.present)
        if len(names) > 1:
            self._time({FINAL: names}, Rules(), f"timing the best {len(names)} again")

    def _time(self, groups: Mapping[str, list[str]], rules: Rules, title: str) -> None:
        """Time groups of candidates, each of them on one card."""
        self.listener.phase(title)
        journals = {folder: self._journal(folder, names) for folder, names in groups.items()}
        work, total = list[Job](), 0
        for folder, names in groups.items():
            known = Results.of(journals[folder].records)
            cells = [cell for cell in self.request.cells if not known.complete(cell.name)]
            total += len(cells)
            if cells:
                kernels = {name: packed(self.work / name) for name in names}
                given = self.dependencies.contest, self.dependencies.environment
                timing = jobs.TimingJob(self._run(names), cells, kernels, rules, *given)
                work.append(Job(folder, timing))
        done = 0
        for part in self.fleet.parts(self.gpus, work):
            done += self._hear(part, journals[part.name], part.name == FINAL)
            self.listener.cell(jobs.of_all(part.value, done, total))
            if not self._left():
                raise TimeUp

    def _journal(self, folder: str, names: Sequence[str]) -> Journal:
        """The journal of a group, whose records count if they are of the same candidates."""
        journal = Journal.resume(self.work / folder)
        if (known := Results.of(journal.records).run) is None or known.contestants != tuple(names):
            journal, _ = Journal.begin(self.work / folder)
            journal.add(self._run(names))
        self._absorb(folder == FINAL, journal.records)
        return journal

    def _hear(self, part: JobPart, journal: Journal, final: bool) -> bool:
        """Keep the records of a cell; whether it is new. A job that was lost measures it again."""
        step: BenchProgress = part.value
        if not step.lines or Results.of(journal.records).complete(step.cell):
            return False
        lines = jobs.placed(step.lines, part.place)
        for line in lines:
            journal.add(line)
        self._absorb(final, lines)
        return True

    def _run(self, names: Sequence[str]) -> RunRecord:
        request, state = self.request, self.state
        return RunRecord(
            id="tune",
            started=state.started,
            title="tune",
            card=self.card.name,
            arch=self.card.arch,
            translated_for=request.gpu.name,
            layout="bshd",
            contestants=tuple(names),
            cells=tuple(cell.name for cell in request.cells),
            environment=state.environment,
            seed=state.seed,
        )

    def _absorb(self, final: bool, lines: Sequence[Record]) -> None:
        """Store the times of a cell's records. A candidate without a number in a cell is out."""
        numbers = [line for line in lines if isinstance(line, NumberRecord)]
        present = {n.length: n.seconds for n in numbers if n.who == self.present}
        for line in numbers:
            one = self.tried[line.who]
            scale = 1.0 if final else self._scale(line.length, present.get(line.length))
            timing = CandidateTime(
                seconds=line.seconds * scale,
                spread=line.spread,
                samples=line.samples,
                where=line.where,
            )
            (one.final if final else one.first)[line.length] = timing
        for absent in (line for line in lines if isinstance(line, AbsentRecord)):
            one = self.tried[absent.who]
            one.failure, one.out = one.failure or f"at {absent.cell}: {absent.why}", True
        self._save()

    def _scale(self, length: int, now: float | None) -> float:
        """The factor from a group's times to those of the first group, by the present kernel, which
        is in every group."""
        then = self.tried[self.present].first.get(length)
        return then.seconds / now if then and now else 1.0

    # --- the choice ---------------------------------------------------------------------------

    def _keep(self) -> None:
        """Choose the kernels for all lengths and install them in the package."""
        state, lengths = self.state, self.request.lengths
        figures = {length: found for length in lengths if (found := state.at(length))}
        times = {n: {who: f.seconds for who, f in found.items()} for n, found in figures.items()}
        state.best = select.fastest(times, self.present)
        if not state.best:
            state.note = state.note or "no candidate was timed at every length"
            self._save()
            return
        merged = select.merged(select.serving(times, state.best))
        keys = {cell.length: cell.kv_len for cell in self.request.cells}
        bounds = [*(keys[served[-1]] for served, _ in merged[:-1]), None]
        classes = [(bound, name) for bound, (_, name) in zip(bounds, merged, strict=True)]
        rules = install(self.request.folder, self.work, classes, self.present)
        state.kept = [
            LengthClass(lengths=served, up_to=up_to, kernel=kernel, tried=name)
            for (up_to, kernel), (served, name) in zip(rules, merged, strict=True)
        ]
        state.complete = not state.note
        self._save()
        if state.complete:
            shutil.rmtree(self.work, ignore_errors=True)
