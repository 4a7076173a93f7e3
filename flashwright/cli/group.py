"""`flashwright group`: a program whose tiles hold the query heads that share a kv head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, blaming, guarded, load_kernels, shown_name


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on TL")(group)


@guarded
def group(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")],
    heads: Annotated[
        int, typer.Option("--heads", metavar="N", min=1, help="Query heads that share a kv head.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = None,
) -> int:
    """Print a program whose tiles hold the query heads that share a kv head, query after query.

    For few queries, as in decode: they fill a tile, and each key is loaded once for all heads.
    """
    from flashwright.check.check import check
    from flashwright.files import write
    from flashwright.lang.diagnostic import Diagnostic, Failed
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse
    from flashwright.rewrite.grouped import grouped

    kernels, source = load_kernels(file)
    with blaming(shown_name(file), source):
        tree = grouped(parse(source), heads)
        for error in check(tree).errors:
            said = f"the grouped program has an error: {error.message} ({error.code})"
            raise Failed(Diagnostic("FW916", said, kernels.programs[0].grid.span))
    text = format_tree(tree)
    if out is None:
        print(text, end="")
    else:
        write(out, text)
        print(f"{out}: grouped")
    return FINE
