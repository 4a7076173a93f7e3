"""The memory and the number of all processes of a session."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Use:
    """Bytes of memory in use and the number of processes; 0 if the system does not report them."""

    memory: int = 0
    processes: int = 0


def use(session: int) -> Use:
    """The current use of a session's processes.

    Not RLIMIT_AS: CUDA reserves terabytes of addresses that it never uses.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            held = _resident(Path(entry.path), session) if entry.name.isdigit() else None
            if held is not None:
                found.append(held)
    return Use(sum(found), len(found))


def _resident(process: Path, session: int) -> int | None:
    try:
        # The name in parentheses may contain anything: count the fields after it.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[3]) != session:
            return None
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
