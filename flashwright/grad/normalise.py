"""A checked program as steps: Softmax and verbs expanded, every value assigned once, prefetched
Copies at their use, and the statements before, in and after the loop over the keys apart."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from flashwright.grad.algebra import (
    Step,
    add,
    call,
    inlined,
    per_element,
    renamed,
    substitute,
    values_in,
)
from flashwright.grad.listed import Listed, find_listed
from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_expr
from flashwright.program.program import Key, Program, Tensor
from flashwright.program.vocabulary import split
from flashwright.semantics.compute import expression

Axes = tuple[str, ...]
QUERY, KEY = "query", "key"


def refuse(span: tl.Span | None, why: str, help: str | None = None) -> Failed:
    """The error for a program that has no derived gradient, at the statement that prevents it."""
    return Failed(Diagnostic("FW908", why, span, help=help))


def unused_name(program: Program, name: str, *allowed: str) -> str:
    """A name that the program does not use, or one of those that are allowed."""
    taken = {base for base, _ in program.buffers} | program.tensors.keys()
    while name not in allowed and (name in taken or program.is_scalar(name)):
        name += "_"
    return name


@dataclass(frozen=True)
class Load:
    """A tile that a Copy brings from a tensor."""

    value: str
    tensor: Tensor
    copy: tl.Copy
    axes: Axes


@dataclass(frozen=True)
class Store:
    """A value that a Copy writes to a tensor of the caller."""

    value: str
    tensor: Tensor
    copy: tl.Copy


@dataclass
class Forward:
    """The forward pass: its loads, its steps in three parts, and what it stores.

    `carried` has for each value that passes from one iteration to the next, by its name at the
    begin of the body, the name at the end; `first` has their values before the loop. `listed` are
    the lists of blocks that the loop visits, if it does: then its variable stands for the tile.
    """

    program: Program
    loop: tl.For
    query: tl.GridAxis
    loads: dict[str, Load] = field(default_factory=dict)
    lets: dict[str, tl.Expr] = field(default_factory=dict)
    axes: dict[str, Axes] = field(default_factory=dict)
    first: dict[str, tl.Expr] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    body: list[Step] = field(default_factory=list)
    epilogue: list[Step] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    listed: Listed | None = None

    def spelt_out(self, expr: tl.Expr) -> tl.Expr:
        """A scalar expression with the lets in it replaced by their values."""
        for _ in self.lets:
            expr = renamed(expr, self.lets)
        return expr

    @property
    def inside(self) -> tl.Expr:
        """The condition that a query is not past the end."""
        assert isinstance(self.query.high, tl.Binary)
        return tl.Binary("<", tl.Name("q_idx"), self.query.high.left)

    def axes_of(self, expr: tl.Expr) -> Axes:
        """The axes of an expression's value: queries, then keys, then others."""
        match expr:
            case tl.Name("q_idx"):
                return (QUERY,)
            case tl.Name("kv_idx"):
                return (KEY,)
            case tl.Name(id):
                return self.axes.get(id, ())
            case tl.Call(tl.Name("gemm"), (left, right)):
                a, b = self.axes_of(left), self.axes_of(right)
                return _ordered([x for x in a + b if not (x in a and x in b)])
            case tl.Call(tl.Name("rowsum" | "rowmax"), (operand,)):
                return self.axes_of(operand)[:-1]
            case tl.Call(tl.Name("sum"), (operand, tl.Name(kept))):
                return tuple(a for a in self.axes_of(operand) if a in kept.split("|"))
            case tl.Call(_, args) | tl.Index(_, args):
                return _ordered([x for a in args for x in self.axes_of(a)])
            case tl.Binary(_, left, right):
                return _ordered([*self.axes_of(left), *self.axes_of(right)])
            case tl.Unary(_, operand):
                return self.axes_of(operand)
        return ()


def _ordered(axes: list[str]) -> Axes:
    """Each axis once: queries, then keys, then others."""
    return tuple(sorted(dict.fromkeys(axes), key=lambda a: {QUERY: 0, KEY: 1}.get(a, 2)))


def normalise(program: Program) -> Forward:
    """The forward pass of a program; Failed if its structure has no derived gradient."""
    loops = [s for s in program.tree.body if isinstance(s, tl.For)]
    if len(loops) != 1:
        span = loops[1].span if loops else program.grid.span
        raise refuse(span, "a gradient needs one loop over the keys; this program has another form")
    forward = Forward(program, loops[0], _query_axis(program))
    walk = _Walk(forward)
    before = program.tree.body.index(loops[0])
    walk.statements(program.tree.body[:before])
    walk.loop(loops[0])
    walk.statements(program.tree.body[before + 1 :])
    forward.epilogue = walk.steps
    _name_weights(forward)
    return forward


def _name_weights(forward: Forward) -> None:
    """Call the weights P: the results made from scores S that a GEMM with values takes."""
    names: dict[str, tl.Name] = {}
    for step in forward.body:
        match step.value:
            case tl.Call(tl.Name("gemm"), (tl.Name(left), _)) if forward.axes[left] == (QUERY, KEY):
                new = re.sub("^S", "P", left)
                names[left] = tl.Name(new)
                forward.axes[new] = forward.axes[left]
    forward.body = [
        replace(s, target=names.get(s.target, tl.Name(s.target)).id, value=renamed(s.value, names))
        for s in forward.body
    ]


def _query_axis(program: Program) -> tl.GridAxis:
    """The grid's axis of query blocks: the one whose bound is a quotient."""
    for axis in program.grid.axes:
        if isinstance(axis.high, tl.Binary) and axis.high.op == "/":
            return axis
    raise refuse(program.grid.span, "no axis of the grid has blocks of queries: `0:q_len / BM`")


class _Walk:
    """Reads statements in order and makes steps of them. `parts` has the tiles that stand in the
    place of one that several Copies fill, by the column at which each begins."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.program = forward.program
        self.steps: list[Step] = []
        self.current: dict[Key, str] = {}
        self.count: dict[str, int] = {}
        self.ahead: dict[Key, tl.Copy] = {}
        self.parts: dict[Key, dict[str, Key]] = {}
        self.span = tl.NOWHERE

    def statements(self, body: tuple[tl.Statement, ...]) -> None:
        """Read statements that are no loop over the keys."""
        for stmt in body:
            self.span = stmt.span
            self._statement(stmt)

    def _statement(self, stmt: tl.Statement) -> None:
        """Read one statement; Failed if it has no derived gradient."""
        match stmt:
            case tl.Let(name, value):
                self.forward.lets[name.id] = self._scalar(value)
            case tl.Copy():
                self._copy(stmt)
            case tl.Compute():
                self._compute(stmt)
            case tl.Reshape(name):
                self.current[self._key(stmt.target or name)] = self._value(name).id
            case tl.If(_, then, orelse) if not orelse and all(map(_is_load, then)):
                self.statements(then)
            case tl.If():
                raise refuse(stmt.span, "a branch around computations has no derived gradient")
            case tl.For():
                raise refuse(stmt.span, "a loop inside the loop over the keys")

    def _check_listed(self) -> None:
        """Refuse a loop over lists that also reads tiles by the number of an iteration."""
        forward = self.forward
        if forward.listed is None:
            return
        tiles = {name for name, value in forward.lets.items() if value == forward.loop.var}
        plain = {name: value for name, value in forward.lets.items() if name not in tiles}
        for load in forward.loads.values():
            for coord in load.copy.coords or ():
                value = coord.value
                for _ in plain:
                    value = renamed(value, plain)
                if forward.loop.var in tl.value_names(value):
                    text = f"`{load.tensor.name}` is read by the number of an iteration"
                    raise refuse(load.copy.span, text, "take the place of all keys from the lists")

    def _scalar(self, value: tl.Expr) -> tl.Expr:
        """The value of a let: for a tile of keys from lists, the loop's variable."""
        forward = self.forward
        size, axis = forward.query.high, forward.query.name
        assert isinstance(size, tl.Binary)
        high = forward.spelt_out(forward.loop.high)
        listed = find_listed(forward.spelt_out(value), forward.loop, high, axis, size.right)
        if listed is None or forward.listed not in (None, listed):
            return value
        forward.listed = forward.listed or listed
        return forward.loop.var

    def loop(self, loop: tl.For) -> None:
        """The body, with the values that it carries and the Copies that run ahead of their use."""
        forward = self.forward
        for step in self.steps:
            if isinstance(step.value, tl.Call) and step.value.func.id == "gemm":
                raise refuse(step.span, "a GEMM before the loop over the keys")
        first, self.steps = {s.target: s.value for s in self.steps}, []
        self._move_prefetches(loop)
        written = {k for s in loop.body for k in self.program.writes(s)}
        starts = {k: v for k, v in self.current.items() if k in written and v in first}
        for key, value in starts.items():
            starts[key] = self.current[key] = self._fresh(key, forward.axes[value])
            forward.first[starts[key]] = inlined(first[value], first)
        self.statements(loop.body)
        self._check_listed()
        self.ahead.clear()
        forward.carried = {begin: self.current[key] for key, begin in starts.items()}
        forward.body, self.steps = self.steps, []
        left = {v for s in forward.body for v in values_in(s.value)}
        forward.body[:0] = [Step(t, v) for t, v in first.items() if t in left]

    def _move_prefetches(self, loop: tl.For) -> None:
        """Note the Copies that load the next block: they hold this block when they are used."""
        for stmt in loop.body:
            for copy in stmt.then if isinstance(stmt, tl.If) else ():
                if isinstance(copy, tl.Copy) and self.program.dest(copy) in self.current:
                    now = replace(copy, coords=tuple(map(self._this_block, copy.coords or ())))
                    first = self.forward.loads.pop(self.current[self.program.dest(copy)])
                    self._check_first(loop, now, first.copy)
                    self.ahead[self.program.dest(copy)] = now
        for key, copy in self.ahead.items():
            self._load(copy, key)

    def _this_block(self, coord: tl.Coord) -> tl.Coord:
        """A place of the next block, one block earlier."""
        var = self.forward.loop.var.id
        next_block = tl.Binary("+", tl.Name(var), tl.Num("1"))
        marked = substitute(coord.value, lambda e: tl.Name("@") if e == next_block else None)
        if any(n.id == var for n in tl.value_names(marked)):
            raise refuse(coord.span, "a Copy that runs ahead by other than one block")
        return replace(coord, value=renamed(marked, {"@": tl.Name(var)}))

    def _check_first(self, loop: tl.For, copy: tl.Copy, before: tl.Copy) -> None:
        """Refuse a program whose Copy before the loop does not load the loop's first block."""
        for have, want in zip(before.coords or (), copy.coords or (), strict=False):
            begin = self.forward.spelt_out(renamed(want.value, {loop.var.id: loop.low}))
            if self.forward.spelt_out(have.value) != begin:
                raise refuse(have.span, "the first block is not the one the loop begins with")

    def _copy(self, copy: tl.Copy) -> None:
        """A store, a load, or another name for a tile."""
        dest = self.program.dest(copy)
        if copy.dest == "global":
            tensor = self.program.tensors[dest[0]]
            self.forward.stores.append(Store(self._value(copy.name).id, tensor, copy))
        elif copy.source != "global":
            self.current[dest] = self.current[self.program.source(copy)]
        elif dest not in self.ahead:
            self._load(copy, dest)

    def _load(self, copy: tl.Copy, dest: Key) -> None:
        """A tile from global memory; Failed if its place has no derived gradient."""
        tensor = self.program.tensors[split(copy.name.id)[0]]
        if copy.column is not None:
            dest, copy = self._own_tile(copy, dest)
        if tensor.offset is not None:
            raise refuse(copy.span, f"`{tensor.name}` is a view with an offset")
        if any(c.within for c in copy.coords or ()):
            hint = "derive the backward of the program for rectangular batches, and `pack` that"
            raise refuse(copy.span, f"`{tensor.name}` is read in ranges", hint)
        given = {c.axis.id: self.forward.spelt_out(c.value) for c in copy.coords or ()}
        if any(isinstance(e, tl.Index) for value in given.values() for e in tl.expressions(value)):
            raise refuse(copy.span, f"the place of `{tensor.name}` comes from a tensor")
        sizes, axes = copy.shape or (), []
        for axis, size in zip(tensor.axes[len(tensor.axes) - len(sizes) :], sizes, strict=True):
            names = {n.id for n in tl.value_names(given.get(axis.label, tl.Num("0")))}
            side = QUERY if self.forward.query.name.id in names else format_expr(size)
            axes.append(KEY if self.forward.loop.var.id in names else side)
        for load in self.forward.loads.values():
            if load.tensor is tensor and _same_place(load.copy, copy):
                self.current[dest] = load.value  # K and V are one tensor
                return
        value = self.current[dest] = self._fresh(dest, tuple(axes))
        self.forward.loads[value] = Load(value, tensor, copy, tuple(axes))

    def _compute(self, stmt: tl.Compute) -> None:
        """A Compute as steps."""
        if stmt.operation == "softmax":
            self._softmax(stmt)
            return
        target = stmt.args[0] if stmt.operation == "mask" else stmt.target
        assert isinstance(target, tl.Name)
        if stmt.operation == "mask":
            assert stmt.where is not None
            value = call("mask", self._value(target), self._read(stmt.where))
        elif stmt.operation == "gemm":
            value, *more = self._gemms(stmt)
            for product in more:
                value = add(self._flat(value), self._flat(product))
        else:
            value = self._read(expression(stmt))
        if stmt.mode == "accumulate":
            value = add(self._value(target), self._flat(value))
        self._assign(target, value)

    def _own_tile(self, copy: tl.Copy, dest: Key) -> tuple[Key, tl.Copy]:
        """A tile for a Copy that fills some columns of one, and the Copy into it."""
        assert copy.column is not None
        parts = self.parts.setdefault(dest, {})
        name = split(copy.name.id)[0]
        taken = {base for tiles in self.parts.values() for base, _ in tiles.values()}
        column = format_expr(copy.column)
        while column not in parts and name in taken:
            name += "_"
        own = parts.setdefault(column, (name, dest[1]))
        return own, replace(copy, column=None, target=tl.Name(own[0]))

    def _gemms(self, stmt: tl.Compute) -> list[tl.Expr]:
        """A GEMM as products of tiles: of each two that stand side by side."""
        tiles = [a.operand if isinstance(a, tl.Transpose) else a for a in stmt.args]
        parts = [self.parts.get(self._key(t)) for t in tiles if isinstance(t, tl.Name)]
        if parts == [None, None]:
            return [call("gemm", *map(self._read, stmt.args))]
        left, right = (part or {} for part in parts)
        if left.keys() != right.keys():
            raise refuse(stmt.span, "a GEMM of tiles side by side whose columns are not alike")
        values = [(self.current[left[n]], self.current[right[n]]) for n in left]
        return [call("gemm", *map(tl.Name, pair)) for pair in values]

    def _softmax(self, stmt: tl.Compute) -> None:
        """The statement spelt out, as docs/language.md has it."""
        scores = stmt.args[0]
        if not stmt.state or not isinstance(scores, tl.Name):
            raise refuse(stmt.span, "a softmax of whole rows, without a running maximum")
        high, weights = stmt.state
        old = self._value(high)
        self._assign(high, call("max", old, call("rowmax", self._value(scores))))
        new = self._value(high)
        drop = self._flat(call("exp", tl.Binary("-", old, new)))
        self._assign(scores, call("exp", tl.Binary("-", self._value(scores), new)))
        kept = tl.Binary("*", self._value(weights), drop)
        self._assign(weights, tl.Binary("+", kept, call("rowsum", self._value(scores))))
        for name in stmt.rescale:
            self._assign(name, tl.Binary("*", self._value(name), drop))

    def _assign(self, target: tl.Name, value: tl.Expr) -> None:
        """A step for the new value of a tile."""
        value = self._flat(value, root=True)
        key = self._key(target)
        axes = self.forward.axes_of(value) or self._declared_axes(key)
        self.current[key] = self._fresh(key, axes)
        self.steps.append(Step(self.current[key], value, self.span))

    def _declared_axes(self, key: Key) -> Axes:
        """The axes of a tile that is set to a scalar: rows are queries, columns by their size."""
        buffer = self.program.buffers[key]
        named = [(buffer.named_size(n), size) for n, size in enumerate(buffer.shape)]
        return (QUERY, *(name.id if name else str(size) for name, size in named[1:]))

    def _flat(self, value: tl.Expr, root: bool = False) -> tl.Expr:
        """The value with every call in it made a step of its own; the outermost stays if it is the
        root of its statement."""
        match value:
            case tl.Call(func, args):
                flat: tl.Expr = call(func.id, *map(self._flat, args))
            case tl.Binary(op, left, right):
                flat = tl.Binary(op, self._flat(left), self._flat(right))
                if op != "/" or not per_element(flat.right):
                    return flat
            case tl.Unary(op, operand):
                return tl.Unary(op, self._flat(operand))
            case _:
                return value
        if root or not per_element(flat):
            return flat
        base = func.id.capitalize() if isinstance(value, tl.Call) else "Ratio"
        name = self._fresh((base, "register"), self.forward.axes_of(flat))
        self.steps.append(Step(name, flat, self.span))
        return tl.Name(name)

    def _read(self, expr: tl.Expr) -> tl.Expr:
        """The expression with tiles replaced by their current values."""
        match expr:
            case tl.Transpose(operand):
                return self._read(operand)
            case tl.Name(id) if not self.program.is_scalar(id) and self.program.tile(expr):
                return self._value(expr)
            case tl.Name(id) if id in self.forward.lets:
                return self._read(self.forward.lets[id])
            case tl.Name(id) if id in (self.forward.loop.var.id, self.forward.query.name.id):
                text = f"a computation depends on the number of a block, `{id}`"
                raise refuse(self.span, text, "tiles have other sizes here: use q_idx and kv_idx")
            case tl.Call(func, args):
                return call(func.id.lower(), *map(self._read, args))
            case tl.Binary("<") if found := self._prefix(expr):
                return found
            case tl.Binary(op, left, right):
                return tl.Binary(op, self._read(left), self._read(right))
            case tl.Unary(op, operand):
                return tl.Unary(op, self._read(operand))
            case tl.Index(tensor, args):
                return tl.Index(tensor, tuple(map(self._read, args)))
        return expr

    def _prefix(self, condition: tl.Binary) -> tl.Name | None:
        """The name of a condition on the place of a block in its list."""
        forward = self.forward
        if forward.listed is None:
            return None
        end = forward.spelt_out(condition.right)
        return forward.listed.prefix(condition, forward.loop.var, end)

    def _key(self, name: tl.Name) -> Key:
        """The buffer that a statement calls by this name."""
        key = self.program.tile(name)
        assert key is not None, name
        return key

    def _value(self, name: tl.Name) -> tl.Name:
        """The value that a tile has now."""
        return tl.Name(self.current[self._key(name)])

    def _fresh(self, key: Key, axes: Axes) -> str:
        """A new name for a value with these axes, after its buffer."""
        base = key[0]
        self.count[base] = self.count.get(base, -1) + 1
        name = f"{base}.{self.count[base]}"
        self.forward.axes[name] = axes
        return name


def _same_place(one: tl.Copy, other: tl.Copy) -> bool:
    """Whether two Copies take the same part of a tensor."""
    return one.shape == other.shape and set(one.coords or ()) == set(other.coords or ())


def _is_load(stmt: tl.Statement) -> bool:
    """Whether a statement is a Copy from global memory."""
    return isinstance(stmt, tl.Copy) and stmt.source == "global"
