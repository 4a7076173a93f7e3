"""Terms in C++: the one place where a scalar expression becomes text."""

from __future__ import annotations

from flashwright.lower.names import cpp
from flashwright.lower.term import (
    At,
    Binary,
    Call,
    Convert,
    Gather,
    Line,
    Lit,
    Position,
    Read,
    RingStage,
    Select,
    Term,
    Unary,
    Var,
)

ATOM, UNARY, TIMES, PLUS, COMPARE, EQUAL, BIT_AND, BIT_OR, AND, OR, CHOICE = range(11, 0, -1)
_LEVELS = {
    **dict.fromkeys(("*", "/", "%"), TIMES),
    **dict.fromkeys(("+", "-"), PLUS),
    **dict.fromkeys(("<", "<=", ">", ">="), COMPARE),
    **dict.fromkeys(("==", "!="), EQUAL),
    "&": BIT_AND,
    "|": BIT_OR,
    "&&": AND,
    "||": OR,
}


def text(x: Term) -> str:
    """The term in C++."""
    return _text(x)[0]


def _text(x: Term) -> tuple[str, int]:
    """The term in C++ and how tightly its outermost operator binds."""
    match x:
        case Lit(value):
            return _number(x), ATOM if value >= 0 else UNARY
        case Var(name) | Position(name):
            return name, ATOM
        case At(name, axes):
            return f"{name}({', '.join(sorted(axes))})", ATOM
        case RingStage(ring, ahead):
            return f"{ring}.{'ahead()' if ahead else 'stage'}", ATOM
        case Unary(op, operand):
            inner, level = _text(operand)
            return f"{op}{inner if level >= ATOM else f'({inner})'}", UNARY
        case Binary():
            return _binary(x)
        case Call("floor_div" | "floor_mod" as func, (above, Lit(value=int(by)))) if _is_power(by):
            return f"fw::{func}<{by}>({text(above)})", ATOM
        case Call(func, args):
            return f"fw::{func}({', '.join(map(text, args))})", ATOM
        case Select(condition, yes, no):
            found = (_text(part) for part in (condition, yes, no))
            c, a, b = (t if level > CHOICE else f"({t})" for t, level in found)
            return f"{c} ? {a} : {b}", CHOICE
        case Read(type=kind) | Line(type=kind):
            origin = "" if x.offset is None else f".from({text(x.offset)})"
            place = f"p.{cpp(x.tensor)}{origin}.at({', '.join(map(text, x.index))})"
            if isinstance(x, Line):
                return place, ATOM
            return (f"*{place}", UNARY) if kind == "int" else (f"float(*{place})", ATOM)
        case Gather():
            return f"fw::gather({element_place(x)})", ATOM
        case Convert(to, operand):
            return f"{to}({text(operand)})", ATOM


def element_place(x: Gather) -> str:
    """The element that an index chooses, as arguments: a line, then steps along axes."""
    pairs = zip(x.axes, x.index, strict=True)
    steps = (f"{text(i)}, p.{cpp(x.line.tensor)}.step<{axis}>()" for axis, i in pairs)
    return ", ".join((text(x.line), *steps))


def _is_power(x: int) -> bool:
    """Whether a number is a power of two."""
    return x > 0 and x.bit_count() == 1


CHAINS = ("*", "&", "|", "&&", "||")  # `a * (b * c)` is printed without its parenthesis


def _binary(x: Binary) -> tuple[str, int]:
    level = _LEVELS[x.op]
    (a, a_level), (b, b_level) = _text(x.left), _text(x.right)
    # `a - (b - c)` keeps its parenthesis, `a + (b + c)` does not need one, but keeps it: the order
    # of fp32 operations is meant as written. `a * (b % c)` and `a * (b % c * d)` need it.
    chain = x.right.type != "float" and x.op in CHAINS and _begins_with(x.right, x.op)
    least = level if chain else level + 1
    left = a if a_level >= level else f"({a})"
    right = b if b_level >= least else f"({b})"
    return f"{left} {x.op} {right}", level


def _begins_with(x: Term, op: str) -> bool:
    """Whether the first operators of a term that bind as this one does are all this one."""
    while isinstance(x, Binary) and _LEVELS[x.op] == _LEVELS[op]:
        if x.op != op:
            return False
        x = x.left
    return True


def _number(x: Lit) -> str:
    if x.type == "bool":
        return "true" if x.value else "false"
    if x.type == "int":
        return str(x.value)
    if x.value in (float("inf"), float("-inf")):
        return "INFINITY" if x.value > 0 else "-INFINITY"
    shown = repr(float(x.value))  # reads back as itself
    return f"{shown.removesuffix('0')}f" if shown.endswith(".0") else f"{shown}f"
