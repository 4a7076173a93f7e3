"""One sample of a study: an operator by a way, once. It is a run in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashwright.author.llm.budget import Budget, Prices
from flashwright.author.llm.model import Model, NoAnswer, Question, Reply
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.generate import pipeline
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.folder import RESULT
from flashwright.generate.state import Run
from flashwright.gpu import Gpu
from flashwright.lang.codes import MACHINE
from flashwright.study.operators import Operator
from flashwright.study.ways import Way

_OURS = MACHINE | {"FW905"}  # the last: the built-in author has no contract for the direct way


@dataclass(frozen=True)
class Sample:
    """The identity of a sample: operator, way and number."""

    operator: Operator
    way: Way
    number: int

    def __str__(self) -> str:
        return f"{self.operator.name}, {self.way.name}, sample {self.number}"

    def folder(self, root: Path) -> Path:
        """Where it is, in the study's folder."""
        return root / self.operator.name / self.way.name / str(self.number)


@dataclass(frozen=True)
class Terms:
    """What all samples of a study have in common."""

    gpu: Gpu
    budget: Budget
    prices: Prices | None = None
    builtin_translation: bool = False
    last: str = "verdict"
    """The stage to end with."""


class Unfinished(Exception):
    """A sample that could not come to its end, and the model is not to blame."""


def done(folder: Path) -> bool:
    """Whether a sample has come to its end, well or not."""
    return (folder / RESULT).is_file()


def take(
    sample: Sample, terms: Terms, model: Model, folder: Path, watcher: pipeline.Watcher
) -> Run:
    """Take a sample, or go on with one that was cut off; Unfinished where it stays open."""
    heard = _Heard(model)
    who = StageAuthor(heard, model.name, terms.budget, terms.prices)
    builtin = {"translate"} if terms.builtin_translation else set()
    asked = {stage: who for stage in sample.way.asked if stage not in builtin}
    authors = Authors(Transcript(folder / FOLDER), asked)
    spec, plan = sample.operator.spec, sample.way.plan(authors)
    authors.begin(spec, terms.gpu)
    run = pipeline.generate(spec, terms.gpu, folder, watcher, authors, last=terms.last, plan=plan)
    why = _excuse(run, heard.trouble)
    if why:
        (folder / RESULT).unlink(missing_ok=True)
        raise Unfinished(why)
    return run


class _Heard:
    """The model, and why its last answer did not come; nothing where it did."""

    def __init__(self, model: Model) -> None:
        self._model, self.trouble = model, ""

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def grammars(self) -> bool:
        return self._model.grammars

    def ask(self, question: Question) -> Reply:
        try:
            reply = self._model.ask(question)
        except NoAnswer as none:
            self.trouble = none.why
            raise
        self.trouble = ""
        return reply


def _excuse(run: Run, trouble: str) -> str:
    """Why a run that failed says nothing about the model: no answer came, or no tool was there.

    What was wrong with an earlier attempt does not count: the next one was not to be had.
    """
    if run.ok:
        return ""
    found = [f.diagnostic for f in run.failed]
    ours = bool(found) and all(d.code in _OURS for d in found)
    return trouble or ("; ".join(d.message for d in found) if ours else "")
