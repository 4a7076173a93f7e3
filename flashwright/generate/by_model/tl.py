"""The sketch and the code by a language model: TL, put to the checker and run on the CPU.

Every attempt is looked at in a process with limits; what is found goes back to the model. What
comes out is a Run in which the later stages have their results already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashwright.author.builtin.author import Written, write_code
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.llm import extract
from flashwright.author.llm.attempts import Done, Tried
from flashwright.author.llm.transcript import Lane
from flashwright.build.package import OWN
from flashwright.check.check import check
from flashwright.confine import isolate
from flashwright.generate import stages
from flashwright.generate.by_model.ask import NOT_THE_MODELS, Authors, ask
from flashwright.generate.by_model.kernel import SOURCE, judged, placed, times_of
from flashwright.generate.by_model.speed import estimated
from flashwright.generate.folder import keep
from flashwright.generate.state import Progress, Run, Skipped, silent
from flashwright.judge import cpu, reference
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.spec import BadSpec
from flashwright.untrusted.contract import contract

if TYPE_CHECKING:
    from flashwright.author.builtin.cost import Cost
    from flashwright.gpu import Gpu
    from flashwright.spec import AttentionSpec

T = TypeVar("T")

CHECK_SECONDS = 60.0
RUN_SECONDS = 300.0  # all problems of the CPU run; the built-in author's programs take 1 to 10
MEMORY = 6 << 30
MOST_TOLD, LONGEST_TOLD = 20, 20_000  # findings that go back to the model, and their characters


def sketch(authors: Authors, run: Run, progress: Progress, *, whole: bool = False) -> Run:
    """What moves and what is computed. If the built-in author does the sizes, with these; with
    `whole` also translated, compiled and judged, as the model has no later stage to mend it in."""
    by_model = "translate" in authors.asked
    attempt = partial(_try_sketch, run, "code" not in authors.asked, whole, by_model)
    take = partial(extract.tl, level="sketch")
    done: CheckedSketch | None
    run, done = ask(authors, run, "sketch", take, attempt, progress)
    if done is None:
        return run
    run = keep(run, {"sketch.tl": done.text})
    if done.trial is None:
        return run
    return placed(run.noting("sketch.tl", *done.warnings), done.trial)


@dataclass(frozen=True)
class CheckedSketch:
    """A sketch that passed its checks."""

    text: str
    warnings: tuple[Diagnostic, ...] = ()
    trial: Run | None = None
    """What came of it, as a run of its own."""


def _try_sketch(
    run: Run, sized: bool, whole: bool, by_model: bool, source: str, lane: Lane
) -> Tried[CheckedSketch]:
    code: CheckedCode | None = None
    own: tuple[Diagnostic, ...] = ()
    try:
        found = isolate.call(_checked_sketch, source, run.gpu, seconds=CHECK_SECONDS, memory=MEMORY)
        if sized and not _errors(found):
            own = found
            code, found = _limited(_completed, source, run)
            if code is not None and by_model:
                found = tuple(_nowhere(d) for d in _no_contract(code.kernels, run.gpu))
    except Failed as failed:
        found = _of_the_model(failed)
    if _errors(found):
        return _tried(None, found, source, "sketch.tl")
    alone = Tried(CheckedSketch(source), files={"sketch.tl": source})
    if code is None or not whole or code.written.further:
        return alone
    tried = _try_kernel(run, code, lane, {"sketch.tl": source})
    if tried.value is None:
        return Tried(None, tried.findings, tried.diagnostics, tried.files)
    trial = tried.value.trial
    return alone if trial is None else Tried(CheckedSketch(source, own, trial), files=tried.files)


def _checked_sketch(source: str, gpu: Gpu) -> tuple[Diagnostic, ...]:
    return check(parse(source), gpu).diagnostics


def _completed(
    source: str, spec: AttentionSpec, gpu: Gpu, base: Path
) -> tuple[CheckedCode | None, tuple[Diagnostic, ...]]:
    """The code that the built-in author makes of a sketch, or what is wrong with it."""
    try:
        written = write_code(source, spec, gpu)
    except NothingFits as error:
        return None, (Diagnostic("FW905", str(error)),)
    except (KeyError, ValueError, AssertionError, StopIteration) as error:
        text = f"the built-in author cannot complete this sketch ({type(error).__name__}: {error})"
        hint = "keep to one loop over the keys, with the tensors Q, K, V and O"
        return None, (Diagnostic("FW905", text, help=hint),)
    kernels, verdict, found = _judged(written.code, spec, gpu, base)
    if kernels is None or verdict is None or _errors(found):
        return None, tuple(_nowhere(d) for d in found)
    return CheckedCode(written, kernels, verdict, found), ()


def _nowhere(found: Diagnostic) -> Diagnostic:
    """Without its place, which is in a text that the model has not seen."""
    return replace(found, span=None, secondary=(), fix=None)


def code(authors: Authors, run: Run, progress: Progress, *, whole: bool = False) -> Run:
    """The sketch with all its sizes, checked and run on the CPU; with `whole` also translated,
    compiled and judged, as the model has no later stage to mend it in."""
    further = try_whole if whole else try_contract if "translate" in authors.asked else try_code
    attempt = partial(further, run)
    choose = partial(_cheapest, run)
    take = partial(extract.tl, level="code")
    run, done = ask(authors, run, "code", take, attempt, progress, choose)
    if done is None:
        return run
    run = keep(run, {"code.tl": done.written.code})
    if done.trial is not None:
        return placed(run, done.trial)
    run = replace(run, written=done.written, verdicts={OWN: done.verdict})
    return stages.with_program(run.noting("code.tl", *done.warnings), OWN, done.kernels)


def _cheapest(run: Run, done: Sequence[Done[CheckedCode]]) -> int:
    """Of several right programs the one that the cost model thinks fastest, if it can price any."""
    costs = [_cost(one.value.kernels, run) for one in done]
    times = [cost.microseconds if cost else math.inf for cost in costs]
    return min(range(len(done)), key=lambda n: (times[n], done[n].attempts))


def _cost(kernels: Kernels, run: Run) -> Cost | None:
    """What the cost model thinks of a program; it knows none of several kernels."""
    program = kernels.programs[0]
    return estimated(program, run.spec, run.gpu) if len(kernels.programs) == 1 else None


@dataclass(frozen=True)
class CheckedCode:
    """TL code that passed the checker and the CPU run."""

    written: Written
    kernels: Kernels
    verdict: cpu.CpuVerdict
    warnings: tuple[Diagnostic, ...]
    trial: Run | None = None
    """What our translator and the compiler made of it, as a run of its own."""


def try_code(run: Run, source: str, lane: Lane) -> Tried[CheckedCode]:
    """Look at TL code that a model wrote: the checker, and the run on the CPU."""
    try:
        judged = _limited(_judged, source, run)
    except Failed as failed:
        return _tried(None, _of_the_model(failed), source, "code.tl")
    kernels, verdict, found = judged
    if kernels is None or verdict is None or _errors(found) or not verdict.ok:
        return _tried(None, found, source, "code.tl")
    return _tried(CheckedCode(Written(source, ()), kernels, verdict, found), (), source, "code.tl")


def try_whole(run: Run, source: str, lane: Lane) -> Tried[CheckedCode]:
    """The same, and then what our translator makes of it: compiled, and judged."""
    tried = try_code(run, source, lane)
    return tried if tried.value is None else _try_kernel(run, tried.value, lane, {})


def try_contract(run: Run, source: str, lane: Lane) -> Tried[CheckedCode]:
    """The same as try_code, and whether a kernel has a contract: a model writes that kernel."""
    tried = try_code(run, source, lane)
    if tried.value is None:
        return tried
    found = _no_contract(tried.value.kernels, run.gpu)
    return _tried(None, found, source, "code.tl") if found else tried


def _no_contract(kernels: Kernels, gpu: Gpu) -> tuple[Diagnostic, ...]:
    try:
        for program in kernels.programs:
            contract(program, gpu)
    except Failed as failed:
        return _of_the_model(failed)
    return ()


def _try_kernel(
    run: Run, code: CheckedCode, lane: Lane, given: Mapping[str, str]
) -> Tried[CheckedCode]:
    """What our translator makes of code that is right on the CPU; `given`: what it was made of."""
    trial = _trial(run, code, lane, given)
    try:
        for stage in (stages.translate, stages.build):
            trial = stage(trial, silent)
            if not trial.ok:
                return _not_whole(trial, given)
    except Skipped:  # no compiler: nothing more can be told
        return Tried(code, files=given or {"code.tl": code.written.code})
    except Failed as failed:
        return _not_whole(trial.noting(SOURCE, *_of_the_model(failed)), given)
    if lane.model is not None:
        trial = judged(trial)
    elif not (lane.before["taken"] or times_of(lane)):  # what a judge said is in the record
        return Tried(None, lane.before["findings"], (), trial.files)
    if not trial.ok:
        return _not_whole(trial, given)
    return Tried(replace(code, trial=trial), "", (), trial.files)


def _trial(run: Run, code: CheckedCode, lane: Lane, given: Mapping[str, str]) -> Run:
    """The attempt as a run of its own, in its folder of the record."""
    fresh = Run(
        run.spec,
        run.gpu,
        lane.here,
        written=code.written,
        verdicts={OWN: code.verdict},
    )
    text = code.written.code
    files = {"spec.toml": run.artefacts["spec.toml"], **given, "code.tl": text}
    fresh = keep(keep(fresh.noting("code.tl", *code.warnings), files), run.reference)
    return stages.with_program(fresh, OWN, code.kernels)


def _not_whole(trial: Run, given: Mapping[str, str]) -> Tried[CheckedCode]:
    """What is wrong, in the lines of what the model wrote: it has seen nothing else."""
    own = "code.tl" if not given else ""
    found = tuple(f.diagnostic if f.file == own else _nowhere(f.diagnostic) for f in trial.failed)
    source = trial.artefacts["code.tl"]
    return Tried(None, render.for_model(found, source), found, trial.files)


def _judged(
    source: str, spec: AttentionSpec, gpu: Gpu, base: Path
) -> tuple[Kernels | None, cpu.CpuVerdict | None, tuple[Diagnostic, ...]]:
    """Code through the checker and the CPU run: kernels, verdict, and all that was found."""
    checked = check(parse(source), gpu, spec.dims)
    if not checked.kernels or _errors(checked.diagnostics):
        return None, None, checked.diagnostics or (_NO_CODE,)
    kernels = Kernels(checked.kernels)
    if len(kernels.programs) > 1 and not spec.backward and spec.decode is None:
        return None, None, (_ONE_KERNEL,)
    try:
        verdict = cpu.judge(kernels, spec, base=base)
    except BadSpec as error:  # the user's own reference cannot be used
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
    return kernels, verdict, (*checked.diagnostics, *verdict.diagnostics)


def _limited(function: Callable[..., T], source: str, run: Run) -> T:
    """Work on a model's TL, in a process with limits; the user's reference may need more memory."""
    memory = reference.MEMORY if run.spec.reference else MEMORY
    given = (source, run.spec, run.gpu, run.folder)
    return isolate.call(function, *given, seconds=RUN_SECONDS, memory=memory)


_NO_CODE = Diagnostic(
    "FW207",
    "this is a sketch: it has no sizes and no grid",
    help="write code: params, a grid, allocations, and a tile and a coordinate for every Copy",
)

_ONE_KERNEL = Diagnostic(
    "FW904",
    "the attention is to be one kernel, and this program has several grids",
    help="write one `grid`",
)


# --- findings ---------------------------------------------------------------------------------


def _of_the_model(failed: Failed) -> tuple[Diagnostic, ...]:
    """What a model can mend; else it is the run that has failed."""
    if any(d.code in NOT_THE_MODELS for d in failed.diagnostics):
        raise failed
    return failed.diagnostics


def _errors(found: tuple[Diagnostic, ...]) -> bool:
    return any(d.severity == "error" for d in found)


def _tried(value: Any, found: tuple[Diagnostic, ...], source: str, file: str) -> Tried[Any]:
    """An attempt that was looked at; where it is right, what is left are warnings."""
    if value is not None:
        return Tried(value, files={file: source})
    shown = found
    if len(found) > MOST_TOLD:
        shown = tuple(sorted(found, key=lambda d: d.severity != "error")[:MOST_TOLD])
    told = _short(render.for_model(shown, source))
    if len(found) > MOST_TOLD:
        told += f"There are {len(found) - MOST_TOLD} more findings.\n"
    return Tried(None, told, shown, {file: source})


def _short(text: str) -> str:
    """A program of long names makes long findings: a prompt has room for some."""
    return text if len(text) <= LONGEST_TOLD else text[:LONGEST_TOLD] + " ...\n"
