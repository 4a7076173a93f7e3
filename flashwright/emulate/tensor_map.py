"""Tensor maps for the emulator: the 128-byte descriptor of a tensor for TMA.

The driver's own encoding is opaque. This one is read by machine/tensor_map.cpp; it accepts what
cuTensorMapEncodeTiled accepts, of what attention needs: tiled, not interleaved, every element.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

MAGIC = 0x31504D5457464C46
SWIZZLES = ("none", "32B", "64B", "128B")
FILLS = ("zeros", "nan")
KINDS = ("integer", "float")
LAYOUT = struct.Struct("<QQ5Q5Q5I5B7x")  # struct TensorMap of machine/tensor_map.h
assert LAYOUT.size == 128


def encode_tensor_map(
    base: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_bytes: int,
    swizzle: str = "none",
    fill: str = "zeros",
    kind: str = "float",
) -> bytes:
    """The map of a tensor at the emulated address `base`; ValueError where the driver refuses it.

    Dimensions come innermost first. Elements of the innermost one are contiguous; `strides_bytes`
    has the others' strides.
    """
    rank = len(sizes)
    _require(1 <= rank <= 5, f"a tensor map has 1 to 5 dimensions, not {rank}")
    _require(len(box) == rank, f"the box has {len(box)} dimensions, the tensor {rank}")
    wanted = f"a tensor of {rank} dimensions has {rank - 1} strides (not that of the innermost)"
    _require(len(strides_bytes) == rank - 1, f"{wanted}, not {len(strides_bytes)}")
    _require(element_bytes in (1, 2, 4, 8), f"no elements of {element_bytes} bytes")
    _check_tensor(base, sizes, strides_bytes)
    _check_box(box, element_bytes, swizzle)
    _require(fill in FILLS, f"the fill is one of {', '.join(FILLS)}, not {fill}")
    _require(kind in KINDS, f"the kind is one of {', '.join(KINDS)}, not {kind}")
    floats = kind == "float" and element_bytes > 1
    _require(fill == "zeros" or floats, "only floats of 2, 4 or 8 bytes can be filled with NaN")
    return LAYOUT.pack(
        MAGIC,
        base,
        *_padded(sizes, 1),
        *_padded((element_bytes, *strides_bytes), 0),
        *_padded(box, 1),
        rank,
        element_bytes,
        SWIZZLES.index(swizzle),
        FILLS.index(fill),
        KINDS.index(kind),
    )


def _check_tensor(base: int, sizes: Sequence[int], strides_bytes: Sequence[int]) -> None:
    _require(0 <= base < 2**64, f"{base:#x} is no address")
    _require(base % 16 == 0, f"the tensor's address {base:#x} is not a multiple of 16")
    for i, size in enumerate(sizes):
        _require(1 <= size <= 2**32, f"dimension {i} has {size} elements: not in 1 .. 2^32")
    for i, stride in enumerate(strides_bytes, 1):
        problem = f"the stride of dimension {i}, {stride} bytes, is not"
        _require(stride % 16 == 0, f"{problem} a multiple of 16")
        _require(0 <= stride < 2**40, f"{problem} in 0 .. 2^40 - 1")


def _check_box(box: Sequence[int], element_bytes: int, swizzle: str) -> None:
    _require(swizzle in SWIZZLES, f"the swizzle is one of {', '.join(SWIZZLES)}, not {swizzle}")
    for i, size in enumerate(box):
        _require(1 <= size <= 256, f"dimension {i} of the box has {size} elements: not in 1 .. 256")
    inner = box[0] * element_bytes
    _require(inner % 16 == 0, f"a row of the box has {inner} bytes: not a multiple of 16")
    span = 16 << SWIZZLES.index(swizzle)
    fits = swizzle == "none" or inner <= span
    _require(fits, f"a row of the box has {inner} bytes: the {swizzle} swizzle has room for {span}")


def _padded(values: Sequence[int], with_: int) -> list[int]:
    return [*values, *[with_] * (5 - len(values))]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
