"""The judge without a GPU: the emulator executes the kernel's PTX on the CPU.

The trial is the one on a GPU, with an emulator instead of the candidate's process: fp64, poisoned
outputs, other inputs, masked keys. A repeated call runs under another schedule of the asynchronous
work and of the warps. What the emulator finds (races, accesses, barriers) is an offence, at its
line of TL. This module reads the PTX; a confined process executes it (machine_process.py).
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

from flashwright.build.load import shown_dims
from flashwright.build.reading import read_cubin, untied
from flashwright.confine.start import CALLS, FILES
from flashwright.emulate.emulate import (
    COUNTS,
    SMS,
    Finding,
    LaunchResult,
    Variables,
    variables_of,
)
from flashwright.emulate.machine import Machine, here, library_file
from flashwright.emulate.machine_process import MachineProcess
from flashwright.emulate.package import Package, ServedKernels, Unending, read_served_kernels
from flashwright.emulate.places import CODES, diagnostics
from flashwright.judge.answer import Answer
from flashwright.judge.expected import Expected
from flashwright.judge.form import PackageForm, package_form, planned_shape
from flashwright.judge.inputs import random_tensor
from flashwright.judge.judge import QUESTIONS, SETTLED, JudgeRun, Progress, spread_of
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
LONGEST_BOUND = 1 << 16  # keys of the longest class of lengths that is emulated
SHOWN = 3  # problems that a note names
ROUNDS = 40  # launches of a small problem at the end
MOST_BYTES = 2 << 30  # of an output
_KINDS = {code: kind for kind, code in CODES.items()}
# Questions about a process, a stream or a library, which emulation does not have, and questions
# that the emulator's own findings answer.
_LEFT_OUT = ("exactness", "inputs", "guards", "stream", "views", "libraries")
ASKED = {
    **{name: text for name, text in QUESTIONS.items() if name not in _LEFT_OUT},
    "repeat": "the same inputs give the same bits under every schedule of asynchronous work",
    "hazards": "no access out of bounds, no race, no barrier or fence amiss",
}
ALONE = "the verdict is about the PTX alone: no record shows that the cubin was built from it"
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

    It tries all problems, or the first `most` of them; their number does not depend on the kernel's
    speed. If `seconds` are too few for them, the verdict says so and is not `ok`. Of `limits`, only
    the seconds of one call apply. The other arguments are those of judge.judge.

    Raises Failed if the package has no PTX that can be executed, or files of different builds.
    """
    tell = progress or (lambda done, total, text: None)
    served = read_served_kernels(Path(folder))
    notes = _build_notes(Path(folder), served)
    tell(0, 1, "reading its PTX")
    for package in served.packages.values():
        _ = package.program  # fails here, before any problem runs, if it cannot be executed
    tell(0, 1, "compiling the emulator, once")
    library_file()
    run = _EmulatedRun(
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
    found = run.verdict(EMULATION, served.plan.arch, lengths, tell)
    # Emulation compares no library.
    return replace(found, unable=None, missing=run.missing, share=run.share)


def _build_notes(folder: Path, served: ServedKernels) -> list[str]:
    """Notes on whether the judged PTX and the cubin that a GPU would run belong together.

    Raises Failed with FW852 if the files are not of one build or the cubin is for another GPU.
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
    """One problem with its inputs, laid out as the kernel's launch plan asks."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, tuple[Sequence[int], str]]
    expected: Answer
    """The outputs in fp64; empty without a spec."""

    def tensors(self) -> dict[str, Array]:
        """The inputs, and new outputs."""
        return {**self.inputs, **new_outputs(self.outputs, self.inputs)}


def pose(
    plan: LaunchPlan,
    spec: AttentionSpec | None,
    base: Path | None,
    dims: Mapping[str, int],
    seed: int,
) -> Posed:
    """Random inputs of these sizes, and with a spec the expected outputs."""
    if spec is None:
        rng = np.random.default_rng(seed)
        shapes = {t.name: (planned_shape(t, dims), t.dtype) for t in plan.tensors}
        read = [t.name for t in plan.tensors if t.read]
        return Posed(
            {name: random_tensor(*shapes[name], rng) for name in read},
            {t.name: shapes[t.name] for t in plan.tensors if t.written},
            Answer({}),
        )
    expected, form = Expected(spec, "cpu", base), PackageForm(spec, plan)
    problem = Problem(dims, "normal", seed)
    made = expected.inputs(form.inputs(problem, expected.reference), dims, seed)
    answer = expected.outputs(made, dims)
    return Posed(form.taken(made), form.outputs(problem, answer) or {}, answer)


@dataclass(frozen=True)
class FaultyLaunch:
    """A launch in which the emulator found something."""

    package: Package
    findings: tuple[Finding, ...]
    arrays: Mapping[str, Array]
    """Its tensors by name, for their sizes."""
    dims: Mapping[str, int]
    schedule: str


@dataclass
class Emulator(Sandbox):
    """The sandbox of a trial under emulation: it executes the package's PTX."""

    served: ServedKernels | None = None
    launches: int = 0
    variables: dict[str, Variables] = field(default_factory=dict)
    """The global variables of each kernel's module. They persist from launch to launch, as on a
    GPU."""
    found: list[FaultyLaunch] = field(default_factory=list)
    machine: MachineProcess | None = None
    _first: Called | None = None
    _other: Called | None = None
    """The result of another schedule, if it differs from the first."""

    def start(self) -> None:
        """Check the confinement. The first launch starts the emulator's process."""
        self.sealed = True
        if len(confinement()) < len((FILES, CALLS)):
            text = "this system lacks Landlock or seccomp: a kernel that exploits the emulator"
            self.gaps = (f"{text} could reach more than the emulator's memory",)

    def close(self) -> None:
        """End the emulator's process. The next launch starts another."""
        if self.machine is not None:
            self.machine.close()
        self.machine = None

    @property
    def alive(self) -> bool:
        """True: the next launch starts a process if there is none."""
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
        viewed: Sequence[str] = (),
        far: bool = False,
        times: int = 1,
    ) -> Called:
        """As Sandbox.call. A `place` other than 0 runs the call under other schedules."""
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
        start = time.monotonic()
        tensors = {**inputs, **new_outputs(outputs, inputs)}
        for name in (name for name in self.served.zeroed if name in outputs):
            tensors[name][...] = np.zeros((), tensors[name].dtype)  # as the launcher does
        for package in self.served.pick(dims):
            self._launch(package, tensors, dims, schedule)
        told = {name: Output(tensors[name], dtype) for name, (_, dtype) in outputs.items()}
        return Called(told, seconds=time.monotonic() - start)

    def _launch(
        self, package: Package, tensors: dict[str, Array], dims: Mapping[str, int], schedule: str
    ) -> None:
        """Launch one kernel. `tensors` gets what it shares with those after it."""
        assert self.served is not None
        dims = {**shown_dims(package.plan, tensors), **dims}
        for tensor in package.plan.tensors if self.served.in_order else ():
            if tensor.name not in tensors:
                new = poisoned(tensor.padded(planned_shape(tensor, dims)), tensor.dtype)
                if tensor.name in self.served.zeroed:
                    new[...] = np.zeros((), new.dtype)
                tensors[tensor.name] = new
        if package.name not in self.variables:
            self.variables[package.name] = variables_of(package.program)
        kept, seconds = self.variables[package.name], self.limits.seconds
        if self.machine is None and sys.platform == "linux":
            self.machine = MachineProcess(self.limits)
        used = {t.name: tensors[t.name] for t in package.plan.tensors if t.name in tensors}
        done = launch(package, used, dims, schedule, seconds, kept, self.machine or here)
        self.launches += 1
        if done.findings:
            self.found.append(FaultyLaunch(package, done.findings, used, dims, schedule))


def new_outputs(
    outputs: Mapping[str, tuple[Sequence[int], str]], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """New outputs full of NaN bits; those in place have what the inputs say."""
    return {
        name: inputs[name].copy() if name in inputs else poisoned(shape, dtype)
        for name, (shape, dtype) in outputs.items()
    }


def launch(
    package: Package,
    tensors: Mapping[str, Array],
    dims: Mapping[str, int],
    schedule: str,
    seconds: float,
    variables: Variables | None = None,
    machine: Machine = here,
) -> LaunchResult:
    """One launch on these tensors, of which it writes some: what the emulator found.

    Raises Ended if the launch does not finish, Failed with FW904 if the kernel takes other tensors.
    """
    dims = {**shown_dims(package.plan, tensors), **dims}
    missing = [name for name in package.plan.dims if name not in dims]
    if missing:
        text = f"no value is given for {', '.join(missing)}"
        raise Failed(Diagnostic("FW904", text))
    _check_shapes(package.plan, tensors, dims)
    if 0 in package.plan.blocks(dims, SMS):
        return LaunchResult((), np.zeros((len(package.program.source), len(COUNTS)), np.int64))
    arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    try:
        return package.run(arrays, dims, schedule, seconds, variables, machine)
    except Unending as error:
        raise Ended("hang", str(error)) from None
    except ValueError as error:  # a tensor that can have no map
        raise Failed(Diagnostic("FW852", f"launch.json: maps: {error}")) from None


def _check_shapes(plan: LaunchPlan, tensors: Mapping[str, Array], dims: Mapping[str, int]) -> None:
    """Fail if a tensor does not have the shape of the plan: what the launcher checks on a GPU."""
    for tensor in plan.tensors:
        array = tensors.get(tensor.name)
        if array is None:
            continue
        planned = tensor.padded(planned_shape(tensor, dims))
        wanted = (array.size,) if tensor.flat else planned
        if array.shape != wanted:
            text = f"launch.json: tensors.{tensor.name} has the shape {wanted}"
            raise Failed(Diagnostic("FW904", f"{text}, and the spec's has {array.shape}"))


def poisoned(shape: Sequence[int], dtype: str) -> Array:
    """An output full of NaN bits. Raises Failed with FW852 for more than MOST_BYTES."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if size > MOST_BYTES:
        text = f"an output of {size} bytes cannot be emulated: launch.json gives it {tuple(shape)}"
        raise Failed(Diagnostic("FW852", text))
    empty: Array = np.empty(tuple(shape), DTYPES[dtype])
    empty.reshape(-1).view(np.uint8)[:] = POISON
    return empty


def _in_short(names: Sequence[str]) -> str:
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _same(one: Called, other: Called) -> bool:
    return all(
        np.array_equal(bits(output.array), bits(other.outputs[name].array))
        for name, output in one.outputs.items()
        if name in other.outputs
    )


@dataclass
class _EmulatedRun(JudgeRun):
    served: ServedKernels | None = None
    seconds: float = 0.0
    most: int | None = None
    """How many problems to try; None for all."""
    missing: str = ""
    """What was not tried, if too little was tried for a verdict."""
    share: tuple[int, int] | None = None
    """How many problems the verdict rests on, and of how many; None if on all."""

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.seconds
        self.trial: Trial | None = None
        self.complete = False

    def _trial(self, running: Sandbox, expected: Expected) -> Trial:
        assert self.served is not None
        spread = spread_of(self.kernels, self.spec, expected.reference)
        form = package_form(Path(self.candidate.where), self.spec, spread)
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
        whole = any(kernel.tiling.grouped for kernel in self.kernels)
        listed = problems(self.spec, self.seed, "emulated", lengths, bounds, self.chosen, whole)
        if self.most is None or lengths is not None:
            return listed
        fewest = 2 + len(bounds) if bounds else 1  # behind those at bounds is a short one
        rested = listed[: max(self.most, fewest)]
        if len(rested) < len(listed):
            self.share = len(rested), len(listed)
            rest = _in_short([str(problem) for problem in listed[len(rested) :]])
            text = f"it rests on {len(rested)} of {len(listed)} problems; the others are"
            self.notes.append(f"{text} {rest}")
        return rested

    def _wants_fresh_inputs(self, number: int, problem: Problem) -> bool:
        """Whether a problem gets other inputs: not the long ones, as a replay shows in others."""
        return super()._wants_fresh_inputs(number, problem) and problem.dims["kv_len"] < MANY_KEYS

    def _run(
        self,
        expected: Expected,
        lengths: Sequence[tuple[int, int]] | None,
        progress: Progress,
    ) -> None:
        super()._run(expected, lengths, progress)
        if self.complete and not self.found:
            self._repeat_at_the_end(progress)

    def _repeat_at_the_end(self, progress: Progress) -> None:
        """Run the first problem again, and a small one many times.

        A kernel that counts its calls may be right in the first ones only.
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
            self._add_outcome(self._launch_many_times(self.trial, smallest))
            self._add_outcome(self.trial.run(tried[0]))
        self._should_stop(running, len(tried), len(tried))

    def _launch_many_times(self, trial: Trial, problem: Problem) -> Outcome:
        """Launch a problem many times. Each launch must give the same bits."""
        outcome, form = Outcome(problem), trial.form
        made = trial.inputs(problem)
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

    def _should_stop(self, running: Sandbox, done: int, total: int) -> bool:
        """Whether to stop: an offence was found, or the time is up."""
        assert isinstance(running, Emulator)
        self.asked["hazards"] = running.launches
        if running.found:
            self.found += self._hazard_offences(running.found)
            return True
        self.complete = done >= total - 1
        if not self.complete and done and time.monotonic() > self.until:
            self.missing = f"{done} of {total - 1} problems were tried in {self.seconds:g} s"
            return True
        return False

    def _hazard_offences(self, found: Sequence[FaultyLaunch]) -> list[Offence]:
        """The offences of the first launch with findings, at their lines of TL."""
        first = found[0]
        package = first.package.with_lines()
        sizes = ", ".join(f"{name} {size}" for name, size in first.dims.items())
        note = f"with {sizes}, schedule {first.schedule}"
        origin = package.origin(first.dims, first.arrays)
        told = diagnostics([package.add_source_lines(one) for one in first.findings], origin)
        if Path(package.name) != Path(self.candidate.title):
            told = tuple(_without_span(d, package.name) for d in told)
        return [
            hazard(_KINDS[d.code], replace(d, help=f"{d.help}; {note}" if d.help else note))
            for d in told
        ]


def _without_span(found: Diagnostic, folder: str) -> Diagnostic:
    """A finding in a subfolder's kernel, without its span: that is no line of the package's TL."""
    line = f", line {found.span.line}" if found.span else ""
    text = f"{found.message} ({folder}/code.tl{line})"
    return replace(found, message=text, span=None, secondary=())
