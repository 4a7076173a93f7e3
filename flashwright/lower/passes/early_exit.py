"""Early exit per warpgroup: from some iteration on a mask leaves nothing of a warpgroup's rows. It
then only lets the tiles pass, while others go on with them.

An iteration in which every score is masked must change nothing. The statements are carried out on
one row of numbers, of which the mask makes -inf: a softmax leaves its state alone, and its weights
are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

from flashwright.lower import ir
from flashwright.lower.element import Element, Leaf, Op, Reduce, leaves, variable
from flashwright.lower.frontend.masks import GROUP, GROUP_ROWS
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import Resource, exposed
from flashwright.lower.passes.fp8_sums import total
from flashwright.lower.term import (
    Binary,
    Select,
    Term,
    Var,
    binary,
    call,
    integer,
    plus,
    substitute,
    variables,
)


def own_end(loop: ir.Loop, rows: Term | None, live: frozenset[Resource]) -> Term | None:
    """The iteration from which on a warpgroup has nothing to do, at least the second; so has one
    whose rows are not stored. None where that cannot be told. `live` is what is needed behind the
    loop."""
    own = _masked_from(loop, live)
    if own is None:
        return None
    if rows is not None:
        first = binary("*", GROUP, integer(GROUP_ROWS))
        own = Select(binary("<", first, rows), own, integer(0))
    return call("max", plus(loop.low, 1), own, type="int")


def _masked_from(loop: ir.Loop, live: frozenset[Resource]) -> Term | None:
    steps = {n.target for n in loop.body if isinstance(n, ir.Gemm)}
    work = [
        n
        for n in loop.body
        if isinstance(n, ir.Operand)
        or (isinstance(n, ir.Compute) and not any(total(n, step) for step in steps))
    ]
    fills = (ir.Fill, ir.FillAhead, ir.FillDone)
    plain = (ir.Await, ir.Release, ir.Define, ir.Gemm, ir.Operand, ir.Compute, *fills)
    if not all(isinstance(n, plain) for n in loop.body):
        return None
    lets = defined(loop.body)
    scratch = _scratch(loop, live)
    if not _only_scratch(loop, scratch):
        return None
    for node in work:
        if not isinstance(node, ir.Compute) or node.end is None or node.cols is None:
            continue
        match substitute(node.cols, lets), substitute(node.end, lets):
            case Binary("*", Var(name), step), end if name == loop.var:
                hidden = {variable(a.target) for a in node.assigns} <= scratch
                if hidden and loop.var not in variables(end) and idle(work, node, scratch):
                    return call("ceil_div", end, step, type="int")
    return None


def defined(body: Sequence[ir.Statement]) -> dict[str, Term]:
    """What the names defined in a body stand for, in terms of what is defined outside of it."""
    found: dict[str, Term] = {}
    for node in body:
        if isinstance(node, ir.Define):
            found[node.name] = substitute(node.value, found)
    return found


def _scratch(loop: ir.Loop, live: frozenset[Resource]) -> set[str]:
    """Tiles and vectors that every iteration writes before it reads them, and that are not needed
    behind the loop: their values do not last."""
    found = exposed(loop.body)
    return {r for r in found.writes - found.reads - live if isinstance(r, str)}


def _only_scratch(loop: ir.Loop, scratch: Set[str]) -> bool:
    """Whether what is loaded to registers does not last, and products neither, unless they have a
    left operand that the iteration makes (of zeros, as `idle` finds out). Scores that are hidden
    are not multiplied anew."""
    operands = {n.target for n in loop.body if isinstance(n, ir.Operand)}
    lasting: set[str] = set()
    for node in loop.body:
        if isinstance(node, (ir.Fill, ir.FillDone)):
            lasting.add(tile_name(node.dest))
        if isinstance(node, ir.Gemm) and node.left not in operands:
            lasting.add(tile_name(node.target))
    hidden: set[str] = set()
    for node in loop.body:
        if isinstance(node, ir.Compute) and node.end is not None:
            hidden |= {variable(a.target) for a in node.assigns}
        if isinstance(node, ir.Gemm) and tile_name(node.target) in hidden:
            return False
    return lasting <= scratch


_KNOWN: dict[str, Callable[..., float]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "max": max,
    "min": min,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "tanh2": lambda x: math.tanh(x * math.log(2) / 2),
    "abs": abs,
}
_MANY = 16  # elements of the row
_NUMBERS: tuple[Callable[[int], float], ...] = (  # for each name another
    lambda n: 1.25 + 0.5 * n,
    lambda n: 0.5 + 20 / (n + 1),
    lambda n: -3.75 - 0.5 * n,
    lambda n: 0.375 * n - 1.875,
)


def idle(
    work: Sequence[ir.Compute | ir.Operand],
    mask: ir.Compute,
    scratch: Set[str] = frozenset(),
) -> bool:
    """Whether all vectors and tiles stay as they are if the mask hides a whole tile of scores, but
    for these: they must become 0, and so must all that a product takes. What is `scratch` need not
    stay.

    A vector that is made for later is a factor, and must be 1.
    """
    return all(_idle(work, mask, scratch, number) for number in _NUMBERS)


def _idle(
    work: Sequence[ir.Compute | ir.Operand],
    mask: ir.Compute,
    scratch: Set[str],
    number: Callable[[int], float],
) -> bool:
    (scores,) = (variable(a.target) for a in mask.assigns)
    known, state = dict[str, float](), dict[str, float]()
    try:
        for node in work:
            if isinstance(node, ir.Operand):
                if state.get(tile_name(node.source)) != 0:
                    return False
                continue
            for assign in node.assigns:
                name = variable(assign.target)
                for leaf in (assign.target, *leaves(assign.value)):
                    known.setdefault(variable(leaf), number(len(known)))
                hidden = node is mask
                state[name] = -math.inf if hidden else _value(assign.value, known | state)
                if assign.kept and state[name] != 1:
                    return False
    except (ArithmeticError, KeyError, ValueError):
        return False
    computes = [node for node in work if isinstance(node, ir.Compute)]
    made = {variable(a.target) for node in computes for a in node.assigns if a.buffer}
    return state[scores] == 0 and all(state[n] == known[n] for n in made - scratch - {scores})


def _value(x: Element, state: dict[str, float]) -> float:
    match x:
        case Leaf(value=float(value)):
            return value
        case Leaf():
            return state[variable(x)]
        case Reduce("max", arg):
            return _value(arg, state)
        case Reduce(_, arg):
            return _MANY * _value(arg, state)
        case Op("where", (_, yes, no)):
            a, b = _value(yes, state), _value(no, state)
            if a != b:
                raise ValueError(x.op)
            return a
        case Op("gather"):
            return 0.75  # whatever it is, it is a number
        case Op(op, args):
            return _KNOWN[op](*(_value(a, state) for a in args))
