"""A program for one query head in a thread block, rewritten so that a tile holds the query heads
that share a kv head (pack GQA).

Few queries, as in decode, do not fill a tile; all heads of a group read the same keys. The rows of
a tile become the `Group` heads of a query, query after query: row r is head r % Group of query
r // Group. Tensors with heads and queries get the axes `L: q_len, H: kv_heads, G: Group`, which are
the caller's memory with its heads split in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any

from flashwright.check.check import check
from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.program.kernels import sections
from flashwright.program.program import Program, Tensor
from flashwright.program.scalars import NotScalar, evaluate
from flashwright.program.vocabulary import PAGE
from flashwright.rewrite.tree import fresh, names_in

Change = Callable[[Any], Any]
HEADS, KV_HEADS, Q_LEN, Q_IDX = map(tl.Name, ("heads", "kv_heads", "q_len", "q_idx"))
WORK = 1_000_000
"""A block number that no program has: an expression of it tells how it was made."""


def grouped(tree: tl.Tree, group: int) -> tl.Tree:
    """The program whose rows are the `group` heads of each query. Raises Failed with the errors of
    a program that is wrong, or with FW916 if its heads cannot be grouped."""
    verdict = check(tree)
    if verdict.errors or not verdict.kernels:
        raise Failed(*verdict.errors)
    head, *bodies = sections(tree)
    layout = _Layout(verdict.kernels, group)
    shared = [layout.allocated(s) for s in head if not isinstance(s, tl.Let)]
    at = next((n for n, s in enumerate(shared) if not isinstance(s, tl.Comment)), len(shared))
    made = [*shared[:at], *parse(f"param {layout.group} = {group}").body, *shared[at:]]
    for program, own in zip(verdict.kernels, bodies, strict=True):
        made += _Grouping(program, layout).kernel(own)
    return parse(format_tree(tl.Tree(tuple(made))))  # with spans that are those of one text


class _Layout:
    """Which tensors have rows of several heads, and their axes."""

    def __init__(self, programs: Sequence[Program], count: int) -> None:
        self.tensors = {t.name: t for program in programs for t in program.tensors.values()}
        self.split = {
            name for name, t in self.tensors.items() if {HEADS, Q_LEN} <= {a.size for a in t.axes}
        }
        """Those with heads and queries."""
        self.count = count
        used = names_in(s for program in programs for s in program.tree.body)
        self.fresh = partial(fresh, used=used)
        self.group = self.fresh("Group")
        self.axes = {name: self._axes(self.tensors[name]) for name in self.split}
        if not self.split:
            text = "no tensor has an axis of `heads` and one of `q_len` queries"
            raise _refused(text, programs[0].grid)

    def letters(self, tensor: Tensor) -> tuple[str, str, str]:
        """The letters of a tensor's queries, its kv heads and the heads of a group."""
        queries = next(a.label for a in tensor.axes if a.size == Q_LEN)
        heads = next(a.label for a in tensor.axes if a.size == HEADS)
        return queries, heads, "G"

    def _axes(self, tensor: Tensor) -> tuple[tl.Axis, ...]:
        queries, heads, group = self.letters(tensor)
        labels = [a.label for a in tensor.axes]
        if tensor.offset is not None or tensor.declared.fragments or group in labels:
            odd = "is a view with an offset" if tensor.offset is not None else "is in fragments"
            odd = f"has an axis {group} of its own" if group in labels else odd
            raise _refused(f"`{tensor.name}` {odd}", tensor.declared)
        at = labels.index(queries)
        outer = [a for a in tensor.axes[:at] if a.label != heads]
        if heads in labels[at:]:
            raise _refused(f"`{tensor.name}` has its heads inside its queries", tensor.declared)
        rows = ((queries, Q_LEN), (heads, KV_HEADS), (group, tl.Name(self.group)))
        sizes = (
            [(a.label, a.size) for a in outer],
            rows,
            [(a.label, a.size) for a in tensor.axes[at + 1 :]],
        )
        return tuple(tl.Axis(tl.Name(label), size) for part in sizes for label, size in part)

    def allocated(self, stmt: tl.Statement) -> tl.Statement:
        """A statement with the axes of a tensor whose heads are split, if it declares one."""
        if not isinstance(stmt, tl.Allocate) or stmt.space != "global":
            return stmt
        name = stmt.name.id
        if name in self.split:
            return replace(stmt, shape=self.axes[name])
        if self.count == 1 and any(a.size == HEADS for a in self.tensors[name].axes[:-1]):
            axes = self.tensors[name].axes  # keys of each head: kv heads are as many
            shape = (
                tl.Axis(tl.Name(a.label), KV_HEADS if a.size == HEADS else a.size) for a in axes
            )
            return replace(stmt, shape=tuple(shape))
        return stmt


@dataclass(frozen=True)
class _Rows:
    """How a thread block names its tile of queries: the number of the tile, and its rows."""

    block: str
    size: tl.Expr


class _Grouping:
    """Rewrites one kernel."""

    def __init__(self, program: Program, layout: _Layout) -> None:
        self.program, self.layout = program, layout
        self.group = tl.Name(layout.group)
        self.copies = [
            s
            for s in tl.statements(program.tree.body)
            if isinstance(s, tl.Copy)
            and "global" in (s.source, s.dest)
            and program.outer(s).name in layout.split
        ]
        self.head = self._head()
        self.kv_head = self._kv_head()
        self.rows = self._rows()
        self.inlined: dict[str, tl.Expr] = {}
        """Scalars of one head, which become values of a row."""
        self.vectors: dict[tl.Expr, str] = {}
        """Elements by head and their vectors, one element for each row."""

    def kernel(self, own: tuple[tl.Statement, ...]) -> list[tl.Statement]:
        """Its statements, from the grid on."""
        if not self.copies:
            return list(own)
        above = self.program.tree.body[: len(self.program.tree.body) - len(own)]
        lets = [s for s in above if isinstance(s, tl.Let)]
        grid, *below = own
        assert isinstance(grid, tl.Grid)
        rest: list[tl.Statement] = []
        for stmt in (*lets, *below):
            rest += self._statement(stmt)
        declares = (tl.Allocate, tl.Let, tl.Comment, tl.Dim, tl.Param)
        at = next((n for n, s in enumerate(rest) if not isinstance(s, declares)), len(rest))
        while at and isinstance(rest[at - 1], tl.Comment):
            at -= 1
        return [self._grid(grid), *rest[:at], *self._hoisted(), *rest[at:]]

    # --- what the kernel works on -------------------------------------------------------------

    def _head(self) -> str:
        """The variable of the grid that goes through the query heads."""
        found = [a for a in self.program.grid.axes if a.high == HEADS and a.low == tl.Num("0")]
        if self.copies and len(found) != 1:
            raise _refused("no axis of the grid is `0:heads`", self.program.grid)
        return found[0].name.id if found else ""

    def _kv_head(self) -> str:
        """The name of the kv head: the program's own, or a new one."""
        for stmt in tl.statements(self.program.tree.body):
            if isinstance(stmt, tl.Let) and self._is_kv_head(stmt.value):
                return stmt.name.id
        return self.layout.fresh("kv_head")

    def _is_kv_head(self, expr: tl.Expr) -> bool:
        """Whether an expression is the kv head of the grid's query head."""
        names = {n.id for n in tl.value_names(expr)}
        if not self.head or self.head not in names or names - {self.head, "heads", "kv_heads"}:
            return False
        for head, heads, kv_heads in ((5, 12, 4), (11, 12, 3), (0, 8, 2), (6, 8, 1), (3, 5, 5)):
            env = {self.head: head, "heads": heads, "kv_heads": kv_heads}
            try:
                if evaluate(expr, env) != head * kv_heads // heads:
                    return False
            except (NotScalar, ZeroDivisionError):
                return False
        return True

    def _rows(self) -> _Rows:
        """What names the tile of queries, which all Copies of queries share."""
        found: dict[tuple[str, tl.Expr], tl.Copy] = {}
        for copy in self.copies:
            tensor = self.program.outer(copy)
            queries, _, _ = self.layout.letters(tensor)
            size = self.program.moved(copy)
            if copy.adds or copy.index:
                raise _refused(f"`{tensor.name}` is added to", copy)
            if tensor.axes[-len(size)].label != queries:
                raise _refused(f"the rows of a tile of `{tensor.name}` are no queries", copy)
            coord = next((c for c in copy.coords or () if c.axis.id == queries), None)
            loops = {
                f.var.id for f in tl.statements(self.program.tree.body) if isinstance(f, tl.For)
            }
            if coord is None or coord.in_elements or not isinstance(coord.value, tl.Name):
                raise _refused(f"`{queries} = ...` of this Copy is no name of a block", copy)
            if coord.within is not None:
                raise _refused(f"the queries of `{tensor.name}` are packed", copy)
            if coord.value.id in loops:
                raise _refused("a thread block works on several blocks of queries", copy)
            assert copy.shape or copy.dest == "global" or copy.source == "global"
            rows = copy.shape[0] if copy.shape else tl.Num(str(size[0]))
            found.setdefault((coord.value.id, rows), copy)
        if len(found) > 1:
            raise _refused("a thread block works on two tiles of queries", [*found.values()][1])
        return next((_Rows(*one) for one in found), _Rows("", tl.Num("1")))

    # --- statements ---------------------------------------------------------------------------

    def _grid(self, grid: tl.Grid) -> tl.Grid:
        def many(expr: Any) -> Any:
            return tl.Binary("*", Q_LEN, self.group) if expr == Q_LEN else None

        axes = []
        for axis in grid.axes:
            if axis.name.id == self.head:
                axis = replace(axis, name=tl.Name(self.kv_head), high=KV_HEADS)
            else:
                axis = replace(axis, low=_changed(axis.low, many), high=_changed(axis.high, many))
            axes.append(axis)
        return replace(grid, axes=tuple(axes))

    def _statement(self, stmt: tl.Statement) -> list[tl.Statement]:
        match stmt:
            case tl.Let(name, value) if self._is_kv_head(value):
                return (
                    [] if name.id == self.kv_head else [replace(stmt, value=tl.Name(self.kv_head))]
                )
            case tl.Let(name, value):
                changed = _changed(value, self._known(stmt))
                if tl.Name(self.head) in tl.expressions(changed):
                    self.inlined[name.id] = changed
                    return []
                return [replace(stmt, value=changed)]
            case tl.For(_, low, high, body):
                return [
                    replace(
                        stmt,
                        low=self._scalar(low, stmt),
                        high=self._scalar(high, stmt),
                        body=self._body(body),
                    )
                ]
            case tl.If(cond, then, orelse):
                return [
                    replace(
                        stmt,
                        cond=self._scalar(cond, stmt),
                        then=self._body(then),
                        orelse=self._body(orelse),
                    )
                ]
            case tl.Allocate(_, "global"):
                return [self.layout.allocated(stmt)]
            case tl.Copy():
                return [self._copy(stmt)]
            case tl.Compute():
                return [_changed_parts(stmt, self._element(stmt))]
        return [stmt]

    def _body(self, body: tuple[tl.Statement, ...]) -> tuple[tl.Statement, ...]:
        return tuple(made for stmt in body for made in self._statement(stmt))

    def _hoisted(self) -> list[tl.Statement]:
        """The vectors of what is read by head, before the first statement that works."""
        made: list[tl.Statement] = []
        for value, name in self.vectors.items():
            vector = tl.Name(name)
            text = f"Allocate {name} in register (BM) as fp32 along rows\nCompute 0 and get {name}"
            allocate, compute = parse(text).body
            assert isinstance(allocate, tl.Allocate)
            assert isinstance(compute, tl.Compute)
            shape = (replace(allocate.shape[0], size=self.rows.size),)
            made.append(replace(allocate, name=vector, shape=shape))
            made.append(replace(compute, args=(value,)))
        return [*made[::2], *made[1::2]]

    def _copy(self, copy: tl.Copy) -> tl.Copy:
        if copy not in self.copies:
            return self._other_copy(copy)
        queries, heads, group = self.layout.letters(self.program.outer(copy))
        end = tl.Binary("*", Q_LEN, self.group)
        coords = []
        for coord in copy.coords or ():
            if coord.axis.id == heads:
                if coord.value != tl.Name(self.head):
                    raise _refused(f"`{heads}` of this Copy is not `{self.head}`", copy)
            elif coord.axis.id != queries:
                coords.append(replace(coord, value=self._scalar(coord.value, copy)))
        kv_head = tl.Name(self.kv_head)
        coords.append(tl.Coord(tl.Name(queries), tl.Name(PAGE)))
        coords.append(tl.Coord(tl.Name(heads), kv_head))
        rows = tl.Coord(tl.Name(group), tl.Name(self.rows.block), within=(tl.Num("0"), end))
        outer = [c for c in coords if c.axis.id in self._outer_letters(copy)]
        return replace(copy, coords=(*outer, *(c for c in coords if c not in outer), rows))

    def _other_copy(self, copy: tl.Copy) -> tl.Copy:
        """A Copy of what all heads of a group share, such as their keys."""
        if "global" in (copy.source, copy.dest):
            tensor = self.program.outer(copy)
            if any(a.size == Q_LEN for a in tensor.axes):
                raise _refused(f"`{tensor.name}` has rows for queries, and not for heads", copy)
            of_kv = {a.label for a in tensor.axes if a.size == KV_HEADS}
            coords = (
                replace(c, value=tl.Name(self.kv_head))  # the only one, of all query heads
                if c.axis.id in of_kv and c.value == tl.Num("0")
                else c
                for c in copy.coords or ()
            )
            copy = replace(copy, coords=tuple(coords))
        named: tl.Copy = _changed_parts(copy, self._known(copy))
        if tl.Name(self.head) in tl.expressions(named):
            if self.layout.count > 1:
                text = "this is copied for one query head, and a tile holds those of a group"
                raise _refused(text, copy)
            named = _changed_parts(named, self._only_head)
        return named

    def _outer_letters(self, copy: tl.Copy) -> set[str]:
        """The letters of the axes before the queries."""
        axes = self.layout.axes[self.program.outer(copy).name]
        labels = [a.label.id for a in axes if a.label is not None]
        return set(labels[: labels.index("G") - 2])

    # --- expressions --------------------------------------------------------------------------

    def _scalar(self, expr: tl.Expr, stmt: tl.Statement) -> tl.Expr:
        """A scalar of a thread block with several heads."""
        made: tl.Expr = _changed(expr, self._known(stmt))
        if tl.Name(self.head) in tl.expressions(made):
            if self.layout.count == 1:
                found: tl.Expr = _changed(made, self._only_head)
                return found
            raise _refused("this differs between the heads of a group", stmt)
        return made

    def _only_head(self, expr: Any) -> Any:
        return tl.Name(self.kv_head) if expr == tl.Name(self.head) else None

    def _known(self, stmt: tl.Statement) -> Change:
        """What changes in any expression: the kv head, scalars by head, and positions of the
        tile, which now count rows."""

        def change(expr: Any) -> Any:
            if isinstance(expr, tl.Call) and self._is_kv_head(expr):
                return tl.Name(self.kv_head)
            if isinstance(expr, tl.Name) and expr.id in self.inlined:
                return self.inlined[expr.id]
            if isinstance(expr, tl.Binary):
                return self._position(expr) or self._blocks(expr)
            if isinstance(expr, tl.Name) and self.rows.block and expr.id == self.rows.block:
                text = f"`{expr.id}` is no longer a block of {_size(self.rows)} queries, and what"
                raise _refused(f"{text} is made of it here is not known", stmt)
            return None

        return change

    def _element(self, stmt: tl.Statement) -> Change:
        """What changes in a Compute, whose elements have rows."""
        known = self._known(stmt)
        member = tl.Binary("%", Q_IDX, self.group)
        head = tl.Binary("+", tl.Binary("*", tl.Name(self.kv_head), self.group), member)

        def element(expr: Any) -> Any:
            if expr == Q_IDX:
                return tl.Call(tl.Name("floor"), (tl.Binary("/", Q_IDX, self.group),))
            if self.head and expr == tl.Name(self.head):
                return head
            if isinstance(expr, tl.Name) and expr.id in self.inlined:
                return _changed(self.inlined[expr.id], element)
            if isinstance(expr, tl.Index) and self._by_head(expr):
                return tl.Name(self._vector(_changed_parts(expr, element)))
            return known(expr)

        return element

    def _by_head(self, expr: tl.Index) -> bool:
        """Whether an element depends on the head alone, and on what the grid says."""
        names = {n.id for arg in expr.args for n in tl.value_names(arg)}
        grid = {a.name.id for a in self.program.grid.axes}
        return self.head in names and names <= grid - {self.rows.block} | {*self.program.params}

    def _vector(self, value: tl.Expr) -> str:
        if value not in self.vectors:
            assert isinstance(value, tl.Index)
            self.vectors[value] = self.layout.fresh(f"{value.tensor.id}Row")
        return self.vectors[value]

    def _position(self, expr: tl.Binary) -> tl.Expr | None:
        """The query of a row of the tile, where an expression is the first or the last one or the
        one behind them."""
        names = {n.id for n in tl.value_names(expr)}
        if self.rows.block not in names or names - {self.rows.block} - {*self.program.params}:
            return None
        size = evaluate(self.rows.size, self.program.params)
        try:
            zero, far = (
                evaluate(expr, {**self.program.params, self.rows.block: n}) for n in (0, WORK)
            )
        except NotScalar:
            return None
        if not all(isinstance(v, int | Fraction) for v in (zero, far, size)):
            return None
        assert not isinstance(size, bool)
        if far != zero + WORK * size or zero not in (0, size - 1, size):  # type: ignore[operator]
            return None
        call = "ceil" if zero == size else "floor"
        return tl.Call(tl.Name(call), (tl.Binary("/", expr, self.group),))

    def _blocks(self, expr: tl.Binary) -> tl.Expr | None:
        """The number of tiles, where an expression is that."""
        if expr.op != "/" or expr.left != Q_LEN:
            return None
        try:
            if evaluate(expr.right, self.program.params) != evaluate(
                self.rows.size, self.program.params
            ):
                return None
        except NotScalar:
            return None
        return replace(expr, left=tl.Binary("*", Q_LEN, self.group))


def _changed(node: Any, change: Change) -> Any:
    """A node with what `change` puts in its place, or in the place of its parts."""
    found = change(node)
    return _changed_parts(node, change) if found is None else found


def _changed_parts(node: Any, change: Change) -> Any:
    changes: dict[str, Any] = {}
    for part in fields(node):
        value = getattr(node, part.name)
        if isinstance(value, tuple):
            changes[part.name] = tuple(_changed(v, change) if _is_node(v) else v for v in value)
        elif _is_node(value):
            changes[part.name] = _changed(value, change)
    return replace(node, **changes) if changes else node


def _size(rows: _Rows) -> str:
    return rows.size.id if isinstance(rows.size, tl.Name) else "BM"


def _is_node(value: object) -> bool:
    """Whether names may be in it; a span has none."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, tl.Span)


def _refused(text: str, stmt: tl.Statement) -> Failed:
    return Failed(Diagnostic("FW916", text, stmt.span))
