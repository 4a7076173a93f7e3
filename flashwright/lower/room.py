"""Room in shared memory where tiles land that are turned, beside the program's own tiles."""

from __future__ import annotations

from dataclasses import replace

from flashwright.check.program import Buffer, Key, Program
from flashwright.gpu import Gpu
from flashwright.lower.atoms import shared_layout
from flashwright.lower.turned import landing

BARRIERS = 16  # bytes, for each stage of a ring


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
