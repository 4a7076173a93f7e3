"""`flashwright receipt check`: are the numbers in a benchmark's file still so?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import BAD_INPUT, FINE, WRONG, guarded
from flashwright.lang.diagnostic import Failed

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.measure.receipt import Finding, Parts

WORDS = {"holds": "holds", "differs": "differs", "unchecked": "cannot be checked here"}


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
        float, typer.Option(metavar="X", min=0, help="By how much a time may differ.")
    ] = 0.05,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only so many, drawn by lot.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=" ", help="Print JSON.")] = False,
) -> int:
    """Build, judge and measure again what a file says of our kernels.

    Exit code 0: all holds; 1: something differs; 2: something cannot be checked here.
    """
    from flashwright.cli import show
    from flashwright.measure import receipt

    cells = receipt.numbers(file, cell or [], sample)
    parts = _parts()
    with (
        tempfile.TemporaryDirectory(prefix="flashwright-") as folder,
        show.progress("checking") as step,
    ):
        found = list(receipt.check(file, cells, Path(folder), parts, within, step))
    if as_json:
        print(json.dumps({"file": str(file), "numbers": [f.record() for f in found]}, indent=2))
    else:
        show.console().print(table(found))
        print(f"{file}: {in_words(found)}")
        if parts.card is None:
            print(f"No time was measured: {parts.missing}")
    return exit_code(found)


def _parts() -> Parts:
    """What can be checked with on this machine."""
    from flashwright.build import driver
    from flashwright.judge.judge import need_torch
    from flashwright.measure.receipt import Parts

    try:
        card = driver.cards()[0]
        need_torch()
    except Failed as failed:
        return Parts(None, failed.diagnostics[0].message)
    return Parts(card)


def exit_code(found: Sequence[Finding]) -> int:
    """Differing is worse than not knowing."""
    states = {finding.status for finding in found}
    if "differs" in states:
        return WRONG
    return BAD_INPUT if "unchecked" in states else FINE


def in_words(found: Sequence[Finding]) -> str:
    """How many of each."""
    words = {"holds": ("holds", "hold"), "differs": ("differs", "differ")}
    told = []
    for status in WORDS:
        count = sum(finding.status == status for finding in found)
        one, more = words.get(status, (WORDS[status], WORDS[status]))
        told += [f"{count} {one if count == 1 else more}"] if count else []
    return ", ".join(told)


def table(found: Sequence[Finding]) -> Table:
    """A line for each number."""
    from rich.text import Text

    from flashwright.cli import show

    numbers = ("then", "now", "ratio then", "ratio now")
    shown = show.table("number", *numbers, "beside", "verdict", "why", right=numbers)
    colors = {"holds": "green", "differs": "bold red", "unchecked": "yellow"}
    for one in found:
        shown.add_row(
            one.cell,
            *(_time(s) for s in (one.then, one.now)),
            *("-" if r is None else f"{r:.3f}" for r in (one.ratio_then, one.ratio_now)),
            one.peer or "-",
            Text(WORDS[one.status].partition(" ")[0], colors[one.status]),
            "; ".join(one.why),
        )
    return shown


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
