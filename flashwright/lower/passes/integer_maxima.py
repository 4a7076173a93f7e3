"""Maxima of rows as integers, three at a time, where the softmax takes as long as the products.

Hopper has the largest of three integers in one instruction, of floats only that of two. Bits of
floats compare like integers as long as one of the two is not negative; of negative ones the integer
maximum is the smallest. It is an element of the row in any case, so never too large: once the
running maximum m of a row is at least 0, max(m, integer maximum) is what it would be in floats.

The first iteration of an overlapped loop has its maxima in floats, and all lanes of a warp vote
whether all of its rows have come so far (`above`). In the iterations that follow, a warp that is
not `above` finds the maxima in floats first and votes again. Where a program adds nothing to its
scores they lie around 0, and one tile of keys will do; if all of them are negative, it is right and
slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import takewhile

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.element import ROW, Element, Leaf, Op, Reduce, element, leaves, variable
from flashwright.lower.names import tile_name
from flashwright.lower.term import Unary, Var, call
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES

ABOVE = Var("above")
REACHED = element("reached", ROW)
NOTE = "While a row of the warp has a negative maximum, maxima as integers may be too small."


def use_integer_maxima(
    program: Program, gpu: Gpu, body: tuple[ir.Statement, ...]
) -> tuple[ir.Statement, ...]:
    """Overlapped loops (software_pipeline.py) with their maxima found so, where it pays."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=use_integer_maxima(program, gpu, node.body)))
        elif isinstance(node, ir.Branch):
            made = _loops(program, gpu, node)
            if made is node:
                inner = use_integer_maxima(program, gpu, node.then)
                made = replace(
                    node, then=inner, orelse=use_integer_maxima(program, gpu, node.orelse)
                )
            out.append(made)
        else:
            out.append(node)
    return tuple(out)


def _loops(program: Program, gpu: Gpu, node: ir.Branch) -> ir.Branch:
    loops = [n for n in node.then if isinstance(n, ir.Loop) and n.number != "own" and _products(n)]
    if not loops or not _pays(program, gpu, _products(loops[0])):
        return node
    scores = _products(loops[0])[0].target
    if not _applies(node, [node.then, *(loop.body for loop in loops)], scores):
        return node
    then: list[ir.Statement] = []
    fold = _folds(node.then, scores)[0]
    for part in node.then:
        if isinstance(part, ir.Loop) and part in loops:
            part = replace(part, body=_as_integers(part.body, scores))
        then.append(part)
        if part is fold.kept:
            then.append(replace(_vote(fold.held), varies=True, origin=part.origin.untitled))
    return replace(node, then=tuple(then))


def _applies(node: ir.Branch, bodies: list[tuple[ir.Statement, ...]], scores: Key) -> bool:
    """Whether each iteration has one softmax of the scores as they are, all with one maximum."""
    folds = [_folds(body, scores) for body in bodies]
    held = {fold.held for found in folds for fold in found}
    return (
        all(len(found) == 1 for found in folds)
        and len(held) == 1
        and all(_only_products(body, scores) for body in bodies)
        and _only_grows(node, held.pop(), len(bodies))
    )


def _products(loop: ir.Loop) -> list[ir.Gemm]:
    return [n.gemm for n in loop.body if isinstance(n, ir.Start)]


def _pays(program: Program, gpu: Gpu, gemms: list[ir.Gemm]) -> bool:
    """Whether both products of a score take no longer than its exponential: then the maxima are on
    the way of what takes longest. (In 8 bits they are not, and it was slower.)"""
    first = [g for g in gemms if g.target == gemms[0].target]
    second = {g.target for g in gemms} - {gemms[0].target}
    right = [program.buffers[gemm.right] for gemm in gemms]
    if len(second) != 1 or any(DTYPES[buffer.dtype] != 2 for buffer in right):
        return False
    depth = sum(program.buffers[g.right].shape[1 if g.transposed else 0] for g in first)
    flops = 2 * (depth + program.buffers[second.pop()].shape[1])
    rate = round(gpu.flops_per_clock(right[0].dtype))  # from figures of four digits
    return flops * gpu.exp_per_clock_per_sm <= rate


# --- the maximum of a softmax -----------------------------------------------------------------


@dataclass(frozen=True)
class _Fold:
    """`now = max(held, the maximum of a row of scores)`, which `held` then becomes."""

    held: Leaf
    most: Element
    node: ir.Compute
    number: int  # of the assignment in its statement
    kept: ir.Compute
    """The statement in which `held` becomes it."""


def _folds(body: tuple[ir.Statement, ...], scores: Key) -> list[_Fold]:
    found = []
    computes = [n for n in body if isinstance(n, ir.Compute) and n.unless is None]
    for node in computes:
        for number, assign in enumerate(node.assigns):
            match assign.value:
                case Op("max", (Leaf(axes=axes) as held, most)) if axes == ROW:
                    kept = _becomes(computes[computes.index(node) :], held, assign.target)
                    if kept and _with_integers(most, scores):
                        found.append(_Fold(held, most, node, number, kept))
    return found


def _becomes(computes: list[ir.Compute], held: Leaf, value: Leaf) -> ir.Compute | None:
    """The statement in which a vector gets a value."""
    for node in computes:
        if any(a.target == held and a.value == value for a in node.assigns):
            return node
    return None


def _with_integers(most: Element, scores: Key) -> Element | None:
    """A row's maximum, if it is one of scores times a positive number, found as integers."""
    match most:
        case Reduce("max", Leaf() as tile) if variable(tile) == tile_name(scores):
            return Reduce("max3", tile)
        case Op("*", (Reduce() as inner, Leaf(value=float(factor)) as by)) if factor > 0:
            found = _with_integers(inner, scores)
            return found and Op("*", (found, by))
    return None


def _only_products(body: tuple[ir.Statement, ...], scores: Key) -> bool:
    """Whether the scores at their maximum depend on nothing but the product (but for masks). What a
    bias is added to may be negative for most of a row."""
    fold = _folds(body, scores)[0].node
    before = tuple(takewhile(lambda n: n is not fold, body))
    assigns = (a for n in ir.flat(before) if isinstance(n, ir.Compute) for a in n.assigns)
    own = [a for a in assigns if variable(a.target) == tile_name(scores)]
    return all(
        leaf == a.target or leaf.value is not None
        for a in own
        for leaf in leaves(_unmasked(a.value))
    )


def _unmasked(value: Element) -> Element:
    """The value where a mask hides nothing."""
    match value:
        case Op("where", (_, shown, Leaf(value=float(hidden)))) if hidden == -math.inf:
            return shown
    return value


def _only_grows(node: ir.Branch, held: Leaf, folds: int) -> bool:
    """Whether a running maximum is changed by its folds alone."""
    nodes = list(ir.flat((node,)))
    assigns = [a for n in nodes if isinstance(n, ir.Compute) for a in n.assigns]
    fills = (ir.Fill, ir.Move)
    filled = any(isinstance(n, fills) and tile_name(n.dest) == variable(held) for n in nodes)
    return not filled and sum(a.target == held for a in assigns) == folds


# --- the iterations behind the first ----------------------------------------------------------


def _as_integers(body: tuple[ir.Statement, ...], scores: Key) -> tuple[ir.Statement, ...]:
    out: list[ir.Statement] = []
    fold = _folds(body, scores)[0]
    for node in body:
        if node is fold.node:
            out += _lifted(fold.node, fold, scores)
        else:
            out.append(node)
    return tuple(out)


def _lifted(node: ir.Compute, fold: _Fold, scores: Key) -> tuple[ir.Statement, ...]:
    """What a row has reached: its running maximum, or, as long as that says too little, the new one
    as well; then the statement, with the maximum as integers on top."""
    origin, assigns = node.origin.untitled, list(node.assigns)
    most = _with_integers(fold.most, scores)
    assert most is not None
    whole = ir.Assign(REACHED, assigns[fold.number].value, kept=True)
    assigns[fold.number] = replace(assigns[fold.number], value=Op("max", (REACHED, most)))
    start = replace(
        node,
        assigns=(ir.Assign(REACHED, fold.held, kept=True),),
        kept=(variable(REACHED),),
        note=NOTE,
    )
    in_floats = replace(node, assigns=(whole,), kept=(), origin=origin)
    vote = replace(_vote(REACHED), again=True, origin=origin)
    return (
        start,
        ir.Branch(Unary("!", ABOVE), (in_floats, vote), origin=origin),
        replace(node, assigns=tuple(assigns), origin=origin),
    )


def _vote(rows: Leaf) -> ir.Define:
    value = call("none_negative", Var(variable(rows)), type="int")
    return ir.Define(ABOVE.name, value)
