"""Tiles of tensors that TMA loads (device/tma.cu): which, and what they hold, by slicing.

They are for the GPU (test_maps.py) and for the emulator (tests/unit/test_emulate_maps.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashwright.lower.launch_plan import PlanMap
from tests.gpu.on_device import Code, element

NUMPY: dict[str, Any] = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "int32": np.int32,
    "e4m3": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Tile:
    """A box of a tensor: dense memory, cut and then turned."""

    name: str
    memory: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: int = 0
    dtype: str = "bf16"
    cut: tuple[Any, ...] = ()
    """Slices of the memory's axes."""
    turn: tuple[int, ...] = ()
    """The order of the axes; where there is none, the memory's."""

    @property
    def code(self) -> Code:
        """The kernel."""
        numbers = f"Axes = {len(self.box)}, Elements = {self.elements}, Swizzle = {self.swizzle}"
        return Code("tma", "sm_90", (element(self.dtype), f"constexpr int {numbers};"))

    @property
    def elements(self) -> int:
        """In the box."""
        return math.prod(self.box)

    @property
    def shared(self) -> int:
        """Bytes of it."""
        return self.elements * np.dtype(NUMPY[self.dtype]).itemsize

    @property
    def map(self) -> PlanMap:
        """As the plan has it."""
        return PlanMap(tensor="src", box=self.box, swizzle=self.swizzle)

    @property
    def starts(self) -> dict[str, int]:
        """Where the box begins, as dimensions of the plan."""
        return {f"at{axis}": at for axis, at in enumerate(self.at)}

    @property
    def axes(self) -> tuple[int, ...]:
        """The order of the memory's axes in the tensor."""
        return self.turn or tuple(range(len(self.memory)))

    def values(self) -> np.ndarray[Any, Any]:
        """The memory, no two neighbours alike and nothing 0."""
        return (np.arange(math.prod(self.memory)) % 113 + 1).reshape(self.memory)

    def expected(self) -> np.ndarray[Any, Any]:
        """What is in the box, in its order; zeros beyond the ends."""
        box = np.zeros(self.box)
        view = self.values()[self.cut].transpose(self.axes)
        part = view[tuple(slice(a, a + b) for a, b in zip(self.at, self.box, strict=True))]
        box[tuple(slice(0, n) for n in part.shape)] = part
        return box.reshape(-1)


ALL = slice(None)
TILES = (
    Tile("a row", (100,), (32,), (32,)),
    Tile("a row's end", (100,), (64,), (80,)),
    Tile("a matrix", (40, 64), (16, 64), (8, 0), 128),
    Tile("a matrix's corner", (40, 72), (16, 64), (32, 24), 128),
    Tile("words", (40, 64), (16, 16), (30, 32), 64, "fp32"),
    Tile("whole numbers", (40, 64), (16, 8), (10, 16), 32, "int32"),
    Tile("bytes", (40, 128), (16, 128), (30, 0), 128, "e4m3"),
    Tile("without a swizzle", (40, 64), (16, 64), (30, 8), 0, "fp16"),
    Tile("some heads", (2, 40, 64), (1, 16, 64), (1, 32, 0), 128),
    Tile("several at once", (3, 40, 64), (2, 8, 32), (2, 36, 32), 64),
    Tile("attention", (2, 3, 40, 64), (1, 1, 32, 64), (1, 2, 20, 0), 128),
    Tile("turned", (2, 40, 3, 64), (1, 1, 32, 64), (1, 2, 20, 0), 128, turn=(0, 2, 1, 3)),
    Tile("one position", (1, 3, 1, 64), (1, 1, 16, 64), (0, 1, 0, 0), 128),
    Tile("five axes", (2, 3, 4, 20, 32), (1, 1, 2, 8, 32), (1, 2, 3, 15, 0), 64),
    Tile("beyond the end", (2, 40, 64), (1, 16, 64), (1, 40, 0), 128),
    Tile("of nothing", (2, 3, 0, 64), (1, 1, 32, 64), (0, 0, 0, 0), 128),
)
STRIDED = (
    Tile("a frame", (44, 96), (16, 64), (30, 0), 128, cut=(slice(2, 42), slice(16, 80))),
    Tile(
        *("every other", (4, 80, 64), (1, 16, 64), (1, 36, 0), 128),
        cut=(slice(0, 4, 2), slice(0, 80, 2)),
    ),
    Tile(
        *("of a projection", (2, 40, 9, 64), (1, 1, 32, 64), (1, 2, 20, 0), 128),
        cut=(ALL, ALL, slice(3, 6)),
        turn=(0, 2, 1, 3),
    ),
)
