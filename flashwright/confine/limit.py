"""What the system itself allows a process and no more."""

from __future__ import annotations

import resource


def limit(kind: int, most: int) -> int:
    """Hold this process and its children to so much; what is allowed, less where it was already."""
    _, allowed = resource.getrlimit(kind)
    value = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (value, value))
    return value
