"""The arguments of a launch: checked against the kernel's C++ types, and as the bytes it takes."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, SupportsFloat, SupportsIndex

import ml_dtypes
import numpy as np

from flashwright.emulate.device_memory import (
    Address,
    Array,
    Memory,
    Placeable,
    Stored,
    Struct,
    TensorMap,
    UsedArray,
    as_array,
    contiguous,
    pointer_bytes,
)
from flashwright.emulate.ptx import Variable
from flashwright.emulate.signature import KernelSignature, ParameterSignature, cut

_POINTER_BYTES = 8
_REALS = {2: "<e", 4: "<f", 8: "<d"}
# The first is what a message recommends. NumPy has no names for some types: bits will do for them.
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float": ("float32",),
        "double": ("float64",),
        "bool": ("bool",),
        "char": ("int8", "uint8"),
        "signed char": ("int8",),
        "unsigned char": ("uint8", "bool"),
        "short": ("int16",),
        "unsigned short": ("uint16",),
        "int": ("int32",),
        "unsigned int": ("uint32",),
        "long": ("int64",),
        "unsigned long": ("uint64",),
        "long long": ("int64",),
        "unsigned long long": ("uint64",),
        "__half": ("float16",),
        "cutlass::half_t": ("float16",),
        "__nv_bfloat16": ("bfloat16", "uint16"),
        "cutlass::bfloat16_t": ("bfloat16", "uint16"),
        "__nv_fp8_e4m3": ("float8_e4m3fn", "uint8"),
        "__nv_fp8_e5m2": ("float8_e5m2", "uint8"),
        "cutlass::float_e4m3_t": ("float8_e4m3fn", "uint8"),
        "cutlass::float_e5m2_t": ("float8_e5m2", "uint8"),
        "cutlass::tfloat32_t": ("float32",),
        "__half2": ("float16",),
        "__nv_bfloat162": ("bfloat16", "uint16"),
    }
)
"""The dtypes of arrays that a pointer to a type takes."""
_VECTOR = re.compile(r"(u?(?:char|short|int|long|longlong)|float|double)[1234]")
_VECTOR_OF = {"uchar": "uint8", "ushort": "uint16", "uint": "uint32", "ulong": "uint64"}
_VECTOR_OF |= {"char": "int8", "short": "int16", "int": "int32", "long": "int64"}
_VECTOR_OF |= {"ulonglong": "uint64", "longlong": "int64", "float": "float32", "double": "float64"}
_COMPLEX = {"float2": "complex64", "double2": "complex128"}
_NARROW = {
    "__half": np.dtype(np.float16),
    "cutlass::half_t": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "cutlass::bfloat16_t": np.dtype(ml_dtypes.bfloat16),
}
"""Numbers of 16 bits that a kernel takes by value."""


@dataclass(frozen=True)
class Empty:
    """An array of which a launch may read only what it has written before."""

    array: Array


@dataclass(frozen=True)
class PackedArguments:
    """The arguments of a launch."""

    parameters: bytes
    used: tuple[UsedArray, ...]
    """The arrays that they point to."""


def pack(
    kernel: KernelSignature, variables: Sequence[Variable], args: Sequence[Any], memory: Memory
) -> PackedArguments:
    """Check the arguments, place their arrays in memory, and pack them.

    Raises TypeError or ValueError for one that does not fit its parameter.
    """
    if len(args) != len(variables):
        text = f"{kernel.shown} takes {len(variables)} arguments, and {len(args)} are given"
        raise TypeError(text)
    known = kernel.parameters or (ParameterSignature(),) * len(variables)
    taken = [
        _Parameter(number, one, variable).taken(value)
        for number, (one, variable, value) in enumerate(zip(known, variables, args, strict=True))
    ]
    used = [
        array
        for number, (one, value) in enumerate(zip(known, taken, strict=True))
        if not isinstance(value, bytes)
        for array in value.used(one.name or f"argument {number}")
    ]
    memory.place(used)
    packed = b""
    for variable, value in zip(variables, taken, strict=True):
        data = value if isinstance(value, bytes) else value.packed(memory)
        packed = packed.ljust(-(-len(packed) // variable.align) * variable.align, b"\0")
        packed += data.ljust(variable.size, b"\0")
    return PackedArguments(packed, tuple(used))


@dataclass(frozen=True)
class _Parameter:
    """A parameter, and the checks of a value for it."""

    number: int
    signature: ParameterSignature
    variable: Variable

    @property
    def name(self) -> str:
        """For messages: argument 4 (`n`)."""
        own = f" (`{self.signature.name}`)" if self.signature.name else ""
        return f"argument {self.number}{own}"

    @property
    def type(self) -> str:
        return self.signature.type.text if self.signature.type else ""

    @property
    def shown(self) -> str:
        """The type for messages."""
        return cut(self.type)

    @property
    def pointee(self) -> str | None:
        return self.signature.type.pointee if self.signature.type else None

    def taken(self, value: Any) -> bytes | Placeable:
        """The value as bytes, or as a value whose addresses are not known yet."""
        value = as_array(value)
        if isinstance(value, Empty):
            value = Address(contiguous(as_array(value.array), self.name), empty=True)
        if isinstance(value, np.ndarray) and value.ndim:
            if self.pointee is None and value.nbytes == self.variable.size > _POINTER_BYTES:
                return value.tobytes()  # a vector such as float4
            self._check_is_pointer()
            value = Address(contiguous(value, self.name))
        if isinstance(value, Address):
            return self._pointed(value)
        if isinstance(value, Struct | TensorMap) and self.pointee is not None:
            return Stored(value)
        if isinstance(value, TensorMap) and self.variable.size > value.size:
            value = Struct(bytes(self.variable.size), ((0, "", value),))  # CuTe's TMA atoms
        if isinstance(value, Stored | Struct | TensorMap):
            self._check_size(value.size)
            return value
        if self.pointee is not None and not isinstance(value, bytes | bytearray):
            return pointer_bytes(f"{self.name} is {self.shown}, and the value", value)
        return value_bytes(self.name, value, self.variable, self.type)

    def _pointed(self, value: Address) -> Address:
        self._check_is_pointer()
        self._check_dtype(value.array)
        if self.signature.type is not None and self.signature.type.reads_only:
            return replace(value, written=False)
        return value

    def _check_is_pointer(self) -> None:
        if self.variable.size != _POINTER_BYTES:
            takes = f"{self.shown}, " if self.type else ""
            text = f"the kernel takes {takes}{self.variable.size} bytes"
            raise TypeError(f"{self.name} is an array, but {text}")
        if self.pointee is None and (self.type in DTYPES or self.variable.real):
            raise TypeError(
                f"{self.name} is an array, but the kernel takes a number ({self.shown})"
            )

    def _check_dtype(self, array: Array) -> None:
        wanted = dtypes_of(self.pointee or "void", array.dtype)
        if not wanted or array.dtype.name in wanted:
            return
        text = f"{self.name} is {self.shown}, and the array is {array.dtype.name}"
        same = np.dtype(wanted[0]).itemsize == array.itemsize if wanted else False
        way = ".view" if same else ".astype"
        raise TypeError(f"{text}: give one of {wanted[0]}, such as {way}({wanted[0]!r})")

    def _check_size(self, size: int) -> None:
        room, align = self.variable.size, self.variable.align
        if not room - align < size <= room:  # a struct may be padded at its end
            takes = f"is {self.shown}, " if self.type else "has "
            raise TypeError(f"{self.name} {takes}{room} bytes, and {size} bytes are given")


def dtypes_of(pointee: str, given: np.dtype[Any]) -> tuple[str, ...]:
    """The dtypes that a pointer to a C++ type takes; none if it takes any."""
    if pointee in DTYPES:
        return DTYPES[pointee]
    if pointee.endswith("*"):  # device pointers
        return ("uint64",)
    vector = _VECTOR.fullmatch(pointee)
    if vector is None or given.names:
        return ()
    return (_VECTOR_OF[vector[1]], *filter(None, [_COMPLEX.get(pointee)]))


# --- values -----------------------------------------------------------------------------------


def value_bytes(name: str, value: Any, variable: Variable, type: str = "") -> bytes:
    """A value as the bytes of a parameter or a variable. `type`: its C++ type, if it is known.

    Raises TypeError for a value that does not fit.
    """
    if isinstance(value, np.ndarray):
        value = value[()]
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        value = value.item()
    data = _raw(value)
    if data is not None:
        return _sized(name, data, variable, type)
    if type in _NARROW and isinstance(value, SupportsFloat):
        return np.array(float(value), _NARROW[type]).tobytes()
    if variable.real and isinstance(value, SupportsFloat) and variable.size in _REALS:
        return _real(name, float(value), variable.size)
    if not variable.real and isinstance(value, SupportsIndex):
        return _whole(name, int(value), variable.size, type)
    kind = "floating-point number" if variable.real else "whole number"
    text = f"{name} is {value!r}, which is no {kind} of {variable.size} bytes"
    raise TypeError(text + (f" ({cut(type)})" if type else ""))


def _raw(value: Any) -> bytes | None:
    """The bytes of a struct; None for a number."""
    if isinstance(value, np.void):
        return value.tobytes()
    if isinstance(value, bytes | bytearray | ctypes.Structure):
        return bytes(value)
    return None


def _sized(name: str, data: bytes, variable: Variable, type: str) -> bytes:
    room, align = variable.size, variable.align
    if not room - align < len(data) <= room or (align == room and len(data) != room):
        takes = f"is {cut(type)}, " if type else "has "
        raise TypeError(f"{name} {takes}{room} bytes, and {len(data)} bytes are given")
    return data.ljust(room, b"\0")


def _real(name: str, value: float, size: int) -> bytes:
    try:
        return struct.pack(_REALS[size], value)
    except OverflowError:
        text = f"{name} is {value!r}, which is too large for a number of {size} bytes"
        raise TypeError(text) from None


def _whole(name: str, value: int, size: int, type: str) -> bytes:
    bits = 8 * size
    least, most = -(1 << bits - 1), (1 << bits) - 1
    if type == "bool":
        least, most = 0, 1
    elif type in DTYPES:
        least = 0 if type.startswith("unsigned") else least
        most = most if type.startswith("unsigned") or type == "char" else most >> 1
    if not least <= value <= most:
        kind = f"whole number of {size} bytes" + (f" ({cut(type)})" if type else "")
        raise TypeError(f"{name} is {value!r}, which is no {kind}: {least} to {most}")
    return (value % (1 << bits)).to_bytes(size, "little")
