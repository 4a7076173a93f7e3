"""A snippet on the GPU: the CUDA driver alone, by ctypes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.hardware.snippet import MAP, Prepared, Tensor, module

LIBRARY = "libcuda.so.1"
_ERROR_LOG, _ERROR_LOG_SIZE = 5, 6  # CU_JIT_ERROR_LOG_BUFFER and its size
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_LOG = 8192
_TYPES = {1: 0, 2: 6, 4: 7}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _FLOAT16, _FLOAT32
_SWIZZLES = ("none", "32B", "64B", "128B")
_FILLS = ("zeros", "nan")
_SIGNATURES = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadDataEx": (c_void_p, c_char_p, c_uint, c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_char_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_char_p, c_uint64, c_size_t),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (
        *(c_void_p, c_int, c_uint, c_uint64),
        *(c_void_p,) * 4,
        *(c_int,) * 4,
    ),
    "cuGetErrorName": (c_int, c_void_p),
}


class GpuError(Exception):
    """The driver says no."""


class Gpu:
    """The first GPU."""

    def __init__(self, library: str = LIBRARY) -> None:
        self.cuda = ctypes.CDLL(library)
        for name, types in _SIGNATURES.items():
            getattr(self.cuda, name).argtypes = types
        self._do("cuInit", 0)
        self.device, context, version = c_int(), c_void_p(), c_int()
        self._do("cuDeviceGet", byref(self.device), 0)
        self._do("cuDriverGetVersion", byref(version))
        self._do("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self._do("cuCtxSetCurrent", context)
        called = ctypes.create_string_buffer(256)
        self._do("cuDeviceGetName", called, len(called), self.device)
        arch = f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        self.description = f"{called.value.decode()} ({arch}), driver of CUDA {driver}"

    def _attribute(self, which: int) -> int:
        value = c_int()
        self._do("cuDeviceGetAttribute", byref(value), which, self.device)
        return value.value

    def _do(self, name: str, *arguments: object) -> None:
        result = getattr(self.cuda, name)(*arguments)
        if result:
            text = c_char_p()
            self.cuda.cuGetErrorName(result, byref(text))
            said = (text.value or b"error %d" % result).decode()
            raise GpuError(f"{name}: {said}")

    def load(self, many: Sequence[Prepared]) -> c_void_p:
        """A module of these kernels, which are all of one architecture."""
        first = many[0].snippet
        text = module(first.arch, first.version, [one.kernel for one in many]).encode()
        log = ctypes.create_string_buffer(_LOG)
        options = (c_int * 2)(_ERROR_LOG, _ERROR_LOG_SIZE)
        values = (c_void_p * 2)(ctypes.cast(log, c_void_p), c_void_p(_LOG))
        loaded = c_void_p()
        try:
            self._do("cuModuleLoadDataEx", byref(loaded), text, 2, options, values)
        except GpuError as error:
            said = " ".join(log.value.decode(errors="replace").split())[:300]
            raise GpuError(f"{error} {said}") from None
        return loaded

    def run(self, loaded: c_void_p, one: Prepared) -> bytes:
        """The bytes of the results."""
        function = c_void_p()
        self._do("cuModuleGetFunction", byref(function), loaded, one.snippet.entry.encode())
        given, taken = self._memory(len(one.data)), self._memory(one.size)
        try:
            if one.data:
                self._do("cuMemcpyHtoD_v2", given, one.data, len(one.data))
            self._do("cuMemsetD8_v2", taken, 0, max(one.size, 1))
            self._launch(function, one, given.value, taken.value)
            self._do("cuCtxSynchronize")
            found = ctypes.create_string_buffer(max(one.size, 1))
            self._do("cuMemcpyDtoH_v2", found, taken, one.size)
            return found.raw[: one.size]
        finally:
            for memory in (given, taken):
                self.cuda.cuMemFree_v2(memory)

    def _memory(self, size: int) -> c_uint64:
        pointer = c_uint64()
        self._do("cuMemAlloc_v2", byref(pointer), max(size, 256))
        return pointer

    def _launch(self, function: c_void_p, one: Prepared, given: int, taken: int) -> None:
        snippet = one.snippet
        more = snippet.parameters or b"\0"
        if snippet.tensor:
            more = self._map(snippet.tensor, taken if snippet.tensor.of_results else given)
        # Each parameter lies in memory of its own; the map's is as aligned as the driver wants it.
        texts = [struct.pack("<Q", given), struct.pack("<Q", taken), more]
        buffers = [ctypes.create_string_buffer(text, len(text)) for text in texts]
        pointers = (c_void_p * 3)(*(ctypes.addressof(b) for b in buffers))
        grid, block = (one.trials, 1, 1), (snippet.threads, 1, 1)
        self._do("cuLaunchKernel", function, *grid, *block, 0, None, pointers, None)

    def _map(self, tensor: Tensor, base: int) -> bytes:
        rank = len(tensor.sizes)
        room = ctypes.create_string_buffer(MAP + 64)
        place = -(-ctypes.addressof(room) // 64) * 64
        self._do(
            "cuTensorMapEncodeTiled",
            *(place, _TYPES[tensor.element_bytes], rank, base),
            (c_uint64 * rank)(*tensor.sizes),
            (c_uint64 * max(rank - 1, 1))(*tensor.strides),
            (c_uint * rank)(*tensor.box),
            (c_uint * rank)(*[1] * rank),
            *(0, _SWIZZLES.index(tensor.swizzle), 0, _FILLS.index(tensor.fill)),
        )
        return ctypes.string_at(place, MAP)
