"""`flashwright grad`: the backward pass of a forward program, as TL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, blaming, find_gpu, guarded, load_program, shown_name

if TYPE_CHECKING:
    from flashwright.lang.nodes import Tree
    from flashwright.program.program import Program, Tensor


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on TL")(grad)


def _check_result(tree: Tree, program: Program) -> None:
    """Refuse a program whose backward pass is not valid, instead of printing that."""
    from flashwright.check.check import check
    from flashwright.lang.diagnostic import Diagnostic, Failed

    for error in check(tree).errors:
        text = f"what is derived has an error: {error.message} ({error.code})"
        raise Failed(Diagnostic("FW908", text, program.grid.span))


def _names(text: str, what: str, tensors: Iterable[Tensor]) -> list[str]:
    """The names in a list of names; BadParameter if no tensor is called so."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [t.name for t in tensors]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no {what} is called {name}: there are {', '.join(known)}")
    return names


@guarded
def grad(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")],
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="With sizes for it: see `flashwright gpus`.")
    ] = None,
    of: Annotated[
        str, typer.Option(metavar="NAMES", help="Outputs with a gradient beside O, as in `LSE`.")
    ] = "",
    wrt: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Inputs to differentiate with respect to; default all."),
    ] = "",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in every run.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = None,
) -> int:
    """Print the backward pass of a program: its gradients, as TL of several kernels."""
    from flashwright.author.builtin.backward import tilings
    from flashwright.files import write
    from flashwright.grad.grad import backward
    from flashwright.lang.format import format_tree

    program, source = load_program(file)
    outputs = _names(of, "output", program.outputs)
    inputs = _names(wrt, "input", program.inputs) or None
    with blaming(shown_name(file), source):
        made = backward(program, outputs, inputs, deterministic)
        _check_result(made.tree, program)
    tree = made.tree
    if gpu is not None:
        _, tree = next(iter(tilings(tree, find_gpu(gpu))))
    text = format_tree(tree)
    if out is None:
        print(text, end="")
        return FINE
    write(out, text)
    print(f"{out}: {', '.join(made.gradients)}", *made.notes, sep="\n")
    return FINE
