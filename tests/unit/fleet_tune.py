"""A tuning with kernels and times that are known beforehand, as a program: `fleet_tune FOLDER ON`.

The driver of a Ray cluster in the tests, which kill it and start it again.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashwright.build.driver import Card
from flashwright.build.package import RECORD
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.job import Machines
from flashwright.fleet.on_ray import RayCluster
from flashwright.fleet.processes import LocalMachine
from flashwright.measure.bench import BenchProgress, ContestDependencies
from flashwright.measure.kernels import KernelBuild
from flashwright.measure.tune.state import Tuning, read
from flashwright.measure.tune.tune import TuneDependencies, tune
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.problem import TimedProblem
from flashwright.spec import AttentionSpec
from tests.unit.fake_gpu import make_plan
from tests.unit.measure_fakes import H200, MS, Behaviour, World, verdict
from tests.unit.tune_fakes import LENGTHS, order

CARDS = (H200, Card(1, H200.name, H200.capability))
WANTED = 18
"""Candidates: three groups."""


def look() -> tuple[Card, ...]:
    """The GPUs of any machine of the tests."""
    return CARDS


def environment() -> Mapping[str, str]:
    return {"driver": "580"}


def compiled(text: str, spec: AttentionSpec, gpu: str, card: Card) -> KernelBuild:
    """A kernel that nobody compiles: its tiles are the text's."""
    files: dict[str, str | bytes] = {
        "code.tl": text,
        "spec.toml": "",
        "kernel.cu": text,
        "launch.json": make_plan(threads=128).dump(),
        "kernel.cubin": text.encode(),
        RECORD: '{"gpu": "h200", "artefacts": {}}',
    }
    return KernelBuild(spec, gpu, files, "", {"registers": 168})


def judged(candidate: Candidate, spec: AttentionSpec) -> Any:
    assert Path(candidate.where, "kernel.cubin").is_file()
    return verdict(*(("wrong",) if candidate.title.endswith("noOverlap") else ()))


def seconds(name: str, problem: TimedProblem, cold: bool) -> float:
    """A time that the name and the length decide."""
    return MS * problem.length / 512 * (1 + random.Random(f"{name} {problem.length}").random())


class Named(World):
    """Contestants that take what their names say, each cell a moment of real time too."""

    def make(self, candidate: Candidate, spec: AttentionSpec) -> Any:
        self.behaviours[candidate.title] = Behaviour(partial(seconds, candidate.title))
        return super().make(candidate, spec)

    def event(self, *what: Any) -> None:
        super().event(*what)
        if what[0] == "prepare":
            time.sleep(0.02)


def contest() -> ContestDependencies:
    return Named().dependencies()


def now() -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Told:
    """Prints a line for everything that is kept."""

    def phase(self, title: str) -> None:
        print(title, flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        pass

    def cell(self, step: BenchProgress) -> None:
        if step.lines:
            print(f"cell {step.cell}", flush=True)


def tuned(folder: Path, machines: Machines, told: Any = None) -> Tuning:
    """Tune a package, or go on with its tuning."""
    given = TuneDependencies(contest, compiled, judged, environment, now)
    with Fleet(machines) as fleet:
        card = fleet.card("h200")
        wanted = order(folder, WANTED, LENGTHS, jobs=2)
        return tune(wanted, card, fleet, told or Told(), 5, read(folder), given)


if __name__ == "__main__":
    place, on = sys.argv[1:]
    tuned(Path(place), LocalMachine(look=look) if on == "local" else RayCluster(on, look))
