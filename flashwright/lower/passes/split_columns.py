"""Rows that several warpgroups share, each with its part of the columns, on Hopper.

Where a tile has 64 rows and there are two or three consumer warpgroups, wgmma deals out columns. A
product's left operand then has to be whole for each of them: it goes through shared memory. And a
row's maximum or sum is put together from what each warpgroup finds over its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import count

from flashwright.gpu import Gpu
from flashwright.lang import nodes as tl
from flashwright.lower import ir
from flashwright.lower.element import (
    COLUMN,
    ROW,
    TILE,
    Element,
    Leaf,
    Op,
    Reduce,
    element,
    leaves,
    literal,
    variable,
)
from flashwright.lower.frontend.masks import GROUP
from flashwright.lower.frontend.scalars import refused
from flashwright.lower.names import EXCHANGE, Names, tile_name
from flashwright.lower.targets.shared_memory import with_more
from flashwright.lower.term import ZERO, At, Call, Term, Var, binary, negated
from flashwright.program.program import Buffer, Key, Program

Body = tuple[ir.Statement, ...]


def split_tiles(program: Program, gpu: Gpu, kernel: ir.Kernel) -> frozenset[Key]:
    """The register tiles and vectors of which each warpgroup has some columns, or has all rows. A
    vector along columns lies as the tiles that it is computed with."""
    registers = {k: b for k, b in program.buffers.items() if b.space == "register"}
    across = {k for k in registers if kernel.sides.get(k) == "columns"}
    split = {
        k
        for k, b in registers.items()
        if k not in across and gpu.beside(b.shape[0], program.warps) > 1
    }
    named = {tile_name(k): k for k in registers}
    together = [
        {named[variable(x)] for x in xs if x.axes in (TILE, COLUMN) and variable(x) in named}
        for xs in ir.combined(kernel.body)
    ]
    while more := {k for ks in together if ks & split for k in ks} & across - split:
        split |= more
    for key in sorted(split & across):
        if any(key in ks and ks - split for ks in together):
            span = program.buffers[key].declared.span
            text = f"`{key[0]}` goes along tiles whose columns warpgroups share, and along others"
            raise refused(text, span, "Allocate two vectors")
    return frozenset(split)


def shared_operands(
    program: Program, gpu: Gpu, body: Body, split: Set[Key], names: Names
) -> tuple[Program, Body] | None:
    """The program with left operands in shared memory where they would be in registers of which
    each warpgroup has some columns, and with a place for exchanges; None where there is no room."""
    if not split:
        return program, body
    exchange = with_more(program, gpu, EXCHANGE, _exchange_place(program, split))
    if exchange is None or EXCHANGE in program.buffers:
        return None
    program = exchange
    moved: dict[Key, Key] = {}
    for node in ir.flat(body):
        if isinstance(node, ir.Operand) and node.source in split and node.target not in moved:
            key = _new_tile(node.target[0], names)
            source = program.buffers[node.source]
            buffer = replace(source, name=key[0], space="shared", dtype=node.dtype, stages=1)
            more = with_more(program, gpu, key, buffer)
            if more is None:
                return None
            program, moved[node.target] = more, key

    def change(node: ir.Statement) -> ir.Statement:
        if isinstance(node, ir.Operand) and node.target in moved:
            return ir.Move(node.source, moved[node.target], origin=node.origin)
        if isinstance(node, ir.Gemm) and node.left in moved:
            return replace(node, left=moved[node.left])
        return node

    return program, ir.changed(body, change)


def _exchange_place(program: Program, split: Set[Key]) -> Buffer:
    """Room for two values of each row from each warpgroup."""
    tiles = [program.buffers[key] for key in split]
    count = 2 * max(b.shape[0] for b in tiles) * (program.warps // 4)
    named = tl.Allocate(
        tl.Name(EXCHANGE[0]),
        "shared",
        (tl.Axis(None, tl.Num(str(count))),),
        span=tiles[0].declared.span,
    )
    return Buffer(EXCHANGE[0], "shared", (count,), "fp32", 1, named)


def left_in_registers(kernel: ir.Kernel, body: Body) -> dict[Key, str]:
    """The left operands that are still in registers, with their element types."""
    gemms = {n.left for n in ir.flat(body) if isinstance(n, ir.Gemm)}
    return {k: dtype for k, dtype in kernel.operands.items() if k in gemms}


def _new_tile(name: str, names: Names) -> Key:
    """A shared tile whose name in the kernel is free."""
    for number in count(1):
        key: Key = (f"{name}_whole{number if number > 1 else ''}", "shared")
        if tile_name(key) not in names.taken:
            names.taken.add(tile_name(key))
            return key
    raise AssertionError


def exchanged(program: Program, gpu: Gpu, body: Body, names: Names) -> Body:
    """The statements with every maximum and sum over a row that warpgroups share put together."""

    def change(node: ir.Statement) -> ir.Statement | Body:
        rows = node.shape[0] if isinstance(node, ir.Compute) else 0
        if not isinstance(node, ir.Compute) or gpu.beside(rows, program.warps) == 1:
            return node
        return _Split(names).run(node)

    return ir.changed(body, change)


def rescaled_where_needed(body: Body) -> Body:
    """The statements with tests before what only multiplies a tile by a factor of each row: where
    no maximum of a warp's rows has risen, all factors are 1. Tensor cores wait for that work."""

    def change(node: ir.Statement) -> ir.Statement:
        if not isinstance(node, ir.Compute) or node.unless is not None or len(node.assigns) != 1:
            return node
        (assign,) = node.assigns
        match assign.value:
            case Op("*", (Leaf() as tile, Leaf(At(name)) as factor)) if tile == assign.target:
                if tile.axes == TILE and factor.axes == ROW:
                    return replace(node, unless=Call("all_ones", (Var(name),), "bool"))
        return node

    return ir.changed(body, change)


@dataclass
class _Split:
    """One statement, cut behind each value that warpgroups exchange."""

    names: Names

    def run(self, node: ir.Compute) -> ir.Statement | Body:
        """The parts, with the exchanges between them."""
        parts: list[list[ir.Assign]] = [[]]
        exchanges: list[ir.Exchange] = []
        for assign in node.assigns:
            if assign.value == Op("row_sum", (assign.target,)):
                exchanges.append(self._exchange(variable(assign.target), "sum", node))
                parts.append([])
                continue
            value = _first_only(assign.value)
            for found in () if assign.partial else dict.fromkeys(_reductions(value)):
                vector = element(self.names.fresh("maxima" if found.op == "max" else "sums"), ROW)
                parts[-1].append(ir.Assign(vector, found, partial=True, kept=True))
                exchanges.append(self._exchange(variable(vector), found.op, node))
                parts.append([])
                value = _with(value, found, vector)
            parts[-1].append(replace(assign, value=value))
        computes = self._lasting([replace(node, assigns=tuple(part)) for part in parts])
        out: list[ir.Statement] = [computes[0]] if computes[0].assigns else []
        for exchange, part in zip(exchanges, computes[1:], strict=True):
            out += [exchange, part] if part.assigns else [exchange]
        if node.unless is not None and exchanges:
            inner = (replace(n, unless=None) if isinstance(n, ir.Compute) else n for n in out)
            return ir.Branch(negated(node.unless), tuple(inner), origin=node.origin.untitled)
        return tuple(out)

    def _exchange(self, vector: str, op: str, node: ir.Compute) -> ir.Exchange:
        return ir.Exchange(vector, "max" if op == "max" else "sum", origin=node.origin.untitled)

    def _lasting(self, parts: list[ir.Compute]) -> list[ir.Compute]:
        """The parts, with vectors for the names local to the row that a later part uses."""
        new: dict[Term, Leaf] = {}
        for number, part in enumerate(parts):
            later = [x for p in parts[number + 1 :] for a in p.assigns for x in leaves(a.value)]
            for assign in part.assigns:
                if assign.buffer is None and not assign.kept and assign.target in later:
                    name = self.names.fresh(f"{variable(assign.target)}s")
                    new[assign.target.term] = element(name, ROW)
        out = []
        for number, part in enumerate(parts):
            assigns = tuple(ir.renamed(a, new) for a in part.assigns)
            own = tuple(variable(a.target) for a in assigns if a.kept)
            title = part.origin if number == 0 else part.origin.untitled
            note = part.note if number == 0 else ""
            out.append(replace(part, assigns=assigns, kept=own, origin=title, note=note))
        return out


def _reductions(x: Element) -> Sequence[Reduce]:
    """All reductions of an expression, inner ones first."""
    match x:
        case Op(_, args):
            return [r for a in args for r in _reductions(a)]
        case Reduce(_, arg):
            return [*_reductions(arg), x]
    return []


def _with(x: Element, reduction: Reduce, vector: Leaf) -> Element:
    """The expression with a vector in the place of a reduction."""
    match x:
        case Op(op, args):
            return Op(op, tuple(_with(a, reduction, vector) for a in args))
        case Reduce(op, arg):
            return vector if x == reduction else Reduce(op, _with(arg, reduction, vector))
    return x


def _first_only(x: Element) -> Element:
    """A value that starts a sum kept in parts is one warpgroup's: the others start from 0."""
    match x:
        case Op("row_part", (value,)):
            first = Leaf(binary("==", GROUP, ZERO))
            return Op("where", (first, Op("row_part", (value,)), literal(0.0)))
        case Op(op, args):
            return Op(op, tuple(_first_only(a) for a in args))
    return x
