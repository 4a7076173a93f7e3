"""Tiles of bytes that are turned on their way (device/fw/transpose.cuh).

wgmma multiplies bytes only where k lies along the rows of both operands. V lies as rows of keys, so
TMA puts it down in a place of its own, and warps beside the loader turn it into the ring that is
read. On the way the keys get the order in which a thread holds P's, and the columns that of wide
accumulators (atoms.py): neither takes another instruction.
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES


def turned_tiles(program: Program, body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The right operands that lie as rows of k, in 8 bits."""
    return frozenset(
        n.right
        for n in ir.flat(body)
        if isinstance(n, ir.Gemm)
        and not n.transposed
        and DTYPES[program.buffers[n.right].dtype] == 1
    )


def can_turn(gemm: ir.Gemm, turned: frozenset[Key]) -> bool:
    """Whether both operands have k in the same order: P's, which is that of turned tiles, or the
    one in which all others lie."""
    return (gemm.left[1] == "register") == (gemm.right in turned) and gemm.left not in turned


def landing(key: Key) -> Key:
    """Where TMA puts down a tile that is to be turned."""
    return f"{key[0]}_landed", "shared"


def landed(node: ir.Statement, turned: frozenset[Key]) -> ir.Statement:
    """A copy to where its tile lands."""
    if isinstance(node, ir.Load) and node.dest in turned:
        return replace(node, dest=landing(node.dest))
    return node


def turning(node: ir.Statement) -> ir.Statement:
    """A copy as the warps see it that turn its tile."""
    return ir.Transpose(node.dest, origin=node.origin) if isinstance(node, ir.Load) else node
