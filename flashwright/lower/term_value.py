"""Values of terms, computed as the device computes them: C++ division truncates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashwright.lower.term import Binary, Call, Convert, Lit, Read, Select, Term, Unary, Var


def quotient(a: int, b: int) -> int:
    """C++ `a / b` of ints."""
    found = abs(a) // abs(b)
    return found if (a < 0) == (b < 0) else -found


def remainder(a: int, b: int) -> int:
    """C++ `a % b`."""
    return a - quotient(a, b) * b


def floor_mod(a: int, b: int) -> int:
    """As device/fw/global.cuh has it."""
    rest = remainder(a, b)
    return rest + b if rest != 0 and (rest < 0) != (b < 0) else rest


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor_div": lambda a, b: quotient(a, b) - (remainder(a, b) < 0),
    "ceil_div": lambda a, b: quotient(a, b) + (remainder(a, b) > 0),
    "floor_mod": floor_mod,
}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "%": remainder,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def value(x: Term, env: Mapping[str, Any]) -> Any:
    """A term's value, given those of its variables. Tensors hold made-up numbers."""
    match x:
        case Lit(number):
            return number
        case Var(name):
            return env[name]
        case Unary("-", operand):
            return -value(operand, env)
        case Unary("!", operand):
            return not value(operand, env)
        case Binary("&&", left, right):
            return value(left, env) and value(right, env)
        case Binary("||", left, right):
            return value(left, env) or value(right, env)
        case Binary(op, left, right):
            return OPERATORS[op](value(left, env), value(right, env))
        case Call(func, args):
            return FUNCTIONS[func](*(value(a, env) for a in args))
        case Select(condition, yes, no):
            return value(yes if value(condition, env) else no, env)
        case Read(tensor, index):
            return hash((tensor, tuple(value(i, env) for i in index))) % 7
        case Convert(_, operand):
            return value(operand, env)
    raise AssertionError(f"{x} is more than this little evaluator knows")
