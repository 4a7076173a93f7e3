"""The report as Markdown: tables and lists, for a repository's docs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashwright.report import headline, reproduce, tables, words
from flashwright.report.model import Bench, Report, ReportKernel
from flashwright.version import __version__


def render(report: Report) -> str:
    """The report as one Markdown document."""
    return "\n".join(_lines(report)).rstrip("\n") + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {_said(report.title)}"
    yield ""
    for point in headline.verdicts(report):
        yield from _point(point)
    for bench, speed in zip(report.benches, headline.speeds(report), strict=True):
        yield from _speed(bench, speed)
    if report.kernels:
        yield from ("## Kernels", "", *_table(tables.kernels(report.kernels)), "")
    for kernel in report.kernels:
        yield from _kernel(kernel)
    figures = tables.ptxas(report.kernels)
    if figures is not None:
        yield from ("## What the compiler says", "", *_table(figures), "")
        yield from ("Times in seconds.", "")
    yield from _reproduce(report)
    yield f"Made by Flashwright {__version__} from {', '.join(_code(g) for g in report.given)}."


def _point(point: headline.HeadlinePoint) -> Iterator[str]:
    yield f"**{headline.MARKS[point.state]} {_said(point.title)}**"
    yield ""
    yield from (f"- {_said(line)}" for line in point.shown)
    if point.not_shown:
        yield from ("", "Not shown:", "")
        yield from (f"- {_said(line)}" for line in point.not_shown)
    yield ""


def _speed(bench: Bench, speed: headline.RunSpeed) -> Iterator[str]:
    yield from (f"## {_said(speed.title)}", "")
    yield from (f"- {_said(headline.in_words(found))}" for found in speed.ratios)
    yield from (f"- **{_said(note)}**" for note in speed.notes)
    yield ""
    table = tables.cells(bench)
    yield from (*_table(table), "")
    yield (
        "TFLOPS by the paper's formula, medians; then how many times as fast as each peer ours is "
        "(`÷`, above 1 where ours takes less time); the spread is half the "
        "interquartile range of our time."
    )
    yield ""
    absences = tables.absences(bench)
    yield from (f"- {_said(f'{who}: {why} ({where})')}" for who, why, where in absences)
    yield from ([""] if absences else [])


def _kernel(kernel: ReportKernel) -> Iterator[str]:
    """A kernel's schedule and the judge's checks; its errors are in the table of kernels."""
    if kernel.schedule is not None:
        yield from (f"### How {_said(kernel.name)} is scheduled", "")
        yield from (*(f"- {_said(line)}" for line in kernel.schedule.lines), "")
    if kernel.verdict is None or not kernel.verdict.checks:
        return
    yield from (f"### Checks of {_said(kernel.name)}", "")
    yield from (*_table(tables.checks(kernel.verdict)), "")


def _reproduce(report: Report) -> Iterator[str]:
    yield from ("## How to get the same again", "", "```console")
    yield from (f"$ {_one_line(step.command)}" for step in reproduce.steps(report))
    yield from ("```", "")
    for bench in report.benches:
        run = bench.record
        environment = {
            "card": f"{run.card} ({run.arch})",
            "started": run.started,
            "run": run.id,
            "seed": str(run.seed),
            "layout": run.layout,
            **run.settings,
            **run.environment,
            **{name: f"{value:g}" for name, value in run.clocks.items()},
            **{f"matmul {n}": f"{words.rate(v)} TFLOPS" for n, v in run.matmul.items()},
        }
        yield from ("| environment | |", "|---|---|")
        yield from (f"| {_said(name)} | {_said(text)} |" for name, text in environment.items())
        yield ""


def _table(table: tables.Table) -> Iterator[str]:
    heads = [f"÷ {c.title}" if c.group == tables.RATIOS else c.title for c in table.columns]
    yield f"| {' | '.join(map(_said, heads))} |"
    yield f"|{'|'.join('---:' if c.number else '---' for c in table.columns)}|"
    for row in table.rows:
        yield f"| {' | '.join(_said(v.text) for v in row)} |"


def _one_line(text: str) -> str:
    return words.plain(text)


def _said(text: str) -> str:
    """Text with Markdown and HTML characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", words.plain(text))


def _code(text: str) -> str:
    return f"`{words.plain(text).replace('`', chr(39))}`"
