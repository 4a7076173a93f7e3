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
_FIRST_WITH_CLUSTERS = 90
_MOST_OF_CLUSTER = 16  # more than 8 after cudaFuncAttributeNonPortableClusterSizeAllowed
_MOST_SMS, _THREADS_OF_SM, _BLOCKS_OF_SM = 192, 2048, 32  # of any GPU


def check_launch(
    program: EncodedKernel, grid: Sequence[int], block: Sequence[int], shared: int
) -> None:
    """Raises Failed with FW831, which names the limit, for a launch that is refused."""
    for problem in (
        *_grid(grid),
        *_block(program, block),
        *_memory(program, shared),
    ):
        text = f"{program.entry} cannot be launched: {problem}"
        raise Failed(Diagnostic("FW831", text))


def cluster_of(
    program: EncodedKernel, grid: Sequence[int], asked: Sequence[int] | None
) -> tuple[int, ...]:
    """The blocks of a cluster along each axis. Raises Failed with FW831 for a size that a GPU
    refuses."""
    own = program.directives.get("reqnctapercluster")
    sizes = _padded(asked or own or (1,))
    for problem in _clusters(program, _padded(grid), sizes, own, asked):
        text = f"{program.entry} cannot be launched: {problem}"
        raise Failed(Diagnostic("FW831", text))
    return sizes


def _clusters(
    program: EncodedKernel,
    grid: Sequence[int],
    sizes: Sequence[int],
    own: Sequence[int] | None,
    asked: Sequence[int] | None,
) -> Iterator[str]:
    listed = ", ".join(map(str, sizes))
    if not own and not asked and "explicitcluster" in program.directives:
        yield "it demands a cluster size of its launch: cluster="
    if own and asked and _padded(own) != sizes:
        demanded = ", ".join(map(str, _padded(own)))
        yield f"the cluster is {listed}, and __cluster_dims__ demands {demanded}"
    if min(sizes) < 1 or math.prod(sizes) > _MOST_OF_CLUSTER:
        yield f"a cluster of {listed} blocks is not one of 1 to {_MOST_OF_CLUSTER}"
    elif any(count % size for count, size in zip(grid, sizes, strict=True)):
        counts = ", ".join(map(str, grid))
        yield f"a grid of {counts} blocks is not a whole number of clusters of {listed}"
    number = program.target.removeprefix("sm_").rstrip("af")
    if math.prod(sizes) > 1 and number.isdecimal() and int(number) < _FIRST_WITH_CLUSTERS:
        yield f"{program.target} has no clusters of several blocks: they begin with sm_90"


def check_blocks(
    program: EncodedKernel, grid: Sequence[int], block: Sequence[int], cooperative: bool
) -> None:
    """Raises Failed with FW831 for a cooperative launch of more blocks than any GPU holds."""
    threads, blocks = -(-math.prod(block) // 32) * 32, math.prod(grid)
    most = _MOST_SMS * min(_BLOCKS_OF_SM, _THREADS_OF_SM // threads)
    if cooperative and blocks > most:
        text = f"{blocks} blocks of {math.prod(block)} threads cannot be resident at a time"
        text += f" (at most {most}), and a cooperative launch demands it"
        raise Failed(Diagnostic("FW831", f"{program.entry} cannot be launched: {text}"))


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
