"""What is fixed of a kernel.cu that a model writes: how the file begins, and how it is launched.

The caller passes one struct and launches one kernel, by the launch plan; in between a model is
free. A `full` contract is that of our own translation for the program and the GPU: on Hopper with
tensor maps, as a persistent kernel. A `plain` one is what every GPU can do: pointers and strides,
and a block for each element of the grid.

How many threads and how much shared memory a kernel wants only who writes it knows: two constants
in the file say it, and are read from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flashwright.gpu import Gpu
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor
from flashwright.lower.printing.cpp import text
from flashwright.lower.printing.kernel import Printer, tile_loop
from flashwright.lower.term import ZERO
from flashwright.lower.translate import prepared
from flashwright.program.program import Program
from flashwright.untrusted.contract_check import SHARED, THREADS, ContractCheck, broken

Flavour = Literal["plain", "full"]
MOST_THREADS, WARP = 1024, 32

UNLESS = (
    "Where TMA cannot load what the caller gives (an address or a stride that is no multiple of 16 "
    "bytes), it is 128 zeros: copy in another way then."
)


@dataclass(frozen=True)
class Contract:
    """The part of a kernel.cu that is given."""

    header: str
    """The file up to the brace that opens the kernel's body."""
    plan: LaunchPlan
    """As our own translation is launched; a file's own threads and shared memory go into it."""
    notes: str
    """How it is launched, in words, for the author of the body."""
    flavour: Flavour
    gpu: Gpu


def contract(program: Program, gpu: Gpu, flavour: Flavour = "full") -> Contract:
    """The contract for a program. Raises Failed with FW811 if it has no translation.

    Where our own translation needs no more than pointers and strides, both flavours are the same.
    """
    made_for = gpu if flavour == "full" else replace(gpu, wgmma=False)
    printer, plan, _ = prepared(program, made_for)
    notes = "\n".join(f"- {note}" for note in _notes(printer, plan, gpu)) + "\n"
    return Contract(printer.opening(plan.shared).source, plan, notes, flavour, gpu)


def bound(contract: Contract, source: str) -> LaunchPlan:
    """The launch plan of a file. Raises Failed with FW827 if it breaks the contract."""
    found = ContractCheck(contract.header, source)
    found.check()
    threads, at = found.constant(THREADS)
    if not 0 < threads <= MOST_THREADS or threads % WARP:
        text = f"{THREADS} is {threads}: a block has whole warps, {MOST_THREADS} threads at most"
        raise broken(text, at)
    shared, at = found.constant(SHARED)
    most = contract.gpu.shared_per_block
    if not 0 <= shared <= most:
        text = f"{SHARED} is {shared}, and a block of the {contract.gpu.title} has {most} bytes"
        raise broken(f"{text} of shared memory at most", at)
    return contract.plan.model_copy(update={"threads": threads, "shared": shared})


# --- in words ---------------------------------------------------------------------------------


def _notes(printer: Printer, plan: LaunchPlan, gpu: Gpu) -> Iterator[str]:
    yield (
        f"The file begins with this header. Yours are the kernel's body, {THREADS}, {SHARED}, "
        "Warps and __launch_bounds__, and whatever you define before the kernel; headers of fw, "
        "cute, cutlass and CUDA may be included, and there is no host code."
    )
    yield from _grid(printer, plan)
    yield (
        f"`{THREADS}` threads a block (whole warps, {MOST_THREADS} at most) and `{SHARED}` bytes "
        f"of dynamic shared memory ({gpu.shared_per_block} at most; `extern __shared__ "
        "__align__(1024) unsigned char shared[];`). Both are read from the file: write them as "
        "`constexpr int NAME = ...;` with numbers, other such constants, + - * and parentheses."
    )
    yield from _maps(printer, plan)
    for tensor in plan.tensors:
        yield _tensor(tensor)
    outputs = [t.name for t in plan.tensors if t.written]
    if len(outputs) > 1:
        tests = " or ".join(f"`p.{name}.data`" for name in outputs)
        yield f"The caller asks for the outputs it wants: {tests} may be nullptr, then skip it."


def _grid(printer: Printer, plan: LaunchPlan) -> Iterator[str]:
    axes = printer.kernel.grid
    if not printer.rings:
        for axis, letter in zip(axes, "xyz", strict=False):
            low = "" if axis.low == ZERO else f"{text(axis.low)} + "
            yield f"gridDim.{letter} is {text(axis.count)}: blockIdx.{letter} is {axis.name}" + (
                f" (as {low}blockIdx.{letter})." if low else "."
            )
        if axes[0].longest == "last":
            last = f"gridDim.x - 1 - blockIdx.x for {axes[0].name}"
            yield f"Later blocks have more iterations: {last} starts the long ones first."
        yield "One block for each element of the grid; no tensor maps."
        return
    names = ", ".join(axis.name for axis in axes)
    counts = ", ".join(text(axis.count) for axis in axes)
    yield f"The grid is one row: gridDim.x blocks for all of ({names}), of ({counts}) elements."
    loop = f"`{tile_loop(printer.kernel, producer=True)}`"
    coordinates = ", ".join(
        f"{axis.name} = tile.{letter}()" for axis, letter in zip(axes, "xyz", strict=False)
    )
    if plan.stays:
        yield "The kernel is persistent: one thread block for each SM at most takes many tiles."
    if plan.counter:
        yield (
            "The thread that loads takes them, and hands them to all other warps that work on them "
            "by a queue in shared memory, `fw::TileQueue tile_queue(shared + OFFSET)`: "
            "`fw::TileQueue::bytes`, aligned to 16. One thread calls `tile_queue.init(N)` for N "
            f"such warps before the loops. Theirs is `{tile_loop(printer.kernel)}`."
        )
    yield f"{loop} goes through the tiles of a thread block, with {coordinates}."


def _maps(printer: Printer, plan: LaunchPlan) -> Iterator[str]:
    names = printer.context.maps.values() if printer.rings else ()
    flat = {tensor.name for tensor in plan.tensors if tensor.flat}
    for name, one in zip(names, plan.maps, strict=True):
        box = " x ".join(map(str, one.box))
        views = " (the first one counts its views, back to back)" if one.tensor in flat else ""
        if one.ranges:
            views = (
                " (the first two are `fw::range_end` and the end of a range of rows, in elements;"
            )
            views += " rows are counted so that the range ends at `fw::range_end`)"
        if one.pages:
            views = (
                " (the first two, in place of that of pages, are `fw::range_end` and the end of the"
                " tile's rows among those of all pages, in elements; rows are counted so that the"
                " tile ends at `fw::range_end`)"
            )
        yield (
            f"`p.{name}` is a tensor map of {one.tensor}: its box is {box} elements on "
            f"the axes as declared{views}, swizzled over {one.swizzle} bytes; elements beyond the "
            "tensor's end are zeros." + (f" {UNLESS}" if one.optional else "")
        )


def _tensor(tensor: PlanTensor) -> str:
    axes = ", ".join(axis.label for axis in tensor.axes)
    use = "read" if tensor.read and not tensor.written else "written"
    use = "read and written" if tensor.read and tensor.written else use
    text = f"`p.{tensor.name}`: {tensor.dtype}, axes ({axes}), {use}"
    if tensor.flat:
        text += ", a view into memory of unknown length"
    if tensor.vector == 1:
        return f"{text}; any strides."
    bytes_ = f"{tensor.vector} elements (16 bytes)"
    return f"{text}; its last axis is contiguous, and its address and strides go by {bytes_}."
