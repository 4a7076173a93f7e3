"""Tool calls of an agent: made on the real server, and repeated from a transcript.

A transcript is a file of JSON lines, a call in each: `tool`, `arguments` and the `answer` that the
agent got. The first line may have `files` instead, those of the workspace by name.
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


def session(
    folder: Path, work: Callable[[Call], Awaitable[None]], minutes: float = 10
) -> list[str | None]:
    """Do some work with a function that makes tool calls; the server's workspace is the folder.
    Returns the messages of progress."""
    told: list[str | None] = []

    async def progress(done: float, total: float | None, text: str | None) -> None:
        told.append(text)

    async def main() -> None:
        async with Client(server(Workspace(folder), minutes)) as client:

            async def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
                answer = await client.call_tool(tool, arguments, progress_callback=progress)
                assert answer.structured_content is not None, answer.content
                return answer.structured_content

            await work(call)

    anyio.run(main)
    return told


def codes(answer: dict[str, Any]) -> list[str]:
    """The codes of the errors that an answer has."""
    return [d["code"] for d in answer.get("diagnostics", ()) if d["severity"] == "error"]


def repeat(transcript: Path, folder: Path, whole: bool) -> list[dict[str, Any]]:
    """Make the calls of a transcript again, in an empty folder. Each must come out as it did: right
    or wrong, and with the same errors. If not the `whole`, what costs much and is done again by
    `submit` is left out: translations, emulations, runs of right programs. Returns the calls with
    their new answers."""
    lines = [json.loads(line) for line in transcript.read_text("utf-8").splitlines()]
    for name, text in lines[0].get("files", {}).items():
        (folder / name).write_text(text, "utf-8")

    def is_repeated(one: dict[str, Any]) -> bool:
        is_done_again = one["tool"] in ("translate", "emulate")
        is_done_again |= one["tool"] == "run" and one["answer"]["ok"]
        return whole or not is_done_again

    calls = [one for one in lines if "tool" in one and is_repeated(one)]

    async def work(call: Call) -> None:
        for number, one in enumerate(calls, 1):
            before, one["answer"] = one["answer"], await call(one["tool"], **one["arguments"])
            place = f"call {number}, {one['tool']} {one['arguments']}"
            assert one["answer"]["ok"] == before["ok"], (place, one["answer"])
            assert codes(one["answer"]) == codes(before), place

    session(folder, work)
    return calls
