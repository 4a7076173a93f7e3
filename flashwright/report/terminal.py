"""The report for a terminal: the text and figures of the page, without the code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flashwright.measure.records import OURS
from flashwright.report import headline, reproduce, tables, words
from flashwright.report.model import Bench, Report, ReportKernel

WIDTH, GAP = 100, 3
BARS = "▁▂▃▄▅▆▇█"
_COLORS = {"right": "green", "rejected": "red", "missing": "red"}
_TONES = {"good": "green", "bad": "bold red", "none": "bright_black", "slower": "yellow"}


def render(report: Report, width: int = WIDTH) -> Iterator[RenderableType]:
    """The parts, from the headline to the commands, for a terminal of that width."""
    yield Text(words.plain(report.title), "bold")
    for point in headline.verdicts(report):
        yield Text()
        yield from _point(point)
    for bench, speed in zip(report.benches, headline.speeds(report), strict=True):
        yield Text()
        yield from _speed(bench, speed, width)
    for kernel in report.kernels:
        if kernel.verdict is not None and kernel.verdict.checks and len(report.kernels) == 1:
            yield Text(f"\nChecks of {words.plain(kernel.name)}", "bold")
            yield _table(tables.checks(kernel.verdict), width)
    if len(report.kernels) > 1:
        yield Text("\nKernels", "bold")
        yield _table(tables.kernels(report.kernels), width)
    for kernel in report.kernels:
        if kernel.schedule is not None:
            yield Text(f"\nHow {words.plain(kernel.name)} is scheduled", "bold")
            yield from map(_item, kernel.schedule.lines)
    yield from _compiled(report.kernels, width)
    yield Text("\nHow to get the same again", "bold")
    for step in reproduce.steps(report):
        yield _item(step.command, "cyan")
        yield _item(step.why, "bright_black", indent=6)


def _point(point: headline.HeadlinePoint) -> Iterator[RenderableType]:
    color = _COLORS.get(point.state, "yellow")
    yield Text(f"{headline.MARKS[point.state]} {words.plain(point.title)}", f"bold {color}")
    yield from map(_item, point.shown)
    if point.not_shown:
        yield _item("Not shown:", "yellow")
    yield from (_item(line, indent=4) for line in point.not_shown)


def _item(line: str, style: str = "", indent: int = 2) -> Padding:
    """A line whose wrapped parts keep the indentation."""
    return Padding(Text(words.plain(line), style), (0, 0, 0, indent), expand=False)


def _speed(bench: Bench, speed: headline.RunSpeed, width: int) -> Iterator[RenderableType]:
    yield Text(words.plain(speed.title), "bold")
    for found in speed.ratios:
        color = {"slower": "yellow", "faster": "green"}.get(found.verdict, "default")
        yield _item(headline.in_words(found), color)
    for note in speed.notes:
        yield _item(note, "red")
    yield Text()
    yield _lines(bench)
    yield Text("TFLOPS; the ratio is ours to the fastest peer, above 1 where ours takes less time")
    yield _table(_narrow(tables.cells(bench)), width)
    for who, why, where in tables.absences(bench):
        yield _item(f"{who}: {why} ({where})", "bright_black")


def _narrow(table: tables.Table) -> tables.Table:
    """A narrower table: only the ratio to the fastest peer, and no share of matmul."""
    ratios = [i for i, c in enumerate(table.columns) if c.group == tables.RATIOS]
    left_out = {*ratios[:-1], *(i for i, c in enumerate(table.columns) if c.title == "of matmul")}
    kept = [i for i in range(len(table.columns)) if i not in left_out]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return tables.Table(tuple(table.columns[i] for i in kept), rows)


def _lines(bench: Bench) -> RichTable:
    """A line for each kernel: its rates over the lengths as bars, on one scale."""
    most = max((n.tflops for c in bench.cells for n in c.numbers.values()), default=0.0)
    titles = ("kernel", "ours, by length", "TFLOPS", "to the fastest peer")
    shown = _empty([(title, n > 1) for n, title in enumerate(titles)], (), WIDTH)
    for name in bench.kernels:
        cells = bench.of(name)
        rates = [r for c in cells if (r := c.tflops(OURS)) is not None]
        best = [r for c in cells if (r := c.best_ratio()) is not None]
        span = f"{words.rate(min(rates))} to {words.rate(max(rates))}" if rates else words.NOTHING
        worst = f"{words.ratio(min(best))} to {words.ratio(max(best))}" if best else words.NOTHING
        bars = "".join(_bar(c.tflops(OURS), most) for c in cells)
        shown.add_row(words.plain(name), Text(bars, "cyan"), span, worst)
    return shown


def _bar(rate: float | None, most: float) -> str:
    if rate is None or most <= 0:
        return "·"
    return BARS[min(len(BARS) - 1, max(0, int(rate / most * len(BARS))))]


def _compiled(kernels: Sequence[ReportKernel], width: int) -> Iterator[RenderableType]:
    figures = tables.ptxas(kernels)
    if figures is None:
        return
    yield Text("\nWhat the compiler says", "bold")
    yield _table(figures.without(tables.SECONDS), width)
    if any(c.group == tables.SECONDS for c in figures.columns):
        yield Text("How long each stage took, in seconds", "bold")
        yield _table(figures.without(""), width, [row[0] for row in figures.rows])


def _table(table: tables.Table, width: int, names: Sequence[tables.Value] = ()) -> RichTable:
    """A table for the terminal; `names` are an extra first column."""
    rows = [(*names[i : i + 1], *row) for i, row in enumerate(table.rows)]
    heads = (*((tables.Column("kernel", number=False),) if names else ()), *table.columns)
    shown = _empty([(c.title, c.number) for c in heads], rows, width)
    before = None
    for row in rows:
        cells = [Text(words.plain(v.text), _TONES.get(v.tone, "")) for v in row]
        if row[0].text == before:
            cells[0] = Text()  # the same kernel again
        before = row[0].text
        shown.add_row(*cells)
    return shown


def _empty(
    heads: Sequence[tuple[str, bool]], rows: Sequence[Sequence[tables.Value]], width: int
) -> RichTable:
    """An empty table with headings; if space is short, headings wrap, figures do not."""
    titles = [words.plain(title) for title, _ in heads]
    needed = [max((len(row[i].text) for row in rows), default=0) for i in range(len(heads))]
    for most in range(max(map(len, titles), default=1), 3, -1):
        folded = [textwrap.wrap(title, most) or [""] for title in titles]
        wide = (max(n, *map(len, f)) + GAP for n, f in zip(needed, folded, strict=True))
        if sum(wide) <= width:
            break
    empty = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for (_, number), lines in zip(heads, folded, strict=True):
        side: Literal["left", "right"] = "right" if number else "left"
        empty.add_column(
            Text("\n".join(lines), "bold"), justify=side, overflow="fold", no_wrap=number
        )
    return empty
