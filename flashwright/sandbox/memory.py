"""Memory that the judge owns: a candidate's tensors lie in it, and nobody else is asked for them.

The judge makes it and hands the candidate's process a descriptor. On the CPU it is a file without a
name, on a GPU an allocation of the driver's virtual memory management, which needs no trust between
the two: the judge fills inputs and poison, and reads the answer in a context of its own, whatever
the candidate's process says or has become.
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
"""Bytes on the CPU: only those that are written take memory."""
GPU_ROOM, GPU_SHARE = 2 << 30, 32
"""Bytes on a GPU, and at most which part of its memory: ten outputs of a benchmark's cell. Whoever
needs more is started again with more."""


class Short(Exception):
    """There is less memory than was there: the candidate has taken it away."""


class Memory(Protocol):
    """What the judge does with it."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def handle(self) -> int:
        """The descriptor that the candidate's process inherits."""

    def write(self, at: int, bits: Array) -> None:
        """Put bytes there."""

    def read(self, at: int, size: int) -> Array:
        """The bytes that are there now."""

    def close(self) -> None:
        """Give it back; the candidate's process keeps its own until it ends."""


def make(device: str, size: int = 0) -> Memory:
    """Memory on the CPU or on the GPU, of at least that many bytes or of the usual size."""
    if device == "cpu":
        return HostMemory(max(size, HOST_ROOM))
    try:
        return GpuMemory(size)
    except OSError as error:
        text = f"this GPU's driver does not share memory between processes ({error})"
        hint = "the judge owns the memory that a candidate writes to, and reads it itself"
        raise Failed(Diagnostic("FW851", text, help=hint)) from None


def mapped(device: str, handle: int, size: int) -> Any:
    """In the candidate's process: all of it as bytes, a NumPy array or a tensor."""
    if device == "cpu":
        return np.frombuffer(mmap.mmap(handle, size), np.uint8)
    import torch

    torch.cuda.init()
    return torch.as_tensor(_Bytes(_Driver.here().imported(handle, size), size), device="cuda")


# --- on the CPU -------------------------------------------------------------------------------


class HostMemory:
    """A file without a name. The judge does not map it: it could be made shorter at any time."""

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("flashwright")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        os.ftruncate(self.handle, size)

    def write(self, at: int, bits: Array) -> None:
        """See Memory."""
        left = np.ascontiguousarray(bits).data
        while left:
            done = os.pwrite(self.handle, left, at)
            left, at = left[done:], at + done

    def read(self, at: int, size: int) -> Array:
        """See Memory; Short where it is not all there."""
        found = np.empty(size, np.uint8)
        into = found.data
        while into:
            done = os.preadv(self.handle, [into], at)
            if not done:
                raise Short
            into, at = into[done:], at + done
        return found

    def close(self) -> None:
        """See Memory."""
        with contextlib.suppress(OSError):
            os.close(self.handle)


# --- on a GPU ---------------------------------------------------------------------------------


class GpuMemory:
    """An allocation of the driver's, mapped here and, by its descriptor, in the other process."""

    def __init__(self, size: int) -> None:
        self._driver = _Driver.here()
        self.size, self._made, self.handle = self._driver.shared(size)
        self._address = self._driver.map(self._made, self.size)

    def write(self, at: int, bits: Array) -> None:
        """See Memory."""
        flat = np.ascontiguousarray(bits)
        if flat.nbytes:
            self._driver.to_device(self._address + at, flat)

    def read(self, at: int, size: int) -> Array:
        """See Memory."""
        found = np.empty(size, np.uint8)
        if size:
            self._driver.to_host(found, self._address + at)
        return found

    def close(self) -> None:
        """See Memory."""
        if self.handle >= 0:
            os.close(self.handle)
            self._driver.unmap(self._made, self._address, self.size)
            self.handle = -1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _BY_DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3


@dataclass(frozen=True)
class _Bytes:
    """What PyTorch wants to know of memory that somebody else has made."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 3}


class _Driver:
    """The driver's functions for memory, in the first GPU's own context, which PyTorch uses too."""

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
        """The one of this process."""
        return _Driver()

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._cuda, name)
        if result := function(*arguments):
            raise OSError(f"{name}: {error_name(self._cuda, result)}")

    def _in_context(self, name: str, *arguments: Any) -> None:
        """Threads have no context until they are given one."""
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
        """An address for it."""
        address, zero, whole = ctypes.c_ulonglong(), ctypes.c_ulonglong(0), ctypes.c_size_t(size)
        access = _Access(self._place, _READ_WRITE)
        self._in_context(
            "cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), zero, zero
        )
        self._call("cuMemMap", address, whole, ctypes.c_size_t(0), ctypes.c_ulonglong(made), zero)
        self._call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def unmap(self, made: int, address: int, size: int) -> None:
        """Give the address and the memory back."""
        place, whole = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        self._in_context("cuMemUnmap", place, whole)
        self._call("cuMemAddressFree", place, whole)
        self._call("cuMemRelease", ctypes.c_ulonglong(made))

    def to_device(self, address: int, bits: Array) -> None:
        """Copy, and wait until it is there."""
        size = ctypes.c_size_t(bits.nbytes)
        self._in_context(
            "cuMemcpyHtoD_v2", ctypes.c_ulonglong(address), ctypes.c_void_p(bits.ctypes.data), size
        )
        self._call("cuCtxSynchronize")

    def to_host(self, into: Array, address: int) -> None:
        """Copy back."""
        size = ctypes.c_size_t(into.nbytes)
        self._in_context(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(into.ctypes.data), ctypes.c_ulonglong(address), size
        )
