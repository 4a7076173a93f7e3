"""Tool calls of an agent: made on the real server, and repeated from a transcript.

A transcript is a file of JSON lines, a call in each: `tool`, `arguments` and the `answer` that the
agent got.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from mcp.client import Client

from flashwright.agents.server import server
from flashwright.agents.workspace import Workspace

Call = Callable[..., Awaitable[dict[str, Any]]]


def session(folder: Path, work: Callable[[Call], Awaitable[None]], minutes: float = 10) -> None:
    """Do some work with a function that makes tool calls; the server's workspace is the folder."""

    async def main() -> None:
        async with Client(server(Workspace(folder), minutes)) as client:

            async def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
                told = await client.call_tool(tool, arguments)
                assert told.structured_content is not None, told.content
                return told.structured_content

            await work(call)

    anyio.run(main)


def codes(answer: dict[str, Any]) -> list[str]:
    """The codes of the errors that an answer has."""
    return [d["code"] for d in answer.get("diagnostics", ()) if d["severity"] == "error"]


def repeat(transcript: Path, folder: Path) -> list[dict[str, Any]]:
    """Make the calls of a transcript again, in an empty folder. Each must come out as it did: right
    or wrong, and with the same errors. Returns the calls with their new answers."""
    calls = [json.loads(line) for line in transcript.read_text("utf-8").splitlines()]

    async def work(call: Call) -> None:
        for number, one in enumerate(calls, 1):
            before, one["answer"] = one["answer"], await call(one["tool"], **one["arguments"])
            place = f"call {number}, {one['tool']} {one['arguments']}"
            assert one["answer"]["ok"] == before["ok"], (place, one["answer"])
            assert codes(one["answer"]) == codes(before), place

    session(folder, work)
    return calls
