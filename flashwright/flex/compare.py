"""A captured function against the function itself, at random elements.

Capture records what a function does once. What a recording cannot hold (NumPy on an index, a value
that the function computed from an index beforehand) would be silently wrong: here it shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary

ELEMENTS = 48
CLOSE = 1e-4

Values = Mapping[str, Any]
Read = Callable[[str, tuple[int, ...]], float]


def elements(dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Elements to compare: the corners, one on the diagonal, then random ones."""
    draw = random.Random(0)
    sizes = {f"{n}_idx": dims[d] for n, d in _SIZES.items()}
    yield dict.fromkeys(sizes, 0)
    yield {name: size - 1 for name, size in sizes.items()}
    for number in range(ELEMENTS):
        found = {name: draw.randrange(size) for name, size in sizes.items()}
        if number % 4 == 0:
            found["kv_idx"] = min(found["q_idx"], sizes["kv_idx"] - 1)
        yield found


_SIZES = {"batch": "batch", "head": "heads", "q": "q_len", "kv": "kv_len"}


def differs(found: float, expected: float) -> bool:
    """Whether two results are not the same number, up to rounding in fp32."""
    if math.isnan(expected) or math.isinf(expected):
        return not (found == expected or (math.isnan(found) and math.isnan(expected)))
    return not abs(found - expected) <= CLOSE * max(1.0, abs(expected))


def evaluate(expr: Expr, values: Values, read: Read) -> Any:
    """The value of a TL expression for one element."""

    def of(part: Expr) -> Any:
        return evaluate(part, values, read)

    match expr:
        case Num(text):
            return float(text)
        case Name(name):
            return math.inf if name == "inf" else values[name]
        case Unary(op, operand):
            return -of(operand) if op == "-" else not of(operand)
        case Binary("and", left, right):
            return of(left) and of(right)
        case Binary("or", left, right):
            return of(left) or of(right)
        case Binary(op, left, right):
            return _OPERATORS[op](of(left), of(right))
        case Call(Name("where"), (condition, yes, no)):
            return of(yes) if of(condition) else of(no)
        case Call(Name(function), args):
            return _FUNCTIONS[function](*(of(a) for a in args))
        case Index(Name(tensor), args):
            return read(tensor, tuple(int(of(a)) for a in args))
    raise ValueError(f"no value: {expr}")


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan if not a else math.copysign(math.inf, a)


def _remainder(a: float, b: float) -> float:
    return a - b * math.floor(a / b) if b else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _quotient,
    "%": _remainder,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "exp": _exp,
    "exp2": lambda x: _exp(x * math.log(2)),
    "log": _log,
    "log2": lambda x: _log(x) / math.log(2),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + _exp(-x)),
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
}
