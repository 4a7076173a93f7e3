"""Views with an offset as tensors with all axes: `(batch_idx * heads + head_idx) * q_len * HeadDim`
elements into the caller's memory is batch_idx and head_idx of a tensor (batch, heads, q_len,
HeadDim)."""

from __future__ import annotations

from dataclasses import replace

from flashwright.check.check import checked_program
from flashwright.grad.algebra import ONE, ZERO, Product, renamed
from flashwright.lang import nodes as tl
from flashwright.program.program import Program, Tensor

_LETTERS = "HBGN"


def without_views(program: Program) -> Program:
    """The program with axes in place of offsets, where the offsets are those of axes."""
    found = {t.name: _outer(program, t) for t in program.tensors.values() if t.offset is not None}
    axes = {name: outer for name, outer in found.items() if outer}
    if not axes:
        return program
    return checked_program(tl.Tree(_rewritten(program, program.tree.body, axes)))


Outer = list[tuple[str, tl.GridAxis]]
"""The axes in front of a view's own, the innermost first: a letter, and the grid's axis."""


def _outer(program: Program, tensor: Tensor) -> Outer:
    """The axes in front of a view's own; none if its offset is no index of such axes."""
    assert tensor.offset is not None
    lets = {s.name.id: s.value for s in program.tree.body if isinstance(s, tl.Let)}
    rest = tensor.offset
    for _ in lets:
        rest = renamed(rest, lets)
    product = Product.of(rest)
    tops = list(product.tops)
    for axis in tensor.axes:
        if axis.size not in tops:
            return []
        tops.remove(axis.size)
    rest = Product(product.negative, tuple(tops), product.bottoms).expr()
    taken = {axis.label for axis in tensor.axes}
    letters = [letter for letter in _LETTERS if letter not in taken]
    grid = {a.name: a for a in program.grid.axes if a.low == ZERO}
    found: Outer = []
    while rest != ZERO:
        index, rest = (rest, ZERO) if isinstance(rest, tl.Name) else _split(rest, grid)
        if index not in grid or len(found) == len(letters):
            return []
        found.append((letters[len(found)], grid[index]))
    return found


def _split(rest: tl.Expr, grid: dict[tl.Name, tl.GridAxis]) -> tuple[tl.Name | None, tl.Expr]:
    """The innermost index of a sum `outer * size + index`, and `outer`."""
    match rest:
        case tl.Binary("+", outer, tl.Name() as index) if index in grid:
            product = Product.of(outer)
            if grid[index].high in product.tops:
                tops = list(product.tops)
                tops.remove(grid[index].high)
                return index, Product(product.negative, tuple(tops), product.bottoms).expr()
    return None, ONE


def _rewritten(
    program: Program, body: tuple[tl.Statement, ...], axes: dict[str, Outer]
) -> tuple[tl.Statement, ...]:
    """The statements with the axes in Allocates and Copies."""
    return tuple(_statement(program, stmt, axes) for stmt in body)


def _statement(program: Program, stmt: tl.Statement, axes: dict[str, Outer]) -> tl.Statement:
    match stmt:
        case tl.For():
            return replace(stmt, body=_rewritten(program, stmt.body, axes))
        case tl.If():
            then, orelse = (_rewritten(program, b, axes) for b in (stmt.then, stmt.orelse))
            return replace(stmt, then=then, orelse=orelse)
        case tl.Allocate(name, "global") if name.id in axes:
            own = program.tensors[name.id].axes
            shape = [tl.Axis(tl.Name(n), a.high) for n, a in reversed(axes[name.id])]
            shape += [tl.Axis(tl.Name(a.label), a.size) for a in own]
            return replace(stmt, shape=tuple(shape), offset=None)
        case tl.Copy():
            key = program.source(stmt) if stmt.source == "global" else program.dest(stmt)
            outer = axes.get(key[0], []) if key[1] == "global" else []
            coords = [tl.Coord(tl.Name(n), a.name) for n, a in reversed(outer)]
            return replace(stmt, coords=(*coords, *stmt.coords)) if stmt.coords else stmt
    return stmt
