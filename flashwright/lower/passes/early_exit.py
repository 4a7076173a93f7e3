"""Early exit per warpgroup: from some iteration on a mask leaves nothing of a warpgroup's rows. It
then only lets the tiles pass, while others go on with them.

An iteration in which every score is masked must change nothing. The statements are followed with
scores of -inf: a softmax leaves its state alone, and its weights are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

from flashwright.lower import ir
from flashwright.lower.element import Element, Leaf, Op, Reduce, variable
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
    inlined,
    integer,
    plus,
    substitute,
    variables,
)


def exit_iteration(loop: ir.Loop, rows: Term | None, live: frozenset[Resource]) -> Term | None:
    """The iteration from which on a warpgroup has nothing to do, at least the second; so has one
    whose rows are not stored. None where that cannot be told. `live` is what is needed behind the
    loop."""
    exit = _masked_from(loop, live)
    if exit is None:
        return None
    if rows is not None:
        first = binary("*", GROUP, integer(GROUP_ROWS))
        exit = Select(binary("<", first, rows), exit, integer(0))
    return call("max", plus(loop.low, 1), exit, type="int")


def _masked_from(loop: ir.Loop, live: frozenset[Resource]) -> Term | None:
    steps = {n.target for n in loop.body if isinstance(n, ir.Gemm)}
    work = [
        n
        for n in loop.body
        if isinstance(n, ir.Operand)
        or (isinstance(n, ir.Compute) and not any(total(n, step) for step in steps))
    ]
    plain = (ir.Await, ir.Release, ir.Define, ir.Gemm, ir.Operand, ir.Compute, ir.Fill)
    if not all(isinstance(n, plain) or _loads(n) for n in loop.body):
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


def _loads(node: ir.Statement) -> TypeGuard[ir.Move]:
    """Whether a tile comes from shared memory to registers."""
    return isinstance(node, ir.Move) and node.dest[1] == "register" and not node.operand


def defined(body: Sequence[ir.Statement]) -> dict[str, Term]:
    """What the names defined in a body stand for, in terms of what is defined outside of it."""
    return inlined({node.name: node.value for node in body if isinstance(node, ir.Define)})


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
        if isinstance(node, ir.Fill) or _loads(node):
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
    "quick_log2": math.log2,
    "tanh": math.tanh,
    "tanh2": lambda x: math.tanh(x * math.log(2) / 2),
    "abs": abs,
}


@dataclass(frozen=True)
class _Unchanged:
    """The value that something had before the iteration: a finite number."""

    what: object


@dataclass(frozen=True)
class _Finite:
    """A finite number of which no more is known."""


_Value = float | _Unchanged | _Finite | None
"""A number that is known, a value from before, a finite one, or one of which nothing is known."""


def idle(
    work: Sequence[ir.Compute | ir.Operand], mask: ir.Compute, scratch: Set[str] = frozenset()
) -> bool:
    """Whether all vectors and tiles stay as they are if the mask hides a whole tile of scores, but
    for these: they must become 0, and so must all that a product takes. What is `scratch` need not
    stay. Values are followed as numbers or as what was there before; sums and products of others
    cannot be told, and are not as they were.

    A vector that is made for later is a factor, and must be 1.
    """
    (scores,) = (variable(a.target) for a in mask.assigns)
    state: dict[str, _Value] = {}
    for node in work:
        if isinstance(node, ir.Operand):
            if state.get(tile_name(node.source)) != 0:
                return False
            continue
        for assign in node.assigns:
            value = -math.inf if node is mask else _value(assign.value, state)
            state[variable(assign.target)] = value
            if assign.kept and value != 1:
                return False
    computes = [node for node in work if isinstance(node, ir.Compute)]
    made = {variable(a.target) for node in computes for a in node.assigns if a.buffer}
    return state[scores] == 0 and all(state[n] == _Unchanged(n) for n in made - scratch - {scores})


def _value(x: Element, state: Mapping[str, _Value]) -> _Value:
    match x:
        case Leaf(value=float(value)):
            return value
        case Leaf():
            name = variable(x)
            return state.get(name, _Unchanged(name)) if name else _Unchanged(x.term)
        case Reduce("max", arg):
            found = _value(arg, state)
            known = isinstance(found, float)
            return found if known else _Finite() if _finite(found) else None
        case Reduce(_, arg):
            found = _value(arg, state)
            return 0.0 if found == 0 else _Finite() if _finite(found) else None
        case Op("where", (_, yes, no)):
            a, b = _value(yes, state), _value(no, state)
            same = a == b and not isinstance(a, _Finite)
            return a if same else _Finite() if _finite(a) and _finite(b) else None
        case Op("gather"):
            return _Finite()
        case Op(op, args):
            return _applied(op, [_value(a, state) for a in args])


def _applied(op: str, args: list[_Value]) -> _Value:
    """An operation on values. What is known of a finite number holds for every one."""
    numbers = [a for a in args if isinstance(a, (int, float))]
    if len(numbers) == len(args):
        try:
            return float(_KNOWN[op](*numbers))
        except (ArithmeticError, KeyError, ValueError):
            return None
    match op, args:
        case "+", ([0, other] | [other, 0]):
            return other
        case "-", [other, 0]:
            return other
        case "-", [_Unchanged() as a, _Unchanged() as b] if a == b:
            return 0.0
        case "+" | "-", [float() as a, _Unchanged() | _Finite()] if math.isinf(a):
            return a
        case "*", ([0, _Unchanged() | _Finite()] | [_Unchanged() | _Finite(), 0]):
            return 0.0
        case "*", ([1, other] | [other, 1]):
            return other
        case "/", [other, 1]:
            return other
        case "max", ([float() as low, other] | [other, float() as low]) if low == -math.inf:
            return other
    return _Finite() if op in _STAY_FINITE and all(map(_finite, args)) else None


_STAY_FINITE = frozenset(
    {"+", "-", "*", "neg", "abs", "max", "min", "tanh", "tanh2", "exp", "exp2"}
)


def _finite(x: _Value) -> bool:
    return isinstance(x, (_Unchanged, _Finite)) or (isinstance(x, float) and math.isfinite(x))
