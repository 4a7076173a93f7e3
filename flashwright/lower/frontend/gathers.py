"""Indices that depend on the element: each element of a tile reads its own element of a tensor.

Such an index is computed in whole numbers and clamped to its axis, unless it is seen to lie there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flashwright.lang import nodes as tl
from flashwright.lower.element import Element, Leaf, Op, Reduce, literal, term, type_of
from flashwright.lower.frontend.body import Body, Frame
from flashwright.lower.term import ZERO, Line, Term, Type, integer, minus, positive

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)


def gathered(
    made: Body,
    expr: tl.Index,
    frame: Frame,
    element_of: Callable[[tl.Expr, Frame], Element],
) -> Element:
    """The element of a tensor at an index that differs within a tile."""
    tensor = made.program.tensors[expr.tensor.id]
    start: list[Term] = []
    moving: list[Element] = []
    for number, (axis, arg) in enumerate(zip(tensor.axes, expr.args, strict=True)):
        if made.program.per_element(arg):
            found = _Whole(made).number(element_of(arg, frame))
            extent = made.scalars(axis.size).as_int(axis.size.span)
            start.append(ZERO)
            moving += [literal(number), _clamped(found, extent, made.fixed(axis.size))]
        else:
            start.append(made.scalars(arg).as_int(arg.span))
    while start and start[-1] == ZERO:
        start.pop()
    kind: Type = "int" if tensor.dtype == "int32" else "float"
    offset = made.offset(tensor.offset) if tensor.offset is not None else None
    return Op("gather", (Leaf(Line(tensor.name, tuple(start), kind, offset)), *moving))


def in_whole_numbers(made: Body, x: Element) -> Element:
    """An expression in which quotients of whole numbers are rounded without fp32."""
    match x:
        case Op("floor" | "ceil", (Op("/", (a, b)),)) if type_of(a) == type_of(b) == "int":
            return _Whole(made).number(x)
        case Op(op, args) if op != "gather":
            return Op(op, tuple(in_whole_numbers(made, a) for a in args))
    return x


class _Whole:
    """Writes an index in whole numbers."""

    def __init__(self, made: Body) -> None:
        self.known = made.scalars.least.get

    def number(self, x: Element) -> Element:
        """The index as an int."""
        found = self._inner(x)
        return found if type_of(found) == "int" else Op("whole", (found,))

    def _inner(self, x: Element) -> Element:
        match x:
            case Op("gather") | Leaf() | Reduce():
                return x
            case Op("floor" | "ceil" as way, (arg,)):
                return self._rounded(way, self._inner(arg))
            case Op(op, args):
                return Op(op, tuple(self._inner(a) for a in args))

    def _rounded(self, way: str, x: Element) -> Element:
        match x:
            case Op("/", (a, b)) if type_of(a) == type_of(b) == "int":
                if self._positive(b):
                    return Op(f"{way}_div", (a, b))
                if isinstance(b, Leaf) and b.value:  # below 0
                    return Op(f"{way}_div", (Op("neg", (a,)), Op("neg", (b,))))
        if type_of(x) == "int":
            return x
        return Op("whole", (x if way == "floor" else Op("ceil", (x,)),))

    def _positive(self, x: Element) -> bool:
        return positive(term(x), self.known)


def _clamped(x: Element, extent: Term, fixed: int | None) -> Element:
    """An index that is not outside of its axis."""
    low, high = _range(x)
    last = integer(fixed - 1) if fixed is not None else minus(extent, 1)
    if low < 0:
        x = Op("max", (x, Leaf(ZERO, value=0.0)))
    ends_there = fixed is not None and high < fixed
    if ends_there or _at_most(x, last):
        return x
    return Op("min", (x, Leaf(last)))


def _at_most(x: Element, last: Term) -> bool:
    """Whether the program itself takes the lesser of an index and the last one."""
    match x:
        case Leaf(held):
            return held == last
        case Op("-", (Leaf(held), Leaf(value=1.0))):
            return minus(held, 1) == last
        case Op("min", args):
            return any(_at_most(a, last) for a in args)
        case Op("max", args):
            return all(_at_most(a, last) or _range(a) == (0, 0) for a in args)
        case Op("where", (_, yes, no)):
            return _at_most(yes, last) and _at_most(no, last)
    return False


def _range(x: Element) -> Range:
    """Bounds of an index, from the numbers in it."""
    match x:
        case Leaf(value=float(value)):
            return value, value
        case Op("whole", (arg,)):
            low, high = _range(arg)
            return (math.floor(low) if low > -math.inf else low), high
        case Op("abs", (arg,)):
            low, high = _range(arg)
            return max(0.0, low), max(-low, high)
        case Op("neg", (arg,)):
            low, high = _range(arg)
            return -high, -low
        case Op("%", (_, Leaf(value=float(value)))) if value > 0:
            return 0.0, value - 1
        case Op("+" | "-" | "min" | "max" as op, (a, b)):
            (low, high), (less, more) = _range(a), _range(b)
            if op == "+":
                return low + less, high + more
            if op == "-":
                return low - more, high - less
            choose = min if op == "min" else max
            return choose(low, less), choose(high, more)
        case Op("where", (_, yes, no)):
            (low, high), (less, more) = _range(yes), _range(no)
            return min(low, less), max(high, more)
        case Op("floor_div", (a, Leaf(value=float(value)))) if value >= 1:
            low, high = _range(a)
            return (0.0 if low >= 0 else low), (high if high >= 0 else 0.0)
    return ANYTHING
