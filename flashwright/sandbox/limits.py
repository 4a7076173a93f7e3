"""The limits on a candidate's time and memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from flashwright.confine.limit import limit

GB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Time and memory limits. A candidate that exceeds one is ended, and that is an offence."""

    seconds: float = 60.0
    """For one call. The first calls of Triton and torch.compile include compilation."""
    start_seconds: float = 180.0
    """To start the process and import the candidate."""
    memory: int = 24 * GB
    """Bytes of host memory for all of the candidate's processes together."""
    gpu_memory: int | None = None
    """Bytes of GPU memory; None means nine tenths of it."""
    file_bytes: int = 4 * GB
    """The largest file it may write."""


def apply(limits: Limits) -> None:
    """Set the limits that the operating system enforces, before the candidate is loaded."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, limits.file_bytes)
