"""`flashwright split`: a program that splits its keys over thread blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, blaming, guarded, load_kernels, shown_name


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on TL")(split)


@guarded
def split(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = None,
) -> int:
    """Print a program of two kernels: thread blocks share the keys, then their sums are added up.

    The caller says by how many: splits, a dim. For few queries and many keys, as in decoding.
    """
    from flashwright.files import write
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse
    from flashwright.rewrite.split import split as two_kernels

    _, source = load_kernels(file)
    with blaming(shown_name(file), source):
        text = format_tree(two_kernels(parse(source)))
    if out is None:
        print(text, end="")
    else:
        write(out, text)
        print(f"{out}: split")
    return FINE
