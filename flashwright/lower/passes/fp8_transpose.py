"""fp8 tiles that are transposed on their way (device/fw/helpers.cuh).

wgmma multiplies fp8 only where k lies along the rows of both operands. V lies as rows of keys, so
TMA puts it down in a landing tile, and helper warps transpose it into the ring that consumers
read. On the way the keys get the order in which a thread holds P's, and the columns that of wide
accumulators (atoms.py): neither takes another instruction.
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES


def transposed_tiles(program: Program, body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The right operands in fp8 that lie as rows of k: they have to be transposed."""
    return frozenset(
        n.right
        for n in ir.flat(body)
        if isinstance(n, ir.Gemm)
        and not n.transposed
        and DTYPES[program.buffers[n.right].dtype] == 1
    )


def can_transpose(gemm: ir.Gemm, transposed: frozenset[Key]) -> bool:
    """Whether both operands have k in the same order: P's, which is that of transposed tiles, or
    the one in which all others lie."""
    return (gemm.left[1] == "register") == (
        gemm.right in transposed
    ) and gemm.left not in transposed


def landing(key: Key) -> Key:
    """The tile that TMA fills where another one is to be transposed."""
    return f"{key[0]}_landed", "shared"


def landed(node: ir.Statement, transposed: frozenset[Key]) -> ir.Statement:
    """A copy as the producer sees it: to the landing tile, where its tile is transposed."""
    if isinstance(node, ir.Load) and node.dest in transposed:
        return replace(node, dest=landing(node.dest))
    return node


def transposing(node: ir.Statement) -> ir.Statement:
    """A copy as the helper warps see it that transpose its tile."""
    return ir.Transpose(node.dest, origin=node.origin) if isinstance(node, ir.Load) else node
