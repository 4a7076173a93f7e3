"""What is computed for one element of a tile: expressions over rows (m) and columns (n), the
algebra that makes them cheap, and the terms they become."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from flashwright.lower.term import (
    COMPARISONS,
    At,
    Axes,
    Call,
    Gather,
    Line,
    Position,
    Select,
    Term,
    Type,
    Unary,
    Var,
    as_float,
    binary,
    real,
)

Reduction = Literal["max", "sum", "max3"]
NOWHERE: Axes = frozenset()
ROW: Axes = frozenset("m")
COLUMN: Axes = frozenset("n")
TILE: Axes = frozenset("mn")
ROUNDED = ("whole", "floor_div", "ceil_div")


@dataclass(frozen=True)
class Leaf:
    """A scalar, the same for the whole tile or row, or an element of a tile or a vector."""

    term: Term
    axes: Axes = NOWHERE
    value: float | None = None


@dataclass(frozen=True)
class Op:
    """An operator or a function of TL, or one of these:

    - `reciprocal`;
    - `whole`, `floor_div`, `ceil_div`: a number rounded, as an int;
    - `gather`: an element of a tensor, from a line of it and indices on some of its axes, each
      behind the number of its axis."""

    op: str
    args: tuple[Element, ...]


@dataclass(frozen=True)
class Reduce:
    """The maximum or the sum of a row; `max3`: a maximum as integers (maxima.py)."""

    op: Reduction
    arg: Element


Element = Leaf | Op | Reduce

LOG2_E = Leaf(Var("fw::log2_e", "float"), value=math.log2(math.e))
MINUS_LOG2_E = Leaf(Unary("-", LOG2_E.term), value=-math.log2(math.e))
LN_2 = Leaf(Var("fw::ln_2", "float"), value=math.log(2))
TWICE_LOG2_E = Leaf(binary("*", real(2.0), LOG2_E.term), value=2 * math.log2(math.e))


def literal(value: float) -> Leaf:
    """A number as a leaf of an expression."""
    return Leaf(real(value), value=float(value))


def axes_of(x: Element) -> Axes:
    """What an expression varies along."""
    match x:
        case Leaf():
            return x.axes
        case Op(_, args):
            return frozenset().union(*(axes_of(a) for a in args))
        case Reduce(_, arg):
            return axes_of(arg) - COLUMN


def type_of(x: Element) -> Type:
    """The C++ type of an expression."""
    match x:
        case Leaf():
            return x.term.type
        case Op(op, args):
            if op in (*COMPARISONS, "and", "or", "not"):
                return "bool"
            if op == "gather":
                return type_of(args[0])
            if op in ROUNDED:
                return "int"
            operands = args[1:] if op == "where" else args
            whole = op in ("+", "-", "*", "neg", "min", "max", "abs", "where", "%")
            return "int" if whole and all(type_of(a) == "int" for a in operands) else "float"
        case Reduce():
            return "float"


def leaves(x: Element) -> Iterator[Leaf]:
    """All leaves of an expression."""
    match x:
        case Leaf():
            yield x
        case Op(_, args):
            for arg in args:
                yield from leaves(arg)
        case Reduce(_, arg):
            yield from leaves(arg)


def with_leaves(x: Element, new: Mapping[Term, Element]) -> Element:
    """The expression with others in the place of leaves."""
    match x:
        case Leaf():
            return new.get(x.term, x)
        case Op(op, args):
            return Op(op, tuple(with_leaves(a, new) for a in args))
        case Reduce(op, arg):
            return Reduce(op, with_leaves(arg, new))


def variable(leaf: Leaf) -> str:
    """The name of a tile, a vector or a scalar; empty for what has none."""
    return leaf.term.name if isinstance(leaf.term, (At, Var, Position)) else ""


def element(name: str, axes: Axes, type: Type = "float") -> Leaf:
    """The element of a tile or a vector at the present row and column."""
    return Leaf(At(name, axes, type), axes)


# --- algebra ----------------------------------------------------------------------------------


def fold(x: Element) -> Element:
    """The same value with fewer and cheaper operations. Indices are exact, and stay as they are."""
    match x:
        case Op("gather"):
            return x
        case Op(op, args):
            return _folded(op, tuple(fold(a) for a in args))
        case Reduce(op, arg):
            return _reduced(op, fold(arg))
    return x


def _folded(op: str, args: tuple[Element, ...]) -> Element:
    match op, args:
        case "exp", (x,):
            return Op("exp2", (_scaled(x, LOG2_E) if "n" in axes_of(x) else times(x, LOG2_E),))
        case "log", (Op("sigmoid", (x,)),):  # -log(1 + 2^-(x log2(e))): without the reciprocal
            power = Op("exp2", (times(x, MINUS_LOG2_E),))
            return Op("neg", (_folded("log", (Op("+", (literal(1.0), power)),)),))
        case "log", (x,) if "n" in axes_of(x):
            return times(Op("quick_log2", (x,)), LN_2)
        case "tanh", (x,) if "n" in axes_of(x):
            return Op("tanh2", (_scaled(x, TWICE_LOG2_E),))
        case "*", (x, y):
            return times(x, y)
        case "/", (x, Leaf(value=float(value))) if value and type_of(x) == "float":
            return times(x, _inverse(args[1]))
        case "/", (x, y) if "n" in axes_of(x) and "n" not in axes_of(y):
            return times(x, Op("reciprocal", (y,)))
    return Op(op, args)


def _inverse(x: Element) -> Leaf:
    assert isinstance(x, Leaf)
    assert x.value
    return Leaf(binary("/", real(1.0), as_float(x.term)), value=1 / x.value)


def times(x: Element, y: Element) -> Element:
    """A product, its constants gathered at the right, as is all that columns share."""
    if _is_constant(x) and not _is_constant(y):
        x, y = y, x
    match x:
        case Op("*", (inner, factor)) if type_of(x) == "float":
            if _is_constant(factor) and "n" in axes_of(y) and type_of(y) == "float":
                return times(Op("*", (inner, y)), factor)
            shared = not axes_of(factor) | axes_of(y) and "n" in axes_of(inner)
            if shared and not (_is_constant(factor) and _is_constant(y)):
                return Op("*", (inner, times(factor, y)))
    if not _is_constant(y) or type_of(x) == type_of(y) == "int":
        return Op("*", (x, y))
    assert isinstance(y, Leaf)
    match x:
        case Leaf(value=float(value)):
            return Leaf(
                binary("*", as_float(x.term), as_float(y.term), "float"), value=value * _known(y)
            )
        case Op("*", (inner, Leaf(value=float()) as factor)):
            return Op("*", (inner, times(factor, y)))
    return Op("*", (x, y))


def _scaled(x: Element, factor: Leaf) -> Element:
    """x times a constant, the constant taken inside sums so that each term is one FMA."""
    match x:
        case Op("+" | "-" as op, (a, b)):
            return Op(op, (_scaled(a, factor), _scaled(b, factor)))
        case Op("neg", (a,)):
            return Op("neg", (_scaled(a, factor),))
    return times(x, factor)


def _reduced(op: Reduction, x: Element) -> Element:
    match x:
        case Op("*", (inner, Leaf(value=float(value)) as factor)) if value > 0 or op == "sum":
            return times(_reduced(op, inner), factor)
    return Reduce(op, x)


def _is_constant(x: Element) -> bool:
    return isinstance(x, Leaf) and x.value is not None


def _known(x: Leaf) -> float:
    assert x.value is not None
    return x.value


# --- terms ------------------------------------------------------------------------------------


def term(x: Element) -> Term:
    """The expression as a term of one element."""
    match x:
        case Leaf():
            return x.term
        case Op(op, args):
            return _term(op, args, [term(a) for a in args])
        case Reduce():
            raise AssertionError("the printer takes reductions out first")


def _gathers(x: Element) -> bool:
    return isinstance(x, Op) and (x.op == "gather" or any(map(_gathers, x.args)))


def _term(op: str, args: tuple[Element, ...], parts: list[Term]) -> Term:
    if op in ("and", "or"):
        # Both sides are computed, without a branch for each element, unless one reads memory.
        plain = all(
            part.type == "bool" and not _gathers(a) for part, a in zip(parts, args, strict=True)
        )
        names = ("&", "|") if plain else ("&&", "||")
        return binary(names[op == "or"], parts[0], parts[1])
    if op == "not":
        return Unary("!", parts[0])
    if op == "gather":
        return _gather(args, parts)
    kind = type_of(Op(op, args))
    whole = (
        op in ROUNDED
        or kind == "int"
        or (op in COMPARISONS and all(type_of(a) == "int" for a in args))
    )
    if op == "where":
        yes, no = (p if whole else as_float(p) for p in parts[1:])
        return Select(parts[0], yes, no)
    parts = parts if whole else [as_float(p) for p in parts]
    if op == "neg":
        return Unary("-", parts[0])
    if op == "%":
        return Call("floor_mod", tuple(parts), kind)
    if op in (*COMPARISONS, "+", "-", "*", "/"):
        return binary(op, parts[0], parts[1])
    found = parts[0]
    if op in ("min", "max"):
        for other in parts[1:]:
            found = Call(op, (found, other), kind)
        return found
    return Call(op, tuple(parts), kind)


def _gather(args: tuple[Element, ...], parts: list[Term]) -> Gather:
    assert isinstance(parts[0], Line)
    axes = tuple(int(a.value) for a in args[1::2] if isinstance(a, Leaf) and a.value is not None)
    return Gather(parts[0], axes, tuple(parts[2::2]))
