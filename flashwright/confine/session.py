"""What all processes of a session hold together."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Use:
    """Bytes of memory in use, and the number of processes; 0 where the system does not tell."""

    memory: int = 0
    processes: int = 0


def use(session: int) -> Use:
    """What the processes of a session hold now.

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
        # The name in parentheses may hold anything: count the fields from behind it.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[3]) != session:
            return None
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
