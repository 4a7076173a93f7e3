"""The option `--on` of the commands that run jobs on a fleet."""

from __future__ import annotations

from typing import Annotated

import typer

LOCAL = "local"

On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="local|ray|ray://HOST:PORT",
        help="Where: this machine, or a Ray cluster (see docs/fleet.md).",
    ),
]
