"""A checked program: the tree with its names resolved, for the interpreter and the translator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from flashwright.lang.diagnostic import Label
from flashwright.lang.nodes import (
    Allocate,
    Axis,
    Binary,
    Call,
    Compute,
    Coord,
    Copy,
    Expr,
    For,
    Grid,
    If,
    Index,
    Let,
    Name,
    Num,
    Param,
    Reshape,
    Side,
    Space,
    Statement,
    Tree,
    expressions,
    statements,
    value_names,
)
from flashwright.program.scalars import Scalar, evaluate, whole
from flashwright.program.vocabulary import (
    CONSTANTS,
    DTYPES,
    PAGE,
    POSITIONS,
    PREDEFINED_DIMS,
    SCHEDULE_PARAMS,
    split,
)

Key = tuple[str, Space]
LENGTH_DIMS = ("q_len", "kv_len")
_QUERIES = Name("q_len")


@dataclass(frozen=True)
class TensorAxis:
    """One axis of a tensor in global memory: its letter in coordinates, and its size."""

    label: str
    size: Expr


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory, as the kernel's caller passes it."""

    name: str
    axes: tuple[TensorAxis, ...]
    dtype: str
    offset: Expr | None
    declared: Allocate
    read: bool
    written: bool
    added: bool = False
    """Whether the kernel adds to it (`and accumulate`)."""

    @property
    def kept(self) -> bool:
        """Whether it is the caller's, and keeps what is in it where the kernel stores nothing."""
        return self.written and self.declared.in_place


@dataclass(frozen=True)
class Buffer:
    """A tile in shared memory or registers."""

    name: str
    space: Space
    shape: tuple[int, ...]
    dtype: str
    stages: int
    declared: Allocate | Copy | Reshape

    @property
    def bytes(self) -> int:
        """The bytes of one stage."""
        size = DTYPES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size

    @property
    def along(self) -> Side | None:
        """The axis of tiles that a vector lies along, if its Allocate names it."""
        return self.declared.along if isinstance(self.declared, Allocate) else None

    def named_size(self, axis: int) -> Name | None:
        """The name that the size of an axis was declared with; None if it was not a plain name."""
        sizes = None if isinstance(self.declared, Reshape) else self.declared.shape
        if sizes is None:
            return None
        found = sizes[axis]
        expr = found.size if isinstance(found, Axis) else found
        return expr if isinstance(expr, Name) else None


@dataclass(frozen=True)
class Schedule:
    """The schedule of a warp-specialized kernel (producer warp, consumer warpgroups). The result of
    a program does not depend on it."""

    overlap: bool
    """Whether the GEMM of the next scores overlaps the softmax of this iteration."""
    ping_pong: bool
    """Whether consumer warpgroups run in ping-pong: one multiplies while another does softmax."""
    split_masked: bool
    """Whether masked and unmasked iterations are split into separate loops."""
    persistent: bool
    """Whether the kernel is persistent: one thread block per SM that processes many tiles."""


@dataclass(frozen=True)
class Program:
    """Code-level TL in which every name, size and shape is known."""

    tree: Tree
    params: Mapping[str, Scalar]
    dims: tuple[str, ...]
    grid: Grid
    tensors: Mapping[str, Tensor]
    buffers: Mapping[Key, Buffer]

    @property
    def warps(self) -> int:
        """The number of warps that compute (the reserved parameter Warps; 4 by default)."""
        return int(self.params.get("Warps", 4))

    @property
    def schedule(self) -> Schedule:
        """The schedule that the params of SCHEDULE_PARAMS select; each is on by default."""
        return Schedule(*(bool(self.params.get(name, 1)) for name in SCHEDULE_PARAMS))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the caller gives: those that the kernel reads, and those that it
        changes in place."""
        return tuple(t for t in self.tensors.values() if t.read or t.kept)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel writes."""
        return tuple(t for t in self.tensors.values() if t.written)

    @cached_property
    def outer_loops(self) -> tuple[For, ...]:
        """The loops of a thread block that are in no other, those under a condition included."""
        return tuple(_outer_loops(self.tree.body))

    @cached_property
    def parts_stored(self) -> frozenset[str]:
        """The program's own dims that count parts of a sum: the kernel stores one at each index of
        an axis that no input has."""
        return self._own_axes(self.outputs) - self._own_axes(self.inputs)

    @cached_property
    def parts_read(self) -> frozenset[str]:
        """The program's own dims that no output has: what a kernel reads along them may be put
        together."""
        return self._own_axes(self.inputs) - self._own_axes(self.outputs)

    def _own_axes(self, tensors: tuple[Tensor, ...]) -> frozenset[str]:
        sizes = {axis.size for tensor in tensors for axis in tensor.axes}
        own = (dim for dim in self.dims if dim not in PREDEFINED_DIMS)
        return frozenset(dim for dim in own if Name(dim) in sizes)

    @cached_property
    def ranges(self) -> tuple[tuple[Copy, Coord, Expr], ...]:
        """The coordinates that name a range, each with its Copy and the length of its axis. Of rows
        in pages that is the length of the pages' axis; those that a table names are together as
        long as the longest range, except of an axis of queries, of which rows are gathered."""
        found = []
        for copy in (s for s in statements(self.tree.body) if isinstance(s, Copy)):
            pages, paged = self.page_axis(copy), self.paged(copy)
            for coord in (c for c in copy.coords or () if c.within is not None):
                axes = self.outer(copy).axes
                length = next(a.size for a in axes if a.label == coord.axis.id)
                if paged:
                    length = pages.size if pages is not None else Name("kv_len")
                    if pages is None and self._gathers(copy):
                        length = _QUERIES
                found.append((copy, coord, length))
        return tuple(found)

    def _gathers(self, copy: Copy) -> bool:
        """Whether a table names queries, and the tile has their rows."""
        sizes = {axis.label: axis.size for axis in self.outer(copy).axes}
        naming = (c for c in copy.coords or () if Name(PAGE) in expressions(c.value))
        return any(sizes[c.axis.id] == _QUERIES for c in naming)

    def outer(self, copy: Copy) -> Tensor:
        """The tensor in global memory that a Copy loads from or stores to."""
        key = self.source(copy) if copy.source == "global" else self.dest(copy)
        return self.tensors[key[0]]

    def paged(self, copy: Copy) -> bool:
        """Whether the rows of a tile lie in pages: a coordinate depends on the page."""
        return any(e == Name(PAGE) for c in copy.coords or () for e in expressions(c.value))

    def page_axis(self, copy: Copy) -> TensorAxis | None:
        """The axis that the pages of a tile's rows lie along, in their order: its coordinate is
        `page_idx`. None if rows do not lie in pages, or if a table names the pages."""
        naming = [c for c in copy.coords or () if Name(PAGE) in expressions(c.value)]
        if [c.value for c in naming] != [Name(PAGE)]:
            return None
        return next((a for a in self.outer(copy).axes if a.label == naming[0].axis.id), None)

    def query_rows(self, rows: int) -> tuple[Copy, Coord] | None:
        """A Copy of a tile with so many rows of queries, and the coordinate of its rows, if all
        such Copies of a thread block have the same one."""
        found: list[tuple[Copy, Coord]] = []
        for copy in (s for s in statements(self.tree.body) if isinstance(s, Copy)):
            if "global" not in (copy.source, copy.dest) or copy.index:
                continue
            shape, axes = self.moved(copy), self.outer(copy).axes
            axis = axes[-len(shape)]
            coord = next((c for c in copy.coords or () if c.axis.id == axis.label), None)
            if coord is None or shape[0] != rows:
                continue
            if Name("q_len") in expressions(self.positions_of(axis.size, coord)):
                found.append((copy, coord))
        places = {(c.value, c.in_elements, c.within) for _, c in found}
        return found[0] if len(places) == 1 else None

    def tiled(self, copy: Copy) -> Iterator[tuple[Expr, int]]:
        """The axes of a Copy's tile: the length whose positions they count, and the tile's size. Of
        rows in pages along an axis: that axis, and how many pages a tile needs."""
        if copy.index:
            return
        shape, axes = self.moved(copy), self.outer(copy).axes
        coords = {c.axis.id: c for c in copy.coords or ()}
        pages = self.page_axis(copy)
        for number, (axis, size) in enumerate(
            zip(axes[len(axes) - len(shape) :], shape, strict=True)
        ):
            if number == 0 and pages is not None:
                length = self.positions_of(pages.size, coords.get(pages.label))
                yield length, -(-size // self._constant(axis.size))
            else:
                yield self.positions_of(axis.size, coords.get(axis.label)), size

    @cached_property
    def longest_ranges(self) -> Mapping[Expr, str]:
        """By the length of an axis with ranges, the dim that none of them is longer than: the one
        that the grid goes through with its coordinate. Of two axes the other has the other dim.
        Where the grid does not tell, ranges that results are stored in are of queries."""
        known: dict[Expr, str] = {}
        stored: dict[Expr, bool] = {}
        bounds = {axis.name: {*expressions(axis.high)} for axis in self.grid.axes}
        for copy, coord, length in self.ranges:
            if length == _QUERIES:
                known[length] = _QUERIES.id
            stored[length] = stored.get(length, False) or copy.dest == "global"
            place = coord.value
            if place == Name(PAGE):  # the pages that the rows of the tile are in
                row = self.outer(copy).axes[-len(self.moved(copy))].label
                place = next((c.value for c in copy.coords or () if c.axis.id == row), place)
            bound = bounds.get(place, set()) if isinstance(place, Name) else ()
            for dim in (d for d in LENGTH_DIMS if Name(d) in bound):
                known.setdefault(length, dim)
        told = set(known.values())
        for length, results in stored.items():
            queries = "kv_len" in told if len(told) == 1 else results
            known.setdefault(length, "q_len" if queries else "kv_len")
        return known

    def positions_of(self, length: Expr, coord: Coord | None) -> Expr:
        """The length that stands for the positions of an axis: of ranges, that of the longest; of
        rows in pages along an axis, that of all pages together."""
        return self._ranged_lengths.get(id(coord), length)

    @cached_property
    def _ranged_lengths(self) -> Mapping[int, Expr]:
        """The lengths whose positions coordinates with ranges count, by the coordinate's id."""
        found: dict[int, Expr] = {}
        for copy, coord, length in self.ranges:
            longest, pages = Name(self.longest_ranges[length]), self.page_axis(copy)
            found[id(coord)] = longest
            if pages is not None and coord.axis.id != pages.label:
                axes = self.outer(copy).axes
                page = next(a.size for a in axes if a.label == coord.axis.id)
                along = next(c for c in copy.coords or () if c.axis.id == pages.label)
                number = pages.size if along.within is None else longest
                found[id(coord)] = Binary("*", number, page)
        return found

    @cached_property
    def counters(self) -> Mapping[str, Tensor]:
        """The counters of each tensor that Copies add to at turns: for each tile and warp how many
        additions are done. They are scratch that begins at 0."""
        copies = (s for s in statements(self.tree.body) if isinstance(s, Copy))
        return {self.dest(c)[0]: self._counter(c) for c in copies if c.turn is not None}

    def _counter(self, copy: Copy) -> Tensor:
        tensor, sizes = self.tensors[self.dest(copy)[0]], self.moved(copy)
        outer = len(tensor.axes) - len(sizes)
        ranged = {c.axis.id for c in copy.coords or () if c.within is not None}
        tiles = (  # those of a range begin at any element
            a
            if a.label in ranged
            else TensorAxis(a.label, Call(Name("ceil"), (Binary("/", a.size, Num(str(size))),)))
            for a, size in zip(tensor.axes[outer:], sizes, strict=True)
        )
        axes = (*tensor.axes[:outer], *tiles, TensorAxis("W", Num(str(self.warps))))
        name = f"{tensor.name}_turns"
        while name in self.tensors or self.is_scalar(name):
            name += "_"
        shape = tuple(Axis(Name(axis.label), axis.size) for axis in axes)
        declared = Allocate(Name(name), "global", shape, Name("int32"), span=tensor.declared.span)
        return Tensor(name, axes, "int32", None, declared, read=True, written=True, added=True)

    def tile(self, name: Name | str) -> Key | None:
        """The tile a name means in a Compute: the one in registers, else in shared memory."""
        return tile_of(name, self.buffers)

    def definitions(self, *nodes: Statement | Expr, params: bool = False) -> tuple[Label, ...]:
        """Labels where the scalars in the nodes get their values: lets, loops, the grid."""
        found: dict[str, Label] = {}
        names = [e.id for n in nodes for e in expressions(n) if isinstance(e, Name)]
        while names:
            name = names.pop(0)
            stmt = self._scalars.get(name)
            if stmt is None or name in found or any(stmt is n for n in nodes):
                continue
            if isinstance(stmt, Param) and not params:
                continue
            verb = "runs" if isinstance(stmt, For | Grid) else "is set"
            found[name] = Label(stmt.span, f"`{name}` {verb} here")
            if isinstance(stmt, Let | For):
                names += [e.id for e in expressions(stmt) if isinstance(e, Name)]
        return tuple({label.span: label for label in found.values()}.values())

    def guard(self, stmt: Statement) -> tuple[Label, ...]:
        """Labels for the `if` around a statement; empty if it always runs."""
        found = self._guards.get(id(stmt))
        if found is None:
            return ()
        return (Label(found.span, "only under this condition"), *self.definitions(found.cond))

    def guards_of(self, *keys: Key) -> tuple[Label, ...]:
        """Labels for the conditions of conditional Copies that fill one of the buffers."""
        copies = [s for s in statements(self.tree.body) if isinstance(s, Copy)]
        found = [w for c in copies if self.dest(c) in keys for w in self.guard(c)]
        return tuple({w.span: w for w in found}.values())

    def chosen(self, expr: Expr) -> bool:
        """Whether the value of an expression depends on an element of a tensor."""
        return bool(self.sources(expr))

    def sources(self, expr: Expr) -> frozenset[str]:
        """The tensors whose elements an expression of the program depends on."""
        found = self._sources.get(id(expr))
        if found is None:
            parts = self.spelt_out(expr)
            found = frozenset(e.tensor.id for e in parts if isinstance(e, Index))
            self._sources[id(expr)] = found
        return found

    @cached_property
    def _sources(self) -> dict[int, frozenset[str]]:
        return {}

    def spelt_out(self, expr: Expr) -> list[Expr]:
        """Every subexpression, including those of the `let` values that it names."""
        found: list[Expr] = []
        waiting, seen = [expr], set()
        while waiting:
            for part in expressions(waiting.pop()):
                found.append(part)
                stmt = self._scalars.get(part.id) if isinstance(part, Name) else None
                if isinstance(stmt, Let) and stmt.name.id not in seen:
                    seen.add(stmt.name.id)
                    waiting.append(stmt.value)
        return found

    def per_element(self, expr: Expr) -> bool:
        """Whether an expression differs from element to element of a tile: it contains positions or
        tiles."""
        if id(expr) not in self._per_element:
            self._per_element[id(expr)] = (
                expr,
                any(
                    name.id in POSITIONS
                    or (not self.is_scalar(name.id) and self.tile(name) is not None)
                    for name in value_names(expr)
                ),
            )
        return self._per_element[id(expr)][1]

    def is_scalar(self, name: str) -> bool:
        """Whether a name is a scalar: a constant, a size, a let, or a loop or grid variable."""
        return name in self._scalars or name in self.dims or name in CONSTANTS

    def scalar_definition(self, name: str) -> Statement | None:
        """The statement that gives a scalar its value; None for the predefined ones."""
        return self._scalars.get(name)

    @cached_property
    def _per_element(self) -> dict[int, tuple[Expr, bool]]:
        return {}

    @cached_property
    def _scalars(self) -> Mapping[str, Statement]:
        found: dict[str, Statement] = {}
        for stmt in statements(self.tree.body):
            match stmt:
                case Param(name) | Let(name) | For(name):
                    found[name.id] = stmt
                case Grid(axes):
                    found |= {axis.name.id: stmt for axis in axes}
        return found

    @cached_property
    def _guards(self) -> Mapping[int, If]:
        branches = [s for s in statements(self.tree.body) if isinstance(s, If)]
        return {id(s): b for b in branches for s in statements((*b.then, *b.orelse))}

    def reads(self, stmt: Statement) -> set[Key]:
        """The tiles in shared memory and registers that a statement reads."""
        match stmt:
            case Copy():
                inner = (e for i in stmt.index for e in expressions(i) if isinstance(e, Name))
                keys = {self.source(stmt), *map(self.tile, inner)}
                keys -= {(t, "global") for t in self.tensors}
            case Reshape(name):
                keys = {self.tile(name)}
            case Compute():
                condition = () if stmt.where is None else (stmt.where,)
                values = (*stmt.args, *stmt.state, *stmt.rescale, *condition)
                keys = {self.tile(e) for v in values for e in expressions(v) if isinstance(e, Name)}
                if stmt.mode != "get" and stmt.target is not None:
                    keys.add(self.tile(stmt.target))
            case _:
                return set()
        return {key for key in keys if key is not None}

    def writes(self, stmt: Statement) -> set[Key]:
        """The tiles in shared memory and registers that a statement writes."""
        match stmt:
            case Copy():
                return {self.dest(stmt)} - {(t, "global") for t in self.tensors}
            case Reshape(name):
                keys = {self.tile(stmt.target or name)}
            case Compute():
                names = [stmt.target, *stmt.state, *stmt.rescale]
                if stmt.operation in ("softmax", "mask"):
                    names += [a for a in stmt.args if isinstance(a, Name)]
                keys = {self.tile(name) for name in names if name is not None}
            case _:
                return set()
        return {key for key in keys if key is not None}

    def source(self, copy: Copy) -> Key:
        """The name and the space that a Copy reads from."""
        return split(copy.name.id)[0], copy.source

    def dest(self, copy: Copy) -> Key:
        """The name and the space that a Copy writes to."""
        return split((copy.target or copy.name).id)[0], copy.dest

    def column(self, copy: Copy) -> int | None:
        """The first column that a Copy fills; None if it fills the whole tile."""
        return None if copy.column is None else self._constant(copy.column)

    def moved(self, copy: Copy) -> tuple[int, ...]:
        """The shape of the region that a Copy between global memory and a tile moves."""
        if copy.column is not None and copy.shape is not None:
            return tuple(self._constant(size) for size in copy.shape)
        return self.buffers[self.dest(copy) if copy.source == "global" else self.source(copy)].shape

    def _constant(self, expr: Expr) -> int:
        value = whole(evaluate(expr, self.params))
        assert value is not None, expr  # shapes.py has checked it
        return value


def tile_of(name: Name | str, buffers: Mapping[Key, Buffer]) -> Key | None:
    """The tile among `buffers` that a name means; None if there is none (see Program.tile)."""
    base, space = split(name if isinstance(name, str) else name.id)
    nearest: tuple[Space, ...] = (space,) if space else ("register", "shared")
    for candidate in nearest:
        if (base, candidate) in buffers:
            return base, candidate
    return None


def _outer_loops(body: tuple[Statement, ...]) -> Iterator[For]:
    for stmt in body:
        if isinstance(stmt, For):
            yield stmt
        elif isinstance(stmt, If):
            yield from _outer_loops((*stmt.then, *stmt.orelse))
