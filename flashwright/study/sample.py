"""One sample of a study: one run of an operator by a way, in its own folder."""

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

_NOT_THE_MODEL = MACHINE | {
    "FW905"
}  # the last: the built-in author has no contract for the direct way


@dataclass(frozen=True)
class Sample:
    """The identity of a sample: operator, way and number."""

    operator: Operator
    way: Way
    number: int

    def __str__(self) -> str:
        return f"{self.operator.name}, {self.way.name}, sample {self.number}"

    def folder(self, root: Path) -> Path:
        """The sample's folder in the study's folder."""
        return root / self.operator.name / self.way.name / str(self.number)


@dataclass(frozen=True)
class StudyTerms:
    """The settings that all samples of a study share."""

    gpu: Gpu
    budget: Budget
    prices: Prices | None = None
    builtin_translation: bool = False
    last: str = "verdict"
    """The last stage of a run."""


class Unfinished(Exception):
    """A sample that could not finish for a reason outside the model."""


def done(folder: Path) -> bool:
    """Whether a sample has finished, successfully or not."""
    return (folder / RESULT).is_file()


def take(
    sample: Sample, terms: StudyTerms, model: Model, folder: Path, watcher: pipeline.Watcher
) -> Run:
    """Run a sample, or resume an interrupted one. Raises Unfinished if it stays unfinished."""
    monitor = _ModelMonitor(model)
    who = StageAuthor(monitor, model.name, terms.budget, terms.prices)
    builtin = {"translate"} if terms.builtin_translation else set()
    asked = {stage: who for stage in sample.way.asked if stage not in builtin}
    authors = Authors(Transcript(folder / FOLDER), asked)
    spec, plan = sample.operator.spec, sample.way.plan(authors)
    authors.begin(spec, terms.gpu)
    run = pipeline.generate(spec, terms.gpu, folder, watcher, authors, last=terms.last, plan=plan)
    why = _outside_cause(run, monitor.no_answer)
    if why:
        (folder / RESULT).unlink(missing_ok=True)
        raise Unfinished(why)
    return run


class _ModelMonitor:
    """Wraps a model and remembers why its last question got no answer."""

    def __init__(self, model: Model) -> None:
        self._model, self.no_answer = model, ""

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
            self.no_answer = none.why
            raise
        self.no_answer = ""
        return reply


def _outside_cause(run: Run, no_answer: str) -> str:
    """Why a failed run says nothing about the model: no answer, or a missing tool; else empty.

    Findings of earlier attempts do not count: the next attempt got no answer.
    """
    if run.ok:
        return ""
    found = [f.diagnostic for f in run.failed]
    ours = bool(found) and all(d.code in _NOT_THE_MODEL for d in found)
    return no_answer or ("; ".join(d.message for d in found) if ours else "")
