"""Resource limits of a process (setrlimit)."""

from __future__ import annotations

import resource


def limit(kind: int, most: int) -> int:
    """Limit this process and its children to `most`. Returns the limit, which may have been lower
    already."""
    _, allowed = resource.getrlimit(kind)
    value = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (value, value))
    return value
