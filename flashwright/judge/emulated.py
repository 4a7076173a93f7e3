"""The judge without a GPU: the kernel's own PTX, executed on the CPU by the emulator.

It is the same trial as on a GPU, with an emulator in the place of the candidate's process: fp64,
poisoned outputs, other inputs, masked keys. What is run again is run under another schedule of the
asynchronous work and of the warps. What the emulator itself finds (races, accesses, barriers) is an
offence, at its line of TL.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flashwright.emulate.emulate import COUNTS, Finding, Result
from flashwright.emulate.machine import library
from flashwright.emulate.package import Package, Served, Unending, read_served
from flashwright.emulate.places import CODES, diagnostics
from flashwright.judge.expected import Expected
from flashwright.judge.form import PackageForm, planned_shape
from flashwright.judge.inputs import random_tensor
from flashwright.judge.judge import QUESTIONS, SETTLED, Hearing, Progress, spread_of
from flashwright.judge.offences import hazard
from flashwright.judge.problems import Problem, coverage, problems
from flashwright.judge.trial import Trial
from flashwright.judge.verdict import EMULATION, Offence, Verdict
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan, evaluate
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.device import POISON
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Called, Ended, Output, Sandbox
from flashwright.sandbox.tensors import DTYPES, Array, bits
from flashwright.spec import AttentionSpec

SECONDS = 120.0  # for a whole trial
MANY_KEYS = 1000
FEWEST = 2  # problems that are tried however long they take, and those at the bounds of classes
_KINDS = {code: kind for kind, code in CODES.items()}
# Of a process, a stream or a library, which are not here; or answered by what the emulator finds.
_LEFT_OUT = ("exactness", "inputs", "guards", "stream", "libraries")
ASKED = {
    **{name: text for name, text in QUESTIONS.items() if name not in _LEFT_OUT},
    "repeat": "the same inputs give the same bits under every schedule of asynchronous work",
    "hazards": "no access out of bounds, no race, no barrier or fence amiss",
}
_DIFFERS = "another schedule of the asynchronous work gives other bits"


def judge_emulated(
    folder: str | Path,
    spec: AttentionSpec,
    *,
    seed: int | None = None,
    base: Path | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    seconds: float = SECONDS,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """The verdict on a kernel package, under emulation.

    `seconds` bound the trial: that it ended early is said in the verdict's notes. Of the limits
    that of one call's seconds counts. The other arguments are those of judge.judge. Failed where
    there is nothing that can be executed.
    """
    tell = progress or (lambda done, total, text: None)
    served = read_served(Path(folder))
    tell(0, 1, "reading its PTX")
    for package in served.packages.values():
        _ = package.program  # what cannot be executed is told before anything is tried
    tell(0, 1, "compiling the emulator, once")
    library()
    hearing = _Hearing(
        candidate=Candidate.package(Path(folder)),
        spec=spec,
        seed=secrets.randbits(31) if seed is None else seed,
        device="cpu",
        base=base,
        limits=limits or Limits(),
        libraries=False,
        sandbox=partial(Emulator, served=served),
        questions=ASKED,
        settled={**SETTLED, "hazards": tuple(hazard(k, _NOTHING).name for k in CODES)},
        served=served,
        seconds=seconds,
    )
    found = hearing.verdict(EMULATION, served.plan.arch, lengths, tell)
    return replace(found, unable=None)  # nobody expects a library there


_NOTHING = Diagnostic("FW833", "")


@dataclass(frozen=True)
class Posed:
    """One problem with its inputs, for a kernel as its plan has it."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, tuple[Sequence[int], str]]
    expected: Mapping[str, Array]
    """In fp64; empty where nothing says what is right."""

    @property
    def arrays(self) -> dict[str, Array]:
        """All tensors, for their sizes."""
        return _arrays(self.inputs, self.outputs)


def pose(
    plan: LaunchPlan,
    spec: AttentionSpec | None,
    base: Path | None,
    dims: Mapping[str, int],
    seed: int,
) -> Posed:
    """Random inputs of these sizes, and what should come out where a spec says it."""
    if spec is None:
        rng = np.random.default_rng(seed)
        shapes = {t.name: (planned_shape(t, dims), t.dtype) for t in plan.tensors}
        read = [t.name for t in plan.tensors if t.read]
        return Posed(
            {name: random_tensor(*shapes[name], rng) for name in read},
            {t.name: shapes[t.name] for t in plan.tensors if t.written},
            {},
        )
    expected, form = Expected(spec, "cpu", base), PackageForm(spec, plan)
    problem = Problem(dims, "normal", seed)
    made = form.inputs(problem, expected.reference)
    answer = expected.outputs(made, dims)
    return Posed(form.taken(made), form.outputs(problem, answer) or {}, answer)


@dataclass(frozen=True)
class Launch:
    """A launch in which something was found."""

    package: Package
    findings: tuple[Finding, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, tuple[Sequence[int], str]]
    dims: Mapping[str, int]
    schedule: str


@dataclass
class Emulator(Sandbox):
    """In the place of a process: the package's PTX, executed here."""

    served: Served | None = None
    launches: int = 0
    found: list[Launch] = field(default_factory=list)
    _first: Called | None = None
    _other: Called | None = None
    """What another schedule gave, where that is not the same."""

    def start(self) -> None:
        """There is nothing to start, and nothing that could get out."""
        self.sealed = True

    def close(self) -> None:
        """There is nothing to end."""

    @property
    def alive(self) -> bool:
        """See Sandbox."""
        return True

    def call(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, tuple[Sequence[int], str]] | None = None,
        dims: Mapping[str, int] | None = None,
        *,
        place: int = 0,
        ahead: bool = False,
        around: int = POISON,
        patience: float = 0.0,
    ) -> Called:
        """As Sandbox.call; a call at another place is one under other schedules."""
        given = (inputs, outputs or {}, dims or {})
        if place == 0:
            self._first, self._other = self._run(*given, "eager"), None
            return self._first
        if self._other is not None:
            return self._other
        called = self._first
        for schedule in ("lazy", f"random:{self.launches}"):
            called = self._run(*given, schedule)
            if self._first is not None and not _same(self._first, called):
                self._other = called
                break
        assert called is not None
        return called

    def _run(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, tuple[Sequence[int], str]],
        dims: Mapping[str, int],
        schedule: str,
    ) -> Called:
        assert self.served is not None
        start, package = time.monotonic(), self.served.pick(dims)
        made, done = launch(package, inputs, outputs, dims, schedule, self.limits.seconds)
        self.launches += 1
        if done.findings:
            self.found.append(Launch(package, done.findings, inputs, outputs, dims, schedule))
        told = {name: Output(array, outputs[name][1]) for name, array in made.items()}
        return Called(told, seconds=time.monotonic() - start)


def launch(
    package: Package,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, tuple[Sequence[int], str]],
    dims: Mapping[str, int],
    schedule: str,
    seconds: float,
) -> tuple[dict[str, Array], Result]:
    """One launch on new outputs full of NaN bits; Ended where it does not come to an end."""
    made = {name: poisoned(shape, dtype) for name, (shape, dtype) in outputs.items()}
    missing = [name for name in package.plan.dims if name not in dims]
    if missing:
        text = f"no value is given for {', '.join(missing)}"
        raise Failed(Diagnostic("FW904", text))
    if 0 in (evaluate(count, dims) for count in package.plan.grid):
        return made, Result((), np.zeros((len(package.program.source), len(COUNTS)), np.int64))
    arrays = {**{name: np.ascontiguousarray(x) for name, x in inputs.items()}, **made}
    try:
        return made, package.run(arrays, dims, schedule, seconds)
    except Unending as error:
        raise Ended("hang", str(error)) from None


def poisoned(shape: Sequence[int], dtype: str) -> Array:
    """An output before anything is written to it."""
    empty: Array = np.empty(tuple(shape), DTYPES[dtype])
    empty.reshape(-1).view(np.uint8)[:] = POISON
    return empty


def _arrays(
    inputs: Mapping[str, Array], outputs: Mapping[str, tuple[Sequence[int], str]]
) -> dict[str, Array]:
    """All tensors of a launch, for their sizes."""
    made = {name: poisoned(shape, dtype) for name, (shape, dtype) in outputs.items()}
    return {**inputs, **made}


def _same(one: Called, other: Called) -> bool:
    return all(
        np.array_equal(bits(output.array), bits(other.outputs[name].array))
        for name, output in one.outputs.items()
        if name in other.outputs
    )


@dataclass
class _Hearing(Hearing):
    served: Served | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.seconds

    def _trial(self, running: Sandbox, expected: Expected) -> Trial:
        assert self.served is not None
        spread = spread_of(self.kernels, self.spec, expected.reference)
        form = PackageForm(self.spec, self.served.plan, spread=spread)
        return Trial(running, form, self.spec, expected, differs=_DIFFERS)

    def _problems(self, lengths: Sequence[tuple[int, int]] | None) -> list[Problem]:
        assert self.served is not None
        if lengths is None:
            self.chosen = coverage(self.spec, "emulated", self.kernels, self.seconds)
        bounds = self.served.classes.bounds
        return problems(self.spec, self.seed, "emulated", lengths, bounds, self.chosen)

    def _fresh(self, number: int, problem: Problem) -> bool:
        """Not those that take long: a replay shows in the others."""
        return super()._fresh(number, problem) and problem.dims["kv_len"] < MANY_KEYS

    @property
    def _fewest(self) -> int:
        """So many that every kernel of the package has had a problem: the bounds' come second."""
        assert self.served is not None
        return max(FEWEST, 1 + len(self.served.classes.bounds))

    def _enough(self, running: Sandbox, done: int, total: int) -> bool:
        """The time is up, or something was found: one place is enough to mend."""
        assert isinstance(running, Emulator)
        self.asked["hazards"] = running.launches
        if running.found:
            self.found += self._hazards(running.found)
            return True
        if done >= self._fewest and time.monotonic() > self.until:
            self.notes.append(f"the time was up after {done} of {total} problems")
            return True
        return False

    def _hazards(self, found: Sequence[Launch]) -> list[Offence]:
        """The offences of the first launch that has any, at their lines of TL."""
        first = found[0]
        package = first.package.with_lines()
        if package is not first.package:  # the same launch, by instructions that know their lines
            first = self._again(package, first)
        sizes = ", ".join(f"{name} {size}" for name, size in first.dims.items())
        note = f"with {sizes}, schedule {first.schedule}"
        origin = package.origin(first.dims, _arrays(first.inputs, first.outputs))
        told = diagnostics(first.findings, origin)
        if Path(package.name) != Path(self.candidate.title):
            told = tuple(_elsewhere(d, package.name) for d in told)
        return [
            hazard(_KINDS[d.code], replace(d, help=f"{d.help}; {note}" if d.help else note))
            for d in told
        ]

    def _again(self, package: Package, first: Launch) -> Launch:
        given = (first.inputs, first.outputs, first.dims, first.schedule)
        done = launch(package, *given, self.limits.seconds)[1]
        return replace(first, findings=done.findings)


def _elsewhere(found: Diagnostic, folder: str) -> Diagnostic:
    """A finding in a further kernel of a package: its line is none of the package's own TL."""
    line = f", line {found.span.line}" if found.span else ""
    text = f"{found.message} ({folder}/code.tl{line})"
    return replace(found, message=text, span=None, secondary=())
