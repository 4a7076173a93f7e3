"""The Compute half of the machine: elementwise statements, GEMM, Softmax, Mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashwright.lang.diagnostic import Edit, Fix
from flashwright.lang.nodes import Binary, Call, Compute, Expr, Name, Transpose
from flashwright.program.fixes import missing_reshape
from flashwright.program.program import Key
from flashwright.program.vocabulary import ARITHMETIC
from flashwright.semantics.expressions import Expressions
from flashwright.semantics.state import State
from flashwright.semantics.sums import Sums
from flashwright.semantics.tiles import Epoch, Frame, Kind, Operand, Tile, Where, kept, origins


class Computer:
    """Executes Compute statements for a machine."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.program = machine.program
        self.sums = Sums(machine)
        self.values = Expressions(machine, self.sums)

    def compute(self, stmt: Compute) -> None:
        """Execute one Compute statement on the machine; what is wrong becomes a finding."""
        verb = stmt.operation
        if verb == "gemm":
            self._gemm(stmt)
        elif verb == "softmax":
            self._softmax(stmt)
        elif verb == "mask":
            self._mask(stmt)
        else:
            self._elementwise(stmt, expression(stmt))

    def _elementwise(self, stmt: Compute, expr: Expr) -> None:
        assert stmt.target is not None
        key = self.values.key(stmt.target)
        frame = self.values.frame(expr, self.program.buffers[key].shape)
        value = self.values.tile(self.values.value(expr, frame, stmt), frame)
        if stmt.mode == "get new" and key not in self.machine.cells:
            self.values.read(stmt.target, stmt)
        if stmt.mode == "accumulate":
            total = self._total(stmt, key)
            value = self.values.tile(self.values.combine("+", [total, value], frame, stmt), frame)
        self.machine.write(key, value, stmt)

    def _total(self, stmt: Compute, key: Key) -> Tile:
        """The accumulator's present value; FW601 if it has none."""
        assert stmt.target is not None
        if key not in self.machine.cells:
            name = stmt.target.id
            raise self.machine.halt(
                "FW601",
                f"`{name}` is accumulated into before it has a value",
                stmt.target.span,
                help=f"initialise it above the loop: `Compute 0 and get {name}`",
            )
        return self.values.read(stmt.target, stmt)

    def _mask(self, stmt: Compute) -> None:
        name, key = _name(stmt.args[0]), self.values.key(_name(stmt.args[0]))
        assert stmt.where is not None
        tile = self.values.read(name, stmt)
        self.sums.complete(tile, stmt)
        frame, hidden = Frame(tile.shape, tile.axes), float("-inf")
        shown = self.values.value(stmt.where, frame, stmt)
        done = self.values.combine("where", [shown, tile, hidden], frame, stmt)
        done = self.values.masked(self.values.tile(done, frame), tile, stmt.where, stmt, hidden)
        self.machine.write(key, replace(done, kind=tile.kind), stmt)

    def _softmax(self, stmt: Compute) -> None:
        """The statement's definition, spelt out (docs/language.md has the same lines)."""
        name = _name(stmt.args[0])
        scores = self.values.read(name, stmt)
        frame = Frame(scores.shape, scores.axes)
        rows = Frame(frame.shape[:1], frame.axes[:1])
        top = self.values.reduce("rowmax", name, stmt)
        if not stmt.state:
            weights = self._exp(scores, top, frame, name, stmt)
            self.machine.write(self.values.key(name), weights, stmt)
            total = self.values.turned(self.values.reduce("rowsum", name, stmt), frame, name)
            done = self.values.combine("/", [weights, total], frame, stmt)
            self.machine.write(self.values.key(name), self.values.tile(done, frame), stmt)
            return
        old, total = (self._state(n, stmt) for n in stmt.state)
        new = replace(
            self.values.tile(self.values.combine("max", [old, top], rows, stmt), rows),
            kind=Kind("max", Epoch(stmt)),
        )
        fall = self.values.combine("-", [old, new], rows, stmt)
        drop = self.values.combine("exp", [fall], rows, stmt)
        self.machine.write(self.values.key(name), self._exp(scores, new, frame, name, stmt), stmt)
        added = self.values.reduce("rowsum", name, stmt)
        self.machine.cells[self.values.key(name)].read = False
        kept = self.values.combine("*", [total, drop], rows, stmt)
        summed = self.values.combine("+", [kept, added], rows, stmt)
        self.machine.write(self.values.key(stmt.state[0]), new, stmt)
        self.machine.write(self.values.key(stmt.state[1]), self.values.tile(summed, rows), stmt)
        for held in stmt.rescale:
            self._rescale(held, drop, stmt)

    def _exp(self, scores: Tile, top: Tile, frame: Frame, name: Name, stmt: Compute) -> Tile:
        aligned = self.values.turned(top, frame, name)
        below = self.values.combine("-", [scores, aligned], frame, stmt)
        return self.values.tile(self.values.combine("exp", [below], frame, stmt), frame)

    def _state(self, name: Name, stmt: Compute) -> Tile:
        return self._initialised(name, "-1e30" if name is stmt.state[0] else "0", stmt)

    def _initialised(self, name: Name, start: str, stmt: Compute) -> Tile:
        """The present value of softmax state; FW601 if it has none."""
        if self.values.key(name) not in self.machine.cells:
            raise self.machine.halt(
                "FW601",
                f"`{name.id}` is used before it has a value",
                name.span,
                help=f"initialise it above the loop: `Compute {start} and get {name.id}`",
            )
        return self.values.read(name, stmt)

    def _rescale(self, name: Name, drop: Operand, stmt: Compute) -> None:
        tile = self._initialised(name, "0", stmt)
        frame = Frame(tile.shape, tile.axes)
        factor = (
            drop
            if not isinstance(drop, Tile) or len(tile.shape) == 1
            else (self.values.turned(drop, frame, name))
        )
        scaled = self.values.combine("*", [tile, factor], frame, stmt)
        self.machine.write(self.values.key(name), self.values.tile(scaled, frame), stmt)

    def _gemm(self, stmt: Compute) -> None:
        left, right = (self._operand(arg, stmt) for arg in stmt.args)
        assert stmt.target is not None
        if left.layout == "C":
            found = missing_reshape(stmt, _name(stmt.args[0]))
            self.machine.findings.setdefault((found.code, found.span), found)
        elif left.dtype != right.dtype and not self.values.misused:
            text = f"the operands are {left.dtype} and {right.dtype}; an MMA takes one type"
            kept = f"as {right.dtype}"
            hint = f"round the first: `Reshape ... {kept}`, or Allocate it `{kept}`"
            self.machine.report("FW504", text, stmt.span, help=hint)
        self.sums.complete(left, stmt)
        right = self._check_contraction(left, right, stmt)
        product = self._product(left, right, stmt)
        key = self.values.key(stmt.target)
        if stmt.mode == "accumulate":
            product = self._accumulated(self._total(stmt, key), product, stmt)
        elif stmt.mode == "get new":
            self.values.read(stmt.target, stmt)
        self.machine.write(key, product, stmt)

    def _operand(self, arg: Expr, stmt: Compute) -> Tile:
        tile = self.values.read(_name(arg), stmt)
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
            kept(self.machine.same_place([left, right], stmt), (left.axes[0], right.axes[1])),
            self.sums.summing(left, stmt),
            "C",
            kind,
            left.masks,
            data=data,
        )

    def _accumulated(self, total: Tile, product: Tile, stmt: Compute) -> Tile:
        for have, want in zip(total.axes, product.axes, strict=True):
            if have is not None and want is not None and have != want:
                self.machine.disagree(stmt.span, have, want)
        frame = Frame(product.shape, product.axes)
        for key, part in product.covered.items():
            if key in total.covered:
                self.sums.twice(total.covered[key], part, stmt)
        value = self.values.combine("+", [total, product], frame, stmt)
        return replace(self.values.tile(value, frame), layout="C")

    def _check_contraction(self, left: Tile, right: Tile, stmt: Compute) -> Tile:
        """Check that a GEMM sums over the same positions in both operands. Returns the right one,
        transposed if that mends it, so that one missing transpose is reported once."""
        have, want = left.axes[1], right.axes[0]
        if have is None or want is None or have == want:
            if have and want and have.parts and want.parts and have.parts != want.parts:
                self._report_part_order(have, want, stmt)
            return right
        if have.dim == want.dim:
            self.machine.disagree(stmt.span, have, want)
            return right
        a, b = (_name(arg).id for arg in stmt.args)
        text = (
            f"the columns of `{a}` are positions on {have.label} ({have.dim}), the rows of `{b}` "
            f"are positions on {want.label} ({want.dim}): a GEMM sums over one axis"
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
        where = origins(have, want)
        self.machine.report("FW503", text, stmt.span, secondary=where, fix=fix)
        return replace(right, axes=right.axes[::-1]) if fix else right

    def _report_part_order(self, have: Where, want: Where, stmt: Compute) -> None:
        """Report operands whose side-by-side parts are in different orders."""
        left, right = (" + ".join(map(str, where.parts)) for where in (have, want))
        text = f"`{have.tensor}` is made of {left} columns, `{want.tensor}` of {right}"
        self.machine.report("FW603", text, stmt.span, secondary=origins(have, want))


def _name(arg: Expr) -> Name:
    name = arg.operand if isinstance(arg, Transpose) else arg
    assert isinstance(name, Name)
    return name


def expression(stmt: Compute) -> Expr:
    """The expression that a statement computes; `Multiply A, x` becomes `A * x`."""
    if stmt.verb is None:
        return stmt.args[0]
    if stmt.operation in ARITHMETIC:
        return Binary(ARITHMETIC[stmt.operation], stmt.args[0], stmt.args[1], span=stmt.span)
    return Call(stmt.verb, stmt.args, span=stmt.span)
