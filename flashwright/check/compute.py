"""The Compute half of the machine: expressions over tiles, GEMM, Softmax, Mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashwright.check import kinds
from flashwright.check.fragment import missing_reshape
from flashwright.check.kinds import Unrescaled
from flashwright.check.program import Key
from flashwright.check.scalars import NotScalar, Unknown, Value
from flashwright.check.scalars import apply as apply_scalar
from flashwright.check.tiles import (
    Covered,
    Epoch,
    Kind,
    Masked,
    Place,
    Tile,
    Where,
    covering,
    kept,
    together,
)
from flashwright.check.vocabulary import ARITHMETIC
from flashwright.lang.diagnostic import Edit, Fix, Label
from flashwright.lang.nodes import (
    Binary,
    Call,
    Compute,
    Expr,
    For,
    Index,
    Name,
    Num,
    Span,
    Statement,
    Transpose,
    Unary,
)

if TYPE_CHECKING:
    from flashwright.check.machine import Machine

LINEAR = ("+", "-", "*")


@dataclass(frozen=True)
class Frame:
    """The rows and columns that an expression is computed over."""

    shape: tuple[int, ...]
    axes: tuple[Where | None, ...]


Operand = Tile | Value


class Computer:
    """Executes Compute statements for a Machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.program = machine.program
        self._misused = False  # an operand was computed on: its element type is no more news

    def compute(self, stmt: Compute) -> None:
        """Execute one statement."""
        verb = stmt.verb.id.lower() if stmt.verb else ""
        if verb == "gemm":
            self._gemm(stmt)
        elif verb == "softmax":
            self._softmax(stmt)
        elif verb == "mask":
            self._mask(stmt)
        else:
            self._elementwise(stmt, _expression(stmt, verb))

    def _key(self, name: Name) -> Key:
        key = self.program.tile(name)
        assert key is not None, name
        return key

    def _read(self, name: Name, stmt: Statement) -> Tile:
        return self.machine.read(self._key(name), name, stmt)

    # --- expressions ----------------------------------------------------------------------

    def _elementwise(self, stmt: Compute, expr: Expr) -> None:
        assert stmt.target is not None
        key = self._key(stmt.target)
        frame = self._frame(expr, self.program.buffers[key].shape)
        value = self._tile(self._value(expr, frame, stmt), frame)
        if stmt.mode == "get new" and key not in self.machine.cells:
            self._read(stmt.target, stmt)
        if stmt.mode == "accumulate":
            total = self._total(stmt, key)
            value = self._tile(self._combine("+", [total, value], frame, stmt), frame)
        self.machine.write(key, value, stmt)

    def _total(self, stmt: Compute, key: Key) -> Tile:
        """The accumulator's present value; it must have been initialised."""
        assert stmt.target is not None
        if key not in self.machine.cells:
            name = stmt.target.id
            raise self.machine.halt(
                "FW601",
                f"`{name}` is accumulated into before it has a value",
                stmt.target.span,
                help=f"initialise it above the loop: `Compute 0 and get {name}`",
            )
        return self._read(stmt.target, stmt)

    def _frame(self, expr: Expr, shape: tuple[int, ...]) -> Frame:
        """Rows and columns come from the two-dimensional operands, else from the vectors."""
        tiles = [self.machine.cells[k].tile for k in self._tiles(expr) if k in self.machine.cells]
        for rank in (2, 1):
            for tile in tiles:
                if len(tile.shape) == rank == len(shape) and any(tile.axes):
                    return Frame(tile.shape, tile.axes)
        return Frame(shape, (None,) * len(shape))

    def _tiles(self, expr: Expr) -> list[Key]:
        """The tiles an expression combines; a row reduction gives only its rows."""
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
        return []

    def _tile(self, value: Operand, frame: Frame) -> Tile:
        """A scalar becomes a tile filled with it."""
        if isinstance(value, Tile):
            data = value.data
            if self.machine.math is not None:
                data = self.machine.math.fill(data, frame.shape)
            return replace(value, shape=frame.shape, axes=frame.axes, data=data)
        data = self.machine.math.fill(value, frame.shape) if self.machine.math else None
        return Tile(frame.shape, frame.axes, "fp32", data=data)

    def _value(self, expr: Expr, frame: Frame, stmt: Statement) -> Operand:
        match expr:
            case Num() | Index():
                return self.machine.scalar(expr)
            case Name("q_idx" | "kv_idx"):
                return self._position(expr, frame)
            case Name(id) if id in self.machine.env:
                return self.machine.env[id]
            case Name():
                return self._turned(self._read(expr, stmt), frame, expr)
            case Unary("not", operand):
                return self._combine("not", [self._value(operand, frame, stmt)], frame, stmt)
            case Unary(_, operand):
                return self._combine("*", [-1, self._value(operand, frame, stmt)], frame, stmt)
            case Binary(op, left, right):
                args = [self._value(left, frame, stmt), self._value(right, frame, stmt)]
                return self._combine(op, args, frame, stmt)
            case Call(func, args) if func.id.lower() in ("rowmax", "rowsum"):
                return self._turned(self._reduce(func.id.lower(), args[0], stmt), frame, expr)
            case Call(func, args):
                values = [self._value(a, frame, stmt) for a in args]
                return self._combine(func.id.lower(), values, frame, stmt)
            case Transpose():
                raise AssertionError("operations.py lets `.T` into GEMMs only")

    def _position(self, name: Name, frame: Frame) -> Tile:
        axis = 0 if name.id == "q_idx" else 1
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

    def _turned(self, tile: Tile, frame: Frame, expr: Expr) -> Tile:
        """A tile seen in the frame: a vector lies along the axis whose positions it has."""
        if len(tile.shape) == len(frame.shape):
            for have, want in zip(tile.axes, frame.axes, strict=True):
                if have is not None and want is not None and have != want:
                    self._disagree(expr.span, have, want)
            return tile
        axis = self._axis(tile, frame, expr)
        data = self.machine.math.turn(tile.data, axis) if self.machine.math else None
        return replace(tile, data=data)

    def _axis(self, tile: Tile, frame: Frame, expr: Expr) -> int:
        have = tile.axes[0]
        fits = [a for a, n in enumerate(frame.shape) if n == tile.shape[0]]
        if have is not None:
            for axis in fits:
                if frame.axes[axis] == have:
                    return axis
            for want in frame.axes:
                if want is not None and want.dim == have.dim:
                    self._disagree(expr.span, have, want)
                    return fits[0]
            fits = [a for a in fits if frame.axes[a] is None] or fits
        return fits[0]

    def _disagree(self, span: Span, have: Where, want: Where) -> None:
        text = f"positions {have} of `{have.tensor}` meet {want} of `{want.tensor}`"
        filled = (self.program.dest(have.copy), self.program.dest(want.copy))
        where = _origins(have, want) + self.program.guards_of(*filled)
        self.machine.report("FW603", text, span, secondary=where, label=self.machine.problem())

    def _combine(self, op: str, args: list[Operand], frame: Frame, stmt: Statement) -> Operand:
        tiles = [a for a in args if isinstance(a, Tile)]
        if not tiles:
            return self._scalar(op, args, stmt)
        numbers = [a.data if isinstance(a, Tile) else a for a in args]
        data = self.machine.math.apply(op, numbers) if self.machine.math else None
        layouts = {t.layout for t in tiles}
        if "A" in layouts:
            text = "this tile has been reshaped into an operand: compute on it before the Reshape"
            self._misused = True
            self.machine.report("FW502", text, stmt.span)
        return Tile(
            frame.shape,
            frame.axes,
            "fp32",
            self._same_place(tiles, stmt),
            self._covered(op, args, stmt),
            "C" if "C" in layouts else None,
            self._kind(op, args, stmt),
            together(tiles),
            data,
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
            if op in ("+", "-", "*", "/"):
                return kinds.of_operator(op, found[0], found[1])
            return kinds.of_function(op, found, stmt)
        except Unrescaled as problem:
            self._unrescaled(problem, stmt)
            return found[-1]

    def _unrescaled(self, problem: Unrescaled, stmt: Statement) -> None:
        moved = problem.newer.stmt
        text = "the maximum moves here, but what was summed before is not rescaled"
        where = (Label(stmt.span, "weights relative to the new maximum are added to the old sum"),)
        hint = "multiply the old sum by exp(old maximum - new maximum) first"
        fix = None
        if isinstance(moved, Compute) and moved.state and isinstance(stmt, Compute) and stmt.target:
            hint = (
                f"`... with {' and '.join(s.id for s in moved.state)} and rescale {stmt.target.id}`"
            )
            joint = ", " if moved.rescale else " and rescale "
            edit = Edit(moved.span.end, moved.span.end, f"{joint}{stmt.target.id}")
            fix = Fix(f"rescale `{stmt.target.id}` too", (edit,))
        self.machine.report("FW607", text, moved.span, secondary=where, help=hint, fix=fix)

    def _same_place(self, tiles: list[Tile], stmt: Statement) -> dict[str, Place]:
        """The fixed coordinates (head, batch) of what is combined; they must agree."""
        at: dict[str, Place] = {}
        for tile in tiles:
            for dim, place in tile.at.items():
                other = at.setdefault(dim, place)
                if other.value != place.value:
                    text = (
                        f"`{other.tensor}` is at {other.value} of {dim}, "
                        f"`{place.tensor}` at {place.value}"
                    )
                    where = tuple(
                        Label(p.copy.span, f"`{p.tensor}` comes from here") for p in (other, place)
                    )
                    self.machine.report(
                        "FW603", text, stmt.span, secondary=where, label=self.machine.problem()
                    )
        return at

    # --- coverage: what a sum has taken in --------------------------------------------------

    def _covered(self, op: str, args: list[Operand], stmt: Statement) -> Covered:
        """Linear operations keep a sum a sum; any other needs it complete."""
        tiles = [a for a in args if isinstance(a, Tile)]
        if op == "where":
            tiles = [a for a in args[1:] if isinstance(a, Tile)]
        elif op == "/":
            if isinstance(args[1], Tile):
                self.complete(args[1], stmt)
            tiles = [a for a in args[:1] if isinstance(a, Tile)]
        elif op not in LINEAR:
            for tile in tiles:
                self.complete(tile, stmt)
            return {}
        merged: Covered = {}
        for tile in tiles:
            merged = self._joined(merged, tile.covered, stmt)
        return merged

    def _joined(self, total: Covered, term: Covered, stmt: Statement) -> Covered:
        merged = dict(total)
        for key, part in term.items():
            have = merged.get(key)
            if have is None:
                merged[key] = part
                continue
            twice = have.overlap(part) if have.known and part.known else None
            if twice and have.ranges != part.ranges:
                self._twice(part.dim, twice, stmt)
            merged[key] = have.join(part)
        return merged

    def _twice(self, dim: str, twice: tuple[int, int], stmt: Statement) -> None:
        text = f"{dim} {twice[0]}..{twice[1] - 1} is added a second time"
        self.machine.report(
            "FW606",
            text,
            self._loop(stmt).span,
            label=self.machine.problem(),
            secondary=(Label(stmt.span, "here"), *self._bounds_of(self._loop(stmt))),
        )

    def _loop(self, stmt: Statement) -> Statement:
        return self.machine.loops[-1] if self.machine.loops else stmt

    def _bounds_of(self, stmt: Statement) -> tuple[Label, ...]:
        """Where the ends of a loop are set, if not in its own line."""
        return self.program.definitions(stmt.low, stmt.high) if isinstance(stmt, For) else ()

    def complete(self, tile: Tile, stmt: Statement) -> None:
        """A sum that is used as such must have taken in everything the masks let through."""
        from flashwright.check.masks import any_visible

        for part in tile.covered.values():
            if not part.demanded:
                continue
            for low, high in part.missing():
                if any_visible(tile.masks, part.dim, low, high):
                    text = f"{part.axis} {low}..{high - 1} is never added in"
                    where = (
                        Label(stmt.span, "the sum is used here"),
                        *_masks(tile, part.dim, "the mask shows it"),
                        *self._bounds_of(part.stmt),
                    )
                    self.machine.report(
                        "FW604",
                        text,
                        part.stmt.span,
                        secondary=where,
                        label=self.machine.problem(),
                        help=_stateless(stmt),
                    )
                    break

    def _summing(self, tile: Tile, stmt: Statement) -> Covered:
        where = tile.axes[1]
        if where is None:
            return {}
        return covering(where, tile.at, self._loop(stmt))

    def _reduce(self, op: str, arg: Expr, stmt: Statement) -> Tile:
        keys = [k for k in self._tiles(arg) if len(self.program.buffers[k].shape) == 2]
        frame = self._frame(arg, self.program.buffers[keys[0]].shape)
        tile = self._tile(self._value(arg, frame, stmt), frame)
        self.complete(tile, stmt)
        self._no_tail(tile, stmt, arg.span)
        return Tile(
            frame.shape[:1],
            frame.axes[:1],
            "fp32",
            kept(tile.at, frame.axes[:1]),
            self._summing(tile, stmt) if op == "rowsum" else {},
            tile.layout,
            kinds.of_function(op, [tile.kind], stmt),
            tile.masks,
            self.machine.math.reduce(op, tile.data) if self.machine.math else None,
        )

    def _no_tail(self, tile: Tile, stmt: Statement, span: Span) -> None:
        """Keys past the end of the sequence must be masked before rows are reduced."""
        from flashwright.check.masks import any_visible

        cols = tile.axes[1]
        if cols is None or not cols.ragged:
            return
        assert not isinstance(cols.start, Unknown)
        if any_visible(tile.masks, cols.dim, cols.extent, cols.start + cols.size):
            text = (
                f"columns past {cols.dim} = {cols.extent} are not masked and count as scores of 0"
            )
            hint = f"`Compute Mask ... where kv_idx < {cols.dim}` before this line"
            where = _masks(tile, cols.dim, "this mask lets them through")
            self.machine.report(
                "FW609", text, span, secondary=where, help=hint, label=self.machine.problem()
            )

    # --- Mask, Softmax, GEMM --------------------------------------------------------------

    def _mask(self, stmt: Compute) -> None:
        name, key = _name(stmt.args[0]), self._key(_name(stmt.args[0]))
        assert stmt.where is not None
        tile = self._read(name, stmt)
        self.complete(tile, stmt)
        if tile.kind is not None and tile.kind.name == "weights":
            text = f"`{name.id}` has been through the exponential: -inf is no weight"
            hint = "move the Mask up, between the GEMM and the Softmax"
            self.machine.report("FW608", text, stmt.span, help=hint)
        frame = Frame(tile.shape, tile.axes)
        shown = self._value(stmt.where, frame, stmt)
        masked = self._tile(
            self._combine("where", [shown, tile, float("-inf")], frame, stmt), frame
        )
        cols = tile.axes[1]
        if cols is not None:
            note = Masked(
                stmt,
                dict(self.machine.env),
                tile.axes[0],
                cols.dim,
                frozenset(self.machine.varying),
            )
            masked = replace(masked, masks=(*(m for m in tile.masks if m.stmt is not stmt), note))
        self.machine.write(key, replace(masked, kind=tile.kind), stmt)

    def _softmax(self, stmt: Compute) -> None:
        """The statement's definition, spelt out (docs/language.md has the same lines)."""
        name = _name(stmt.args[0])
        scores = self._read(name, stmt)
        frame = Frame(scores.shape, scores.axes)
        rows = Frame(frame.shape[:1], frame.axes[:1])
        top = self._reduce("rowmax", name, stmt)
        if not stmt.state:
            weights = self._exp(scores, top, frame, name, stmt)
            self.machine.write(self._key(name), weights, stmt)
            total = self._turned(self._reduce("rowsum", name, stmt), frame, name)
            done = self._combine("/", [weights, total], frame, stmt)
            self.machine.write(self._key(name), self._tile(done, frame), stmt)
            return
        old, total = (self._state(n, stmt) for n in stmt.state)
        new = replace(
            self._tile(self._combine("max", [old, top], rows, stmt), rows),
            kind=Kind("max", Epoch(stmt)),
        )
        drop = self._combine("exp", [self._combine("-", [old, new], rows, stmt)], rows, stmt)
        self.machine.write(self._key(name), self._exp(scores, new, frame, name, stmt), stmt)
        added = self._reduce("rowsum", name, stmt)
        self.machine.cells[self._key(name)].read = False
        kept = self._combine("*", [total, drop], rows, stmt)
        summed = self._combine("+", [kept, added], rows, stmt)
        self.machine.write(self._key(stmt.state[0]), new, stmt)
        self.machine.write(self._key(stmt.state[1]), self._tile(summed, rows), stmt)
        for held in stmt.rescale:
            self._rescale(held, drop, stmt)

    def _exp(self, scores: Tile, top: Tile, frame: Frame, name: Name, stmt: Compute) -> Tile:
        below = self._combine("-", [scores, self._turned(top, frame, name)], frame, stmt)
        return self._tile(self._combine("exp", [below], frame, stmt), frame)

    def _state(self, name: Name, stmt: Compute) -> Tile:
        return self._initialised(name, "-1e30" if name is stmt.state[0] else "0", stmt)

    def _initialised(self, name: Name, start: str, stmt: Compute) -> Tile:
        """The present value of what a Softmax carries along; it must have one."""
        if self._key(name) not in self.machine.cells:
            raise self.machine.halt(
                "FW601",
                f"`{name.id}` is used before it has a value",
                name.span,
                help=f"initialise it above the loop: `Compute {start} and get {name.id}`",
            )
        return self._read(name, stmt)

    def _rescale(self, name: Name, drop: Operand, stmt: Compute) -> None:
        tile = self._initialised(name, "0", stmt)
        frame = Frame(tile.shape, tile.axes)
        factor = (
            drop
            if not isinstance(drop, Tile) or len(tile.shape) == 1
            else (self._turned(drop, frame, name))
        )
        scaled = self._combine("*", [tile, factor], frame, stmt)
        self.machine.write(self._key(name), self._tile(scaled, frame), stmt)

    def _gemm(self, stmt: Compute) -> None:
        left, right = (self._operand(arg, stmt) for arg in stmt.args)
        assert stmt.target is not None
        if left.layout == "C":
            found = missing_reshape(stmt, _name(stmt.args[0]))
            self.machine.findings.setdefault((found.code, found.span), found)
        elif left.dtype != right.dtype and not self._misused:
            text = f"the operands are {left.dtype} and {right.dtype}; an MMA takes one type"
            kept = f"as {right.dtype}"
            hint = f"round the first: `Reshape ... {kept}`, or Allocate it `{kept}`"
            self.machine.report("FW504", text, stmt.span, help=hint)
        self.complete(left, stmt)
        right = self._contracts(left, right, stmt)
        product = self._product(left, right, stmt)
        key = self._key(stmt.target)
        if stmt.mode == "accumulate":
            product = self._accumulated(self._total(stmt, key), product, stmt)
        elif stmt.mode == "get new":
            self._read(stmt.target, stmt)
        self.machine.write(key, product, stmt)

    def _operand(self, arg: Expr, stmt: Compute) -> Tile:
        tile = self._read(_name(arg), stmt)
        if isinstance(arg, Transpose):
            return replace(tile, shape=tile.shape[::-1], axes=tile.axes[::-1])
        return tile

    def _product(self, left: Tile, right: Tile, stmt: Compute) -> Tile:
        turned = (isinstance(stmt.args[0], Transpose), isinstance(stmt.args[1], Transpose))
        data: Any = None
        if self.machine.math is not None:
            data = self.machine.math.gemm(left.data, right.data, turned)
        kind = left.kind if left.kind and left.kind.name == "weights" else None
        return Tile(
            (left.shape[0], right.shape[1]),
            (left.axes[0], right.axes[1]),
            "fp32",
            kept(self._same_place([left, right], stmt), (left.axes[0], right.axes[1])),
            self._summing(left, stmt),
            "C",
            kind,
            left.masks,
            data,
        )

    def _accumulated(self, total: Tile, product: Tile, stmt: Compute) -> Tile:
        for have, want in zip(total.axes, product.axes, strict=True):
            if have is not None and want is not None and have != want:
                self._disagree(stmt.span, have, want)
        frame = Frame(product.shape, product.axes)
        for key, part in product.covered.items():
            have2 = total.covered.get(key)
            twice = have2.overlap(part) if have2 and have2.known and part.known else None
            if twice:
                self._twice(part.dim, twice, stmt)
        value = self._combine("+", [total, product], frame, stmt)
        return replace(self._tile(value, frame), layout="C")

    def _contracts(self, left: Tile, right: Tile, stmt: Compute) -> Tile:
        """Both sides of the sum are the same positions. The right operand, mended where possible,
        so that one missing transpose does not make every later statement look wrong."""
        have, want = left.axes[1], right.axes[0]
        if have is None or want is None or have == want:
            return right
        if have.dim == want.dim:
            self._disagree(stmt.span, have, want)
            return right
        a, b = (_name(arg).id for arg in stmt.args)
        text = (
            f"the columns of `{a}` are positions on {have.label} ({have.dim}), the rows of `{b}` "
            f"are positions on {want.label} ({want.dim}): summing over them means nothing"
        )
        fix = None
        arg = stmt.args[1]
        if right.axes[1] is not None and right.axes[1].dim == have.dim:
            if isinstance(arg, Transpose):
                edit = Edit(arg.operand.span.end, arg.span.end, "")
                fix = Fix(f"drop the transpose: `{b}`", (edit,))
            else:
                edit = Edit(arg.span.end, arg.span.end, ".T")
                fix = Fix(f"transpose it: `{b}.T`", (edit,))
        where = _origins(have, want)
        self.machine.report("FW503", text, stmt.span, secondary=where, fix=fix)
        return replace(right, axes=right.axes[::-1]) if fix else right


def _masks(tile: Tile, dim: str, text: str) -> tuple[Label, ...]:
    return tuple(Label(m.stmt.span, text) for m in tile.masks if m.dim == dim)


def _origins(*places: Where) -> tuple[Label, ...]:
    seen: Mapping[Span, Label] = {
        p.copy.span: Label(p.copy.span, f"`{p.tensor}`: {p}") for p in places
    }
    return tuple(seen.values())


def _stateless(stmt: Statement) -> str | None:
    """What to say of a Softmax that sees one block after another and remembers none."""
    verb = stmt.verb.id.lower() if isinstance(stmt, Compute) and stmt.verb else ""
    if verb != "softmax" or not isinstance(stmt, Compute) or stmt.state:
        return None
    return "in a loop a Softmax keeps its state: `with Smax and Ssum and rescale O`"


def _name(arg: Expr) -> Name:
    name = arg.operand if isinstance(arg, Transpose) else arg
    assert isinstance(name, Name)
    return name


def _expression(stmt: Compute, verb: str) -> Expr:
    """The verb form `Multiply A, x` as the expression it stands for."""
    if stmt.verb is None:
        return stmt.args[0]
    if verb in ARITHMETIC:
        return Binary(ARITHMETIC[verb], stmt.args[0], stmt.args[1], span=stmt.span)
    return Call(stmt.verb, stmt.args, span=stmt.span)
