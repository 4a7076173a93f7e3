"""Numbers and names as text, shared by all formats of the report."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from flashwright.measure.records import OURS

NOTHING = "–"
KB = 1024


def who(name: str) -> str:
    """A contestant's name as a heading."""
    return "ours" if name == OURS else name


def rate(tflops: float | None) -> str:
    """A rate as text, with digits that suit its size."""
    if tflops is None:
        return NOTHING
    return f"{tflops:.0f}" if abs(tflops) >= 100 else f"{tflops:.1f}"


def ratio(value: float | None) -> str:
    """A ratio as text, with two decimals."""
    return NOTHING if value is None else f"{value:.2f}"


def share(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def error(value: float | None) -> str:
    """An error relative to the output's RMS."""
    if value is None:
        return NOTHING
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def time(seconds: float | None) -> str:
    """A time, in the unit that suits it."""
    if seconds is None:
        return NOTHING
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def size(count: int | None) -> str:
    """A length: `16k` for 16384."""
    if count is None:
        return NOTHING
    whole = count >= KB and count % KB == 0
    return f"{count // KB}k" if whole else str(count)


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 cell`, `2 cells`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def plain(text: str) -> str:
    """Text that cannot steer a terminal: no control codes, and on one line."""
    return "".join(
        " " if char in "\n\t" else "\ufffd" if unicodedata.category(char)[0] == "C" else char
        for char in text
    )
