"""Masks: when a condition on positions holds on a whole tile, so that masking it can be left out.

The test is made from the condition itself: each side of a comparison is bounded over the tile's
rows and columns, and `kv_idx <= q_idx + c` holds everywhere if the last key is at most the first
query + c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flashwright.lang import nodes as tl
from flashwright.lang.nodes import NOWHERE, Expr, Name
from flashwright.lower.element import ROW, Element, Leaf, Op, axes_of
from flashwright.lower.frontend.body import Body, Frame
from flashwright.lower.frontend.positions import axis_of
from flashwright.lower.frontend.scalars import Scalar, constant
from flashwright.lower.term import MIRRORED, Term, Var, binary
from flashwright.program.vocabulary import POSITIONS

Bounds = tuple[Scalar, Scalar]
GROUP_ROWS = 64  # of a warpgroup
GROUP = Var("group")  # the number of a warpgroup


def conjuncts(made: Body, condition: Expr, frame: Frame) -> Iterator[tuple[Term | None, Expr]]:
    """The parts of an `and`, each with the test that a tile can leave it out: those that are tested
    as a whole together, each other alone. An `or` of which some operands are tested is computed
    where these do not hold everywhere, so that its scalar operands are false there."""
    tested = [(part, everywhere(made, part, frame)) for part in _parts(condition)]
    whole = [(part, code) for part, code in tested if code and _tests_all(made, part, frame)]
    if whole:
        together, holds = whole[0]
        for part, also in whole[1:]:
            together = tl.Binary("and", together, part)
            holds = binary("&&", holds, also)
        yield holds, together
    for part, code in tested:
        if (part, code) not in whole:
            yield code, _without_scalars(made, part, frame)


def _tests_all(made: Body, condition: Expr, frame: Frame) -> bool:
    """Whether every comparison of a condition has a test."""
    if isinstance(condition, tl.Binary) and condition.op in ("and", "or"):
        return all(_tests_all(made, side, frame) for side in (condition.left, condition.right))
    return everywhere(made, condition, frame) is not None


def _without_scalars(made: Body, condition: Expr, frame: Frame) -> Expr:
    """An `or` without its operands that are scalars and tested."""
    match condition:
        case tl.Binary("or", left, right):
            sides = [_without_scalars(made, side, frame) for side in (left, right)]
            kept = [s for s in sides if not (_uniform(made, s) and _tests_all(made, s, frame))]
            return tl.Binary("or", *kept) if len(kept) > 1 else kept[0]
    return condition


def _parts(condition: Expr) -> list[Expr]:
    if isinstance(condition, tl.Binary) and condition.op == "and":
        return [*_parts(condition.left), *_parts(condition.right)]
    return [condition]


def everywhere(made: Body, condition: Expr, frame: Frame) -> Term | None:
    """A test, the same for all threads, that the condition holds on the whole tile."""
    match condition:
        case tl.Binary("and" | "or" as op, left, right):
            a, b = (everywhere(made, side, frame) for side in (left, right))
            if op == "and":
                return binary("&&", a, b) if a and b else None
            return binary("||", a, b) if a and b else a or b
        case tl.Binary("<" | "<=" | ">" | ">=" as op, left, right):
            x, y = (_bounds(made, side, frame) for side in (left, right))
            if x is None or y is None:
                return None
            least_gap = (x[1], y[0]) if op in ("<", "<=") else (x[0], y[1])
            return _apply(made, op, *least_gap).term
    return None


def in_row(
    made: Body, condition: Expr, frame: Frame, element: Callable[[Expr, Frame], Element]
) -> Element | None:
    """A test for one row that the condition holds in all of its columns: `kv_idx >= Start` does if
    the first key is at least the row's Start."""
    column = _along_columns(frame)
    match condition:
        case tl.Binary("and", left, right):
            a, b = (in_row(made, side, frame, element) for side in (left, right))
            return Op("and", (a, b)) if a and b else None
        case tl.Binary("<" | "<=" | ">" | ">=" as op, bound, Name(name)) if name == column:
            return in_row(made, tl.Binary(MIRRORED[op], Name(name), bound), frame, element)
        case tl.Binary("<" | "<=" | ">" | ">=" as op, Name(name), bound) if name == column:
            columns = _positions(made, 1, frame)
            if columns is None or column in _names(bound):
                return None
            limit = element(bound, frame)
            edge = columns[1 if op in ("<", "<=") else 0]
            return Op(op, (Leaf(edge.term), limit)) if axes_of(limit) <= ROW else None
    return None


def end(made: Body, condition: Expr, frame: Frame) -> Term | None:
    """The first column that the condition hides from all rows of a warpgroup, as it does every
    later one; `group` is the warpgroup's number."""
    own, column = replace(frame, own=True), _along_columns(frame)
    for part in _parts(condition):
        match part:
            case tl.Binary("<" | "<=" as op, Name(name), bound) if name == column:
                more = op == "<="
            case tl.Binary(">" | ">=" as op, bound, Name(name)) if name == column:
                more = op == ">="
            case _:
                continue
        rows = _names(bound) & set(POSITIONS)
        found = _bounds(made, bound, own) if rows and column not in rows else None
        if found and found[1].whole:
            last = found[1]
            return (_apply(made, "+", last, constant(1)) if more else last).term
    return None


def _along_columns(frame: Frame) -> str | None:
    """The position that goes along a tile's columns."""
    return next((name for name in sorted(POSITIONS) if axis_of(name, frame.axes) == 1), None)


def _names(expr: Expr) -> set[str]:
    return {e.id for e in tl.expressions(expr) if isinstance(e, Name)}


def _bounds(made: Body, expr: Expr, frame: Frame) -> Bounds | None:
    """The least and the greatest value of an expression over the tile, if they can be told."""
    match expr:
        case Name("q_idx" | "kv_idx" as name):
            axis = axis_of(name, frame.axes)
            return None if axis is None else _positions(made, axis, frame)
        case tl.Unary("-", operand):
            found = _bounds(made, operand, frame)
            return found and _difference(made, (constant(0), constant(0)), found)
        case tl.Binary("+" | "-" | "*" | "/" as op, left, right):
            a, b = (_bounds(made, side, frame) for side in (left, right))
            return _arithmetic(made, op, a, b) if a and b else None
        case tl.Call(func, args) if func.id.lower() in ("floor", "ceil", "min", "max"):
            parts = [_bounds(made, a, frame) for a in args]
            known = [p for p in parts if p is not None]
            if len(known) < len(parts):
                return None
            scalars, function = made.scalars, func.id.lower()
            lows, highs = [p[0] for p in known], [p[1] for p in known]
            return scalars.call(function, lows), scalars.call(function, highs)
    if _uniform(made, expr):
        value = made.scalars(expr)
        return (value, value) if value.type == "int" else None
    return None


def _uniform(made: Body, expr: Expr) -> bool:
    """Whether an expression is a scalar without reads of memory."""
    scope = made.scalars.scope
    return all(
        e.id in scope if isinstance(e, Name) else not isinstance(e, (tl.Index, tl.Call))
        for e in tl.expressions(expr)
    )


def _positions(made: Body, axis: int, frame: Frame) -> Bounds | None:
    place = frame.axes[axis]
    if place is None:
        return None
    start = made.origin(place, frame.buffer, axis)
    if start is None:
        return None
    first, size = Scalar(start), made.size(frame.buffer, axis)
    if frame.own and axis == 0:
        size = constant(GROUP_ROWS)
        before = _apply(made, "*", Scalar(GROUP), size)
        first = _apply(made, "+", first, before)
    last = _apply(made, "-", _apply(made, "+", first, size), constant(1))
    return first, last


def _arithmetic(made: Body, op: str, a: Bounds, b: Bounds) -> Bounds | None:
    if op == "+":
        return _apply(made, "+", a[0], b[0]), _apply(made, "+", a[1], b[1])
    if op == "-":
        return _difference(made, a, b)
    factor = b[0].value if b[0] is b[1] else None
    if factor is None and op == "*" and a[0] is a[1]:
        a, b, factor = b, a, a[0].value
    if factor is None or (op == "/" and factor == 0):
        return None
    low, high = (_apply(made, op, x, b[0]) for x in a)
    return (low, high) if factor >= 0 else (high, low)


def _difference(made: Body, a: Bounds, b: Bounds) -> Bounds:
    return _apply(made, "-", a[0], b[1]), _apply(made, "-", a[1], b[0])


def _apply(made: Body, op: str, a: Scalar, b: Scalar) -> Scalar:
    return made.scalars.binary(op, a, b, NOWHERE)
