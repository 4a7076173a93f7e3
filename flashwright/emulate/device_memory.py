"""Device memory: the arrays that kernels reach, and values that contain their addresses."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashwright.emulate.emulate import GAP, behind
from flashwright.emulate.places import Extent
from flashwright.emulate.structs import EMPTY, READ, READ_WRITE, UNSET, Region
from flashwright.emulate.tensor_map import encode_tensor_map

Array = NDArray[Any]
_POINTER = struct.Struct("<Q")
_MAP_BYTES = 128
_ROOM = GAP // 4  # bytes that an allocation may grow at both ends


@dataclass(frozen=True)
class UsedArray:
    """An array that an argument points to."""

    name: str
    """Of the pointer, for messages."""
    array: Array
    written: bool = True
    """Whether the kernel may write to it."""
    empty: bool = False
    """Whether it is not set yet."""


class Placeable(Protocol):
    """A value with addresses, which are known when its arrays have their places."""

    @property
    def size(self) -> int:
        """In bytes."""

    def used(self, name: str) -> Iterator[UsedArray]:
        """The arrays that it points to; `name` is its own."""

    def packed(self, memory: Memory) -> bytes:
        """Its bytes, after its arrays were placed."""


# --- where arrays lie -------------------------------------------------------------------------


@dataclass
class _Allocation:
    """One piece of device memory. It grows if an overlapping array is given."""

    base: int
    """Its address for kernels."""
    start: int
    """Its address in this process."""
    size: int
    arrays: list[UsedArray]
    """Keep the memory alive."""
    slot: range
    """The addresses that it may grow into."""
    marks: NDArray[np.uint8] | None = None
    """Which bytes were written; None if all of them are set."""

    @property
    def end(self) -> int:
        return self.start + self.size

    def overlaps(self, start: int, end: int) -> bool:
        return self.start == start if start == end else self.start < end and start < self.end


class Memory:
    """Device memory that outlives a launch: each array keeps its address, and what kernels leave in
    it, also pointers, is there for the next."""

    def __init__(self) -> None:
        self._allocations: list[_Allocation] = []
        self._end = GAP

    def address(self, array: Array, offset: int = 0) -> int:
        """The address of an array's element `offset`, as kernels see it."""
        array = as_array(array)
        self.place([UsedArray("", array)])
        return self.find(array) + offset * array.itemsize

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """A new array that is allocated and not set: a read before a write is a finding."""
        array = np.zeros(shape, dtype)
        self.place([UsedArray("", array, empty=True)])
        return array

    def mark_written(self, array: Array) -> None:
        """Say that the host has set an array, of which a kernel may now read all."""
        start, end = _bounds(as_array(array))
        for one in self._allocations:
            if one.marks is not None and one.overlaps(start, end):
                one.marks[max(start - one.start, 0) : end - one.start] = 1

    def free(self, array: Array) -> None:
        """Remove an array: an access by an old pointer is out of bounds. No address is reused."""
        start, end = _bounds(as_array(array))
        left = [one for one in self._allocations if not one.overlaps(start, end)]
        if len(left) == len(self._allocations):
            raise ValueError("the array is not in this memory")
        self._allocations = left

    def find(self, array: Array) -> int:
        """The address of an array that was placed."""
        start, end = _bounds(array)
        found = next(one for one in self._allocations if one.overlaps(start, end))
        return found.base + array.ctypes.data - found.start

    def place(self, used: Sequence[UsedArray]) -> None:
        """Give addresses to arrays. Those that overlap keep their distance; others lie far apart,
        each at a multiple of 256 bytes. Raises ValueError if that is not possible any more."""
        for group in _overlapping(used):
            start = min(_bounds(one.array)[0] for one in group)
            end = max(_bounds(one.array)[1] for one in group)
            known = [one for one in self._allocations if one.overlaps(start, end)]
            if known:
                self._grow(known, start, end, group)
                continue
            slot = range(self._end - _ROOM, behind(self._end, end - start) - _ROOM)
            made = _Allocation(self._end, start, end - start, group, slot)
            if all(one.empty for one in group):
                made.marks = np.zeros(end - start, np.uint8)
            self._allocations.append(made)
            self._end = slot.stop + _ROOM

    def _grow(self, known: list[_Allocation], start: int, end: int, group: list[UsedArray]) -> None:
        one = known[0]
        before, after = max(one.start - start, 0), max(end - one.end, 0)
        if not before and not after:
            return
        if (
            len(known) > 1
            or one.base - before < one.slot.start
            or (one.base + one.size + after > one.slot.stop)
        ):
            text = "an array overlaps others that already have addresses: give the whole one first"
            raise ValueError(text)
        if one.marks is not None:
            one.marks = np.pad(one.marks, (before, after), constant_values=1)
        one.base, one.start = one.base - before, one.start - before
        one.size += before + after
        one.arrays += group

    # --- for a launch -------------------------------------------------------------------------

    def regions(self, used: Sequence[UsedArray]) -> list[Region]:
        """All memory, as the launch may use it: `used` are its arguments' arrays."""
        spans = sorted((*_bounds(one.array), one.written) for one in used)
        found = []
        for one in self._allocations:
            written = [w for start, end, w in spans if one.overlaps(start, end)]
            may = any(written) if written else any(k.array.flags.writeable for k in one.arrays)
            use = READ_WRITE if may else READ
            if one.marks is not None:
                use = EMPTY if may else UNSET
            region = Region(one.base, one.size, one.start, use)
            region.marks = one.marks.ctypes.data if one.marks is not None else None
            found.append(region)
        return found

    def extents(self, used: Sequence[UsedArray]) -> list[Extent]:
        """The names of addresses: those of the launch's arguments first."""
        named = [Extent(one.name, self.find(one.array), one.array.nbytes) for one in used]
        others = (Extent(f"array {n}", a.base, a.size) for n, a in enumerate(self._allocations))
        known = {extent.base for extent in named}
        return [*named, *(one for one in others if one.base not in known)]


def _bounds(array: Array) -> tuple[int, int]:
    """The first address of an array, and that behind its last."""
    start = end = array.ctypes.data
    if not array.size:
        return start, start
    for count, stride in zip(array.shape, array.strides, strict=True):
        start += min(stride, 0) * (count - 1)
        end += max(stride, 0) * (count - 1)
    return start, end + array.itemsize


def _overlapping(used: Sequence[UsedArray]) -> list[list[UsedArray]]:
    """Groups of arrays that overlap, in the order of their first ones."""
    groups: list[list[int]] = []
    last = (0, 0)
    spans = [_bounds(one.array) for one in used]
    for number in sorted(range(len(used)), key=lambda n: spans[n]):
        start, end = spans[number]
        if groups and (start < last[1] or (start, end) == last):
            groups[-1].append(number)
            last = last[0], max(last[1], end)
        else:
            groups.append([number])
            last = start, end
    return [[used[n] for n in group] for group in sorted(groups, key=min)]


# --- values with addresses --------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """The address of an element of an array: a pointer into its middle."""

    array: Array
    offset: int = 0
    """In elements."""
    written: bool = True
    empty: bool = False

    @property
    def size(self) -> int:
        """Of a pointer."""
        return _POINTER.size

    def used(self, name: str) -> Iterator[UsedArray]:
        """The array."""
        may = self.written and self.array.flags.writeable
        yield UsedArray(name, self.array, may, self.empty)

    def packed(self, memory: Memory) -> bytes:
        """The address."""
        return _POINTER.pack(memory.find(self.array) + self.offset * self.array.itemsize)


class Stored:
    """A value with addresses in device memory, of which a kernel takes the address."""

    size = _POINTER.size

    def __init__(self, value: Placeable) -> None:
        self.value, self.bytes = value, np.zeros(value.size, np.uint8)

    def used(self, name: str) -> Iterator[UsedArray]:
        """What it points to, and itself."""
        yield UsedArray(name, self.bytes)
        yield from self.value.used(name)

    def packed(self, memory: Memory) -> bytes:
        """Its address."""
        self.bytes[:] = np.frombuffer(self.value.packed(memory), np.uint8)
        return _POINTER.pack(memory.find(self.bytes))


@dataclass(frozen=True)
class Struct:
    """Bytes with addresses among them."""

    data: bytes
    items: tuple[tuple[int, str, Placeable], ...] = ()
    """The offset and the name of each value with addresses."""

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.data)

    def used(self, name: str) -> Iterator[UsedArray]:
        """The arrays of all values."""
        for _, inner, value in self.items:
            yield from value.used(f"{name}{inner}")

    def packed(self, memory: Memory) -> bytes:
        """The bytes with their addresses."""
        data = bytearray(self.data)
        for offset, _, value in self.items:
            data[offset : offset + value.size] = value.packed(memory)
        return bytes(data)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of an array (CUtensorMap)."""

    array: Array
    box: tuple[int, ...]
    swizzle: str
    fill: str

    size = _MAP_BYTES

    def used(self, name: str) -> Iterator[UsedArray]:
        """The array."""
        yield UsedArray(name, self.array, bool(self.array.flags.writeable))

    def packed(self, memory: Memory) -> bytes:
        """The map, as machine/tensor_map.h has it."""
        return self.encoded(memory.find(self.array))

    def encoded(self, base: int) -> bytes:
        """The map of the array at an address. Raises ValueError if the driver refuses it."""
        array = self.array
        integer = array.dtype.kind in "iub"
        return encode_tensor_map(
            base,
            array.shape[::-1],
            array.strides[-2::-1],
            self.box[::-1],
            array.itemsize,
            self.swizzle,
            self.fill,
            "integer" if integer else "float",
        )


def as_array(value: Any) -> Any:
    """A tensor of PyTorch on the CPU as an array of the same memory; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    name = str(value.dtype).removeprefix("torch.")
    if value.device.type != "cpu":
        raise TypeError(f"a tensor on {value.device.type}: the emulator takes those on the CPU")
    if not hasattr(np, name) and value.itemsize <= 2:  # bfloat16, fp8
        bits = torch.uint16 if value.itemsize == 2 else torch.uint8
        array: Array = value.detach().view(bits).numpy()
        return array.view(getattr(ml_dtypes, name))
    return value.detach().numpy()


def as_placeable(value: Any) -> Placeable | None:
    """A pointer as a value with an address; None for anything else."""
    value = as_array(value)
    if isinstance(value, np.ndarray) and value.ndim:
        return Address(contiguous(value, "the array"))
    return value if isinstance(value, Address | Stored | Struct | TensorMap) else None


def contiguous(array: Array, name: str) -> Array:
    """The array itself. Raises ValueError if it is not contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous: numpy.ascontiguousarray")
    return array


def make_pointers(values: Sequence[Any]) -> Stored:
    """An array of device pointers."""
    given = [(8 * n, f"[{n}]", value) for n, value in enumerate(values)]
    return Stored(_filled(bytes(8 * len(values)), given))


def pointer_bytes(name: str, value: Any) -> bytes:
    """A pointer that is None (null) or a whole number."""
    try:
        return _POINTER.pack(0 if value is None else value)
    except struct.error:
        text = f"{name} is {value!r}: a pointer is an array, an address or None"
        raise TypeError(text) from None


def make_address(array: Array, offset: int) -> Address:
    """A pointer into an array. Raises IndexError for an element that is not there."""
    array = as_array(array)
    contiguous(array, "the array")
    if not 0 <= offset <= array.size:
        raise IndexError(f"the array has {array.size} elements, and {offset} is none of them")
    return Address(array, offset)


def make_tensor_map(
    array: Array, box: Sequence[int], swizzle: str, fill: str, given: Mapping[str, Any]
) -> TensorMap:
    """A tensor map, checked. `given`: settings of which one value each is emulated. Raises
    ValueError for others, and where cuTensorMapEncodeTiled refuses the map."""
    wanted = {"interleave": "none", "mode": "tiled"}
    for name, value in given.items():
        plain = value is None or set(value) == {1} if name == "element_strides" else False
        if not plain and value != wanted.get(name):
            text = f"tensor maps with {name}={value!r} are not emulated"
            raise ValueError(f"{text}: only {wanted.get(name, 'strides of 1')}")
    array = as_array(array)
    made = TensorMap(array, tuple(box), swizzle, fill)
    if not array.size:
        raise ValueError("a tensor map needs an array with elements")
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError("a tensor map needs an array that is contiguous along its last axis")
    made.encoded(0)
    return made


# --- structs ----------------------------------------------------------------------------------


def make_struct(layout: Any, values: Sequence[Any], named: Mapping[str, Any]) -> Struct:
    """A struct from a format of Python's `struct`, a NumPy dtype or a ctypes.Structure.

    Raises TypeError for values that do not fit.
    """
    if isinstance(layout, str) and not named:
        return _by_format(layout, values)
    fields = _fields(layout)
    if len(values) + len(named) != len(fields) or len(values) > len(fields):
        text = f"the struct has {len(fields)} fields ({', '.join(fields)})"
        raise TypeError(f"{text}, and {len(values) + len(named)} values are given")
    given = dict(zip(fields, values, strict=False)) | dict(named)
    if set(given) != set(fields):
        raise TypeError(f"the fields of the struct are {', '.join(fields)}")
    if isinstance(layout, type):
        return _by_ctypes(layout, fields, given)
    return _by_dtype(np.dtype(layout), given)


def _fields(layout: Any) -> list[str]:
    if isinstance(layout, type) and issubclass(layout, ctypes.Structure):
        return [one[0] for one in layout._fields_]
    try:
        names = np.dtype(layout).names
    except TypeError:
        names = None
    if names is None:
        text = "a format of Python's struct, a NumPy dtype with fields, or a ctypes.Structure"
        raise TypeError(f"{layout!r} is no layout of a struct: give {text}")
    return list(names)


def _by_format(layout: str, values: Sequence[Any]) -> Struct:
    plain, pointed, before = list(values), [], ""
    number = 0
    for count, code in re.findall(r"(\d*)([a-zA-Z?])", layout):
        repeated = code not in "spx"
        for _ in range(int(count or 1) if repeated else 1):
            unit = code if repeated else count + code
            if code == "P" and number < len(plain):
                offset = struct.calcsize(f"{before}0P")
                pointed.append((offset, f"[{number}]", plain[number]))
                plain[number] = 0
            number += code != "x"
            before += unit
    try:
        data = struct.pack(layout, *plain)
    except (struct.error, OverflowError) as error:
        raise TypeError(f"the struct {layout!r}: {error}") from None
    return _filled(data, pointed)


def _by_dtype(dtype: np.dtype[Any], given: Mapping[str, Any]) -> Struct:
    one, pointed = np.zeros((), dtype), []
    for name, value in given.items():
        kind, offset = dtype.fields[name][:2]  # type: ignore[index]
        found = _pointed(name, offset, kind.base == np.uint64, kind.shape, value)
        if found:
            pointed += found
            continue
        try:
            one[name] = value
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"the field {name} of the struct: {error}") from None
    return _filled(one.tobytes(), pointed)


def _by_ctypes(layout: Any, fields: Sequence[str], given: Mapping[str, Any]) -> Struct:
    one, pointed = layout(), []
    kinds = {entry[0]: entry[1] for entry in layout._fields_}
    for name in fields:
        kind, offset = kinds[name], getattr(layout, name).offset
        base = getattr(kind, "_type_", kind) if hasattr(kind, "_length_") else kind
        is_pointer = base in (ctypes.c_void_p, ctypes.c_uint64) or hasattr(base, "contents")
        shape = (kind._length_,) if hasattr(kind, "_length_") else ()
        found = _pointed(name, offset, is_pointer, shape, given[name])
        if found:
            pointed += found
            continue
        try:
            setattr(one, name, given[name])
        except (TypeError, ValueError) as error:
            raise TypeError(f"the field {name} of the struct: {error}") from None
    return _filled(bytes(one), pointed)


def _pointed(
    name: str, offset: int, is_pointer: bool, shape: tuple[int, ...], value: Any
) -> list[tuple[int, str, Any]]:
    """The pointers in a field: one, or those of a list; none if its values are plain."""
    if isinstance(value, Struct | TensorMap):
        return [(offset, f".{name}", value)]
    if is_pointer and not shape and (value is None or as_placeable(value) is not None):
        return [(offset, f".{name}", value)]
    if is_pointer and shape and isinstance(value, list | tuple):
        return [(offset + 8 * n, f".{name}[{n}]", one) for n, one in enumerate(value)]
    return []


def _filled(data: bytes, pointed: Sequence[tuple[int, str, Any]]) -> Struct:
    items, whole = [], bytearray(data)
    for offset, name, value in pointed:
        placed = as_placeable(value)
        size = placed.size if placed is not None else _POINTER.size
        if offset + size > len(data):
            raise TypeError(f"{name.lstrip('.')} of the struct has no room for {size} bytes")
        if placed is None:
            whole[offset : offset + size] = pointer_bytes(name.lstrip("."), value)
        else:
            items.append((offset, name, placed))
    return Struct(bytes(whole), tuple(items))
