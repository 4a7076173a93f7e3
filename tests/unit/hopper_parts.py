"""The emulator's wgmma and TMA parts by themselves, and where tiles should lie."""

from __future__ import annotations

import ctypes
import fcntl
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashwright

MACHINE = Path(flashwright.__file__).parent / "emulate" / "machine"
SOURCES = (
    MACHINE / "wgmma.cpp",
    MACHINE / "tensor_map.cpp",
    Path(__file__).with_name("emulate_hopper_shim.cpp"),
)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
COMPILER = shutil.which("g++") or shutil.which("c++") or ""
compiled = pytest.mark.skipif(not COMPILER, reason="no C++ compiler here")

SHARED = 1 << 18
SWIZZLES = ("none", "32B", "64B", "128B")
DESCRIPTOR_SWIZZLE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
NUMPY: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "tf32": np.float32,
    "f32": np.float32,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}


def name_of(n: int, types: tuple[str, str, str]) -> str:
    k = 32 // np.dtype(NUMPY[types[1]]).itemsize
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{'.'.join(types)}"


def pointer(array: np.ndarray | None) -> Any:
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


class Parts:
    """The parts, by what they take and give."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def shape(self, name: str) -> list[int] | None:
        out = (ctypes.c_int * 7)()
        return list(out) if self.library.shape_of(name.encode(), out) else None

    def chunks(self, name: str, descriptor: int, mn: bool, extent: int, rows: int = -1) -> Any:
        out = np.zeros(2 * 256, np.uint32)
        number = ctypes.c_uint64(descriptor)
        count = self.library.chunks_of(name.encode(), number, mn, extent, rows, pointer(out))
        return out[:count]

    def multiply(self, name: str, a: Any, b: Any, d: np.ndarray, **options: Any) -> None:
        """`a`: 4 registers, or bytes; whether it and b are MN-major in options."""
        accumulate, scales = options.get("accumulate", True), options.get("scales", (1, 1))
        registers = a if a.dtype == np.uint32 else None
        chunks = None if a.dtype == np.uint32 else a
        self.library.multiply(
            name.encode(),
            pointer(registers),
            pointer(chunks),
            options.get("a_mn", False),
            pointer(b),
            options.get("b_mn", False),
            accumulate,
            *scales,
            pointer(d),
        )

    def pieces(self, encoded: bytes, coordinate: Any, shared: int) -> list[tuple[int, ...]]:
        out = np.zeros((8192, 4), np.uint64)
        where = np.array(coordinate, np.int32)
        count = self.library.pieces_of(encoded, pointer(where), shared, pointer(out))
        assert 0 <= count <= len(out)
        return [tuple(map(int, row)) for row in out[:count]]

    def fill(self, encoded: bytes, count: int) -> bytes:
        out = np.full(count, 0xA5, np.uint8)
        self.library.fill_of(encoded, pointer(out), count)
        return out.tobytes()

    def load(self, encoded: bytes, data: np.ndarray, base: int, at: Any, to: int) -> np.ndarray:
        """Shared memory after a TMA load of the box; untouched bytes are 0xA5."""
        shared = np.full(SHARED, 0xA5, np.uint8)
        for target, source, count, inside in self.pieces(encoded, at, to):
            fill = np.frombuffer(self.fill(encoded, count), np.uint8)
            shared[target : target + count] = data[source - base :][:count] if inside else fill
        return shared


def build(factory: pytest.TempPathFactory) -> Parts:
    folder = factory.getbasetemp()
    if folder.name.startswith("popen-"):  # several workers: one of them compiles
        folder = folder.parent
    target = folder / "emulate_hopper_parts.so"
    with (folder / "emulate_hopper_parts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            sources = map(str, SOURCES)
            command = [COMPILER, *FLAGS, "-shared", f"-I{MACHINE}", *sources, "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert not done.returncode, done.stderr
    return Parts(ctypes.CDLL(str(target)))


# --- layouts, as CuTe writes them ---------------------------------------------------------------


def place(layout: Any, index: int) -> int:
    """In a nested layout, shapes and strides, the offset of `index`; the first mode runs first."""
    shape, stride = layout
    if isinstance(shape, int):
        return index * int(stride)
    total = 0
    for mode in zip(shape, stride, strict=True):
        size = math.prod(np.ravel(mode[0]))
        total += place(mode, index % size)
        index //= size
    return total


@dataclass(frozen=True)
class Tile:
    """An operand in shared memory: what a descriptor says."""

    start: int
    leading: int
    stride: int
    swizzle: str
    mn: bool
    base_offset: int = 0

    @property
    def descriptor(self) -> int:
        fields = self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return fields | self.base_offset << 49 | DESCRIPTOR_SWIZZLE[self.swizzle] << 62

    def addresses(self, extent: int, size: int) -> np.ndarray:
        """Of every element [row, k]; the canonical layouts of the PTX ISA, in elements."""
        t, k = 16 // size, 32 // size
        lead, step = self.leading // size, self.stride // size
        w = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[self.swizzle]
        rows: Any
        columns: Any
        if self.mn and w == 1:
            rows, columns = ((t, 1, 64), (1, t, step)), ((8, 8), (t, lead))
        elif self.mn:
            rows, columns = ((t, w, 64), (1, t, lead)), ((8, 8), (w * t, step))
        else:
            rows, columns = ((8, 64), (w * t, step)), ((t, 2), (1, lead if w == 1 else t))
        offsets = np.add.outer(
            [place(rows, i) for i in range(extent)], [place(columns, i) for i in range(k)]
        )
        return swizzle_of(self.start + offsets * size, self.swizzle, self.base_offset)


def swizzle_of(address: np.ndarray, swizzle: str, base_offset: int = 0) -> np.ndarray:
    """Lines of 128 bytes, as the CUDA guide has it: chunk x of line y goes to x ^ (y % ...)."""
    lines, chunk, rest = address // 128, address // 16 % 8, address % 16
    period = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[swizzle]
    return np.asarray(lines * 128 + (chunk ^ (lines - base_offset) % period) * 16 + rest)


def canonical(swizzle: str, mn: bool, extent: int, start: int = 0) -> Tile:
    """A tile with no gaps."""
    w = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[swizzle]
    if not mn:
        return Tile(start, 128 * (extent // 8), 128 * w, swizzle, mn)
    if w == 1:
        return Tile(start, 128 * (extent // 8), 128, swizzle, mn)
    return Tile(start, 256 * w, 128 * w, swizzle, mn)


def elements(chunks: np.ndarray, mn: bool, size: int) -> np.ndarray:
    """Addresses [row, k] of what the chunks hold, by the order that wgmma.h states."""
    t = 16 // size
    each = chunks[:, None] + np.arange(t) * size
    if not mn:
        return each.reshape(-1, 32 // size)
    return each.reshape(-1, 16, t).transpose(0, 2, 1).reshape(-1, 16)
