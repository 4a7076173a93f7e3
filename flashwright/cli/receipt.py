"""`flashwright receipt check`: are the numbers in a benchmark's file still so?"""

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
"""Of one number, and of more."""
FIELDS = 4
"""Differing fields of a number in the table; JSON has all."""


def register(app: typer.Typer) -> None:
    """Put the commands on the command line."""
    group = typer.Typer(no_args_is_help=True, help="Check the numbers of a benchmark again.")
    group.command()(check)
    group.callback()(lambda: None)  # so that `check` is a command of its own, though it is alone
    app.add_typer(group, name="receipt", rich_help_panel="On the GPU")


@guarded
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="records.jsonl of a benchmark, or its folder.")
    ],
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one, such as 'mha d64 causal 512'."),
    ] = None,
    within: Annotated[
        float, typer.Option(metavar="X", min=0, help="By how much a time or ratio may differ.")
    ] = 0.05,
    other_versions: Annotated[
        bool,
        typer.Option(
            "--other-versions",
            metavar=" ",
            help="Measure with other versions of torch, nvcc or a peer: they are named, not held.",
        ),
    ] = False,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only so many, drawn by lot.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=" ", help="Print JSON.")] = False,
) -> int:
    """Hold a file against itself, build, judge and measure again what it says of our kernels.

    Exit code 0: all holds; 1: something does not; 2: something cannot be checked here.
    """
    from flashwright.measure import receipt

    cells = receipt.numbers(file, cell or [], sample)
    dependencies = _dependencies()
    tolerances = receipt.Tolerances(within, other_versions)
    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder, _progress() as told:
        checked = receipt.check(file, cells, Path(folder), dependencies, tolerances, told.step)
        found = [told.done(one, len(cells)) for one in checked]
    if as_json:
        print(json.dumps({"file": str(file), "numbers": [f.record() for f in found]}, indent=2))
    else:
        show_findings(found)
        print(f"{file}: {in_words(found)}")
        if dependencies.card is None:
            print(f"No time was measured: {dependencies.missing}")
    return exit_code(found)


# --- progress ---------------------------------------------------------------------------------


class Told:
    """Tells how far a check is: a bar in a terminal, else a line for each thing and number."""

    def __init__(self, bar: Callable[[int, int, str], None] | None) -> None:
        self._bar, self._count = bar, 0

    def step(self, done: int, total: int, text: str) -> None:
        """Something else is done now."""
        if self._bar is not None:
            self._bar(done, total, text)
        else:
            _say(f"[{done}/{total}] {text}")

    def done(self, one: ReceiptFinding, total: int) -> ReceiptFinding:
        """A number is done."""
        self._count += 1
        if self._bar is not None:
            self._bar(self._count, total, one.cell)
        else:
            _say(f"[{self._count}/{total}] {one.cell}: {WORDS[one.status][0]} ({one.took:.1f} s)")
        return one


@contextlib.contextmanager
def _progress() -> Iterator[Told]:
    from flashwright.cli import show

    if not sys.stderr.isatty():
        yield Told(None)
        return
    with show.progress("checking") as bar:
        yield Told(bar)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _dependencies() -> ReceiptDependencies:
    """What can be checked with on this machine."""
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
    """Differing is worse than not knowing."""
    states = {finding.status for finding in found}
    if "differs" in states:
        return WRONG
    return BAD_INPUT if states - {"holds"} else FINE


def in_words(found: Sequence[ReceiptFinding]) -> str:
    """How many of each."""
    told = []
    for status, (one, more) in WORDS.items():
        count = sum(finding.status == status for finding in found)
        told += [f"{count} {one if count == 1 else more}"] if count else []
    return ", ".join(told)


# --- what was found ---------------------------------------------------------------------------


def show_findings(found: Sequence[ReceiptFinding]) -> None:
    """The table; then the fields that do not hold and those that were not checked, each once."""
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
    told = sorted({field.name.partition(" (")[0] for field in _fields(found, "told")})
    if told:
        text = "Seen once, so that only the digests vouch for it:"
        out.print(f"{text} {', '.join(told)}", markup=False, soft_wrap=True)


def field_lines(
    found: Sequence[ReceiptFinding], status: str, words: Callable[[Field], tuple[str, str]]
) -> list[str]:
    """The fields of that status, each once, with the numbers that they are about.

    `words` gives what is said of a field, and the name under which others join it in one line.
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
    """Some numbers, in a few words."""
    if len(cells) == every and every > 1:
        return f"all {every} numbers"
    return f"{cells[0]} and {len(cells) - 1} more" if len(cells) > 1 else cells[0]


def _fields(found: Sequence[ReceiptFinding], status: str) -> Iterator[Field]:
    return (field for one in found for field in one.fields if field.status == status)


def table(found: Sequence[ReceiptFinding]) -> Table:
    """A line for each number."""
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
    """The fields that differ, by name."""
    names = list(dict.fromkeys(field.name for field in one.differing))
    more = f" and {len(names) - FIELDS} more" if len(names) > FIELDS else ""
    return ", ".join(names[:FIELDS]) + more


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
