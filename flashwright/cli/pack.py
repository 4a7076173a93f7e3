"""`flashwright pack`: a program for rectangular batches, as one for packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, blaming, guarded, load_kernels, shown_name


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on TL")(pack)


@guarded
def pack(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")],
    lengths: Annotated[
        bool, typer.Option("--lengths", help="LengthsK says how many keys each sequence has.")
    ] = False,
    pages: Annotated[
        int | None,
        typer.Option("--pages", min=1, metavar="N", help="Keys lie in pages of N, by a table."),
    ] = None,
    rectangular: Annotated[
        bool,
        typer.Option("--rectangular-queries", help="All sequences have q_len queries."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = None,
) -> int:
    """Print a program for packed sequences: those of a batch, of any lengths, behind each other.

    StartsQ and StartsK say where they begin; q_len and kv_len become the longest lengths. Keys may
    also lie in a cache: --lengths where it has room for more, --pages where it is cut into pages.
    """
    from flashwright.check.check import check
    from flashwright.files import write
    from flashwright.lang.diagnostic import Diagnostic, Failed
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse
    from flashwright.rewrite.packed import packed
    from flashwright.rewrite.sequences import Batch

    kernels, source = load_kernels(file)
    with blaming(shown_name(file), source):
        tree = packed(parse(source), Batch(not rectangular, lengths, pages))
        for error in check(tree).errors:
            said = f"the packed program has an error: {error.message} ({error.code})"
            raise Failed(Diagnostic("FW909", said, kernels.programs[0].grid.span))
    text = format_tree(tree)
    if out is None:
        print(text, end="")
    else:
        write(out, text)
        print(f"{out}: packed")
    return FINE
