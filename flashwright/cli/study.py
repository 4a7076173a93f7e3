"""`flashwright study`: how far a language model comes, with several operators, ways and samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.budget import (
    ATTEMPTS,
    MINUTES,
    TOKENS,
    Attempts,
    BaseUrl,
    Dollars,
    Minutes,
    Price,
    ReplyTimeout,
    Tokens,
    read_budget,
    read_limits,
)
from flashwright.cli.command import BAD_INPUT, FINE, find_gpu, flag, guarded

if TYPE_CHECKING:
    from flashwright.author.llm.line import Limits
    from flashwright.study.report import StudyReport
    from flashwright.study.sample import Sample, StudyTerms

_WIDTH = 160  # of the table, where there is room: names of operators may be long


class Translate(StrEnum):
    """Who writes the CUDA of the ways with TL."""

    MODEL = "model"
    BUILTIN = "builtin"


def register(app: typer.Typer) -> None:
    """Put the command on the command line."""
    app.command(rich_help_panel="Make")(study)


@guarded
def study(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Who is studied.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="See `flashwright gpus`.")] = None,
    operators: Annotated[
        str, typer.Option(metavar="A,B|FILE.toml", help="Variants, or a file with specs.")
    ] = "mha,gqa,mqa,mla",
    ways: Annotated[
        str, typer.Option(metavar="A,B", help="Of tl, no-sketch, direct, pytorch.")
    ] = "tl,no-sketch,direct,pytorch",
    samples: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Of each operator and way.")
    ] = 3,
    translate: Annotated[
        Translate, typer.Option(help="Who writes the CUDA where there is TL.")
    ] = Translate.MODEL,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; what is there is not asked again.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only tell what a study's records say.")
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only judge and time, on the GPU here, what there is."),
    ] = None,
    unconfined: Annotated[
        bool, flag("--unconfined", help="Run its Python also where no Landlock hides your files.")
    ] = False,
    base_url: BaseUrl = None,
    attempts: Attempts = ATTEMPTS,
    tokens: Tokens = TOKENS,
    minutes: Minutes = MINUTES,
    reply_timeout: ReplyTimeout = None,
    dollars: Dollars = None,
    price: Price = None,
) -> int:
    """Study a model: several samples of each operator by each way, and how far they came.

    The same command goes on where it was cut off.
    """
    if unconfined:
        from flashwright.confine.start import UNCONFINED

        os.environ[UNCONFINED] = "1"
    given = {"--model": model, "--gpu": gpu, "--out": out}
    _refuse_both({"--report": report, "--judge": judge, **given})
    if report is not None:
        return _tell(report)
    if judge is not None:
        return _judge(judge)
    if model is None or gpu is None or out is None:
        missing = next(name for name, value in given.items() if value is None)
        raise typer.BadParameter("is needed, or --report or --judge DIR", param_hint=missing)
    from flashwright.study.sample import StudyTerms

    budget, prices = read_budget(attempts, tokens, minutes, dollars, price)
    terms = StudyTerms(find_gpu(gpu), budget, prices, translate is Translate.BUILTIN)
    wanted = _Wanted(operators, ways, samples)
    return _study(model, base_url, read_limits(reply_timeout, minutes), terms, wanted, out)


def _refuse_both(given: Mapping[str, object]) -> None:
    """--report and --judge take all that they need from the study itself."""
    said = [option for option, value in given.items() if value is not None]
    if said[1:] and said[0] in ("--report", "--judge"):
        why = f"takes a study as it is: leave out {', '.join(said[1:])}"
        raise typer.BadParameter(why, param_hint=said[0])


@dataclass(frozen=True)
class _Wanted:
    """Which samples."""

    operators: str
    ways: str
    samples: int


def _study(
    model: str, base_url: str | None, limits: Limits, terms: StudyTerms, wanted: _Wanted, root: Path
) -> int:
    from flashwright.author.llm.connect import connect
    from flashwright.cli import show
    from flashwright.study import operators, ways
    from flashwright.study.session import study
    from flashwright.study.settings import OtherStudy, Settings

    chosen = operators.chosen(wanted.operators), ways.chosen(wanted.ways)
    settings = Settings.of(model, terms, *chosen, wanted.samples)
    asked = connect(model, base_url, limits=limits)
    try:
        settings = settings.keep(root)
    except OtherStudy as other:
        text = f"{root} has another study: {other}"
        raise typer.BadParameter(text, param_hint="--out") from None
    try:
        with show.progress("study") as bar:
            study(settings, terms, asked, root, _Screen(bar))
    except KeyboardInterrupt:
        _tell(root)
        raise
    return _tell(root)


def _judge(root: Path) -> int:
    """On a machine with a GPU, what one without could not tell."""
    from flashwright.cli import show
    from flashwright.generate.by_model.speed import card_here
    from flashwright.study.session import check_on_gpu
    from flashwright.study.settings import read

    settings = read(root)
    card_here()
    with show.progress("study") as bar:
        check_on_gpu(settings, root, _Screen(bar))
    return _tell(root)


class _Screen:
    """A line for each sample that has ended, and in a terminal a bar below them."""

    def __init__(self, bar: Callable[[int, int, str], None]) -> None:
        self._bar, self._sample = bar, ""
        self._now = self._total = 0

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """It is this sample's turn."""
        self._now, self._total, self._sample = number, total, str(sample)
        self._bar(number - 1, total, self._sample)

    def progress(self, text: str) -> None:
        """It is this far."""
        self._bar(self._now - 1, self._total, f"{self._sample}: {text}")

    def end(self, sample: Sample, text: str) -> None:
        """It has ended."""
        print(f"{sample}: {_printable(text)}", flush=True)


def _printable(text: str) -> str:
    """What a server said may be in it."""
    return "".join(c if c.isprintable() else " " for c in text)


def _tell(root: Path) -> int:
    """Write the report, and show its table."""
    from flashwright.study import report

    made = report.make(root)
    _show(made)
    print(f"{root}: {', '.join(report.FILES)}")
    if made.open:
        told = f"unfinished samples: {made.open}; the same command continues them"
        print(told, file=sys.stderr)
        return BAD_INPUT
    return FINE


def _show(made: StudyReport) -> None:
    from flashwright.cli import show
    from flashwright.study.report import brief

    head, *body = brief(made.rows)
    table = show.table(*head, right=head[2:], gap=2)  # so that most fit 100 columns
    for line in body:
        table.add_row(*line)
    show.console(most=_WIDTH).print(table)
    if any("?" in line for line in body):
        print("?: not judged on this machine; the whole table is in study.md")
