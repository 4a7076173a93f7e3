"""The loop over the keys inverted: which blocks of queries visit a block of keys.

A bound that cannot be solved for the block of queries is left out: the checker has made sure that
the loop visits every key that a Mask shows, so the Mask alone decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

from flashwright.grad.algebra import (
    ONE,
    ZERO,
    Product,
    add,
    call,
    constant,
    div,
    mul,
    renamed,
    sub,
    substitute,
)
from flashwright.grad.normalise import KEY, Forward, refuse
from flashwright.lang import nodes as tl


class Unsolved(Exception):
    """The inequality cannot be solved for the variable."""


@dataclass(frozen=True)
class Visits:
    """The blocks of queries that visit a block of keys: the first one and their end. `first_key` is
    the first block of keys that a block of queries visits."""

    first: tl.Expr
    end: tl.Expr
    first_key: tl.Expr = ZERO


def find_visits(forward: Forward, key_block: tl.Name, query_block: tl.Name) -> Visits:
    """The visits of the forward's loop, by the names of both blocks."""
    var, at = forward.query.name.id, forward.loop.var.id
    _check_data(forward)
    first: tl.Expr = ZERO
    first_key: tl.Expr = ZERO
    end = forward.query.high
    if not _in_order(forward):
        return Visits(first, end)
    low, high = (forward.spelt_out(e) for e in (forward.loop.low, forward.loop.high))
    solver, next_block = _Solver(forward, var), add(tl.Name(at), ONE)
    with suppress(Unsolved):
        if (above := solver.bound(high, tl.Name(at), above=True)) is not None:
            first = call("max", ZERO, renamed(_next_whole(above), {at: key_block}))
    with suppress(Unsolved):
        if (below := solver.bound(_without_floor(low), next_block, above=False)) is not None:
            end = _least(end, renamed(below, {at: key_block}))
            whole = call("floor", solver.alone(_without_floor(low)))
            first_key = renamed(call("max", ZERO, whole), {var: query_block})
    return Visits(first, end, first_key)


def _in_order(forward: Forward) -> bool:
    """Whether iteration i loads block i of the keys."""
    for load in forward.loads.values():
        for coord in load.copy.coords or ():
            names = {n.id for n in tl.value_names(coord.value)}
            plain = coord.in_elements or coord.value == forward.loop.var
            if KEY in load.axes and forward.loop.var.id in names and not plain:
                return False
    return True


def _check_data(forward: Forward) -> None:
    """A bound from a tensor must show in a Mask, which then decides alone."""
    calls = [s.value for s in forward.body if isinstance(s.value, tl.Call)]
    masks = [c for c in calls if c.func.id == "mask"]
    shown = {e.tensor.id for m in masks for e in tl.expressions(m) if isinstance(e, tl.Index)}
    names = {n.id for m in masks for n in tl.value_names(m)}
    shown |= {load.tensor.name for value, load in forward.loads.items() if value in names}
    for bound in (forward.loop.low, forward.loop.high):
        for part in tl.expressions(forward.spelt_out(bound)):
            if isinstance(part, tl.Index) and part.tensor.id not in shown:
                raise refuse(
                    forward.loop.span,
                    f"`{part.tensor.id}` bounds the loop and is in no Mask: the loop over the "
                    "queries cannot follow it",
                    f"hide the keys outside of the bound by a Mask with `{part.tensor.id}`",
                )


class _Solver:
    """Solves inequalities for a variable."""

    def __init__(self, forward: Forward, var: str) -> None:
        self.params, self.var = forward.program.params, var

    def _has(self, expr: tl.Expr) -> bool:
        """Whether an expression has the variable."""
        return any(n.id == self.var for n in tl.value_names(expr))

    def alone(self, side: tl.Expr) -> tl.Expr:
        """A lower bound without the parts that `bound` leaves out: those without the variable."""

        def change(part: tl.Expr) -> tl.Expr | None:
            match part:
                case tl.Call(tl.Name("max"), args):
                    kept = [self.alone(a) for a in args if self._has(a)]
                    return call("max", *kept) if len(kept) > 1 else kept[0] if kept else ZERO
            return None

        return substitute(side, change)

    def bound(self, side: tl.Expr, other: tl.Expr, above: bool) -> tl.Expr | None:
        """The bound of the variable where `side` is above or below the other side; None if it does
        not have the variable."""
        if not self._has(side):
            return None
        least, most = ("min", "max") if above else ("max", "min")
        match side:
            case tl.Name():
                return other
            case tl.Binary():
                return self.bound(*self._moved(side, other), above)
            case tl.Call(tl.Name(name), args) if name == least:
                found = [x for a in args if (x := self.bound(a, other, above)) is not None]
                return found[0] if len(found) == 1 else call(most, *found)
            case tl.Call(tl.Name("max"), (a, b)) if self._has(a) != self._has(b):
                inner, rest = (a, b) if self._has(a) else (b, a)
                solved = self.bound(inner, other, above)
                assert solved is not None
                return call("where", tl.Binary("<", other, rest), sub(ZERO, ONE), solved)
        raise Unsolved

    def _moved(self, side: tl.Binary, other: tl.Expr) -> tuple[tl.Expr, tl.Expr]:
        """Both sides after one operation is moved from the variable's side to the other one."""
        left, op = self._has(side.left), side.op
        inner, part = (side.left, side.right) if left else (side.right, side.left)
        if op == "+":
            return inner, sub(other, part)
        if op == "-" and left:
            return inner, add(other, part)
        value = constant(part, self.params)
        if value is None or value <= 0 or not (op == "*" or (op == "/" and left)):
            raise Unsolved
        return inner, (div if op == "*" else mul)(other, part)


def _next_whole(expr: tl.Expr) -> tl.Expr:
    """The least whole number above an expression: floor(x) + 1."""
    if isinstance(expr, tl.Binary) and expr.op == "-" and expr.right == ONE:
        return call("floor", expr.left)
    if isinstance(expr, tl.Call) and expr.func.id == "where":
        hidden, _, other = expr.args
        return call("where", hidden, ZERO, _next_whole(other))
    return add(call("floor", expr), ONE)


def _without_floor(expr: tl.Expr) -> tl.Expr:
    """floor(x) < n says the same as x < n for whole n."""
    return expr.args[0] if isinstance(expr, tl.Call) and expr.func.id == "floor" else expr


def _least(a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """The smaller of two bounds, with a common divisor once."""
    first, second = Product.of(a), Product.of(b)
    if first.bottoms == second.bottoms != ():
        tops = [Product(p.negative, p.tops).expr() for p in (first, second)]
        return reduce(div, first.bottoms, call("min", *tops))
    return call("min", a, b)
