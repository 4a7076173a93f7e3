"""C++ expressions as text with a precedence, so that they can be put together with no parenthesis
too many or too few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Type = Literal["int", "float", "bool"]

ATOM, UNARY, TIMES, PLUS, COMPARE, EQUAL, AND, OR, CHOICE = range(9, 0, -1)
_LEVELS = {
    **dict.fromkeys(("*", "/", "%"), TIMES),
    **dict.fromkeys(("+", "-"), PLUS),
    **dict.fromkeys(("<", "<=", ">", ">="), COMPARE),
    **dict.fromkeys(("==", "!="), EQUAL),
    "&&": AND,
    "||": OR,
}


@dataclass(frozen=True)
class Code:
    """A C++ expression."""

    text: str
    type: Type = "int"
    level: int = ATOM

    def __str__(self) -> str:
        return self.text


def integer(value: int) -> Code:
    """A whole number."""
    return Code(str(value), "int", ATOM if value >= 0 else UNARY)


def real(value: float) -> Code:
    """A number as fp32 literal, written so that it reads back as itself."""
    if value in (float("inf"), float("-inf")):
        return Code("INFINITY", "float") if value > 0 else Code("-INFINITY", "float", UNARY)
    text = repr(float(value))
    if text.endswith(".0"):
        text = text[:-1]
    return Code(f"{text}f", "float", ATOM if value >= 0 else UNARY)


def binary(op: str, left: Code, right: Code, type: Type | None = None) -> Code:
    """`left op right`."""
    level = _LEVELS[op]
    a = left.text if left.level >= level else f"({left})"
    # `a - (b - c)` keeps its parenthesis, `a + (b + c)` does not need one, but keeps it: the order
    # of fp32 operations is meant as written.
    right_level = level if op in ("*", "&&", "||") and right.type != "float" else level + 1
    b = right.text if right.level >= right_level else f"({right})"
    if level <= COMPARE:
        type = "bool"
    return Code(f"{a} {op} {b}", type or left.type, level)


def unary(op: str, operand: Code) -> Code:
    """`-x` or `!x`."""
    text = operand.text if operand.level >= ATOM else f"({operand})"
    return Code(f"{op}{text}", operand.type, UNARY)


def call(name: str, *args: Code, type: Type) -> Code:
    """`name(args)`."""
    return Code(f"{name}({', '.join(a.text for a in args)})", type)


def choose(condition: Code, yes: Code, no: Code) -> Code:
    """`condition ? yes : no`."""
    c, a, b = (x.text if x.level > CHOICE else f"({x})" for x in (condition, yes, no))
    return Code(f"{c} ? {a} : {b}", yes.type, CHOICE)


def as_float(x: Code) -> Code:
    """The expression as fp32."""
    if x.type == "float":
        return x
    digits = x.text.lstrip("-").isdigit()
    return real(float(x.text)) if digits else Code(f"float({x})", "float")
