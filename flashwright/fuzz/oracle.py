"""The differential test of one program: the interpreter against its kernel under emulation."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright import gpu as gpus
from flashwright.build.make import make
from flashwright.check.check import check
from flashwright.emulate.emulate import Finding
from flashwright.emulate.package import Package, Unending
from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.compare import difference
from flashwright.fuzz.compile_many import CompileFailure, Source, compile_many
from flashwright.fuzz.inputs import make_inputs
from flashwright.fuzz.noise import perturbed
from flashwright.judge.cpu import arrange
from flashwright.judge.form import planned_shape
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor, evaluate
from flashwright.lower.report import UNVERIFIED
from flashwright.lower.translate import Translation, translate
from flashwright.program.program import Program
from flashwright.semantics.interpret import NUMPY_DTYPES, interpret, shape_of

Array = NDArray[Any]

KINDS = (
    *("agree", "wrong", "schedule", "hang", "race", "hazard", "uncompiled", "crash", "slow"),
    *("unverified", "refused", "untranslated", "unread", "unassembled"),
)
"""agree: same outputs. wrong: different outputs. schedule: two schedules give different bits.
hang: a wait without end. race, hazard: the emulator's other findings. uncompiled: nvcc
refuses the kernel. crash: an exception that is no Diagnostic. slow: a time limit. refused: by the
checker or by the interpreter. untranslated: FW811. unverified: FW820, the
verifier refuses the schedule. unread: PTX that the emulator cannot take.
unassembled: ptxas refuses the kernel, serialises its wgmma, or spills registers."""
FAILURES = frozenset(KINDS[1:10])
SECONDS = 60.0  # for one step of one program
_PERTURBED, _MORE = range(1, 3), range(3, 33)
"""Seeds of the perturbed runs, and of further runs if an output differs: two runs may round a value
the same way by chance."""
_POISON = 0xFF
PADDING = 8  # rows between views, at most


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program: one of KINDS, with details."""

    kind: str
    detail: str = ""
    where: str = ""
    """The step and the code: a diagnostic's, a finding's kind, an exception's name."""

    @property
    def failed(self) -> bool:
        """Whether it is a failure of Flashwright: one of FAILURES."""
        return self.kind in FAILURES

    @property
    def bucket(self) -> str:
        """The kind of failure that shrinking must preserve."""
        return f"{self.kind}:{self.where}"


@dataclass(frozen=True)
class Prepared:
    """A checked and translated program."""

    case: FuzzCase
    program: Program
    made: Translation


class _TimedOut(Exception):
    pass


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TimedOut in the main thread after this many seconds."""

    def late(*_: Any) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def prepare(case: FuzzCase) -> Prepared | ProgramOutcome:
    """Check and translate a program for the comparison."""
    step = "check"
    try:
        with _limited(SECONDS):
            card = gpus.find(case.gpu)
            verdict = check(parse(case.text), card)
            if verdict.program is None:
                first = verdict.errors[0] if verdict.errors else None
                code, text = (first.code, first.message) if first else ("sketch", "no code")
                return ProgramOutcome("refused", text[:300], code)
            step = "translate"
            made = translate(verdict.program, card, sparing=case.sparing)
            for remark in made.report.remarks if made.report else ():
                if remark.code == UNVERIFIED:
                    return ProgramOutcome("unverified", remark.text[:300], f"{case.gpu} verifier")
            return Prepared(case, verdict.program, made)
    except Failed as failed:
        first = failed.diagnostics[0]
        kind = "refused" if step == "check" else "untranslated"
        return ProgramOutcome(kind, first.message[:300], first.code)
    except _TimedOut:
        return ProgramOutcome("slow", f"no end after {SECONDS:g} s", step)
    except Exception as error:
        return _crashed(step, error)


def _crashed(step: str, error: Exception) -> ProgramOutcome:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename.rsplit('/flashwright/')[-1]}:{frame.name}"
    text = f"{type(error).__name__}: {error}"
    return ProgramOutcome("crash", text[:300], f"{step} {type(error).__name__} {place}")


def compiled(prepared: Sequence[Prepared]) -> list[str | ProgramOutcome]:
    """The PTX of each kernel; one run of nvcc for each architecture."""
    sources = [Source(p.made.source, p.made.plan.entry, p.made.plan.arch) for p in prepared]
    return [
        ProgramOutcome("uncompiled", one.message, _shape_of_message(one.message))
        if isinstance(one, CompileFailure)
        else one
        for one in compile_many(sources)
    ]


def assembled(prepared: Prepared) -> ProgramOutcome:
    """Compile a kernel to a cubin; spills and serialised wgmma are outcomes."""
    try:
        make(prepared.program, gpus.find(prepared.case.gpu), first=prepared.made)
    except Failed as failed:
        first = failed.diagnostics[0]
        return ProgramOutcome("unassembled", first.message[:300], first.code)
    return ProgramOutcome("agree")


def _shape_of_message(message: str) -> str:
    """A message without its names and numbers, to group equal errors."""
    text = message.split("error:")[-1].strip()
    return " ".join(text.split()[:6])


def compare(prepared: Prepared, ptx: str, schedules: Sequence[str] = ()) -> ProgramOutcome:
    """Run every problem on both sides, under every schedule."""
    case, plan = prepared.case, prepared.made.plan
    package = Package("kernel", plan, ptx)
    try:
        _ = package.program
    except Failed as failed:
        return ProgramOutcome("unread", failed.diagnostics[0].message[:300], "FW831")
    except Exception as error:
        return _crashed("read PTX", error)
    chosen = schedules or ("eager", "lazy", f"random:{case.seed % 1000}")
    for dims in case.problems:
        outcome = _problem(prepared, package, dims, chosen)
        if outcome.kind != "agree":
            return outcome
    return ProgramOutcome("agree")


class _Interpreted:
    """The interpreter's outputs for a problem, and how far rounding moves them."""

    def __init__(
        self, program: Program, given: Mapping[str, Array], dims: Mapping[str, int]
    ) -> None:
        self._program, self._given, self._dims = program, given, dims
        self._outputs = interpret(program, given, dims)
        self._moved = self._perturbed(_PERTURBED)

    def _perturbed(self, seeds: Sequence[int]) -> list[dict[str, Array]]:
        return [perturbed(self._program, self._given, self._dims, seed) for seed in seeds]

    def wrong(self, name: str, found: Array) -> str | None:
        """What is wrong with an output, or None; more perturbed runs confirm a difference."""
        text = self._difference(name, found)
        if text and len(self._moved) == len(_PERTURBED):
            self._moved += self._perturbed(_MORE)
            text = self._difference(name, found)
        return text

    def _difference(self, name: str, found: Array) -> str | None:
        tensor, want = self._program.tensors[name], self._outputs[name]
        own = arrange(found, tensor, shape_of(tensor, self._program, self._dims))
        if own.shape != want.shape:
            own = own.reshape(want.shape)
        return difference(own, want, [m[name] for m in self._moved], tensor.dtype)


def _problem(
    prepared: Prepared, package: Package, dims: Mapping[str, int], schedules: Sequence[str]
) -> ProgramOutcome:
    case, program, plan = prepared.case, prepared.program, prepared.made.plan
    shapes = {t.name: _caller_shape(t, dims) for t in plan.tensors}
    inputs = make_inputs(case, plan, shapes, dims)
    try:
        with _limited(SECONDS), np.errstate(all="ignore"):
            expected = _Interpreted(program, _arranged(program, plan, inputs, shapes, dims), dims)
    except Failed as failed:
        first = failed.diagnostics[0]
        return ProgramOutcome("refused", first.message[:300], f"run {first.code}")
    except _TimedOut:
        return ProgramOutcome("slow", f"no end after {SECONDS:g} s", "interpret")
    except Exception as error:
        return _crashed("interpret", error)
    firsts: dict[str, Array] = {}
    for schedule in schedules:
        made = {
            t.name: np.zeros(shapes[t.name], np.float32)
            if program.tensors[t.name].added
            else _poisoned(shapes[t.name], t.dtype)
            for t in plan.tensors
            if t.written
        }
        note = f"{dict(dims)}, {schedule}"
        try:
            findings = _launched(package, inputs, made, dims, schedule)
        except Unending:
            return ProgramOutcome("hang", f"no end; {note}", "unending")
        except Failed as failed:
            return ProgramOutcome("unread", failed.diagnostics[0].message[:300], "FW831")
        except Exception as error:
            return _crashed("emulate", error)
        if findings:
            return _hazard(findings, note)
        for name, array in made.items():
            if wrong := expected.wrong(name, array):
                return ProgramOutcome("wrong", f"`{name}`: {wrong}; {note}", name)
            if program.tensors[name].added:
                continue  # the order of additions is open
            if firsts.setdefault(name, array).tobytes() != array.tobytes():
                return ProgramOutcome("schedule", f"`{name}` has other bits; {note}", name)
    return ProgramOutcome("agree")


def _caller_shape(tensor: PlanTensor, dims: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape as the caller passes it; of a view, memory for all heads and batches, with
    some rows between them."""
    if not tensor.flat:
        return planned_shape(tensor, dims)
    sizes = [evaluate(axis.size, dims) for axis in tensor.axes]
    each = int(np.prod(sizes)) + PADDING * sizes[-1]
    return (dims.get("batch", 1) * dims.get("heads", 1) * each,)


def _arranged(
    program: Program,
    plan: LaunchPlan,
    inputs: Mapping[str, Array],
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, int],
) -> dict[str, Array]:
    """The inputs in the program's own order of axes, and memory for outputs that are views."""
    given = {
        t.name: arrange(inputs[t.name], t, shape_of(t, program, dims))
        for t in program.inputs
        if t.name in inputs
    }
    for tensor in plan.tensors:
        if tensor.flat and tensor.written and tensor.name not in given:
            given[tensor.name] = np.zeros(shapes[tensor.name], np.float32)
    return given


def _launched(
    package: Package,
    inputs: Mapping[str, Array],
    made: Mapping[str, Array],
    dims: Mapping[str, int],
    schedule: str,
) -> tuple[Finding, ...]:
    if 0 in (evaluate(count, dims) for count in package.plan.grid):
        return ()
    arrays = {**{name: np.ascontiguousarray(x) for name, x in inputs.items()}, **made}
    return package.run(arrays, dims, schedule, SECONDS).findings


def _poisoned(shape: Sequence[int], dtype: str) -> Array:
    empty: Array = np.empty(tuple(shape), NUMPY_DTYPES[dtype])
    empty.reshape(-1).view(np.uint8)[:] = _POISON
    return empty


def _hazard(findings: Sequence[Finding], note: str) -> ProgramOutcome:
    kinds = [f.kind for f in findings]
    first = "deadlock" if "deadlock" in kinds else kinds[0]
    kind = {"deadlock": "hang", "race": "race"}.get(first, "hazard")
    one = next(f for f in findings if f.kind == first)
    text = f"{first} at `{one.instruction.opcode}`, PTX line {one.instruction.line}"
    return ProgramOutcome(
        kind, f"{text} ({len(findings)} findings); {note}", f"{first} {_verb(one)}"
    )


def _verb(finding: Finding) -> str:
    """The instruction without its types and shapes."""
    return ".".join(finding.instruction.opcode.split(".")[:2])


def evaluate_cases(cases: Sequence[FuzzCase]) -> list[ProgramOutcome]:
    """All steps for many programs; kernels of one architecture are compiled together."""
    steps = [prepare(case) for case in cases]
    ready = [(n, p) for n, p in enumerate(steps) if isinstance(p, Prepared)]
    found: dict[int, ProgramOutcome] = {
        n: p for n, p in enumerate(steps) if isinstance(p, ProgramOutcome)
    }
    for (number, prepared), ptx in zip(ready, compiled([p for _, p in ready]), strict=True):
        found[number] = ptx if isinstance(ptx, ProgramOutcome) else compare(prepared, ptx)
    return [found[n] for n in range(len(cases))]
