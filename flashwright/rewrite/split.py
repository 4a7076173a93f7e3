"""A program that splits the keys of its loop over thread blocks (split-KV, as in FlashDecoding).

The first kernel visits a share of the iterations in each thread block and stores the parts of the
sums. The second one puts the parts together, each relative to the new maximum, and does what stood
behind the loop. What the sums begin with counts in the second kernel, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

from flashwright.check.check import check
from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Failed, Label
from flashwright.lang.format import format_expr, format_tree
from flashwright.lang.parse import parse
from flashwright.program.kernels import sections
from flashwright.program.needed import is_store, needed
from flashwright.program.program import Key, Program
from flashwright.program.scalars import number
from flashwright.program.vocabulary import CONSTANTS, PAGE, RESERVED_PARAMS
from flashwright.program.vocabulary import split as split_space
from flashwright.rewrite.ahead import Ahead
from flashwright.rewrite.begin import Begin, adjacent
from flashwright.rewrite.carried import accumulating, carried_by, read_before, refused
from flashwright.rewrite.columns import in_pieces
from flashwright.rewrite.parts import Parts, place_of
from flashwright.rewrite.rows import ROWS, rows_of, small_tiles
from flashwright.rewrite.tree import (
    Body,
    Comments,
    edited,
    fresh,
    names_in,
    path_to,
    up_to,
    without_comments,
    written,
)


def split(tree: tl.Tree) -> tl.Tree:
    """The program of two kernels. `splits`, a dim of its own, is the number of thread blocks that
    share the keys. Raises Failed with the errors of a program that is wrong, or with FW910 if it
    cannot be split."""
    if any(stmt.span == tl.NOWHERE for stmt in tl.statements(tree.body)):
        tree = parse(format_tree(tree))
    verdict = check(tree)
    if verdict.errors or not verdict.kernels:
        raise Failed(*verdict.errors)
    if len(verdict.kernels) > 1:
        second = next(s for s in sections(tree)[2] if isinstance(s, tl.Grid))
        raise refused("the program has several kernels", second)
    (program,) = verdict.kernels
    return parse(format_tree(_Splitting(tree, program).tree()))  # with spans of one text


class _Splitting:
    """Rewrites one program."""

    def __init__(self, tree: tl.Tree, program: Program) -> None:
        self.program = program
        self.comments = Comments.of(tree.body)
        self.head, own = sections(tl.Tree(without_comments(tree.body)))
        names = names_in(tree.body)  # those of tiles also without their space
        bases = {base for base, _ in map(split_space, names)}
        self.fresh = partial(fresh, used=names | bases | {*CONSTANTS})
        self.grid = program.grid
        self.body = own[1:]
        self.loop = self._loop()
        self.before, self.behind = path_to(self.body, self.loop)
        self.carried = carried_by(program, self.loop)
        self._check_stores()
        self.begin = Begin.of(program, self.before, self.loop, self.behind, self.carried)
        if self.begin.early and not adjacent(self.body, self.begin.early):
            raise refused("only some of what adds to the sums is under a condition", self.loop)
        wanted = ("splits", "part_idx", "split_idx", "tiles", "n", ROWS)
        self.splits, self.part_idx, self.split_idx, self.tiles, self.n, self.rows = map(
            self.fresh, wanted
        )
        rows = rows_of(program, self.live)
        known = {*program.params, *program.dims, *(a.name.id for a in self.grid.axes), PAGE}
        known |= {s.name.id for s in self.before if isinstance(s, tl.Let)}
        place = place_of(program, self.loop, self.behind, known, rows)
        self.parts = Parts.of(program, place, self.splits, self.live, self.carried, self.fresh)

    # --- what the program is ----------------------------------------------------------------------

    def _loop(self) -> tl.For:
        """The loop that accumulates."""
        loops = [s for s in self.program.outer_loops if accumulating(self.program, s)]
        if not loops:
            raise refused("no loop carries sums from one iteration to the next", self.grid)
        if len(loops) > 1:
            where = Label(loops[0].span, "so does this one")
            raise refused("several loops carry sums: this one", loops[1], where)
        mine = (s for s in tl.statements(self.body) if isinstance(s, tl.For))
        return next(s for s in mine if s.span == loops[0].span)

    def _check_stores(self) -> None:
        program = self.program
        for tensor in program.tensors.values():
            if tensor.offset is not None:
                raise refused(f"`{tensor.name}` is a view with an offset", tensor.declared)
        inside = [*tl.statements(self.loop.body)]
        for stmt in tl.statements(self.body):
            if isinstance(stmt, tl.Copy) and stmt.adds:
                raise refused("the kernel adds to global memory", stmt)
            if is_store(stmt) and any(s is stmt for s in inside):
                raise refused("a result is stored in the loop", stmt)

    @cached_property
    def live(self) -> tuple[Key, ...]:
        """The sums that are used behind the loop, and their maxima. Raises Failed with FW910 if
        something else of the loop is used there."""
        used = read_before(self.program, self.behind)
        inside = {k for s in tl.statements(self.loop.body) for k in self.program.writes(s)}
        for key, stmt in used.items():
            if key in inside and key not in self.carried.tiles:
                raise refused(f"`{key[0]}` is what the last iteration left of it", stmt)
        found = {key for key in self.carried.tiles if key in used}
        found |= {s.maximum for s in self.carried.softmaxes if found & {*s.tiles}}
        if not found:
            raise refused("nothing behind the loop uses its sums", self.loop)
        order = [k for s in self.carried.softmaxes for k in (*s.rescaled, s.maximum, s.total)]
        return tuple(dict.fromkeys(k for k in (*order, *self.carried.sums) if k in found))

    # --- the program ------------------------------------------------------------------------------

    def tree(self) -> tl.Tree:
        """The program of two kernels."""
        first, second = self._first(), self._second()
        small: Body = ()
        made = small_tiles(self.program, second, self.live[0], self.rows)
        if made is not None:
            note = "rows of a block that puts parts together"
            small = written(f"param {self.rows} = 16  // {note}\n")
            second = made
        letters = dict.fromkeys(self.parts.names.values(), self.parts.place.column)
        pieces = in_pieces(self.program, second, letters, self.fresh)
        if pieces is not None:
            small, second = (*small, *pieces[0]), pieces[1]
        head = self.comments.put_back((*self._head(small), *first))
        below = self.comments.put_back(self._bare(second, first))
        title = tl.Comment(self._title(), gap=True)
        return tl.Tree((*head, title, *below))

    def _title(self) -> str:
        relative = ", each relative to its own maximum" if self.parts.maxima else ""
        return f"the parts of a row{relative}"

    def _head(self, small: Body) -> list[tl.Statement]:
        """What both kernels share: params, dims and tensors."""
        kept = [*self.head, *(s for s in self.body if _is_shared(s))]
        params = [s for s in kept if isinstance(s, tl.Param)]
        dims = [s for s in kept if isinstance(s, tl.Dim)]
        tensors = [s for s in kept if isinstance(s, tl.Allocate)]
        others = [s for s in kept if not isinstance(s, tl.Param | tl.Dim | tl.Allocate)]
        splits = written(f"dim {self.splits}\n")
        parts = self.parts.declarations()
        return [*params, *small, *dims, *splits, *tensors, *parts, *others]

    def _first(self) -> Body:
        """The kernel that stores the parts."""
        stores, loop = self.parts.stores(self.split_idx), self.loop
        changes = self.begin.neutral() | self.begin.once(self.split_idx)
        lets, share = self._share()
        if self.carried.ahead:
            ahead = Ahead(self.program, loop, self.carried.ahead, self.fresh)
            bounds = ((ahead.first, share.low), (ahead.last, share.high))
            lets += tuple(tl.Let(tl.Name(name), value) for name, value in bounds)
            changes |= ahead.prologue(self.before, lets)
            changes[id(loop)] = (ahead.loop(), *stores)
        else:
            first, *others = (*lets, share)
            made = replace(first, gap=loop.gap), *(replace(s, gap=False) for s in others)
            changes[id(loop)] = (*made, *stores)
        body = edited(up_to(self.body, loop), changes)
        kernel = (*self._first_grid(), *(s for s in body if not _is_shared(s)))
        return _gapped(_needed(kernel, stores))

    def _share(self) -> tuple[Body, tl.For]:
        """The loop over a share of the iterations, and the scalars that it needs. Where the loop
        has no iterations, their number may be below 0, and every share is empty."""
        loop, low = self.loop, self.loop.low
        lets: Body = ()
        if not isinstance(low, tl.Name | tl.Num):
            name = tl.Name(self.fresh("begin"))
            lets, low = (tl.Let(name, low),), name
        count = _sum("-", _ceil(self.program, loop.high), low)
        if not isinstance(count, tl.Name | tl.Num):
            lets, count = (*lets, tl.Let(tl.Name(self.tiles), count)), tl.Name(self.tiles)
        bounds = (
            _sum("+", low, _expr(f"floor({format_expr(count)} * {part} / {self.splits})"))
            for part in (self.split_idx, f"({self.split_idx} + 1)")
        )
        return lets, replace(loop, low=next(bounds), high=next(bounds))

    def _first_grid(self) -> Body:
        axis, *others = self.grid.axes
        count = _sum("-", _ceil(self.program, axis.high), axis.low)
        blocks = tl.Binary("*", tl.Name(self.splits), count)
        parts = tl.GridAxis(tl.Name(self.part_idx), tl.Num("0"), blocks)
        block = _sum("+", axis.low, _expr(f"floor({self.part_idx} / {self.splits})"))
        return (
            replace(self.grid, axes=(parts, *others)),
            *written(f"let {self.split_idx} = {self.part_idx} % {self.splits}\n"),
            tl.Let(axis.name, block),
        )

    def _second(self) -> Body:
        """The kernel that puts the parts together, in tiles of the same size."""
        loads = self.parts.loads(self.n)
        steps = self.parts.put_together(self.carried.softmaxes)
        (frame,) = written(f"for {self.n} = 0:{self.splits}\nend\n")
        assert isinstance(frame, tl.For)
        changes = self.begin.left_out() | {id(self.loop): (replace(frame, body=(*loads, *steps)),)}
        maxima = self.parts.new_maxima()
        for stmt in tl.statements(self.body):
            if stmt.span in maxima:
                changes[id(stmt)] = (stmt, maxima[stmt.span])
        body = [s for s in edited(self.body, changes) if not _is_shared(s)]
        stores = [s for s in tl.statements(tuple(body)) if is_store(s)]
        grid = replace(self.grid, gap=False, comment=None, span=tl.NOWHERE)
        return _gapped(_needed((grid, *body), stores))

    def _bare(self, kernel: Body, first: Body) -> Body:
        """A kernel without the notes at the ends of lines that the first one has."""
        seen = {stmt.span for stmt in tl.statements(first)}
        notes = {
            id(s): (replace(s, comment=None),)
            for s in tl.statements(kernel)
            if s.comment is not None and s.span in seen and not isinstance(s, tl.For | tl.If)
        }
        return edited(kernel, notes)


def _is_shared(stmt: tl.Statement) -> bool:
    """Whether a statement below the grid belongs above it: both kernels may need it."""
    if isinstance(stmt, tl.Param):
        return stmt.name.id not in RESERVED_PARAMS
    return isinstance(stmt, tl.Dim) or (isinstance(stmt, tl.Allocate) and stmt.space == "global")


def _needed(kernel: Body, stores: Sequence[tl.Statement]) -> Body:
    """What some stores need, without empty loops. What only a branch without statements needed goes
    as well."""
    before = None
    while kernel != before:
        before, kernel = kernel, needed(kernel, stores)
        loops = [s for s in tl.statements(kernel) if isinstance(s, tl.For) and not s.body]
        kernel = edited(kernel, {id(s): () for s in loops})
    return kernel


def _gapped(kernel: Body) -> Body:
    """A kernel with a blank line above the first statement that declares nothing."""
    declares = (tl.Grid, tl.Param, tl.Let, tl.Allocate)
    at = next(n for n, s in enumerate(kernel) if not isinstance(s, declares))
    return (*kernel[:at], replace(kernel[at], gap=True), *kernel[at + 1 :])


# --- expressions ----------------------------------------------------------------------------------


def _expr(text: str) -> tl.Expr:
    (stmt,) = written(f"let x = {text}\n")
    assert isinstance(stmt, tl.Let)
    return stmt.value


def _sum(op: str, left: tl.Expr, right: tl.Expr) -> tl.Expr:
    """`left + right` or `left - right`, without a 0."""
    zero = tl.Num("0")
    if right == zero:
        return left
    return right if left == zero and op == "+" else tl.Binary(op, left, right)


def _ceil(program: Program, expr: tl.Expr) -> tl.Expr:
    """A bound as a whole number."""
    return expr if _is_whole(program, expr) else tl.Call(tl.Name("ceil"), (expr,))


def _is_whole(program: Program, expr: tl.Expr) -> bool:
    """Whether an expression is whole whatever its dims are."""
    match expr:
        case tl.Num(text):
            return isinstance(number(text), int)
        case tl.Name(name):
            stmt = program.scalar_definition(name)
            if isinstance(stmt, tl.Let | tl.Param):
                return _is_whole(program, stmt.value)
            return name not in CONSTANTS
        case tl.Call(func, args):
            every = func.id in ("min", "max") and all(_is_whole(program, a) for a in args)
            return every or func.id in ("floor", "ceil")
        case tl.Binary("+" | "-" | "*", left, right):
            return _is_whole(program, left) and _is_whole(program, right)
    return False
