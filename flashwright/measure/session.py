"""A whole benchmark: the machine's ceilings, our kernels and their verdicts, then all cells.

Each result goes into the journal at once. A resumed session does only what the journal lacks. It is
refused if anything that affects the numbers has changed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flashwright import spec as specs
from flashwright.build.driver import Card
from flashwright.files import sha256
from flashwright.measure import ceilings, kernels, machine
from flashwright.measure.bench import BenchProgress, ContestDependencies, bench
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import Judge, KernelBuild
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import OURS, Record, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Rules
from flashwright.spec import AttentionSpec

KERNELS = "kernels"
_BINARY = "cubin"
"""The digest that is not compared on resume: nvcc hashes its work folder into some names of a
cubin, so two builds of one source may differ."""


class OtherRun(Exception):
    """The journal to resume is of another run; the message says what differs."""


@dataclass(frozen=True)
class BenchPlan:
    """The cells, contestants and settings of a benchmark."""

    title: str
    cells: tuple[Cell, ...]
    gpu: str
    """The GPU that kernels are translated for."""
    peers: tuple[Peer, ...] = ()
    table: int | None = None
    layout: str = "bshd"
    rules: Rules = field(default_factory=Rules)
    packages: tuple[KernelBuild, ...] = ()
    """Existing kernel packages; the other kernels are made."""

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The specs of all kernels, each once."""
        return tuple(dict.fromkeys(cell.spec for cell in self.cells))

    @property
    def settings(self) -> dict[str, str]:
        """The settings that have no field of their own in a run's record."""
        return settings_of(self.cells, self.rules.warm)


def settings_of(cells: Sequence[Cell], warm: bool) -> dict[str, str]:
    """The settings of a run's record that follow from its cells."""
    every = dict.fromkeys(cell.spec for cell in cells)
    sizes = " ".join(
        f"{cell.batch}x{cell.length}" + (f" {cell.size}" if cell.sequences else "")
        for cell in cells
    )
    return {
        "l2": "both" if warm else "cold",
        "dtype": " ".join(dict.fromkeys(spec.dtype for spec in every)),
        "specs": sha256("".join(specs.dump(spec) for spec in every))[:16],
        "sizes": sha256(sizes)[:16],
    }


class BenchListener(Protocol):
    """Receives the progress of a session, for display."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Progress within the phase."""

    def cell(self, step: BenchProgress) -> None:
        """A cell begins or is done."""

    def warn(self, text: str) -> None:
        """A problem that does not end the session."""


@dataclass(frozen=True)
class SessionDependencies:
    """The injected dependencies of a session; tests replace them."""

    contest: ContestDependencies = field(default_factory=ContestDependencies)
    make: Callable[..., Iterable[KernelBuild]] = kernels.make_all
    judge: Judge = kernels.judged
    environment: Callable[[Iterable[Peer]], Mapping[str, str]] = machine.environment
    clocks: Callable[[], Mapping[str, float]] = machine.clocks
    ceilings: Callable[[Iterable[str]], Ceilings] = ceilings.measure
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)


def session(
    plan: BenchPlan,
    card: Card,
    folder: Path,
    journal: Journal,
    listener: BenchListener,
    seed: int,
    jobs: int = 0,
    dependencies: SessionDependencies | None = None,
) -> None:
    """Measure what the journal lacks of a plan. Raises OtherRun if it is of another run.

    A KeyboardInterrupt propagates; the journal keeps all results found before it.
    """
    dependencies = dependencies or SessionDependencies()
    reporting = _ReportingJournal(journal, listener)
    run = _run(plan, card, reporting, listener, seed, dependencies)
    folders = _kernels(plan, card, folder, reporting, listener, jobs, dependencies)
    known = Results.of(journal.records).kernels
    ours = {name: kernels.entry(known[name], place) for name, place in folders.items()}
    contestants = [Contestant(OURS, ours, watched=True)]
    contestants += [Contestant(p.name, p.candidate, p.slack, p.watched) for p in plan.peers]
    listener.phase("measuring")

    def step(now: BenchProgress) -> None:
        reporting.report_write_error()
        listener.cell(now)

    bench(run, plan.cells, contestants, journal, plan.rules, dependencies.contest, step)


class _ReportingJournal:
    """A journal that warns once, not for every record, if it cannot be written."""

    def __init__(self, journal: Journal, listener: BenchListener) -> None:
        self.journal, self.listener, self.reported = journal, listener, False

    def add(self, record: Record) -> None:
        self.journal.add(record)
        self.report_write_error()

    def report_write_error(self) -> None:
        if self.journal.write_error and not self.reported:
            self.reported = True
            self.listener.warn(f"{self.journal.write_error}; the run goes on and will try again")


# --- the run's record -------------------------------------------------------------------------


def _run(
    plan: BenchPlan,
    card: Card,
    reporting: _ReportingJournal,
    listener: BenchListener,
    seed: int,
    dependencies: SessionDependencies,
) -> RunRecord:
    before = Results.of(reporting.journal.records).run
    new = _record(plan, card, dependencies, seed if before is None else before.seed)
    if before is not None:
        differing = differences(before, new)
        if differing:
            raise OtherRun("; ".join(differing))
        return before
    listener.phase("measuring the machine")
    measured = dependencies.ceilings(dict.fromkeys(spec.dtype for spec in plan.specs))
    for name, why in measured.missing.items():
        listener.warn(f"{name} could not be measured: {why}")
    found = {"matmul": dict(measured.matmul), "copy_gbs": measured.copy_gbs}
    run = new.model_copy(update=found)
    reporting.add(run)
    return run


def _record(plan: BenchPlan, card: Card, dependencies: SessionDependencies, seed: int) -> RunRecord:
    run = RunRecord(
        id="",
        started=dependencies.now().isoformat(timespec="seconds"),
        title=plan.title,
        table=plan.table,
        card=card.name,
        arch=card.arch,
        translated_for=plan.gpu,
        layout=plan.layout,
        contestants=(OURS, *(peer.name for peer in plan.peers)),
        cells=tuple(cell.name for cell in plan.cells),
        environment=dict(dependencies.environment(plan.peers)),
        clocks=dict(dependencies.clocks()),
        settings=plan.settings,
        seed=seed,
    )
    return run.model_copy(update={"id": run_id(run)})


def run_id(run: RunRecord) -> str:
    """The digest of a run's identity: runs with equal ids may share a journal."""
    return sha256(json.dumps(_identity(run), sort_keys=True))[:16]


def _identity(run: RunRecord) -> dict[str, object]:
    """All settings and versions that must be equal for numbers to be comparable."""
    return {
        "card": f"{run.card} ({run.arch})",
        "GPU that kernels are translated for": run.translated_for,
        "layout": run.layout,
        "contestants": list(run.contestants),
        "cells": list(run.cells),
        **run.settings,
        **{n: v for n, v in run.environment.items() if n not in machine.IGNORED_VERSIONS},
    }


def differences(before: RunRecord, now: RunRecord) -> list[str]:
    """A line for each part of the identity that differs."""
    old, new = _identity(before), _identity(now)
    found = []
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            was, here = old.get(name, "none"), new.get(name, "none")
            if isinstance(was, list) and isinstance(here, list):
                gone = [x for x in was if x not in here] + [x for x in here if x not in was]
                found.append(f"other {name}: {', '.join(map(str, gone[:3])) or 'another order'}")
            else:
                found.append(f"the {name} was {was} and is {here}")
    return found


# --- our kernels ------------------------------------------------------------------------------


def _kernels(
    plan: BenchPlan,
    card: Card,
    folder: Path,
    reporting: _ReportingJournal,
    listener: BenchListener,
    jobs: int,
    dependencies: SessionDependencies,
) -> dict[str, str]:
    """Make all kernels and judge the new ones; returns the folders of all kernels by name."""
    given = {made.spec: made for made in plan.packages}
    wanted = [spec for spec in plan.specs if spec not in given]
    listener.phase(f"compiling for {plan.gpu}")
    fresh = dependencies.make(wanted, plan.gpu, card, listener.progress, jobs)
    every = [*given.values(), *(kernels.save(made, folder / KERNELS) for made in fresh)]
    order = {spec: n for n, spec in enumerate(plan.specs)}
    every.sort(key=lambda made: order[made.spec])
    known = Results.of(reporting.journal.records).kernels
    for made in every:
        before = known[made.name].hashes if made.name in known else made.hashes
        texts = [n for n in {**before, **made.hashes} if not n.endswith(_BINARY)]
        if any(before.get(name) != made.hashes.get(name) for name in texts):
            raise OtherRun(f"the kernel {made.name} is not the one that was measured")
    listener.phase("judging the kernels")
    unknown = [made for made in every if made.name not in known]
    for record in kernels.verdicts(unknown, dependencies.judge, listener.progress):
        reporting.add(record)
    return {made.name: made.folder for made in every}
