"""Room in shared memory beside the program's own tiles: where tiles land that are turned, and where
results are put in order on their way out."""

from __future__ import annotations

from dataclasses import replace

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.passes.fp8_transpose import landing
from flashwright.lower.printing.rules import through_room
from flashwright.lower.targets.atoms import shared_layout
from flashwright.program.program import Buffer, Key, Program

BARRIERS = 16  # bytes, for each stage of a ring
OF_A_WARP, ALIGNED = 2048, 1024  # bytes for results: device/fw/out.cuh


def with_room(program: Program, gpu: Gpu, turned: frozenset[Key]) -> Program | None:
    """The program with the buffers, of as many stages as fit; None where none does."""
    if not turned:
        return program
    if any(landing(key) in program.buffers for key in turned):
        return None
    most = max(program.buffers[key].stages for key in turned)
    for stages in range(most, 0, -1):
        made = replace(program, buffers=_buffers(program, turned, stages))
        if _needed(made) <= gpu.shared_per_block:
            return made
    return None


def with_two_stages(program: Program, gpu: Gpu, keys: frozenset[Key]) -> Program:
    """The program with at least two stages for these tiles, where there is room for them."""
    buffers = {
        k: replace(b, stages=max(2, b.stages)) if k in keys else b
        for k, b in program.buffers.items()
    }
    made = replace(program, buffers=buffers)
    return made if _needed(made) <= gpu.shared_per_block else program


def with_more(program: Program, gpu: Gpu, key: Key, buffer: Buffer) -> Program | None:
    """The program with one shared tile more, of as many stages as fit, if one does."""
    for stages in range(buffer.stages, 0, -1):
        more = {**program.buffers, key: replace(buffer, stages=stages)}
        if _needed(made := replace(program, buffers=more)) <= gpu.shared_per_block:
            return made
    return None


def _buffers(program: Program, turned: frozenset[Key], stages: int) -> dict[Key, Buffer]:
    out: dict[Key, Buffer] = {}
    for key, buffer in program.buffers.items():
        out[key] = buffer
        if key in turned:
            out[landing(key)] = replace(buffer, name=landing(key)[0], stages=stages)
    return out


def _needed(program: Program) -> int:
    stages = {key: buffer.stages for key, buffer in program.buffers.items()}
    shared = sum(stages[key] for key in stages if key[1] == "shared")
    return shared_layout(program, stages)[1] + BARRIERS * shared


def room_offset(
    program: Program, gpu: Gpu, kernel: ir.Kernel, begin: int
) -> tuple[int | None, int]:
    """Where in shared memory results are put in order on their way out, and its end; None where no
    result is, or there is no room."""
    place = -(-begin // ALIGNED) * ALIGNED
    end = place + OF_A_WARP * program.warps
    stores = (n for n in ir.flat(kernel.body) if isinstance(n, ir.Store))
    used = any(through_room(n, program.buffers[n.source], kernel) for n in stores)
    return (place, end) if used and end <= gpu.shared_per_block else (None, begin)
