"""`flashwright grammar`: prints TL's grammar for lark, or as GBNF for constrained decoding."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, guarded


class Level(StrEnum):
    """The level of TL that the grammar accepts."""

    SKETCH = "sketch"
    CODE = "code"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Look up")(grammar)


@guarded
def grammar(
    gbnf: Annotated[
        bool, typer.Option("--gbnf", metavar=" ", help="As GBNF, for llama.cpp's servers.")
    ] = False,
    level: Annotated[
        Level | None, typer.Option(help="GBNF of sketches or of code; default code.")
    ] = None,
    bounded: Annotated[
        bool,
        typer.Option("--bounded", metavar=" ", help="GBNF of short programs, for tiny models."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = None,
) -> int:
    """Print TL's grammar: for lark, which parses programs, or as GBNF for constrained decoding."""
    from flashwright.files import write
    from flashwright.lang import gbnf as in_gbnf
    from flashwright.lang.gbnf_rules import FILE

    if not gbnf and (bounded or level is not None):
        option = "--bounded" if bounded else "--level"
        raise typer.BadParameter("needs --gbnf", param_hint=option)
    if gbnf:
        text = in_gbnf.gbnf((level or Level.CODE).value, bounded)
    else:
        text = FILE.read_text(encoding="utf-8")
    if out is None:
        print(text, end="")
        return FINE
    write(out, text)
    print(f"{out}: {text.count(chr(10))} lines")
    return FINE
