"""`flashwright lsp`: the language server of TL, for editors."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from flashwright.cli.command import FINE, find_gpu, guarded, own_dims
from flashwright.lang.diagnostic import Diagnostic, Failed


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on TL")(lsp)


@guarded
def lsp(
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also against this GPU's budgets.")
    ] = None,
) -> int:
    """Serve an editor over stdin and stdout: diagnostics, fixes, hover, completion, formatting."""
    if importlib.util.find_spec("pygls") is None:
        text = "the language server needs pygls, which is not installed"
        raise Failed(Diagnostic("FW931", text, help="pip install 'flashwright[lsp]'"))
    from flashwright.editor.server import serve

    card = find_gpu(gpu) if gpu is not None else None
    serve(card, lambda tree, path: own_dims(tree, None, path))
    return FINE
