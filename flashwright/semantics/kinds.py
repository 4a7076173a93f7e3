"""A value's role in the softmax (its kind), derived from the operation that computes it.

The algebra suffices to find weights relative to one maximum added to weights relative to another.
What it does not recognise it does not judge: the CPU run compares the numbers.
"""

from __future__ import annotations

from flashwright.lang.nodes import Statement
from flashwright.semantics.tiles import Epoch, Kind


class Unrescaled(Exception):
    """Weights relative to two different maxima are combined."""

    def __init__(self, older: Epoch, newer: Epoch) -> None:
        super().__init__()
        self.older = older
        self.newer = newer


def of_function(name: str, kinds: list[Kind | None], stmt: Statement) -> Kind | None:
    """The kind of a function's value."""
    first = kinds[0] if kinds else None
    if name in ("exp", "exp2") and first is not None and first.name == "diff":
        return Kind("factor", first.now, first.before)
    if name in ("exp", "exp2", "sigmoid"):
        return Kind("weights", first.now if first and first.name == "relative" else None)
    if name == "rowmax" or (name == "max" and any(k and k.name == "max" for k in kinds)):
        return Kind("max", Epoch(stmt))
    if name == "rowsum":
        return first
    if name == "where":
        return kinds[1] or kinds[2]
    return None


def of_operator(op: str, left: Kind | None, right: Kind | None) -> Kind | None:
    """The kind of `left op right`; None stands for plain values, constants among them."""
    if op == "*":
        return _product(left, right)
    if op == "/":
        if left and right and left.name == right.name == "weights":
            _same(left, right)
            return None
        return left
    if op == "-" and right is not None and right.name == "max":
        if left is not None and left.name == "max":
            return Kind("diff", right.now, left.now)
        return Kind("relative", right.now)
    if op in ("+", "-"):
        if left and right and {left.name, right.name} == {"factor", "weights"}:
            return left if left.name == "weights" else right  # 0 * factor + weights
        one = left or right
        if one and one.name == "weights" and one.now is None and (left is None or right is None):
            return None  # 1 - exp(x) is no weight of a softmax
        if left and right and left.name == right.name == "weights":
            _same(left, right)
        return left or right
    return None


def of_product(left: Kind | None, right: Kind | None) -> Kind | None:
    """The kind of a product of two whole tiles: scores times their sigmoid are scores."""
    found = of_operator("*", left, right)
    plain = left is None or right is None
    return None if plain and found == Kind("weights", None) else found


def from_start(right: Kind | None) -> Kind | None:
    """The kind of `start - right`, if no sum is relative to the start yet."""
    is_max = right is not None and right.name == "max"
    return Kind("diff", right.now, None) if right is not None and is_max else None


def _product(left: Kind | None, right: Kind | None) -> Kind | None:
    for weights, factor in ((left, right), (right, left)):
        if weights and factor and weights.name == "weights" and factor.name == "factor":
            matches = weights.now is factor.before or weights.now is None
            return Kind("weights", factor.now) if matches else weights
    if left is None or right is None:
        return left or right
    return None


def _same(left: Kind, right: Kind) -> None:
    if left.now is not right.now and left.now is not None and right.now is not None:
        raise Unrescaled(*sorted((left.now, right.now), key=lambda epoch: epoch.number))
