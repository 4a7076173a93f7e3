"""A power of two that a tile of exponentials is multiplied with goes into their exponent.

Weights in 8 bits are scaled up to the top of the type. Where they are made, exp2(x - y) 2^k is
exp2(x - (y - k)), and y - k is the same for a whole row: a multiplication less for each score. What
is summed up of the weights in between is scaled back, once for a row, and to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import ROW, TILE, Element, Leaf, Op, Reduce, axes_of, leaves, literal
from flashwright.lower.passes.partial_sums import reads

NOTE = "(a power of two: taken along by the exponential)"


def in_exponent(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """Every such pair of statements, one behind the other, rewritten."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=in_exponent(node.body)))
        elif isinstance(node, ir.Branch):
            then, orelse = in_exponent(node.then), in_exponent(node.orelse)
            out.append(replace(node, then=then, orelse=orelse))
        else:
            pair = _together(out[-1], node) if out else None
            out[-1:] = pair or (*out[-1:], node)
    return tuple(out)


def _together(before: ir.Statement, node: ir.Statement) -> tuple[ir.Compute, ir.Compute] | None:
    if not isinstance(before, ir.Compute) or not isinstance(node, ir.Compute):
        return None
    if before.unless is not None or node.unless is not None or len(node.assigns) != 1:
        return None
    tile, power = node.assigns[0].target, _power(node.assigns[0])
    made = [n for n, a in enumerate(before.assigns) if a.target == tile]
    if power is None or not made or tile.axes != TILE:
        return None
    raised = _raised(before.assigns[made[-1]].value, power)
    rest = [_lowered(a, tile, power) for a in before.assigns[made[-1] + 1 :]]
    if raised is None or None in rest:
        return None
    first = replace(before.assigns[made[-1]], value=raised)
    assigns = (*before.assigns[: made[-1]], first, *(a for a in rest if a is not None))
    return replace(before, assigns=assigns), replace(node, assigns=(), note=NOTE)


def _power(assign: ir.Assign) -> int | None:
    """The k of `tile = tile * 2^k`."""
    match assign.value:
        case Op("*", (Leaf() as held, Leaf(value=float(factor)))) if held == assign.target:
            mantissa, exponent = math.frexp(factor)
            return exponent - 1 if mantissa == 0.5 else None
    return None


def _raised(value: Element, power: int) -> Element | None:
    match value:
        case Op("exp2", (Op("-", (x, y)),)) if axes_of(y) <= ROW:
            return Op("exp2", (Op("-", (x, Op("-", (y, literal(power))))),))
    return None


def _lowered(assign: ir.Assign, tile: Leaf, power: int) -> ir.Assign | None:
    """An assignment that reads the raised tile; None where it does more than to sum it up."""
    if not reads(assign.value, tile):
        return assign
    value = _with_sums(assign.value, tile, power)
    held = [x for x in leaves(assign.value) if x == tile]
    return replace(assign, value=value) if len(held) == _sums(assign.value, tile) else None


def _sums(x: Element, tile: Leaf) -> int:
    match x:
        case Op(_, args):
            return sum(_sums(a, tile) for a in args)
        case Reduce("sum", arg):
            return int(arg == tile)
    return 0


def _with_sums(x: Element, tile: Leaf, power: int) -> Element:
    match x:
        case Op(op, args):
            return Op(op, tuple(_with_sums(a, tile, power) for a in args))
        case Reduce("sum", arg) if arg == tile:
            return Op("*", (x, literal(2.0**-power)))
    return x
