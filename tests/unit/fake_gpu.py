"""A GPU that is not there: a fake driver, and NumPy memory that says it lies on a CUDA device.

The launcher is the real one. It finds fake_cuda.c compiled as libcuda.so.1, which remembers what it
was asked to launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.build.load import Kernel
from flashwright.lower.launch_plan import LaunchPlan, PlanAxis, PlanTensor

CUDA, CPU = 2, 1
CODES = {"float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16)}
CODES |= {"int32": (0, 32), "int8": (0, 8)}
MAP_SETTINGS = ("type", "interleave", "swizzle", "promotion", "fill")
SOURCE = Path(__file__).with_name("fake_cuda.c")


def build(folder: Path, *flags: str) -> None:
    """Compile the fake driver into a folder, to be put on LD_LIBRARY_PATH."""
    command = ["cc", "-shared", "-fPIC", *flags, "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
    subprocess.run(command, check=True)


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", DLTensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Tensor:
    """NumPy memory, said to be on a CUDA device."""

    def __init__(
        self, array: np.ndarray, device: tuple[int, int] = (CUDA, 0), dtype: str = ""
    ) -> None:
        self.array, self.device = array, device
        self.code, self.bits = CODES[dtype or array.dtype.name]
        self.shape = array.shape

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **settings: Any) -> Any:
        n = self.array.ndim
        shape, strides = (ctypes.c_int64 * n)(*self.shape), (ctypes.c_int64 * n)(*self.strides)
        tensor = DLTensor(self.address, *self.device, n, self.code, self.bits, 1, shape, strides, 0)
        self.kept = (DLManagedTensor(tensor, None, None), shape, strides)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.byref(self.kept[0]), b"dltensor", None)


def tensor(*shape: int, dtype: str = "float16", **settings: Any) -> Tensor:
    return Tensor(
        np.zeros(shape, "uint16" if dtype == "bfloat16" else dtype), dtype=dtype, **settings
    )


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("parameters", ctypes.c_ubyte * 1024),
    ]


class Map(ctypes.Structure):
    """What the driver was asked to encode, the last axis first."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("steps", ctypes.c_uint32 * 5),
        *((name, ctypes.c_int) for name in MAP_SETTINGS),
    ]


class Driver:
    """What the fake driver has seen, and what it shall do."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_last.restype = ctypes.POINTER(Launch)
        self.library.fake_maps.restype = ctypes.POINTER(Map)
        self.library.fake_zeros.restype = ctypes.c_void_p

    def count(self, what: str) -> int:
        return int(self.library.fake_count(what.encode()))

    def set(self, what: str, value: int) -> None:
        self.library.fake_set(what.encode(), value)

    @property
    def last(self) -> Launch:
        return self.library.fake_last().contents

    def map(self, number: int) -> Map:
        """One of the last launch."""
        return self.library.fake_maps()[number]

    @property
    def zeros(self) -> int:
        """Where the driver's zeros are."""
        return int(self.library.fake_zeros())

    def parameters(self, layout: str) -> tuple[int, ...]:
        """The parameters of the last launch, by a format of the struct module."""
        size = struct.calcsize("=" + layout)
        return struct.unpack("=" + layout, bytes(self.last.parameters[:size]))


# --- a plan and its tensors -------------------------------------------------------------------

SHARED, THREADS = 70_000, 128
_CUDA_MACHINE, _ABI = 190, 8


def cubin(version: int = 80) -> bytes:
    """The header of a cubin for sm_VERSION, with nothing behind it."""
    magic = b"\x7fELF" + bytes((2, 1, 1, 0x41, _ABI)) + bytes(7)
    numbers = (2, _CUDA_MACHINE, 1, 0, 0, 0, version << 8, 64, 56, 0, 64, 0, 0)
    return magic + struct.pack("<HHIQQQIHHHHHH", *numbers)


def plan_tensor(name: str, axes: str, dtype: str = "fp16", **settings: Any) -> PlanTensor:
    """`axes` is like "B:batch H:heads L:q_len D:64"."""
    found = []
    for part in axes.split():
        label, size = part.split(":")
        tokens = tuple(int(t) if t.lstrip("-").isdecimal() else t for t in size.split(","))
        found.append(PlanAxis(label=label, size=tokens))
    usual = {"read": name not in ("O", "LSE"), "written": name in ("O", "LSE"), "vector": 1}
    return PlanTensor(name=name, dtype=dtype, axes=tuple(found), **{**usual, **settings})


ATTENTION = (
    plan_tensor("Q", "B:batch H:heads L:q_len D:64", vector=8),
    plan_tensor("K", "B:batch H:kv_heads L:kv_len D:64", vector=8),
    plan_tensor("V", "B:batch H:kv_heads L:kv_len D:64", vector=8),
    plan_tensor("Slopes", "H:heads", "fp32"),
    plan_tensor("O", "B:batch H:heads L:q_len D:64", vector=8),
    plan_tensor("LSE", "B:batch H:heads L:q_len", "fp32"),
)
DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len")
FORMAT = "P4q P4q P4q P1q P4q P3q 5i4x".replace(" ", "").replace("P", "Q")
GRID = (("q_len", 128, "ceil_div"), ("heads",), ("batch",))


def make_plan(**changes: Any) -> LaunchPlan:
    settings: dict[str, Any] = {
        "entry": "attention",
        "arch": "sm_80",
        "threads": THREADS,
        "shared": SHARED,
        "grid": GRID,
        "dims": DIMS,
        "tensors": ATTENTION,
    }
    return LaunchPlan(**{**settings, **changes})


def kernel(**changes: Any) -> Kernel:
    return Kernel(make_plan(**changes), b"\x7fELF", b".version 8.0")


def inputs(batch: int = 2, heads: int = 6, kv_heads: int = 3, q: int = 300, k: int = 77) -> Any:
    """Q, K, V and Slopes."""
    kv = [tensor(batch, kv_heads, k, 64) for _ in range(2)]
    return [tensor(batch, heads, q, 64), *kv, tensor(heads, dtype="float32")]


def outputs(batch: int = 2, heads: int = 6, q: int = 300) -> dict[str, Tensor]:
    return {"O": tensor(batch, heads, q, 64), "LSE": tensor(batch, heads, q, dtype="float32")}


# --- the process with the fake driver ---------------------------------------------------------


@contextlib.contextmanager
def process(folder: Path, *flags: str) -> Iterator[ProcessPoolExecutor]:
    """One that finds the fake driver, compiled into a folder with these flags."""
    build(folder, *flags)
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            executor.submit(os.getpid).result()  # it starts only now
            yield executor
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before


def on_fake_gpu(body: Callable[[], None]) -> Callable[[ProcessPoolExecutor], None]:
    """A test that runs in the process that the fixture `pool` gives."""

    def test(pool: ProcessPoolExecutor) -> None:
        pool.submit(_run, body.__module__, body.__name__).result()

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    test.body = body  # type: ignore[attr-defined]
    return test


def _run(module: str, name: str) -> None:
    driver = Driver()
    driver.set("size", struct.calcsize("=" + FORMAT))
    for switch in ("refuse_cubin", "fail_launch", "fail_ptx", "fail_map", "fail_pool"):
        driver.set(switch, 0)
    driver.set("max_threads", 1024)
    getattr(importlib.import_module(module), name).body()


def refused(kind: type[Exception], *words: str) -> Any:
    """A complaint that says all of this; and nothing was launched."""
    return pytest.raises(kind, match=".*".join(map(re.escape, words)))
