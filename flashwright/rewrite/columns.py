"""Columns of a kernel's tiles in pieces: a thread block works on some of them, so that sums of many
columns fit its registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashwright.lang import nodes as tl
from flashwright.lang.format import format_expr
from flashwright.program.needed import is_store
from flashwright.program.program import Program
from flashwright.rewrite.parts import Fresh
from flashwright.rewrite.tree import Body, edited, written

MOST = 128
"""The most columns of a tile with 16 rows that a warp holds, beside another one."""
PIECES = (128, 64, 32, 16)


def in_pieces(
    program: Program, kernel: Body, letters: Mapping[str, str], fresh: Fresh
) -> tuple[Body, Body] | None:
    """A param, and a kernel whose wide tiles have so many columns; None where none is wide, or
    where its statements need whole rows. `letters` are those of the columns of tensors that the
    program does not have. A result without columns is stored with the first ones."""
    size = _width(program, kernel)
    if size is None:
        return None
    wide = program.params[size.id]
    piece = next((n for n in PIECES if wide % n == 0), None)
    statements = [*tl.statements(kernel)]
    if piece is None or any(_needs_rows(s, size) for s in statements):
        return None
    columns, number, block = (fresh(name) for name in ("Columns", "piece_idx", "column_idx"))
    letters = {**{n: t.axes[-1].label for n, t in program.tensors.items()}, **letters}
    changes: dict[int, Body] = {}
    for stmt in statements:
        if isinstance(stmt, tl.Allocate) and stmt.space == "register":
            changes[id(stmt)] = (_narrow_tile(stmt, size, columns),)
        elif isinstance(stmt, tl.Copy) and _is_wide(stmt, size):
            changes[id(stmt)] = (_narrow_copy(stmt, columns, block, letters[_outer(stmt)]),)
        elif is_store(stmt):
            (first,) = written(f"if {block} == 0\nend\n")
            assert isinstance(first, tl.If)
            changes[id(stmt)] = (replace(first, then=(stmt,)),)
    (grid,) = (s for s in kernel if isinstance(s, tl.Grid))
    changes[id(grid)] = (*_grid(grid, f"{size.id} / {columns}", number, block),)
    note = "columns of a block that puts parts together"
    return written(f"param {columns} = {piece}  // {note}\n"), edited(kernel, changes)


def _width(program: Program, kernel: Body) -> tl.Name | None:
    """The param that is the columns of all tiles with more than MOST."""
    tiles = (s for s in kernel if isinstance(s, tl.Allocate) and s.space == "register")
    sizes = {s.shape[1].size for s in tiles if len(s.shape) == 2}
    wide = {s for s in sizes if not isinstance(s, tl.Name) or program.params.get(s.id, 0) > MOST}
    only = next(iter(wide), None) if len(wide) == 1 else None
    return only if isinstance(only, tl.Name) and only.id in program.params else None


def _needs_rows(stmt: tl.Statement, size: tl.Name) -> bool:
    """Whether a statement works on whole rows, or uses their width for something else."""
    if isinstance(stmt, tl.Compute):
        called = {e.func.id for e in tl.expressions(stmt) if isinstance(e, tl.Call)}
        whole = stmt.operation in ("gemm", "softmax", "mask", "rowsum", "rowmax")
        return whole or bool(called & {"rowsum", "rowmax"}) or size in tl.expressions(stmt)
    if isinstance(stmt, tl.Copy):
        left = replace(stmt, shape=(stmt.shape or ())[:-1])
        return size in tl.expressions(left) or not stmt.shape
    if isinstance(stmt, tl.Allocate):
        return stmt.space == "shared"
    return not isinstance(stmt, tl.Param) and size in tl.expressions(stmt)


def _is_wide(copy: tl.Copy, size: tl.Name) -> bool:
    return copy.shape is not None and len(copy.shape) == 2 and copy.shape[1] == size


def _outer(copy: tl.Copy) -> str:
    """The tensor that a Copy reads or writes."""
    return (copy.name if copy.source == "global" else copy.target or copy.name).id


def _narrow_tile(stmt: tl.Allocate, size: tl.Name, columns: str) -> tl.Allocate:
    axes = (replace(a, size=tl.Name(columns)) if a.size == size else a for a in stmt.shape)
    return replace(stmt, shape=tuple(axes))


def _narrow_copy(stmt: tl.Copy, columns: str, block: str, letter: str) -> tl.Copy:
    assert stmt.shape is not None
    place = tl.Coord(tl.Name(letter), tl.Name(block))
    return replace(
        stmt, shape=(stmt.shape[0], tl.Name(columns)), coords=(*(stmt.coords or ()), place)
    )


def _grid(grid: tl.Grid, pieces: str, number: str, block: str) -> Iterator[tl.Statement]:
    """The grid with a block for each piece; its first axis counts them fastest."""
    axis, *others = grid.axes
    low, high = format_expr(axis.low), format_expr(axis.high)
    name = axis.name.id
    text = f"grid {number} = 0:ceil({high} - {low}) * ({pieces})\n"
    text += f"let {block} = {number} % ({pieces})\n"
    text += f"let {name} = {low} + floor({number} / ({pieces}))\n"
    if low == "0":
        text = text.replace(f"{high} - 0", high).replace("0 + floor", "floor")
    made, *lets = written(text)
    assert isinstance(made, tl.Grid)
    yield replace(made, axes=(*made.axes, *others))
    yield from lets
