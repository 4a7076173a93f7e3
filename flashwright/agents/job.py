"""One command of ours as a process: what it reports, its time limit, its end if cancelled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.text import TextReceiveStream

MOST_CHARACTERS = 200_000
"""What is kept of each stream."""
GRACE = 3.0
"""Seconds for a command to end by itself, as on Ctrl-C; its compilers and workers end with it."""

Progress = Callable[[str], Awaitable[None]]


@dataclass
class Ended:
    """How a command ended."""

    code: int | None = None
    """Its exit code; None if it was stopped at the time limit."""
    output: str = ""
    errors: str = ""
    """Of stderr, what is no message."""
    diagnostics: list[dict[str, Any]] = field(default_factory=list)


async def run_command(
    arguments: Sequence[str], folder: Path, seconds: float, progress: Progress
) -> Ended:
    """Run `flashwright ARGUMENTS` in a folder. A cancellation ends it, and all that it started."""
    # -P: a module in the folder must not pass for one of ours.
    command = [sys.executable, "-P", "-m", "flashwright", *arguments]
    env = {**os.environ, "FLASHWRIGHT_MESSAGES": "json", "NO_COLOR": "1"}
    env.pop("FLASHWRIGHT_DEBUG", None)
    ended = Ended()
    async with await anyio.open_process(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            with anyio.move_on_after(seconds):
                async with anyio.create_task_group() as group:
                    group.start_soon(_read_output, process, ended)
                    group.start_soon(_read_messages, process, ended, progress)
                ended.code = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
    return ended


async def _read_output(process: Process, ended: Ended) -> None:
    async for text in _text(process.stdout):
        ended.output = (ended.output + text)[:MOST_CHARACTERS]


async def _read_messages(process: Process, ended: Ended, progress: Progress) -> None:
    rest = ""
    async for text in _text(process.stderr):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            await _take(line, ended, progress)
    await _take(rest, ended, progress)


async def _take(line: str, ended: Ended, progress: Progress) -> None:
    message = _message(line)
    if message is None:
        ended.errors = f"{ended.errors}{line}\n"[:MOST_CHARACTERS] if line.strip() else ended.errors
        return
    ended.diagnostics += message.get("diagnostics", ())
    if "progress" in message:
        await progress(message["progress"])


def _message(line: str) -> dict[str, Any] | None:
    """A message of cli/command.py; None for other text."""
    if not line.startswith(('{"diagnostics": ', '{"progress": ')):
        return None
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return message


async def _text(stream: ByteReceiveStream | None) -> AsyncIterator[str]:
    assert stream is not None
    async for text in TextReceiveStream(stream, errors="replace"):
        yield text


async def _end(process: Process) -> None:
    """End the command and its processes, first as Ctrl-C does."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with anyio.move_on_after(GRACE):
            await process.wait()
