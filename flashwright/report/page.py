"""The report as one HTML page: all inline, nothing fetched, no script but our own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from flashwright.report import headline, highlight, plots, reproduce, tables, words
from flashwright.report.model import Bench, RecordedVerdict, Report, ReportKernel
from flashwright.version import __version__

GENERATOR = "flashwright report"
_HEADINGS = {f"h{n}": f"h{min(6, n + 3)}" for n in range(1, 7)}  # below the page's own headings


def html(report: Report) -> str:
    """The report as one self-contained HTML page."""
    css, js = _asset("page.css"), _asset("page.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(words=words, limit=plots.LIMIT, marks=headline.MARKS)
    environment.filters.update(spans=_spans)
    panels = [_panel(i, kernel) for i, kernel in enumerate(report.kernels)]
    return environment.from_string(_asset("page.html.j2")).render(
        report=report,
        version=__version__,
        generator=GENERATOR,
        css=Markup(css),
        js=Markup(js),
        policy=_policy(css, js),
        points=headline.verdicts(report),
        verdicts=tables.kernels(report.kernels),
        runs=[_run(report, i) for i in range(len(report.benches))],
        panels=panels,
        anchors={p.kernel.name: p.anchor for p in panels},
        maps=_data([[[*s.cu, *s.tl] for s in p.kernel.map] for p in panels]),
        ptxas=tables.ptxas(report.kernels),
        steps=reproduce.steps(report),
    )


def _asset(name: str) -> str:
    return (resources.files("flashwright.report") / name).read_text(encoding="utf-8")


def _policy(css: str, js: str) -> str:
    """A content security policy that allows only this style and this script."""
    digests = (hashlib.sha256(text.encode()).digest() for text in (css, js))
    style, script = (base64.b64encode(digest).decode() for digest in digests)
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(data: Any) -> Markup:
    """JSON for a script element, escaped so that no text in it can end the element."""
    dumped = json.dumps(data, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        dumped = dumped.replace(char, f"\\u{ord(char):04x}")
    return Markup(dumped)


def _spans(columns: Sequence[tables.Column]) -> list[tuple[str, int]]:
    """The upper row of headings: each group and how many columns it has."""
    return [(group, len(list(under))) for group, under in groupby(columns, lambda c: c.group)]


# --- speed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedChart:
    """The speed plot of one kernel, with the state of its verdict."""

    kernel: str
    link: str
    state: str
    """The state of our kernel; empty if it is right."""
    svg: Markup


@dataclass(frozen=True)
class RunSection:
    """One run of the benchmark, as the template needs it."""

    number: int
    bench: Bench
    speed: headline.RunSpeed
    contestants: list[plots.PlotSeries]
    charts: list[SpeedChart]
    cells: tables.Table
    absences: list[tuple[str, str, str]]


def _run(report: Report, number: int) -> RunSection:
    bench = report.benches[number]
    drawn = []
    for name, link in bench.kernels.items():
        kernel = report.kernel(link)
        said = tables.state(kernel).text if kernel and kernel.state != "right" else ""
        drawn.append(SpeedChart(name, link, said, plots.speed(bench, name)))
    return RunSection(
        number=number,
        bench=bench,
        speed=headline.speeds(report)[number],
        contestants=plots.contestants(bench),
        charts=[c for c in drawn if c.svg],
        cells=tables.cells(bench),
        absences=tables.absences(bench),
    )


# --- kernels ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeLine:
    """A line of code; `mapped` if the line map relates it to a line of the other text."""

    text: Markup
    mapped: bool


@dataclass(frozen=True)
class KernelPanel:
    """One kernel, as the template needs it."""

    anchor: str
    kernel: ReportKernel
    words: str
    tl: list[CodeLine]
    source: list[CodeLine]
    reasoning: Markup
    verdict: RecordedVerdict | None
    errors: list[tuple[str, Markup, bool]]
    """By output: the drawing, and whether the library's errors are in it."""
    heat: Markup
    heat_words: str
    checks: tables.Table | None
    cases: tables.Table | None
    cpu: tables.Table | None


def _panel(number: int, kernel: ReportKernel) -> KernelPanel:
    verdict = kernel.verdict
    picture = verdict.picture if verdict else None
    return KernelPanel(
        anchor=f"kernel-{number}",
        kernel=kernel,
        words=kernel.spec.in_words if kernel.spec else "",
        tl=_lines(kernel.tl, highlight.TL, [s.tl for s in kernel.map]),
        source=_lines(kernel.source, highlight.CUDA, [s.cu for s in kernel.map]),
        reasoning=rendered(kernel.reasoning),
        verdict=verdict,
        errors=_errors(verdict) if verdict else [],
        heat=plots.heat(picture) if picture else Markup(""),
        heat_words=plots.where(picture.error) if picture else "",
        checks=tables.checks(verdict) if verdict and verdict.checks else None,
        cases=tables.cases(verdict.cases) if verdict and verdict.cases else None,
        cpu=tables.cases(kernel.cpu) if kernel.cpu else None,
    )


def _errors(verdict: RecordedVerdict) -> list[tuple[str, Markup, bool]]:
    outputs = dict.fromkeys(c.output for c in verdict.cases)
    beside = {c.output for c in verdict.cases if c.library_rms is not None}
    return [(name, plots.errors(verdict, name), name in beside) for name in outputs]


def _lines(
    source: str, language: re.Pattern[str], mapped: Sequence[tuple[int, int]]
) -> list[CodeLine]:
    numbers = {n for first, last in mapped for n in range(first, min(last, 1_000_000) + 1)}
    shown = highlight.lines(source, language)
    return [CodeLine(text, number in numbers) for number, text in enumerate(shown, 1)]


def rendered(markdown: str) -> Markup:
    """Markdown as HTML, without raw HTML and images; headings go below the page's own."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(markdown)
    for token in tokens:
        token.tag = _HEADINGS.get(token.tag, token.tag) if "heading" in token.type else token.tag
        if "style" in token.attrs:  # a column's alignment: the policy allows no inline style
            side = str(token.attrs.pop("style")).rpartition(":")[2].strip()
            token.attrSet("class", f"to-{side}")
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # escaped by the parser
