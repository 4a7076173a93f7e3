"""Sums of fp8 products, a step at a time.

wgmma adds fp8 products up with 13 bits (recorded on an H200): all terms, the sum so far included,
are cut off 13 bits below the largest, so that a long sum loses a little of every product, always
toward zero. So the product of each step begins anew, in a tile of its own, and is added to the sum
in fp32. A sum that is rescaled in each step needs no further instruction for it: `O = O * f`
becomes `O = O * f + step` (overlap.py).
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import TILE, Leaf, Op, element
from flashwright.lower.names import step_name, tile_name
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES

WIDEST = 128  # columns of a sum: twice 64 registers of a thread


def long_sums(program: Program, body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The accumulators that a loop adds fp8 products to."""
    loops = (n for n in ir.flat(body) if isinstance(n, ir.Loop))
    nodes = (n for loop in loops for n in ir.flat(loop.body))
    return frozenset(n.target for n in nodes if isinstance(n, ir.Gemm) and _adds(program, n))


def can_step(program: Program, sums: frozenset[Key]) -> bool:
    """Whether there are registers for the sums and a step of each."""
    wide = all(program.buffers[key].shape[1] <= WIDEST for key in sums)
    return wide and not any(_step(key) in program.buffers for key in sums)


def with_steps(program: Program, sums: frozenset[Key]) -> Program:
    """The program with the tiles that hold a step."""
    buffers = dict(program.buffers)
    for key in sums:
        buffers[_step(key)] = replace(buffers[key], name=_step(key)[0])
    return replace(program, buffers=buffers)


def in_steps(
    program: Program, body: tuple[ir.Statement, ...], sums: frozenset[Key]
) -> tuple[ir.Statement, ...]:
    """The same with sums that are added to in fp32."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=in_steps(program, node.body, sums)))
        elif isinstance(node, ir.Branch):
            then, orelse = (in_steps(program, part, sums) for part in (node.then, node.orelse))
            out.append(replace(node, then=then, orelse=orelse))
        elif isinstance(node, ir.Gemm) and node.target in sums and _adds(program, node):
            out += [replace(node, target=_step(node.target), fresh=True), _added(program, node)]
        else:
            out.append(node)
    return tuple(out)


def total(add: ir.Compute, step: Key) -> Key | None:
    """The sum that a step is added to, where that is what a statement does."""
    match add.assigns:
        case (ir.Assign(target, Op("+", (held, Leaf() as last)), buffer),) if (
            buffer and held == target and last == _element(step)
        ):
            return buffer.name, "register"
    return None


def _adds(program: Program, gemm: ir.Gemm) -> bool:
    return not gemm.fresh and DTYPES[program.buffers[gemm.right].dtype] == 1


def _step(key: Key) -> Key:
    return step_name(key), key[1]


def _element(key: Key) -> Leaf:
    return element(tile_name(key), TILE)


def _added(program: Program, gemm: ir.Gemm) -> ir.Compute:
    buffer, held = program.buffers[gemm.target], _element(gemm.target)
    more = ir.Assign(held, Op("+", (held, _element(_step(gemm.target)))), buffer)
    return ir.Compute(buffer.shape, (more,), origin=gemm.origin.untitled)
