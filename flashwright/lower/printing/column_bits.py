"""Conditions as sets of columns: a bit for each column of a row that a thread holds.

`kv_idx <= q_idx` is true up to a column that is computed once for a row, so a row takes one shift
instead of a comparison for each of its scores. `and`, `or` and `not` work on all bits at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashwright.lower.element import (
    COLUMN,
    ROW,
    Element,
    Leaf,
    Op,
    Reduce,
    axes_of,
    leaves,
    term,
    type_of,
)
from flashwright.lower.printing.cpp import text
from flashwright.lower.term import (
    COMPARISONS,
    MIRRORED,
    ZERO,
    At,
    Axes,
    Gather,
    Position,
    Term,
    Var,
    call,
    integer,
    minus,
    plus,
    times,
    variables,
    walk,
)

_SETS = {
    "<": "{low}",
    "<=": "{high}",
    ">": "~{high}",
    ">=": "~{low}",
    "==": "({high} & ~{low})",
    "!=": "~({high} & ~{low})",
}
PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Of a thread's columns, those of so many neighbours have a pattern that repeats in a word."""


@dataclass(frozen=True)
class Sum:
    """A sum: how often it has floor(x / divisor), where x is the position of the column, and the
    other summands with their signs."""

    columns: int
    divisor: int
    others: tuple[tuple[int, Element], ...] = ()


@dataclass(frozen=True)
class ColumnBits:
    """Sets of the columns of a tile that begins at the position `first`; `rows` is where its rows
    begin."""

    at: str
    tile: str
    first: Term | None
    rows: Term | None

    def split(self, condition: Element) -> tuple[str, Element | None] | None:
        """The set of columns for those parts of an `and` that are sets, and the other parts. None
        if there is no such part, or one comparison that all rows share: that is as cheap."""
        if (
            axes_of(condition) == COLUMN
            and isinstance(condition, Op)
            and condition.op in COMPARISONS
        ):
            return None
        parts = [(self.set(part), part) for part in _conjuncts(condition)]
        sets = [found for found, _ in parts if found is not None]
        rest = [part for found, part in parts if found is None]
        return (" & ".join(sets), _all(rest)) if sets else None

    def set(self, x: Element) -> str | None:
        """The columns for which a condition holds; None if they are no such set."""
        match x:
            case Op("and" | "or" as op, (a, b)):
                left, right = self.set(a), self.set(b)
                sign = "&" if op == "and" else "|"
                return f"({left} {sign} {right})" if left and right else None
            case Op("not", (a,)):
                inner = self.set(a)
                return f"~{inner}" if inner else None
            case Op("<" | "<=" as op, (Op("abs", (a,)), b)) if type_of(a) == "int":
                found = self.set(Op("and", (Op(op, (a, b)), Op(op, (Op("neg", (a,)), b)))))
                if found is not None:
                    return found
            case Op(op, (a, b)) if op in COMPARISONS and axes_of(x) & COLUMN:
                found = self._compared(op, a, b)
                if found is not None:
                    return found
        if axes_of(x) <= ROW and type_of(x) == "bool":
            return f"{self.at}.all({self.tile}, {text(term(x))})"
        period = _period(x)
        if period in PERIODS:
            return f"{self.at}.every<{period}>({self.tile}, {self._test(x)})"
        if axes_of(x) == COLUMN and not any(isinstance(p, Gather) for p in walk(term(x))):
            return f"{self.at}.where({self.tile}, {self._test(x)})"
        return None

    def _test(self, x: Element) -> str:
        """A condition as a function of a thread's n-th column."""
        place = position(self.first, f"{self.at}.col(n)")
        name = position_along(x, COLUMN)
        defined = f"int const {name.name} = {text(place)}; " if name else ""
        return f"[&](int n) {{ {defined}return {text(term(x))}; }}"

    def _compared(self, op: str, a: Element, b: Element) -> str | None:
        """The columns for which `a op b`: those before one that is the same for the whole row."""
        found = linear(Op("-", (a, b))) if type_of(a) == type_of(b) == "int" else None
        if found is None or found.columns not in (1, -1):
            return None
        limit: Term = ZERO
        for sign, x in sorted(
            found.others, key=lambda s: s[0] == found.columns
        ):  # added ones first
            value = term(x) if self._is_position(x) else call("near", term(x), type="int")
            if found.divisor > 1 and not self._is_position(x):
                return None  # its product with the divisor might wrap
            limit = minus(limit, value) if sign == found.columns else plus(limit, value)
        step = integer(found.divisor)
        low, high = (self._before(times(x, step)) for x in (limit, plus(limit, 1)))
        return _SETS[op if found.columns > 0 else MIRRORED[op]].format(low=low, high=high)

    def _before(self, limit: Term) -> str:
        within = minus(limit, self.first) if self.first is not None else limit
        return f"{self.at}.before({self.tile}, {text(within)})"

    def _is_position(self, x: Element) -> bool:
        """Whether a number is made of positions, lengths and constants. One of the caller's own may
        be anything, and differences with it might wrap."""
        known = {"q_len", "kv_len"}.union(*(variables(o) for o in (self.first, self.rows) if o))
        read = any(isinstance(part, (At, Gather)) for part in walk(term(x)))
        names = {v for leaf in leaves(x) if leaf.value is None for v in variables(leaf.term)}
        return not read and names <= known


def position_along(x: Element, axes: Axes) -> Position | None:
    """The position that an expression names and that goes along the rows, or the columns."""
    found = (leaf.term for leaf in leaves(x) if leaf.axes == axes)
    return next((term for term in found if isinstance(term, Position)), None)


def position(origin: Term | None, within: str) -> Term:
    """A place in a tile that begins at an origin."""
    return Var(within) if origin is None else plus(origin, Var(within))


def _conjuncts(x: Element) -> list[Element]:
    if isinstance(x, Op) and x.op == "and":
        return [part for arg in x.args for part in _conjuncts(arg)]
    return [x]


def _all(parts: Iterable[Element]) -> Element | None:
    found: Element | None = None
    for part in parts:
        found = part if found is None else Op("and", (found, part))
    return found


def linear(x: Element) -> Sum | None:
    """A whole number as a sum; None if it varies along the columns in another way."""
    match x:
        case Leaf(Position(), axes) if axes == COLUMN:
            return Sum(1, 1)
        case Op("floor_div", (Leaf(Position(), axes), Leaf(value=float(value)))) if axes == COLUMN:
            return Sum(1, int(value)) if value >= 1 else None
        case Op("+" | "-" as op, (a, b)):
            left, right = linear(a), linear(b)
            if left is None or right is None or (left.columns and right.columns):
                return None
            sign = 1 if op == "+" else -1
            others = tuple((sign * f, y) for f, y in right.others)
            columns = left.columns + sign * right.columns
            return Sum(columns, left.divisor * right.divisor, left.others + others)
        case Op("neg", (a,)):
            return linear(Op("-", (Leaf(ZERO), a)))
    return None if axes_of(x) & COLUMN else Sum(0, 1, ((1, x),))


def _period(x: Element) -> int:
    """After how many columns a condition repeats itself; 0 if that is not known."""
    match x:
        case Op("%", (a, Leaf(value=float(value)))) if value == int(value) and value >= 1:
            found = linear(a)
            plain = found is not None and found.divisor == 1 and abs(found.columns) == 1
            return int(value) if plain else 0
        case Op("gather") | Reduce():
            return 0
        case Op(_, args):
            inner = [_period(a) for a in args if axes_of(a) & COLUMN]
            return max(inner) if inner and all(p in PERIODS for p in inner) else 0
    return 0
