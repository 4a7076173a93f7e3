"""The state of a running thread block: scalars, buffers and the findings so far."""

# ruff: noqa: D102  Arithmetic's methods are the operations of the machine, by their names.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import (
    Compute,
    Copy,
    Expr,
    For,
    Index,
    Name,
    Reshape,
    Span,
    Statement,
)
from flashwright.program.fixes import rounded_down
from flashwright.program.program import Key, Program, Tensor, TensorAxis
from flashwright.program.scalars import NotScalar, Unknown, Value, evaluate, whole
from flashwright.program.vocabulary import CONSTANTS, PREDEFINED_DIMS
from flashwright.semantics.tiles import Cell, Place, Tile, Where, origins, side_by_side, unfilled
from flashwright.semantics.worlds import World, told

Region = tuple[tuple[int, int], ...]
"""For each axis of a tensor: start and length (before clipping to the tensor)."""
ASSUMED = 3
"""Assumed elements of tensors that a finding names: the last ones read."""


class Arithmetic(Protocol):
    """The arithmetic on the numbers of the tiles; it chooses the type of its arrays."""

    def load(
        self,
        tensor: Tensor,
        region: Region,
        offset: int | None,
        shape: Sequence[int],
        lead: int = 0,
    ) -> Any: ...
    def store(
        self,
        tensor: Tensor,
        region: Region,
        offset: int | None,
        data: Any,
        shape: Sequence[int],
        adds: bool = False,
        lead: int = 0,
    ) -> None: ...
    def element(self, tensor: Tensor, index: Sequence[int], offset: int | None) -> Value: ...
    def gather(self, tensor: Tensor, index: Sequence[Any], offset: int | None) -> Any: ...
    def scatter(
        self, tensor: Tensor, index: Sequence[Any], offset: int | None, data: Any
    ) -> None: ...
    def apply(self, op: str, args: Sequence[Any]) -> Any: ...
    def reduce(self, op: str, data: Any) -> Any: ...
    def gemm(self, left: Any, right: Any, transposed: tuple[bool, bool]) -> Any: ...
    def positions(self, start: int, size: int, axis: int, rank: int) -> Any: ...
    def turn(self, data: Any, axis: int) -> Any: ...
    def side_by_side(self, pieces: Sequence[Any]) -> Any: ...
    def under_each_other(self, pieces: Sequence[Any], lead: int, shape: Sequence[int]) -> Any: ...
    def fill(self, data: Any, shape: Sequence[int]) -> Any: ...
    def round(self, data: Any, dtype: str) -> Any: ...


class Halt(Exception):
    """The thread block cannot continue; the reason has been reported."""


class State:
    """The state of one program on one problem, in the current thread block.

    Findings are collected in `findings`, in the order in which they occur.
    """

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, int],
        arithmetic: Arithmetic | None = None,
        world: World | None = None,
    ) -> None:
        self.program = program
        self.dims = dict(dims)
        self.math = arithmetic
        self.world = world
        self.told = told(program) if arithmetic is None else frozenset()
        self.left_out = False
        self.findings: dict[tuple[str, Span | None], Diagnostic] = {}
        self.cells: dict[Key, Cell] = {}
        self.pieces: dict[Key, dict[int, Cell]] = {}  # of tiles filled a few columns at a time
        self.env: dict[str, Value] = {}
        self.loops: list[For] = []
        self.varying: set[str] = set()
        self.stores: list[tuple[str, Region, Copy]] = []
        """What Copies have stored to. A tile whose rows lie in pages may be up to three regions."""
        self.last_stored: list[Region] = []
        """The regions of the last one."""
        self.entries: dict[str, dict[tuple[object, ...], int]] = {}
        """Of each tensor that is stored to where data say, a number for each place that they name.
        """
        self.added: dict[tuple[str, Region], tuple[Tile, Copy]] = {}
        """What Copies have added to each region of a tensor: the sum as a tile, the last Copy."""
        self.turns: dict[tuple[str, Region], list[int]] = {}
        """For each region that Copies add to at turns, in their order: the first coordinate of the
        thread block."""
        self.partial = False
        """Whether only some of the thread blocks run, so that turns are left out."""
        self.elements: dict[str, list[tuple[Value, ...]]] = {}
        self.assumed: dict[str, int] = {}  # elements of the caller's tensors, by how they are read
        self._changed: dict[int, list[Key | None]] = {}
        self._extents: dict[Expr, int] = {}
        self._identities: dict[Expr, str] = {}

    def begin(self, block: Mapping[str, int]) -> None:
        """Start a thread block at these coordinates of the grid, with empty buffers."""
        self.env = {**self.base(), **block}
        self.cells, self.pieces, self.loops = {}, {}, []
        self.varying, self.elements, self.assumed = set(), {}, {}
        self.left_out = False

    def base(self) -> dict[str, Value]:
        """The scalars that are the same in every block."""
        return {**CONSTANTS, **self.dims, **self.program.params}

    # --- findings -------------------------------------------------------------------------

    def report(self, code: str, message: str, span: Span, **more: Any) -> None:
        """Record a finding, once per code and place, with the problem it showed on."""
        if (code, span) not in self.findings:
            self.findings[code, span] = Diagnostic(code, message, span, **more)

    def halt(self, code: str, message: str, span: Span, **more: Any) -> Halt:
        """Record a finding and raise Halt, because the block cannot continue."""
        self.report(code, message, span, **more)
        return Halt()

    def problem(self) -> str:
        """The current problem and thread block in words, with the data that the checker assumed."""
        own = (d for d in self.program.dims if d not in PREDEFINED_DIMS)
        sizes = [f"{d} = {self.dims[d]}" for d in ("q_len", "kv_len", *own) if d in self.dims]
        grid = [a.name.id for a in self.program.grid.axes]
        loops = [f.var.id for f in self.loops]
        present = [f"{name} = {self.env[name]}" for name in (*grid, *loops) if name in self.env]
        last = list(self.assumed.items())[-ASSUMED:]
        return ", ".join(sizes + present + [f"{name} = {value}" for name, value in last])

    # --- scalars --------------------------------------------------------------------------

    def scalar(self, expr: Expr) -> Value:
        """The value of a scalar expression in the present block."""
        try:
            return evaluate(expr, self.env, self._element)
        except NotScalar as problem:
            span = problem.culprit.span
            raise self.halt("FW306", problem.why, span, label=self.problem()) from None

    def _element(self, expr: Index, index: tuple[Value, ...]) -> Value:
        tensor = self.program.tensors[expr.tensor.id]
        self.same_rank(expr, tensor)
        places = [
            self.place(tensor, axis, value, arg)
            for axis, value, arg in zip(tensor.axes, index, expr.args, strict=True)
        ]
        known = [place for place in places if place is not None]
        self.elements.setdefault(tensor.name, []).append(index)
        if self.math is not None:
            return self.math.element(tensor, known, self.offset(tensor))
        if tensor.name in self.told and self.world is not None and len(known) == len(index):
            shape = tuple(self.extent(axis.size) for axis in tensor.axes)
            value = self.world.data(tensor, tuple(known), shape)
            self.assumed[f"{tensor.name}[{', '.join(map(str, known))}]"] = value
            return value
        return Unknown(f"{tensor.name}[{', '.join(map(str, index))}]")

    def same_rank(self, expr: Index, tensor: Tensor) -> None:
        """Halt with FW305 unless there is an index for each axis of the tensor."""
        if len(expr.args) != len(tensor.axes):
            count = len(expr.args)
            text = f"`{tensor.name}` has {len(tensor.axes)} axes, here are {count} indices"
            raise self.halt("FW305", text, expr.span)

    def place(self, tensor: Tensor, axis: TensorAxis, value: Value, arg: Expr) -> int | None:
        """A scalar index as a whole number inside its axis; None if it depends on tensor data."""
        if isinstance(value, Unknown):
            return None
        place, extent = whole(value), self.extent(axis.size)
        if place is None:
            text = f"an index must be a whole number, here it is {value}"
            fix = rounded_down(arg)
            raise self.halt("FW306", text, arg.span, fix=fix, label=self.problem())
        if not 0 <= place < extent:
            text = f"index {place} is outside axis {axis.label} of `{tensor.name}`, {extent} long"
            where = self.program.definitions(arg)
            raise self.halt("FW605", text, arg.span, label=self.problem(), secondary=where)
        return place

    def peek(self, expr: Index, index: tuple[Value, ...]) -> Value:
        """The element of a tensor, for checks: unlike a read by the program, it is not recorded."""
        tensor = self.program.tensors[expr.tensor.id]
        shape = [self.extent(axis.size) for axis in tensor.axes]
        places = [None if isinstance(value, Unknown) else whole(value) for value in index]
        inside = len(places) == len(shape) and all(
            p is not None and 0 <= p < n for p, n in zip(places, shape, strict=True)
        )
        if not inside or (self.math is None and tensor.name not in self.told):
            return Unknown(expr.tensor.id)
        return self._element(expr, index)

    def extent(self, size: Expr) -> int:
        """The length of an axis in the present problem."""
        if size not in self._extents:
            self._extents[size] = whole(evaluate(size, self.base())) or 0
        return self._extents[size]

    def identity(self, size: Expr) -> str:
        """The identity of an axis: the value of a fixed size, the name of any other."""
        if size not in self._identities:
            try:
                self._identities[size] = str(evaluate(size, self.program.params))
            except NotScalar:
                self._identities[size] = format_expr(size)
        return self._identities[size]

    def offset(self, tensor: Tensor) -> int | None:
        """The offset of a view in the caller's memory, in elements."""
        if tensor.offset is None:
            return None
        value = self.scalar(tensor.offset)
        place = None if isinstance(value, Unknown) else whole(value)
        if place is None:
            text = f"an offset is a whole number of elements, here it is {value}"
            raise self.halt("FW306", text, tensor.offset.span)
        return place

    # --- buffers --------------------------------------------------------------------------

    def read(self, key: Key, name: Name, stmt: Statement) -> Tile:
        """The tile in a buffer; FW403 if it has no value."""
        cell = self.cells.get(key)
        for piece in self.pieces.get(key, {}).values():
            piece.read = True
        if key in self.pieces:
            self._whole_rows(key, name, stmt)
        if cell is None:
            text = f"`{name.id}` has no value yet"
            for low, high in self._unfilled(key):
                text = f"columns {low}..{high - 1} of `{name.id}` have no value yet"
            verb = "Copy it there" if key[1] == "shared" else "Copy or Compute it"
            raise self.halt(
                "FW403",
                text,
                name.span,
                help=f"{verb} before this line",
                label=self.problem(),
                secondary=self.program.guards_of(key),
            )
        cell.read = True
        cell.served = cell.served or not self._own(key, stmt)
        return cell.tile

    def _own(self, key: Key, stmt: Statement) -> bool:
        """Whether a statement that reads a buffer only updates that same buffer."""
        if not isinstance(stmt, Compute):
            return isinstance(stmt, Reshape) and stmt.target is None
        if id(stmt) not in self._changed:
            changed = [stmt.target, *stmt.state[1:], *stmt.rescale]
            if stmt.operation == "mask":
                changed += [a for a in stmt.args if isinstance(a, Name)]
            keys = [self.program.tile(name) for name in changed if name is not None]
            self._changed[id(stmt)] = keys
        return key in self._changed[id(stmt)]

    def write(self, key: Key, tile: Tile, stmt: Statement, dtype: str | None = None) -> None:
        """Put a tile into a buffer, rounded to the buffer's element type."""
        old = self.cells.get(key)
        for lost in (old, *self.pieces.pop(key, {}).values()):
            self._overwrite(key, lost, tile, stmt)
        fresh = tile.start or isinstance(stmt, Copy)
        fresh = fresh or (isinstance(stmt, Compute) and stmt.operation == "gemm")
        rounded = self._rounded(tile, dtype or self.program.buffers[key].dtype)
        self.cells[key] = Cell(rounded, stmt, served=old is not None and old.served and not fresh)

    def write_columns(self, key: Key, column: int, tile: Tile, stmt: Statement) -> None:
        """Put a tile into some columns of a buffer, which is complete once all are filled."""
        before = self.cells.pop(key, None)
        if key not in self.pieces:
            self._overwrite(key, before, tile, stmt)
        pieces = self.pieces.setdefault(key, {})
        for at, old in list(pieces.items()):
            if at < column + tile.shape[1] and column < at + old.tile.shape[1]:
                self._overwrite(key, pieces.pop(at), tile, stmt)
        buffer = self.program.buffers[key]
        pieces[column] = Cell(self._rounded(tile, buffer.dtype), stmt)
        whole_tile = side_by_side({at: p.tile for at, p in pieces.items()}, key[0], buffer.shape)
        if whole_tile is not None:
            if self.math is not None:
                data = self.math.side_by_side([pieces[at].tile.data for at in sorted(pieces)])
                whole_tile = replace(whole_tile, data=data)
            self.cells[key] = Cell(whole_tile, stmt)

    def _overwrite(self, key: Key, old: Cell | None, tile: Tile, stmt: Statement) -> None:
        """Report FW602 if a value is lost that was never read."""
        if old is not None and not (old.read or old.skipped or self._started_anew(old, tile)):
            where = (Label(old.writer.span, "this value was never read"),)
            hint = "move this statement below the last use of the value, or accumulate"
            text = f"`{key[0]}` in {key[1]} is overwritten before its value is used"
            self.report("FW602", text, stmt.span, secondary=where, help=hint, label=self.problem())

    def _rounded(self, tile: Tile, dtype: str) -> Tile:
        if tile.dtype == dtype:
            return tile
        data = self.math.round(tile.data, dtype) if self.math is not None else None
        return replace(tile, dtype=dtype, data=data)

    def _started_anew(self, old: Cell, tile: Tile) -> bool:
        """Whether a constant tile replaces an old value that has already been used elsewhere."""
        maximum = old.tile.kind is not None and old.tile.kind.name == "max"
        return old.served and (tile.start or maximum)

    def _unfilled(self, key: Key) -> list[tuple[int, int]]:
        """The columns without a value in a buffer that is filled in parts."""
        pieces = {at: piece.tile for at, piece in self.pieces.get(key, {}).items()}
        return unfilled(pieces, self.program.buffers[key].shape[1]) if pieces else []

    def _whole_rows(self, key: Key, name: Name, stmt: Statement) -> None:
        """Report FW603 if tiles side by side have different rows or heads."""
        tiles = [piece.tile for piece in self.pieces[key].values()]
        self.same_place(tiles, stmt)
        first = tiles[0].axes[0]
        for rows in (tile.axes[0] for tile in tiles):
            if first is not None and rows is not None and rows != first:
                self.disagree(name.span, first, rows)
                raise Halt

    # --- positions that have to agree ------------------------------------------------------

    def disagree(self, span: Span, have: Where, want: Where, **more: Any) -> None:
        """Report FW603 for positions that differ and should be equal."""
        text = f"positions {have} of `{have.tensor}` are combined with {want} of `{want.tensor}`"
        filled = (self.program.dest(have.copy), self.program.dest(want.copy))
        where = origins(have, want) + self.program.guards_of(*filled)
        self.report("FW603", text, span, secondary=where, label=self.problem(), **more)

    def same_place(self, tiles: list[Tile], stmt: Statement) -> dict[str, Place]:
        """The fixed coordinates (head, batch) of what is combined; they must agree."""
        at: dict[str, Place] = {}
        for tile in tiles:
            for dim, place in tile.at.items():
                other = at.setdefault(dim, place)
                parts = dim in self.program.parts_read and not (place.chosen or other.chosen)
                if other.value != place.value and not parts:
                    text = (
                        f"`{other.tensor}` has index {other.value} on {dim}, "
                        f"`{place.tensor}` has {place.value}"
                    )
                    where = tuple(
                        Label(p.copy.span, f"`{p.tensor}` comes from here") for p in (other, place)
                    )
                    self.report("FW603", text, stmt.span, secondary=where, label=self.problem())
        return at
