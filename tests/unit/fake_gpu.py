"""A GPU that is not there: a fake driver, and NumPy memory that says it lies on a CUDA device.

The launcher is the real one. It finds fake_cuda.c compiled as libcuda.so.1, which remembers what it
was asked to launch.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

CUDA, CPU = 2, 1
CODES = {"float16": (2, 16), "float32": (2, 32), "int32": (0, 32), "bfloat16": (4, 16)}
SOURCE = Path(__file__).with_name("fake_cuda.c")


def build(folder: Path) -> None:
    """Compile the fake driver into a folder, to be put on LD_LIBRARY_PATH."""
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
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
        ("parameters", ctypes.c_ubyte * 512),
    ]


class Driver:
    """What the fake driver has seen, and what it shall do."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_last.restype = ctypes.POINTER(Launch)

    def count(self, what: str) -> int:
        return int(self.library.fake_count(what.encode()))

    def set(self, what: str, value: int) -> None:
        self.library.fake_set(what.encode(), value)

    @property
    def last(self) -> Launch:
        return self.library.fake_last().contents

    def parameters(self, layout: str) -> tuple[int, ...]:
        """The parameters of the last launch, by a format of the struct module."""
        size = struct.calcsize("=" + layout)
        return struct.unpack("=" + layout, bytes(self.last.parameters[:size]))
