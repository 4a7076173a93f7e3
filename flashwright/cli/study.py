"""`flashwright study`: samples a language model on several operators, and counts its successes."""

from __future__ import annotations

import functools
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
from flashwright.cli.fleet import LOCAL, On
from flashwright.lang.diagnostic import Failed

if TYPE_CHECKING:
    from flashwright.author.llm.line import Limits
    from flashwright.fleet.fleet import Fleet
    from flashwright.fleet.job import Need
    from flashwright.study.report import StudyReport
    from flashwright.study.sample import Sample, StudyTerms

_WIDTH = 160  # columns of the table in a wide terminal; names of operators may be long


class Translate(StrEnum):
    """Author of the CUDA in the ways that use TL."""

    MODEL = "model"
    BUILTIN = "builtin"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(study)


@guarded
def study(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model to study.")] = None,
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
        Translate, typer.Option(help="Author of the CUDA in the ways with TL.")
    ] = Translate.MODEL,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; finished samples are kept.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only report on the records of a study.")
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only judge and time a study's kernels on this GPU."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Samples at a time; default one for each GPU.")
    ] = 0,
    on: On = LOCAL,
    unconfined: Annotated[
        bool, flag("--unconfined", help="Run the model's Python even without Landlock.")
    ] = False,
    base_url: BaseUrl = None,
    attempts: Attempts = ATTEMPTS,
    tokens: Tokens = TOKENS,
    minutes: Minutes = MINUTES,
    reply_timeout: ReplyTimeout = None,
    dollars: Dollars = None,
    price: Price = None,
) -> int:
    """Study a model: several samples of each operator by each way, and the stage each reached.

    The same command continues an interrupted study.
    """
    if unconfined:
        from flashwright.confine.start import UNCONFINED

        os.environ[UNCONFINED] = "1"
    given = {"--model": model, "--gpu": gpu, "--out": out}
    _refuse_combination({"--report": report, "--judge": judge, **given})
    if report is not None:
        return _tell(report)
    if judge is not None:
        return _judge(judge, on)
    if model is None or gpu is None or out is None:
        missing = next(name for name, value in given.items() if value is None)
        raise typer.BadParameter(
            "is required, unless --report or --judge is given", param_hint=missing
        )
    from flashwright.study.sample import StudyTerms

    budget, prices = read_budget(attempts, tokens, minutes, dollars, price)
    terms = StudyTerms(find_gpu(gpu), budget, prices, translate is Translate.BUILTIN)
    options = _SampleOptions(operators, ways, samples, jobs, on)
    return _study(model, base_url, read_limits(reply_timeout, minutes), terms, options, out)


def _refuse_combination(given: Mapping[str, object]) -> None:
    """Refuse other options with --report or --judge, which read them from the study."""
    said = [option for option, value in given.items() if value is not None]
    if said[1:] and said[0] in ("--report", "--judge"):
        why = f"reads a finished study: leave out {', '.join(said[1:])}"
        raise typer.BadParameter(why, param_hint=said[0])


@dataclass(frozen=True)
class _SampleOptions:
    """The options that choose the samples, and where they run."""

    operators: str
    ways: str
    samples: int
    jobs: int = 0
    """How many at a time."""
    on: str = LOCAL


def _study(
    model: str,
    base_url: str | None,
    limits: Limits,
    terms: StudyTerms,
    options: _SampleOptions,
    root: Path,
) -> int:
    from flashwright.author.llm.connect import connect
    from flashwright.cli import show
    from flashwright.fleet import engine
    from flashwright.study import operators, ways
    from flashwright.study.session import study
    from flashwright.study.settings import OtherStudy, Settings

    chosen = operators.chosen(options.operators), ways.chosen(options.ways)
    settings = Settings.of(model, terms, *chosen, options.samples)
    asked = functools.partial(connect, model, base_url, limits=limits)
    asked()  # says what is missing before anything is begun
    try:
        settings = settings.keep(root)
    except OtherStudy as other:
        text = f"{root} has another study: {other}"
        raise typer.BadParameter(text, param_hint="--out") from None
    try:
        with engine.connect(options.on) as fleet, show.progress("study") as bar:
            need = _need(fleet, settings.gpu, options)
            study(settings, terms, asked, root, fleet, need, _StudyProgress(bar))
    except KeyboardInterrupt:
        _tell(root)
        raise
    return _tell(root)


def _need(fleet: Fleet, gpu: str, options: _SampleOptions) -> Need:
    """What a sample needs: a GPU, if the fleet has one of the kind, else a CPU."""
    from flashwright.fleet.job import Need

    try:
        return Need(fleet.card(gpu).name, options.jobs)
    except Failed as failed:
        if any(d.code != "FW851" for d in failed.diagnostics):
            raise
    # A model's server may not like to be asked by every core of a machine.
    return Need(jobs=options.jobs or (1 if options.on == LOCAL else 0))


def _judge(root: Path, on: str) -> int:
    """Judge and time a study that ran without a GPU, on the GPUs of the fleet."""
    from flashwright.cli import show
    from flashwright.fleet import engine
    from flashwright.fleet.job import Need
    from flashwright.study.session import check_on_gpu
    from flashwright.study.settings import read

    settings = read(root)
    with engine.connect(on) as fleet:
        need = Need(fleet.card(settings.gpu).name)
        with show.progress("study") as bar:
            check_on_gpu(settings, root, fleet, need, _StudyProgress(bar))
    return _tell(root)


class _StudyProgress:
    """Shows the progress of a study: a line per finished sample, and a bar in a terminal."""

    def __init__(self, bar: Callable[[int, int, str], None]) -> None:
        self._bar = bar
        self._now = self._total = 0

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """Begin a sample."""
        self._now, self._total = number, total
        self._bar(number - 1, total, str(sample))

    def progress(self, sample: Sample, text: str) -> None:
        """Show how far a sample is."""
        self._bar(self._now - 1, self._total, f"{sample}: {text}")

    def end(self, sample: Sample, text: str) -> None:
        """End a sample: print its outcome."""
        print(f"{sample}: {_printable(text)}", flush=True)


def _printable(text: str) -> str:
    """The text without control characters: it may contain a server's message."""
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
    table = show.table(*head, right=head[2:], gap=2)  # most tables fit 100 columns with this gap
    for line in body:
        table.add_row(*line)
    show.console(most=_WIDTH).print(table)
    if any("?" in line for line in body):
        print("?: unknown on this machine; the whole table is in study.md")
