"""The IR made so far, and where its tiles lie: what lowering a statement needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.lang import nodes as tl
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Expr
from flashwright.lower import ir
from flashwright.lower.frontend.positions import (
    Axes,
    Positions,
    Where,
)
from flashwright.lower.frontend.scalars import Scalar, Scalars, named
from flashwright.lower.frontend.uses import direct_operands, only_offsets
from flashwright.lower.names import Names, cpp, reserved
from flashwright.lower.term import (
    Read,
    Term,
    Var,
    integer,
    widened,
)
from flashwright.program.program import Buffer, Key, Program
from flashwright.program.scalars import NotScalar, whole
from flashwright.program.scalars import evaluate as exact
from flashwright.program.vocabulary import CONSTANTS
from flashwright.semantics.machine import operand_dtypes

Axis = Where | None


@dataclass(frozen=True)
class Frame:
    """The rows and columns that a statement works on, and the tile that has them."""

    shape: tuple[int, ...]
    axes: Axes
    buffer: Buffer
    own: bool = False  # only the rows of one warpgroup


class Body:
    """One pass over the program, as far as it has come."""

    def __init__(self, program: Program) -> None:
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
        self.direct = direct_operands(program)
        self.only_offsets = only_offsets(program)

    def rows_of(self, copy: tl.Copy, coord: tl.Coord) -> Where:
        """Where the rows of a Copy's tile lie."""
        shape = self.program.moved(copy)
        axis = self.program.outer(copy).axes[-len(shape)]
        length = self.program.positions_of(axis.size, coord)
        full = self.positions.full(coord.value)
        dim = self.identity(length)
        return Where(dim, coord.value, shape[0], axis.label, full, coord.in_elements)

    def identity(self, size: Expr) -> str:
        """The identity of an axis, as the checker has it."""
        fixed = self.fixed(size)
        return str(fixed) if fixed is not None else format_expr(size)

    def emit(self, node: ir.Statement) -> None:
        """Append a node to the body under construction."""
        self.body.append(node)

    def as_operand(self, key: Key) -> None:
        """A tile that was just written, as the left operand of the GEMMs that take it as it is."""
        if self.direct.get(key) == "computed":
            dtype = self.program.buffers[key].dtype
            self.operands[key] = dtype
            self.emit(ir.Operand(key, key, dtype))

    def _element(self, expr: tl.Index, index: tuple[Term, ...]) -> Term:
        """One element of a tensor, read as a scalar."""
        tensor = self.program.tensors[expr.tensor.id]
        offset = self.offset(tensor.offset) if tensor.offset is not None else None
        return Read(tensor.name, index, "int" if tensor.dtype == "int32" else "float", offset)

    def offset(self, expr: Expr) -> Term:
        """How far into its memory a view begins: in 64 bits, since memory is longer than an int."""
        return widened(self.scalars(self.positions.full(expr)).as_int(expr.span))

    def fixed(self, size: Expr) -> int | None:
        """A size that is known now."""
        try:
            return whole(exact(size, self.program.params))
        except NotScalar:
            return None

    def size(self, buffer: Buffer, axis: int) -> Scalar:
        """A tile's size by the name it was declared with."""
        name = buffer.named_size(axis)
        return self.scalars(name) if name else Scalar(integer(buffer.shape[axis]))

    def origin(self, place: Axis, buffer: Buffer, axis: int) -> Term | None:
        """The position at which a tile's rows or columns begin."""
        if place is None or place.lost:
            return None
        start = self.scalars(self.positions.current(place))
        if not place.in_elements:
            start = self.scalars.binary("*", start, self.size(buffer, axis), tl.NOWHERE)
        return start.as_int(tl.NOWHERE)
