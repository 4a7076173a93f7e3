"""Evaluate masks for keys that the program has not visited.

Three-valued: what depends on data, or on a loop variable, is unknown, and unknown counts as
visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashwright.lang.nodes import Binary, Call, Expr, Name, Unary, expressions
from flashwright.program.scalars import NotScalar, Unknown, evaluate
from flashwright.semantics.tiles import Masked, Where, axis_of

COMPARE = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "%": np.mod}
_FUNCTIONS = {
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "min": np.minimum,
    "max": np.maximum,
}


def any_visible(
    masks: tuple[Masked, ...], dim: str, low: int, high: int, its_own: bool = False
) -> bool:
    """Whether the masks show one of the positions low..high-1 along `dim`: whether some row may see
    one of these keys, or one of these queries may see some key.

    `its_own`: the masks were applied to these positions, so loop variables keep their values.
    """
    shown: Any = True
    for mask in masks:
        if its_own:
            mask = replace(mask, varying=frozenset())
        side = mask.side(dim)
        if side is not None:
            places = {side: np.arange(low, high)[None, :], 1 - side: _places(mask.axes[1 - side])}
            with np.errstate(all="ignore"):  # a division by zero is reported when the program runs
                verdict = _ask(mask.where, mask, places)
            shown = shown if verdict is None else np.logical_and(shown, verdict)
    return bool(np.any(shown))


def _places(where: Where | None) -> Any:
    if where is None or isinstance(where.start, Unknown) or where.label != "L":
        return None
    return np.arange(max(where.start, 0), min(where.start + where.size, where.extent))[:, None]


def _ask(expr: Expr, mask: Masked, places: Mapping[int, Any]) -> Any:
    """The expression's value over the positions on both axes, or None where it is unknown."""
    match expr:
        case Name("q_idx" | "kv_idx" as name):
            return places[axis_of(name, mask.axes)]
        case Binary("and" | "or" as op, left, right):
            return _logic(op, _ask(left, mask, places), _ask(right, mask, places))
        case Unary(op, operand):
            value = _ask(operand, mask, places)
            return None if value is None else np.logical_not(value) if op == "not" else -value
        case Binary(op, left, right) if has_positions(expr):
            pair = [_ask(left, mask, places), _ask(right, mask, places)]
            known = COMPARE.get(op) or ARITHMETIC.get(op)
            return None if pair[0] is None or pair[1] is None or not known else known(*pair)
        case Call(func, args) if has_positions(expr):
            values = [_ask(a, mask, places) for a in args]
            function = _FUNCTIONS.get(func.id.lower())
            if function is None or len(values) > 2 or any(v is None for v in values):
                return None
            return function(*values)
    if any(isinstance(e, Name) and e.id in mask.varying for e in expressions(expr)):
        return None
    try:
        value = evaluate(expr, mask.env, mask.read)
    except NotScalar:
        return None
    return None if isinstance(value, Unknown) else np.asarray(float(value))


def has_positions(expr: Expr) -> bool:
    """Whether an expression differs from element to element by their positions."""
    return any(isinstance(e, Name) and e.id in ("q_idx", "kv_idx") for e in expressions(expr))


def _logic(op: str, left: Any, right: Any) -> Any:
    """Three-valued and/or: one known side may decide the result."""
    if op == "or":
        return None if left is None or right is None else np.logical_or(left, right)
    if left is None or right is None:
        return left if right is None else right  # unknown counts as true
    return np.logical_and(left, right)
