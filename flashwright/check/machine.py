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

from flashwright.check.program import Key, Program, Tensor
from flashwright.check.scalars import NotScalar, Scalar, Unknown, Value, evaluate, whole
from flashwright.check.tiles import Cell, Place, Tile, Where
from flashwright.check.vocabulary import CONSTANTS
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
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

Region = tuple[tuple[int, int], ...]
"""For each axis of a tensor: start and length (before clipping to the tensor)."""


class Arithmetic(Protocol):
    """The numbers behind the tiles. Arrays are whatever the arithmetic makes them."""

    def load(self, tensor: Tensor, region: Region, offset: int | None, tile_rank: int) -> Any: ...
    def store(
        self, tensor: Tensor, region: Region, offset: int | None, data: Any, shape: Sequence[int]
    ) -> None: ...
    def element(self, tensor: Tensor, index: Sequence[int], offset: int | None) -> Value: ...
    def apply(self, op: str, args: Sequence[Any]) -> Any: ...
    def reduce(self, op: str, data: Any) -> Any: ...
    def gemm(self, left: Any, right: Any, transposed: tuple[bool, bool]) -> Any: ...
    def positions(self, start: int, size: int, axis: int, rank: int) -> Any: ...
    def turn(self, data: Any, axis: int) -> Any: ...
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
    ) -> None:
        from flashwright.check.compute import Computer  # the two halves of one machine

        self.program = program
        self.dims = dict(dims)
        self.math = arithmetic
        self.observe = observe
        self.steps = steps
        self.findings: dict[tuple[str, Span | None], Diagnostic] = {}
        self.cells: dict[Key, Cell] = {}
        self.env: dict[str, Value] = {}
        self.loops: list[For] = []
        self.varying: set[str] = set()
        self.stores: list[tuple[str, Region, Copy]] = []
        self.elements: dict[str, list[tuple[Value, ...]]] = {}
        self.computer = Computer(self)
        self._operand_dtype = operand_dtypes(program)

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
                self._body(stmt.then if self.scalar(cond) else stmt.orelse)
            case Let(name, value):
                self.env[name.id] = self.scalar(value)
                if self.loops:
                    self.varying.add(name.id)
            case Copy():
                self._copy(stmt)
            case Compute():
                self.computer.compute(stmt)
            case Reshape():
                self._reshape(stmt)
        if self.observe is not None:
            self.observe(stmt, self)

    def _step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise GaveUp

    def _for(self, stmt: For) -> None:
        low, high = self._bounds(stmt.low, stmt.high)
        self.loops.append(stmt)
        self.varying.add(stmt.var.id)
        for value in range(low, high):
            self._step()
            self.env[stmt.var.id] = value
            self._body(stmt.body)
        self.env.pop(stmt.var.id, None)
        self.loops.pop()

    def _bounds(self, low: Expr, high: Expr) -> tuple[int, int]:
        start, stop = self.scalar(low), self.scalar(high)
        if isinstance(start, Unknown) or isinstance(stop, Unknown):
            return 0, 2  # a tensor decides; two rounds show what one after another does
        first = whole(start)
        if first is None:
            text = f"the first value must be a whole number, here it is {start}"
            raise self.halt("FW306", text, low.span, fix=_floor(low))
        if not math.isfinite(stop):
            raise self.halt("FW306", f"the end must be a number, here it is {stop}", high.span)
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
        """The present problem and thread block in words, for messages."""
        sizes = [f"{d} = {self.dims[d]}" for d in ("q_len", "kv_len") if d in self.dims]
        axes = [f"{a.name.id} = {self.env.get(a.name.id)}" for a in self.program.grid.axes]
        loops = [f"{f.var.id} = {self.env.get(f.var.id)}" for f in self.loops]
        return ", ".join(sizes + axes + loops)

    # --- scalars --------------------------------------------------------------------------

    def scalar(self, expr: Expr) -> Value:
        """The value of a scalar expression in the present block."""
        try:
            return evaluate(expr, self.env, self._element)
        except NotScalar as problem:
            raise self.halt("FW306", problem.why, problem.culprit.span) from None

    def _element(self, expr: Index, index: tuple[Value, ...]) -> Value:
        tensor = self.program.tensors[expr.tensor.id]
        if len(index) != len(tensor.axes):
            text = f"`{tensor.name}` has {len(tensor.axes)} axes, here are {len(index)} indices"
            raise self.halt("FW305", text, expr.span)
        known: list[int] = []
        for axis, value, arg in zip(tensor.axes, index, expr.args, strict=True):
            if isinstance(value, Unknown):
                continue
            place, extent = whole(value), self._extent(axis.size)
            if place is None:
                text = f"an index must be a whole number, here it is {value}"
                raise self.halt("FW306", text, arg.span, fix=_floor(arg))
            if not 0 <= place < extent:
                text = (
                    f"index {place} is outside axis {axis.label} of `{tensor.name}`, {extent} long"
                )
                where = self.program.definitions(arg)
                raise self.halt("FW605", text, arg.span, label=self.problem(), secondary=where)
            known.append(place)
        self.elements.setdefault(tensor.name, []).append(index)
        if self.math is not None:
            return self.math.element(tensor, known, self._offset(tensor))
        return Unknown(f"{tensor.name}[{', '.join(map(str, index))}]")

    def _walked_whole(self) -> None:
        """An axis of fixed length that a block walks along in an index tensor is walked to its
        end. (A table sized at run time may be longer than what is in it.)"""
        for name, reads in self.elements.items():
            for position, axis in enumerate(self.program.tensors[name].axes):
                if not self._identity(axis.size).isdigit():
                    continue
                seen = {r[position] for r in reads if not isinstance(r[position], Unknown)}
                extent = self._extent(axis.size)
                missed = [p for p in range(extent) if p not in seen]
                if len(seen) > 1 and missed:
                    span, text = self._reader(name)
                    text += f" reads {len(seen)} of the {extent} elements on axis {axis.label}"
                    self.report("FW604", f"{text} of `{name}`", span, label=self.problem())

    def _reader(self, name: str) -> tuple[Span, str]:
        for stmt in statements(self.program.tree.body):
            if isinstance(stmt, For) and any(
                isinstance(e, Index) and e.tensor.id == name
                for inner in statements(stmt.body)
                for e in _indices(inner)
            ):
                return stmt.span, "this loop"
        return self.program.tensors[name].declared.span, "the program"

    def _extent(self, size: Expr) -> int:
        value = whole(evaluate(size, self._base()))
        return 0 if value is None else value

    def _offset(self, tensor: Tensor) -> int | None:
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
        if cell is None:
            text = f"`{name.id}` has no value yet"
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
        return cell.tile

    def write(self, key: Key, tile: Tile, stmt: Statement, dtype: str | None = None) -> None:
        """Put a tile into a buffer, rounded to the buffer's element type."""
        old = self.cells.get(key)
        if old is not None and not old.read:
            where = (Label(old.writer.span, "this value was never read"),)
            hint = "move this statement below the last use of the value, or accumulate"
            text = f"`{key[0]}` in {key[1]} is overwritten before its value is used"
            self.report("FW602", text, stmt.span, secondary=where, help=hint, label=self.problem())
        kept = dtype or self.program.buffers[key].dtype
        if tile.dtype != kept:
            data = self.math.round(tile.data, kept) if self.math is not None else None
            tile = replace(tile, dtype=kept, data=data)
        self.cells[key] = Cell(tile, stmt)

    # --- Copy -----------------------------------------------------------------------------

    def _copy(self, stmt: Copy) -> None:
        source, dest = self.program.source(stmt), self.program.dest(stmt)
        if stmt.source == "global":
            self.write(dest, self._load(stmt, self.program.tensors[source[0]], dest), stmt)
            return
        tile = self.read(source, stmt.name, stmt)
        if stmt.dest == "global":
            self._store(stmt, self.program.tensors[dest[0]], tile)
        else:
            self.write(dest, replace(tile, layout=None), stmt)

    def _load(self, stmt: Copy, tensor: Tensor, dest: Key) -> Tile:
        buffer = self.program.buffers[dest]
        places, at = self._places(stmt, tensor, buffer.shape)
        axes = places[len(places) - len(buffer.shape) :]
        data = None
        if self.math is not None:
            region = tuple((_known(p.start), p.size) for p in places)
            offset = self._offset(tensor)
            data = self.math.load(tensor, region, offset, len(buffer.shape))
        if tensor.offset is not None:
            here = Place(self.scalar(tensor.offset), tensor.name, stmt)
            at = {**at, f"offset of {tensor.name}": here}
        return Tile(buffer.shape, tuple(axes), tensor.dtype, at, data=data)

    def _places(
        self, stmt: Copy, tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[list[Where], dict[str, Place]]:
        """Where the tile lies on every axis of the tensor, and its fixed coordinates by axis."""
        coords = {c.axis.id: c for c in stmt.coords or ()}
        places: list[Where] = []
        at: dict[str, Place] = {}
        first_tiled = len(tensor.axes) - len(shape)
        for position, axis in enumerate(tensor.axes):
            tiled = position >= first_tiled
            size = shape[position - first_tiled] if tiled else 1
            coord = coords.get(axis.label)
            value = self.scalar(coord.value) if coord else 0
            span = coord.value.span if coord else stmt.span
            expr = coord.value if coord else None
            start = self._start(value, size, tensor, axis.label, axis.size, span, expr, stmt)
            dim = self._identity(axis.size)
            extent = self._extent(axis.size)
            chosen = expr is not None and self.program.chosen(expr)
            places.append(Where(dim, start, size, extent, axis.label, tensor.name, stmt, chosen))
            if not tiled:
                at[dim] = Place(start, tensor.name, stmt)
        return places, at

    def _start(
        self,
        value: Value,
        size: int,
        tensor: Tensor,
        label: str,
        length: Expr,
        span: Span,
        expr: Expr | None,
        stmt: Copy,
    ) -> int | Unknown:
        if isinstance(value, Unknown):
            return value
        start, extent = whole(value * size), self._extent(length)
        if start is None:
            text = f"axis {label} of `{tensor.name}`: {value} is no whole place"
            fix = _floor(expr) if expr is not None else None
            raise self.halt("FW306", text, span, fix=fix, label=self.problem())
        if not 0 <= start < extent:
            what = f"{start}..{start + size - 1}" if size > 1 else f"{start}"
            text = (
                f"this reaches {what} on axis {label} of `{tensor.name}`, which is "
                f"{format_expr(length)} = {extent} long"
            )
            where = self.program.guard(stmt)
            where += self.program.definitions(*([expr] if expr is not None else []))
            hint = _outside(value, size, length)
            raise self.halt("FW605", text, span, label=self.problem(), secondary=where, help=hint)
        return start

    def _identity(self, size: Expr) -> str:
        try:
            return str(evaluate(size, self.program.params))
        except NotScalar:
            return format_expr(size)

    def _store(self, stmt: Copy, tensor: Tensor, tile: Tile) -> None:
        self.computer.complete(tile, stmt)
        places, at = self._places(stmt, tensor, tile.shape)
        for have, want in zip(tile.axes, places[len(places) - len(tile.shape) :], strict=True):
            if have is not None and have != want:
                self._misplaced(stmt, f"{have}", f"{want}", have.copy)
        for dim, place in at.items():
            have2 = tile.at.get(dim)
            if have2 is not None and have2.value != place.value:
                self._misplaced(stmt, f"{dim} {have2.value}", f"{dim} {place.value}", have2.copy)
        region = tuple((_known(p.start), p.size) for p in places)
        self.stores.append((tensor.name, region, stmt))
        if self.math is not None:
            self.math.store(tensor, region, self._offset(tensor), tile.data, tile.shape)

    def _misplaced(self, stmt: Copy, have: str, want: str, origin: Copy) -> None:
        text = f"the tile holds {have}, but it is stored at {want}"
        where = (Label(origin.span, "its positions come from this Copy"),)
        self.report("FW603", text, stmt.span, secondary=where, label=self.problem())

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


def _known(start: int | Unknown) -> int:
    return 0 if isinstance(start, Unknown) else start


def _outside(value: Scalar, size: int, length: Expr) -> str | None:
    """What is usually behind a place outside its tensor."""
    if size > 1 and value >= size and whole(value / size) is not None:
        return "a coordinate on an axis of the tile counts tiles: `L = i`, not `L = i * BN`"
    if length == Name("kv_heads"):
        return "query heads share kv heads: `let kv_head = floor(head_idx * kv_heads / heads)`"
    return None


def _floor(expr: Expr) -> Fix:
    edits = (
        Edit(expr.span.start, expr.span.start, "floor("),
        Edit(expr.span.end, expr.span.end, ")"),
    )
    return Fix(f"round it down: `floor({format_expr(expr)})`", edits)


def _indices(stmt: Statement) -> Iterator[Index]:
    return (e for e in expressions(stmt) if isinstance(e, Index))


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
