"""Room in shared memory for what products of bytes need beside the program's own tiles: where tiles
land that are turned, and where sums are put by."""

from __future__ import annotations

import itertools
from dataclasses import replace

from flashwright.check.program import Buffer, Key, Program
from flashwright.gpu import Gpu
from flashwright.lower.atoms import shared_layout
from flashwright.lower.names import past_name
from flashwright.lower.turned import landing

BARRIERS = 16  # bytes, for each stage of a ring


def past(key: Key) -> Key:
    """Where a sum is put by."""
    return past_name(key), "shared"


def with_room(
    program: Program, gpu: Gpu, turned: frozenset[Key], sums: frozenset[Key]
) -> Program | None:
    """The program with the buffers; None where they do not fit.

    Sums in fp32 are worth more than further stages to land in.
    """
    if not turned and not sums:
        return program
    if any(key in program.buffers for key in (*map(landing, turned), *map(past, sums))):
        return None
    most = max((program.buffers[key].stages for key in turned), default=1)
    for dtype, stages in itertools.product(("fp32", "bf16"), range(most, 0, -1)):
        made = replace(program, buffers=_buffers(program, turned, sums, stages, dtype))
        if _needed(made) <= gpu.shared_per_block:
            return made
    return None


def _buffers(
    program: Program, turned: frozenset[Key], sums: frozenset[Key], stages: int, dtype: str
) -> dict[Key, Buffer]:
    out: dict[Key, Buffer] = {}
    for key, buffer in program.buffers.items():
        out[key] = buffer
        if key in turned:
            out[landing(key)] = replace(buffer, name=landing(key)[0], stages=stages)
        if key in sums:
            name, space = past(key)
            out[past(key)] = replace(buffer, name=name, space=space, dtype=dtype, stages=1)
    return out


def _needed(program: Program) -> int:
    stages = {key: buffer.stages for key, buffer in program.buffers.items()}
    shared = sum(stages[key] for key in stages if key[1] == "shared")
    return shared_layout(program, stages)[1] + BARRIERS * shared
