"""The author of each stage of a run, and how a language model is asked for a stage.

Attempts until one is right, several candidates side by side, within a budget; what a stage tries
them by is the stage's own (tl.py, kernel.py, improve.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwright.author.llm import prompt
from flashwright.author.llm.attempts import Done, GaveUp, Task, Tried, best, fewest
from flashwright.author.llm.budget import Budget, Meter, Prices
from flashwright.author.llm.model import Model, Reply
from flashwright.author.llm.prompt import STEPS, Facts
from flashwright.author.llm.transcript import IMPROVE, Known, Lane, Transcript
from flashwright.generate.by_model.reference_facts import of_reference
from flashwright.generate.by_model.speed import SpeedGoal, Stopwatch
from flashwright.generate.folder import DERIVED, FORWARD, keep
from flashwright.generate.state import Progress, Run
from flashwright.lang import gbnf
from flashwright.lang.codes import MACHINE
from flashwright.lang.diagnostic import Diagnostic

if TYPE_CHECKING:
    from flashwright.gpu import Gpu
    from flashwright.spec import AttentionSpec

MORE = "every attempt is in the folder `model`; give it more with --attempts, --tokens, --minutes"
FILES = {
    "sketch": "sketch.tl",
    "code": "code.tl",
    "translate": "kernel.cu",
    "direct": "kernel.cu",
    "pytorch": "attention.py",
}
"""What each stage makes; the last two are a study's."""
MADE = {
    "sketch": "sketch",
    "code": "code",
    "translate": "kernel",
    "direct": "kernel",
    "pytorch": "PyTorch function",
}
"""What each stage makes, in words."""
NOT_THE_MODELS = MACHINE | {"FW903"}
"""Trouble of this machine, or in the user's own reference: no attempt can help."""


@dataclass(frozen=True)
class StageAuthor:
    """The model of a stage and its budget. Without a model, replies come from the record only."""

    model: Model | None
    name: str
    budget: Budget
    prices: Prices | None = None
    candidates: int = 1
    bounded: bool = False
    """Whether to send the bounded grammar, for small models that do not stop by themselves."""
    is_answered: bool = False
    """Whether the one reply is there already: the display says nothing of asking."""


@dataclass(frozen=True)
class Authors:
    """The language models of the stages; the built-in author does the others."""

    transcript: Transcript
    asked: Mapping[str, StageAuthor] = field(default_factory=dict)
    description: str | None = None
    """The user's own words for the operator."""
    reference: str = ""
    """The user's function that the judge compares with, as text."""
    goal: SpeedGoal | None = None
    """How fast a kernel that a model writes is to be."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def rival(self) -> Path:
        """Where the built-in author's kernel is put, if kernels are to be timed beside it."""
        return self.transcript.folder / "builtin"

    def begin(self, spec: AttentionSpec, gpu: Gpu, fresh: bool = False) -> bool:
        """Open the record; whether the run goes on from an earlier one that was cut off.

        Budgets are not part of what makes it the same run: a stage that used its own up goes on
        with a larger one, and rounds with more of them.
        """
        return self.transcript.begin(self._settings(spec, gpu), fresh)

    def known(self, spec: AttentionSpec, gpu: Gpu) -> Known:
        """What the record has of such a run."""
        return self.transcript.known(self._settings(spec, gpu))

    def _settings(self, spec: AttentionSpec, gpu: Gpu) -> dict[str, Any]:
        return {
            "spec": spec.model_dump(mode="json"),
            "gpu": gpu.name,
            "asked": {s: _settings(s, a) for s, a in self.asked.items()},
            "description": self.description,
        }


def _settings(stage: str, asked: StageAuthor) -> dict[str, Any]:
    """What makes an author the same one; of rounds, how many: there may be more of them later."""
    bounded = {"bounded": True} if asked.bounded else {}
    rounds = {"rounds": asked.budget.attempts} if stage == IMPROVE else {}
    return {"model": asked.name, "candidates": asked.candidates, **bounded, **rounds}


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
    most = 0 if asked.is_answered else asked.budget.attempts
    lanes = [authors.transcript.lane(stage, n, asked.model) for n in numbers]
    meters = [meter_for(asked, waits(lane, asked, progress)) for lane in lanes]

    def trying(source: str, lane: Lane) -> Tried[Any]:
        progress(lane.number, most, f"attempt {lane.number}: trying what it wrote")
        tried = attempt(source, lane)
        said = "right" if tried.value is not None else f"{len(tried.diagnostics)} findings"
        said = "right, and too slow" if tried.spare is not None else said
        progress(lane.number, most, f"attempt {lane.number}: {said}")
        return tried

    progress(0, most, "reading the program" if asked.is_answered else f"asking {asked.name}")
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
    given = of_reference(run.folder / run.spec.reference, run.spec) if run.spec.reference else None
    return Facts(
        spec=run.spec,
        gpu=run.gpu,
        description=authors.description,
        reference=authors.reference,
        given=given,
        stages=tuple(stage for stage in STEPS if stage in authors.asked),
        sketch=run.artefacts.get(DERIVED if run.spec.backward else "sketch.tl", ""),
        forward=run.artefacts.get(FORWARD, ""),
        code=run.artefacts.get("code.tl", ""),
        **more,
    )


def _grammar(stage: str, asked: StageAuthor) -> str | None:
    """What keeps a model to TL, where its server can make it."""
    level: dict[str, gbnf.Level] = {"sketch": "sketch", "code": "code"}
    if stage not in level or asked.model is None or not asked.model.grammars:
        return None
    return gbnf.gbnf(level[stage], asked.bounded)


def waits(lane: Lane, asked: StageAuthor, progress: Progress) -> Callable[[float, str], None]:
    """Reports to the display how long a request waits for the server, and why."""

    def tell(seconds: float, why: str) -> None:
        text = f"{why}; asking again in {seconds:.0f} s"
        progress(lane.number, asked.budget.attempts, text)

    return tell


def meter_for(asked: StageAuthor, waiting: Callable[[float, str], None] | None = None) -> Meter:
    """What one of several candidates may spend: tokens and money are shared, attempts are not."""
    budget, candidates = asked.budget, asked.candidates
    tokens = None if budget.tokens is None else budget.tokens // candidates
    dollars = None if budget.dollars is None else budget.dollars / candidates
    own = replace(budget, tokens=tokens, dollars=dollars)
    if asked.model is None:  # a record does not answer sooner for being waited for
        return Meter(own, asked.prices, sleep=_at_once)
    return Meter(own, asked.prices, waiting=waiting)


def _at_once(seconds: float) -> None:
    """No wait."""


def _given_up(run: Run, stage: str, gave_up: GaveUp) -> Run:
    file = FILES[stage]
    if gave_up.source:
        run = keep(run, {file: gave_up.source})
    run = run.noting(file if gave_up.source else "", *gave_up.last)
    text = f"no {MADE[stage]} came out right: {gave_up.end.message}"
    help = MORE if gave_up.end.code == "FW913" else gave_up.end.help
    return run.noting("", Diagnostic(gave_up.end.code, text, help=help))


def cost_of(
    asked: StageAuthor, stage: Any, lanes: list[Lane], meters: list[Meter]
) -> dict[str, Any]:
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
