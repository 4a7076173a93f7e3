"""`flashwright report`: a run as an HTML page, in the terminal or as Markdown."""

from __future__ import annotations

import io
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, guarded
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.report.model import Report

PAGE = "report.html"
WIDTH = 100


class ReportFormat(StrEnum):
    """Output formats of `report`."""

    HTML = "html"
    MARKDOWN = "markdown"
    TERMINAL = "terminal"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Look up")(report)


@guarded
def report(
    what: Annotated[
        list[Path],
        typer.Argument(
            metavar="WHAT",
            help="Kernel packages, benchmarks (the folder or records.jsonl), verify --json files.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Default: report.html beside WHAT; - is stdout."
        ),
    ] = None,
    format: Annotated[
        ReportFormat | None, typer.Option(help="Default: html, or as FILE's name says.")
    ] = None,
) -> int:
    """Report on a run: the verdict, the speed beside the peers, the code and the reasoning."""
    from flashwright.report.gather import gather

    form = format or (ReportFormat.MARKDOWN if (out or "").endswith(".md") else ReportFormat.HTML)
    found = gather(what)
    if form is ReportFormat.TERMINAL and out in (None, "-"):
        from flashwright.cli import show

        screen = show.console()
        for part in _parts(found, screen.width):
            screen.print(part)
        return FINE
    text = _text(found, form)
    if out == "-" or (out is None and form is ReportFormat.MARKDOWN):
        print(text, end="")
        return FINE
    path = Path(out) if out is not None else _beside(what[0])
    _write(path, text)
    print(f"{path}: {found.title}, {len(text.encode()) / 1024:.0f} KB")
    return FINE


def _parts(found: Report, width: int) -> list[object]:
    from flashwright.report import terminal

    return list(terminal.render(found, width))


def _text(found: Report, form: ReportFormat) -> str:
    if form is ReportFormat.HTML:
        from flashwright.report import page

        return page.html(found)
    if form is ReportFormat.MARKDOWN:
        from flashwright.report import markdown

        return markdown.render(found)
    from rich.console import Console

    into = Console(file=io.StringIO(), width=WIDTH, highlight=False, markup=False, emoji=False)
    for part in _parts(found, WIDTH):
        into.print(part)
    written = into.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def _beside(what: Path) -> Path:
    """The default path of the page. Raises Failed if another file has that name."""
    from flashwright.report.page import GENERATOR

    path = (what if what.is_dir() else what.parent) / PAGE
    if path.is_file():
        with path.open("rb") as there:
            ours = f'content="{GENERATOR}'.encode() in there.read(4096)
        if not ours:
            text = f"cannot write {path}: the file exists and is not a report"
            raise Failed(Diagnostic("FW001", text, help="choose another file with --out"))
    return path


def _write(path: Path, text: str) -> None:
    from flashwright.files import cannot, write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("use", path.parent, error) from None
    write(path, text)
