"""`flashwright judge selftest`: tests the judge itself on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import flag, guarded

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.selftest.run import SelftestResult

STYLES = {"ok": "green", "HOLE": "bold red", "FALSE ALARM": "bold red", "not tried": "bright_black"}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    group = typer.Typer(no_args_is_help=True, help="Test the judge itself.")
    group.command()(selftest)
    group.callback()(lambda: None)  # makes `selftest` a subcommand although it is the only one
    app.add_typer(group, name="judge", rich_help_panel="On the GPU")


@guarded
def selftest(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this case, such as cpu/zeros or 'own_*'."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="CLASS", help="Only this class, such as library."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="gpu|cpu", help="Only the cases that run there.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Cases in parallel.")] = None,
    as_json: Annotated[bool, flag("--json", help="Print JSON.")] = False,
) -> int:
    """Judge adversarial and honest kernels on this machine, and show wrong verdicts.

    Exit code 0: nothing wrong; 1: a hole or a false alarm; 2: nothing could be tried.
    """
    from flashwright.cli import show
    from flashwright.selftest.case import CLASSES
    from flashwright.selftest.cases import chosen
    from flashwright.selftest.run import run
    from flashwright.selftest.table import details, exit_code, record, summary

    if on not in (None, "gpu", "cpu"):
        raise typer.BadParameter("gpu or cpu", param_hint="--on")
    for name in kind or ():
        if name not in CLASSES:
            known = ", ".join(CLASSES)
            raise typer.BadParameter(f"there is no class {name!r}: {known}", param_hint="--class")
    for name in only or ():
        if not chosen([name]):
            raise typer.BadParameter(f"no case has the name {name!r}", param_hint="--only")
    cases = chosen(only or (), kind or (), on)
    with _progress(len(cases)) as report:
        rows = run(cases, jobs, report)
    if as_json:
        print(json.dumps(record(rows), indent=2))
    else:
        out = show.console()
        out.print(_table(rows))
        out.print(f"* the whole trial; the others have what their attack needs\n{_confined()}")
        for row in rows:
            if row.status in ("HOLE", "FALSE ALARM"):
                out.print(details(row), style="red", markup=False)
        out.print(summary(rows), style="bold green" if exit_code(rows) == 0 else "bold red")
    return exit_code(rows)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[SelftestResult], None]]:
    """Shows a bar in a terminal, else a line per case on stderr."""
    from flashwright.cli import show

    done, begun = 0, time.monotonic()
    with show.progress("judging the judge") as step:

        def report(row: SelftestResult) -> None:
            nonlocal done
            done += 1
            step(done, total, row.case.name)
            if not sys.stderr.isatty() and row.status != "not tried":
                passed = time.monotonic() - begun
                text = f"[{done}/{total} {passed:.0f} s] {row.case.name}: {row.status}"
                print(f"{text}: {row.happened}", file=sys.stderr, flush=True)

        yield report


def _table(rows: list[SelftestResult]) -> Table:
    from rich.text import Text

    from flashwright.cli import show
    from flashwright.selftest.table import COLUMNS, cells

    shown = show.table(*COLUMNS, gap=2)
    shown.columns[0].no_wrap = shown.columns[-1].no_wrap = True
    for row in rows:
        *texts, status = cells(row)
        shown.add_row(*(Text(text) for text in texts), Text(status, STYLES[row.status]))
    return shown


def _confined() -> str:
    """The confinement of a candidate's process that this system supports."""
    from flashwright.confine import landlock, seal

    files = "files by Landlock" if landlock.available() else "no files: it has no Landlock"
    calls = "system calls by seccomp" if seal.available() else "no calls: it has no seccomp"
    return f"this system refuses {files}, {calls}"
