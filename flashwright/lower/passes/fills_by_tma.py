"""Tiles from global memory to registers that come by way of shared memory, on Hopper.

A bias is needed where the scores are, in registers. A thread that asks global memory for its own
elements has to wait for them. So TMA brings the tile to a ring ahead of time, as it does K and V,
and the threads take their elements from there, where shared memory has room.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.report import NOT_AHEAD, Report
from flashwright.lower.targets.hopper import Copies, missing_for_tma, mixed_maps, report_copies
from flashwright.lower.targets.shared_memory import with_more
from flashwright.program.program import Buffer, Key, Program

Body = tuple[ir.Statement, ...]
STAGES = 2


def through_rings(
    program: Program, gpu: Gpu, body: Body, ways: Copies, report: Report
) -> tuple[Program, Body, Copies]:
    """The program with a ring for each tile that a loop loads to registers; which warps copy
    each."""
    tma_optional = set(ways.tma_optional)
    for dest, fills in _fills(program, body).items():
        ring = _ring(dest)
        tensor = fills[0].window.tensor
        buffer = replace(program.buffers[dest], space="shared", dtype=tensor.dtype, stages=STAGES)
        loads = [ir.Load(ring, fill.window, origin=fill.origin) for fill in fills]
        missing = [missing_for_tma(load, buffer) for load in loads]
        more = with_more(program, gpu, ring, buffer)
        why = next((m.text for m in missing if m and not m.shown_by_the_call), "")
        why = why or ("some of its Copies name a range" if mixed_maps(loads) else "")
        why = why or ("" if more else "shared memory has no room for it")
        if more is None or why:
            text = f"`{dest[0]}` is not loaded ahead: {why}"
            report.remark(NOT_AHEAD, text, fills[0].origin.lines)
            continue
        program = more
        for load, lack in zip(loads, missing, strict=True):
            if lack:
                tma_optional.add(ring)
                report_copies(load, lack, report)
        body = ir.changed(body, partial(_through, dest))
    return program, body, replace(ways, tma_optional=frozenset(tma_optional))


def _ring(dest: Key) -> Key:
    """The shared tile by way of which a register tile is filled."""
    return dest[0], "shared"


def _through(dest: Key, node: ir.Statement) -> ir.Statement | Body:
    if not isinstance(node, ir.Fill) or node.dest != dest:
        return node
    ring = _ring(dest)
    load = ir.Load(ring, node.window, origin=node.origin)
    return load, ir.Move(ring, dest, origin=node.origin.untitled)


def _fills(program: Program, body: Body) -> dict[Key, list[ir.Fill]]:
    """The tiles that loops with GEMMs load to registers, with all their Fills."""
    found: dict[Key, list[ir.Fill]] = {}
    for loop in (n for n in ir.flat(body) if isinstance(n, ir.Loop)):
        inner = list(ir.flat(loop.body))
        if any(isinstance(n, ir.Gemm) for n in inner):
            found |= {n.dest: [] for n in inner if isinstance(n, ir.Fill)}
    for node in ir.flat(body):
        if isinstance(node, ir.Fill) and node.dest in found:
            found[node.dest].append(node)
    return {k: v for k, v in found.items() if _one_kind(program, k, v)}


def _one_kind(program: Program, dest: Key, fills: list[ir.Fill]) -> bool:
    """Whether one ring can serve all Fills of a tile."""
    buffer: Buffer = program.buffers[dest]
    dtypes = {fill.window.tensor.dtype for fill in fills}
    tile = len(buffer.shape) == 2 and buffer.dtype == "fp32"
    free = _ring(dest) not in program.buffers
    return tile and free and len(dtypes) == 1 and dtypes <= {"fp16", "bf16", "fp32"}
