"""`flashwright pack`, `group` and `split`: programs made from programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, blaming, guarded, load_kernels, shown_name

if TYPE_CHECKING:
    from flashwright.lang.nodes import Tree

File = Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (pack, group, split):
        app.command(rich_help_panel="Work on TL")(command)


@guarded
def pack(
    file: File,
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
    out: Out = None,
) -> int:
    """Print a program for packed sequences: those of a batch, of any lengths, behind each other.

    StartsQ and StartsK say where they begin; q_len and kv_len become the longest lengths. Keys may
    also lie in a cache: --lengths where it has room for more, --pages where it is cut into pages.
    """
    from flashwright.rewrite.packed import packed
    from flashwright.spec import Batch

    batch = Batch(not rectangular, lengths, pages)
    return _print(file, out, lambda tree: packed(tree, batch), "packed", "FW909")


@guarded
def group(
    file: File,
    heads: Annotated[
        int, typer.Option("--heads", metavar="N", min=1, help="Query heads that share a kv head.")
    ],
    out: Out = None,
) -> int:
    """Print a program whose tiles hold the query heads that share a kv head, query after query.

    For few queries, as in decode: they fill a tile, and each key is loaded once for all heads.
    """
    from flashwright.rewrite.grouped import grouped

    return _print(file, out, lambda tree: grouped(tree, heads), "grouped", "FW916")


@guarded
def split(file: File, out: Out = None) -> int:
    """Print a program of two kernels: thread blocks share the keys, then their sums are added up.

    The caller says by how many: splits, a dim. For few queries and many keys, as in decoding.
    """
    from flashwright.rewrite.split import split as two_kernels

    return _print(file, out, two_kernels, "split", "FW910")


def _print(
    file: str, out: Path | None, rewrite: Callable[[Tree], Tree], word: str, code: str
) -> int:
    """Print or write what a program becomes; FW909 or the like if that has an error."""
    from flashwright.check.check import check
    from flashwright.files import write
    from flashwright.lang.diagnostic import Diagnostic, Failed
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse

    kernels, source = load_kernels(file)
    with blaming(shown_name(file), source):
        tree = rewrite(parse(source))
        for error in check(tree).errors:
            said = f"the {word} program has an error: {error.message} ({error.code})"
            raise Failed(Diagnostic(code, said, kernels.programs[0].grid.span))
    text = format_tree(tree)
    if out is None:
        print(text, end="")
    else:
        write(out, text)
        print(f"{out}: {word}")
    return FINE
