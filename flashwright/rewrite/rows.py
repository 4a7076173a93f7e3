"""The rows of a tile: the sums of a loop have the same ones, and the kernel that puts their parts
together has tiles of few rows, since it has little work for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashwright.lang import nodes as tl
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import RESERVED_PARAMS
from flashwright.rewrite.carried import refused
from flashwright.rewrite.tree import Body, substituted, written

ROWS = "Rows"


def rows_of(program: Program, tiles: Sequence[Key]) -> int:
    """The number of rows that tiles have. Raises Failed with FW910 if it is not the same one."""
    found = {program.buffers[key].shape[0] for key in tiles}
    for key in tiles:
        buffer = program.buffers[key]
        declared = buffer.declared
        if not isinstance(declared, tl.Allocate):
            raise refused(f"`{key[0]}` needs an Allocate", declared)
        if buffer.along == "columns" or len(found) > 1:
            raise refused("the loop's sums do not have the same rows", declared)
    return found.pop()


def small_tiles(program: Program, kernel: Body, tile: Key, rows: str) -> Body | None:
    """A kernel with 16 rows, under the param `rows`, in tiles such as this one, and one warp. None
    where the size of the tiles has another meaning, too: then it stays."""
    grid, *below = (s for s in kernel if not _is_reserved(s))
    declared = program.buffers[tile].declared
    assert isinstance(grid, tl.Grid)
    assert isinstance(declared, tl.Allocate)
    size = declared.shape[0].size
    block = _block(program, grid, size)
    if block is None or not isinstance(size, tl.Name):
        return None
    if not all(_only_place(program, s, block, size) for s in tl.statements(tuple(below))):
        return None
    made = substituted(tl.Tree((grid, *below)), {size: tl.Name(rows)}).body
    return (made[0], *written("param Warps = 1\n"), *made[1:])


def _block(program: Program, grid: tl.Grid, size: tl.Expr) -> tl.Name | None:
    """The grid's variable that counts tiles of a size that is a param: `0:length / BM`."""
    if not isinstance(size, tl.Name) or size.id not in program.params:
        return None
    for axis in grid.axes:
        high = axis.high
        if isinstance(high, tl.Call) and high.func.id == "ceil":
            (high,) = high.args
        match high:
            case tl.Binary("/", length, divisor) if divisor == size and axis.low == tl.Num("0"):
                if size not in tl.expressions(length):
                    return axis.name
    return None


def _is_reserved(stmt: tl.Statement) -> bool:
    return isinstance(stmt, tl.Param) and stmt.name.id in RESERVED_PARAMS


def _only_place(program: Program, stmt: tl.Statement, block: tl.Name, size: tl.Name) -> bool:
    """Whether a statement uses the number of a tile and its size only to say where rows lie: as the
    size of rows, as their coordinate, as the product of both where rows begin."""
    places: list[tl.Expr] = []
    if isinstance(stmt, tl.Compute) and stmt.operation == "gemm":
        return False
    if isinstance(stmt, tl.Allocate):
        others = [e for axis in stmt.shape[1:] for e in tl.expressions(axis.size)]
    elif isinstance(stmt, tl.Copy):
        shape, coords = stmt.shape or (), stmt.coords or ()
        rows = [c for c in coords if shape[:1] == (size,) and _is_row(program, stmt, c)]
        places = [c.value for c in rows if c.in_elements]
        mine = [c for c in rows if c.in_elements or c.value == block]
        left = replace(stmt, shape=shape[1:], coords=tuple(c for c in coords if c not in mine))
        bounds = (e for c in mine for b in c.within or () for e in tl.expressions(b))
        others = [*tl.expressions(left), *bounds]
    elif isinstance(stmt, tl.If):
        places, others = [stmt.cond], []
    else:
        others = [*tl.expressions(stmt)]
    start: dict[tl.Expr, tl.Expr] = {tl.Binary("*", block, size): tl.Num("0")}
    left_over = {e for p in places for e in tl.expressions(substituted(p, start))}
    return not {block, size} & {*left_over, *others}


def _is_row(program: Program, copy: tl.Copy, coord: tl.Coord) -> bool:
    """Whether a coordinate is that of a tile's rows; parts of sums lie as the result does."""
    name = program.source(copy)[0] if copy.source == "global" else program.dest(copy)[0]
    tensor = program.tensors.get(name)
    if tensor is None:
        return True
    return tensor.axes[len(tensor.axes) - len(copy.shape or ())].label == coord.axis.id
