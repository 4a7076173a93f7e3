"""Shared memory beside the program's own tiles: landing tiles of those that are transposed, and the
epilogue's staging."""

from __future__ import annotations

from dataclasses import replace

from flashwright.gpu import Gpu
from flashwright.lang.nodes import If
from flashwright.lower import ir
from flashwright.lower.passes.fp8_transpose import landing
from flashwright.lower.printing.rules import through_epilogue
from flashwright.lower.report import NO_QUEUE, Report
from flashwright.lower.targets.atoms import shared_layout
from flashwright.program.program import Buffer, Key, Program

BARRIERS = 16  # bytes, for each stage of a ring
QUEUE = 64  # bytes of a TileQueue: device/fw/tile_queue.cuh
ORDER = 2048  # of SortedTiles
EPILOGUE_OF_A_WARP, ALIGNED = 2048, 1024  # bytes: device/fw/epilogue.cuh


def with_landing_tiles(program: Program, gpu: Gpu, transposed: frozenset[Key]) -> Program | None:
    """The program with a landing tile for each transposed one, of as many stages as fit; None where
    none does."""
    if not transposed:
        return program
    if any(landing(key) in program.buffers for key in transposed):
        return None
    most = max(program.buffers[key].stages for key in transposed)
    for stages in range(most, 0, -1):
        made = replace(program, buffers=_buffers(program, transposed, stages))
        if has_room(made, gpu):
            return made
    return None


def with_two_stages(program: Program, gpu: Gpu, keys: frozenset[Key]) -> Program:
    """The program with at least two stages for these tiles, where there is room for them."""
    buffers = {
        k: replace(b, stages=max(2, b.stages)) if k in keys else b
        for k, b in program.buffers.items()
    }
    made = replace(program, buffers=buffers)
    return made if has_room(made, gpu) else program


def with_more(program: Program, gpu: Gpu, key: Key, buffer: Buffer) -> Program | None:
    """The program with one shared tile more, of as many stages as fit, if one does."""
    for stages in range(buffer.stages, 0, -1):
        more = {**program.buffers, key: replace(buffer, stages=stages)}
        if has_room(made := replace(program, buffers=more), gpu):
            return made
    return None


def _buffers(program: Program, transposed: frozenset[Key], stages: int) -> dict[Key, Buffer]:
    out: dict[Key, Buffer] = {}
    for key, buffer in program.buffers.items():
        out[key] = buffer
        if key in transposed:
            out[landing(key)] = replace(buffer, name=landing(key)[0], stages=stages)
    return out


def has_room(program: Program, gpu: Gpu) -> bool:
    """Whether the tiles and the barriers of their rings fit in shared memory."""
    stages = {key: buffer.stages for key, buffer in program.buffers.items()}
    shared = sum(stages[key] for key in stages if key[1] == "shared")
    return shared_layout(program, stages)[1] + BARRIERS * shared <= gpu.shared_per_block


def with_queue(
    program: Program, gpu: Gpu, kernel: ir.Kernel, begin: int, report: Report
) -> tuple[ir.Kernel, int]:
    """The kernel, and where in shared memory its queue of tiles ends, if it has one. Without room
    for it, it goes through the whole grid, and the report says so."""
    if not kernel.queued:
        return kernel, begin
    needed = QUEUE + (ORDER if kernel.work is not None else 0)
    if begin + needed <= gpu.shared_per_block:
        return kernel, begin + needed
    tiles = "tiles of packed sequences" if kernel.sequences else "tiles of which data decide"
    text = (
        f"{tiles} are not taken from a queue: {gpu.shared_per_block - begin} bytes of shared "
        f"memory are left, and it needs {needed}"
    )
    guards = [s for s in program.tree.body if isinstance(s, If)]
    line = (guards if kernel.sequences else program.outer_loops)[0].span.line
    report.remark(NO_QUEUE, text, (line, line), "fewer stages leave more")
    return replace(kernel, sequences=None, work=None), begin


def epilogue_offset(
    program: Program, gpu: Gpu, kernel: ir.Kernel, begin: int
) -> tuple[int | None, int]:
    """Where in shared memory the epilogue puts results in order, and where that ends; None where no
    result needs it, or there is no room."""
    place = -(-begin // ALIGNED) * ALIGNED
    end = place + EPILOGUE_OF_A_WARP * program.warps
    stores = (n for n in ir.flat(kernel.body) if isinstance(n, ir.Store))
    used = any(through_epilogue(n, program.buffers[n.source], kernel) for n in stores)
    return (place, end) if used and end <= gpu.shared_per_block else (None, begin)
