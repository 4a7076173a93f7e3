"""Exact arithmetic on scalars: sizes, bounds, coordinates.

TL's `/` is exact, so that `kv_len / BN` as a loop bound covers a ragged tail and
`i < kv_len / BN - 1` is true for every block but the last, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache

from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Transpose, Unary

Scalar = int | Fraction | float | bool


class Unknown(str):
    """A scalar that depends on tensor data unknown to the checker; equal if computed alike."""


Value = Scalar | Unknown


class NotScalar(Exception):
    """The expression has no scalar value; `culprit` is the part at fault, `why` the reason."""

    def __init__(self, culprit: Expr, why: str) -> None:
        super().__init__(why)
        self.culprit = culprit
        self.why = why


MOST_DIGITS = 300
"""Of a literal that stays exact: Python refuses to read some thousands of them."""


@cache
def number(text: str) -> Scalar:
    """The value of a literal: decimals stay exact, exponents become floats."""
    if len(text) > MOST_DIGITS:
        return float(text)
    if text.isdigit():
        return int(text)
    return float(text) if "e" in text.lower() else _simple(Fraction(text))


def _simple(value: Scalar) -> Scalar:
    if isinstance(value, Fraction) and value.denominator == 1:
        return int(value)
    return value


def _divide(a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return _simple(Fraction(a) / Fraction(b))


def _sqrt(x: Scalar) -> Scalar:
    root = math.isqrt(int(x)) if x == int(x) and x >= 0 else 0
    return root if root * root == x else math.sqrt(x)


BINARY: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "+": lambda a, b: _simple(a + b),
    "-": lambda a, b: _simple(a - b),
    "*": lambda a, b: _simple(a * b),
    "/": _divide,
    "%": lambda a, b: _simple(a % b),
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}

FUNCTIONS: dict[str, Callable[..., Scalar]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "log2": lambda x: math.log2(x) if x > 0 else -math.inf,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sqrt": _sqrt,
    "abs": abs,
    "min": min,
    "max": max,
    "where": lambda c, a, b: a if c else b,
    "floor": lambda x: math.floor(x),
    "ceil": lambda x: math.ceil(x),
}

Reader = Callable[[Index, tuple[Value, ...]], Value]


def evaluate(expr: Expr, env: Mapping[str, Value], read: Reader | None = None) -> Value:
    """The value of a scalar expression. Raises NotScalar with the part that has no value."""
    match expr:
        case Num(text):
            return number(text)
        case Name(id):
            if id not in env:
                raise NotScalar(expr, f"`{id}` has no value here")
            return env[id]
        case Unary(op, operand):
            value = evaluate(operand, env, read)
            if isinstance(value, Unknown):
                return Unknown(f"{op} {value}")
            return (not value) if op == "not" else -value
        case Binary(op, left, right):
            return apply(op, expr, [evaluate(left, env, read), evaluate(right, env, read)])
        case Call(func, args):
            return apply(func.id.lower(), expr, [evaluate(a, env, read) for a in args])
        case Index(tensor, args):
            if read is None:
                raise NotScalar(expr, f"`{tensor.id}[...]` is known only when the kernel runs")
            return read(expr, tuple(evaluate(a, env, read) for a in args))
        case Transpose():
            raise NotScalar(expr, "`.T` belongs to a GEMM operand")


def apply(op: str, expr: Expr, args: list[Value]) -> Value:
    """The result of one operator or function; Unknown if an argument is. NotScalar on errors."""
    function = BINARY.get(op) or FUNCTIONS.get(op)
    if function is None:
        raise NotScalar(expr, f"`{op}` does not give a number here")
    known = [a for a in args if not isinstance(a, Unknown)]
    if len(known) < len(args):
        return Unknown(f"{op}({', '.join(map(str, args))})")
    try:
        return function(*known)
    except ZeroDivisionError:
        raise NotScalar(expr, "this divides by zero") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise NotScalar(expr, f"`{op}` cannot be computed here: {error}") from None


def whole(value: Value) -> int | None:
    """The value as an int, or None if it is not a whole number."""
    if isinstance(value, (Unknown, bool)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
