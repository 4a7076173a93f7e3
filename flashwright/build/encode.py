"""A launch plan as the launcher takes it: numbers and words in a fixed order (launcher/plan.h).

Plans are data that may come from anywhere, and the launcher trusts what it reads, so every limit it
has is looked after here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import OPERATORS, LaunchPlan, PlanMap, PlanTensor, Postfix

LAYOUTS = ("bhsd", "bshd")
"""The order of a caller's axes: batch, heads, sequence, dim; or batch, sequence, heads, dim."""

DTYPES = {  # DLPack's code and the bits
    "fp16": (2, 16),
    "bf16": (4, 16),
    "fp32": (2, 32),
    "int32": (0, 32),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
}
SWIZZLES = (0, 32, 64, 128)
"""The bytes that a tensor map can swizzle over; the place here is CUtensorMapSwizzle's number."""

_MAP_TYPES = {  # CUtensorMapDataType; it has no 8-bit floats, and zeros are zeros
    "fp16": 6,
    "bf16": 9,
    "fp32": 7,
    "int32": 3,
    "e4m3": 0,
    "e5m2": 0,
}
_MOST_MAP_AXES, _MOST_BOX, _TMA_BYTES = 5, 256, 16
_NUMBER, _DIM = 0, 1  # an operator's number is its place in OPERATORS, after these two
_DEPTH, _MOST_AXES, _MOST_DIMS, _MOST_THREADS = 16, 8, 32, 1024
_CALLER_ORDER = "BHGLD"  # a head's place within its group is part of the caller's head axis

Order = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Encoded:
    """What launcher.make() is given."""

    numbers: tuple[int, ...]
    words: tuple[str, ...]


def caller_order(tensor: PlanTensor, layout: str) -> Order:
    """For each axis of the caller's tensor, the plan's axes that it is made of.

    Only tensors whose axes are all of batch, head, position and dimension have the caller's order;
    others are passed as the program declares them.
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


def encode(plan: LaunchPlan) -> Encoded:
    """The plan in the launcher's order; Failed with FW852 where it is no plan to launch."""
    found = list(_wrong(plan))
    if found:
        raise Failed(*(Diagnostic("FW852", f"launch.json: {text}") for text in found))
    writer = _Writer(plan.dims)
    writer.plan(plan)
    return Encoded(tuple(writer.numbers), tuple(writer.words))


class _Writer:
    def __init__(self, dims: tuple[str, ...]) -> None:
        self.dims = dims
        self.numbers: list[int] = []
        self.words: list[str] = []

    def plan(self, plan: LaunchPlan) -> None:
        self.words += [plan.entry, plan.arch]
        heads = [self.dims.index(d) if d in self.dims else -1 for d in ("heads", "kv_heads")]
        self.numbers += [plan.threads, plan.shared, plan.stays, *heads, len(self.dims)]
        self.words += self.dims
        self.numbers.append(len(plan.tensors))
        for tensor in plan.tensors:
            self.tensor(tensor)
        self.numbers.append(len(plan.grid))
        for count in plan.grid:
            self.size(count)
        self.numbers.append(len(plan.maps))
        names = [tensor.name for tensor in plan.tensors]
        for one in plan.maps:
            index = names.index(one.tensor)
            self.numbers += [index, _MAP_TYPES[plan.tensors[index].dtype]]
            self.numbers += [SWIZZLES.index(one.swizzle), one.optional, *one.box]

    def tensor(self, tensor: PlanTensor) -> None:
        self.words += [tensor.name, tensor.dtype]
        self.numbers += [*DTYPES[tensor.dtype], tensor.vector]
        self.numbers += [tensor.read, tensor.written, tensor.flat, len(tensor.axes)]
        for axis in tensor.axes:
            self.words.append(axis.label)
            self.size(axis.size)
        for layout in LAYOUTS:
            order = caller_order(tensor, layout)
            self.numbers.append(len(order))
            for parts in order:
                self.numbers += [len(parts), *parts]

    def size(self, expr: Postfix) -> None:
        self.numbers.append(len(expr))
        for token in expr:
            if isinstance(token, int):
                self.numbers += [_NUMBER, token]
            elif token in OPERATORS:
                self.numbers += [_DIM + 1 + list(OPERATORS).index(token), 0]
            else:
                self.numbers += [_DIM, self.dims.index(token)]


def _wrong(plan: LaunchPlan) -> Iterator[str]:
    if not 1 <= len(plan.grid) <= 3:
        yield f"a grid has 1 to 3 axes, not {len(plan.grid)}"
    if not 1 <= plan.threads <= _MOST_THREADS:
        yield f"a block has 1 to {_MOST_THREADS} threads, not {plan.threads}"
    if not 0 <= plan.shared < 2**31:
        yield f"{plan.shared} bytes of shared memory"
    if "kv_heads" in plan.dims[: plan.dims.index("heads") if "heads" in plan.dims else 0]:
        yield "kv_heads must come after heads"
    if len(plan.dims) > _MOST_DIMS:
        yield f"{len(plan.dims)} dimensions; the launcher takes {_MOST_DIMS}"
    if not any(t.read for t in plan.tensors) or not any(t.written for t in plan.tensors):
        yield "a kernel reads a tensor and writes one"
    names = [*plan.dims, *(t.name for t in plan.tensors)]
    if len(set(names)) < len(names):
        yield "a name is given twice"
    for count in plan.grid:
        yield from _wrong_size(count, plan.dims, "the grid")
    for tensor in plan.tensors:
        yield from _wrong_tensor(tensor, plan.dims)
    known = {tensor.name: tensor for tensor in plan.tensors}
    for one in plan.maps:
        if one.tensor in known:
            yield from _wrong_map(one, known[one.tensor])
        else:
            yield f"a map of `{one.tensor}`, which is no tensor"


def _wrong_tensor(tensor: PlanTensor, dims: tuple[str, ...]) -> Iterator[str]:
    if tensor.dtype not in DTYPES:
        yield f"`{tensor.name}` has the element type {tensor.dtype}, which no tensor can have"
    if not 1 <= len(tensor.axes) <= _MOST_AXES:
        yield f"`{tensor.name}` has {len(tensor.axes)} axes; the launcher takes 1 to {_MOST_AXES}"
    if tensor.vector < 1:
        yield f"`{tensor.name}` is moved {tensor.vector} elements at once"
    for axis in tensor.axes:
        yield from _wrong_size(axis.size, dims, f"`{tensor.name}`")
    for parts in caller_order(tensor, LAYOUTS[0]):
        sizes = [tensor.axes[p].size for p in parts]
        if len(parts) > 1 and sum(not _is_number(size) for size in sizes) > 1:
            yield f"the head axis of `{tensor.name}` is split by something that is not a number"


def _wrong_map(one: PlanMap, tensor: PlanTensor) -> Iterator[str]:
    of, axes = f"the map of `{one.tensor}`", len(tensor.axes) + tensor.flat
    if not tensor.read:
        yield f"{of} is for loads, of a tensor that is read"
    if axes > _MOST_MAP_AXES:
        yield f"{of} has {axes} axes; TMA knows 1 to {_MOST_MAP_AXES}"
    if len(one.box) != axes:
        yield f"{of} has a box of {len(one.box)} axes, the tensor has {axes}"
    if not all(1 <= size <= _MOST_BOX for size in one.box):
        yield f"{of} has the box {list(one.box)}; on each axis there can be 1 to {_MOST_BOX}"
    if one.swizzle not in SWIZZLES:
        yield f"{of} swizzles over {one.swizzle} bytes: it can be {', '.join(map(str, SWIZZLES))}"
    if tensor.dtype not in DTYPES or not one.box:
        return
    size = DTYPES[tensor.dtype][1] // 8
    last = tensor.axes[-1].size if tensor.axes else (0,)
    if tensor.flat and not (_is_number(last) and int(last[0]) * size % _TMA_BYTES == 0):
        # Its strides are its sizes, which no launcher can look after.
        yield f"{of} is of a flat tensor whose rows are not a multiple of {_TMA_BYTES} bytes long"
    if not one.optional and (tensor.vector < 1 or tensor.vector * size % _TMA_BYTES):
        # It is the vector that has the launcher see to the address and the strides.
        yield f"{of} needs a vector of {_TMA_BYTES // size}, not {tensor.vector}"
    inner = one.box[-1] * size
    if inner % _TMA_BYTES:
        yield f"{of} has {inner} bytes in a row of its box: not a multiple of {_TMA_BYTES}"
    if one.swizzle and inner > one.swizzle:
        yield f"{of} has {inner} bytes in a row of its box, more than its swizzle, {one.swizzle}"


def _wrong_size(expr: Postfix, dims: tuple[str, ...], where: str) -> Iterator[str]:
    depth = 0
    for token in expr:
        if isinstance(token, str) and token in OPERATORS:
            depth -= 1
        elif isinstance(token, str) and token not in dims:
            yield f"a size of {where} speaks of `{token}`, which is no dimension"
            return
        else:
            depth += 1
        if not 1 <= depth <= _DEPTH:
            break
    if depth != 1:
        yield f"a size of {where} is no expression: {list(expr)}"


def _is_number(size: Postfix) -> bool:
    return len(size) == 1 and isinstance(size[0], int)
