"""From a checked program to tile IR: one node or a few for each statement, in program order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from flashwright.lang import nodes as tl
from flashwright.lang.nodes import Coord, Expr, Name, expressions
from flashwright.lower import ir
from flashwright.lower.frontend.body import Body
from flashwright.lower.frontend.computes import Computes
from flashwright.lower.frontend.positions import (
    ONE,
    STALE,
    UNKNOWN,
    ZERO,
    Axes,
    Where,
)
from flashwright.lower.frontend.scalars import Scalar, refused
from flashwright.lower.names import cpp
from flashwright.lower.targets.swizzle import swizzle_bytes
from flashwright.lower.term import (
    Lit,
    Term,
    Unary,
    Var,
    integer,
    literal,
    plus,
    positive,
)
from flashwright.program.program import Buffer, Key, Program, Tensor
from flashwright.program.vocabulary import DTYPES, PAGE

Axis = Where | None
WALKS = 8


def lower(program: Program) -> ir.Kernel:
    """The kernel before any schedule: what happens, in the order of the program."""
    sides: dict[Key, ir.Side] = {}
    for _ in range(WALKS):  # how vectors lie is found from what they are computed with, both ways
        found = Lowering(program, sides).kernel().sides
        if found == sides:
            break
        sides = found
    return Lowering(program, sides, decided=True).kernel()


class Lowering(Body):
    """One pass over the program."""

    def __init__(self, program: Program, sides: dict[Key, ir.Side], decided: bool = False) -> None:
        super().__init__(program)
        self.computes = Computes(self, sides, decided)
        self.pieces: dict[Key, list[tuple[ir.Piece, tl.Copy]]] = {}  # of tiles not filled yet

    def kernel(self) -> ir.Kernel:
        """The IR of the whole program."""
        grid = []
        for axis in self.program.grid.axes:
            low = self.scalars(axis.low).as_int(axis.low.span)
            self.scalars.define(axis.name.id, self._counter(cpp(axis.name.id), low))
            grid.append(ir.GridAxis(cpp(axis.name.id), low))
        self.statements(self.program.tree.body)
        self._no_pieces_left()
        self.computes.decide()
        return ir.Kernel(tuple(grid), tuple(self.body), self.computes.sides, self.operands)

    def statements(self, body: tuple[tl.Statement, ...]) -> None:
        """Lower statements in order."""
        for stmt in body:
            match stmt:
                case tl.Let():
                    self._let(stmt)
                case tl.Copy():
                    self._copy(stmt)
                case tl.Compute():
                    self.computes.compute(stmt)
                case tl.Reshape():
                    self._reshape(stmt)
                case tl.For():
                    self._for(stmt)
                case tl.If():
                    self._if(stmt)

    def inside(self, body: tuple[tl.Statement, ...]) -> tuple[ir.Statement, ...]:
        """Lower a body of its own; what it defines means nothing behind it."""
        self._no_pieces_left()
        outer, scope, lets = self.body, dict(self.scalars.scope), dict(self.positions.lets)
        self.body = []
        self.statements(body)
        self._no_pieces_left()
        self.computes.settle()
        inner, self.body = self.body, outer
        self.scalars.scope, self.positions.lets = scope, lets
        return tuple(inner)

    # --- control and scalars --------------------------------------------------------------

    def _counter(self, name: str, low: Term) -> Scalar:
        """A variable that counts up."""
        first = literal(low)
        if first is not None:
            self.scalars.least[name] = first
        return Scalar(Var(name))

    def _let(self, stmt: tl.Let) -> None:
        value = self.scalars(stmt.value)
        self.positions.let(stmt.name.id, stmt.value)
        name = cpp(stmt.name.id)
        note = ""
        if not value.whole:  # the numerator has the name: nothing is rounded
            below = value.below.name if isinstance(value.below, Var) else None
            name = f"{name}_{below}" if below else f"{name}_scaled"
            note = f"{{}} * {stmt.name.id}"
        if stmt.name.id not in self.only_offsets:
            name = self.names.fresh(name)
            self.emit(ir.Define(name, value.term, note, value.below, origin=ir.origin(stmt)))
        self.scalars.define(stmt.name.id, Scalar(Var(name, value.type), value.below))

    def _for(self, stmt: tl.For) -> None:
        stem = cpp(stmt.var.id)
        name = self.names.fresh(stem)
        low = self._bound(
            Scalar(self.scalars(stmt.low).as_int(stmt.low.span)), f"{stem}_first", stmt
        )
        high = self._bound(self.scalars(stmt.high), f"{stem}_end", stmt)
        outer = dict(self.scalars.scope)
        var = self._counter(name, low.term)
        self.scalars.define(stmt.var.id, var)
        condition = self.scalars.binary("<", var, high, stmt.span).term
        self.computes.settle()
        body = self._iterated(stmt)
        self.scalars.scope = outer
        self.emit(ir.Loop(name, low.term, condition, body, origin=ir.origin(stmt)))

    def _iterated(self, stmt: tl.For) -> tuple[ir.Statement, ...]:
        """A loop's body, with the positions of tiles that hold in every iteration: walked until
        what is known at its top is right behind it too."""
        before = {k: axes for k, axes in self.axes.items() if STALE not in axes}
        var = stmt.var.id
        top, names = dict(before), self.names.copy()
        while True:
            self.axes, self.names = dict(top), names.copy()
            body = self.inside(stmt.body)
            after, found = self.axes, dict(top)
            for key, axes in top.items():
                if key in before:
                    found[key] = tuple(
                        self._at_top(t, b, a, stmt)
                        for t, b, a in zip(axes, before[key], after[key], strict=True)
                    )
            for key in after.keys() - top.keys():  # of the iteration before, if it is read at all
                found[key] = tuple(a and STALE for a in after[key])
            if found == top:
                break
            top = found
        self.axes = {
            key: tuple(
                self.positions.behind(t, a, var, stmt.low, stmt.high)
                for t, a in zip(
                    top[key] if key in before else (None,) * len(axes), axes, strict=True
                )
            )
            for key, axes in after.items()
        }
        return body

    def _at_top(self, top: Axis, before: Axis, after: Axis, stmt: tl.For) -> Axis:
        """What to take for a position at the top of the body, now that it has been walked."""
        if top is None or self.positions.holds(top, after, stmt.var.id, stmt.high):
            return top
        if top is not before:
            return UNKNOWN
        return self.positions.at_top(before, after, stmt.var.id, stmt.low, stmt.high)

    def _bound(self, bound: Scalar, name: str, stmt: tl.For) -> Scalar:
        """A loop's bound under a name of its own, unless it is a name or a number."""
        if isinstance(bound.term, (Var, Lit)) or bound.type != "int":
            return bound
        note, name = "" if bound.whole else "{} times the loop's end", self.names.fresh(name)
        origin = ir.origin(stmt).untitled
        self.emit(ir.Define(name, bound.term, note, bound.below, origin=origin))
        return Scalar(Var(name), bound.below)

    def _if(self, stmt: tl.If) -> None:
        self.computes.settle()
        condition = self.scalars(stmt.cond).term
        before = self.axes
        self.axes = dict(before)
        then = self.inside(stmt.then)
        after_then, self.axes = self.axes, dict(before)
        orelse = self.inside(stmt.orelse)
        self.axes = {
            key: self._after_if(stmt.cond, after_then.get(key), self.axes.get(key))
            for key in {**after_then, **self.axes}
        }
        self.emit(ir.Branch(condition, then, orelse, origin=ir.origin(stmt)))

    def _after_if(self, condition: Expr, then: Axes | None, orelse: Axes | None) -> Axes:
        """The position of a tile behind an `if`; one that only an arm fills is read only there."""
        if then is None or orelse is None:
            return then or orelse or ()
        return tuple(
            self.positions.after_if(condition, a, b) for a, b in zip(then, orelse, strict=True)
        )

    # --- copies ---------------------------------------------------------------------------

    def _copy(self, stmt: tl.Copy) -> None:
        source, dest = self.program.source(stmt), self.program.dest(stmt)
        self._in_fragments(stmt, source if stmt.source == "global" else dest)
        if stmt.source == "global":
            buffer = self.program.buffers[dest]
            tensor = self.program.tensors[source[0]]
            window, axes = self._window(stmt, tensor, buffer)
            if stmt.dest == "shared" and tensor.dtype != buffer.dtype:
                window = replace(window, converts=True)
            if stmt.column is not None:
                self._piece(stmt, dest, window, axes)
                return
            self.axes[dest] = axes
            self.computes.forget(dest)
            kind = ir.Load if stmt.dest == "shared" else ir.Fill
            self.emit(kind(dest, window, origin=ir.origin(stmt)))
            self.as_operand(dest)
        elif stmt.index:
            self.computes.scatter(stmt, self._optional(self.program.tensors[dest[0]]))
        elif stmt.dest == "global":
            tensor = self.program.tensors[dest[0]]
            self.computes.settle(source)
            window, _ = self._window(stmt, tensor, self.program.buffers[source])
            if stmt.source == "shared" and stmt.adds:
                hint = f"Copy `{source[0]}` to register and accumulate from there"
                raise refused("a shared tile is added to global memory", stmt.span, hint)
            if stmt.source == "shared" and (window.cols is not None or window.line):
                hint = f"Copy `{source[0]}` to register and from there to global"
                raise refused("a shared tile is stored by whole rows", stmt.span, hint)
            optional = self._optional(tensor)
            store = ir.Store(source, window, optional, stmt.adds, origin=ir.origin(stmt))
            if stmt.turn is not None:
                self._store_at_turn(stmt, stmt.turn, store)
            else:
                self.emit(store)
        else:
            self.computes.settle(source)
            self.computes.forget(dest)
            self.axes[dest] = self.axes.get(source, (None,) * len(self.program.buffers[dest].shape))
            loaded = self.direct.get(dest) == "loaded"
            if loaded:
                self.operands[dest] = self.program.buffers[dest].dtype
            self.emit(ir.Move(source, dest, operand=loaded, origin=ir.origin(stmt)))
            self.as_operand(dest)

    def _optional(self, tensor: Tensor) -> bool:
        """Whether an output may be missing: the caller asks for those it wants."""
        return len(self.program.outputs) > 1 and not tensor.declared.fragments

    def _store_at_turn(self, stmt: tl.Copy, turn: Expr, store: ir.Store) -> None:
        """An addition between the wait for its turn and the news that it is done."""
        counters = self.program.counters[store.window.tensor.name]
        given = {c.axis.id: c.value for c in stmt.coords or ()}
        ranged = {c.axis.id for c in stmt.coords or () if c.within is not None}
        start = tuple(
            place  # of a range the element, else the tile
            if axis.label in ranged
            else self.scalars(given.get(axis.label, ZERO)).as_int(stmt.span)
            for axis, place in zip(counters.axes[:-1], store.window.start, strict=True)
        )
        number = self.scalars(turn).as_int(turn.span)
        window = ir.Window(counters, start, rows=None, cols=None)
        self.emit(ir.TakeTurn(window, number, origin=store.origin))
        self.emit(replace(store, origin=store.origin.untitled))
        self.emit(ir.PassTurn(counters, origin=store.origin.untitled))

    def _in_fragments(self, stmt: tl.Copy, key: Key) -> None:
        """Refuse copies of tensors in fragments that are not those of whole fragments."""
        tensor = self.program.tensors.get(key[0]) if key[1] == "global" else None
        if tensor is None or not tensor.declared.fragments:
            return
        shape, places = self.program.moved(stmt), stmt.coords or ()
        whole = len(shape) == 2 and shape[0] in (16, 32, 64, 128) and shape[1] % 8 == 0
        all_columns = self.fixed(tensor.axes[-1].size) == shape[-1]
        direct = "register" in (stmt.source, stmt.dest) and stmt.column is None
        moved = any(c.in_elements or c.within for c in places)
        if not (whole and all_columns and direct) or moved:
            text = f"`{tensor.name}` is in fragments"
            hint = "copy 16, 32, 64 or 128 rows of all columns between register and global"
            raise refused(text, stmt.span, hint)
        if stmt.dest == "global" and not stmt.adds:
            text = f"`{tensor.name}` is in fragments and stored to"
            raise refused(text, stmt.span, "accumulate to it, or leave `in fragments` out")

    def _piece(self, stmt: tl.Copy, dest: Key, window: ir.Window, axes: Axes) -> None:
        """Some columns of a tile: with the last of them, all are on their way."""
        column, (_, width) = self.program.column(stmt), self.program.moved(stmt)
        assert column is not None
        buffer = self.program.buffers[dest]
        size, all_columns = DTYPES[buffer.dtype], buffer.shape[1]
        by = swizzle_bytes(all_columns * size) // size
        if column % by or width % by:
            text = f"columns {column}..{column + width - 1} of `{dest[0]}`"
            hint = f"of {all_columns} columns, pieces begin and end at multiples of {by}"
            raise refused(text, stmt.span, hint)
        if not window.chunked:
            text = f"columns of `{window.tensor.name}` that may not be whole chunks of 16 bytes"
            unit = 16 // size
            hint = f"let its last axis be a number, a multiple of {unit}, and begin at one"
            raise refused(text, stmt.span, hint)
        held = self.pieces.setdefault(dest, [])
        if any(p.column < column + width and column < p.column + p.width for p, _ in held):
            self._no_pieces_left()
        held.append((ir.Piece(column, width, window), stmt))
        if sum(p.width for p, _ in held) < all_columns:
            return
        pieces = tuple(sorted((p for p, _ in held), key=lambda p: p.column))
        begin, title = held[0][1].span.line, ir.origin(held[0][1]).title
        del self.pieces[dest]
        self.axes[dest] = (axes[0], None)
        origin = ir.Origin((begin, stmt.span.end_line), title)
        self.emit(ir.Load(dest, pieces[0].window, pieces=pieces, origin=origin))

    def _no_pieces_left(self) -> None:
        """Failed with FW811 where only some columns of a tile were copied."""
        for key, held in self.pieces.items():
            text = f"only some columns of `{key[0]}` are copied here"
            hint = "let the Copies of all its columns follow each other, in the same body"
            raise refused(text, held[-1][1].span, hint)

    def _window(self, stmt: tl.Copy, tensor: Tensor, buffer: Buffer) -> tuple[ir.Window, Axes]:
        coords = {c.axis.id: c for c in stmt.coords or ()}
        shape = self.program.moved(stmt)
        first_tiled = len(tensor.axes) - len(shape)
        start: list[Term] = []
        inside: list[Term | None] = []
        before: list[Term | None] = []
        axes: list[Axis] = []
        aligned = not tensor.declared.strided
        last: Term | None = None
        pages: ir.Pages | None = None
        page_rows: int | None = None
        if self.program.paged(stmt):
            pages, page_rows = self._pages(stmt, coords, tensor, shape)
        for position, axis in enumerate(tensor.axes):
            given = coords.get(axis.label, Coord(Name(axis.label), ZERO))
            coord = given.value
            place = self.scalars(coord)
            if position >= first_tiled:
                number = position - first_tiled
                size = shape[number]
                if not given.in_elements:
                    whole_axis = size == buffer.shape[number]
                    by = self.size(buffer, number) if whole_axis else Scalar(integer(size))
                    place = self.scalars.binary("*", place, by, stmt.span)
                dim = self.identity(self.program.positions_of(axis.size, given))
                full = self.positions.full(coord)
                axes.append(Where(dim, coord, size, axis.label, full, given.in_elements))
                inside_unit = self._aligned(given, place, tensor)  # the last axis counts
                aligned = inside_unit and not tensor.declared.strided
                if given.within is not None:
                    before_range = self._before(place, stmt) if given.in_elements else None
                    place = self.scalars.binary(
                        "+", self.scalars(given.within[0]), place, stmt.span
                    )
                    if number == 0:
                        last = self.scalars(given.within[1]).as_int(given.within[1].span)
                    aligned &= number == 0
                    inside.append(self._inside(given.within[1], place, stmt))
                    before.append(before_range)
                    if self.program.paged(stmt):
                        place, last = self._in_page(pages, place, axis.size, inside[-1], stmt)
                        if pages is None and self._all_pages(given, tensor, axis.size, stmt):
                            last = None  # behind the range nothing is left of the tensor
                else:
                    fits = aligned and self._fits(given, axis.size, place, size)
                    inside.append(None if fits else self._inside(axis.size, place, stmt))
                    before.append(self._before(place, stmt) if given.in_elements else None)
            elif given.within is not None:
                place = self.scalars.binary("+", self.scalars(given.within[0]), place, stmt.span)
            start.append(place.as_int(stmt.span))
        rows, cols = inside[0], inside[1] if len(inside) > 1 else None
        first_row, first_col = before[0], before[1] if len(before) > 1 else None
        shift = self.offset(tensor.offset) if tensor.offset is not None else None
        width = self.fixed(tensor.axes[-1].size) if len(inside) > 1 else None
        view = self._view(tensor) if tensor.offset is not None else None
        if tensor.offset is not None:
            offset, unit = self.positions.full(tensor.offset), 16 // DTYPES[tensor.dtype]
            aligned &= self.positions.multiple(offset, unit)
        window = ir.Window(
            tensor,
            tuple(start),
            rows,
            cols,
            shift,
            first_row,
            first_col,
            width,
            view,
            aligned,
            line=len(shape) == 1,
            last=last,
            pages=pages,
            page_rows=page_rows,
        )
        return window, tuple(axes)

    def _pages(
        self, stmt: tl.Copy, coords: Mapping[str, Coord], tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[ir.Pages | None, int | None]:
        """Where the rows of a tile lie that may be in several pages, None if one page holds all of
        them; and how many at once lie in one page that a table names, None if that depends on where
        the tile begins. Either way `page_idx` gets its meaning."""
        axis = tensor.axes[len(tensor.axes) - len(shape)]
        given, size = coords[axis.label], self.fixed(axis.size)
        assert given.within is not None  # shapes.py has checked both
        assert size is not None
        place, first = self.scalars(given.value), self.scalars(given.within[0])
        if not given.in_elements:
            place = self.scalars.binary("*", place, Scalar(integer(shape[0])), stmt.span)
        begins_a_tile = not given.in_elements and literal(first.term) == 0
        place = self.scalars.binary("+", first, place, stmt.span)
        named = self.program.page_axis(stmt) is None
        naming = [c.axis.id for c in stmt.coords or () if Name(PAGE) in expressions(c.value)]
        alone = naming == [tensor.axes[0].label]  # a map counts the rows of all pages together
        page_rows = gcd(size, shape[0]) if named and alone and begins_a_tile else None
        if begins_a_tile and size % shape[0] == 0:
            page = self.scalars.binary("/", place, Scalar(integer(size)), stmt.span)
            self.scalars.define(PAGE, self.scalars.call("floor", [page]))
            return None, page_rows
        self.scalars.define(PAGE, Scalar(ir.PAGE_IDX))
        return ir.Pages(place.as_int(stmt.span), size, named), page_rows

    def _in_page(
        self,
        pages: ir.Pages | None,
        place: Scalar,
        size: Expr,
        inside: Term | None,
        stmt: tl.Copy,
    ) -> tuple[Scalar, Term | None]:
        """The row of its page that a tile begins at, and the end of the range there."""
        if pages is not None:
            return Scalar(integer(0)), None
        row = self.scalars.binary("%", place, self.scalars(size), stmt.span)
        assert inside is not None
        return row, plus(row.as_int(stmt.span), inside)

    def _all_pages(self, given: Coord, tensor: Tensor, size: Expr, stmt: tl.Copy) -> bool:
        """Whether a range of rows is that of all pages along an axis."""
        pages = self.program.page_axis(stmt)
        if pages is None or given.within is None:
            return False
        rows = tl.Binary("*", pages.size, size)
        full = self.positions.full
        return given.within[0] == ZERO and full(given.within[1]) == full(rows)

    def _aligned(self, given: Coord, start: Scalar, tensor: Tensor) -> bool:
        """Whether a tile begins at a multiple of 16 bytes, as all do that are counted in tiles."""
        first = self._number(given, start)
        known = first is not None and first >= 0 and first * DTYPES[tensor.dtype] % 16 == 0
        return known or not given.in_elements

    def _fits(self, given: Coord, extent: Expr, start: Scalar, size: int) -> bool:
        """Whether a tile is inside of the tensor, whatever the problem."""
        first, fixed = self._number(given, start), self.fixed(extent)
        if fixed is None:
            return False
        if first is None:
            return not given.in_elements and fixed % size == 0
        return 0 <= first <= fixed - size

    def _number(self, given: Coord, start: Scalar) -> int | None:
        """Where a tile begins, if that is a number."""
        first = literal(start.term) if start.whole else None
        return self.fixed(given.value) if first is None and given.in_elements else first

    def _before(self, start: Scalar, stmt: tl.Copy) -> Term | None:
        """The first row inside of the tensor; None where a tile cannot begin before the start."""
        place = start.as_int(stmt.span)
        if positive(plus(place, 1), self.scalars.least.get):
            return None
        return Unary("-", place)

    def _view(self, tensor: Tensor) -> Term | None:
        """Which of the views of its size a view is, where its offset is a multiple of that."""
        assert tensor.offset is not None
        size: Expr = ONE
        for axis in tensor.axes:
            size = tl.Binary("*", size, axis.size)
        found = self.positions.quotient(self.positions.full(tensor.offset), size)
        return None if found is None else self.scalars(found).as_int(tensor.offset.span)

    def _inside(self, extent: Expr, start: Scalar, stmt: tl.Copy) -> Term:
        """How much of the tile lies inside the tensor, if it is not longer than that."""
        length = self.scalars(extent)
        return self.scalars.binary("-", length, start, stmt.span).as_int(stmt.span)

    # --- Reshape --------------------------------------------------------------------------

    def _reshape(self, stmt: tl.Reshape) -> None:
        source = self.program.tile(stmt.name)
        target = self.program.tile(stmt.target) if stmt.target else source
        if source is None or target is None:
            raise refused("this Reshape has no tile", stmt.span)
        self.computes.settle(source)
        held = self.program.buffers[source].dtype
        dtype = stmt.dtype.id if stmt.dtype else self.operand_dtype.get(id(stmt), held)
        if self.operands.setdefault(target, dtype) != dtype:
            text = f"`{target[0]}` is reshaped to {self.operands[target]} and to {dtype}"
            raise refused(text, stmt.span, "give one of them another name: `and get P`")
        self.axes[target] = self.axes.get(source, (None, None))
        self.emit(ir.Operand(target, source, dtype, origin=ir.origin(stmt)))
