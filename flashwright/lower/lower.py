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
from flashwright.lower.code import Code, integer
from flashwright.lower.computes import Computes
from flashwright.lower.names import cpp
from flashwright.lower.places import ZERO, Axes, Places, Where
from flashwright.lower.scalars import Scalar, Scalars, named, refused

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
        scope |= {d: Scalar(Code(cpp(d))) for d in program.dims}
        self.scalars = Scalars(scope, self._element)
        self.places = Places(known)
        self.axes: dict[Key, Axes] = {}
        self.body: list[ir.Statement] = []
        self.operand_dtype = operand_dtypes(program)
        self.operands: set[Key] = set()
        self.only_offsets = _only_offsets(program)
        self.computes = Computes(self, sides)

    def kernel(self) -> ir.Kernel:
        """Walk the whole program."""
        grid = []
        for axis in self.program.grid.axes:
            low = self.scalars(axis.low).as_int(axis.low.span)
            self.scalars.define(axis.name.id, Scalar(Code(cpp(axis.name.id))))
            grid.append(ir.GridAxis(cpp(axis.name.id), low, False))
        self.statements(self.program.tree.body)
        return ir.Kernel(
            tuple(grid), tuple(self.body), self.computes.sides, frozenset(self.operands)
        )

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
        """Lower a body of its own."""
        outer, self.body = self.body, []
        self.statements(body)
        self.computes.settle()
        inner, self.body = self.body, outer
        return tuple(inner)

    # --- control and scalars --------------------------------------------------------------

    def _let(self, stmt: tl.Let) -> None:
        value = self.scalars(stmt.value)
        self.places.lets[stmt.name.id] = stmt.value
        name = cpp(stmt.name.id)
        note = ""
        if not value.whole:  # the numerator has the name: nothing is rounded
            below = value.below.text
            name = f"{name}_{below}" if below.isidentifier() else f"{name}_scaled"
            note = f"{below} * {stmt.name.id}"
        if stmt.name.id not in self.only_offsets:
            self.emit(ir.Define(name, value.code, note, origin=ir.origin(stmt)))
        self.scalars.define(stmt.name.id, Scalar(Code(name, value.code.type), value.below))

    def _for(self, stmt: tl.For) -> None:
        name = cpp(stmt.var.id)
        low = self._bound(
            Scalar(self.scalars(stmt.low).as_int(stmt.low.span)), f"{name}_first", stmt
        )
        high, var = self._bound(self.scalars(stmt.high), f"{name}_end", stmt), Scalar(Code(name))
        self.scalars.define(stmt.var.id, var)
        condition = self.scalars.binary("<", var, high, stmt.span).code
        self.computes.settle()
        before, lets = dict(self.axes), dict(self.places.lets)
        self.inside(stmt.body)  # to see where the tiles lie at its end
        after = self.axes
        self.axes = {
            key: tuple(
                self.places.joined(a, b, stmt.low, stmt.var)
                for a, b in zip(axes, after[key], strict=True)
            )
            for key, axes in before.items()
        }
        self.places.lets = lets
        body = self.inside(stmt.body)
        self.emit(ir.Loop(name, low.code, condition, body, origin=ir.origin(stmt)))

    def _bound(self, bound: Scalar, name: str, stmt: tl.For) -> Scalar:
        """A loop's bound under a name of its own, unless it is a name or a number."""
        if bound.code.text.isalnum() or bound.code.text.isidentifier() or bound.type != "int":
            return bound
        note = "" if bound.whole else f"{bound.below} times the loop's end"
        self.emit(ir.Define(name, bound.code, note, origin=ir.origin(stmt).untitled))
        return Scalar(Code(name), bound.below)

    def _if(self, stmt: tl.If) -> None:
        self.computes.settle()
        condition = self.scalars(stmt.cond).code
        before = dict(self.axes)
        then = self.inside(stmt.then)
        filled, self.axes = self.axes, before
        orelse = self.inside(stmt.orelse)
        self.axes = {**self.axes, **filled}
        self.emit(ir.Branch(condition, then, orelse, origin=ir.origin(stmt)))

    def _element(self, expr: tl.Index, index: tuple[Code, ...]) -> Code:
        """One element of a tensor, read as a scalar."""
        tensor = self.program.tensors[expr.tensor.id]
        places = ", ".join(i.text for i in index)
        read = f"*{tensor_name(tensor)}.at({places})"
        if tensor.dtype == "int32":
            return Code(read, "int", 8)
        return Code(f"float({read})", "float")

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
            if stmt.dest == "register" and self._feeds_gemm(dest):
                self.operands.add(dest)
            self.emit(ir.Move(source, dest, origin=ir.origin(stmt)))

    def _feeds_gemm(self, key: Key) -> bool:
        """Whether a register tile is a GEMM's left operand without a Reshape of its own."""
        flat = list(tl.statements(self.program.tree.body))
        return any(
            isinstance(s, tl.Compute)
            and s.operation == "gemm"
            and isinstance(s.args[0], Name)
            and self.program.tile(s.args[0]) == key
            for s in flat
        )

    def _window(self, stmt: tl.Copy, tensor: Tensor, buffer: Buffer) -> tuple[ir.Window, Axes]:
        coords = {c.axis.id: c.value for c in stmt.coords or ()}
        first_tiled = len(tensor.axes) - len(buffer.shape)
        start: list[Code] = []
        inside: list[Code | None] = []
        axes: list[Axis] = []
        for position, axis in enumerate(tensor.axes):
            coord = coords.get(axis.label, ZERO)
            place = self.scalars(coord)
            if position >= first_tiled:
                size = buffer.shape[position - first_tiled]
                place = self.scalars.binary(
                    "*", place, self.size(buffer, position - first_tiled), stmt.span
                )
                axes.append(Where(self._identity(axis.size), coord, size, axis.label))
                inside.append(self._inside(axis.size, place, size, stmt))
            start.append(place.as_int(stmt.span))
        rows, cols = inside[0], inside[1] if len(inside) > 1 else None
        shift = self._offset(tensor.offset) if tensor.offset is not None else None
        return ir.Window(tensor, tuple(start), rows, cols, shift), tuple(axes)

    def _offset(self, expr: Expr) -> Code:
        """How far into its memory a view begins: in 64 bits, since memory is longer than an int."""
        scope = self.scalars.scope
        long = {
            name: Scalar(Code(f"int64_t({x.code})"))
            for name, x in scope.items()
            if x.type == "int" and x.value is None and x.whole
        }
        for name, value in self.places.lets.items():
            long[name] = Scalars({**scope, **long}, self._element)(value)
        return Scalars({**scope, **long}, self._element)(expr).as_int(expr.span)

    def _inside(self, extent: Expr, start: Scalar, size: int, stmt: tl.Copy) -> Code | None:
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

    def origin(self, place: Axis, buffer: Buffer, axis: int) -> Code | None:
        """The position at which a tile's rows or columns begin."""
        if place is None:
            return None
        size = self.size(buffer, axis)
        start = self.scalars.binary("*", self.scalars(place.coord), size, tl.NOWHERE)
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
        self.axes[target] = self.axes.get(source, (None, None))
        self.emit(ir.Operand(target, source, dtype, origin=ir.origin(stmt)))


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


def tensor_name(tensor: Tensor) -> str:
    """How the kernel speaks of a tensor."""
    return f"p.{cpp(tensor.name)}"


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
