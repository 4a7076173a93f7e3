"""Work counted rather than timed: a count is the same on a busy machine.

Seconds are measured by `python -m tests.speed`.
"""

from __future__ import annotations

import cProfile
import gc
from collections.abc import Callable
from typing import Any

from tests.unit import remembered


def calls(work: Callable[[], Any]) -> int:
    """How many Python and C functions are called while `work` runs."""
    remembered.forget()
    profile = cProfile.Profile()
    gc.disable()  # finalizers of earlier tests are not this one's work
    try:
        profile.runcall(work)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())
