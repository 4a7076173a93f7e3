"""The machine that TL is written for: thread blocks one after another, statements in order.

It runs a program on what is known of its tiles (tiles.py), and on their numbers too when it is
given an arithmetic (interpret.py). The checker runs it on a few small problems without numbers;
that is how it sees hazards, missed blocks and wrong coordinates: by their happening.
"""

# ruff: noqa: D102  Arithmetic's methods are the operations of the machine, by their names.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import (
    Compute,
    Copy,
    Expr,
    For,
    If,
    Index,
    Let,
    Name,
    Reshape,
    Span,
    Statement,
    expressions,
    statements,
)
from flashwright.program.fixes import rounded_down
from flashwright.program.program import Key, Program, Tensor, TensorAxis
from flashwright.program.scalars import NotScalar, Unknown, Value, evaluate, whole
from flashwright.program.vocabulary import CONSTANTS, PREDEFINED_DIMS
from flashwright.semantics.tiles import Cell, Tile, side_by_side, unfilled
from flashwright.semantics.worlds import World, deciding, placing

Region = tuple[tuple[int, int], ...]
"""For each axis of a tensor: start and length (before clipping to the tensor)."""
ASSUMED = 3
"""Assumed elements of tensors that a finding names: the last ones read."""


class Arithmetic(Protocol):
    """The numbers behind the tiles. Arrays are whatever the arithmetic makes them."""

    def load(self, tensor: Tensor, region: Region, offset: int | None, tile_rank: int) -> Any: ...
    def store(
        self, tensor: Tensor, region: Region, offset: int | None, data: Any, shape: Sequence[int]
    ) -> None: ...
    def element(self, tensor: Tensor, index: Sequence[int], offset: int | None) -> Value: ...
    def gather(self, tensor: Tensor, index: Sequence[Any], offset: int | None) -> Any: ...
    def apply(self, op: str, args: Sequence[Any]) -> Any: ...
    def reduce(self, op: str, data: Any) -> Any: ...
    def gemm(self, left: Any, right: Any, transposed: tuple[bool, bool]) -> Any: ...
    def positions(self, start: int, size: int, axis: int, rank: int) -> Any: ...
    def turn(self, data: Any, axis: int) -> Any: ...
    def side_by_side(self, pieces: Sequence[Any]) -> Any: ...
    def fill(self, data: Any, shape: Sequence[int]) -> Any: ...
    def round(self, data: Any, dtype: str) -> Any: ...


class Halt(Exception):
    """This thread block cannot go on; the reason has been reported."""


class GaveUp(Exception):
    """More steps than the machine was given."""


Observer = Callable[[Statement, "Machine"], None]


class Machine:
    """Runs one program on one problem. Findings are collected in `findings`, first ones first."""

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, int],
        arithmetic: Arithmetic | None = None,
        observe: Observer | None = None,
        steps: int | None = None,
        world: World | None = None,
    ) -> None:
        from flashwright.semantics.compute import Computer  # parts of the machine, by statement
        from flashwright.semantics.copies import Copies

        self.program = program
        self.dims = dict(dims)
        self.math = arithmetic
        self.observe = observe
        self.steps = steps
        self.world = world
        self.told = deciding(program) - placing(program) if arithmetic is None else frozenset()
        self.decided = 0
        self.left_out = False
        self.findings: dict[tuple[str, Span | None], Diagnostic] = {}
        self.cells: dict[Key, Cell] = {}
        self.pieces: dict[Key, dict[int, Cell]] = {}  # of tiles filled a few columns at a time
        self.env: dict[str, Value] = {}
        self.loops: list[For] = []
        self.varying: set[str] = set()
        self.stores: list[tuple[str, Region, Copy]] = []
        self.elements: dict[str, list[tuple[Value, ...]]] = {}
        self.assumed: dict[str, int] = {}  # elements of the caller's tensors, by how they are read
        self.computer = Computer(self)
        self.copies = Copies(self)
        self._operand_dtype = operand_dtypes(program)
        self._reads: dict[int, set[Key]] = {}
        self._walkers: dict[tuple[str, int], For | None] = {}
        self._changed: dict[int, list[Key | None]] = {}

    # --- running --------------------------------------------------------------------------

    def blocks(self) -> Iterator[dict[str, int]]:
        """The coordinates of all thread blocks, the last axis of the grid outermost."""
        base = self._base()
        yield from self._axis(len(self.program.grid.axes) - 1, base, {})

    def _base(self) -> dict[str, Value]:
        return {**CONSTANTS, **self.dims, **self.program.params}

    def _axis(
        self, depth: int, base: dict[str, Value], chosen: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        if depth < 0:
            yield dict(reversed(chosen.items()))
            return
        axis = self.program.grid.axes[depth]
        self.env = {**base, **chosen}
        try:
            low, high = self._bounds(axis.low, axis.high)
        except Halt:
            return
        for value in range(low, high):
            yield from self._axis(depth - 1, base, {**chosen, axis.name.id: value})

    def run(self) -> None:
        """Every thread block of the grid."""
        for block in self.blocks():
            self._step()
            self.run_block(block)

    def run_block(self, block: Mapping[str, int]) -> None:
        """One thread block, from empty buffers."""
        self.env = {**self._base(), **block}
        self.cells, self.loops, self.varying, self.elements = {}, [], set(), {}
        self.pieces, self.assumed = {}, {}
        self.left_out = False
        try:
            self._body(self.program.tree.body)
        except Halt:
            return
        self._walked_whole()

    def _body(self, body: tuple[Statement, ...]) -> None:
        for stmt in body:
            self._statement(stmt)

    def _statement(self, stmt: Statement) -> None:
        self._step()
        match stmt:
            case For():
                self._for(stmt)
            case If(cond):
                taken = self._holds(cond)
                passed = stmt.orelse if taken else stmt.then
                self.left_out |= bool(passed) and self.program.chosen(cond)
                self._skip(passed)
                self._body(stmt.then if taken else stmt.orelse)
            case Let(name, value):
                self.env[name.id] = self.scalar(value)
                if self.loops:
                    self.varying.add(name.id)
            case Copy():
                self.copies.copy(stmt)
            case Compute():
                self.computer.compute(stmt)
            case Reshape():
                self._reshape(stmt)
        if self.observe is not None:
            self.observe(stmt, self)

    def _holds(self, cond: Expr) -> bool:
        """Whether a condition is true; one on unknown data is as the world says."""
        value = self.scalar(cond)
        if not isinstance(value, Unknown):
            return bool(value)
        self.decided += 1
        return self.world is None or not self.world.alternates or self.decided % 2 == 0

    def _step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise GaveUp

    def _for(self, stmt: For) -> None:
        low, high = self._bounds(stmt.low, stmt.high)
        if low >= high:
            self._skip(stmt.body)
        self.loops.append(stmt)
        self.varying.add(stmt.var.id)
        for value in range(low, high):
            self._step()
            self.env[stmt.var.id] = value
            self._body(stmt.body)
        self.env.pop(stmt.var.id, None)
        self.loops.pop()

    def _skip(self, body: tuple[Statement, ...]) -> None:
        """Statements that do not run: what they would have read may stay unread."""
        for key in self._read_in(body):
            if key in self.cells:
                self.cells[key].skipped = True

    def _read_in(self, body: tuple[Statement, ...]) -> set[Key]:
        if id(body) not in self._reads:
            self._reads[id(body)] = {k for s in statements(body) for k in self.program.reads(s)}
        return self._reads[id(body)]

    def _bounds(self, low: Expr, high: Expr) -> tuple[int, int]:
        start, stop = self.scalar(low), self.scalar(high)
        if isinstance(start, Unknown) or isinstance(stop, Unknown):
            return 0, 2  # a tensor decides; two rounds show what one after another does
        first = whole(start)
        if first is None:
            text = f"the first value must be a whole number, here it is {start}"
            fix = rounded_down(low)
            raise self.halt("FW306", text, low.span, fix=fix, label=self.problem())
        if not math.isfinite(stop):
            text = f"the end must be a number, here it is {stop}"
            raise self.halt("FW306", text, high.span, label=self.problem())
        return first, math.ceil(stop)

    # --- findings -------------------------------------------------------------------------

    def report(self, code: str, message: str, span: Span, **more: Any) -> None:
        """Record a finding, once per code and place, with the problem it showed on."""
        if (code, span) not in self.findings:
            self.findings[code, span] = Diagnostic(code, message, span, **more)

    def halt(self, code: str, message: str, span: Span, **more: Any) -> Halt:
        """Record a finding after which this block makes no sense."""
        self.report(code, message, span, **more)
        return Halt()

    def problem(self) -> str:
        """The present problem and thread block in words, with all that was assumed."""
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
        """A scalar index as a whole number inside its axis; None where a tensor decides it."""
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
        """An element that a question is about, and not the program: nothing is recorded."""
        tensor = self.program.tensors[expr.tensor.id]
        shape = [self.extent(axis.size) for axis in tensor.axes]
        places = [None if isinstance(value, Unknown) else whole(value) for value in index]
        inside = len(places) == len(shape) and all(
            p is not None and 0 <= p < n for p, n in zip(places, shape, strict=True)
        )
        if not inside or (self.math is None and tensor.name not in self.told):
            return Unknown(expr.tensor.id)
        return self._element(expr, index)

    def _walked_whole(self) -> None:
        """An axis of an index tensor whose length is the bound of a loop that walks along it is
        walked to its end. (Any other table may be longer than what is read of it.)"""
        for name, reads in self.elements.items():
            for position, axis in enumerate(self.program.tensors[name].axes):
                if (name, position) not in self._walkers:
                    self._walkers[name, position] = self._walker(name, position, axis.size)
                loop = self._walkers[name, position]
                if loop is None:
                    continue
                seen = {r[position] for r in reads if not isinstance(r[position], Unknown)}
                extent = self.extent(axis.size)
                missed = [p for p in range(extent) if p not in seen]
                if len(seen) > 1 and missed:
                    text = f"this loop reads {len(seen)} of the {extent} elements"
                    text += f" on axis {axis.label} of `{name}`"
                    self.report("FW604", text, loop.span, label=self.problem())

    def _walker(self, name: str, position: int, size: Expr) -> For | None:
        """The loop over an axis of an index tensor, if its bounds speak of the axis's length."""
        length = {e.id for e in expressions(size) if isinstance(e, Name)} & set(self.program.params)
        for stmt in statements(self.program.tree.body):
            if not isinstance(stmt, For):
                continue
            bounds = [*self.program.spelt_out(stmt.low), *self.program.spelt_out(stmt.high)]
            inner = [e for s in statements(stmt.body) for e in expressions(s)]
            along = (
                stmt.var in self.program.spelt_out(e.args[position])
                for e in inner
                if isinstance(e, Index) and e.tensor.id == name and position < len(e.args)
            )
            if any(Name(n) in bounds for n in length) and any(along):
                return stmt
        return None

    def extent(self, size: Expr) -> int:
        """The length of an axis in the present problem."""
        value = whole(evaluate(size, self._base()))
        return 0 if value is None else value

    def identity(self, size: Expr) -> str:
        """What tells axes apart: a size that is fixed by its value, another by its name."""
        try:
            return str(evaluate(size, self.program.params))
        except NotScalar:
            return format_expr(size)

    def offset(self, tensor: Tensor) -> int | None:
        """How far into the caller's memory a view begins."""
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
        """The tile in a buffer; it must have a value."""
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
        """Whether a statement that reads a buffer changes nothing but that buffer with it."""
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
        """Put a tile into some columns of a buffer, which has a value once all are filled."""
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
        """Whether a tile begins what the old value, which has done its work, was the end of."""
        maximum = old.tile.kind is not None and old.tile.kind.name == "max"
        return old.served and (tile.start or maximum)

    def _unfilled(self, key: Key) -> list[tuple[int, int]]:
        """The columns without a value of a buffer that is filled a few columns at a time."""
        pieces = {at: piece.tile for at, piece in self.pieces.get(key, {}).items()}
        return unfilled(pieces, self.program.buffers[key].shape[1]) if pieces else []

    def _whole_rows(self, key: Key, name: Name, stmt: Statement) -> None:
        """Report FW603 where tiles side by side are not the same rows of the same heads."""
        tiles = [piece.tile for piece in self.pieces[key].values()]
        self.computer.values.same_place(tiles, stmt)
        first = tiles[0].axes[0]
        for rows in (tile.axes[0] for tile in tiles):
            if first is not None and rows is not None and rows != first:
                self.computer.values.disagree(name.span, first, rows)
                raise Halt

    # --- Reshape --------------------------------------------------------------------------

    def _reshape(self, stmt: Reshape) -> None:
        key = self.program.tile(stmt.name)
        assert key is not None
        tile = self.read(key, stmt.name, stmt)
        if tile.layout != "C":
            now = "an operand already" if tile.layout == "A" else "not the result of a GEMM"
            self.report("FW502", f"`{stmt.name.id}` is {now}", stmt.name.span)
        dtype = stmt.dtype.id if stmt.dtype else self._operand_dtype.get(id(stmt), tile.dtype)
        target = self.program.tile(stmt.target) if stmt.target else key
        assert target is not None
        self.write(target, replace(tile, layout="A"), stmt, dtype)


def operand_dtypes(program: Program) -> dict[int, str]:
    """For each Reshape (by id) the element type of the GEMM that takes its tile next."""
    found: dict[int, str] = {}
    flat = list(statements(program.tree.body))
    for position, stmt in enumerate(flat):
        if not isinstance(stmt, Reshape):
            continue
        name = program.tile(stmt.target or stmt.name)
        for later in flat[position + 1 :]:
            if isinstance(later, Compute) and len(later.args) == 2 and later.verb is not None:
                left, right = later.args
                if isinstance(left, Name) and program.tile(left) == name:
                    other = getattr(right, "operand", right)
                    key = program.tile(other) if isinstance(other, Name) else None
                    if key is not None:
                        found[id(stmt)] = program.buffers[key].dtype
                        break
    return found
