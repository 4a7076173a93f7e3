"""A benchmark in the terminal: its progress and its table of results."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flashwright.cli import show
from flashwright.measure.records import OURS, NumberRecord
from flashwright.measure.rows import (
    BenchRow,
    RowEntry,
    development_in_words,
    paper_in_words,
    rows,
    table_of,
    value_in_words,
)
from flashwright.measure.tables import TABLES

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.measure.bench import BenchProgress
    from flashwright.measure.results import Results

PEERS = 5
"""Peers in one table; more would not fit a terminal."""
NARROW = 12


class BenchDisplay:
    """Shows the progress of a benchmark or a tuning: a bar in a terminal, else a line per cell."""

    def __init__(self) -> None:
        self._bar = contextlib.ExitStack()
        self._step: Callable[[int, int, str], None] = lambda done, total, text: None

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def phase(self, title: str) -> None:
        """Begin a phase of the run, with its title."""
        self._bar.close()
        if sys.stderr.isatty():
            self._step = self._bar.enter_context(show.progress(title))
        else:
            print(title, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        """Update the bar of the present phase."""
        self._step(done, total, text)
        if not sys.stderr.isatty():
            print(f"[{done}/{total}] {text}".rstrip(), file=sys.stderr, flush=True)

    def cell(self, step: BenchProgress) -> None:
        """Report that a cell has begun or ended."""
        left = "" if step.left is None else f", {duration(step.left)} left"
        self._step(step.done, step.total, f"{step.cell}{left}")
        if step.lines and not sys.stderr.isatty():
            told = ", ".join(
                f"{line.who} {line.tflops:.0f}"
                if isinstance(line, NumberRecord)
                else f"{line.who} -"
                for line in step.lines
            )
            took = "" if step.took is None else f" in {step.took:.1f} s"
            line = f"[{step.done}/{step.total}] {step.cell}: {told}{took}{left}"
            print(line, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning; the run continues."""
        print(f"warning: {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# --- the table --------------------------------------------------------------------------------


def show_results(results: Results) -> None:
    """Print the tables, the reasons for missing figures, and the means per peer."""
    out, run, number = show.console(), results.run, table_of(results)
    if run is None or not results.cells:
        out.print("Nothing was measured.")
        return
    beside = f"; in brackets the paper's on its {TABLES[number].gpus[0]}" if number else ""
    unit = "time" if number and TABLES[number].unit == "s" else "TFLOPS, a causal cell as half"
    out.print(f"On {run.card}, translated for {run.translated_for}: {unit}{beside}.")
    out.print("Under each peer: how many times as fast as it ours is.")
    for table in tables(results):
        out.print(table)
    for who, why, cells in results.reasons():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        out.print(f"  {who} at {cells[0]}{more}: {why}")
    for line in development_in_words(results) if number == 4 else ():
        out.print(line)
    for peer in results.peers:
        found = results.summary(peer)
        if found is not None:
            out.print(
                f"against {found.peer}: geometric mean {found.mean:.3f} over {found.cells} cells, "
                f"worst {found.worst:.3f} ({found.where})"
            )


def tables(results: Results) -> Iterator[Table]:
    """A row for each cell: our figure and the peers', and under each our ratio to it."""
    found = rows(results)
    for first in range(0, max(1, len(results.peers)), PEERS):
        yield _table(found, results.peers[first : first + PEERS])


def _table(found: Sequence[BenchRow], peers: Sequence[str]) -> Table:
    names = [OURS, *peers]
    heads = {who: _head(who) for who in names}
    shown = show.table("cell", *heads.values(), right=tuple(heads.values()))
    before = ""
    for row in found:
        if row.kernel != before:
            shown.add_section()
            shown.add_row(row.kernel, style="bold")
        before = row.kernel
        entries = [e for e in row.entries if e.who in heads]
        shown.add_row(f"  {row.size}", *(_shown(e, row.unit) for e in entries))
    return shown


def _head(who: str) -> str:
    """A column title, broken into lines to keep the column narrow."""
    if " " in who or len(who) <= NARROW:
        return who.replace(" ", "\n")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "\n", who)


def _shown(entry: RowEntry, unit: str) -> str:
    value = _beside(value_in_words(entry.value, unit), paper_in_words(entry.paper, unit))
    ratio = _beside(_ratio(entry.ratio), _ratio(entry.paper_ratio))
    return f"{value}\n{ratio}" if ratio else value


def _beside(ours: str, paper: str) -> str:
    return f"{ours or '-'} ({paper})" if paper else ours


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
