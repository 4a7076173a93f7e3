"""How much a candidate may take."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

GB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Beyond these a candidate is ended, and that is the verdict."""

    seconds: float = 60.0
    """For one call; Triton and torch.compile compile in their first ones."""
    start_seconds: float = 180.0
    """To start the process and import the candidate."""
    memory: int = 24 * GB
    """Of the host, all of the candidate's processes together."""
    gpu_memory: int | None = None
    """Of the device; None: nine tenths of it."""
    file_bytes: int = 4 * GB
    """The largest file it may write."""


def apply(limits: Limits) -> None:
    """In the candidate's process, before its code is there: what the kernel itself enforces."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = limits.file_bytes if most == resource.RLIM_INFINITY else min(limits.file_bytes, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def resident(session: int) -> int:
    """Bytes of memory that all processes of a session hold; 0 where the system does not tell.

    Not RLIMIT_AS: CUDA reserves terabytes of addresses that it never uses.
    """
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                total += _resident(Path(entry.path), session)
    return total


def _resident(process: Path, session: int) -> int:
    try:
        # The name in parentheses may hold anything: count the fields from behind it.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[3]) != session:
            return 0
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
