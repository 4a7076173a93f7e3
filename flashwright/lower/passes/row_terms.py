"""A number that all scores of a row have in common moves from the scores to the maximum.

`S + Gate[q] - Gate[k]` adds a row's number to each of its scores, and the softmax takes it away
again: exp(S + r - max(S + r)) is exp(S - max(S)). So the loop does without it: the running maximum
begins lower by r, and gets r back behind the loop, where the log-sum-exp reads it. If r is -inf,
the maximum begins above every score, and the row sees no key, as it should.

This is done only where the number is added to the score itself, as in (S + r) - c, whose rounding
is that of S - c. In S + (r - c) two large numbers may cancel first: that stays as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    literal,
    variable,
)
from flashwright.lower.passes.effects import effects
from flashwright.lower.passes.partial_sums import reads
from flashwright.lower.term import At, Var

ABOVE = literal(1e30)
"""More than any score."""
LOWER = "The scores of the loop have no {}: the maximum is lower by it."


def move_row_terms(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The program, or a part of it, with such numbers outside of its loops."""
    out: list[ir.Statement] = []
    for place, node in enumerate(body):
        if isinstance(node, ir.Branch):
            then, orelse = move_row_terms(node.then), move_row_terms(node.orelse)
            node = replace(node, then=then, orelse=orelse)
        elif isinstance(node, ir.Loop):
            node = replace(node, body=move_row_terms(node.body))
            found = _found(node)
            if found is not None and not _read(body[place + 1 :], found.passing):
                out += found.around(node)
                continue
        out.append(node)
    return tuple(out)


def _read(body: Sequence[ir.Statement], vectors: Sequence[Leaf]) -> bool:
    names = {variable(v) for v in vectors}
    return any(effects(node).reads & names for node in body)


def _found(loop: ir.Loop) -> _Moved | None:
    """The first number that can leave a loop's scores."""
    for place, node in enumerate(loop.body):
        if not isinstance(node, ir.Compute) or node.unless is not None or len(node.assigns) != 1:
            continue
        (assign,) = node.assigns
        found = _term(assign.value, assign.target) if assign.target.axes == TILE else None
        if found is None:
            continue
        made = replace(node, assigns=(replace(assign, value=found[0]),))
        moved = _Moved(assign.target, found[1], (*loop.body[:place], made, *loop.body[place + 1 :]))
        if moved.holds(place):
            return moved
    return None


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


@dataclass
class _Moved:
    """A loop whose scores lack a number of their row."""

    scores: Leaf
    number: Element
    body: tuple[ir.Statement, ...]
    carried: dict[Leaf, ir.Assign] = field(default_factory=dict)
    """The running maxima, each with an assignment to it."""
    maxima: list[Leaf] = field(default_factory=list)
    """All values that are lower by the number, with those."""

    @property
    def passing(self) -> list[Leaf]:
        """Maxima of one iteration."""
        return [v for v in self.maxima if v not in self.carried and isinstance(v.term, At)]

    def holds(self, place: int) -> bool:
        """Whether scores are used for one softmax alone, and maxima for nothing else."""
        written = frozenset().union(*(effects(n).writes for n in self.body))
        if written & {variable(leaf) for leaf in leaves(self.number)}:
            return False
        weights = False
        for node in self.body[place + 1 :]:
            names = {variable(v) for v in (self.scores, *self.maxima)}
            if not isinstance(node, ir.Compute):
                if effects(node).all & names and not (weights and self._of_weights(node)):
                    return False
                continue
            for assign in node.assigns:
                known = self._maximum(assign) or self._cancels(assign.value)
                if not known and not (self._weights(assign, node) and not weights):
                    return False
                if not weights and not self._scores_stay(assign, node):
                    return False
                weights = weights or self._weights(assign, node)
        return weights and bool(self.carried) and self._known(place)

    def _known(self, place: int) -> bool:
        """Whether every running maximum is assigned in the loop, and not read before the scores."""
        assigns = [a for n in self.body if isinstance(n, ir.Compute) for a in n.assigns]
        self.carried = {a.target: a for a in assigns if a.target in self.carried}
        names = {variable(v) for v in self.maxima}
        early = (effects(n).all & names for n in self.body[:place])
        return bool(self.carried) and not any(early)

    def _of_weights(self, node: ir.Statement) -> bool:
        """Whether a statement touches what were scores, and no maximum."""
        return not effects(node).all & {variable(v) for v in self.maxima}

    def _maximum(self, assign: ir.Assign) -> bool:
        """Whether a value is a maximum of scores, or a copy of one."""
        match assign.value:
            case Op("max", (Leaf() as held, Reduce("max", arg))) if arg == self.scores:
                self.carried.setdefault(held, assign)
                self.maxima += [v for v in (held, assign.target) if v not in self.maxima]
                return axes_of(held) == ROW
            case Leaf() if assign.value in self.maxima:
                self.maxima += [] if assign.target in self.maxima else [assign.target]
                return True
        return False

    def _cancels(self, x: Element) -> bool:
        """Whether maxima are used as differences alone."""
        match x:
            case Leaf():
                return x not in self.maxima
            case Op("-", (a, b)) if a in self.maxima and b in self.maxima:
                return True
            case Op(_, args):
                return all(map(self._cancels, args))
            case Reduce(_, arg):
                return self._cancels(arg)

    def _weights(self, assign: ir.Assign, node: ir.Compute) -> bool:
        """Whether scores become weights: exp2 of a score less the maximum, both with a factor."""
        if assign.target != self.scores or node.unless is not None:
            return False
        match assign.value:
            case Op("exp2", (Op("-", (Op("*", (x, Leaf() as a)), Op("*", (y, b)))),)) if a == b:
                return x == self.scores and y in self.maxima
            case Op("exp2", (Op("-", (x, y)),)):
                return x == self.scores and y in self.maxima
        return False

    def _scores_stay(self, assign: ir.Assign, node: ir.Compute) -> bool:
        """Whether scores are masked, become weights, or are looked at for their maximum alone."""
        match assign.value:
            case Op("where", (seen, held, Leaf(value=value))) if assign.target == self.scores:
                hidden = held == self.scores and value == -float("inf")
                return hidden and not reads(seen, self.scores)
        if assign.target == self.scores:
            return self._weights(assign, node)
        return self._maximum(assign) or not reads(assign.value, self.scores)

    def around(self, loop: ir.Loop) -> list[ir.Statement]:
        """The loop, between what lowers its running maxima and what raises them again."""
        before: list[ir.Statement] = []
        after: list[ir.Statement] = []
        named = LOWER.format(" or ".join(sorted({variable(x) for x in leaves(self.number)} - {""})))
        for held, assign in self.carried.items():
            assert assign.buffer is not None
            lower = Op("min", (Op("-", (held, self.number)), ABOVE))
            for part, value in ((before, lower), (after, Op("+", (held, self.number)))):
                made = ir.Assign(held, value, assign.buffer)
                note = named if part is before else ""
                shape = assign.buffer.shape
                part.append(ir.Compute(shape, (made,), note=note, origin=loop.origin.untitled))
        return [*before, replace(loop, body=self.body), *after]
