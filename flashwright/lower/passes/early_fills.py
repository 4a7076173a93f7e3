"""Tiles from global memory to registers that are under way while a product is.

A Fill waits for its tile. In an overlapped loop it is taken apart: the loads are issued above the
first product, 16 bytes at a time where the caller's memory allows it, and what they bring is put in
its place where it is first needed.
"""

from __future__ import annotations

from flashwright.check.program import Program
from flashwright.check.vocabulary import DTYPES
from flashwright.lower import ir


def with_early_fills(body: tuple[ir.Statement, ...], program: Program) -> tuple[ir.Statement, ...]:
    """A loop's body with its Fills of 16-bit tiles in two steps. Beside products of 8-bit columns a
    tile may be wide, in another order of columns: there they stay as they are."""
    if any(DTYPES[buffer.dtype] == 1 for buffer in program.buffers.values()):
        return body
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Fill) and _early(node, program):
            out.append(ir.FillAhead(node.dest, node.window, origin=node.origin))
            out.append(ir.FillDone(node.dest, origin=node.origin.untitled))
        else:
            out.append(node)
    return tuple(out)


def _early(node: ir.Fill, program: Program) -> bool:
    buffer = program.buffers[node.dest]
    sixteen = node.window.tensor.dtype in ("fp16", "bf16") and buffer.dtype == "fp32"
    return len(buffer.shape) == 2 and sixteen
