"""`flashwright replay`: repeats a run with language models from its record, without a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, WRONG, guarded
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.generate.replay import Replayed


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(replay)


@guarded
def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder made by generate.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Keep the result here; default: remove it."
        ),
    ] = None,
) -> int:
    """Repeat a run from its record, up to the compiled kernel, and compare with what it made.

    Replies come from the record. Checks, CPU runs, translation and compilation run again.
    """
    from flashwright.author.llm.transcript import FOLDER, RUN
    from flashwright.cli.screen import GenerateScreen
    from flashwright.cli.show import console
    from flashwright.generate.replay import replay as again
    from flashwright.report.words import plain

    if not os.path.lexists(folder / FOLDER / RUN):
        text = f"{folder} has no record of a run with a language model"
        hint = f"`flashwright generate ... --model NAME` leaves one in {FOLDER}/"
        raise Failed(Diagnostic("FW915", text, help=hint))
    place = out or Path(tempfile.mkdtemp(prefix="flashwright-replay-"))
    screen = GenerateScreen(console())
    try:
        found = again(folder, place, screen)
    finally:
        screen.close()
        if out is None:
            shutil.rmtree(place, ignore_errors=True)
    for line in found.lines:
        print(plain(line))  # records are untrusted
    print(_verdict(found))
    return FINE if found.same else WRONG


def _verdict(found: Replayed) -> str:
    """The result of the comparison in one line."""
    from flashwright.report.words import plural

    if not (found.attempts or found.files):
        return "nothing to compare"
    if not found.same:
        return "NOT the same: see above"
    return f"the same: {plural(found.attempts, 'attempt')} and {plural(found.files, 'file')}"
