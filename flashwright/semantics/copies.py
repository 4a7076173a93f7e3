"""The Copy part of the machine: where a tile lies in a tensor, loads and stores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from flashwright.lang.diagnostic import Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Binary, Coord, Copy, Expr, Index, Name, expressions
from flashwright.program.fixes import rounded_down
from flashwright.program.program import Tensor, TensorAxis
from flashwright.program.scalars import NotScalar, Scalar, Unknown, Value, evaluate, whole
from flashwright.program.vocabulary import PAGE
from flashwright.semantics.expressions import Expressions
from flashwright.semantics.gather import scatter
from flashwright.semantics.state import Region, State
from flashwright.semantics.tiles import Frame, Place, Tile, Where, together


@dataclass(frozen=True)
class _OnAxis:
    """What a Copy does along one axis of its tensor, the same in all thread blocks."""

    axis: TensorAxis
    coord: Coord | None
    dim: str
    tiled: int | None
    """The size of the tile along the axis, if it has one."""
    in_pages: bool
    """Whether the tile's rows lie along it, in pages."""
    group: int
    page: bool
    """Whether it is the axis of pages, or of what holds them."""
    chosen: bool
    part: bool


class Copies:
    """Executes Copy statements for a machine."""

    def __init__(self, machine: State, values: Expressions) -> None:
        self.machine = machine
        self.values = values
        self.sums = values.sums
        self.program = machine.program
        self._known: dict[int, list[_OnAxis]] = {}
        self._whole: dict[tuple[str, Region], list[tuple[Copy, Tile]]] = {}
        """Sums that are complete, stored where other parts of the same sum may be."""

    def copy(self, stmt: Copy) -> None:
        """Execute one Copy statement on the machine; what is wrong becomes a finding."""
        source, dest = self.program.source(stmt), self.program.dest(stmt)
        if stmt.source == "global":
            tile = self._load(stmt, self.program.tensors[source[0]])
            column = self.program.column(stmt)
            if column is None:
                self.machine.write(dest, tile, stmt)
            else:
                self.machine.write_columns(dest, column, tile, stmt)
            return
        tile = self.machine.read(source, stmt.name, stmt)
        if stmt.index:
            self._add_by_index(stmt, tile)
        elif stmt.dest == "global":
            self._store(stmt, self.program.tensors[dest[0]], tile)
        else:
            self.machine.write(dest, replace(tile, layout=None), stmt)

    def _load(self, stmt: Copy, tensor: Tensor) -> Tile:
        shape = self.program.moved(stmt)
        places, at = self._places(stmt, tensor, shape)
        axes = places[len(places) - len(shape) :]
        data, numbers, lead = None, self.machine.math, _lead(places, shape)
        if numbers is not None and self.program.paged(stmt):
            offset = self.machine.offset(tensor)
            parts = [
                numbers.load(tensor, region, offset, (rows, *shape[1:]))
                for region, rows in self._by_page(stmt, tensor, places, shape)
            ]
            data = numbers.under_each_other(parts, lead, shape)
        elif numbers is not None:
            offset = self.machine.offset(tensor)
            data = numbers.load(tensor, _region(places), offset, shape, lead)
        if tensor.offset is not None:
            here = Place(self.machine.scalar(tensor.offset), tensor.name, stmt)
            at = {**at, f"offset of {tensor.name}": here}
        return Tile(shape, tuple(axes), tensor.dtype, at, data=data)

    def _places(
        self, stmt: Copy, tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[list[Where], dict[str, Place]]:
        """Where the tile lies on every axis of the tensor, and its fixed coordinates by axis."""
        places: list[Where] = []
        at: dict[str, Place] = {}
        if id(stmt) not in self._known:
            self._known[id(stmt)] = [*self._on_axes(stmt, tensor, shape)]
        for on in self._known[id(stmt)]:
            axis, coord, dim = on.axis, on.coord, on.dim
            if on.page and coord is not None:
                if self.program.page_axis(stmt) is None:
                    at[f"the pages along {axis.label}"] = self._pages(coord, stmt, tensor)
                elif coord.within is not None:
                    first, _ = self._range(coord, tensor, axis)
                    at[f"the range of {dim}"] = Place(first or 0, tensor.name, stmt)
                places.append(Where(axis.label, 0, 1, 1, axis.label, tensor.name, stmt))
                continue
            if on.in_pages:
                first, extent = self._range_of_pages(coord, tensor, axis, stmt)
            else:
                first, extent = self._range(coord, tensor, axis)
            start = self._start(coord, on.tiled, extent, tensor, axis, stmt)
            label = "L" if on.in_pages else axis.label  # positions, whatever the letter
            origin = (label, tensor.name, stmt, on.chosen)
            size = on.tiled or 1
            places.append(Where(dim, start, size, extent, *origin, first=first, group=on.group))
            if on.tiled is None and not on.part:
                at[dim] = Place(start, tensor.name, stmt, on.chosen)
            if first is not None:
                at[f"the range of {dim}"] = Place(first, tensor.name, stmt)
        return places, at

    def _on_axes(self, stmt: Copy, tensor: Tensor, shape: tuple[int, ...]) -> Iterator[_OnAxis]:
        """What a Copy does along each axis of its tensor."""
        coords = {c.axis.id: c for c in stmt.coords or ()}
        first_tiled = len(tensor.axes) - len(shape)
        for position, axis in enumerate(tensor.axes):
            coord = coords.get(axis.label)
            in_pages = position == first_tiled and self.program.paged(stmt)
            grouped = in_pages and self.program.page_axis(stmt) is not None
            yield _OnAxis(
                axis,
                coord,
                self.machine.identity(self.program.positions_of(axis.size, coord)),
                shape[position - first_tiled] if position >= first_tiled else None,
                in_pages,
                self.machine.extent(axis.size) if grouped else 0,
                page=coord is not None and Name(PAGE) in expressions(coord.value),
                chosen=coord is not None and self.program.chosen(coord.value),
                part=self._part(coord, axis),
            )

    def _part(self, coord: Coord | None, axis: TensorAxis) -> bool:
        """Whether an axis has a fixed number of parts and the program's text says which one: tiles
        of other parts may be combined with it, as the halves of a rotation are."""
        try:
            for expr in (axis.size, *([coord.value] if coord is not None else [])):
                evaluate(expr, self.program.params)
        except NotScalar:
            return False
        return coord is not None

    # --- pages ---------------------------------------------------------------------------------

    def _pages(self, coord: Coord, stmt: Copy, tensor: Tensor) -> Place:
        """What tells the pages of one sequence from those of others: where the first one is. With
        numbers it is not asked for, since a sequence may have none."""
        self.machine.env[PAGE] = 0
        first: Value = 0 if self.machine.math is not None else self.machine.scalar(coord.value)
        return Place(first, tensor.name, stmt)

    def _by_page(
        self, stmt: Copy, tensor: Tensor, places: list[Where], shape: tuple[int, ...]
    ) -> Iterator[tuple[Region, int]]:
        """The regions that the rows of a tile lie in, one in each page, and the rows in each. Rows
        outside of the range are in none."""
        outer = len(places) - len(shape)
        size = self.machine.extent(tensor.axes[outer].size)
        ((begin, count),) = _region(places[outer : outer + 1])
        for page in range(begin // size, -(-(begin + count) // size)):
            self.machine.env[PAGE] = page
            low, high = max(begin, page * size), min(begin + count, (page + 1) * size)
            region = [self._on_axis(stmt, tensor, axis) for axis in tensor.axes[:outer]]
            region += [(low - page * size, high - low), *_region(places[outer + 1 :])]
            yield tuple(region), high - low

    def _on_axis(self, stmt: Copy, tensor: Tensor, axis: TensorAxis) -> tuple[int, int]:
        coord = next((c for c in stmt.coords or () if c.axis.id == axis.label), None)
        first, extent = self._range(coord, tensor, axis)
        start = self._start(coord, None, extent, tensor, axis, stmt)
        if isinstance(start, Unknown):
            assert coord is not None
            return self._entry(coord.value, tensor), 1
        assert not isinstance(first, Unknown)
        return start + (first or 0), 1

    def _entry(self, expr: Expr, tensor: Tensor) -> int:
        """A number for a page that data name: one for each entry of the tables, since tables of
        what is written name each page once."""
        entries = [e for e in self.program.spelt_out(expr) if isinstance(e, Index)]
        key = tuple((e.tensor.id, *map(self.machine.scalar, e.args)) for e in entries)
        known = self.machine.entries.setdefault(tensor.name, {})
        return known.setdefault(key, len(known))

    def _stored_pages(
        self, stmt: Copy, tensor: Tensor, places: list[Where], shape: tuple[int, ...]
    ) -> list[Region]:
        """The regions of a tensor that a tile with rows in pages is stored to: rows of its first
        page, whole pages, and rows of its last one."""
        outer, pages = len(places) - len(shape), self.program.page_axis(stmt)
        if pages is None:
            return [part for part, _ in self._by_page(stmt, tensor, places, shape)]
        size = self.machine.extent(tensor.axes[outer].size)
        ((begin, count),) = _region(places[outer : outer + 1])
        end, number = begin + count, tensor.axes.index(pages)
        coord = next(c for c in stmt.coords or () if c.axis.id == pages.label)
        first, _ = self._range(coord, tensor, pages)
        first = 0 if first is None or isinstance(first, Unknown) else first
        full, last = -(-begin // size), end // size
        parts = []
        if begin < min(full * size, end):
            parts.append((full - 1, 1, begin % size, min(full * size, end) - begin))
        if full < last:
            parts.append((full, last - full, 0, size))
        if end % size and full <= last:
            parts.append((last, 1, 0, end % size))
        regions = []
        for page, pages_in_it, low, rows in parts:
            region = [*_region(places[:outer]), (low, rows), *_region(places[outer + 1 :])]
            region[number] = (first + page, pages_in_it)
            regions.append(tuple(region))
        return regions

    # --- ranges --------------------------------------------------------------------------------

    def _range_of_pages(
        self, coord: Coord | None, tensor: Tensor, axis: TensorAxis, stmt: Copy
    ) -> tuple[int | Unknown | None, int]:
        """The range of a tile's rows, counted over pages. Those that a table names may be as many
        as it takes; those along an axis are as many as the axis, or the range on it, has."""
        pages = self.program.page_axis(stmt)
        if pages is None:
            return self._range(coord, tensor, axis, math.inf)
        along = next(c for c in stmt.coords or () if c.axis.id == pages.label)
        first, number = self._range(along, tensor, pages)
        rows = number * self.machine.extent(axis.size)
        return self._range(coord, tensor, axis, math.inf if isinstance(first, Unknown) else rows)

    def _range(
        self,
        coord: Coord | None,
        tensor: Tensor,
        axis: TensorAxis,
        rows_in_pages: float | None = None,
    ) -> tuple[int | Unknown | None, int]:
        """Where the positions that a coordinate counts begin in the tensor, and how many there are;
        None and the axis's length unless it names a range."""
        length = self.machine.extent(axis.size)
        if coord is None or coord.within is None:
            return None, length
        bounds = [self.machine.scalar(expr) for expr in coord.within]
        for value, expr in zip(bounds, coord.within, strict=True):
            if isinstance(value, Unknown):
                return value, length
            if whole(value) is None:
                text = f"axis {axis.label} of `{tensor.name}`: {value} is not a whole number"
                raise self.machine.halt("FW306", text, expr.span, label=self.machine.problem())
        first, last = (whole(value) or 0 for value in bounds if not isinstance(value, Unknown))
        if not 0 <= first <= last <= (length if rows_in_pages is None else rows_in_pages):
            text = f"the range {first}:{last} is not inside axis {axis.label} of `{tensor.name}`, "
            text += f"which is {format_expr(axis.size)} = {length} long"
            if rows_in_pages is not None and math.isfinite(rows_in_pages):
                text = f"the range {first}:{last} is longer than the pages of `{tensor.name}`, "
                text += f"which have {rows_in_pages} rows together"
            where = self.program.definitions(*coord.within)
            label = self.machine.problem()
            span = coord.within[0].span.to(coord.within[1].span)
            raise self.machine.halt("FW605", text, span, label=label, secondary=where)
        return first, last - first

    def _start(
        self,
        coord: Coord | None,
        tiled: int | None,
        extent: int,
        tensor: Tensor,
        axis: TensorAxis,
        stmt: Copy,
    ) -> int | Unknown:
        """The position at which the tile begins on one axis. It must be a whole number inside the
        tensor; with `at` it may be negative, and a tile whose place comes from a tensor may begin
        past the end, as a listed block may. So may one in a range, as one sequence is shorter than
        another. `tiled` is the tile's size on the axis, if any."""
        expr, size = coord.value if coord is not None else None, tiled or 1
        listed = expr is not None and tiled is not None and self.program.chosen(expr)
        ranged = tiled is not None and coord is not None and coord.within is not None
        if expr is not None and listed:
            self._whole_tiles(expr, tensor)
        value = self.machine.scalar(expr) if expr is not None else 0
        if isinstance(value, Unknown):
            return value
        span = expr.span if expr is not None else stmt.span
        in_elements = coord is not None and coord.in_elements and tiled is not None
        start = whole(value if in_elements else value * size)
        if start is None:
            text = f"axis {axis.label} of `{tensor.name}`: {value} is not a whole number"
            fix = rounded_down(expr) if expr is not None else None
            raise self.machine.halt("FW306", text, span, fix=fix, label=self.machine.problem())
        if (start >= extent and not (listed or ranged)) or (start < 0 and not in_elements):
            what = f"{start}..{start + size - 1}" if size > 1 else f"{start}"
            text = (
                f"this reaches {what} on axis {axis.label} of `{tensor.name}`, which is "
                f"{_length(coord, axis)} = {extent} long"
            )
            where = self.program.guard(stmt)
            where += self.program.definitions(*([expr] if expr is not None else []))
            hint = None if in_elements else _outside(value, size, axis.size)
            raise self.machine.halt(
                "FW605", text, span, label=self.machine.problem(), secondary=where, help=hint
            )
        return start

    def _whole_tiles(self, expr: Expr, tensor: Tensor) -> None:
        """Halt with FW306 if a block that a tensor names is no whole number of tiles."""
        for part in self.program.spelt_out(expr):
            match part:
                case Binary("%", _, count):
                    tiles = self.machine.scalar(count)
                    if isinstance(tiles, Fraction):
                        text = f"a block of `{tensor.name}` has {tiles} tiles, not a whole number"
                        raise self.machine.halt("FW306", text, expr.span)

    def _store(self, stmt: Copy, tensor: Tensor, tile: Tile) -> None:
        places, at = self._places(stmt, tensor, tile.shape)
        if not stmt.adds:
            self._store_sum(stmt, tensor, tile, places)
        along = self.program.buffers[self.program.source(stmt)].along
        for have, want in zip(tile.axes, places[len(places) - len(tile.shape) :], strict=True):
            # With `along` a vector of one dimension's positions may stand for another's.
            placed = have is None or have == want or have.same_columns(want)
            if have is not None and not placed and (have.dim == want.dim or along is None):
                self._misplaced(stmt, f"{have}", f"{want}", have.copy)
            elif have is not None and have.group and have.extent != want.extent:
                held, room = (f"{w.dim} up to {w.extent - 1}" for w in (have, want))
                self._misplaced(stmt, held, room, have.copy)
        for dim, place in at.items():
            have2 = tile.at.get(dim)
            if have2 is not None and have2.value != place.value:
                self._misplaced(stmt, f"{dim} {have2.value}", f"{dim} {place.value}", have2.copy)
        region, outer = _region(places), tensor.axes[: len(places) - len(tile.shape)]
        if stmt.turn is not None and not self.machine.partial:
            self._take_turn(stmt, stmt.turn, tensor, region)
        if not stmt.adds:
            if self.program.paged(stmt):
                parts = self._stored_pages(stmt, tensor, places, tile.shape)
            elif tensor.kept:
                parts = [(*(self._on_axis(stmt, tensor, a) for a in outer), *region[len(outer) :])]
            else:
                parts = [region]
            self.machine.last_stored = parts
            self.machine.stores += [(tensor.name, part, stmt) for part in parts]
        elif not self._placed_by_data(stmt, tensor, places):
            self._add(stmt, tensor, region, tile)  # else data decide what is added where
        if self.machine.math is not None:
            offset = self.machine.offset(tensor)
            lead = _lead(places, tile.shape)
            if not self.program.paged(stmt):
                self.machine.math.store(
                    tensor, region, offset, tile.data, tile.shape, stmt.adds, lead
                )
                return
            for part, rows in self._by_page(stmt, tensor, places, tile.shape):
                data, shape = tile.data[lead : lead + rows], (rows, *tile.shape[1:])
                self.machine.math.store(tensor, part, offset, data, shape, stmt.adds)
                lead += rows

    def _placed_by_data(self, stmt: Copy, tensor: Tensor, places: list[Where]) -> bool:
        """Whether data decide what is added where."""
        if self.program.paged(stmt):
            return True
        return any(isinstance(p.begin, Unknown) or p.chosen for p in places)

    def _add(self, stmt: Copy, tensor: Tensor, region: Region, tile: Tile) -> None:
        """Add to what other thread blocks have added: parts of the sequence, each once."""
        before = self.machine.added.get((tensor.name, region))
        if before is not None:
            covered = self.sums.covered("+", [before[0], tile], stmt)
            tile = replace(tile, covered=covered, masks=together([before[0], tile]))
        self.machine.added[tensor.name, region] = replace(tile, data=None), stmt

    def _store_sum(self, stmt: Copy, tensor: Tensor, tile: Tile, places: list[Where]) -> None:
        """A sum is complete, or one of the parts that the tensor has an axis for: these are added
        up by their reader."""
        outer = len(places) - len(tile.shape)
        rest = [
            p for n, p in enumerate(places) if n >= outer or p.dim not in self.program.parts_stored
        ]
        if len(rest) == len(places):
            self.sums.complete(tile, stmt)
            return
        key = (tensor.name, _region(rest))
        if self.sums.is_complete(tile) and key not in self.machine.added:
            self._whole.setdefault(key, []).append((stmt, tile))
            return
        # a part may have all that the masks show, and another one what they hide
        for earlier in (*self._whole.pop(key, ()), (stmt, tile)):
            self._add(earlier[0], tensor, key[1], earlier[1])

    def _add_by_index(self, stmt: Copy, tile: Tile) -> None:
        """Add each element to the one that its index names. Those of a tile past the ends of a
        sequence must be masked: their index is clamped, so they would be added as well."""
        for axis in range(len(tile.axes)) if len(tile.axes) == 2 else ():
            self.sums.no_tail(tile, stmt.span, axis)
        frame = Frame(tile.shape, tile.axes)
        scatter(self.machine, stmt.element, tile, lambda arg: self.values.index(arg, frame, stmt))

    def _take_turn(self, stmt: Copy, turn: Expr, tensor: Tensor, region: Region) -> None:
        """Report FW613 unless the turns at a region are 0, 1, 2, ... in the order in which thread
        blocks start: the machine runs them in that order. A kernel may start those that differ in
        other coordinates in another order, but the first coordinate always rises."""
        machine, value = self.machine, self.machine.scalar(turn)
        taken = machine.turns.setdefault((tensor.name, region), [])
        axis = self.program.grid.axes[0].name.id
        first = whole(machine.env[axis])
        assert first is not None
        text = None
        if value != len(taken):
            text = f"this is turn {value}, but turn {len(taken)} of this tile is next"
        elif taken and first < taken[-1]:
            text = (
                f"`{axis}` falls from {taken[-1]} to {first} between turns {value - 1} and {value}"
            )
        taken.append(first)
        if text is not None:
            hint = "turns count from 0 in the order of the grid, and its first index never falls: "
            hint += "a thread block waits for those that start before it"
            grid = (Label(self.program.grid.span, "the grid"), *self.program.definitions(turn))
            label = machine.problem()
            machine.report("FW613", text, turn.span, label=label, secondary=grid, help=hint)

    def check_added(self) -> None:
        """Report FW604 for sums in global memory that lack a part after all thread blocks."""
        for tile, stmt in self.machine.added.values():
            self.sums.complete(tile, stmt)

    def _misplaced(self, stmt: Copy, have: str, want: str, origin: Copy) -> None:
        text = f"the tile holds {have}, but it is stored at {want}"
        where = (Label(origin.span, "its positions come from this Copy"),)
        self.machine.report("FW603", text, stmt.span, secondary=where, label=self.machine.problem())


def _region(places: list[Where]) -> Region:
    """The part of a tensor that a tile lies in: of a range, what is inside of it."""
    region = []
    for place in places:
        begin, size = place.begin, place.size
        if isinstance(begin, Unknown) or isinstance(place.start, Unknown):
            begin = 0
        elif place.first is not None:
            begin -= min(place.start, 0)
            size = max(0, min(place.start + size, place.extent) - max(place.start, 0))
        region.append((begin, size))
    return tuple(region)


def _lead(places: list[Where], shape: tuple[int, ...]) -> int:
    """The rows of a tile before its range."""
    rows = places[len(places) - len(shape)]
    if rows.first is None or isinstance(rows.start, Unknown):
        return 0
    return min(max(-rows.start, 0), rows.size)


def _length(coord: Coord | None, axis: TensorAxis) -> str:
    """The length of an axis, or of the range on it, as the program has it."""
    if coord is None or coord.within is None:
        return format_expr(axis.size)
    first, last = coord.within
    return f"{format_expr(last)} - {format_expr(first)}"


def _outside(value: Scalar, size: int, length: Expr) -> str | None:
    """A hint about the usual cause of a coordinate outside the tensor."""
    if size > 1 and value >= size and whole(value / size) is not None:
        return "on an axis of the tile `=` counts tiles: `L = i`, or in elements `L at i * BN`"
    if length == Name("kv_heads"):
        return "query heads share kv heads: `let kv_head = floor(head_idx * kv_heads / heads)`"
    return None
