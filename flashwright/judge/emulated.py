"""The judge without a GPU: the kernel's own PTX, executed on the CPU by the emulator.

It is the same trial as on a GPU, with an emulator in the place of the candidate's process: fp64,
poisoned outputs, other inputs, masked keys. What is run again is run under another schedule of the
asynchronous work and of the warps. What the emulator itself finds (races, accesses, barriers) is an
offence, at its line of TL. Here the PTX is read; a confined process executes it (machine_apart.py).
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flashwright.build.reading import read_cubin, untied
from flashwright.confine.start import CALLS, FILES
from flashwright.emulate.emulate import (
    COUNTS,
    SMS,
    Finding,
    Result,
    Variables,
    variables_of,
)
from flashwright.emulate.machine import Machine, here, library_file
from flashwright.emulate.machine_apart import MachineApart
from flashwright.emulate.package import Package, Served, Unending, read_served
from flashwright.emulate.places import CODES, diagnostics
from flashwright.judge.expected import Expected
from flashwright.judge.form import PackageForm, planned_shape
from flashwright.judge.inputs import random_tensor
from flashwright.judge.judge import QUESTIONS, SETTLED, Hearing, Progress, spread_of
from flashwright.judge.offences import hazard
from flashwright.judge.problems import Problem, coverage, problems
from flashwright.judge.trial import Outcome, Trial
from flashwright.judge.verdict import EMULATION, Offence, Verdict
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.layout import POISON
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.place import confinement
from flashwright.sandbox.process import Called, Ended, Output, Sandbox
from flashwright.sandbox.tensors import DTYPES, Array, bits
from flashwright.spec import AttentionSpec

SECONDS = 600.0  # for a whole trial; most take some 10 s
MANY_KEYS = 1000
LONGEST_BOUND = 1 << 16  # keys of a class of lengths that can be emulated
ROUNDS = 40  # launches of a small problem at the end
MOST_BYTES = 2 << 30  # of an output
_KINDS = {code: kind for kind, code in CODES.items()}
# Of a process, a stream or a library, which are not here; or answered by what the emulator finds.
_LEFT_OUT = ("exactness", "inputs", "guards", "stream", "views", "libraries")
ASKED = {
    **{name: text for name, text in QUESTIONS.items() if name not in _LEFT_OUT},
    "repeat": "the same inputs give the same bits under every schedule of asynchronous work",
    "hazards": "no access out of bounds, no race, no barrier or fence amiss",
}
ALONE = "the verdict is about the PTX alone: nothing ties the cubin to it"
_DIFFERS = "another schedule of the asynchronous work gives other bits"


def judge_emulated(
    folder: str | Path,
    spec: AttentionSpec,
    *,
    seed: int | None = None,
    base: Path | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    seconds: float = SECONDS,
    most: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """The verdict on a kernel package, under emulation.

    It rests on all problems, or on the first `most` of them: however fast the kernel is, there are
    as many. Where `seconds` are not enough for them, the verdict says so and is not `ok`. Of the
    limits that of one call's seconds counts. The other arguments are those of judge.judge. Failed
    where there is nothing that can be executed, or files that do not belong together.
    """
    tell = progress or (lambda done, total, text: None)
    served = read_served(Path(folder))
    notes = _ties(Path(folder), served)
    tell(0, 1, "reading its PTX")
    for package in served.packages.values():
        _ = package.program  # what cannot be executed is told before anything is tried
    tell(0, 1, "compiling the emulator, once")
    library_file()
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
        most=most,
        notes=notes,
    )
    found = hearing.verdict(EMULATION, served.plan.arch, lengths, tell)
    # Nobody expects a library there.
    return replace(found, unable=None, missing=hearing.missing, share=hearing.share)


def _ties(folder: Path, served: Served) -> list[str]:
    """Whether what is judged and what would run on a GPU belong together, as notes of a verdict.

    Failed with FW852 where files are not those of one build, or the cubin is for another GPU.
    """
    notes = []
    for name, package in served.packages.items():
        why = untied(folder / name)
        read_cubin(folder / name, package.plan)
        if why:
            notes.append(f"{ALONE} ({why})")
    return list(dict.fromkeys(notes))


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
    """In the place of the candidate's process: the package's PTX, executed by the emulator's."""

    served: Served | None = None
    launches: int = 0
    variables: dict[str, Variables] = field(default_factory=dict)
    """Of each kernel's module: a GPU loads it once, and launches find what others left there."""
    found: list[Launch] = field(default_factory=list)
    machine: MachineApart | None = None
    _first: Called | None = None
    _other: Called | None = None
    """What another schedule gave, where that is not the same."""

    def start(self) -> None:
        """It is started by the first launch."""
        self.sealed = True
        if len(confinement()) < len((FILES, CALLS)):
            text = "this system has not both Landlock and seccomp: a kernel that takes the emulator"
            self.gaps = (f"{text} over could reach more than its memory",)

    def close(self) -> None:
        """End the emulator's process; another launch starts another."""
        if self.machine is not None:
            self.machine.close()
        self.machine = None

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
        viewed: bool = False,
        far: bool = False,
        times: int = 1,
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
        if package.name not in self.variables:
            self.variables[package.name] = variables_of(package.program)
        kept, seconds = self.variables[package.name], self.limits.seconds
        if self.machine is None and sys.platform == "linux":
            self.machine = MachineApart(self.limits)
        given = (inputs, outputs, dims, schedule, seconds, kept)
        made, done = launch(package, *given, self.machine or here)
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
    variables: Variables | None = None,
    machine: Machine = here,
) -> tuple[dict[str, Array], Result]:
    """One launch on new outputs full of NaN bits; Ended where it does not come to an end.

    Failed with FW904 where the kernel takes other tensors than it is given.
    """
    made = {name: poisoned(shape, dtype) for name, (shape, dtype) in outputs.items()}
    missing = [name for name in package.plan.dims if name not in dims]
    if missing:
        text = f"no value is given for {', '.join(missing)}"
        raise Failed(Diagnostic("FW904", text))
    _fitting(package.plan, inputs, dims)
    if 0 in package.plan.blocks(dims, SMS):
        return made, Result((), np.zeros((len(package.program.source), len(COUNTS)), np.int64))
    arrays = {**{name: np.ascontiguousarray(x) for name, x in inputs.items()}, **made}
    try:
        return made, package.run(arrays, dims, schedule, seconds, variables, machine)
    except Unending as error:
        raise Ended("hang", str(error)) from None
    except ValueError as error:  # a tensor that can have no map
        raise Failed(Diagnostic("FW852", f"launch.json: maps: {error}")) from None


def _fitting(plan: LaunchPlan, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> None:
    """The launcher compares its tensors with the plan; the emulator's are compared here."""
    for tensor in plan.tensors:
        array = inputs.get(tensor.name)
        if array is None:
            continue
        wanted = (array.size,) if tensor.flat else planned_shape(tensor, dims)
        if array.shape != wanted:
            text = f"launch.json: tensors.{tensor.name} has the shape {wanted}"
            raise Failed(Diagnostic("FW904", f"{text}, and the spec's has {array.shape}"))


def poisoned(shape: Sequence[int], dtype: str) -> Array:
    """An output before anything is written to it; Failed with FW852 for more than can be had."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if size > MOST_BYTES:
        text = f"an output of {size} bytes cannot be emulated: launch.json gives it {tuple(shape)}"
        raise Failed(Diagnostic("FW852", text))
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
    most: int | None = None
    """Problems that the verdict rests on, where not on all."""
    missing: str = ""
    """Why the verdict has not enough to rest on."""
    share: tuple[int, int] | None = None
    """How many problems it rests on, and of how many, where not on all."""

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.seconds
        self.trial: Trial | None = None
        self.complete = False

    def _trial(self, running: Sandbox, expected: Expected) -> Trial:
        assert self.served is not None
        spread = spread_of(self.kernels, self.spec, expected.reference)
        form = PackageForm(self.spec, self.served.plan, spread=spread)
        self.trial = Trial(running, form, self.spec, expected, _DIFFERS, views=False)
        return self.trial

    def _problems(self, lengths: Sequence[tuple[int, int]] | None) -> list[Problem]:
        assert self.served is not None
        if lengths is None:
            self.chosen = coverage(self.spec, "emulated", self.kernels)
        bounds = [bound for bound in self.served.classes.bounds if bound <= LONGEST_BOUND]
        beyond = [bound for bound in self.served.classes.bounds if bound > LONGEST_BOUND]
        if beyond and lengths is None:
            text = "the kernel for more than {} keys was not tried: too long for emulation"
            self.missing = text.format(beyond[0])
        listed = problems(self.spec, self.seed, "emulated", lengths, bounds, self.chosen)
        if self.most is None or lengths is not None:
            return listed
        rested = listed[: max(self.most, 1 + len(bounds))]  # the bounds' come second
        if len(rested) < len(listed):
            self.share = len(rested), len(listed)
            self.notes.append(f"it rests on {len(rested)} of {len(listed)} problems")
        return rested

    def _fresh(self, number: int, problem: Problem) -> bool:
        """Not those that take long: a replay shows in the others."""
        return super()._fresh(number, problem) and problem.dims["kv_len"] < MANY_KEYS

    def _run(
        self,
        expected: Expected,
        lengths: Sequence[tuple[int, int]] | None,
        progress: Progress,
    ) -> None:
        super()._run(expected, lengths, progress)
        if self.complete and not self.found:
            self._later(progress)

    def _later(self, progress: Progress) -> None:
        """Once more at the end: a kernel that counts its calls may be right in the first ones.

        The first problem is put again, and a small one launched many times.
        """
        assert self.trial is not None
        tried = [o.problem for o in self.outcomes if o.cases]
        if not tried:
            return
        running = self.trial.sandbox
        assert isinstance(running, Emulator)
        progress(1, 1, "many calls, and the first problem again")
        with contextlib.closing(running):
            smallest = min(tried, key=lambda p: math.prod(p.dims.values()))
            self._keep(self._many(self.trial, smallest))
            self._keep(self.trial.run(tried[0]))
        self._enough(running, len(tried), len(tried))

    def _again_and_again(self, trial: Trial, listed: Sequence[Problem]) -> None:
        """Only when all else was tried: a launch takes its time here."""

    def _many(self, trial: Trial, problem: Problem) -> Outcome:
        """A problem launched many times: each time the same bits."""
        outcome, form = Outcome(problem), trial.form
        made = form.inputs(problem, trial.expected.reference)
        shapes = form.outputs(problem, trial.expected.outputs(made, problem.dims))
        given = (form.taken(made), shapes, form.dims(problem))
        first = trial.sandbox.call(*given)
        for number in range(ROUNDS):
            outcome.ask("repeat")
            if trial.varies(outcome, first, trial.sandbox.call(*given)):
                text = f"call {number + 2} with the same inputs gives other bits than the first"
                outcome.blame("not_repeatable", text)
                break
        return outcome

    def _enough(self, running: Sandbox, done: int, total: int) -> bool:
        """Something was found, where one place is enough to mend; or the time is up."""
        assert isinstance(running, Emulator)
        self.asked["hazards"] = running.launches
        if running.found:
            self.found += self._hazards(running.found)
            return True
        self.complete = done >= total - 1
        if not self.complete and done and time.monotonic() > self.until:
            self.missing = f"{done} of {total - 1} problems were tried in {self.seconds:g} s"
            return True
        return False

    def _hazards(self, found: Sequence[Launch]) -> list[Offence]:
        """The offences of the first launch that has any, at their lines of TL."""
        first = found[0]
        package = first.package.with_lines()
        sizes = ", ".join(f"{name} {size}" for name, size in first.dims.items())
        note = f"with {sizes}, schedule {first.schedule}"
        origin = package.origin(first.dims, _arrays(first.inputs, first.outputs))
        told = diagnostics([package.placed(one) for one in first.findings], origin)
        if Path(package.name) != Path(self.candidate.title):
            told = tuple(_elsewhere(d, package.name) for d in told)
        return [
            hazard(_KINDS[d.code], replace(d, help=f"{d.help}; {note}" if d.help else note))
            for d in told
        ]


def _elsewhere(found: Diagnostic, folder: str) -> Diagnostic:
    """A finding in a further kernel of a package: its line is none of the package's own TL."""
    line = f", line {found.span.line}" if found.span else ""
    text = f"{found.message} ({folder}/code.tl{line})"
    return replace(found, message=text, span=None, secondary=())
