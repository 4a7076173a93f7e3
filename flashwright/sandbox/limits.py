"""How much a candidate may take."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from flashwright.confine.limit import limit

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
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, limits.file_bytes)
