"""A tuning without a GPU and without a compiler: kernels whose times are told beforehand."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.retile import name_of, tiling_of
from flashwright.author.builtin.variants import make_spec
from flashwright.build.driver import Card
from flashwright.build.package import RECORD
from flashwright.check.check import check
from flashwright.gpu import H200, Gpu
from flashwright.lang.parse import parse
from flashwright.measure.kernels import KernelBuild, from_tl
from flashwright.measure.tune.state import Tuning, read
from flashwright.measure.tune.tune import TuneDependencies, TuneRequest, tune
from flashwright.program.program import Program
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.problem import TimedProblem
from flashwright.spec import AttentionSpec
from tests.unit.fake_gpu import make_plan
from tests.unit.fleet_fakes import InLockstep
from tests.unit.measure_fakes import H200 as CARD
from tests.unit.measure_fakes import MS, Behaviour, Quiet, World, verdict

SPEC = make_spec("mha", head_dim=64, causal=True, dtype="bf16", heads=32)
PRESENT = "192x128-s2-w12-q2-noSplitMasked"
SHORT = "128x128-s2-w8-q2"
LENGTHS = (512, 1024, 2048)
Times = dict[str, Callable[[int], float]]
# As it was measured once: 128x128 is the best for few keys, the present 192x128 beyond.
CROSSING: Times = {SHORT: lambda n: 0.9 if n <= 1024 else 1.1, PRESENT: lambda n: 1.0}


@functools.cache
def checked(code: str) -> Program:
    found = check(parse(code), H200)
    assert found.program is not None, found.errors
    return found.program


def package(folder: Path, gpu: Gpu = H200, spec: AttentionSpec = SPEC) -> Path:
    """As the built-in author writes it, not built yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.tl").write_text(write_code(write_sketch(spec), spec, gpu).code)
    (folder / "spec.toml").write_text(specs.dump(spec))
    return folder


def order(
    folder: Path,
    wanted: int = 5,
    lengths: Sequence[int] = LENGTHS,
    spec: AttentionSpec = SPEC,
    **more: Any,
) -> TuneRequest:
    code = (folder / "code.tl").read_text()
    return TuneRequest(folder, spec, checked(code), code, H200, tuple(lengths), wanted, **more)


@dataclass
class Bench:
    """Everything that a tuning is done with, and what it asked for."""

    times: Times = field(default_factory=dict)
    """Relative to one millisecond for 512 keys; 2 for who is not named."""
    why: dict[str, str] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    offences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    world: World = field(default_factory=World)
    made: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    real: bool = False
    """Whether kernels are compiled."""
    listener: Quiet = field(default_factory=Quiet)
    environment: dict[str, str] = field(default_factory=lambda: {"driver": "580", "nvcc": "13.0"})

    def run(self, wanted: TuneRequest, before: Tuning | None = None) -> Tuning:
        for offer in wanted.offers():
            self.world.behaviours.setdefault(offer.name, Behaviour(self._seconds(offer.name)))
        return tune(wanted, CARD, InLockstep(), self.listener, 5, before, self.dependencies())

    def resumed(self, wanted: TuneRequest) -> Tuning:
        return self.run(wanted, read(wanted.folder))

    def _seconds(self, name: str) -> Callable[[TimedProblem, bool], float]:
        relative = self.times.get(name, lambda length: 2.0)
        return lambda problem, cold: relative(problem.length) * MS * problem.length / 512

    def dependencies(self) -> TuneDependencies:
        return TuneDependencies(
            contest=self.world.dependencies,
            compile=from_tl if self.real else self._kernel,
            judge=self._judge,
            environment=lambda: dict(self.environment),
            now=lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
            clock=lambda: self.world.time,
        )

    def _kernel(self, text: str, spec: AttentionSpec, gpu: str, card: Card) -> KernelBuild:
        self.world.event("make", gpu)
        tiling = tiling_of(checked(text))
        assert tiling is not None
        name = name_of(tiling)
        self.made.append(name)
        files: dict[str, str | bytes] = {
            "code.tl": text,
            "spec.toml": specs.dump(spec),
            "kernel.cu": self.source.get(name, f"// {name}\n"),
            "kernel.map.json": '{"lines": []}',
            "launch.json": make_plan(threads=32 * tiling.warps).dump(),
            "kernel.cubin": name.encode(),
            RECORD: '{"gpu": "h200", "artefacts": {}}',
        }
        return KernelBuild(spec, gpu, files, "", {"registers": 168}, why=self.why.get(name, ""))

    def _judge(self, candidate: Candidate, spec: AttentionSpec) -> Any:
        assert Path(candidate.where, "kernel.cubin").is_file()
        self.judged.append(candidate.title)
        return verdict(*self.offences.get(candidate.title, ()))
