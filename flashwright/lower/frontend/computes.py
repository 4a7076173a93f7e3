"""The Compute statements in tile IR: elementwise work, Softmax spelt out, masks, GEMMs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction

from flashwright.lang import nodes as tl
from flashwright.lang.nodes import Expr, Name
from flashwright.lower import ir
from flashwright.lower.element import (
    COLUMN,
    ROW,
    TILE,
    Element,
    Leaf,
    Op,
    Reduce,
    Reduction,
    element,
    fold,
    literal,
    times,
)
from flashwright.lower.frontend.body import Body, Frame
from flashwright.lower.frontend.gathers import gathered, in_whole_numbers
from flashwright.lower.frontend.masks import conjuncts, end, in_row
from flashwright.lower.frontend.positions import Axes, axis_of
from flashwright.lower.frontend.scalars import Scalar, refused
from flashwright.lower.names import cpp, tile_name
from flashwright.lower.term import Position, Term, Type, Var
from flashwright.program.program import Buffer, Key
from flashwright.program.vocabulary import CONSTANTS, DTYPES, POSITIONS
from flashwright.semantics.compute import expression

DEFERRED = "(a constant factor: taken along by what reads the tile next)"


class Computes:
    """Lowers Compute statements for a pass over the program.

    Deferred scaling: a positive constant that a tile is multiplied by at the end of a statement
    waits. `pending` keeps the factor, and what reads the tile next takes it along (one FMA), as a
    softmax does with its scale.
    """

    def __init__(self, made: Body, sides: dict[Key, ir.Side], decided: bool) -> None:
        self.made = made
        self.program = made.program
        declared = {k: b.along for k, b in self.program.buffers.items() if b.along is not None}
        self.sides: dict[Key, ir.Side] = {**sides, **declared}
        self.decided = decided  # how all vectors lie, by the passes before
        self.pending: dict[Key, tuple[Leaf, ir.Compute]] = {}  # the factor, its statement

    # --- tiles ----------------------------------------------------------------------------

    def key(self, name: Name) -> Key:
        """The tile that a name means."""
        found = self.program.tile(name)
        if found is None:
            raise refused(f"`{name.id}` is no tile", name.span)
        return found

    def leaf(self, key: Key) -> Leaf:
        """A tile's or vector's element at the present row and column."""
        if key[1] != "register":
            hint = f"Copy `{key[0]}` from shared to register first"
            raise refused("elementwise work is done in registers", None, hint)
        buffer = self.program.buffers[key]
        axes = TILE if len(buffer.shape) == 2 else _AXES[self._side(key)]
        kind: Type = "int" if buffer.dtype == "int32" else "float"
        return element(tile_name(key), axes, kind)

    def read(self, key: Key, frame: Frame) -> Element:
        """A tile seen in a frame; a vector lies along the axis whose positions it has."""
        buffer = self.program.buffers[key]
        if len(buffer.shape) == 1 and len(frame.shape) == 2 and buffer.along is None:
            self._settle_side(key, buffer, frame)
        found: Element = self.leaf(key)
        return times(found, self.pending[key][0]) if key in self.pending else found

    def _settle_side(self, key: Key, buffer: Buffer, frame: Frame) -> None:
        positions = self.made.positions
        (own,) = self.made.axes.get(key, (None,))
        fits = [i for i, n in enumerate(frame.shape) if n == buffer.shape[0]]
        agreed = [i for i in fits if positions.agree(own, frame.axes[i])]
        if not agreed and own is not None and not own.lost:
            # The checker has seen that the positions agree: on the axis of the same dimension.
            agreed = [i for i in fits if (at := frame.axes[i]) and at.dim == own.dim]
        told = agreed or own is None or key in self.sides
        if len(fits) > 1 and (len(agreed) > 1 or not told):
            text = f"`{key[0]}` fits the rows and the columns, and where it lies cannot be told"
            hint = "copy it in the same body as the tile it is combined with"
            raise refused(text, buffer.declared.span, hint)
        side: ir.Side = "rows" if (agreed or fits)[0] == 0 else "columns"
        lies = None if key not in self.sides else 0 if self.sides[key] == "rows" else 1
        if agreed or lies not in fits:
            self._lies(key, side)

    def _side(self, key: Key) -> ir.Side:
        """Along what a vector lies; one that meets no tile goes where it fits."""
        by_rows = self.program.buffers[key].shape[0] % (16 * self.program.warps) == 0
        return self.sides.get(key, "rows" if by_rows else "columns")

    def decide(self) -> None:
        """Note how all vectors lie, once all is known."""
        for key, buffer in self.program.buffers.items():
            if self.decided and key[1] == "register" and len(buffer.shape) == 1:
                self.sides[key] = self._side(key)

    def _lies(self, key: Key, side: ir.Side) -> None:
        """Note along what a vector lies: in the whole kernel, as the walks before found it."""
        if self.decided and self.sides.get(key, side) != side:
            text = f"`{key[0]}` goes along the rows of one tile and along the columns of another"
            hint = "give it two names: Copy it twice, or through shared memory"
            raise refused(text, self.program.buffers[key].declared.span, hint)
        self.sides[key] = side

    def settle(self, key: Key | None = None) -> None:
        """Carry out deferred scaling, of one tile or of all."""
        for held in [key] if key else list(self.pending):
            if held not in self.pending:
                continue
            factor, deferred = self.pending.pop(held)
            target, buffer = self.leaf(held), self.program.buffers[held]
            assign = ir.Assign(target, times(target, factor), buffer)
            done = ir.Compute(buffer.shape, (assign,), origin=deferred.origin)
            if self.made.body and self.made.body[-1] is deferred:
                self.made.body[-1] = done
            else:
                self.made.emit(replace(done, origin=deferred.origin.untitled))

    def forget(self, key: Key) -> None:
        """Drop the deferred factor of a tile that is about to be overwritten."""
        self.pending.pop(key, None)

    # --- statements -----------------------------------------------------------------------

    def compute(self, stmt: tl.Compute) -> None:
        """Append the nodes of one statement; Failed with FW811 where it has no translation."""
        match stmt.operation:
            case "gemm":
                self._gemm(stmt)
            case "softmax":
                self._softmax(stmt)
            case "mask":
                self._mask(stmt)
            case _:
                self._elementwise(stmt, expression(stmt))
        for name in (stmt.target, *stmt.args[:1], *stmt.state, *stmt.rescale):
            key = self.program.tile(name) if isinstance(name, Name) else None
            if key and self.made.direct.get(key) == "computed" and self._wrote(stmt, name):
                self.settle(key)
                self.made.as_operand(key)

    def _wrote(self, stmt: tl.Compute, name: object) -> bool:
        """Whether a statement gives a tile that it names a value."""
        return name is stmt.target or stmt.operation in ("mask", "softmax")

    def _gemm(self, stmt: tl.Compute) -> None:
        assert stmt.target is not None
        (left, left_transposed), (right, transposed) = map(_operand, stmt.args)
        a, b, target = self.key(left), self.key(right), self.key(stmt.target)
        if left_transposed:
            self._check_left_transposed(a, left)
        if b[1] != "shared":
            hint = f"Copy `{b[0]}` to shared first"
            raise refused("the right operand of a GEMM comes from shared memory", right.span, hint)
        self._whole_steps(b, transposed, stmt)
        in_order = a[1] == "shared" or self.made.direct.get(a) == "loaded"
        if in_order != transposed and DTYPES[self.program.buffers[b].dtype] == 1:
            hint = "Reshape the left one in registers, or give the right one transposed (`.T`)"
            if transposed:
                hint = "take the left one from shared memory, or the right one as it lies"
            raise refused("8-bit rows times 8-bit columns lie in different orders", stmt.span, hint)
        fresh = stmt.mode != "accumulate"
        if fresh:
            self.forget(target)
        else:
            self.settle(target)
        axes = self.made.axes
        rows, cols = axes.get(a, (None, None)), axes.get(b, (None, None))
        axes[target] = (rows[1 if left_transposed else 0], cols[0 if transposed else 1])
        gemm = ir.Gemm(target, a, b, transposed, fresh, left_transposed, origin=ir.origin(stmt))
        self.made.emit(gemm)

    def _check_left_transposed(self, left: Key, name: Name) -> None:
        """The left operand is transposed on its way from shared memory, in units of 16 bits."""
        if left[1] != "shared":
            hint = f"Copy `{left[0]}` to shared first"
            raise refused("a transposed left operand comes from shared memory", name.span, hint)
        if DTYPES[self.program.buffers[left].dtype] != 2:
            hint = "exchange the operands, so that k lies along the columns of both"
            raise refused("the left operand in 8 bits lies row by row", name.span, hint)

    def _whole_steps(self, right: Key, transposed: bool, stmt: tl.Compute) -> None:
        """Operands are fetched 16 columns and 32 bytes along k at a time."""
        buffer = self.program.buffers[right]
        columns, depth = buffer.shape if transposed else buffer.shape[::-1]
        by = 32 // DTYPES[buffer.dtype]
        if columns % 16 or depth % by:
            text = f"a GEMM of {columns} columns and depth {depth}"
            hint = f"columns go by 16 and the depth by {by}: change the tile of `{right[0]}`"
            raise refused(text, stmt.span, hint)

    def _elementwise(self, stmt: tl.Compute, expr: Expr) -> None:
        assert stmt.target is not None
        target = self.key(stmt.target)
        frame = self._frame(expr, target)
        self._same_side(expr, target)
        value = self.element(expr, frame)
        if stmt.mode == "accumulate":
            value = Op("+", (self.read(target, frame), value))
        value = fold(value)
        own, buffer = self.leaf(target), self.program.buffers[target]
        # What is rounded as it is written must be whole by then.
        can_wait = len(own.axes) == 2 and buffer.dtype == "fp32"
        value, factor = _factor(value) if can_wait else (value, None)
        node = replace(self._node(stmt, frame, ()), cols=self._columns(expr, frame))
        if value != own:
            self.forget(target)
            self.made.axes[target] = frame.axes[: len(buffer.shape)]
            self.made.emit(replace(node, assigns=(ir.Assign(own, value, buffer),)))
            node = replace(node, origin=node.origin.untitled)
        if factor is not None:
            put_off = replace(node, note=DEFERRED)
            self.pending[target] = factor, put_off
            self.made.emit(put_off)

    def scatter(self, stmt: tl.Copy, optional: bool) -> None:
        """Append the addition of a tile's elements to global memory by index."""
        source = self.program.source(stmt)
        self.settle(source)
        buffer = self.program.buffers[source]
        frame = Frame(buffer.shape, self.made.axes.get(source, (None,) * len(buffer.shape)), buffer)
        place = gathered(self.made, stmt.element, frame, self.element)
        rows, cols = self._origins(frame)
        node = ir.Scatter(
            source,
            self.leaf(source),
            place,
            self.program.tensors[stmt.element.tensor.id],
            buffer.shape,
            rows,
            cols,
            optional,
            origin=ir.origin(stmt),
        )
        self.made.emit(node)

    def _mask(self, stmt: tl.Compute) -> None:
        name = stmt.args[0]
        assert isinstance(name, Name)
        assert stmt.where is not None
        key = self.key(name)
        buffer = self.program.buffers[key]
        frame = Frame(buffer.shape, self.made.axes.get(key, (None, None)), buffer)
        tile = self.leaf(key)
        hidden, origin = literal(float("-inf")), ir.origin(stmt)
        rows, cols = self._origins(frame)
        for always, row, condition in self._parts(stmt.where, frame):
            shown = in_whole_numbers(self.made, self.element(condition, frame))
            assign = ir.Assign(tile, Op("where", (shown, tile, hidden)), buffer)
            last = end(self.made, condition, frame)
            mask = ir.Compute(
                buffer.shape, (assign,), rows, cols, always, end=last, clear=row, origin=origin
            )
            self.made.emit(mask)
            origin = origin.untitled

    def _parts(
        self, condition: Expr, frame: Frame
    ) -> Iterator[tuple[Term | None, Element | None, Expr]]:
        """The parts of a mask that a tile or a row can leave out, each with its test, and all
        others as one."""
        rest: Expr | None = None
        for always, part in conjuncts(self.made, condition, frame):
            row = None if always is not None else in_row(self.made, part, frame, self.element)
            if always is not None or row is not None:
                yield always, row, part
            else:
                rest = part if rest is None else tl.Binary("and", rest, part)
        if rest is not None:
            yield None, None, rest

    def _softmax(self, stmt: tl.Compute) -> None:
        """The statement's definition, spelt out (docs/language.md has the same lines)."""
        name = stmt.args[0]
        assert isinstance(name, Name)
        key = self.key(name)
        buffer = self.program.buffers[key]
        frame = Frame(buffer.shape, self.made.axes.get(key, (None, None)), buffer)
        scores, tile = self.read(key, frame), self.leaf(key)
        self.forget(key)
        if not stmt.state:
            top, total = _local("top"), _local("total")
            assigns = [
                ir.Assign(top, Reduce("max", scores)),
                ir.Assign(tile, Op("exp", (Op("-", (scores, top)),)), buffer),
                ir.Assign(total, Reduce("sum", tile)),
                ir.Assign(tile, Op("/", (tile, total)), buffer),
            ]
        else:
            assigns = self._running(stmt, scores, tile, buffer)
        folded = tuple(ir.Assign(a.target, fold(a.value), a.buffer) for a in assigns)
        self.made.emit(self._node(stmt, frame, folded))

    def _running(
        self, stmt: tl.Compute, scores: Element, tile: Leaf, buffer: Buffer
    ) -> list[ir.Assign]:
        now, drop = _local("now"), _local("drop")
        most, summed = (self.key(n) for n in stmt.state)
        for vector, name in zip((most, summed), stmt.state, strict=True):
            self._lies(vector, "rows")
            if self.program.buffers[vector].dtype == "int32":
                raise refused(f"`{name.id}` of a Softmax is int32", name.span, "let it be fp32")
        old, total = self.leaf(most), self.leaf(summed)
        buffers = self.program.buffers
        assigns = [
            ir.Assign(now, Op("max", (old, Reduce("max", scores)))),
            ir.Assign(drop, Op("exp", (Op("-", (old, now)),))),
            ir.Assign(old, now, buffers[most]),
            ir.Assign(tile, Op("exp", (Op("-", (scores, now)),)), buffer),
            ir.Assign(
                total, Op("+", (Op("*", (total, drop)), Reduce("sum", tile))), buffers[summed]
            ),
        ]
        for held in map(self.key, stmt.rescale):
            own = self.leaf(held)
            assigns.append(ir.Assign(own, Op("*", (own, drop)), buffers[held]))
        return assigns

    def _node(self, stmt: tl.Compute, frame: Frame, assigns: tuple[ir.Assign, ...]) -> ir.Compute:
        rows, cols = self._origins(frame)
        return ir.Compute(frame.shape, assigns, rows, cols, origin=ir.origin(stmt))

    def _columns(self, expr: Expr, frame: Frame) -> Term | None:
        """The position at which the columns begin: of a tile, or of what is reduced to its rows."""
        own = self._origins(frame)[1]
        reduced = _reduced(expr)
        inside = {id(name) for arg in reduced for name in tl.value_names(arg)}
        outside = [name for name in tl.value_names(expr) if id(name) not in inside]
        used = {own} if len(frame.axes) == 2 and _by_columns(outside, frame) else set()
        for arg in reduced:
            inner = self._inner(arg)
            if _by_columns(tl.value_names(arg), inner):
                used.add(self._origins(inner)[1])
        if len(used) > 1:
            hint = "compute the row sum in a statement of its own"
            raise refused("positions of different columns in one expression", expr.span, hint)
        return used.pop() if used else own

    def _origins(self, frame: Frame) -> tuple[Term | None, Term | None]:
        starts = [self.made.origin(w, frame.buffer, i) for i, w in enumerate(frame.axes)]
        return starts[0], starts[1] if len(starts) > 1 else None

    # --- expressions ----------------------------------------------------------------------

    def _frame(self, expr: Expr, target: Key) -> Frame:
        """Rows and columns come from the two-dimensional operands, else from the vectors."""
        buffers = self.program.buffers
        shape = buffers[target].shape
        keys = sorted(self._tiles(expr), key=lambda k: buffers[k].along is not None)
        for rank in (2, 1):
            for key in keys:
                axes = self.made.axes.get(key, ())
                if len(buffers[key].shape) == rank == len(shape) and any(axes):
                    return Frame(buffers[key].shape, axes, buffers[key])
        axes = self._rows(expr, shape[0]) if len(shape) == 1 else (None, None)
        return Frame(shape, axes, buffers[target])

    def _rows(self, expr: Expr, size: int) -> Axes:
        """The positions of the rows that a vector is reduced from. With `q_idx` in it, those of
        the queries that the thread block copies."""
        for arg in _reduced(expr)[:1]:
            return (self._inner(arg).axes[0],)
        found = self.program.query_rows(size) if Name("q_idx") in tl.expressions(expr) else None
        return (None,) if found is None else (self.made.rows_of(*found),)

    def _inner(self, arg: Expr) -> Frame:
        """The rows and columns of what is reduced."""
        keys = [k for k in self._tiles(arg) if len(self.program.buffers[k].shape) == 2]
        buffer = self.program.buffers[keys[0]]
        return Frame(buffer.shape, self.made.axes.get(keys[0], (None, None)), buffer)

    def _tiles(self, expr: Expr) -> list[Key]:
        """The tiles an expression combines; a row reduction gives only its rows."""
        match expr:
            case Name():
                scope = self.made.scalars.scope
                key = None if expr.id in scope else self.program.tile(expr)
                return [key] if key else []
            case tl.Unary(_, operand):
                return self._tiles(operand)
            case tl.Binary(_, left, right):
                return self._tiles(left) + self._tiles(right)
            case tl.Call(func, args) if func.id.lower() not in ("rowmax", "rowsum"):
                return [k for a in args for k in self._tiles(a)]
            case tl.Index(_, args):
                return [k for a in args for k in self._tiles(a)]
        return []

    def _same_side(self, expr: Expr, target: Key) -> None:
        """Vectors that are combined without a tile lie alike; what a row is reduced to is a row."""
        buffers = self.program.buffers
        if len(buffers[target].shape) != 1:
            return
        vectors = [target, *self._tiles(expr)]
        reduces = bool(_reduced(expr))
        vectors.sort(key=lambda v: buffers[v].along is None)  # what a vector is said to do counts
        known = [self.sides[v] for v in vectors if v in self.sides]
        side: ir.Side = "rows" if reduces or not known else known[0]
        if reduces or known:
            free = (v for v in vectors if len(buffers[v].shape) == 1 and buffers[v].along is None)
            for vector in free:
                self._lies(vector, side)

    def element(self, expr: Expr, frame: Frame) -> Element:
        """The expression for one element."""
        match expr:
            case Name("q_idx" | "kv_idx" as position):
                axis = axis_of(position, frame.axes)
                place = None if axis is None else frame.axes[axis]
                if place is None or place.lost:
                    text = f"`{position}`: where this tile lies cannot be told in every iteration"
                    hint = "let one Copy in the loop fill the tile, or fetch block i + 1 ahead"
                    raise refused(text, expr.span, hint)
                if len(frame.shape) == 1:
                    side = self._side((frame.buffer.name, frame.buffer.space))
                else:
                    side = "columns" if axis else "rows"
                return Leaf(Position(position), _AXES[side])
            case Name(id) if id in CONSTANTS:
                return literal(CONSTANTS[id])
            case Name(id) if id in self.program.params:
                value = self.program.params[id]
                kind: Type = "float" if isinstance(value, (float, Fraction)) else "int"
                return Leaf(Var(cpp(id), kind), value=float(value))
            case Name(id) if id in self.made.scalars.scope:
                return _scalar(self.made.scalars(expr))
            case Name():
                return self.read(self.key(expr), frame)
            case tl.Num(text) if not text.isdigit():
                return literal(float(text))
            case tl.Index() if self.program.per_element(expr):
                return gathered(self.made, expr, frame, self.element)
            case tl.Num() | tl.Index():
                return _scalar(self.made.scalars(expr))
            case tl.Unary(op, operand):
                return Op("neg" if op == "-" else "not", (self.element(operand, frame),))
            case tl.Binary(op, left, right):
                return Op(op, (self.element(left, frame), self.element(right, frame)))
            case tl.Call(func, args) if func.id.lower() in ("rowmax", "rowsum"):
                inner = self._inner(args[0])
                reduction: Reduction = "max" if func.id.lower() == "rowmax" else "sum"
                return Reduce(reduction, self.element(args[0], inner))
            case tl.Call(func, args):
                return Op(func.id.lower(), tuple(self.element(a, frame) for a in args))
            case tl.Transpose():
                raise AssertionError("`.T` belongs to a GEMM")


_AXES = {"rows": ROW, "columns": COLUMN}


def _scalar(x: Scalar) -> Leaf:
    if x.type in ("float", "bool"):
        return Leaf(x.term, value=float(x.value) if x.value is not None else None)
    found = x.term if x.whole else x.as_float()
    return Leaf(found, value=float(x.value) if x.value is not None else None)


def _reduced(expr: Expr) -> list[Expr]:
    """What an expression reduces to rows, outermost first."""
    calls = (e for e in tl.expressions(expr) if isinstance(e, tl.Call))
    return [call.args[0] for call in calls if call.func.id.lower() in ("rowmax", "rowsum")]


def _by_columns(names: Iterable[Name], frame: Frame) -> bool:
    """Whether a position along the columns is among the names."""
    return any(n.id in POSITIONS and axis_of(n.id, frame.axes) == 1 for n in names)


def _operand(expr: Expr) -> tuple[Name, bool]:
    """A GEMM's operand, and whether it is transposed."""
    name = expr.operand if isinstance(expr, tl.Transpose) else expr
    assert isinstance(name, Name)
    return name, isinstance(expr, tl.Transpose)


def _local(name: str) -> Leaf:
    """A name that lives for one row."""
    return Leaf(Var(name, "float"), ROW)


def _factor(value: Element) -> tuple[Element, Leaf | None]:
    """A value without the positive constant that it is multiplied by in the end, and that."""
    match value:
        case Op("*", (inner, Leaf(value=float(known)) as factor)) if known > 0:
            return inner, factor
    return value, None
