"""`flashwright mcp`: serves the commands to a coding agent, by the Model Context Protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, flag, guarded
from flashwright.lang.diagnostic import Diagnostic, Failed

MINUTES = 30.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(mcp)


@guarded
def mcp(
    workspace: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder that the tools may use.")
    ] = Path(),
    minutes: Annotated[
        float, typer.Option(metavar="N", min=0.1, help="Limit of one command.")
    ] = MINUTES,
    skill: Annotated[bool, flag("--skill", help="Print the folder of the skill, and end.")] = False,
) -> int:
    """Serve tools to a coding agent on stdin and stdout: check, run, translate, build, judge.

    The tools read and write in the workspace only. docs/agents.md says how to add the server.
    """
    from flashwright.agents.workspace import SKILL, Workspace

    if skill:
        print(SKILL)
        return FINE
    try:
        from flashwright.agents.server import server
    except ImportError:
        text = "the server needs the Python package mcp, 2 or later"
        hint = "pip install 'flashwright[mcp]'"
        raise Failed(Diagnostic("FW931", text, help=hint)) from None
    folder = Workspace(workspace)
    made = server(folder, minutes)
    if not folder.confine():
        print("this system has no Landlock: only paths are looked at", file=sys.stderr)
    made.run("stdio")
    return FINE
