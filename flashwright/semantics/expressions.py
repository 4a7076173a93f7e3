"""Expressions over tiles: their values, and what is known of the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.format import format_stmt
from flashwright.lang.nodes import (
    Allocate,
    Binary,
    Call,
    Compute,
    Copy,
    Expr,
    Index,
    Name,
    Num,
    Side,
    Statement,
    Transpose,
    Unary,
    expressions,
    statements,
    value_names,
)
from flashwright.program.program import Key
from flashwright.program.scalars import NotScalar, Unknown, Value, whole
from flashwright.program.scalars import apply as apply_scalar
from flashwright.semantics import kinds
from flashwright.semantics.gather import gather
from flashwright.semantics.kinds import Unrescaled
from flashwright.semantics.masks import has_positions
from flashwright.semantics.state import State
from flashwright.semantics.sums import Sums
from flashwright.semantics.tiles import (
    Frame,
    Kind,
    Masked,
    Operand,
    Tile,
    Where,
    axis_of,
    kept,
    origins,
    together,
)

SIDES: tuple[Side, ...] = ("rows", "columns")
HIDDEN = -1e4
"""A `where` that replaces a score by a constant of at most this value is a mask."""


class Expressions:
    """Evaluates expressions for a machine."""

    def __init__(self, machine: State, sums: Sums) -> None:
        self.machine = machine
        self.program = machine.program
        self.sums = sums
        self._opposites: dict[int, Unary] = {}
        self._copied: dict[Key, bool] = {}
        self.misused = False  # already reported: a computation on a reshaped operand

    def key(self, name: Name) -> Key:
        """The buffer that a name means; earlier checks guarantee that it exists."""
        key = self.program.tile(name)
        assert key is not None, name
        return key

    def read(self, name: Name, stmt: Statement) -> Tile:
        """The present value of the tile that a name means; a finding if it has none."""
        return self.machine.read(self.key(name), name, stmt)

    def frame(self, expr: Expr, shape: tuple[int, ...]) -> Frame:
        """The rows and columns of a result: those of the two-dimensional operands, else of the
        vectors, preferring one whose positions determine its axis."""
        keys = [k for k in self._tiles(expr) if k in self.machine.cells]
        keys.sort(key=lambda k: self.program.buffers[k].along is not None)
        tiles = [self.machine.cells[k].tile for k in keys]
        placed = [t for t in tiles if len(t.shape) == len(shape) and any(t.axes)]
        if not placed:
            return Frame(shape, self._rows(expr, shape[0]) if len(shape) == 1 else (None, None))
        if len(shape) == 2:
            placed.sort(key=_not_a_product)
        axes = (_position_of([t.axes[n] for t in placed]) for n in range(len(shape)))
        return Frame(placed[0].shape, tuple(axes))

    def _rows(self, expr: Expr, size: int) -> tuple[Where | None]:
        """The positions of the rows that a vector is reduced from. With `q_idx` in it, those of
        the queries that the thread block copies."""
        for part in expressions(expr):
            if isinstance(part, Call) and part.func.id.lower() in ("rowmax", "rowsum"):
                return (self._inner(part.args[0]).axes[0],)
        if Name("q_idx") in expressions(expr):
            return (self._query_rows(size),)
        return (None,)

    def _query_rows(self, size: int) -> Where | None:
        """The positions of a thread block's queries; None if they cannot be told here."""
        found = self.program.query_rows(size)
        if found is None:
            return None
        copy, coord = found
        bounds = coord.within or ()
        names = {n.id for e in (coord.value, *bounds) for n in value_names(e)}
        if not names <= self.machine.env.keys() | self.program.tensors.keys():
            return None
        tensor = self.program.outer(copy)
        axis = tensor.axes[-len(self.program.moved(copy))]
        length = self.program.positions_of(axis.size, coord)
        numbers = [self._whole(e) for e in (coord.value, *bounds)]
        if None in numbers:
            return None
        place, *ends = (n for n in numbers if n is not None)
        extent = ends[1] - ends[0] if ends else self.machine.extent(length)
        start = place if coord.in_elements else place * size
        where = Where(self.machine.identity(length), start, size, extent, "L", tensor.name, copy)
        group = 0 if self.program.page_axis(copy) is None else self.machine.extent(axis.size)
        return replace(where, first=ends[0] if ends else None, group=group)

    def _whole(self, expr: Expr) -> int | None:
        value = self.machine.scalar(expr)
        return None if isinstance(value, Unknown) else whole(value)

    def _inner(self, arg: Expr) -> Frame:
        """The rows and columns of the expression that a reduction reads."""
        keys = [k for k in self._tiles(arg) if len(self.program.buffers[k].shape) == 2]
        return self.frame(arg, self.program.buffers[keys[0]].shape)

    def _tiles(self, expr: Expr) -> list[Key]:
        """The tiles that an expression combines; a row reduction contributes only its rows."""
        match expr:
            case Name():
                key = None if expr.id in self.machine.env else self.program.tile(expr)
                return [key] if key else []
            case Unary(_, operand):
                return self._tiles(operand)
            case Binary(_, left, right):
                return self._tiles(left) + self._tiles(right)
            case Call(func, args) if func.id.lower() not in ("rowmax", "rowsum"):
                return [k for a in args for k in self._tiles(a)]
            case Index(_, args):
                return [k for a in args for k in self._tiles(a)]
        return []

    def tile(self, value: Operand, frame: Frame) -> Tile:
        """The operand as a tile; a scalar becomes a constant tile."""
        if isinstance(value, Tile):
            data = value.data
            if self.machine.math is not None:
                data = self.machine.math.fill(data, frame.shape)
            elif value.axes is frame.axes and value.shape == frame.shape:
                return value
            return replace(value, shape=frame.shape, axes=frame.axes, data=data)
        data = self.machine.math.fill(value, frame.shape) if self.machine.math else None
        return Tile(frame.shape, frame.axes, "fp32", start=True, data=data)

    def value(self, expr: Expr, frame: Frame, stmt: Statement) -> Operand:
        """The value of an expression over the rows and columns of a frame: a tile or a scalar."""
        match expr:
            case Index() if self.program.per_element(expr):
                return gather(self.machine, expr, frame, lambda arg: self.index(arg, frame, stmt))
            case Num() | Index():
                return self.machine.scalar(expr)
            case Name("q_idx" | "kv_idx"):
                return self._position(expr, frame)
            case Name(id) if id in self.machine.env:
                return self.machine.env[id]
            case Name():
                return self.turned(self.read(expr, stmt), frame, expr)
            case Unary("not", operand):
                return self.combine("not", [self.value(operand, frame, stmt)], frame, stmt)
            case Unary(_, operand):
                return self.combine("*", [-1, self.value(operand, frame, stmt)], frame, stmt)
            case Binary(op, left, right):
                args = [self.value(left, frame, stmt), self.value(right, frame, stmt)]
                return self.combine(op, args, frame, stmt)
            case Call(func, args) if func.id.lower() in ("rowmax", "rowsum"):
                return self.turned(self.reduce(func.id.lower(), args[0], stmt), frame, expr)
            case Call(func, args):
                values = [self.value(a, frame, stmt) for a in args]
                done = self.combine(func.id.lower(), values, frame, stmt)
                if func.id.lower() == "where" and isinstance(done, Tile):
                    return self._hidden(done, expr, values, stmt)
                return done
            case Transpose():
                raise AssertionError("operations.py lets `.T` into GEMMs only")

    def index(self, arg: Expr, frame: Frame, stmt: Statement) -> Operand:
        """The value of an index that depends on the element."""
        value = self.value(arg, frame, stmt)
        if isinstance(value, Tile):
            self.sums.complete(value, stmt)
        return value

    def _hidden(self, done: Tile, expr: Call, values: list[Operand], stmt: Statement) -> Tile:
        """The value of a `where` that acts as a mask (`where(condition, S, -inf)`,
        `where(hidden, -inf, S)`, or weights set to 0); None for any other."""
        condition = expr.args[0]
        for shown, other in ((1, 2), (2, 1)):
            tile, rest = values[shown], values[other]
            if not isinstance(tile, Tile) or isinstance(rest, Tile | Unknown):
                continue
            if not (rest <= HIDDEN or (rest == 0 and _weights(tile))) or not has_positions(expr):
                continue
            if shown == 2:
                opposite = Unary("not", condition, span=condition.span)
                condition = self._opposites.setdefault(id(condition), opposite)
            return self.masked(done, tile, condition, stmt, rest)
        return done

    def masked(
        self, done: Tile, tile: Tile, condition: Expr, stmt: Statement, value: Value
    ) -> Tile:
        """The tile `done`, which is `tile` with `value` where the condition is false."""
        if value != 0 and _weights(tile):
            text = (
                "these scores have already been through the exponential, so a mask comes too late"
            )
            hint = "move the Mask up, between the GEMM and the Softmax"
            self.machine.report("FW608", text, stmt.span, help=hint)
        cols = done.axes[1] if len(done.axes) == 2 else None
        if cols is None:
            return done
        env, varying = dict(self.machine.env), frozenset(self.machine.varying)
        read, sources = self.machine.peek, self.program.sources(condition)
        note = Masked(stmt, condition, env, done.axes, varying, read, sources)
        others = (m for m in done.masks if m.where is not condition)
        return replace(done, masks=(*others, note), kind=tile.kind)

    def reduce(self, op: str, arg: Expr, stmt: Statement) -> Tile:
        """The tile of row maxima or row sums."""
        frame = self._inner(arg)
        tile = self.tile(self.value(arg, frame, stmt), frame)
        self.sums.complete(tile, stmt)
        if op != "rowsum" or not self._only_copied(arg):  # zeros past the end add nothing
            self.sums.no_tail(tile, arg.span)
        return Tile(
            frame.shape[:1],
            frame.axes[:1],
            "fp32",
            kept(tile.at, frame.axes[:1]),
            self.sums.summing(tile, stmt) if op == "rowsum" else {},
            tile.layout,
            kinds.of_function(op, [tile.kind], stmt),
            tile.masks,
            data=self.machine.math.reduce(op, tile.data) if self.machine.math else None,
        )

    def _only_copied(self, arg: Expr) -> bool:
        """Whether an expression is a tile that is copied from global memory: zeros past the end."""
        if not isinstance(arg, Name):
            return False
        key = self.key(arg)
        if key not in self._copied:
            writers = (
                s for s in statements(self.program.tree.body) if key in self.program.writes(s)
            )
            copied = all(isinstance(s, Copy) and s.source == "global" for s in writers)
            self._copied[key] = copied
        return self._copied[key]

    def _position(self, name: Name, frame: Frame) -> Tile:
        axis = axis_of(name.id, frame.axes)
        where = frame.axes[axis] if axis < len(frame.axes) else None
        if where is None or where.label != "L":
            side = "rows" if axis == 0 else "columns"
            what = (
                f"are positions on axis {where.label} of `{where.tensor}`" if where else "have no"
            )
            text = f"`{name.id}` has no meaning here: the {side} {what}"
            text += ", not on a sequence (L)" if where else " positions"
            raise self.machine.halt("FW206", text, name.span)
        data = None
        if self.machine.math is not None and not isinstance(where.start, Unknown):
            data = self.machine.math.positions(where.start, where.size, axis, len(frame.shape))
        return Tile(frame.shape, frame.axes, "int32", data=data)

    def turned(self, tile: Tile, frame: Frame, expr: Expr) -> Tile:
        """A tile broadcast to the frame: a vector lies along the axis whose positions it has."""
        if len(tile.shape) == len(frame.shape):
            for have, want in zip(tile.axes, frame.axes, strict=True):
                if have is None or want is None or have == want:
                    continue
                if have.dim == want.dim or self._along(expr) is None:
                    self.machine.disagree(expr.span, have, want)
            return tile
        axis = self._axis(tile, frame, expr)
        if self.machine.math is None:
            return tile
        return replace(tile, data=self.machine.math.turn(tile.data, axis))

    def _axis(self, tile: Tile, frame: Frame, expr: Expr) -> int:
        """The axis of a frame that a vector lies along: the one its Allocate names, the one with
        its positions, else the one of its size."""
        have, along = tile.axes[0], self._along(expr)
        if along is not None:
            want = frame.axes[SIDES.index(along)]
            if have is not None and want is not None and have.dim == want.dim and have != want:
                self.machine.disagree(expr.span, have, want)
            return SIDES.index(along)
        fits = [a for a, n in enumerate(frame.shape) if n == tile.shape[0]]
        if have is None:
            return fits[0]
        for axis in fits:
            if frame.axes[axis] == have:
                return axis
        for axis, want in enumerate(frame.axes):
            if want is not None and want.dim == have.dim:
                other = SIDES[1 - axis] if 1 - axis in fits else None
                self.machine.disagree(expr.span, have, want, **self._along_fix(expr, have, other))
                return fits[0]
        known = [a for a in fits if frame.axes[a] is not None]
        if len(known) == 2:
            self._report_ambiguous_axis(expr, have, frame)
        return fits[0] if len(known) == len(fits) else next(a for a in fits if a not in known)

    def _along(self, expr: Expr) -> Side | None:
        """The axis that the Allocate of a vector names with `along`; None if it names none."""
        key = self.program.tile(expr) if isinstance(expr, Name) else None
        return self.program.buffers[key].along if key is not None else None

    def _report_ambiguous_axis(self, expr: Expr, have: Where, frame: Frame) -> None:
        """Report a vector that fits both the rows and the columns."""
        columns = frame.axes[1]
        loops = {loop.var.id for loop in self.machine.loops}
        steps = loops & _names_in(have.copy) & (_names_in(columns.copy) if columns else set())
        text = f"positions {have} of `{have.tensor}` are neither the rows nor the "
        text += f"columns of the tile, which has {frame.shape[0]} of both"
        told = self._along_fix(expr, have, "columns" if steps else "rows", certain=True)
        self.machine.report(
            "FW603",
            text,
            expr.span,
            secondary=origins(have, *(w for w in frame.axes if w is not None)),
            label=self.machine.problem(),
            **told,
        )

    def _along_fix(
        self, expr: Expr, have: Where, side: Side | None, certain: bool = False
    ) -> dict[str, Any]:
        """The help and the fix that add `along` to a vector with other positions than the tile.
        Unless `certain`, only for vectors whose Copy gives its place in elements (`at`).
        """
        key = self.program.tile(expr) if isinstance(expr, Name) else None
        if key is None or side is None or len(self.program.buffers[key].shape) != 1:
            return {}
        buffer = self.program.buffers[key]
        meant = any(c.in_elements for c in have.copy.coords or () if c.axis.id == have.label)
        fix = None
        if isinstance(buffer.declared, Allocate):
            end = buffer.declared.span.end
            line = f"{format_stmt(buffer.declared)} along {side}"
            fix = Fix(f"say how it lies: `along {side}`", (Edit(end, end, f" along {side}"),))
        else:
            size = buffer.named_size(0)
            shape = size.id if size else str(buffer.shape[0])
            line = f"Allocate {key[0]} in register ({shape}) as {buffer.dtype} along {side}"
            first = next(s for s in self.program.tree.body if isinstance(s, Allocate))
            start = first.span.start
            fix = Fix(f"say how it lies: `{line}`", (Edit(start, start, f"{line}\n"),))
        hint = f"if it lies along the {side}, say so in its Allocate: `{line}`"
        hint = hint if certain else f"give both Copies the same place; {hint}"
        return {"help": hint, "fix": fix if certain or meant else None}

    def combine(self, op: str, args: list[Operand], frame: Frame, stmt: Statement) -> Operand:
        """The result of one elementwise operation, with what is known of it."""
        tiles = [a for a in args if isinstance(a, Tile)]
        if not tiles:
            return self._scalar(op, args, stmt)
        if op == "%" and not isinstance(args[1], Tile | Unknown) and args[1] == 0:
            raise self.machine.halt("FW306", "this divides by zero", stmt.span)
        numbers = [a.data if isinstance(a, Tile) else a for a in args]
        data = self.machine.math.apply(op, numbers) if self.machine.math else None
        layouts = {t.layout for t in tiles}
        if "A" in layouts:
            text = "this tile has been reshaped into an operand: compute on it before the Reshape"
            self.misused = True
            self.machine.report("FW502", text, stmt.span)
        return Tile(
            frame.shape,
            frame.axes,
            "fp32",
            self.machine.same_place(tiles, stmt),
            self.sums.covered(op, args, stmt),
            "C" if "C" in layouts else None,
            self._kind(op, args, stmt),
            together(tiles),
            data=data,
        )

    def _scalar(self, op: str, args: list[Operand], stmt: Statement) -> Value:
        values = [a for a in args if not isinstance(a, Tile)]
        if op == "not":
            return Unknown(f"not {values[0]}") if isinstance(values[0], Unknown) else not values[0]
        try:
            return apply_scalar(op, Num("0", span=stmt.span), values)
        except NotScalar as problem:
            raise self.machine.halt("FW306", problem.why, stmt.span) from None

    def _kind(self, op: str, args: list[Operand], stmt: Statement) -> Kind | None:
        found = [a.kind if isinstance(a, Tile) else None for a in args]
        try:
            if op == "-" and isinstance(args[0], Tile) and args[0].start:
                return kinds.from_start(found[1])
            if op == "*" and all(isinstance(a, Tile) and len(a.shape) == 2 for a in args):
                return kinds.of_product(found[0], found[1])
            if op in ("+", "-", "*", "/"):
                return kinds.of_operator(op, found[0], found[1])
            return kinds.of_function(op, found, stmt)
        except Unrescaled as problem:
            mixed = unrescaled(problem.newer.stmt, stmt)
            self.machine.findings.setdefault((mixed.code, mixed.span), mixed)
            return found[-1]


def _names_in(copy: Copy) -> set[str]:
    """The names in the coordinates of a Copy."""
    return {name.id for coord in copy.coords or () for name in value_names(coord.value)}


def _weights(tile: Tile) -> bool:
    return tile.kind is not None and tile.kind.name == "weights"


def _not_a_product(tile: Tile) -> tuple[bool, str]:
    """A sort key that puts results of GEMMs first, whatever the order of the operands."""
    return tile.layout is None, " ".join(w.tensor for w in tile.axes if w is not None)


def _position_of(axes: list[Where | None]) -> Where | None:
    """The positions of an axis of a result; positions along a sequence take precedence."""
    placed = [w for w in axes if w is not None]
    return next((w for w in placed if w.label == "L"), placed[0] if placed else None)


def unrescaled(moved: Statement, stmt: Statement) -> Diagnostic:
    """FW607 for a sum that mixes weights relative to two different maxima."""
    text = "the maximum changes here, but the sums so far are not rescaled"
    where = (Label(stmt.span, "weights relative to the new maximum are added to the old sum"),)
    hint = "multiply the old sum by exp(old maximum - new maximum) first"
    fix = None
    if isinstance(moved, Compute) and moved.state and isinstance(stmt, Compute) and stmt.target:
        hint = f"`... with {' and '.join(s.id for s in moved.state)} and rescale {stmt.target.id}`"
        joint = ", " if moved.rescale else " and rescale "
        edit = Edit(moved.span.end, moved.span.end, f"{joint}{stmt.target.id}")
        fix = Fix(f"rescale `{stmt.target.id}` too", (edit,))
    return Diagnostic("FW607", text, moved.span, secondary=where, help=hint, fix=fix)
