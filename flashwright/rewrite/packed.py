"""A program for rectangular batches, rewritten for packed ones.

The sequences of a packed batch lie behind each other: a tensor has an axis of all their tokens in
place of the axes of the batch and of positions. `StartsQ` and `StartsK` say where they begin. In
the program the range of the sequence takes the place of the batch's coordinate, and its length that
of `q_len` or `kv_len`; these are the longest lengths, and blocks past a sequence's end are skipped.

Keys may also lie in a cache that has room for more: `LengthsK` says how many each sequence has. In
a cache of pages `Table` names the pages of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from flashwright.check.check import check
from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Diagnostic, Failed, Label
from flashwright.lang.format import format_expr, format_tree
from flashwright.lang.parse import parse
from flashwright.program.kernels import sections
from flashwright.program.program import Program, Tensor
from flashwright.program.vocabulary import PAGE
from flashwright.rewrite.sequences import Packed, Paged, Sequences, page_label
from flashwright.rewrite.tree import fresh, names_in
from flashwright.spec import Batch

Part = TypeVar("Part")
SIDES = {"q_len": "q", "kv_len": "kv"}
PACKED = Batch()


def packed(tree: tl.Tree, batch: Batch = PACKED) -> tl.Tree:
    """The program for packed sequences. Raises Failed with the errors of a program that is wrong,
    or with FW909 if it cannot be packed."""
    verdict = check(tree)
    if verdict.errors or not verdict.kernels:
        raise Failed(*verdict.errors)
    head, *bodies = sections(tree)
    layout = _Layout(verdict.kernels, batch)
    kept = [layout.allocated(s) for s in head if not isinstance(s, tl.Let)]
    sizes = parse("".join(side.sizes for side in layout.sides.values())).body
    at = next((n for n, s in enumerate(kept) if isinstance(s, tl.Allocate)), len(kept))
    made = [*kept[:at], *sizes, *kept[at:]]
    for program, own in zip(verdict.kernels, bodies, strict=True):
        made += _Packing(program, layout).kernel(own)
    return parse(format_tree(tl.Tree(tuple(made))))  # with spans that are those of one text


class _Layout:
    """Which tensors are packed, and the names of what says where their sequences are."""

    def __init__(self, programs: Sequence[Program], batch: Batch) -> None:
        tensors = {t.name: t for program in programs for t in program.tensors.values()}
        dims = tuple(SIDES) if batch.queries else ("kv_len",)
        self.batch = batch
        self.lengths = {name: found for name, t in tensors.items() if (found := _length(t, dims))}
        """Of each packed tensor, the dim of its positions."""
        used = names_in(s for program in programs for s in program.tree.body)
        self._fresh = partial(fresh, used=used)
        self.tensors = tensors
        self.declared: set[str] = set()
        """The sides whose tensors a kernel has declared, for all that follow."""
        self.sides = {dim: self._side(dim) for dim in SIDES if dim in self.lengths.values()}
        if not self.sides:
            said = " or ".join(f"`{dim}`" for dim in dims)
            text = f"no tensor has an axis of the batch and one of {said} positions"
            raise _refused(text, programs[0].grid)

    def _side(self, dim: str) -> Sequences:
        short, fresh = SIDES[dim], self._fresh
        keys = dim == "kv_len"
        length = fresh(f"{short}_length")
        if keys and self.batch.page is not None:
            names = ("Table", "LengthsK", "pages", "max_pages", "PageSize")
            table, lengths, pages, most, size = map(fresh, names)
            return Paged(dim, length, table, lengths, pages, most, size, self.batch.page)
        first, last, tokens = (fresh(f"{short}_{name}") for name in ("first", "last", "tokens"))
        starts = fresh(f"Starts{short[0].upper()}")
        own = fresh("LengthsK") if keys and self.batch.lengths else None
        return Packed(dim, length, first, last, tokens, starts, own)

    def allocated(self, stmt: tl.Statement) -> tl.Statement:
        """A statement with the axes of a packed tensor, if it declares one. In fragments it cannot
        lie: sequences begin anywhere."""
        if not isinstance(stmt, tl.Allocate) or stmt.space != "global":
            return stmt
        dim = self.lengths.get(stmt.name.id)
        if dim is None:
            return stmt
        shape = tuple(self.sides[dim].axes(self.tensors[stmt.name.id].axes))
        return replace(stmt, shape=shape, fragments=False)


class _Packing:
    """Rewrites one kernel."""

    def __init__(self, program: Program, layout: _Layout) -> None:
        self.program, self.layout = program, layout
        self.lengths, self.sides = layout.lengths, layout.sides
        self.batch = self._batch()

    def kernel(self, own: tuple[tl.Statement, ...]) -> list[tl.Statement]:
        """Its statements, from the grid on."""
        above = self.program.tree.body[: len(self.program.tree.body) - len(own)]
        lets = [s for s in above if isinstance(s, tl.Let)]
        grid, *below = own
        tensors = [self.layout.allocated(s) for s in below if _is_tensor(s)]
        rest = [self._statement(s) for s in (*lets, *below) if not _is_tensor(s)]
        begin = next((n for n, s in enumerate(rest) if not _declares(s)), len(rest))
        end = max((n for n, s in enumerate(rest) if not isinstance(s, tl.Comment)), default=-1) + 1
        body = rest[begin:end]
        guard = self._guard({s.name.id for s in rest[:begin] if isinstance(s, tl.Let)})
        if guard is not None:
            body = [tl.If(guard, tuple(body))]
        work = [*rest[:begin], *body, *rest[end:]]  # a comment at the end is the next kernel's
        return [grid, *tensors, *self._bounds(work), *work]

    # --- names --------------------------------------------------------------------------------

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
            return tl.Num("0")  # a kernel that has to do with no sequence
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

    def _bounds(self, work: Sequence[tl.Statement]) -> list[tl.Statement]:
        """What a thread block has to know of its sequence, and the tensors that say it, unless an
        earlier kernel has declared them."""
        used = {e.id for s in tl.statements(tuple(work)) for e in _names(s)}
        tensors: list[tl.Statement] = []
        lets: list[tl.Statement] = []
        for side in self.sides.values():
            if not used & side.names:
                continue
            if side.longest not in self.layout.declared:
                self.layout.declared.add(side.longest)
                tensors += parse(side.tensors()).body
            lets += parse(side.lets(format_expr(self.batch, 5), used)).body
        return [*tensors, *lets]

    def _guard(self, lets: set[str]) -> tl.Expr | None:
        """Whether a thread block has something to store; None where only its loops tell where.
        `lets` are the scalars that are known by then."""
        grid = {axis.name.id for axis in self.program.grid.axes}
        known = grid | lets | {*self.program.params, *self.sides}
        for copy, tensor in self._copies():
            place = next(c for c in copy.coords or () if c.axis.id == _axis(tensor))
            length: tl.Expr = tl.Name(self.sides[self.lengths[tensor.name]].length)
            if place.value == tl.Name(PAGE) and copy.shape:  # rows of several heads
                row = tensor.axes[-len(copy.shape)]
                place = next(c for c in copy.coords or () if c.axis.id == row.label)
                length = tl.Binary("*", length, row.size)
            names = {n.id for n in tl.value_names(place.value)}
            if copy.dest != "global" or not names <= known or not copy.shape:
                continue
            value, tiled = self._named(place.value), tensor.axes[-len(copy.shape) :]
            counts = not place.in_elements and place.axis.id in (a.label for a in tiled)
            first = tl.Binary("*", value, copy.shape[0]) if counts else value
            inside = tl.Binary("<", first, length)
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
            case tl.Allocate(_, "global"):
                return self.layout.allocated(stmt)
            case tl.Copy() if "global" in (stmt.source, stmt.dest):
                return self._copy(self._named(stmt))
        return self._named(stmt)

    def _copy(self, copy: tl.Copy) -> tl.Copy:
        key = self._outer(copy)
        if key not in self.lengths:
            return copy
        tensor, side = self.program.tensors[key], self.sides[self.lengths[key]]
        batch = next(a.label for a in tensor.axes if a.size == tl.Name("batch"))
        page = side.page(self.batch)
        coords = []
        for coord in copy.coords or ():
            if coord.axis.id == _axis(tensor):
                coords.append(replace(coord, within=side.within))
            elif coord.axis.id != batch:
                coords.append(coord)
            elif page is not None:
                label = tl.Name(page_label(tensor.axes))
                coords.append(replace(coord, axis=label, value=page))
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
        side = self.sides[dim]
        if isinstance(side, Paged):
            raise _refused(f"an element of `{tensor.name}` is read, whose rows lie in pages", expr)
        first = tl.Name(side.first)
        args = [
            tl.Binary("+", first, arg) if axis.size == tl.Name(dim) else arg
            for axis, arg in zip(tensor.axes, expr.args, strict=True)
            if axis.size != tl.Name("batch")
        ]
        return replace(expr, args=tuple(args))


def _length(tensor: Tensor, dims: Sequence[str]) -> str | None:
    """The dim of a tensor's axis of packed positions, if the tensor has one for each sequence."""
    sizes = [axis.size for axis in tensor.axes]
    found = [dim for dim in SIDES if tl.Name(dim) in sizes]
    if tl.Name("batch") not in sizes or not set(found) & set(dims):
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


def _refused(text: str, node: tl.Statement | tl.Expr) -> Failed:
    return Failed(Diagnostic("FW909", text, node.span))
