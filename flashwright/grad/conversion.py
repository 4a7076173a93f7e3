"""The conversion kernels: gradients that blocks have added up in fp32, scaled and rounded."""

from __future__ import annotations

from dataclasses import replace

from flashwright.grad.algebra import ZERO, div, mul
from flashwright.grad.declare import WARPS, Scope, Sum
from flashwright.grad.normalise import KEY, QUERY
from flashwright.lang import nodes as tl

_INDEX = {"B": "batch_idx", "H": "head_idx"}


def conversion(scope: Scope) -> list[tl.Statement]:
    """A kernel for all sums with the same grid."""
    groups: dict[tl.Grid, list[Sum]] = {}
    for item in scope.sums.values():
        axes = [index for _, index, _ in _axes(scope, item) if index]
        groups.setdefault(tl.Grid(tuple(reversed(axes))), []).append(item)
    made: list[tl.Statement] = []
    for grid, items in groups.items():
        names = ", ".join(f"d{item.tensor.name}" for item in items)
        title = tl.Comment(f"Conversion: the sums of {names}, rounded.", gap=True)
        tiles, bodies = zip(*(_convert(scope, item) for item in items), strict=True)
        made += [title, grid, WARPS, *tiles, *(stmt for body in bodies for stmt in body)]
    return made


def _axes(scope: Scope, item: Sum) -> list[tuple[str, tl.GridAxis | None, tl.Expr | None]]:
    """The label of each axis of a tensor, the grid's axis along it if blocks divide it, and the
    size of a tile along it unless a block has one index."""
    made: list[tuple[str, tl.GridAxis | None, tl.Expr | None]] = []
    tensor = item.tensor
    sides = [None] * (len(tensor.axes) - len(item.axes)) + list(item.axes)
    for axis, side in zip(tensor.axes, sides, strict=True):
        if side is None:
            name = tl.Name(_INDEX.get(axis.label, f"of_{axis.label}"))
            made.append((axis.label, tl.GridAxis(name, ZERO, axis.size), None))
        elif side in (QUERY, KEY):
            name = tl.Name("block_idx" if side == item.axes[0] else "column_idx")
            size = scope.sizes[side]
            made.append((axis.label, tl.GridAxis(name, ZERO, div(axis.size, size)), size))
        else:
            made.append((axis.label, None, axis.size))
    return made


def _convert(scope: Scope, item: Sum) -> tuple[tl.Allocate, list[tl.Statement]]:
    """The tile and the statements for one gradient."""
    axes, name = _axes(scope, item), f"d{item.tensor.name}"
    coords = tuple(tl.Coord(tl.Name(label), index.name) for label, index, _ in axes if index)
    shape = tuple(size for _, _, size in axes if size)
    source, tile = (
        tl.Name(f"{n}_register" if len(shape) == 2 else n) for n in (f"{name}sum", name)
    )
    copy = tl.Copy(tl.Name(f"{name}sum"), shape, coords, "global", "register")
    sizes = tuple(tl.Axis(None, size) for size in shape)
    return tl.Allocate(tl.Name(name), "register", sizes, tl.Name("fp32")), [
        copy,
        tl.Compute(None, (mul(source, item.factor),), mode="get", target=tile),
        replace(copy, name=tl.Name(name), source="register", dest="global"),
    ]
