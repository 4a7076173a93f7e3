"""Two results held against each other: by bits, or within a bound.

Any NaN is as good as any other where a number is the result: payloads are not compared. Where bits
are the result (mov, selp, shfl, ld), they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.hardware.formats import KINDS, Array, Float, apart, spacing, value
from tests.hardware.snippet import Bound, Operands, Snippet

WORDS = {"equal": "bit-equal", "nan": "equal but for NaN's bits", "within": "within its bound"}


@dataclass(frozen=True)
class Verdict:
    """How results of the emulator are to those of the hardware."""

    what: str
    """equal, nan, within or differs."""
    worst: float = 0.0
    """The largest difference, as a part of what is allowed."""
    note: str = ""
    """The first case that differs."""

    @property
    def ok(self) -> bool:
        return self.what != "differs"

    def __str__(self) -> str:
        if not self.ok:
            return f"DIFFERS: {self.note}"
        return WORDS[self.what] + (f" ({self.worst:.2f} of it)" if self.what == "within" else "")


def compare(snippet: Snippet, operands: Operands, hardware: Operands, found: Operands) -> Verdict:
    """The verdict on all results of a snippet."""
    allowed = snippet.bound(operands, hardware) if snippet.bound else [None] * len(hardware)
    verdicts = []
    for n, (kind, room) in enumerate(zip(snippet.gives, allowed, strict=True)):
        bad, worst, what = _one(kind, hardware[n], found[n], room)
        if bad.any():
            at = int(np.argmax(bad))
            return Verdict("differs", worst, _case(snippet, operands, hardware, found, n, at, bad))
        verdicts.append((what, worst))
    order = ("equal", "nan", "within")
    what = max((w for w, _ in verdicts), key=order.index, default="equal")
    return Verdict(what, max((w for _, w in verdicts), default=0.0))


def _one(name: str, a: Array, b: Array, room: Array | None) -> tuple[Array, float, str]:
    """The cases that differ, how near to the bound the others come, and in one word."""
    kind = KINDS[name]
    if kind.float is None:
        bad = a != b
        return bad, 0.0, "equal"
    first, second = apart(a, kind), apart(b, kind)
    same = first == second
    if same.all():
        return np.zeros(len(a), bool), 0.0, "equal"
    x, y = value(first, kind.float), value(second, kind.float)
    fine = same | (np.isnan(x) & np.isnan(y))
    if fine.all():
        return np.zeros(len(a), bool), 0.0, "nan"
    if room is None:
        return _any(~fine), 0.0, "equal"
    with np.errstate(all="ignore"):
        part = np.abs(x - y) / room
    zeros = (x == 0) & (y == 0)  # of two signs, or they would be the same
    part = np.where(np.isnan(part) | zeros, np.inf, part)
    part = np.where(fine, 0.0, np.where(_at_the_top(x, y, kind.float), 1.0, part))
    bad = part > 1
    return _any(bad), float(np.max(part, initial=0.0, where=~bad)), "within"


def _at_the_top(x: Array, y: Array, form: Float) -> Array:
    """One is infinite and the other nearly so: there an ulp may be all."""
    most = value(np.array([form.largest], np.uint64).astype(np.uint32), form)[0]
    large = (np.abs(x) >= most * (1 - 2.0**-8)) & (np.abs(y) >= most * (1 - 2.0**-8))
    top: Array = large & (np.isinf(x) != np.isinf(y)) & (np.signbit(x) == np.signbit(y))
    return top


def _any(bad: Array) -> Array:
    return np.asarray(bad.any(axis=-1)) if bad.ndim > 1 else bad


def _case(
    snippet: Snippet,
    operands: Operands,
    hardware: Operands,
    found: Operands,
    n: int,
    at: int,
    bad: Array,
) -> str:
    trial, thread = divmod(at, snippet.threads)

    def hexed(x: Array) -> str:
        return f"{int(x[at]):0{2 * x.dtype.itemsize}x}"

    given = " ".join(hexed(o) for o in operands[:8]) + (" ..." if len(operands) > 8 else "")
    return (
        f"{int(bad.sum())} of {bad.size} cases, first trial {trial} thread {thread}, result {n}: "
        f"from {given} the hardware makes {hexed(hardware[n])}, the emulator {hexed(found[n])}"
    )


def approximate(
    kind: str, ulps: float = 0.0, relative: float = 0.0, absolute: float = 0.0
) -> Bound:
    """What PTX says of an instruction's error, and the emulator's own half an ulp."""
    of = KINDS[kind]
    form = of.float
    assert form is not None

    def rooms(operands: Operands, hardware: Operands) -> Operands:
        with np.errstate(all="ignore"):
            x = np.abs(value(apart(hardware[0], of), form))
            x = np.where(np.isfinite(x), x, 0.0)
            return [(ulps + 0.5) * spacing(x, form) + relative * x + absolute]

    return rooms
