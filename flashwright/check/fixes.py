"""Fixes that several checks offer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from flashwright.check.vocabulary import split
from flashwright.lang.diagnostic import Edit, Fix
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Expr, Name


def guess_fix(name: Name, known: Iterable[str], cutoff: float = 0.72) -> Fix | None:
    """The nearest known name, when there is one near enough to be meant."""
    near = difflib.get_close_matches(name.id, list(known), n=1, cutoff=cutoff)
    if not near or near[0] == name.id:
        return None
    # `Q_shared` and `K_shared` are long and alike, yet nobody writes one for the other.
    (base, space), (other, _) = split(name.id), split(near[0])
    if space and difflib.SequenceMatcher(None, base.lower(), other.lower()).ratio() < 0.72:
        return None
    return Fix(f"did you mean `{near[0]}`?", (Edit(name.span.start, name.span.end, near[0]),))


def rounded_down(expr: Expr) -> Fix:
    """`floor(...)` around an expression that should have been a whole number."""
    span = expr.span
    edits = (Edit(span.start, span.start, "floor("), Edit(span.end, span.end, ")"))
    return Fix(f"round it down: `floor({format_expr(expr)})`", edits)
