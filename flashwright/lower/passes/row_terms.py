"""A number that all scores of a row have in common goes into the maximum and the exponent instead.

`S + Gate[q] - Gate[k]` adds a row's number to each of its scores, and the softmax takes it away
again: exp(S + r - max(S + r)) is exp(S - (m - r)) with m = max(S) + r. Two operations for a row, in
place of one for each score. The maximum that the program keeps, and so the log-sum-exp, has the
number as before.

This is done only where the number is added to the score itself, as in (S + r) - c, whose rounding
is that of S - c. In S + (r - c) two large numbers may cancel first: that stays as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import (
    ROW,
    TILE,
    Element,
    Leaf,
    Op,
    Reduce,
    axes_of,
    leaves,
    variable,
)
from flashwright.lower.passes.effects import effects
from flashwright.lower.passes.partial_sums import reads
from flashwright.lower.term import At, Var


def move_row_terms(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The loops with such numbers added once for each row."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            node = replace(node, body=_moved(move_row_terms(node.body)))
        elif isinstance(node, ir.Branch):
            then, orelse = move_row_terms(node.then), move_row_terms(node.orelse)
            node = replace(node, then=then, orelse=orelse)
        out.append(node)
    return tuple(out)


def _moved(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    for place, node in enumerate(body):
        if not isinstance(node, ir.Compute) or node.unless is not None or len(node.assigns) != 1:
            continue
        (assign,) = node.assigns
        found = _term(assign.value, assign.target) if assign.target.axes == TILE else None
        rest = _Rest(assign, found[1]).rewritten(body[place + 1 :]) if found else None
        if found and rest:
            made = replace(node, assigns=(replace(assign, value=found[0]),))
            return (*body[:place], made, *_moved(rest))
    return body


def _term(value: Element, scores: Leaf) -> tuple[Element, Element] | None:
    """The value without a number of its row that is added to the score, and that number."""
    match value:
        case Op("+", (a, b)) if _of_row(b) and reads(a, scores):
            return a, b
        case Op("+", (a, b)) if _of_row(a) and reads(b, scores):
            return b, a
        case Op("-", (a, b)) if _of_row(b) and reads(a, scores):
            return a, Op("neg", (b,))
        case Op("+" | "-" as op, (a, b)) if reads(a, scores) and not reads(b, scores):
            inner = _term(a, scores)
            return (Op(op, (inner[0], b)), inner[1]) if inner else None
        case Op("+", (a, b)) if reads(b, scores) and not reads(a, scores):
            inner = _term(b, scores)
            return (Op("+", (a, inner[0])), inner[1]) if inner else None
    return None


def _of_row(x: Element) -> bool:
    """Whether a value is made of vectors along the rows and of numbers, without positions."""
    return axes_of(x) == ROW and all(isinstance(leaf.term, At | Var) for leaf in leaves(x))


class _Rest:
    """The statements behind the one that added the number."""

    def __init__(self, assign: ir.Assign, term: Element) -> None:
        self.scores, self.term = assign.target, term
        self.kept = set(leaves(term))
        self.done = False
        """Whether the scores have become weights."""

    def rewritten(self, body: Sequence[ir.Statement]) -> tuple[ir.Statement, ...] | None:
        """They all; None where scores are used for more than a softmax."""
        out: list[ir.Statement] = []
        for node in body:
            if not self.done:
                made = self._statement(node)
                if made is None:
                    return None
                node = made
            out.append(node)
        return tuple(out) if self.done else None

    def _statement(self, node: ir.Statement) -> ir.Statement | None:
        if not isinstance(node, ir.Compute):
            used = effects(node)
            held = {variable(leaf) for leaf in self.kept}
            return None if variable(self.scores) in used.all or held & used.writes else node
        assigns: list[ir.Assign] = []
        for assign in node.assigns:
            made = assign if self.done else self._assign(assign, node)
            if made is None:
                return None
            assigns.append(made)
        return replace(node, assigns=tuple(assigns))

    def _assign(self, assign: ir.Assign, node: ir.Compute) -> ir.Assign | None:
        if assign.target in self.kept:
            return None
        if assign.target != self.scores:
            used = sum(leaf == self.scores for leaf in leaves(assign.value))
            if used != _maxima(assign.value, self.scores):
                return None
            return replace(assign, value=self._with_maxima(assign.value))
        match assign.value:
            case Op("where", (seen, held, Leaf(value=value))) if (
                held == self.scores and value == -float("inf") and not reads(seen, self.scores)
            ):
                return assign
            case Op("exp2", (Op("-", (x, y)),)) if node.unless is None and axes_of(y) <= ROW:
                lowered = self._lowered(x, y)
                self.done = lowered is not None
                return None if lowered is None else replace(assign, value=lowered)
        return None

    def _lowered(self, x: Element, y: Element) -> Element | None:
        """exp2 of a score times a factor, less the maximum: the number leaves the maximum."""
        match x:
            case Op("*", (held, Leaf() as factor)) if held == self.scores and factor != held:
                less: Element = Op("*", (self.term, factor))
            case Leaf() if x == self.scores:
                less = self.term
            case _:
                return None
        return Op("exp2", (Op("-", (x, Op("-", (y, less)))),))

    def _with_maxima(self, x: Element) -> Element:
        match x:
            case Op(op, args):
                return Op(op, tuple(self._with_maxima(a) for a in args))
            case Reduce("max", arg) if arg == self.scores:
                return Op("+", (x, self.term))
        return x


def _maxima(x: Element, tile: Leaf) -> int:
    """How often an expression has the maximum of a tile's rows."""
    match x:
        case Op(_, args):
            return sum(_maxima(a, tile) for a in args)
        case Reduce("max", arg):
            return int(arg == tile)
    return 0
