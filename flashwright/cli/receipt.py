"""`flashwright receipt check`: checks the records of a benchmark and measures them again."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import BAD_INPUT, FINE, WRONG, guarded
from flashwright.lang.diagnostic import Failed

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.measure.fields import Field
    from flashwright.measure.receipt import ReceiptDependencies, ReceiptFinding

WORDS = {
    "holds": ("holds", "hold"),
    "part": ("holds in part", "hold in part"),
    "differs": ("does not hold", "do not hold"),
    "unchecked": ("cannot be checked here", "cannot be checked here"),
}
"""The words of each status, singular and plural."""
FIELDS = 4
"""Differing fields per number that the table names; JSON has all."""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Check the numbers of a benchmark again.")
    group.command()(check)
    group.callback()(lambda: None)  # makes `check` a subcommand although it is the only one
    app.add_typer(group, name="receipt", rich_help_panel="On the GPU")


@guarded
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="records.jsonl of a benchmark, or its folder.")
    ],
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this cell, such as 'mha d64 causal 512'."),
    ] = None,
    within: Annotated[
        float,
        typer.Option(metavar="X", min=0, help="Allowed relative difference of times and ratios."),
    ] = 0.05,
    other_versions: Annotated[
        bool,
        typer.Option(
            "--other-versions",
            metavar=" ",
            help="Allow other versions of torch, nvcc or a peer; report them.",
        ),
    ] = False,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only N cells, chosen at random.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=" ", help="Print JSON.")] = False,
) -> int:
    """Check that records are consistent; build, judge and measure our kernels again.

    Exit code 0: all numbers hold; 1: some do not; 2: some cannot be checked here.
    """
    from flashwright.measure import receipt

    cells = receipt.numbers(file, cell or [], sample)
    dependencies = _dependencies()
    allowed = receipt.Tolerances(within, other_versions)
    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder, _progress() as progress:
        checked = receipt.check(file, cells, Path(folder), dependencies, allowed, progress.step)
        found = [progress.done(one, len(cells)) for one in checked]
    if as_json:
        print(json.dumps({"file": str(file), "numbers": [f.record() for f in found]}, indent=2))
    else:
        show_findings(found)
        print(f"{file}: {in_words(found)}")
        if dependencies.card is None:
            print(f"No time was measured: {dependencies.missing}")
    return exit_code(found)


# --- progress ---------------------------------------------------------------------------------


class CheckProgress:
    """Shows the progress of a check: a bar in a terminal, else a line per step and number."""

    def __init__(self, bar: Callable[[int, int, str], None] | None) -> None:
        self._bar, self._count = bar, 0

    def step(self, done: int, total: int, text: str) -> None:
        """Report the step that now begins."""
        if self._bar is not None:
            self._bar(done, total, text)
        else:
            _say(f"[{done}/{total}] {text}")

    def done(self, one: ReceiptFinding, total: int) -> ReceiptFinding:
        """Report a checked number. Returns it."""
        self._count += 1
        if self._bar is not None:
            self._bar(self._count, total, one.cell)
        else:
            _say(f"[{self._count}/{total}] {one.cell}: {WORDS[one.status][0]} ({one.took:.1f} s)")
        return one


@contextlib.contextmanager
def _progress() -> Iterator[CheckProgress]:
    from flashwright.cli import show

    if not sys.stderr.isatty():
        yield CheckProgress(None)
        return
    with show.progress("checking") as bar:
        yield CheckProgress(bar)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _dependencies() -> ReceiptDependencies:
    """The GPU to measure on, or the reason why there is none."""
    from flashwright.build import driver
    from flashwright.judge.judge import need_torch
    from flashwright.measure.receipt import ReceiptDependencies

    try:
        card = driver.cards()[0]
        need_torch()
    except Failed as failed:
        return ReceiptDependencies(None, failed.diagnostics[0].message)
    return ReceiptDependencies(card)


def exit_code(found: Sequence[ReceiptFinding]) -> int:
    """1 if a number differs, else 2 if one cannot be checked, else 0."""
    states = {finding.status for finding in found}
    if "differs" in states:
        return WRONG
    return BAD_INPUT if states - {"holds"} else FINE


def in_words(found: Sequence[ReceiptFinding]) -> str:
    """The count of numbers per status."""
    counts = []
    for status, (one, more) in WORDS.items():
        count = sum(finding.status == status for finding in found)
        counts += [f"{count} {one if count == 1 else more}"] if count else []
    return ", ".join(counts)


# --- what was found ---------------------------------------------------------------------------


def show_findings(found: Sequence[ReceiptFinding]) -> None:
    """Print the table, then each field that does not hold or was not checked, once."""
    from flashwright.cli import show

    out = show.console()
    out.print(table(found))
    differing = field_lines(found, "differs", lambda field: (field.in_words, ""))
    missing = field_lines(found, "unchecked", lambda field: (field.why, field.name))
    for title, lines in (("Does not hold:", differing), ("Not checked:", missing)):
        if lines:
            out.print(title)
        for line in lines:
            out.print(f"  {line}", markup=False, soft_wrap=True)
    names = sorted({field.name.partition(" (")[0] for field in _fields(found, "told")})
    if names:
        text = "Cannot be measured again, protected only by the digests:"
        out.print(f"{text} {', '.join(names)}", markup=False, soft_wrap=True)


def field_lines(
    found: Sequence[ReceiptFinding], status: str, words: Callable[[Field], tuple[str, str]]
) -> list[str]:
    """A line for each text about fields of that status, with the numbers it applies to.

    `words` gives the text for a field, and the name by which fields with one text are listed.
    """
    lines: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for finding in found:
        for field in finding.fields:
            if field.status == status:
                text, name = words(field)
                names, cells = lines.setdefault(text, ({}, {}))
                names[name], cells[finding.cell] = None, None
    return [
        ": ".join(filter(None, (text, ", ".join(filter(None, names)))))
        + f" [{_which(list(cells), len(found))}]"
        for text, (names, cells) in lines.items()
    ]


def _which(cells: Sequence[str], every: int) -> str:
    """A short description of some of `every` numbers."""
    if len(cells) == every and every > 1:
        return f"all {every} numbers"
    return f"{cells[0]} and {len(cells) - 1} more" if len(cells) > 1 else cells[0]


def _fields(found: Sequence[ReceiptFinding], status: str) -> Iterator[Field]:
    return (field for one in found for field in one.fields if field.status == status)


def table(found: Sequence[ReceiptFinding]) -> Table:
    """The table with a row for each number."""
    from rich.text import Text

    from flashwright.cli import show

    numbers = ("then", "now", "ratio then", "ratio now")
    shown = show.table("number", *numbers, "beside", "verdict", "fields", right=numbers)
    colors = {"holds": "green", "part": "cyan", "differs": "bold red", "unchecked": "yellow"}
    for one in found:
        shown.add_row(
            Text(one.cell),
            *(_time(s) for s in (one.then, one.now)),
            *("-" if r is None else f"{r:.3f}" for r in (one.ratio_then, one.ratio_now)),
            Text(one.peer or "-"),
            Text(WORDS[one.status][0], colors[one.status]),
            Text(_named(one)),
        )
    return shown


def _named(one: ReceiptFinding) -> str:
    """The names of the differing fields, at most FIELDS of them."""
    names = list(dict.fromkeys(field.name for field in one.differing))
    more = f" and {len(names) - FIELDS} more" if len(names) > FIELDS else ""
    return ", ".join(names[:FIELDS]) + more


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
