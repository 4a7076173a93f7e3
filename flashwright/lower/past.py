"""Long sums of products of bytes, put by every few steps (device/fw/past.cuh).

wgmma adds bytes up with 13 bits (recorded on an H200). A sum over many keys so loses more and more
of each product: modelled, with values of one sign, 2 % after 2048 keys and 18 % after 16384. So the
sum is put by in shared memory and begun anew; what its rows are multiplied with meanwhile is noted,
and in the end both parts are added. At 512 keys 0.4 % are lost, which is what an output in bf16 is
rounded by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flashwright.check.program import Key, Program
from flashwright.check.vocabulary import DTYPES
from flashwright.lower import ir
from flashwright.lower.code import Code
from flashwright.lower.element import ROW, TILE, Element, Leaf, Op, axes_of, leaves
from flashwright.lower.names import past_name, tile_name

KEYS = 512  # that are summed up at most before the sum is put by


def long_sums(program: Program, body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The accumulators that a loop adds products of bytes to."""
    loops = (n for n in ir.flat(body) if isinstance(n, ir.Loop))
    return frozenset(g.target for loop in loops for g in _added(program, loop.body))


def can_put_by(program: Program, body: tuple[ir.Statement, ...], sums: frozenset[Key]) -> bool:
    """Whether loops do nothing with these sums but add products, and multiply their rows."""
    inside = [n for node in body if _added(program, (node,)) for n in ir.flat((node,))]
    return not any(_otherwise(n, key) for n in inside for key in sums)


def put_by(
    program: Program, body: tuple[ir.Statement, ...], sums: frozenset[Key]
) -> tuple[ir.Statement, ...]:
    """The same with sums that are put by."""
    out: list[ir.Statement] = []
    for node in body:
        own = {g.target for g in _added(program, (node,))} & sums
        if isinstance(node, ir.Loop | ir.Branch) and own:
            out.append(_inside(program, node, sums))
            out += [ir.TakeBack(key) for key in sorted(own)]
        else:
            out.append(node)
    return tuple(out)


def _inside(program: Program, node: ir.Statement, sums: frozenset[Key]) -> ir.Statement:
    """Whatever multiplies the sums notes it; a loop that adds to them ends with putting them by."""
    if isinstance(node, ir.Branch):
        then, orelse = (
            tuple(_inside(program, n, sums) for n in part) for part in (node.then, node.orelse)
        )
        return replace(node, then=then, orelse=orelse)
    if isinstance(node, ir.Loop):
        body = tuple(_inside(program, n, sums) for n in node.body)
        return replace(node, body=(*body, *_endings(program, node)))
    if isinstance(node, ir.Compute):
        return replace(node, assigns=tuple(_noted(node.assigns, sums)))
    return node


def _endings(program: Program, loop: ir.Loop) -> Iterable[ir.Branch]:
    for gemm in _added(program, loop.body):
        rounds = max(1, KEYS // program.buffers[gemm.right].shape[0])
        due = Code(f"{loop.var} % {rounds} == {rounds - 1}", "bool")
        yield ir.Branch(due, (ir.PutBy(gemm.target),), origin=gemm.origin.untitled)


def _added(program: Program, body: tuple[ir.Statement, ...]) -> list[ir.Gemm]:
    return [
        n
        for n in ir.flat(body)
        if isinstance(n, ir.Gemm) and not n.fresh and DTYPES[program.buffers[n.right].dtype] == 1
    ]


# --- what is done with a sum ------------------------------------------------------------------


def _otherwise(node: ir.Statement, key: Key) -> bool:
    """Whether a statement of a loop uses a sum as it must not."""
    match node:
        case ir.Compute(_, assigns):
            return any(_names(a, key) and _factor(a, key) is None for a in assigns)
        case ir.Fill(dest) | ir.Move(_, dest) if dest == key:
            return True
        case ir.Store(source) | ir.Move(source) | ir.Operand(_, source):
            return source == key
    return isinstance(node, ir.Gemm) and node.fresh and node.target == key


def _names(assign: ir.Assign, key: Key) -> bool:
    return any(_variable(x) == tile_name(key) for x in (assign.target, *leaves(assign.value)))


def _factor(assign: ir.Assign, key: Key) -> Element | None:
    """What the rows of a sum are multiplied with, where that is what an assignment does."""
    match assign:
        case ir.Assign(target, Op("*", (Leaf() as held, factor))) if (
            target.axes == TILE
            and _variable(target) == _variable(held) == tile_name(key)
            and axes_of(factor) <= ROW
        ):
            return factor
    return None


def _noted(assigns: tuple[ir.Assign, ...], sums: frozenset[Key]) -> Iterable[ir.Assign]:
    for assign in assigns:
        yield assign
        for key in sums:
            factor = _factor(assign, key)
            if factor is not None:
                all_factors = Leaf(Code(f"{past_name(key)}.factors(m)", "float"), ROW)
                yield ir.Assign(all_factors, Op("*", (all_factors, factor)), kept=True)


def _variable(leaf: Leaf) -> str:
    return leaf.code.text.split("(")[0]
