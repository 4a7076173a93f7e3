"""One emulated launch: the plan's grid, the caller's arrays, and the findings."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.build.load import shown_dims
from flashwright.build.plan_rules import LAYOUTS, caller_order
from flashwright.emulate.encode import ACQUIRES, MODULE, EncodedKernel, encode, refused
from flashwright.emulate.launch_limits import check_blocks, check_launch, cluster_of
from flashwright.emulate.machine import Machine, here
from flashwright.emulate.parse import bad, parse
from flashwright.emulate.ptx import Instruction
from flashwright.emulate.structs import (
    HEAP,
    OUTPUT,
    READ,
    READ_WRITE,
    UNSET,
    FindingRecord,
    Launch,
    Region,
)
from flashwright.emulate.tensor_map import encode_tensor_map
from flashwright.lower.launch_plan import (
    RANGE,
    RANGE_AXIS,
    RANGE_STRIDE,
    LaunchPlan,
    PlanMap,
    PlanTensor,
    evaluate,
)

Array = NDArray[Any]
Variables = NDArray[np.uint8]
"""The variables of a module in global memory (`__device__`), as launches leave them."""

KINDS = (
    *("out_of_bounds", "misaligned", "read_only", "unwritten", "race", "deadlock", "divergent"),
    *("proxy", "transaction", "register", "fence", "barrier", "trap"),
)
COUNTS = (*("executed", "lanes", "bytes", "wavefronts", "ideal", "sectors", "requests", "waits"),)
GAP = 1 << 20  # bytes between two tensors, so that an overrun hits no other
SMS = 3  # few, so that each block of a persistent kernel takes several tiles
_ROOM = 256
_SPARE = bytes(1024)  # after the registers: an instruction may read past the last one
_SWIZZLES = {0: "none", 32: "32B", 64: "64B", 128: "128B"}
_TMA_UNIT, _MAP_BYTES = 16, 128
HEAP_BASE, HEAP_BYTES = 1 << 37, 8 << 20  # of malloc, as CUDA has them unless it is told otherwise
ASSERT = "__assertfail"
_HEAP_TABLE = 1 << 20  # bytes of the list of allocations
_PRINTED = 1 << 20  # bytes of printf in a launch, as CUDA has them
_LISTS = ("code", "operands", "touched", "specials")
RESIDENT = 2048
"""The thread blocks that are on a GPU at a time at most, unless the launch is cooperative."""
_RACES = ("none", "shared", "global")
_ORDERS = ("in-order", "reversed", "random", "all")
_WORKSPACE = 1 << 39  # where a cooperative launch has its workspace in global memory
_WORKSPACE_BYTES = 256
_ZEROS = np.zeros(_TMA_UNIT, np.uint8)  # in place of a tensor without elements


@dataclass(frozen=True)
class Finding:
    """A fault of the kernel that the hardware would not report."""

    kind: str
    instruction: Instruction
    block: int
    """The number of the thread block."""
    warp: int
    lane: int
    """-1: the whole warp."""
    address: int
    """The address in its space; for a barrier its number or its address in shared memory."""
    other: Instruction | None
    """The instruction that it conflicts with."""
    detail: tuple[int, int]
    """For a barrier: the arrivals and bytes that it still waits for. For a transaction: bytes. For
    a TMA box with an invalid start: the axis and the coordinate. For memory of malloc: the offset
    in the allocation and its size."""
    text: str = ""
    """The expression of an assertion."""
    callers: tuple[Instruction, ...] = ()
    """The calls that the thread is in, the innermost first, at most four."""


@dataclass(frozen=True)
class LaunchResult:
    """The findings and the counts of a launch."""

    findings: tuple[Finding, ...]
    counts: NDArray[np.int64]
    """A row for each of the program's instructions, with the columns COUNTS."""
    printed: str = ""
    """What the kernel has printed."""


parse_once = functools.lru_cache(2)(parse)
"""The parsed module, which the kernels of a file share."""


def prepare(ptx: str, entry: str) -> EncodedKernel:
    """A decoded kernel. Raises Failed with FW831 if the machine cannot execute it."""
    module = parse_once(ptx)
    if entry not in module.entries:
        raise bad(1, f"there is no kernel {entry}; there are {', '.join(module.entries)}")
    made = encode(module, module.entries[entry])
    try:
        _ = made.packed
    except OverflowError:
        raise bad(1, "a number in it has more than 32 bits where none can") from None
    return made


def run(
    program: EncodedKernel,
    plan: LaunchPlan,
    arrays: Mapping[str, Array],
    dims: Mapping[str, int],
    schedule: str = "eager",
    variables: Variables | None = None,
    machine: Machine = here,
) -> LaunchResult:
    """Run a kernel on arrays in the caller's order of axes; outputs are written in place.

    `variables` are the module's, as an earlier launch has left them; without them the launch is the
    first. `machine` executes it.
    """
    dims = {**shown_dims(plan, arrays), **dims}
    own = np.zeros(1, np.int32)
    regions, parameters = _memory(plan, arrays, dims, own)
    grid, block = plan.blocks(dims, sms_of(program)), [plan.threads]
    given = (regions, parameters, grid, block, plan.shared, schedule, variables)
    return launch(program, *given, machine)


def sms_of(program: EncodedKernel) -> int:
    """The blocks of a persistent kernel. One that waits for others has a single block, which takes
    all tiles in order: blocks run one after another."""
    return 1 if ACQUIRES in program.names else SMS


def variables_of(program: EncodedKernel) -> Variables:
    """The variables of a module as they are when it is loaded."""
    return np.frombuffer(bytes(program.data) or b"\0", np.uint8).copy()


def launch(
    program: EncodedKernel,
    regions: Sequence[Region],
    parameters: bytes,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    schedule: str = "eager",
    variables: Variables | None = None,
    machine: Machine = here,
    constants: Collection[str] = (),
    heap: Array | None = None,
    *,
    cluster: Sequence[int] | None = None,
    cooperative: bool = False,
    order: str = "in-order",
    resident: int | None = None,
    races: str = "shared",
    threads: int | None = None,
) -> LaunchResult:
    """Run a grid of thread blocks. `shared` bytes are added to what the kernel declares.

    `schedule` says when asynchronous work is done: `eager`, when it is started; `lazy`, as late as
    a wait allows; `random:SEED`, at any moment between, with the warps in any order. `constants`
    are those without an initialiser that the caller has set: a read of others is a finding. `heap`
    is the memory of malloc (make_heap), as an earlier launch has left it.

    `cluster` are the blocks of a cluster along each axis, if the kernel does not say it.
    `cooperative` launches have all blocks resident, and the kernel may synchronise the grid. Of
    others, `resident` blocks are there at a time, RESIDENT by default. `order` says in which order
    they begin: `in-order` or `reversed`, one after the other, the next one when those before it
    wait for it; `random:SEED` or `all`, at once, in a random order of steps or in turn. Races are
    looked for in shared memory, with `races="global"` also in global memory, between all blocks.
    Blocks that cannot tell each other anything are executed by several `threads`, without it one
    for each core. Raises Failed with FW831 for a launch that no GPU can do.
    """
    check_launch(program, grid, block, shared)
    together = cluster_of(program, grid, cluster)
    check_blocks(program, grid, block, cooperative)
    order_kind, order_seed = order_of(order)
    looked_for = races_of(races)
    blocks = math.prod(grid) if cooperative else RESIDENT if resident is None else resident
    workspace = np.zeros(_WORKSPACE_BYTES, np.uint8)
    kind, seed = schedule_of(schedule)
    names, (code, operands, touched, specials) = program.packed
    registers = np.frombuffer(bytes(program.registers) + _SPARE, np.uint8)
    data = variables_of(program) if variables is None else variables
    # A struct may be padded at its end.
    given = np.frombuffer(parameters.ljust(max(program.parameter_bytes, 1), b"\0"), np.uint8)
    known = [*regions, *_module_regions(program, data, constants)]
    if heap is None and "malloc" in program.names:
        heap = make_heap()
    if heap is not None and ("malloc" in program.names or heap[-_HEAP_TABLE:][:8].any()):
        known.append(Region(HEAP_BASE, heap.nbytes, heap.ctypes.data, HEAP))
    printed = np.zeros(8 + (_PRINTED if "vprintf" in program.names else 0), np.uint8)
    if cooperative:
        known.append(Region(_WORKSPACE, workspace.nbytes, workspace.ctypes.data, READ_WRITE))
    listed = (Region * len(known))(*known)
    found = (FindingRecord * _ROOM)()
    counts = np.zeros((len(program.names), len(COUNTS)), np.int64)
    told = Launch(
        names=ctypes.addressof(names),
        code=code.ctypes.data,
        instructions=len(program.names),
        operands=operands.ctypes.data,
        operand_count=len(program.operands),
        touched=touched.ctypes.data,
        touched_count=len(program.touched),
        registers=registers.ctypes.data,
        register_bytes=len(registers),
        specials=specials.ctypes.data,
        special_count=len(program.specials) // 2,
        regions=ctypes.addressof(listed),
        region_count=len(known),
        parameters=given.ctypes.data,
        parameter_bytes=len(given),
        grid=(ctypes.c_int32 * 3)(*[*grid, 1, 1][:3]),
        block=(ctypes.c_int32 * 3)(*[*block, 1, 1][:3]),
        cluster=(ctypes.c_int32 * 3)(*together),
        order=order_kind,
        resident=max(blocks // math.prod(together), 1),
        order_seed=order_seed,
        workspace=_WORKSPACE if cooperative else 0,
        races=looked_for,
        threads=threads or os.cpu_count() or 1,
        shared_bytes=program.shared + shared,
        local_bytes=program.local,
        schedule=kind,
        seed=seed,
        findings=ctypes.addressof(found),
        finding_room=_ROOM,
        counts=counts.ctypes.data,
        printed=printed.ctypes.data,
        printed_room=printed.nbytes,
    )
    lists = dict(zip(_LISTS, (part.nbytes for part in program.packed[1]), strict=True))
    sizes = {
        **lists,
        "registers": registers.nbytes,
        "parameters": given.nbytes,
        "findings": ctypes.sizeof(found),
        "counts": counts.nbytes,
        "printed": printed.nbytes,
    }
    told.kept = names
    count = machine(told, sizes, known)
    return LaunchResult(_findings(program, count, found), counts, _text(printed))


def make_heap(size: int = HEAP_BYTES) -> Array:
    """The memory of malloc, in which nothing is allocated yet."""
    return np.zeros(2 * size + _HEAP_TABLE, np.uint8)


def _text(printed: Array) -> str:
    """What the kernel has printed; the buffer begins with its length."""
    length = max(int(printed[:8].view(np.int64)[0]), 0)
    text = printed[8 : 8 + length].tobytes().decode("utf-8", "replace")
    lost = length - (printed.nbytes - 8)
    return text if lost <= 0 else f"{text}\n({lost} bytes more were printed)\n"


def _module_regions(
    program: EncodedKernel, data: Variables, constants: Collection[str]
) -> list[Region]:
    """The variables of a module: neighbours of the same use are one region."""
    regions: list[Region] = []
    for name, placed in program.variables.items():
        unset = placed.unset and name not in constants
        use = READ if placed.variable.space == "const" else READ_WRITE
        use = UNSET if unset else use
        if not regions or regions[-1].use != use or unset:
            start = MODULE + placed.offset
            regions.append(Region(start, 0, data.ctypes.data + placed.offset, use))
        regions[-1].size = MODULE + placed.offset + placed.variable.size - regions[-1].base
    return regions


def schedule_of(text: str) -> tuple[int, int]:
    """The machine's number of a schedule, and its seed. Raises ValueError for an unknown one."""
    name, _, seed = text.partition(":")
    if text in ("eager", "lazy"):
        return ("eager", "lazy").index(text), 0
    if name == "random" and seed.isdecimal():
        return 2, int(seed)
    raise ValueError(f"no schedule {text!r}: there are eager, lazy and random:SEED")


def order_of(text: str) -> tuple[int, int]:
    """The machine's number of an order of blocks, and its seed. Raises ValueError for an unknown
    one."""
    name, _, seed = text.partition(":")
    if text in _ORDERS and text != "random":
        return _ORDERS.index(text), 0
    if name == "random" and seed.isdecimal():
        return _ORDERS.index(name), int(seed)
    raise ValueError(f"no order {text!r}: there are in-order, reversed, all and random:SEED")


def races_of(text: str) -> int:
    """Where races are looked for, as a number. Raises ValueError if there is no such place."""
    if text not in _RACES:
        raise ValueError(f"no races {text!r}: there are {', '.join(_RACES)}")
    return _RACES.index(text)


def _findings(program: EncodedKernel, count: int, found: Any) -> tuple[Finding, ...]:
    try:
        if count < 0:
            one = program.source[-1 - count]
            raise refused(one, f"the machine does not know {one.opcode}")
        return tuple(_finding(program, f) for f in found[: min(count, _ROOM)])
    except IndexError:  # the kernel has corrupted the machine
        raise bad(1, "the machine reports instructions that do not exist") from None


def _finding(program: EncodedKernel, found: Any) -> Finding:
    return Finding(
        KINDS[found.kind],
        program.source[found.instruction],
        found.block,
        found.warp,
        found.lane,
        found.address,
        program.source[found.other] if found.other >= 0 else None,
        (found.detail[0], found.detail[1]),
        _assertion(program, found.address) if program.names[found.instruction] == ASSERT else "",
        tuple(program.source[at] for at in found.callers if at >= 0),
    )


def _assertion(program: EncodedKernel, address: int) -> str:
    """The text at an address among the variables of the module."""
    start = address - MODULE
    if not 0 <= start < len(program.data):
        return ""
    return bytes(program.data[start:]).partition(b"\0")[0].decode("utf-8", "replace")


def behind(base: int, size: int) -> int:
    """The address of the next array."""
    return base + -(-size // GAP) * GAP + GAP


def addresses(plan: LaunchPlan, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The address of each tensor in emulated memory."""
    found, base = {}, GAP
    for tensor in plan.tensors:
        if tensor.name in arrays:
            found[tensor.name] = base
            base = behind(base, arrays[tensor.name].nbytes)
    return found


def _memory(
    plan: LaunchPlan, arrays: Mapping[str, Array], dims: Mapping[str, int], own: Array
) -> tuple[list[Region], bytes]:
    """The region of each tensor and of the launch's own counter, and the parameter struct as the
    launcher packs it."""
    regions, packed, bases = [], b"", addresses(plan, arrays)
    for tensor in plan.tensors:
        array = arrays.get(tensor.name)
        if array is None:
            packed += bytes(8 * (1 + len(tensor.axes)))
            continue
        base = bases[tensor.name]
        use = READ if not tensor.written else READ_WRITE if tensor.read else OUTPUT
        regions.append(Region(base, array.nbytes, array.ctypes.data, use))
        packed += struct.pack("<Q", base)
        packed += b"".join(struct.pack("<q", s) for s in _strides(tensor, array, dims))
    zeros = max((behind(base, arrays[name].nbytes) for name, base in bases.items()), default=GAP)
    if plan.counter:
        counter = behind(zeros, _ZEROS.nbytes)
        regions.append(Region(counter, own.nbytes, own.ctypes.data, READ_WRITE))
        packed += struct.pack("<Q", counter)
    packed += b"".join(struct.pack("<i", dims[name]) for name in plan.dims)
    if not plan.maps:
        return regions, packed.ljust(-(-len(packed) // 8) * 8, b"\0")
    regions.append(Region(zeros, _ZEROS.nbytes, _ZEROS.ctypes.data, READ))
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    maps = b""
    for one in plan.maps:
        place = bases[one.tensor], zeros
        try:
            maps += _map(one, tensors[one.tensor], arrays[one.tensor], dims, place)
        except ValueError:
            if not one.optional:
                raise
            maps += bytes(_MAP_BYTES)
    packed = maps + packed
    return regions, packed.ljust(-(-len(packed) // 64) * 64, b"\0")


def _map(
    one: PlanMap, tensor: PlanTensor, array: Array, dims: Mapping[str, int], place: tuple[int, int]
) -> bytes:
    """A tensor map, with sizes and strides as the launcher passes them (launcher/call.h).

    `place`: the addresses of the tensor and of zeros. Raises ValueError for an invalid tensor.
    """
    sizes = [evaluate(axis.size, dims) for axis in tensor.axes]
    strides = [s * array.itemsize for s in _strides(tensor, array, dims)]
    base = place[0]
    if tensor.flat:  # views back to back
        view = math.prod(sizes)
        sizes = [array.size // view if view else 0, *sizes]
        strides = [view * array.itemsize, *strides]
    empty = not all(sizes)
    strides = [s if n > 1 else _TMA_UNIT for n, s in zip(sizes, strides, strict=True)]
    if not empty and sizes[-1] > 1 and strides[-1] != array.itemsize:
        raise ValueError(f"`{tensor.name}` must be contiguous along its last axis")
    if one.ranges:  # two axes more, so that a tile ends where its range does
        sizes = [RANGE_AXIS, RANGE_AXIS, *sizes[:-2], RANGE, sizes[-1]]
        strides = [RANGE_STRIDE - strides[-2], strides[-2], *strides]
    if one.pages:  # the same, of the rows of all pages together
        if sizes[0] > 1 and strides[0] % strides[-2]:
            raise ValueError(f"the pages of `{tensor.name}` must be whole rows apart")
        sizes = [RANGE_AXIS, RANGE_AXIS, *sizes[1:-2], RANGE, sizes[-1]]
        strides = [RANGE_STRIDE - strides[-2], strides[-2], *strides[1:]]
    if empty:
        sizes, base, strides = [1] * len(sizes), place[1], [_TMA_UNIT] * len(sizes)
    outer = strides[:-1]
    swizzle, box = _SWIZZLES[one.swizzle], one.box[::-1]
    try:
        return encode_tensor_map(base, sizes[::-1], outer[::-1], box, array.itemsize, swizzle)
    except ValueError as error:
        raise ValueError(f"the tensor map of `{tensor.name}`: {error}") from None


def _strides(tensor: PlanTensor, array: Array, dims: Mapping[str, int]) -> list[int]:
    sizes = [evaluate(axis.size, dims) for axis in tensor.axes]
    strides = [0] * len(sizes)
    if tensor.flat:
        dense = 1
        for axis in reversed(range(len(sizes))):
            strides[axis] = dense
            dense *= sizes[axis]
        return strides
    for axis, parts in enumerate(caller_order(tensor, LAYOUTS[0])):
        stride = array.strides[axis] // array.itemsize
        for part in reversed(parts):
            strides[part] = stride
            stride *= sizes[part]
    return strides
