"""Elementwise work in C++: loops over the rows and columns that a thread holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from flashwright.lower import ir
from flashwright.lower.element import (
    COLUMN,
    MINUS_LOG2_E,
    ROW,
    TILE,
    Element,
    Leaf,
    Op,
    Reduce,
    axes_of,
    leaves,
    literal,
    term,
    times,
    type_of,
    variable,
    with_leaves,
)
from flashwright.lower.printing.column_bits import ColumnBits, linear, position, position_along
from flashwright.lower.printing.cpp import element_place, text
from flashwright.lower.term import At, Gather, Var, as_float

UNROLL = "CUTE_UNROLL"
COSTLY = ("exp", "exp2", "log", "log2", "quick_log2", "sigmoid", "sqrt", "tanh", "tanh2")
PAIRED = {"sigmoid": "sigmoid2", "tanh2": "logistic2"}


def compute(node: ir.Compute, at: str = "at") -> Iterator[str]:
    """The lines for one statement, not indented; `at` knows the places of its tile's columns."""
    if node.note:
        yield f"// {node.note}"
    if node.unless is not None:
        yield f"if (!({text(node.unless)})) {{"
        for line in _loops(node, at):
            yield f"  {line}"
        yield "}"
        return
    yield from _loops(node, at)


def scatter(node: ir.Scatter, at: str) -> Iterator[str]:
    """The lines that add each element to the one in global memory that its index names."""
    row = _Row(ir.Compute(node.shape, (), node.rows, node.cols), at)
    if node.held.axes == COLUMN:
        lines = [*_column_position(row.node, node.place, at), _added(node.held, node.place)]
        yield from _loop("n", f"cute::size({variable(node.held)})", lines)
        return
    row.scatter(node.held, node.place)
    size = "cute::size<0>" if node.held.axes == TILE else "cute::size"
    yield from _loop("m", f"{size}({variable(node.held)})", row.lines)


def _added(held: Leaf, place: Element) -> str:
    """The addition of one element."""
    to = term(place)
    assert isinstance(to, Gather)
    return f"fw::add_by_index({text(held.term)}, {element_place(to)});"


def _loops(node: ir.Compute, at: str) -> Iterator[str]:
    rows: list[ir.Assign] = []
    for assign in node.assigns:
        if assign.buffer is not None and not axes_of(assign.value):
            yield from _rows(node, rows, at)
            rows = []
            yield from _filled(assign)
        elif assign.target.axes == COLUMN:
            yield from _rows(node, rows, at)
            rows = []
            yield from _loop(
                "n", f"cute::size({variable(assign.target)})", _columns(node, assign, at)
            )
        else:
            rows.append(assign)
    yield from _rows(node, rows, at)


def _filled(assign: ir.Assign) -> Iterator[str]:
    name, value = variable(assign.target), converted(assign)
    zero = isinstance(assign.value, Leaf) and assign.value.value == 0
    yield f"cute::clear({name});" if zero else f"cute::fill({name}, {value});"


def _column_position(node: ir.Compute, value: Element, at: str) -> Iterator[str]:
    """The position of a vector's element, where an expression speaks of it."""
    if name := position_along(value, COLUMN):
        place = position(node.begin(COLUMN), f"{at}.col(n)")
        yield f"int const {name.name} = {text(place)};"


def _columns(node: ir.Compute, assign: ir.Assign, at: str) -> Iterator[str]:
    yield from _column_position(node, assign.value, at)
    yield f"{text(assign.target.term)} = {converted(assign)};"


def _rows(node: ir.Compute, assigns: list[ir.Assign], at: str) -> Iterator[str]:
    if not assigns:
        return
    body = _Row(node, at)
    for assign in assigns:
        body.add(assign)
    held = next(t for a in assigns for t in (a.target, *leaves(a.value)) if _has_rows(t))
    size = "cute::size<0>" if held.axes == TILE else "cute::size"
    lines = [*body.before, *_loop("m", f"{size}({variable(held)})", body.lines)]
    if body.before:  # its names are its own
        lines = ["{", *(f"  {line}" for line in lines), "}"]
    yield from lines


@dataclass
class _Row:
    """What is done for one row: names first made once, then tiles column by column."""

    node: ir.Compute
    at: str
    lines: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    """What is done once for all rows."""
    hoisted: dict[Element, str] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    positioned: bool = False

    def add(self, assign: ir.Assign) -> None:
        """Append one assignment, with the names that it needs for the row."""
        self._position(assign.value)
        value = self._without_reductions(assign.value, assign.partial)
        target = assign.target
        if target.axes == TILE:
            value = self._by_columns(self._by_bits(value, variable(target)), target)
            value = self._by_pairs(value, target)
            value = self._hoisted(self._stepped(value))
            step = f"{text(target.term)} = {converted(replace(assign, value=value))};"
            columns = self._over_columns(target, step, value)
            if self.node.clear is not None:
                columns = _unless(self.node.clear, columns)
            self.lines += columns
        elif assign.buffer is None and not assign.kept:
            self.lines.append(f"float const {text(target.term)} = {text(term(value))};")
        else:
            self.lines.append(f"{text(target.term)} = {converted(replace(assign, value=value))};")
        self._stale(target)

    def scatter(self, held: Leaf, place: Element) -> None:
        """Append the addition of the row's elements, with the names that their index needs."""
        self._position(place)
        assert isinstance(place, Op)
        line, *index = place.args
        place = Op("gather", (line, *map(self._hoisted, index)))
        step = _added(held, place)
        self.lines += self._over_columns(held, step, place) if held.axes == TILE else [step]

    def _position(self, value: Element) -> None:
        """Name the position of the row, where an expression speaks of it, once."""
        name = position_along(value, ROW)
        if name is not None and not self.positioned:
            place = text(position(self.node.rows, f"{self.at}.row(m)"))
            self.lines.append(f"int const {name.name} = {place};")
            self.positioned = True

    def _by_bits(self, value: Element, tile: str) -> Element:
        """A choice by position, with the row's columns as bits of a word."""
        match value:
            case Op("where", (condition, yes, no)) if position_along(condition, COLUMN):
                sets = ColumnBits(self.at, tile, self.node.cols, self.node.rows)
                found = sets.split(condition)
                if found is not None:
                    name = self._fresh("visible")
                    self.lines.append(f"auto const {name} = {found[0]};")
                    shown: Element = Leaf(Var(f"{name}[n]", "bool"), TILE)
                    shown = shown if found[1] is None else Op("and", (shown, found[1]))
                    return Op("where", (shown, yes, no))
        return value

    def _by_columns(self, x: Element, tile: Leaf) -> Element:
        """An expression with the functions of a column alone taken out: once for all rows."""
        match x:
            case Op(op, args) if axes_of(x) == COLUMN and op in COSTLY:
                if x not in self.hoisted:
                    self.hoisted[x] = name = self._fresh("column")
                    self.before.append(f"auto {name} = fw::row_of({variable(tile)});")
                    step = f"{name}[n] = {text(as_float(term(x)))};"
                    self.before += self._over_columns(tile, step, x)
                return Leaf(Var(f"{self.hoisted[x]}[n]", "float"), COLUMN)
            case Op(op, args) if op != "gather":
                return Op(op, tuple(self._by_columns(a, tile) for a in args))
        return x

    def _by_pairs(self, x: Element, tile: Leaf) -> Element:
        """An expression with its sigmoids and hyperbolic tangents taken out: both are made of
        1 / (1 + 2^y), which takes one reciprocal for two columns."""
        match x:
            case Op("sigmoid" | "tanh2" as op, (arg,)) if axes_of(arg) & COLUMN:
                arg = self._hoisted(self._stepped(self._by_pairs(arg, tile)))
                power = times(arg, MINUS_LOG2_E) if op == "sigmoid" else arg
                name = self._fresh("logistic")
                self.lines.append(f"auto {name} = fw::row_of({variable(tile)});")
                step = f"{name}[n] = {text(as_float(term(power)))};"
                self.lines += self._over_columns(tile, step, power)
                self.lines.append(f"fw::{PAIRED[op]}({name});")
                found = Leaf(Var(f"{name}[n]", "float"), TILE)
                twice = Op("*", (literal(2.0), found))
                return found if op == "sigmoid" else Op("-", (literal(1.0), twice))
            case Op(op, args) if op != "gather":
                return Op(op, tuple(self._by_pairs(a, tile) for a in args))
        return x

    def _stepped(self, x: Element) -> Element:
        """A product of a distance of positions, `Slope * (kv_idx - q_idx)`, as its value at the
        thread's first column and a multiple of a constant: one FMA instead of a conversion."""
        match x:
            case Op("*", (a, b)):
                for factor, distance in ((a, b), (b, a)):
                    found = linear(distance) if type_of(distance) == "int" else None
                    plain = axes_of(factor) <= ROW and type_of(factor) == "float"
                    if plain and found and found.divisor == 1 and abs(found.columns) == 1:
                        return self._at_steps(factor, distance, found.columns)
        if isinstance(x, Op) and x.op != "gather":
            return Op(x.op, tuple(self._stepped(a) for a in x.args))
        return x

    def _at_steps(self, factor: Element, distance: Element, sign: int) -> Element:
        first = Leaf(position(self.node.cols, f"{self.at}.first_col"), ROW)
        step = Leaf(Var(f"{self.at}.step(n)", "float"), COLUMN)
        column = position_along(distance, COLUMN)
        assert column is not None
        there = Op("*", (factor, with_leaves(distance, {column: first})))
        return Op("+" if sign > 0 else "-", (there, Op("*", (factor, step))))

    def _stale(self, target: Leaf) -> None:
        """Names made from what has just been changed are not used again."""
        self.hoisted = {x: n for x, n in self.hoisted.items() if target not in leaves(x)}

    def _without_reductions(self, x: Element, partial: bool) -> Element:
        match x:
            case Op("+", (held, Reduce("sum", arg))) if partial:
                return self._reduced("sum", arg, text(term(held)))
            case Op(op, args):
                return Op(op, tuple(self._without_reductions(a, partial) for a in args))
            case Reduce("max3", Leaf() as tile):
                name = self._fresh("most")
                most = f"fw::row_max(fw::most_as_integers({variable(tile)}, m))"
                self.lines.append(f"float const {name} = {most};")
                return Leaf(Var(name, "float"), ROW)
            case Reduce(op, arg):
                found = self._reduced(op, arg, "-INFINITY" if op == "max" else "0.f")
                if not partial:
                    name = text(found.term)
                    self.lines.append(f"{name} = fw::row_{op}({name});")
                return found
        return x

    def _reduced(self, op: str, arg: Element, start: str) -> Leaf:
        """What a thread has of a row, put together with what is there already."""
        name = self._fresh("most" if op == "max" else "sum")
        inner = self._hoisted(arg)
        first = 0
        if op == "max" and isinstance(arg, Leaf):
            start, first = f"{variable(arg)}(m, 0)", 1
        self.lines.append(f"float {name} = {start};")
        step = f"{name} += {text(term(inner))};"
        if op == "max":
            step = f"{name} = fw::max({name}, {text(term(inner))});"
        tile = next(t for t in leaves(arg) if t.axes == TILE)
        self.lines += self._over_columns(tile, step, inner, first)
        return Leaf(Var(name, "float"), ROW)

    def _fresh(self, stem: str) -> str:
        taken = self.taken.get(stem, 0)
        self.taken[stem] = taken + 1
        return f"{stem}_{taken}" if taken else stem

    def _hoisted(self, x: Element) -> Element:
        """Whatever does not vary along the columns is computed once, under a name."""
        match x:
            case Op(op) if axes_of(x) == ROW and (type_of(x) == "float" or op == "gather"):
                kind = type_of(x)
                if x not in self.hoisted:
                    taken = self.taken.get("row", 0)
                    self.taken["row"], self.hoisted[x] = taken + 1, f"row_{taken}"
                    self.lines.append(f"{kind} const {self.hoisted[x]} = {text(term(x))};")
                return Leaf(Var(self.hoisted[x], kind), ROW)
            case Op(op, args):
                return Op(op, tuple(self._hoisted(a) for a in args))
        return x

    def _over_columns(self, tile: Leaf, step: str, value: Element, first: int = 0) -> Iterator[str]:
        inner = [step]
        if name := position_along(value, COLUMN):
            place = text(position(self.node.cols, f"{self.at}.col(n)"))
            inner.insert(0, f"int const {name.name} = {place};")
        return _loop("n", f"cute::size<1>({variable(tile)})", inner, first)


def _unless(clear: Element, lines: Iterable[str]) -> Iterator[str]:
    yield f"if (!({text(term(clear))})) {{"
    for line in lines:
        yield f"  {line}"
    yield "}"


def _loop(var: str, count: str, body: Iterable[str], first: int = 0) -> Iterator[str]:
    yield UNROLL
    yield f"for (int {var} = {first}; {var} < {count}; ++{var}) {{"
    for line in body:
        yield f"  {line}"
    yield "}"


def converted(assign: ir.Assign) -> str:
    """The value as the target's element type has it."""
    value = term(assign.value)
    dtype = assign.buffer.dtype if assign.buffer is not None else "fp32"
    if dtype == "int32":
        return text(value) if value.type == "int" else f"int({text(value)})"
    shown = text(as_float(value))
    return shown if dtype == "fp32" else f"float(fw::{dtype}({shown}))"


def _has_rows(leaf: Leaf) -> bool:
    """Whether a leaf is an element of a tile, or of a vector along the rows."""
    return isinstance(leaf.term, At) and leaf.axes in (ROW, TILE)
