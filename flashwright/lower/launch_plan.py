"""The launch plan: all that a caller must know to launch a kernel, as data beside its cubin.

The kernel takes one parameter, a struct passed by value: for each tensor, in order, its pointer and
then its strides (in elements, int64, one for each axis); after the tensors the counter's address,
if there is one, and the dimensions (int32), in order. The struct's size is padded to 8 bytes.

Where there are maps, the struct begins with them, in order: a CUtensorMap of 128 bytes each. It is
then aligned to 64 bytes, and its size padded to a multiple of 64. (With CUDA 13's cuda.h both are
128: the caller gives as much, and a kernel takes what it declares.)

Sizes are integer expressions over the dimensions in postfix form: `["q_len", 128, "ceil_div"]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from flashwright.lang.diagnostic import Diagnostic, Failed

Postfix = tuple[int | str, ...]

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "ceil_div": lambda a, b: -(-a // b),
    "floor_div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}
FRAGMENT_ROWS = 128  # of a tile, at most, in memory that lies in fragments
RANGE, RANGE_AXIS, RANGE_STRIDE = 2**30, 2**31 - 2**16, 2**34
"""Of a tensor map for ranges: where rows end, how long the first two axes are, and the bytes that
its first stride and that of a row are together."""
COUNTER = "tiles_taken"  # what kernels call the launch's counter
DIVISIONS = ("ceil_div", "floor_div", "mod")
GRID_LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""Blocks along each axis of a grid (CUDA C++ Programming Guide, all of 7.5 to 9.0)."""
_LARGEST = 2**62  # the launcher computes in 64 bits


class PlanAxis(BaseModel):
    """One axis of a tensor: its letter, and its size (a number, a dimension or made of them)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    label: str
    size: Postfix


class PlanTensor(BaseModel):
    """A tensor that the caller passes, its axes in the order that the program declares.

    `vector` is how many elements of the last axis are moved at once: where it is more than 1, that
    axis must be contiguous, and all other strides and the address multiples of it.
    A `flat` tensor is a view into memory whose whole extent only the caller knows: it is passed as
    one contiguous axis. One in `fragments` is scratch: its rows, the last axis but one, begin a
    memory of `padded` rows, which tiles may fill beyond the tensor's end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    dtype: str
    axes: tuple[PlanAxis, ...]
    read: bool
    written: bool
    vector: int = 1
    flat: bool = False
    fragments: bool = False

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the memory for a tensor of this shape."""
        if not self.fragments:
            return tuple(shape)
        *outer, rows, columns = shape
        return *outer, -(-rows // FRAGMENT_ROWS) * FRAGMENT_ROWS, columns


class PlanMap(BaseModel):
    """A tensor map (CUtensorMap): with it a kernel has TMA load tiles of a tensor that it reads.

    `box` is the tile, in elements on each of the tensor's axes as the plan has them, 1 where it has
    no extent. The kernel gives coordinates as TMA wants them, the last axis first. Elements beyond
    an end of the tensor are zeros. Of a tensor without elements every tile is zeros.

    A flat tensor's box has one axis more, the first: the memory is views of the axes' sizes, back
    to back, as many as fit into what the caller gives, and the kernel says which one it reads.

    With one for `ranges` of rows, tiles end where a range does, though the tensor's rows go on. It
    has two axes more, the first, on which the box is 1. Rows, the last axis but one, end at RANGE:
    a tile with n rows left begins at RANGE - n. The second axis has the stride of a row, and its
    coordinate is the end of the range in the tensor. These two are RANGE rows too far, which the
    first takes back: its coordinate is RANGE, its stride 2^34 bytes less that of a row, and RANGE
    times 2^34 is 2^64, where addresses begin again at 0.

    One for `pages` is one for ranges of the rows of all pages together: the tensor's first axis,
    that of pages, has no place in it, and the kernel counts rows from the tensor's first one. Pages
    are whole rows apart. Boxes end where a sequence does, though its last page goes on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    tensor: str
    box: tuple[int, ...]
    swizzle: int
    """In bytes: 0 (none), 32, 64 or 128."""
    ranges: bool = False
    pages: bool = False
    optional: bool = False
    """Of a tensor that TMA can load only if its address and strides, which are the caller's, are
    multiples of 16 bytes: otherwise the map is 128 zeros, and the kernel copies in another way."""


class LaunchPlan(BaseModel):
    """How to launch the kernel `entry`: one count for each axis of the grid, first fastest.

    A kernel that `stays` is launched with one block for each SM at most, in a row: they share out
    the blocks of the grid among themselves. With a `counter` they take the next one when they are
    done: behind the tensors the struct has the address of an int32 of this launch alone, which
    begins at 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    entry: str
    arch: str
    threads: int
    shared: int
    grid: tuple[Postfix, ...]
    stays: bool = False
    counter: bool = False
    dims: tuple[str, ...]
    tensors: tuple[PlanTensor, ...]
    maps: tuple[PlanMap, ...] = ()

    def dump(self) -> str:
        """As JSON, one short line for each tensor's axis."""
        unusual = ("maps", "stays", "counter")
        unsaid: dict[str, Any] = {n: True for n in unusual if not getattr(self, n)}
        if self.maps:
            unsaid["maps"] = {
                n: {name for name in ("optional", "ranges", "pages") if not getattr(one, name)}
                for n, one in enumerate(self.maps)
            }
        plain = (n for n, one in enumerate(self.tensors) if not one.fragments)
        unsaid["tensors"] = {n: {"fragments"} for n in plain}
        return self.model_dump_json(indent=1, exclude=unsaid) + "\n"

    def blocks(self, dims: Mapping[str, int], sms: int) -> tuple[int, ...]:
        """The blocks to launch on a GPU with so many SMs, along each axis.

        Failed with FW852 for a grid that no GPU has.
        """
        counts = tuple(evaluate(count, dims) for count in self.grid)
        limits = (GRID_LIMITS[0],) * len(counts) if self.stays else GRID_LIMITS
        for axis, (count, most) in enumerate(zip(counts, limits, strict=False)):
            if not 0 <= count <= most:
                raise _unusable(f"grid.{axis}: {count} blocks, not 0 to {most}", dims)
        return (min(math.prod(counts), sms),) if self.stays else counts


def evaluate(expr: Postfix, dims: Mapping[str, int]) -> int:
    """The value of a size.

    Failed with FW852 where it has none: it is no expression, divides by zero or is too large; with
    FW904 where a dimension is not known.
    """
    stack: list[int] = []
    for token in expr:
        if isinstance(token, int):
            stack.append(token)
        elif token not in OPERATORS:
            stack.append(_size_of(token, dims))
        elif len(stack) < 2:
            break
        else:
            right, left = stack.pop(), stack.pop()
            if right == 0 and token in DIVISIONS:
                raise _unusable(f"the size {_shown(expr)} divides by zero", dims)
            stack.append(OPERATORS[token](left, right))
            if abs(stack[-1]) > _LARGEST:
                raise _unusable(f"the size {_shown(expr)} is too large", dims)
    if len(stack) != 1:
        raise _unusable(f"{_shown(expr)} is no expression", dims)
    return stack[0]


def _size_of(name: str, dims: Mapping[str, int]) -> int:
    if name not in dims:
        raise Failed(Diagnostic("FW904", f"no value is given for {name}"))
    return dims[name]


def _shown(expr: Postfix) -> str:
    text = " ".join(map(str, expr))
    return f"`{text[:80]}`"


def _unusable(text: str, dims: Mapping[str, int]) -> Failed:
    sizes = ", ".join(f"{name} {size}" for name, size in dims.items())
    return Failed(Diagnostic("FW852", f"launch.json: {text} (with {sizes})"))
