"""Gathers and scatters: each element of a tile reads its own tensor element, or is added to it,
`T[head_idx, kv_idx - q_idx]`.

An index that depends on the element is clamped to its axis: masked elements and those past the ends
of the sequences may have any index, and a kernel clamps more cheaply than it branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashwright.lang.nodes import (
    Binary,
    Call,
    Expr,
    Index,
    Let,
    Name,
    Transpose,
    Unary,
)
from flashwright.program.fixes import rounded_down
from flashwright.program.program import Program, Tensor
from flashwright.program.scalars import NotScalar, Unknown, Value, evaluate, whole
from flashwright.program.vocabulary import POSITIONS
from flashwright.semantics.state import State
from flashwright.semantics.tiles import Frame, Operand, Tile, together


def gather(machine: State, expr: Index, frame: Frame, value_of: Callable[[Expr], Operand]) -> Tile:
    """The elements that an index reads over the rows and columns of a frame."""
    tensor = machine.program.tensors[expr.tensor.id]
    places = _places(machine, expr, tensor, value_of)
    tiles = [place for place in places if isinstance(place, Tile)]
    data = None
    if machine.math is not None:
        data = machine.math.gather(tensor, _numbers(places), machine.offset(tensor))
    return Tile(frame.shape, frame.axes, "fp32", masks=together(tiles), data=data)


def scatter(machine: State, expr: Index, tile: Tile, value_of: Callable[[Expr], Operand]) -> None:
    """Add each element of a tile to the tensor element that its index names."""
    tensor = machine.program.tensors[expr.tensor.id]
    places = _places(machine, expr, tensor, value_of)
    if machine.math is not None:
        offset = machine.offset(tensor)
        machine.math.scatter(tensor, _numbers(places), offset, tile.data)


def _numbers(places: list[Operand]) -> list[Any]:
    """The index on each axis as a number, or as an array of them."""
    return [place.data if isinstance(place, Tile) else place for place in places]


def _places(
    machine: State, expr: Index, tensor: Tensor, value_of: Callable[[Expr], Operand]
) -> list[Operand]:
    """The index on each axis of a tensor; a finding if there is no such element."""
    machine.same_rank(expr, tensor)
    places: list[Operand] = []
    for axis, arg in zip(tensor.axes, expr.args, strict=True):
        if machine.program.per_element(arg):
            _whole(arg, machine)
            if machine.extent(axis.size) == 0:
                text = f"axis {axis.label} of `{tensor.name}` is empty"
                raise machine.halt("FW605", text, arg.span, label=machine.problem())
            places.append(value_of(arg))
        else:
            place = machine.place(tensor, axis, machine.scalar(arg), arg)
            places.append(Unknown() if place is None else place)
    return places


def _whole(arg: Expr, machine: State) -> None:
    """Halt with FW306 unless an index is a whole number for every element."""
    culprit = fraction(arg, machine.program, machine.env)
    if culprit is not None:
        text = "an index must be a whole number for every element"
        raise machine.halt("FW306", text, culprit.span, fix=rounded_down(arg))


def fraction(expr: Expr, program: Program, env: dict[str, Value]) -> Expr | None:
    """The part of an expression that may not be a whole number; None if there is no such part."""
    if not program.per_element(expr) and not program.chosen(expr):
        try:
            value = evaluate(expr, env)
        except NotScalar as problem:
            return problem.culprit
        return None if isinstance(value, bool) or whole(value) is not None else expr
    match expr:
        case Name(id) if id in POSITIONS:
            return None
        case Name(id) if id in env:
            let = program.scalar_definition(id)
            return fraction(let.value, program, env) if isinstance(let, Let) else None
        case Name():
            key = program.tile(expr)
            return expr if key is None or program.buffers[key].dtype != "int32" else None
        case Index(tensor):
            return None if program.tensors[tensor.id].dtype == "int32" else expr
        case Unary("-", operand):
            return fraction(operand, program, env)
        case Binary("+" | "-" | "*" | "%", left, right):
            return fraction(left, program, env) or fraction(right, program, env)
        case Binary("/") | Transpose():
            return expr
        case Call(func, args):
            parts = {"min": args, "max": args, "abs": args, "where": args[1:]}
            name = func.id.lower()
            if name in ("floor", "ceil"):
                return None
            found = (
                (fraction(arg, program, env) for arg in parts[name]) if name in parts else [expr]
            )
            return next((part for part in found if part is not None), None)
    return None  # a comparison: 0 or 1
