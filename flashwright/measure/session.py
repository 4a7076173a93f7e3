"""A whole benchmark: the machine's ceilings, our kernels and their verdicts, then all cells.

Everything that is found goes into the journal at once. A session that goes on with a journal does
only what is not in it, and only where nothing has changed that would make the numbers others.
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
from flashwright.measure.bench import Step, Tools, bench
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import Judge, Made
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import OURS, Record, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Rules
from flashwright.spec import AttentionSpec

KERNELS = "kernels"
_NO_MATTER = ("flashwright", "python")
"""Versions that no time depends on: the translator and the compiler are told beside them."""
_BINARY = "cubin"
"""The digest that does not say whether a kernel is the same. nvcc writes the folder it worked in
into a cubin, as a number in some names: two of one source by one compiler may differ in that."""


class OtherRun(Exception):
    """A journal of another run than the one that is to go on; the message says what differs."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how."""

    title: str
    cells: tuple[Cell, ...]
    gpu: str
    """The GPU that kernels are translated for."""
    peers: tuple[Peer, ...] = ()
    table: int | None = None
    layout: str = "bshd"
    rules: Rules = field(default_factory=Rules)
    packages: tuple[Made, ...] = ()
    """Kernels that somebody has made already; the others are made."""

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """Of the kernels, each once."""
        return tuple(dict.fromkeys(cell.spec for cell in self.cells))

    @property
    def settings(self) -> dict[str, str]:
        """What is asked for beside what a run's record names itself."""
        return settings_of(self.cells, self.rules.warm)


def settings_of(cells: Sequence[Cell], warm: bool) -> dict[str, str]:
    """The settings of a run's record that follow from its cells."""
    every = dict.fromkeys(cell.spec for cell in cells)
    sizes = " ".join(f"{cell.batch}x{cell.length}" for cell in cells)
    return {
        "l2": "both" if warm else "cold",
        "dtype": " ".join(dict.fromkeys(spec.dtype for spec in every)),
        "specs": sha256("".join(specs.dump(spec) for spec in every))[:16],
        "sizes": sha256(sizes)[:16],
    }


class Watcher(Protocol):
    """Whoever shows the session to a person."""

    def phase(self, title: str) -> None:
        """Something else begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """It is this far."""

    def cell(self, step: Step) -> None:
        """A cell begins, or is done."""

    def trouble(self, text: str) -> None:
        """Something that does not end the session, said once."""


@dataclass(frozen=True)
class Parts:
    """What a session does its work with; tests bring their own."""

    tools: Tools = field(default_factory=Tools)
    make: Callable[..., Iterable[Made]] = kernels.make_all
    judge: Judge = kernels.judged
    environment: Callable[[Iterable[Peer]], Mapping[str, str]] = machine.environment
    clocks: Callable[[], Mapping[str, float]] = machine.clocks
    ceilings: Callable[[Iterable[str]], Ceilings] = ceilings.measure
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)


def session(
    plan: Plan,
    card: Card,
    folder: Path,
    journal: Journal,
    watcher: Watcher,
    seed: int,
    jobs: int = 0,
    parts: Parts | None = None,
) -> None:
    """Measure all of a plan that the journal does not have. OtherRun where it is another run's.

    A KeyboardInterrupt passes through: what was found is in the journal.
    """
    parts = parts or Parts()
    keeping = _Keeping(journal, watcher)
    run = _run(plan, card, keeping, watcher, seed, parts)
    folders = _kernels(plan, card, folder, keeping, watcher, jobs, parts)
    known = Results.of(journal.records).kernels
    ours = {name: kernels.entry(known[name], place) for name, place in folders.items()}
    contestants = [Contestant(OURS, ours, watched=True)]
    contestants += [Contestant(p.name, p.candidate, p.slack, p.watched) for p in plan.peers]
    watcher.phase("measuring")

    def step(now: Step) -> None:
        keeping.told()
        watcher.cell(now)

    bench(run, plan.cells, contestants, journal, plan.rules, parts.tools, step)


class _Keeping:
    """The journal, and that its trouble is said once and not for every line."""

    def __init__(self, journal: Journal, watcher: Watcher) -> None:
        self.journal, self.watcher, self.said = journal, watcher, False

    def add(self, record: Record) -> None:
        self.journal.add(record)
        self.told()

    def told(self) -> None:
        if self.journal.trouble and not self.said:
            self.said = True
            self.watcher.trouble(f"{self.journal.trouble}; the run goes on, and it is tried again")


# --- the run's record -------------------------------------------------------------------------


def _run(
    plan: Plan, card: Card, keeping: _Keeping, watcher: Watcher, seed: int, parts: Parts
) -> RunRecord:
    before = Results.of(keeping.journal.records).run
    new = _record(plan, card, parts, seed if before is None else before.seed)
    if before is not None:
        differing = differences(before, new)
        if differing:
            raise OtherRun("; ".join(differing))
        return before
    watcher.phase("measuring the machine")
    measured = parts.ceilings(dict.fromkeys(spec.dtype for spec in plan.specs))
    for name, why in measured.missing.items():
        watcher.trouble(f"{name} could not be measured: {why}")
    found = {"matmul": dict(measured.matmul), "copy_gbs": measured.copy_gbs}
    run = new.model_copy(update=found)
    keeping.add(run)
    return run


def _record(plan: Plan, card: Card, parts: Parts, seed: int) -> RunRecord:
    run = RunRecord(
        id="",
        started=parts.now().isoformat(timespec="seconds"),
        title=plan.title,
        table=plan.table,
        card=card.name,
        arch=card.arch,
        translated_for=plan.gpu,
        layout=plan.layout,
        contestants=(OURS, *(peer.name for peer in plan.peers)),
        cells=tuple(cell.name for cell in plan.cells),
        environment=dict(parts.environment(plan.peers)),
        clocks=dict(parts.clocks()),
        settings=plan.settings,
        seed=seed,
    )
    return run.model_copy(update={"id": run_id(run)})


def run_id(run: RunRecord) -> str:
    """The digest of all that has to be the same for numbers to belong together."""
    return sha256(json.dumps(_what_matters(run), sort_keys=True))[:16]


def _what_matters(run: RunRecord) -> dict[str, object]:
    """All that has to be the same for numbers to belong together."""
    return {
        "card": f"{run.card} ({run.arch})",
        "GPU that kernels are translated for": run.translated_for,
        "layout": run.layout,
        "contestants": list(run.contestants),
        "cells": list(run.cells),
        **run.settings,
        **{n: v for n, v in run.environment.items() if n not in _NO_MATTER},
    }


def differences(before: RunRecord, now: RunRecord) -> list[str]:
    """What is not as it was, a line each."""
    old, new = _what_matters(before), _what_matters(now)
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
    plan: Plan,
    card: Card,
    folder: Path,
    keeping: _Keeping,
    watcher: Watcher,
    jobs: int,
    parts: Parts,
) -> dict[str, str]:
    """Make and judge what is not known yet; the folders of all kernels by name."""
    given = {made.spec: made for made in plan.packages}
    wanted = [spec for spec in plan.specs if spec not in given]
    watcher.phase(f"compiling for {plan.gpu}")
    fresh = parts.make(wanted, plan.gpu, card, watcher.progress, jobs)
    every = [*given.values(), *(kernels.save(made, folder / KERNELS) for made in fresh)]
    order = {spec: n for n, spec in enumerate(plan.specs)}
    every.sort(key=lambda made: order[made.spec])
    known = Results.of(keeping.journal.records).kernels
    for made in every:
        before = known[made.name].hashes if made.name in known else made.hashes
        texts = [n for n in {**before, **made.hashes} if not n.endswith(_BINARY)]
        if any(before.get(name) != made.hashes.get(name) for name in texts):
            raise OtherRun(f"the kernel {made.name} is not the one that was measured")
    watcher.phase("judging the kernels")
    unknown = [made for made in every if made.name not in known]
    for record in kernels.verdicts(unknown, parts.judge, watcher.progress):
        keeping.add(record)
    return {made.name: made.folder for made in every}
