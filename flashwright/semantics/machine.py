"""The machine that TL is written for: thread blocks one after another, statements in order.

It executes a program on what is known of its tiles (tiles.py), and also on their numbers if it has
an arithmetic (interpret.py). The checker runs it on a few small problems without numbers, so that
hazards, missed blocks and wrong coordinates show when they happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from flashwright.lang.nodes import (
    Compute,
    Copy,
    Expr,
    For,
    If,
    Index,
    Let,
    Name,
    Reshape,
    Statement,
    expressions,
    statements,
)
from flashwright.program.fixes import rounded_down
from flashwright.program.program import Key, Program
from flashwright.program.scalars import Unknown, Value, whole
from flashwright.semantics.compute import Computer
from flashwright.semantics.copies import Copies
from flashwright.semantics.state import Arithmetic, Halt, State
from flashwright.semantics.worlds import World


class GaveUp(Exception):
    """The program executes more statements than the limit `steps`."""


Observer = Callable[[Statement, "Machine"], None]


class Machine(State):
    """Runs one program on one problem."""

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, int],
        arithmetic: Arithmetic | None = None,
        observe: Observer | None = None,
        steps: int | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__(program, dims, arithmetic, world)
        self.observe = observe
        self.steps = steps
        self.decided = 0
        self.computer = Computer(self)
        self.copies = Copies(self, self.computer.values)
        self._operand_dtype = operand_dtypes(program)
        self._reads: dict[int, set[Key]] = {}
        self._table_loops: dict[tuple[str, int], For | None] = {}
        self._table_parts: dict[tuple[str, int, tuple[Value, ...]], set[Value]] = {}

    # --- running --------------------------------------------------------------------------

    def blocks(self) -> Iterator[dict[str, int]]:
        """The coordinates of all thread blocks, the last axis of the grid outermost."""
        base = self.base()
        yield from self._axis(len(self.program.grid.axes) - 1, base, {})

    def _axis(
        self, depth: int, base: dict[str, Value], chosen: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        if depth < 0:
            yield dict(reversed(chosen.items()))
            return
        axis = self.program.grid.axes[depth]
        self.env = {**base, **chosen}
        try:
            low, high = self._bounds(axis.low, axis.high)
        except Halt:
            return
        for value in range(low, high):
            yield from self._axis(depth - 1, base, {**chosen, axis.name.id: value})

    def run(self) -> None:
        """Execute every thread block of the grid. Raises GaveUp past the limit of steps."""
        for block in self.blocks():
            self._step()
            self.run_block(block)
        self.copies.check_added()
        for (name, position, _), seen in self._table_parts.items():
            self._check_read(name, position, seen)

    def run_block(self, block: Mapping[str, int]) -> None:
        """Execute one thread block, starting with empty buffers."""
        self.begin(block)
        try:
            self._body(self.program.tree.body)
        except Halt:
            return
        self._check_table_read()

    def _body(self, body: tuple[Statement, ...]) -> None:
        for stmt in body:
            self._statement(stmt)

    def _statement(self, stmt: Statement) -> None:
        self._step()
        match stmt:
            case For():
                self._for(stmt)
            case If(cond):
                taken = self._holds(cond)
                passed = stmt.orelse if taken else stmt.then
                self.left_out |= bool(passed) and self.program.chosen(cond)
                self._skip(passed)
                self._body(stmt.then if taken else stmt.orelse)
            case Let(name, value):
                self.env[name.id] = self.scalar(value)
                if self.loops:
                    self.varying.add(name.id)
            case Copy():
                self.copies.copy(stmt)
            case Compute():
                self.computer.compute(stmt)
            case Reshape():
                self._reshape(stmt)
        if self.observe is not None:
            self.observe(stmt, self)

    def _holds(self, cond: Expr) -> bool:
        """Whether a condition is true; on unknown data the world decides."""
        value = self.scalar(cond)
        if not isinstance(value, Unknown):
            return bool(value)
        self.decided += 1
        return self.world is None or not self.world.alternates or self.decided % 2 == 0

    def _step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise GaveUp

    def _for(self, stmt: For) -> None:
        low, high = self._bounds(stmt.low, stmt.high)
        if low >= high:
            self._skip(stmt.body)
        self.loops.append(stmt)
        self.varying.add(stmt.var.id)
        for value in range(low, high):
            self._step()
            self.env[stmt.var.id] = value
            self._body(stmt.body)
        self.env.pop(stmt.var.id, None)
        self.loops.pop()

    def _skip(self, body: tuple[Statement, ...]) -> None:
        """Mark the tiles that skipped statements would read: they may stay unread."""
        for key in self._read_in(body):
            if key in self.cells:
                self.cells[key].skipped = True

    def _read_in(self, body: tuple[Statement, ...]) -> set[Key]:
        if id(body) not in self._reads:
            self._reads[id(body)] = {k for s in statements(body) for k in self.program.reads(s)}
        return self._reads[id(body)]

    def _bounds(self, low: Expr, high: Expr) -> tuple[int, int]:
        start, stop = self.scalar(low), self.scalar(high)
        if isinstance(start, Unknown) or isinstance(stop, Unknown):
            return 0, 2  # data-dependent bound: two iterations show their interaction
        first = whole(start)
        if first is None:
            text = f"the first value must be a whole number, here it is {start}"
            fix = rounded_down(low)
            raise self.halt("FW306", text, low.span, fix=fix, label=self.problem())
        if not math.isfinite(stop):
            text = f"the end must be a number, here it is {stop}"
            raise self.halt("FW306", text, high.span, label=self.problem())
        return first, math.ceil(stop)

    def _check_table_read(self) -> None:
        """Check that a loop whose bound is the length of an index tensor's axis reads all of it.
        (Any other table may be longer than what the program reads.)"""
        for name, reads in self.elements.items():
            for position, axis in enumerate(self.program.tensors[name].axes):
                if (name, position) not in self._table_loops:
                    self._table_loops[name, position] = self._loop_over(name, position, axis.size)
                loop = self._table_loops[name, position]
                if loop is None:
                    continue
                if not self._in_parts(loop):
                    self._check_read(name, position, {r[position] for r in reads})
                    continue
                for read in reads:
                    others = (*read[:position], *read[position + 1 :])
                    seen = self._table_parts.setdefault((name, position, others), set())
                    seen.add(read[position])

    def _in_parts(self, loop: For) -> bool:
        """Whether several thread blocks share a loop and store parts of its sums."""
        bounds = (*self.program.spelt_out(loop.low), *self.program.spelt_out(loop.high))
        return any(Name(dim) in bounds for dim in self.program.parts_stored)

    def _check_read(self, name: str, position: int, read: set[Value]) -> None:
        """Report FW604 unless the elements that a loop reads on an axis are all there are."""
        axis, loop = self.program.tensors[name].axes[position], self._table_loops[name, position]
        assert loop is not None
        seen = {place for place in read if not isinstance(place, Unknown)}
        extent = self.extent(axis.size)
        if len(seen) > 1 and not {*range(extent)} <= seen:
            text = f"this loop reads {len(seen)} of the {extent} elements"
            text += f" on axis {axis.label} of `{name}`"
            self.report("FW604", text, loop.span, label=self.problem())

    def _loop_over(self, name: str, position: int, size: Expr) -> For | None:
        """The loop over an axis of an index tensor, if its bounds contain the axis's length. Where
        a tensor says how far the loop goes, the rest of the table may stay unread."""
        length = {e.id for e in expressions(size) if isinstance(e, Name)} & set(self.program.params)
        for stmt in statements(self.program.tree.body):
            if not isinstance(stmt, For):
                continue
            bounds = [*self.program.spelt_out(stmt.low), *self.program.spelt_out(stmt.high)]
            if any(isinstance(e, Index) for e in bounds):
                continue
            inner = [e for s in statements(stmt.body) for e in expressions(s)]
            along = (
                stmt.var in self.program.spelt_out(e.args[position])
                for e in inner
                if isinstance(e, Index) and e.tensor.id == name and position < len(e.args)
            )
            if any(Name(n) in bounds for n in length) and any(along):
                return stmt
        return None

    # --- Reshape --------------------------------------------------------------------------

    def _reshape(self, stmt: Reshape) -> None:
        key = self.program.tile(stmt.name)
        assert key is not None
        tile = self.read(key, stmt.name, stmt)
        if tile.layout != "C":
            now = "already an operand" if tile.layout == "A" else "not the result of a GEMM"
            self.report("FW502", f"`{stmt.name.id}` is {now}", stmt.name.span)
        dtype = stmt.dtype.id if stmt.dtype else self._operand_dtype.get(id(stmt), tile.dtype)
        target = self.program.tile(stmt.target) if stmt.target else key
        assert target is not None
        self.write(target, replace(tile, layout="A"), stmt, dtype)


def operand_dtypes(program: Program) -> dict[int, str]:
    """For each Reshape (by id) the element type of the GEMM that takes its tile next."""
    found: dict[int, str] = {}
    flat = list(statements(program.tree.body))
    for position, stmt in enumerate(flat):
        if not isinstance(stmt, Reshape):
            continue
        name = program.tile(stmt.target or stmt.name)
        for later in flat[position + 1 :]:
            if isinstance(later, Compute) and len(later.args) == 2 and later.verb is not None:
                left, right = later.args
                if isinstance(left, Name) and program.tile(left) == name:
                    other = getattr(right, "operand", right)
                    key = program.tile(other) if isinstance(other, Name) else None
                    if key is not None:
                        found[id(stmt)] = program.buffers[key].dtype
                        break
    return found
