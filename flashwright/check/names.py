"""Names: each is defined once, before its use, and is used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.nodes import (
    Allocate,
    Axis,
    Call,
    Comment,
    Compute,
    Copy,
    Dim,
    Expr,
    For,
    Grid,
    If,
    Index,
    Let,
    Name,
    Param,
    Reshape,
    Span,
    Statement,
    Transpose,
    Tree,
    expressions,
    statements,
)
from flashwright.program.fixes import guess_fix
from flashwright.program.kernels import touched
from flashwright.program.program import Buffer, Key, Program, Tensor, TensorAxis, tile_of
from flashwright.program.scalars import NotScalar, Scalar, Unknown, evaluate, whole
from flashwright.program.vocabulary import (
    CONSTANTS,
    DEFAULT_DTYPE,
    DEFAULT_LABELS,
    DTYPE_ALIASES,
    DTYPES,
    PAGE,
    POSITIONS,
    PREDEFINED_DIMS,
    RESERVED_PARAMS,
    STATEMENT_VERBS,
    split,
)

MOST_WARPS = 32
"""A thread block has at most 1024 threads."""


class Names:
    """Everything a program declares, collected in one walk; findings go to `diagnostics`."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.diagnostics: list[Diagnostic] = []
        self.params: dict[str, Scalar] = {}
        self.dims: list[str] = list(PREDEFINED_DIMS)
        self.scalars: dict[str, Span | None] = dict.fromkeys((*PREDEFINED_DIMS, *CONSTANTS))
        self.grid: Grid | None = None
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[Key, Buffer] = {}
        self.sized = True  # every size is known; shapes mean nothing otherwise
        self.used: set[str | Key] = set(RESERVED_PARAMS)
        self.missing: set[str] = set()
        self._collect()
        self._check()
        self._report_unused()

    def error(self, code: str, message: str, span: Span, **more: object) -> None:
        """Append a finding to `diagnostics`."""
        self.diagnostics.append(Diagnostic(code, message, span, **more))  # type: ignore[arg-type]

    def program(self) -> Program | None:
        """The program with its names resolved; None if it has no grid."""
        if self.grid is None:
            return None
        return Program(
            self.tree, self.params, tuple(self.dims), self.grid, self.tensors, self.buffers
        )

    # --- declarations ---------------------------------------------------------------------

    def _collect(self) -> None:
        """Collect all declarations first, to tell names declared below from undefined ones."""
        for stmt in statements(self.tree.body):
            match stmt:
                case Param(name, value):
                    if stmt.earlier:
                        self._renamed(stmt)
                    self._define(name)
                    self._param(name, value)
                case Dim(names):
                    for name in names:
                        self._define(name)
                        self.dims.append(name.id)
                case Grid(axes):
                    if self.grid is not None:
                        where = (Label(self.grid.span, "the first grid"),)
                        self.error(
                            "FW202", "the program has a second grid", stmt.span, secondary=where
                        )
                    self.grid = stmt
                    for axis in axes:
                        self._define(axis.name)
                case Let(name):
                    self._define(name)
                case Allocate():
                    self._allocate(stmt)
        for stmt in statements(self.tree.body):
            if isinstance(stmt, Copy):
                self._declare_copy_target(stmt)
            elif isinstance(stmt, Reshape) and stmt.target is not None:
                self._declare_reshape_target(stmt)

    def _define(self, name: Name) -> None:
        if name.id in (*POSITIONS, PAGE, *CONSTANTS):
            self.error("FW202", f"`{name.id}` is a reserved name", name.span)
        elif name.id in self.scalars:
            first = self.scalars[name.id]
            where = (Label(first, "defined here first"),) if first else ()
            text = f"`{name.id}` is defined twice" if first else f"`{name.id}` is predefined"
            self.error("FW202", text, name.span, secondary=where, help="rename one, or delete it")
        self.scalars.setdefault(name.id, name.span)

    def _renamed(self, stmt: Param) -> None:
        """FW210 for a param by its earlier name."""
        span, name = stmt.name.span, stmt.name.id
        fix = Fix(f"write `{name}`", (Edit(span.start, span.end, name),))
        self.error("FW210", f"`{stmt.earlier}` is now called `{name}`", span, fix=fix)

    def _param(self, name: Name, value: Expr) -> None:
        for expr in expressions(value):
            if isinstance(expr, Name) and expr.id in self.params:
                self.used.add(expr.id)
        try:
            result = evaluate(value, {**CONSTANTS, **self.params})
        except NotScalar as problem:
            hint = "a param is a constant of numbers and earlier params; use `let` for the rest"
            self.error("FW306", problem.why, problem.culprit.span, help=hint)
            result = 1
        assert not isinstance(result, Unknown)
        if name.id == "Warps" and whole(result) not in range(1, MOST_WARPS + 1):
            text = f"Warps must be a whole number from 1 to {MOST_WARPS}, here it is {result}"
            self.error("FW306", text, value.span)
            result = 1
        self.params.setdefault(name.id, result)

    def _allocate(self, stmt: Allocate) -> None:
        base, space = split(stmt.name.id)
        if space is not None and space != stmt.space:
            text = f"`{stmt.name.id}` reads as {base} in {space}, but it is allocated in "
            self.error("FW206", text + stmt.space, stmt.name.span)
        dtype = self._dtype(stmt.dtype, DEFAULT_DTYPE[stmt.space])
        earlier = (
            self.tensors.get(base)
            if stmt.space == "global"
            else self.buffers.get((base, stmt.space))
        )
        if earlier is not None:
            where = (Label(earlier.declared.span, "allocated here first"),)
            text = f"`{base}` is allocated twice in {stmt.space}"
            self.error("FW202", text, stmt.name.span, secondary=where, help="delete one of them")
        elif base in self.scalars:
            first = self.scalars[base]
            number = (Label(first, "a number here"),) if first else ()
            text = f"`{base}` already names a number"
            self.error("FW202", text, stmt.name.span, secondary=number, help="rename one of them")
        elif stmt.space == "global":
            self.tensors[base] = Tensor(
                base, self._axes(stmt), dtype, stmt.offset, stmt, *self._direction(base)
            )
        else:
            shape = tuple(self.size(axis.size, f"a size of `{base}`") for axis in stmt.shape)
            stages = self.size(stmt.stages, "the number of stages") if stmt.stages else 1
            if len(shape) > 2:
                text = f"a tile has one or two axes, `{base}` has {len(shape)}"
                self.error("FW304", text, stmt.span)
            self.buffers[base, stmt.space] = Buffer(base, stmt.space, shape, dtype, stages, stmt)
        if stmt.along is not None and (stmt.space != "register" or len(stmt.shape) != 1):
            text = f"`along {stmt.along}` applies only to a vector in registers"
            self.error("FW205", text, stmt.span, help=f"leave `along {stmt.along}` out")
        if stmt.fragments and (stmt.space != "global" or dtype != "fp32" or stmt.offset):
            text = "`in fragments` applies only to a tensor in global memory, in fp32, no view"
            self.error("FW205", text, stmt.span, help="leave `in fragments` out")
        if stmt.in_place and (stmt.space != "global" or stmt.fragments or stmt.offset):
            text = "`in place` applies only to a tensor in global memory, no view"
            self.error("FW205", text, stmt.span, help="leave `in place` out")
        if stmt.strided and (stmt.space != "global" or stmt.fragments or stmt.offset):
            text = "`strided` applies only to a tensor in global memory, no view"
            self.error("FW205", text, stmt.span, help="leave `strided` out")

    def _dtype(self, name: Name | None, default: str) -> str:
        if name is None:
            return default
        if name.id not in DTYPES:
            text = f"unknown element type `{name.id}`; TL has {', '.join(DTYPES)}"
            meant = DTYPE_ALIASES.get(name.id.lower())
            fix = guess_fix(name, [meant] if meant else DTYPES, 0.0 if meant else 0.72)
            self.error("FW208", text, name.span, fix=fix)
            return default
        return name.id

    def _axes(self, stmt: Allocate) -> tuple[TensorAxis, ...]:
        defaults = DEFAULT_LABELS.get(len(stmt.shape), ())
        axes: list[TensorAxis] = []
        for position, axis in enumerate(stmt.shape):
            if axis.label is None and not defaults:
                text = f"a tensor with {len(stmt.shape)} axes must name them: `(B: batch, ...)`"
                self.error("FW209", text, axis.span)
            label = axis.label.id if axis.label else (*defaults, *"?" * 9)[position]
            if label != "?" and label in [a.label for a in axes]:
                self.error("FW202", f"two axes are called {label}", axis.span)
            axes.append(TensorAxis(label, axis.size))
        return tuple(axes)

    def _direction(self, base: str) -> tuple[bool, bool, bool]:
        """Whether the kernel reads the tensor, writes it, and adds to it."""
        read, written, added = self._touched
        return base in read, base in written, base in added

    @cached_property
    def _touched(self) -> tuple[set[str], set[str], set[str]]:
        return touched(self.tree.body)

    def size(self, expr: Expr, what: str) -> int:
        """A size that is known at compile time: a positive whole number. FW306 otherwise."""
        for part in expressions(expr):
            if isinstance(part, Name):
                self.used.add(part.id)
        try:
            value = evaluate(expr, self.params)
        except NotScalar as problem:
            self.sized = False
            if not isinstance(problem.culprit, Name) or problem.culprit.id in self.scalars:
                hint = "sizes of tiles are numbers and params, known before the kernel runs"
                self.error("FW306", problem.why, problem.culprit.span, help=hint)
            return 1  # undefined names are reported later, together
        count = whole(value)
        if count is None or not 0 < count <= 1 << 20:
            text = f"{what} must be a whole number from 1 to 1048576, here it is {value}"
            self.sized = False
            self.error("FW306", text, expr.span)
            return 1
        return count

    def _declare_copy_target(self, stmt: Copy) -> None:
        """Declare the tile of a Copy into shared memory or registers that has no Allocate."""
        base, space = split((stmt.target or stmt.name).id)[0], stmt.dest
        if space == "global" or (base, space) in self.buffers or stmt.column is not None:
            return  # a Copy into some columns does not give the width
        origin = split(stmt.name.id)[0]
        source = self.tensors.get(origin) if stmt.source == "global" else None
        held = self.buffers.get((origin, stmt.source))
        dtype = source.dtype if source else held.dtype if held else DEFAULT_DTYPE[space]
        if stmt.shape is not None:
            shape = tuple(self.size(s, f"a size of `{base}`") for s in stmt.shape)
        elif held is not None:
            shape = held.shape
        else:
            return  # shapes.py says that the Copy lacks its tile
        self.buffers[base, space] = Buffer(base, space, shape, dtype, 1, stmt)

    def _declare_reshape_target(self, stmt: Reshape) -> None:
        assert stmt.target is not None
        key: Key = (split(stmt.target.id)[0], "register")
        held = self.buffers.get((split(stmt.name.id)[0], "register"))
        if key not in self.buffers and held is not None:
            dtype = self._dtype(stmt.dtype, held.dtype)
            self.buffers[key] = Buffer(key[0], "register", held.shape, dtype, 1, stmt)

    # --- uses -----------------------------------------------------------------------------

    def _check(self) -> None:
        seen: set[int] = set()
        self._walk(self.tree.body, seen, ())
        if self.grid is None:
            self._report_missing_grid()

    def _walk(self, body: tuple[Statement, ...], seen: set[int], loops: tuple[str, ...]) -> None:
        for stmt in body:
            if isinstance(stmt, Allocate):
                seen.add(id(stmt))
            self._uses(stmt, seen, loops)
            if isinstance(stmt, For):
                if stmt.var.id in (*self.scalars, *loops, PAGE):
                    text = f"the loop variable `{stmt.var.id}` hides another name"
                    self.error("FW202", text, stmt.var.span)
                self._walk(stmt.body, seen, (*loops, stmt.var.id))
            elif isinstance(stmt, If):
                self._walk(stmt.then, seen, loops)
                self._walk(stmt.orelse, seen, loops)

    def _uses(self, stmt: Statement, seen: set[int], loops: tuple[str, ...]) -> None:
        not_values = _word_ids(stmt)
        for expr in expressions(stmt):
            if isinstance(expr, Index):
                self._tensor(expr.tensor)
                not_values.add(id(expr.tensor))
            elif isinstance(expr, Call):
                not_values.add(id(expr.func))
        tiles = isinstance(stmt, (Compute, Reshape))
        index = stmt.index if isinstance(stmt, Copy) else ()
        by_element = {id(e) for arg in index for e in expressions(arg)}
        for name in _tile_places(stmt):
            if name.id in (*self.scalars, *loops, *POSITIONS):
                text = f"expected a tile, found the number `{name.id}`"
                self.error("FW206", text, name.span)
        for expr in expressions(stmt):
            if isinstance(expr, Name) and id(expr) not in not_values:
                self._value(expr, stmt, seen, loops, tiles or id(expr) in by_element)
        if isinstance(stmt, Copy):
            self._copy_uses(stmt, seen)

    def _value(
        self, name: Name, stmt: Statement, seen: set[int], loops: tuple[str, ...], tiles: bool
    ) -> None:
        if name.id in self.scalars or name.id in loops:
            self.used.add(name.id)
            declared = self.scalars.get(name.id)
            if name.id not in loops and declared and declared.start > name.span.start:
                where = (Label(declared, "defined here"),)
                text = f"`{name.id}` is used before it is defined"
                self.error("FW201", text, name.span, secondary=where, help="move it up")
            return
        if tiles and name.id in POSITIONS:
            return
        if name.id == PAGE and _is_coordinate(name, stmt):
            return
        key = tile_of(name, self.buffers)
        if tiles and key is not None:
            self._use_buffer(key, name, seen)
        elif key is not None or split(name.id)[0] in self.tensors:
            self._report_wrong_kind(name, stmt, tiles)
        else:
            self._report_undefined(name, loops)

    def _use_buffer(self, key: Key, name: Name, seen: set[int]) -> None:
        self.used.add(key)
        declared = self.buffers[key].declared
        if isinstance(declared, Allocate) and id(declared) not in seen:
            where = (Label(declared.span, "allocated here"),)
            text = f"`{name.id}` is used before it is allocated"
            self.error("FW201", text, name.span, secondary=where, help="move the Allocate up")

    def _report_wrong_kind(self, name: Name, stmt: Statement, tiles: bool) -> None:
        base, space = split(name.id)
        if tiles and space in ("shared", "register"):
            copies = (s for s in statements(self.tree.body) if isinstance(s, Copy))
            if not any(_filled(c) == (base, space) for c in copies):
                text = f"no statement writes `{base}` in {space}"
                hint = f"`Copy {base} (...) in coordinate [...] from global to {space}` first"
                self.error("FW403", text, name.span, help=hint)
        elif tiles and base in self.tensors:
            text = f"`{name.id}` is in global memory; Compute works on shared memory and registers"
            hint = f"`Copy {base} (...) in coordinate [...] from global to shared` first"
            self.error("FW402", text, name.span, help=hint)
        else:
            text = f"expected a number, found the tile `{name.id}`"
            self.error("FW206", text, name.span, help="one element of a tensor is `T[a, b]`")

    def _report_undefined(self, name: Name, loops: Iterable[str]) -> None:
        base, space = split(name.id)
        known = [*self.scalars, *loops, *self.tensors, *(b for b, _ in self.buffers), *POSITIONS]
        spelt = [n + (f"_{s}" if s != "global" else "") for n, s in self.buffers] + known
        hint = None
        if space and any(b == base for b, _ in self.buffers):
            held = " and ".join(s for b, s in self.buffers if b == base)
            hint = f"{base} is in {held}; a Copy to {space} would make `{name.id}`"
        elif space or base in self.tensors:
            hint = f"`Allocate {base} in {space or 'register'} (...)`, or Copy it there first"
        fix = guess_fix(name, spelt)
        if fix is None and name.id in self.missing:
            return  # reported once; a fix for a misspelling is offered at every use
        self.missing.add(name.id)
        if name.id == PAGE:
            hint = "it is the page of a row, in a coordinate: `P = Table[batch_idx, page_idx]`"
        elif name.id in POSITIONS:
            hint = "positions are of elements, in a Mask or a Compute; here one number is needed"
        elif fix is None and hint is None:
            hint = "declare it: `param`, `let`, `dim`, or `Allocate` for a tile"
        self.error("FW201", f"undefined name `{name.id}`", name.span, help=hint, fix=fix)

    def _tensor(self, name: Name) -> None:
        self.used.add((name.id, "global"))
        if name.id not in self.tensors:
            text = f"`{name.id}` is not a tensor in global memory"
            hint = f"declare it: `Allocate {name.id} in global (...)`"
            self.error("FW201", text, name.span, help=hint, fix=guess_fix(name, self.tensors))

    def _copy_uses(self, stmt: Copy, seen: set[int]) -> None:
        for name, space in ((stmt.name, stmt.source), (stmt.target or stmt.name, stmt.dest)):
            base, spelt = split(name.id)
            allowed = (stmt.source, stmt.dest) if stmt.target is None else (space,)
            if spelt is not None and spelt not in allowed:
                text = (
                    f"`{name.id}` is in {spelt}, but the Copy is from {stmt.source} to {stmt.dest}"
                )
                self.error("FW206", text, name.span)
            self.used.add((base, space))
            if space == "global" and base not in self.tensors:
                text = f"`{base}` is not allocated in global memory"
                hint = f"declare it: `Allocate {base} in global (batch, heads, ...)`"
                fix = guess_fix(name, self.tensors)
                self.error("FW404", text, name.span, help=hint, fix=fix)
            elif space != "global" and (base, space) not in self.buffers:
                if name is stmt.name and space == stmt.source:
                    text = f"no statement writes `{base}` in {space}"
                    self.error("FW403", text, name.span, help="Copy or Compute it there first")
            elif space != "global":
                self._use_buffer((base, space), name, seen)

    def _report_missing_grid(self) -> None:
        above = (Comment, Param, Dim)  # the grid goes below these, above its uses
        first = next((s for s in self.tree.body if not isinstance(s, above)), self.tree.body[-1])
        line = "grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch"
        fix = None
        if "BM" in self.params:
            edit = Edit(first.span.start, first.span.start, line + "\n")
            fix = Fix(f"insert `{line}`", (edit,))
        text = "the program has no grid"
        self.error("FW207", text, first.span, help=f"add a grid: `{line}`", fix=fix)

    def _report_unused(self) -> None:
        for name, span in self.scalars.items():
            if span is not None and name not in self.used:
                self.error("FW203", f"`{name}` is never used", span, help="delete it")
        for key, buffer in self.buffers.items():
            if key not in self.used and isinstance(buffer.declared, Allocate):
                text = f"`{key[0]}` in {key[1]} is allocated, but no statement uses it"
                self.error("FW203", text, buffer.declared.name.span, help="delete the Allocate")
        for base, tensor in self.tensors.items():
            if (base, "global") not in self.used:
                text = f"`{base}` in global is allocated, but no statement uses it"
                self.error("FW203", text, tensor.declared.name.span, help="delete the Allocate")


def _filled(copy: Copy) -> Key:
    """The tile that a Copy writes."""
    return split((copy.target or copy.name).id)[0], copy.dest


def _tile_places(stmt: Statement) -> list[Name]:
    """The names in a statement that must be tiles."""
    places: list[Expr | None] = []
    match stmt:
        case Compute(verb, args, state):
            places = [stmt.target, *state, *stmt.rescale]
            if verb is not None and verb.id.lower() in STATEMENT_VERBS:
                places += [a.operand if isinstance(a, Transpose) else a for a in args]
        case Reshape(name):
            places = [name, stmt.target]
    return [p for p in places if isinstance(p, Name)]


def _is_coordinate(name: Name, stmt: Statement) -> bool:
    """Whether a name stands in a coordinate of a Copy (not in the bounds of its range)."""
    coords = (stmt.coords or ()) if isinstance(stmt, Copy) else ()
    return any(name is part for c in coords for part in expressions(c.value))


def _word_ids(stmt: Statement) -> set[int]:
    """The ids of the Name nodes in a statement that are not values: keywords, targets, labels."""
    words: list[Name | None] = []
    match stmt:
        case Param(name) | Let(name):
            words = [name]
        case Dim(names):
            words = list(names)
        case Grid(axes):
            words = [a.name for a in axes]
        case Allocate():
            words = [stmt.name, stmt.dtype, *(a.label for a in stmt.shape if isinstance(a, Axis))]
        case Copy():
            words = [stmt.name, stmt.target, *(c.axis for c in stmt.coords or ())]
        case Compute():
            words = [stmt.verb]
        case Reshape():
            words = [*stmt.source, *stmt.dest, stmt.dtype]
        case For(var):
            words = [var]
    return {id(w) for w in words if w is not None}
