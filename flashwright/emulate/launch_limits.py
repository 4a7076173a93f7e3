"""Launches that the emulator refuses: those that no GPU takes, and those that it cannot emulate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flashwright.emulate.encode import EncodedKernel
from flashwright.lang.diagnostic import Diagnostic, Failed

MOST_SHARED = 1 << 20  # bytes of a block: more than any GPU has
MOST_LOCAL = 1 << 19  # bytes of a thread (CUDA C++ Programming Guide, all of 7.5 to 9.0)
MOST_BLOCKS = 2**31 - 1


def check_launch(
    program: EncodedKernel, grid: Sequence[int], block: Sequence[int], shared: int
) -> None:
    """Raises Failed with FW831, which names the limit, for a launch that is refused."""
    for problem in (*_clusters(program), *_sizes(program, grid, shared)):
        text = f"{program.entry} cannot be launched: {problem}"
        raise Failed(Diagnostic("FW831", text))


def _clusters(program: EncodedKernel) -> Iterator[str]:
    sizes = program.directives.get("reqnctapercluster", ())
    if math.prod(sizes) != 1:
        listed = ", ".join(map(str, sizes))
        yield f"its clusters have {listed} blocks, and the emulator runs clusters of one block"
    elif "explicitcluster" in program.directives and not sizes:
        yield "it demands a cluster size of its launch, and the emulator runs clusters of one block"


def _sizes(program: EncodedKernel, grid: Sequence[int], shared: int) -> Iterator[str]:
    if not 0 <= program.shared + shared <= MOST_SHARED:
        yield f"a block cannot have {program.shared + shared} bytes of shared memory"
    if program.local > MOST_LOCAL:
        yield f"a thread cannot have {program.local} bytes of local memory"
    if math.prod(grid) > MOST_BLOCKS:
        yield f"{math.prod(grid)} blocks are more than can be emulated"
