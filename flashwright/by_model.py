"""The stages that a language model does, where the user asks one.

A model's sketch, code or kernel is put to the same stages as the built-in author's, attempt by
attempt, in processes with limits; what they find goes back to the model. What comes out is a Run in
which the later stages have their results already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashwright import apart
from flashwright.author.builtin.author import Written, write_code
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.llm import extract, prompt
from flashwright.author.llm.attempts import Done, GaveUp, Task, Tried, best, fewest
from flashwright.author.llm.budget import Budget, Meter, Prices
from flashwright.author.llm.model import Model, Reply
from flashwright.author.llm.prompt import Facts
from flashwright.author.llm.transcript import Lane, Transcript
from flashwright.build.package import OWN
from flashwright.check.check import check
from flashwright.check.program import Program
from flashwright.folder import keep
from flashwright.judge import cpu
from flashwright.lang import gbnf, render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.run import Progress, Run, Skipped
from flashwright.spec import BadSpec
from flashwright.speed import Goal, Stopwatch, estimated

if TYPE_CHECKING:
    from flashwright.gpu import Gpu
    from flashwright.spec import AttentionSpec

T = TypeVar("T")

CHECK_SECONDS = 60.0
RUN_SECONDS = 300.0  # all problems of the CPU run; the built-in author's programs take 1 to 10
MEMORY = 6 << 30
REFERENCE_MEMORY = 1 << 40  # addresses that a library reserves count as well
MOST_TOLD, LONGEST_TOLD = 20, 20_000  # findings that go back to the model, and their characters
MORE = "every attempt is in the folder `model`; give it more with --attempts, --tokens, --minutes"
STAGES = {"sketch": "sketch.tl", "code": "code.tl", "translate": "kernel.cu"}
FILES = {**STAGES, "direct": "kernel.cu", "pytorch": "attention.py"}
"""What each stage makes; the last two are a study's."""


@dataclass(frozen=True)
class Who:
    """Who does a stage, and what it may cost. Without a model the record alone answers."""

    model: Model | None
    name: str
    budget: Budget
    prices: Prices | None = None
    candidates: int = 1
    bounded: bool = False
    """Whether the grammar, where the server takes one, ends what a small model would not."""


@dataclass(frozen=True)
class Authors:
    """Who does which stage; one that is not named here is the built-in author's."""

    transcript: Transcript
    asked: Mapping[str, Who] = field(default_factory=dict)
    description: str | None = None
    """The user's own words for the operator."""
    reference: str = ""
    """The user's function that the judge compares with, as text."""
    goal: Goal | None = None
    """How fast a kernel that a model writes is to be."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def rival(self) -> Path:
        """Where the built-in author's kernel is put, if kernels are to be timed beside it."""
        return self.transcript.folder / "builtin"

    def works(self) -> dict[str, Callable[[Run, Progress], Run]]:
        """The stages of the pipeline that a model does, by their names there."""
        every = {"sketch": sketch, "code": code, "translate": kernel}
        names = {"sketch": "sketch", "code": "parameters", "translate": "translate"}
        works: dict[str, Callable[[Run, Progress], Run]]
        works = {names[s]: partial(every[s], self) for s in STAGES if s in self.asked}
        if "improve" in self.asked and self.asked["improve"].model is None:
            works["verdict"] = _not_again
        return works

    def begin(self, spec: AttentionSpec, gpu: Gpu, fresh: bool = False) -> bool:
        """Open the record; whether the run goes on from an earlier one that was cut off.

        Budgets are not part of what makes it the same run: a stage that used its own up goes on
        with a larger one.
        """
        asked = {s: _settings(a) for s, a in self.asked.items()}
        settings = {"spec": spec.model_dump(mode="json"), "gpu": gpu.name, "asked": asked}
        return self.transcript.begin({**settings, "description": self.description}, fresh)


def _not_again(run: Run, progress: Progress) -> Run:
    """In a replay: what the judge said is in the record."""
    raise Skipped(Diagnostic("FW851", "a replay does not judge again"))


def _settings(asked: Who) -> dict[str, Any]:
    """What makes an author the same one."""
    bounded = {"bounded": True} if asked.bounded else {}
    return {"model": asked.name, "candidates": asked.candidates, **bounded}


# --- the stages -------------------------------------------------------------------------------


def sketch(authors: Authors, run: Run, progress: Progress) -> Run:
    """What moves and what is computed. If the built-in author does the rest, with all its sizes."""
    whole = "code" not in authors.asked
    attempt = partial(_try_sketch, run, whole)
    run, text = ask(authors, run, "sketch", extract.tl, attempt, progress)
    return run if text is None else keep(run, {"sketch.tl": text})


def _try_sketch(run: Run, whole: bool, source: str, lane: Lane) -> Tried[str]:
    try:
        found = apart.call(_checked_sketch, source, run.gpu, seconds=CHECK_SECONDS, memory=MEMORY)
        if whole and not _errors(found):
            found = _limited(_completed, source, run)
    except Failed as failed:
        found = failed.diagnostics
    return _tried(source if not _errors(found) else None, found, source, "sketch.tl")


def _checked_sketch(source: str, gpu: Gpu) -> tuple[Diagnostic, ...]:
    return check(parse(source), gpu).diagnostics


def _completed(source: str, spec: AttentionSpec, gpu: Gpu, base: Path) -> tuple[Diagnostic, ...]:
    """What is wrong with a sketch that the built-in author completes."""
    try:
        written = write_code(source, spec, gpu)
    except NothingFits as error:
        return (Diagnostic("FW905", str(error)),)
    except (KeyError, ValueError, AssertionError, StopIteration) as error:
        text = f"the built-in author cannot complete this sketch ({type(error).__name__}: {error})"
        hint = "keep to one loop over the keys, with the tensors Q, K, V and O"
        return (Diagnostic("FW905", text, help=hint),)
    found = _judged(written.code, spec, gpu, base)[2]
    return tuple(replace(d, span=None, secondary=(), fix=None) for d in found)


def code(authors: Authors, run: Run, progress: Progress) -> Run:
    """The sketch with all its sizes, checked and run on the CPU."""
    attempt = partial(try_code, run)
    choose = partial(_cheapest, run)
    run, done = ask(authors, run, "code", extract.tl, attempt, progress, choose)
    if done is None:
        return run
    run = keep(run, {"code.tl": done.text})
    return replace(
        run.noting("code.tl", *done.warnings),
        written=Written(done.text, ()),
        programs={OWN: done.program},
        verdicts={OWN: done.verdict},
    )


def _cheapest(run: Run, done: Sequence[Done[Code]]) -> int:
    """Of several right programs the one that the cost model thinks fastest, if it can price any."""
    costs = [estimated(one.value.program, run.spec, run.gpu) for one in done]
    times = [cost.microseconds if cost else math.inf for cost in costs]
    return min(range(len(done)), key=lambda n: (times[n], done[n].attempts))


@dataclass(frozen=True)
class Code:
    """TL code that passed."""

    text: str
    program: Program
    verdict: cpu.Verdict
    warnings: tuple[Diagnostic, ...]


def try_code(run: Run, source: str, lane: Lane) -> Tried[Code]:
    """Look at TL code that a model wrote: the checker, and the run on the CPU."""
    try:
        judged = _limited(_judged, source, run)
    except Failed as failed:
        return _tried(None, failed.diagnostics, source, "code.tl")
    program, verdict, found = judged
    if program is None or verdict is None or _errors(found) or not verdict.ok:
        return _tried(None, found, source, "code.tl")
    return _tried(Code(source, program, verdict, found), (), source, "code.tl")


def _judged(
    source: str, spec: AttentionSpec, gpu: Gpu, base: Path
) -> tuple[Program | None, cpu.Verdict | None, tuple[Diagnostic, ...]]:
    """Code through the checker and the CPU run: program, verdict, and all that was found."""
    checked = check(parse(source), gpu)
    if checked.program is None or _errors(checked.diagnostics):
        return None, None, checked.diagnostics or (_NO_CODE,)
    try:
        verdict = cpu.judge(checked.program, spec, base=base)
    except BadSpec as error:  # the user's own reference cannot be used
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
    return checked.program, verdict, (*checked.diagnostics, *verdict.diagnostics)


def _limited(function: Callable[..., T], source: str, run: Run) -> T:
    """Work on a model's TL, in a process with limits; the user's reference may need more memory."""
    memory = REFERENCE_MEMORY if run.spec.reference else MEMORY
    given = (source, run.spec, run.gpu, run.folder)
    return apart.call(function, *given, seconds=RUN_SECONDS, memory=memory)


_NO_CODE = Diagnostic(
    "FW207",
    "this is a sketch: it has no sizes and no grid",
    help="write code: params, a grid, allocations, and a tile and a coordinate for every Copy",
)


def kernel(authors: Authors, run: Run, progress: Progress) -> Run:
    """The code as CUDA, compiled and judged, and as fast as asked for."""
    from flashwright.kernel_by_model import Kernel, Pace, attempted, facts_of, fastest, placed

    program = run.programs[OWN]
    pace: Pace | None
    pace, unknown = _pace(authors, run, progress)
    attempt = partial(attempted, run, program, pace=pace)
    facts = facts_of(program, run.gpu)
    choose = partial(fastest, authors.stopwatch)
    done: Kernel | None
    run, done = ask(authors, run, "translate", extract.cuda, attempt, progress, choose, **facts)
    return run if done is None else placed(run, done).noting("kernel.cu", *unknown)


def _pace(authors: Authors, run: Run, progress: Progress) -> tuple[Any, tuple[Diagnostic, ...]]:
    """What a right kernel's time is held against; without a GPU a note that nobody could."""
    from flashwright.kernel_by_model import pace_of

    if authors.goal is None or authors.asked["translate"].model is None:
        return None, ()
    try:
        if why := authors.stopwatch.cannot(run):
            raise Failed(why)
        progress(0, 1, "making the kernel that it is timed beside")
        rival = authors.stopwatch.rival(authors.goal, run, authors.rival)
    except Failed as failed:
        text = f"how fast the kernel is was not looked at: {failed.diagnostics[0].message}"
        return None, (Diagnostic("FW829", text),)
    return pace_of(authors.goal, authors.stopwatch, rival), ()


# --- asking -----------------------------------------------------------------------------------


def ask(
    authors: Authors,
    run: Run,
    stage: Any,
    take: Callable[[Reply], str],
    attempt: Callable[[str, Lane], Tried[Any]],
    progress: Progress,
    choose: Callable[[Sequence[Done[Any]]], int] = fewest,
    **more: Any,
) -> tuple[Run, Any]:
    """The best candidate's result, and the Run with what it cost; None where there is none."""
    asked = authors.asked[stage]
    facts = facts_for(authors, run, **more)
    numbers = range(1, asked.candidates + 1)
    lanes = [authors.transcript.lane(stage, n, asked.model) for n in numbers]
    meters = [meter_for(asked) for _ in lanes]

    def trying(source: str, lane: Lane) -> Tried[Any]:
        progress(lane.number, asked.budget.attempts, f"attempt {lane.number}: trying what it wrote")
        tried = attempt(source, lane)
        said = "right" if tried.value is not None else f"{len(tried.diagnostics)} findings"
        said = "right, and too slow" if tried.spare is not None else said
        progress(lane.number, asked.budget.attempts, f"attempt {lane.number}: {said}")
        return tried

    progress(0, asked.budget.attempts, f"asking {asked.name}")
    task = Task[Any](
        stage,
        facts,
        take,
        trying,
        _grammar(stage, asked),
        rank=lambda value: getattr(value, "time", 0.0),
    )
    try:
        value = best(task, lanes, meters, choose)
    except GaveUp as gave_up:
        value, run = None, _given_up(run, stage, gave_up)
    return replace(run, asked={**run.asked, stage: cost_of(asked, stage, lanes, meters)}), value


def facts_for(authors: Authors, run: Run, **more: Any) -> Facts:
    """What the model of any stage is told."""
    return Facts(
        spec=run.spec,
        gpu=run.gpu,
        description=authors.description,
        reference=authors.reference,
        sketch=run.artefacts.get("sketch.tl", ""),
        code=run.artefacts.get("code.tl", ""),
        **more,
    )


def _grammar(stage: str, asked: Who) -> str | None:
    """What keeps a model to TL, where its server can make it."""
    level: dict[str, gbnf.Level] = {"sketch": "sketch", "code": "code"}
    if stage not in level or asked.model is None or not asked.model.grammars:
        return None
    return gbnf.gbnf(level[stage], asked.bounded)


def meter_for(asked: Who) -> Meter:
    """What one of several candidates may spend: tokens and money are shared, attempts are not."""
    budget, candidates = asked.budget, asked.candidates
    tokens = None if budget.tokens is None else budget.tokens // candidates
    dollars = None if budget.dollars is None else budget.dollars / candidates
    own = replace(budget, tokens=tokens, dollars=dollars)
    if asked.model is None:  # a record does not answer sooner for being waited for
        return Meter(own, asked.prices, sleep=_at_once)
    return Meter(own, asked.prices)


def _at_once(seconds: float) -> None:
    """No wait."""


def _given_up(run: Run, stage: str, gave_up: GaveUp) -> Run:
    file = FILES[stage]
    if gave_up.source:
        run = keep(run, {file: gave_up.source})
    run = run.noting(file if gave_up.source else "", *gave_up.last)
    text = f"no {stage} came out right: {gave_up.end.message}"
    help = MORE if gave_up.end.code == "FW913" else gave_up.end.help
    return run.noting("", Diagnostic(gave_up.end.code, text, help=help))


def cost_of(asked: Who, stage: Any, lanes: list[Lane], meters: list[Meter]) -> dict[str, Any]:
    """What a stage took, for the record."""
    spendings = [meter.spending for meter in meters]
    return {
        "model": asked.name,
        "prompt": prompt.digest(stage),
        "candidates": len(lanes),
        "attempts": [lane.number for lane in lanes],
        "repeated": sum(lane.repeated for lane in lanes),
        "changed": [name for lane in lanes for name in lane.changed],
        "tokens": sum(spent.usage.total for spent in spendings),
        "dollars": sum(spent.dollars for spent in spendings if spent.dollars is not None),
    }


# --- findings ---------------------------------------------------------------------------------


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
