"""A program for rectangular batches, rewritten for packed ones.

The sequences of a packed batch lie behind each other: a tensor has an axis of all their tokens in
place of the axes of the batch and of positions. `StartsQ` and `StartsK` say where they begin. In
the program the range of the sequence takes the place of the batch's coordinate, and its length that
of `q_len` or `kv_len`; these are the longest lengths, and blocks past a sequence's end are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Diagnostic, Failed, Label
from flashwright.lang.parse import parse
from flashwright.program.program import Program, Tensor

Part = TypeVar("Part")
SIDES = {"q_len": "q", "kv_len": "kv"}


def packed(program: Program) -> tl.Tree:
    """The program for packed sequences. Raises Failed with FW909 if it has none."""
    return _Packing(program).tree()


@dataclass(frozen=True)
class _Side:
    """The names of one kind of sequence, of queries or of keys: the dim of the longest, that of all
    tokens, the tensor of their starts, and first, last and length of the one at hand."""

    longest: str
    tokens: str
    starts: str
    first: str
    last: str
    length: str


class _Packing:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.lengths = {t.name: found for t in program.tensors.values() if (found := _length(t))}
        self.sides = {dim: self._side(dim) for dim in SIDES if dim in self.lengths.values()}
        self.batch = self._batch()

    def tree(self) -> tl.Tree:
        """The whole program."""
        above, grid, below = self._around_the_grid()
        dims = ", ".join(side.tokens for side in self.sides.values())
        behind = [s for s in above if isinstance(s, tl.Let)]
        kept = [s for s in above if not isinstance(s, tl.Let)]
        tensors = [self._statement(s) for s in below if _is_tensor(s)]
        rest = [self._statement(s) for s in (*behind, *below) if not _is_tensor(s)]
        begin = next((n for n, s in enumerate(rest) if not _declares(s)), len(rest))
        lets = {s.name.id for s in rest[:begin] if isinstance(s, tl.Let)}
        body, guard = tuple(rest[begin:]), self._guard(lets)
        if guard is not None:
            body = (tl.If(guard, body),)
        head = (*kept, *parse(f"dim {dims}").body, grid, *tensors)
        return tl.Tree((*head, *self._starts(), *rest[:begin], *body))

    def _around_the_grid(
        self,
    ) -> tuple[tuple[tl.Statement, ...], tl.Grid, tuple[tl.Statement, ...]]:
        body = self.program.tree.body
        at = next(n for n, s in enumerate(body) if isinstance(s, tl.Grid))
        return body[:at], self.program.grid, body[at + 1 :]

    # --- names --------------------------------------------------------------------------------

    def _side(self, dim: str) -> _Side:
        short = SIDES[dim]
        names = (f"{short}_tokens", f"Starts{short[0].upper()}", f"{short}_first", f"{short}_last")
        return _Side(dim, *map(self._fresh, (*names, f"{short}_length")))

    def _fresh(self, name: str) -> str:
        used = {e.id for s in tl.statements(self.program.tree.body) for e in _names(s)}
        while name in used:
            name += "_"
        return name

    def _batch(self) -> tl.Expr:
        """Which sequence a thread block works on: the coordinate that all packed tensors have."""
        found: dict[tl.Expr, tl.Copy] = {}
        for copy, tensor in self._copies():
            label = next(a.label for a in tensor.axes if a.size == tl.Name("batch"))
            place = next((c.value for c in copy.coords or () if c.axis.id == label), None)
            if place is None:
                raise _refused(f"`{tensor.name}` is copied without an index of the batch", copy)
            found.setdefault(place, copy)
        if not found:
            text = "no tensor has an axis of the batch and one of `q_len` or `kv_len` positions"
            raise _refused(text, self.program.grid)
        known = {axis.name.id for axis in self.program.grid.axes} | {*self.program.params}
        for place, copy in found.items():
            if not {n.id for n in tl.value_names(place)} <= known | {*self.program.dims}:
                raise _refused("the index of the batch is not known from the grid alone", copy)
        if len(found) > 1:
            first, second, *_ = found.values()
            where = (Label(first.span, "another index of the batch"),)
            text = "a thread block works on two sequences"
            raise Failed(Diagnostic("FW909", text, second.span, secondary=where))
        return next(iter(found))

    def _copies(self) -> Iterator[tuple[tl.Copy, Tensor]]:
        """The copies from and to packed tensors."""
        for stmt in tl.statements(self.program.tree.body):
            if isinstance(stmt, tl.Copy) and "global" in (stmt.source, stmt.dest):
                key = self._outer(stmt)
                if key in self.lengths:
                    yield stmt, self.program.tensors[key]

    def _outer(self, copy: tl.Copy) -> str:
        program = self.program
        return (program.source(copy) if copy.source == "global" else program.dest(copy))[0]

    # --- statements ---------------------------------------------------------------------------

    def _starts(self) -> tuple[tl.Statement, ...]:
        """The tensors of starts, and what a thread block has to know of its sequence."""
        lines = [f"Allocate {s.starts} in global (B: batch + 1) as int32" for s in self._all()]
        made = list(parse("\n".join(lines)).body)
        for side in self._all():
            starts, one = tl.Name(side.starts), tl.Num("1")
            place = self.batch
            made.append(tl.Let(tl.Name(side.first), tl.Index(starts, (place,))))
            behind = tl.Index(starts, (tl.Binary("+", place, one),))
            made.append(tl.Let(tl.Name(side.last), behind))
            length = tl.Binary("-", tl.Name(side.last), tl.Name(side.first))
            made.append(tl.Let(tl.Name(side.length), length))
        return tuple(made)

    def _all(self) -> tuple[_Side, ...]:
        return tuple(self.sides.values())

    def _guard(self, lets: set[str]) -> tl.Expr | None:
        """Whether a thread block has queries; None where only its loops tell which ones it has.
        `lets` are the scalars that are known by then."""
        side = self.sides.get("q_len")
        grid = {axis.name.id for axis in self.program.grid.axes}
        known = grid | lets | {*self.program.params, *self.sides}
        for copy, tensor in self._copies() if side is not None else ():
            if copy.dest != "global" or self.lengths[tensor.name] != "q_len":
                continue
            place = next(c for c in copy.coords or () if c.axis.id == _axis(tensor))
            if not {n.id for n in tl.value_names(place.value)} <= known or not copy.shape:
                return None
            value, tiled = self._named(place.value), tensor.axes[-len(copy.shape) :]
            counts = not place.in_elements and place.axis.id in (a.label for a in tiled)
            first = tl.Binary("*", value, copy.shape[0]) if counts else value
            assert side is not None
            inside = tl.Binary("<", first, tl.Name(side.length))
            if isinstance(value, tl.Name) and value.id in grid:
                return inside
            return tl.Binary("and", tl.Binary(">=", value, tl.Num("0")), inside)
        return None

    def _statement(self, stmt: tl.Statement) -> tl.Statement:
        match stmt:
            case tl.For():
                body = tuple(self._statement(s) for s in stmt.body)
                return replace(self._named(replace(stmt, body=())), body=body)
            case tl.If():
                then, orelse = (tuple(map(self._statement, b)) for b in (stmt.then, stmt.orelse))
                head = self._named(replace(stmt, then=(), orelse=()))
                return replace(head, then=then, orelse=orelse)
            case tl.Allocate(name, "global"):
                return self._allocate(stmt) if name.id in self.lengths else stmt
            case tl.Copy() if "global" in (stmt.source, stmt.dest):
                return self._copy(self._named(stmt))
        return self._named(stmt)

    def _allocate(self, stmt: tl.Allocate) -> tl.Allocate:
        dim = self.lengths[stmt.name.id]
        axes = [a for a in self.program.tensors[stmt.name.id].axes if a.size != tl.Name("batch")]
        tokens = tl.Name(self.sides[dim].tokens)
        shape = (
            tl.Axis(tl.Name(a.label), tokens if a.size == tl.Name(dim) else a.size) for a in axes
        )
        return replace(stmt, shape=tuple(shape))

    def _copy(self, copy: tl.Copy) -> tl.Copy:
        key = self._outer(copy)
        if key not in self.lengths:
            return copy
        tensor, side = self.program.tensors[key], self.sides[self.lengths[key]]
        batch = next(a.label for a in tensor.axes if a.size == tl.Name("batch"))
        within = tl.Name(side.first), tl.Name(side.last)
        coords = (
            replace(c, within=within) if c.axis.id == _axis(tensor) else c
            for c in copy.coords or ()
            if c.axis.id != batch
        )
        return replace(copy, coords=tuple(coords))

    def _named(self, node: Part) -> Part:
        """A statement or expression with the sequence's lengths for the longest ones, and elements
        of packed tensors at their tokens."""
        if isinstance(node, tl.Name) and node.id in self.sides:
            return replace(node, id=self.sides[node.id].length)
        changes: dict[str, Any] = {}
        for part in fields(node):  # type: ignore[arg-type]
            value = getattr(node, part.name)
            if isinstance(value, tuple):
                changes[part.name] = tuple(self._named(v) if _is_node(v) else v for v in value)
            elif _is_node(value):
                changes[part.name] = self._named(value)
        made = replace(node, **changes) if changes else node  # type: ignore[type-var]
        return self._element(made) if isinstance(made, tl.Index) else made

    def _element(self, expr: tl.Index) -> Any:
        tensor = self.program.tensors.get(expr.tensor.id)
        dim = self.lengths.get(expr.tensor.id)
        if tensor is None or dim is None or len(expr.args) != len(tensor.axes):
            return expr
        first = tl.Name(self.sides[dim].first)
        args = [
            tl.Binary("+", first, arg) if axis.size == tl.Name(dim) else arg
            for axis, arg in zip(tensor.axes, expr.args, strict=True)
            if axis.size != tl.Name("batch")
        ]
        return replace(expr, args=tuple(args))


def _length(tensor: Tensor) -> str | None:
    """The dim of a tensor's axis of positions, if the tensor has one for each sequence."""
    sizes = [axis.size for axis in tensor.axes]
    found = [dim for dim in SIDES if tl.Name(dim) in sizes]
    if tl.Name("batch") not in sizes or not found:
        return None
    if len(found) > 1:
        text = f"`{tensor.name}` has queries and keys of each sequence: it cannot be packed"
        raise _refused(text, tensor.declared)
    if tensor.offset is not None:
        raise _refused(f"`{tensor.name}` is a view with an offset", tensor.declared)
    return found[0]


def _axis(tensor: Tensor) -> str:
    """The letter of the axis of positions."""
    return next(a.label for a in tensor.axes if isinstance(a.size, tl.Name) and a.size.id in SIDES)


def _is_tensor(stmt: tl.Statement) -> bool:
    """Whether it declares a tensor whose place needs no scalars of the thread block."""
    return isinstance(stmt, tl.Allocate) and stmt.space == "global" and stmt.offset is None


def _declares(stmt: tl.Statement) -> bool:
    return isinstance(stmt, tl.Allocate | tl.Let | tl.Comment | tl.Dim | tl.Param)


def _names(stmt: tl.Statement) -> Iterator[tl.Name]:
    return (e for e in tl.expressions(stmt) if isinstance(e, tl.Name))


def _is_node(value: object) -> bool:
    """Whether names may be in it; a span has none."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, tl.Span)


def _refused(text: str, stmt: tl.Statement) -> Failed:
    return Failed(Diagnostic("FW909", text, stmt.span))
