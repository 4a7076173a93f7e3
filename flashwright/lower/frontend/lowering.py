"""From a checked program to tile IR: one node or a few for each statement, in program order."""

from __future__ import annotations

from flashwright.check.machine import operand_dtypes
from flashwright.check.program import Buffer, Key, Program, Tensor
from flashwright.check.scalars import NotScalar, whole
from flashwright.check.scalars import evaluate as exact
from flashwright.check.vocabulary import CONSTANTS
from flashwright.lang import nodes as tl
from flashwright.lang.nodes import Expr, Name
from flashwright.lower import ir
from flashwright.lower.frontend.computes import Computes
from flashwright.lower.frontend.positions import (
    ONE,
    STALE,
    UNKNOWN,
    ZERO,
    Axes,
    Positions,
    Where,
)
from flashwright.lower.frontend.scalars import Scalar, Scalars, named, refused
from flashwright.lower.names import Names, cpp, reserved
from flashwright.lower.term import Lit, Read, Term, Var, integer, literal, widened

Axis = Where | None


def lower(program: Program) -> ir.Kernel:
    """The kernel before any schedule: what happens, in the order of the program."""
    _refuse_untranslated(program)
    sides = Lowering(program, {}).kernel().sides  # the first walk finds how the vectors lie
    return Lowering(program, sides).kernel()


class Lowering:
    """One walk through the program."""

    def __init__(self, program: Program, sides: dict[Key, ir.Side]) -> None:
        self.program = program
        known = {**CONSTANTS, **program.params}
        scope = {n: named(cpp(n), v) for n, v in known.items()}
        scope |= {d: Scalar(Var(cpp(d))) for d in program.dims}
        least = {cpp(n): v for n, v in known.items() if isinstance(v, int)}
        least |= dict.fromkeys(map(cpp, program.dims), 1)
        self.scalars = Scalars(scope, self._element, least)
        self.names = Names(reserved(program))
        self.positions = Positions(known)
        self.axes: dict[Key, Axes] = {}
        self.body: list[ir.Statement] = []
        self.operand_dtype = operand_dtypes(program)
        self.operands: dict[Key, str] = {}
        self.direct = _direct_operands(program)
        self.only_offsets = _only_offsets(program)
        self.computes = Computes(self, sides)

    def kernel(self) -> ir.Kernel:
        """Walk the whole program."""
        grid = []
        for axis in self.program.grid.axes:
            low = self.scalars(axis.low).as_int(axis.low.span)
            self.scalars.define(axis.name.id, self._counter(cpp(axis.name.id), low))
            grid.append(ir.GridAxis(cpp(axis.name.id), low, False))
        self.statements(self.program.tree.body)
        return ir.Kernel(tuple(grid), tuple(self.body), self.computes.sides, self.operands)

    def emit(self, node: ir.Statement) -> None:
        """Append a node to the body under construction."""
        self.body.append(node)

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
        outer, scope, lets = self.body, dict(self.scalars.scope), dict(self.positions.lets)
        self.body = []
        self.statements(body)
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

    def _element(self, expr: tl.Index, index: tuple[Term, ...]) -> Term:
        """One element of a tensor, read as a scalar."""
        tensor = self.program.tensors[expr.tensor.id]
        return Read(tensor.name, index, "int" if tensor.dtype == "int32" else "float")

    # --- copies ---------------------------------------------------------------------------

    def _copy(self, stmt: tl.Copy) -> None:
        source, dest = self.program.source(stmt), self.program.dest(stmt)
        if stmt.source == "global":
            buffer = self.program.buffers[dest]
            window, axes = self._window(stmt, self.program.tensors[source[0]], buffer)
            self.axes[dest] = axes
            self.computes.forget(dest)
            kind = ir.Load if stmt.dest == "shared" else ir.Fill
            self.emit(kind(dest, window, origin=ir.origin(stmt)))
            self.as_operand(dest)
        elif stmt.dest == "global":
            tensor = self.program.tensors[dest[0]]
            self.computes.settle(source)
            window, _ = self._window(stmt, tensor, self.program.buffers[source])
            if stmt.source == "shared" and window.cols is not None:
                hint = f"Copy `{source[0]}` to register and from there to global"
                raise refused("a shared tile is stored by whole rows", stmt.span, hint)
            optional = len(self.program.outputs) > 1  # the caller asks for those it wants
            self.emit(ir.Store(source, window, optional, origin=ir.origin(stmt)))
        else:
            self.computes.settle(source)
            self.computes.forget(dest)
            self.axes[dest] = self.axes.get(source, (None,) * len(self.program.buffers[dest].shape))
            loaded = self.direct.get(dest) == "loaded"
            if loaded:
                self.operands[dest] = self.program.buffers[dest].dtype
            self.emit(ir.Move(source, dest, operand=loaded, origin=ir.origin(stmt)))
            self.as_operand(dest)

    def as_operand(self, key: Key) -> None:
        """A tile that was just written, as the left operand of the GEMMs that take it as it is."""
        if self.direct.get(key) == "computed":
            dtype = self.program.buffers[key].dtype
            self.operands[key] = dtype
            self.emit(ir.Operand(key, key, dtype))

    def _window(self, stmt: tl.Copy, tensor: Tensor, buffer: Buffer) -> tuple[ir.Window, Axes]:
        coords = {c.axis.id: c.value for c in stmt.coords or ()}
        first_tiled = len(tensor.axes) - len(buffer.shape)
        start: list[Term] = []
        inside: list[Term | None] = []
        axes: list[Axis] = []
        for position, axis in enumerate(tensor.axes):
            coord = coords.get(axis.label, ZERO)
            place = self.scalars(coord)
            if position >= first_tiled:
                size = buffer.shape[position - first_tiled]
                place = self.scalars.binary(
                    "*", place, self.size(buffer, position - first_tiled), stmt.span
                )
                full = self.positions.full(coord)
                axes.append(Where(self._identity(axis.size), coord, size, axis.label, full))
                inside.append(self._inside(axis.size, place, size, stmt))
            start.append(place.as_int(stmt.span))
        rows, cols = inside[0], inside[1] if len(inside) > 1 else None
        shift = self._offset(tensor.offset) if tensor.offset is not None else None
        width = self._fixed(tensor.axes[-1].size) if len(inside) > 1 else None
        view = self._view(tensor) if tensor.offset is not None else None
        return ir.Window(tensor, tuple(start), rows, cols, shift, width, view), tuple(axes)

    def _offset(self, expr: Expr) -> Term:
        """How far into its memory a view begins: in 64 bits, since memory is longer than an int."""
        return widened(self.scalars(self.positions.full(expr)).as_int(expr.span))

    def _view(self, tensor: Tensor) -> Term | None:
        """Which of the views of its size a view is, where its offset is a multiple of that."""
        assert tensor.offset is not None
        size: Expr = ONE
        for axis in tensor.axes:
            size = tl.Binary("*", size, axis.size)
        found = self.positions.quotient(self.positions.full(tensor.offset), size)
        return None if found is None else self.scalars(found).as_int(tensor.offset.span)

    def _inside(self, extent: Expr, start: Scalar, size: int, stmt: tl.Copy) -> Term | None:
        """How much of the tile lies inside the tensor; None where it always does."""
        fixed = self._fixed(extent)
        if fixed is not None and fixed % size == 0:
            return None
        length = self.scalars(extent)
        return self.scalars.binary("-", length, start, stmt.span).as_int(stmt.span)

    def _fixed(self, size: Expr) -> int | None:
        try:
            return whole(exact(size, self.program.params))
        except NotScalar:
            return None

    def _identity(self, size: Expr) -> str:
        fixed = self._fixed(size)
        return str(fixed) if fixed is not None else str(size)

    def size(self, buffer: Buffer, axis: int) -> Scalar:
        """A tile's size by the name it was declared with."""
        name = buffer.named_size(axis)
        return self.scalars(name) if name else Scalar(integer(buffer.shape[axis]))

    def origin(self, place: Axis, buffer: Buffer, axis: int) -> Term | None:
        """The position at which a tile's rows or columns begin."""
        if place is None or place.lost:
            return None
        size, coord = self.size(buffer, axis), self.positions.current(place)
        start = self.scalars.binary("*", self.scalars(coord), size, tl.NOWHERE)
        return start.as_int(tl.NOWHERE)

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


def _direct_operands(program: Program) -> dict[Key, str]:
    """The register tiles that a GEMM takes as its left operand without a Reshape: `loaded` where
    they only come from shared memory, as an operand lies, else `computed`."""
    flat = list(tl.statements(program.tree.body))
    reshaped = {program.tile(s.target or s.name) for s in flat if isinstance(s, tl.Reshape)}
    computes = [s for s in flat if isinstance(s, tl.Compute)]
    gemms = [s for s in computes if s.operation == "gemm"]
    left = {program.tile(s.args[0]) for s in gemms if isinstance(s.args[0], Name)} - reshaped
    copied = {program.dest(s) for s in flat if isinstance(s, tl.Copy) and s.source == "global"}
    stored = {program.source(s) for s in flat if isinstance(s, tl.Copy) and s.source == "register"}
    spoken = {
        program.tile(e)
        for s in computes
        if s.operation != "gemm"
        for e in (*tl.expressions(s), *((s.target,) if s.target else ()))
        if isinstance(e, Name)
    }
    spoken |= {program.tile(s.target) for s in gemms if s.target} | copied | stored
    return {
        key: "computed" if key in spoken else "loaded"
        for key in left
        if key and key[1] == "register"
    }


def _refuse_untranslated(program: Program) -> None:
    """Failed with FW811 at the first form of TL that has no translation yet."""
    for stmt in tl.statements(program.tree.body):
        indices = (e for e in tl.expressions(stmt) if isinstance(e, tl.Index))
        per_element = next((e for e in indices if program.per_element(e)), None)
        if per_element is not None:
            raise refused("an index that depends on the element", per_element.span)
        if isinstance(stmt, tl.Allocate) and stmt.along is not None:
            raise refused(f"a vector that is said to lie along {stmt.along}", stmt.span)
        if isinstance(stmt, tl.Copy):
            in_elements = next((c for c in stmt.coords or () if c.in_elements), None)
            if in_elements is not None:
                raise refused("a coordinate in elements", in_elements.span)
            if stmt.column is not None:
                raise refused("tiles side by side in shared memory", stmt.column.span)


def _only_offsets(program: Program) -> set[str]:
    """The lets that only say where views begin."""
    lets = {s.name.id: s for s in tl.statements(program.tree.body) if isinstance(s, tl.Let)}
    rest = [s for s in tl.statements(program.tree.body) if not isinstance(s, (tl.Let, tl.Allocate))]
    used = {e.id for s in rest for e in tl.expressions(s) if isinstance(e, Name)}
    pending = [n for n in used if n in lets]
    while pending:
        inner = [e.id for e in tl.expressions(lets[pending.pop()].value) if isinstance(e, Name)]
        pending += [n for n in inner if n in lets and n not in used]
        used |= set(inner)
    return set(lets) - used
