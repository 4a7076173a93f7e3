"""The rules of a launch plan: the limits of GPUs, of the launcher and of TMA.

Packages are untrusted. The loader, the judge and the emulator check a plan here first, so that
later code can rely on its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashwright.gpu import GPUS, Gpu
from flashwright.lower.launch_plan import (
    DIVISIONS,
    GRID_LIMITS,
    OPERATORS,
    LaunchPlan,
    PlanMap,
    PlanTensor,
    Postfix,
)

LAYOUTS = ("bhsd", "bshd")
"""The order of a caller's axes: batch, heads, sequence, dim; or batch, sequence, heads, dim."""

DTYPES = {  # DLPack's code and the bits
    "fp16": (2, 16),
    "bf16": (4, 16),
    "fp32": (2, 32),
    "int32": (0, 32),
    "int8": (0, 8),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
}
SWIZZLES = (0, 32, 64, 128)
"""The widths of a tensor map's swizzle in bytes; the index is the value of CUtensorMapSwizzle."""

_MOST_MAP_AXES, _MOST_BOX, _TMA_BYTES = 5, 256, 16
_DEPTH, _MOST_AXES, _MOST_DIMS, _MOST_THREADS = 16, 8, 32, 1024
_MOST_TENSORS, _MOST_TOKENS, _MOST_VECTOR = 64, 64, 64
_CALLER_ORDER = "BHGLD"  # the index of a head in its group is part of the caller's head axis
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ENTRY = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,1023}")

Order = tuple[tuple[int, ...], ...]


def caller_order(tensor: PlanTensor, layout: str) -> Order:
    """For each axis of the caller's tensor, the plan's axes that it combines.

    Only tensors with batch, head, position and dim axes have the caller's order; others are passed
    as the program declares them.
    """
    labels = [axis.label for axis in tensor.axes]
    if len(set(labels)) < len(labels) or not set(labels) <= set(_CALLER_ORDER):
        return tuple((i,) for i in range(len(labels)))
    split = layout == "bshd" and set("BHLD") <= set(labels)
    order = "BLHGD" if split else _CALLER_ORDER
    axes: list[tuple[int, ...]] = []
    for i in sorted(range(len(labels)), key=lambda i: order.index(labels[i])):
        if labels[i] == "G" and axes and "H" in labels:
            axes[-1] = (*axes[-1], i)
        else:
            axes.append((i,))
    return tuple(axes)


def cards_of(arch: str) -> list[Gpu]:
    """The GPUs that have an architecture; sm_90 and sm_90a are the same cards."""
    return [gpu for gpu in GPUS.values() if gpu.arch == arch or gpu.arch == f"{arch}a"]


def faults(plan: LaunchPlan) -> Iterator[str]:
    """All violations of the rules, each with its field; empty if the plan can be launched."""
    yield from _wrong_launch(plan)
    yield from _wrong_names(plan)
    for number, count in enumerate(plan.grid[:3]):
        most = GRID_LIMITS[0 if plan.stays else number]
        yield from _wrong_size(count, plan.dims, f"grid.{number}", "the grid", most)
    for tensor in plan.tensors:
        yield from _wrong_tensor(tensor, plan.dims)
    known = {tensor.name: tensor for tensor in plan.tensors}
    for one in plan.maps[:_MOST_TENSORS]:
        if one.tensor in known:
            yield from _wrong_map(one, known[one.tensor])
        else:
            yield f"maps: a map of `{one.tensor[:80]}`, which is no tensor"


def _wrong_launch(plan: LaunchPlan) -> Iterator[str]:
    if not _ENTRY.fullmatch(plan.entry):
        yield f"entry: {plan.entry[:80]!r} is no name of a kernel"
    cards = cards_of(plan.arch)
    if not cards:
        known = ", ".join(dict.fromkeys(gpu.arch for gpu in GPUS.values()))
        yield f"arch: no known GPU is {plan.arch[:80]!r}; there are {known}"
    if not 1 <= len(plan.grid) <= 3:
        yield f"grid: a grid has 1 to 3 axes, not {len(plan.grid)}"
    if not 1 <= plan.threads <= _MOST_THREADS:
        yield f"threads: a block has 1 to {_MOST_THREADS} threads, not {plan.threads}"
    most = max((gpu.shared_per_block for gpu in cards or GPUS.values()), default=0)
    if not 0 <= plan.shared <= most:
        yield f"shared: a block has 0 to {most} bytes of shared memory, not {plan.shared} bytes"


def _wrong_names(plan: LaunchPlan) -> Iterator[str]:
    if "kv_heads" in plan.dims[: plan.dims.index("heads") if "heads" in plan.dims else 0]:
        yield "dims: kv_heads must come after heads"
    if len(plan.dims) > _MOST_DIMS:
        yield f"dims: {len(plan.dims)} dimensions; the launcher takes {_MOST_DIMS}"
    for field, count in (("tensors", len(plan.tensors)), ("maps", len(plan.maps))):
        if count > _MOST_TENSORS:
            yield f"{field}: there are {count}; the launcher takes {_MOST_TENSORS}"
    if not any(t.read for t in plan.tensors) or not any(t.written for t in plan.tensors):
        yield "tensors: a kernel reads a tensor and writes one"
    names = [*plan.dims, *(t.name for t in plan.tensors)]
    if len(set(names)) < len(names):
        yield "dims, tensors: a name is given twice"
    for name in names:
        if not _NAME.fullmatch(name) or name in OPERATORS:
            yield f"dims, tensors: {name[:80]!r} is no name"


def _wrong_tensor(tensor: PlanTensor, dims: tuple[str, ...]) -> Iterator[str]:
    name, most = f"tensors.{tensor.name[:80]}", _MOST_VECTOR
    if tensor.dtype not in DTYPES:
        yield f"{name}.dtype: no tensor can have the element type {tensor.dtype[:80]}"
    if not 1 <= len(tensor.axes) <= _MOST_AXES:
        yield f"{name}.axes: {len(tensor.axes)} axes; the launcher takes 1 to {_MOST_AXES}"
    if not 1 <= tensor.vector <= most:
        yield f"{name}.vector: {tensor.vector} elements at once, not 1 to {most}"
    for number, axis in enumerate(tensor.axes[:_MOST_AXES]):
        if not _NAME.fullmatch(axis.label):
            yield f"{name}.axes.{number}.label: {axis.label[:80]!r} is no name"
        place = f"{name}.axes.{number}.size"
        yield from _wrong_size(axis.size, dims, place, f"`{tensor.name[:80]}`", 2**31 - 1)
    for parts in caller_order(tensor, LAYOUTS[0]):
        sizes = [tensor.axes[p].size for p in parts]
        if len(parts) > 1 and sum(not _is_number(size) for size in sizes) > 1:
            yield f"{name}.axes: the head axis is split by something that is not a number"


def _wrong_map(one: PlanMap, tensor: PlanTensor) -> Iterator[str]:
    of = f"maps: the map of `{one.tensor}`"
    axes = len(tensor.axes) + tensor.flat + 2 * one.ranges + one.pages
    if not tensor.read:
        yield f"{of} is for loads, of a tensor that is read"
    if axes > _MOST_MAP_AXES:
        yield f"{of} has {axes} axes; TMA knows 1 to {_MOST_MAP_AXES}"
    if len(one.box) != axes:
        yield f"{of} has a box of {len(one.box)} axes, the tensor has {axes}"
    if not all(1 <= size <= _MOST_BOX for size in one.box):
        yield f"{of} has the box {list(one.box[:8])}; on each axis there can be 1 to {_MOST_BOX}"
    if (one.ranges or one.pages) and (tensor.flat or len(tensor.axes) < 2):
        kind = "ranges" if one.ranges else "pages"
        yield f"{of} is for {kind} of rows, which a flat tensor or a vector has not"
    if one.ranges and one.pages:
        yield f"{of} is for ranges of rows and for pages: it can be for one of them"
    if one.swizzle not in SWIZZLES:
        yield f"{of} swizzles over {one.swizzle} bytes: it can be {', '.join(map(str, SWIZZLES))}"
    if tensor.dtype not in DTYPES or not one.box:
        return
    size = DTYPES[tensor.dtype][1] // 8
    last = tensor.axes[-1].size if tensor.axes else (0,)
    if tensor.flat and not (_is_number(last) and int(last[0]) * size % _TMA_BYTES == 0):
        # Its strides come from its sizes, which the launcher cannot check.
        yield f"{of} is of a flat tensor whose rows are not a multiple of {_TMA_BYTES} bytes long"
    if not one.optional and (tensor.vector < 1 or tensor.vector * size % _TMA_BYTES):
        # The vector makes the launcher check the address and the strides.
        yield f"{of} needs a vector of {_TMA_BYTES // size}, not {tensor.vector}"
    inner = one.box[-1] * size
    if inner % _TMA_BYTES:
        yield f"{of} has {inner} bytes in a row of its box: not a multiple of {_TMA_BYTES}"
    if one.swizzle and inner > one.swizzle:
        yield f"{of} has {inner} bytes in a row of its box, more than its swizzle, {one.swizzle}"


def _wrong_size(
    expr: Postfix, dims: tuple[str, ...], field: str, where: str, most: int
) -> Iterator[str]:
    """The faults of a size: of an expression, or of a number."""
    if len(expr) > _MOST_TOKENS:
        yield f"{field}: a size of {len(expr)} tokens; the launcher takes {_MOST_TOKENS}"
        return
    depth, before = 0, None
    for token in expr:
        if isinstance(token, str) and token in OPERATORS:
            depth -= 1
            if token in DIVISIONS and before == 0:
                yield f"{field}: a size of {where} is divided by zero: {list(expr)}"
        elif isinstance(token, str) and token not in dims:
            yield f"{field}: a size of {where} speaks of `{token[:80]}`, which is no dimension"
            return
        else:
            depth += 1
            if isinstance(token, int) and abs(token) >= 2**31:
                yield f"{field}: a size of {where} has the number {str(token)[:40]}"
        before = token
        if not 1 <= depth <= _DEPTH:
            break
    if depth != 1:
        yield f"{field}: a size of {where} is no expression: {list(expr)}"
    elif _is_number(expr) and not 0 <= int(expr[0]) <= most:
        yield f"{field}: a size of {where} is {str(expr[0])[:40]}, not 0 to {most}"


def _is_number(size: Postfix) -> bool:
    return len(size) == 1 and isinstance(size[0], int)
