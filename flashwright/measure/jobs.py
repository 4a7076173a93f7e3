"""The jobs of a benchmark or a tuning: judge kernels, time contestants, look at the machine.

Each takes its kernels along as data and runs on any machine of a fleet.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashwright.fleet.folders import FolderFiles, packed, unpack
from flashwright.fleet.job import Job, Send, unusable
from flashwright.measure import machine
from flashwright.measure.bench import BenchProgress, CellRecord, ContestDependencies, bench
from flashwright.measure.contest import Contestant, WorkerThread
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import JUDGES, Judge
from flashwright.measure.records import NumberRecord, RunRecord
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec

if TYPE_CHECKING:
    from flashwright.fleet.job import WorkerPlace

Environment = Mapping[str, str]


def environment() -> Environment:
    """The software of the machine that judges and times. Raises Failed with FW851."""
    from flashwright.judge.judge import need_torch

    need_torch()
    return machine.environment(())


def same_environment(one: Environment, other: Environment) -> bool:
    """Whether times of both may be compared."""
    return _comparable(one) == _comparable(other)


def _comparable(versions: Environment) -> dict[str, str]:
    return {
        name: version for name, version in versions.items() if name not in machine.IGNORED_VERSIONS
    }


# --- judging ----------------------------------------------------------------------------------


def judging(
    folders: Mapping[str, Path],
    spec: AttentionSpec,
    judge: Judge,
) -> list[Job]:
    """Jobs that judge kernel packages by name; each part is a name and its verdict."""
    names = [*folders]
    chunks = [names[n : n + JUDGES] for n in range(0, len(names), JUDGES)]
    return [
        Job(
            f"judging {', '.join(chunk)}",
            functools.partial(_judge, {name: packed(folders[name]) for name in chunk}, spec, judge),
        )
        for chunk in chunks
    ]


def _judge(
    kernels: Mapping[str, FolderFiles], spec: AttentionSpec, judge: Judge, send: Send
) -> None:
    with tempfile.TemporaryDirectory() as here:
        # Each has a thread that lives as long as its processes (see contest.py).
        verdicts = {
            WorkerThread(f"judge {name}").submit(functools.partial(judge, candidate, spec)): name
            for name, candidate in _candidates(kernels, Path(here)).items()
        }
        for future in as_completed(verdicts):
            send((verdicts[future], future.result()))


def _candidates(kernels: Mapping[str, FolderFiles], here: Path) -> dict[str, Candidate]:
    """Write the packages into subfolders."""
    return {
        name: Candidate.package(unpack(files, here / str(number)), name)
        for number, (name, files) in enumerate(kernels.items())
    }


# --- timing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimingJob:
    """Times kernel packages against each other, cell by cell. Each part is a BenchProgress."""

    run: RunRecord
    cells: Sequence[Cell]
    kernels: Mapping[str, FolderFiles]
    """The packages by name, in the order of the run's contestants."""
    rules: Rules
    contest: Callable[[], ContestDependencies] = ContestDependencies
    environment: Callable[[], Environment] = environment

    def __call__(self, send: Send) -> None:
        """Time them here. Raises Failed if the software here is not that of the run."""
        found = self.environment()
        if not same_environment(found, self.run.environment):
            raise unusable(_differing(found, self.run.environment), "times would not be comparable")
        with tempfile.TemporaryDirectory() as here:
            candidates = _candidates(self.kernels, Path(here)).items()
            contestants = [Contestant(name, candidate) for name, candidate in candidates]
            journal, _ = Journal.begin(Path(here, "records"))
            bench(self.run, self.cells, contestants, journal, self.rules, self.contest(), send)


def _differing(found: Environment, wanted: Environment) -> str:
    import socket

    here, there = _comparable(found), _comparable(wanted)
    names = [n for n in {**there, **here} if here.get(n) != there.get(n)]
    told = ", ".join(f"{n} {here.get(n, 'none')} and not {there.get(n, 'none')}" for n in names)
    return f"{socket.gethostname()} has {told}"


def placed(lines: Sequence[CellRecord], place: WorkerPlace) -> tuple[CellRecord, ...]:
    """The records of a cell, with the host and the GPU that they are from."""
    return tuple(
        line.model_copy(update={"where": str(place)}) if isinstance(line, NumberRecord) else line
        for line in lines
    )


def of_all(step: BenchProgress, done: int, total: int) -> BenchProgress:
    """A job's progress as progress of all jobs."""
    return replace(step, done=done, total=total, left=None)
