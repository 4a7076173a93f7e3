"""When to ask again, and how long to wait before: no client's business but ours, for the budget's
sake."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

TRIES = 8
"""Requests for one reply; with the waits between them about three minutes."""
LONGEST = 60.0
"""Seconds of a wait that nobody asked for."""
PATIENCE = 600.0
"""Seconds of a wait that the server asks for; a longer one is an end."""


def worthwhile(status: int) -> bool:
    """Whether the same request may be answered later: too many of them, a conflict, a server's
    own trouble (529 is Anthropic's "overloaded")."""
    return status in (408, 409, 429) or 500 <= status <= 599


def asked_for(header: str | None, now: datetime | None = None) -> float:
    """The seconds that Retry-After asks for, which it gives as such or as a date; 0 for neither."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def pause(tries: int, asked: float, chance: float) -> float:
    """Seconds to wait after so many tries: 1, 2, 4 .. 60, or what the server asked for if more.

    `chance` (0 to 1) adds up to a quarter, so that many clients do not come back together.
    """
    own = min(LONGEST, 2.0 ** (min(tries, 10) - 1))
    return max(own, asked) * (1 + chance / 4)
