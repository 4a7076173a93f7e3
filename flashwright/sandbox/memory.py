"""Memory that the judge owns and that holds a candidate's tensors.

The judge allocates it and gives the candidate's process a descriptor. On the CPU it is an unnamed
file, on a GPU an allocation of the driver's virtual memory management. The judge writes inputs and
poison and reads the answer in its own context, so it needs no cooperation of the candidate.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashwright.build.driver import LIBRARY, error_name
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.tensors import Array

HOST_ROOM = 16 << 30
"""Bytes on the CPU. Only written pages take memory."""
GPU_ROOM, GPU_SHARE = 2 << 30, 32
"""Bytes on a GPU, at most 1 / GPU_SHARE of its memory: room for ten outputs of a benchmark. A
candidate that needs more is started again with more."""


class Short(Exception):
    """The candidate has truncated the memory."""


class Memory(Protocol):
    """The judge's operations on the memory."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    @property
    def handle(self) -> int:
        """The descriptor that the candidate's process inherits."""

    def write(self, at: int, bits: Array) -> None:
        """Copy `bits` to the byte offset `at`."""

    def read(self, at: int, size: int) -> Array:
        """A copy of `size` bytes from the offset `at`. Raises Short if they are not there."""

    def close(self) -> None:
        """Release it. The candidate's process keeps its mapping until it ends."""


def make(device: str, size: int = 0) -> Memory:
    """Memory on the CPU or the GPU, of at least `size` bytes and at least the usual size.

    Raises Failed with FW851 if the GPU's driver cannot share memory.
    """
    if device == "cpu":
        return HostMemory(max(size, HOST_ROOM))
    try:
        return GpuMemory(size)
    except OSError as error:
        text = f"this GPU's driver does not share memory between processes ({error})"
        hint = "the judge owns the memory that a candidate writes to, and reads it itself"
        raise Failed(Diagnostic("FW851", text, help=hint)) from None


def mapped(device: str, handle: int, size: int) -> Any:
    """In the candidate's process: the whole memory as bytes, a NumPy array or a tensor."""
    if device == "cpu":
        return np.frombuffer(mmap.mmap(handle, size), np.uint8)
    import torch

    torch.cuda.init()
    return torch.as_tensor(_Bytes(_Driver.here().imported(handle, size), size), device="cuda")


# --- on the CPU -------------------------------------------------------------------------------


class HostMemory:
    """An unnamed file. The judge does not map it, as the candidate could truncate it."""

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("flashwright")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        os.ftruncate(self.handle, size)

    def write(self, at: int, bits: Array) -> None:
        """Write to the file at an offset."""
        left = np.ascontiguousarray(bits).data
        while left:
            done = os.pwrite(self.handle, left, at)
            left, at = left[done:], at + done

    def read(self, at: int, size: int) -> Array:
        """Read from the file. Raises Short if it was truncated."""
        found = np.empty(size, np.uint8)
        into = found.data
        while into:
            done = os.preadv(self.handle, [into], at)
            if not done:
                raise Short
            into, at = into[done:], at + done
        return found

    def close(self) -> None:
        """Close the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self.handle)


# --- on a GPU ---------------------------------------------------------------------------------


class GpuMemory:
    """A driver allocation, mapped in this process and, by its descriptor, in the candidate's."""

    def __init__(self, size: int) -> None:
        self._driver = _Driver.here()
        self.size, self._made, self.handle = self._driver.shared(size)
        self._address = self._driver.map(self._made, self.size)

    def write(self, at: int, bits: Array) -> None:
        """Copy to the GPU."""
        flat = np.ascontiguousarray(bits)
        if flat.nbytes:
            self._driver.to_device(self._address + at, flat)

    def read(self, at: int, size: int) -> Array:
        """Copy from the GPU."""
        found = np.empty(size, np.uint8)
        if size:
            self._driver.to_host(found, self._address + at)
        return found

    def close(self) -> None:
        """Close the descriptor, unmap and release the memory."""
        if self.handle >= 0:
            os.close(self.handle)
            self._driver.unmap(self._made, self._address, self.size)
            self.handle = -1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """The driver's struct CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """The driver's struct CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _BY_DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3


@dataclass(frozen=True)
class _Bytes:
    """An address and a size in the form in which PyTorch takes foreign memory."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 3}


class _Driver:
    """The driver's memory functions, in the first GPU's primary context, as PyTorch uses it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._device = device.value
        self._place = _Location(_ON_DEVICE, self._device)

    @staticmethod
    @functools.cache
    def here() -> _Driver:
        """The single instance of this process."""
        return _Driver()

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._cuda, name)
        if result := function(*arguments):
            raise OSError(f"{name}: {error_name(self._cuda, result)}")

    def _in_context(self, name: str, *arguments: Any) -> None:
        """Call a function with the context current: a new thread has none."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *arguments)

    def shared(self, size: int) -> tuple[int, int, int]:
        """Memory that another process can map: its size, its handle here, its descriptor."""
        wanted = _Allocation(_PINNED, _BY_DESCRIPTOR, self._place)
        granule, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), self._device)
        size = max(size, min(GPU_ROOM, total.value // GPU_SHARE))
        made, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
        self._in_context(
            "cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(wanted), 0
        )
        whole = -(-size // granule.value) * granule.value
        self._call(
            "cuMemCreate",
            ctypes.byref(made),
            ctypes.c_size_t(whole),
            ctypes.byref(wanted),
            ctypes.c_ulonglong(0),
        )
        self._call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            made,
            _BY_DESCRIPTOR,
            ctypes.c_ulonglong(0),
        )
        return whole, made.value, descriptor.value

    def imported(self, descriptor: int, size: int) -> int:
        """The address here of memory that another process made."""
        made = ctypes.c_ulonglong()
        self._in_context(
            "cuMemImportFromShareableHandle",
            ctypes.byref(made),
            ctypes.c_void_p(descriptor),
            _BY_DESCRIPTOR,
        )
        return self.map(made.value, size)

    def map(self, made: int, size: int) -> int:
        """Map an allocation and return its address."""
        address, zero, whole = ctypes.c_ulonglong(), ctypes.c_ulonglong(0), ctypes.c_size_t(size)
        access = _Access(self._place, _READ_WRITE)
        self._in_context(
            "cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), zero, zero
        )
        self._call("cuMemMap", address, whole, ctypes.c_size_t(0), ctypes.c_ulonglong(made), zero)
        self._call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def unmap(self, made: int, address: int, size: int) -> None:
        """Unmap the address and release the memory."""
        place, whole = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        self._in_context("cuMemUnmap", place, whole)
        self._call("cuMemAddressFree", place, whole)
        self._call("cuMemRelease", ctypes.c_ulonglong(made))

    def to_device(self, address: int, bits: Array) -> None:
        """Copy host bytes to the device and wait."""
        size = ctypes.c_size_t(bits.nbytes)
        self._in_context(
            "cuMemcpyHtoD_v2", ctypes.c_ulonglong(address), ctypes.c_void_p(bits.ctypes.data), size
        )
        self._call("cuCtxSynchronize")

    def to_host(self, into: Array, address: int) -> None:
        """Copy device bytes into a host array and wait."""
        size = ctypes.c_size_t(into.nbytes)
        self._in_context(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(into.ctypes.data), ctypes.c_ulonglong(address), size
        )
