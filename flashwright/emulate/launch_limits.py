"""Launches that the emulator refuses: those that no GPU takes, and those that it cannot emulate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flashwright.emulate.encode import EncodedKernel
from flashwright.gpu import GPUS, KIB
from flashwright.lang.diagnostic import Diagnostic, Failed

# CUDA C++ Programming Guide, technical specifications: alike for 7.5 to 12.0.
_AXES = ("x", "y", "z")
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_THREADS = (1024, 1024, 64)
_MOST_THREADS_OF_BLOCK = 1024
_MOST_LOCAL = 1 << 19  # bytes of a thread
_MOST_DECLARED = 48 * KIB  # bytes of shared memory; more must be dynamic
# What a block may have at most, after cudaFuncSetAttribute, where no GPU of ours tells it.
_OTHER_SHARED = {70: 96 * KIB, 72: 96 * KIB, 87: 163 * KIB}
_MOST_EMULATED = 2**31 - 1  # blocks


def check_launch(
    program: EncodedKernel, grid: Sequence[int], block: Sequence[int], shared: int
) -> None:
    """Raises Failed with FW831, which names the limit, for a launch that is refused."""
    for problem in (
        *_clusters(program),
        *_grid(grid),
        *_block(program, block),
        *_memory(program, shared),
    ):
        text = f"{program.entry} cannot be launched: {problem}"
        raise Failed(Diagnostic("FW831", text))


def _clusters(program: EncodedKernel) -> Iterator[str]:
    sizes = program.directives.get("reqnctapercluster", ())
    if math.prod(sizes) != 1:
        listed = ", ".join(map(str, sizes))
        yield f"its clusters have {listed} blocks, and the emulator runs clusters of one block"
    elif "explicitcluster" in program.directives and not sizes:
        yield "it demands a cluster size of its launch, and the emulator runs clusters of one block"


def _grid(grid: Sequence[int]) -> Iterator[str]:
    for axis, count, most in zip(_AXES, grid, _MOST_BLOCKS, strict=False):
        if count > most:
            yield f"grid.{axis} is {count}, and a GPU takes at most {most}"
    if math.prod(grid) > _MOST_EMULATED:
        yield f"{math.prod(grid)} blocks are more than can be emulated"


def _block(program: EncodedKernel, block: Sequence[int]) -> Iterator[str]:
    for axis, count, most in zip(_AXES, block, _MOST_THREADS, strict=False):
        if count > most:
            yield f"block.{axis} is {count}, and a GPU takes at most {most}"
    threads, bound = math.prod(block), program.directives.get("maxntid")
    if threads > _MOST_THREADS_OF_BLOCK:
        yield f"a block has {threads} threads, and a GPU takes at most {_MOST_THREADS_OF_BLOCK}"
    if bound and threads > math.prod(bound):
        yield f"a block has {threads} threads, and __launch_bounds__ allows {math.prod(bound)}"
    wanted = program.directives.get("reqntid")
    if wanted and _padded(block) != _padded(wanted):
        given = ", ".join(map(str, _padded(block)))
        yield f"the block is {given}, and .reqntid demands {', '.join(map(str, _padded(wanted)))}"


def _padded(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, 1, 1)[:3]


def _memory(program: EncodedKernel, shared: int) -> Iterator[str]:
    most, total = _most_shared(program.target), program.shared + shared
    if program.shared > _MOST_DECLARED:
        yield f"it declares {program.shared} bytes of shared memory, of at most {_MOST_DECLARED}"
    if shared < 0:
        yield f"{shared} bytes of shared memory are less than none"
    if total > most:
        target = program.target or "a GPU"
        yield f"a block has {total} bytes of shared memory, and {target} allows {most}"
    if program.local > _MOST_LOCAL:
        yield f"a thread has {program.local} bytes of local memory, of at most {_MOST_LOCAL}"


def _most_shared(target: str) -> int:
    """The bytes of shared memory that a block may have; the most of all GPUs for an unknown one."""
    known = {gpu.capability: gpu.shared_per_block for gpu in GPUS.values()} | _OTHER_SHARED
    number = target.removeprefix("sm_").rstrip("af")
    most = max(known.values())
    return known.get(int(number), most) if number.isdecimal() else most
