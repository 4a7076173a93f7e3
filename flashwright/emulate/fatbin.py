"""The PTX in a program's fat binaries, as nvcc embeds them."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashwright.lang.diagnostic import Diagnostic, Failed

_MAGIC = 0xBA55ED50
_HEAD = struct.Struct("<IHHQ")  # magic, version, bytes of this, bytes behind it
# Kind, version, bytes of this, bytes behind it, compressed bytes, three unknown ones, architecture,
# two of a name, flags, 0, plain bytes.
_PART = struct.Struct("<HHIQIIHHIIIQQQ")
_PLAIN = struct.Struct("<HHIQIIHHIIIQ")  # the same of what is not compressed
_PTX = 1
_LZ4, _ZSTD = 0x2000, 0x8000
_LARGEST = 1 << 30  # bytes of PTX
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)([af]?)", re.MULTILINE)


@dataclass(frozen=True)
class DeviceCode:
    """PTX, and what it was compiled for."""

    ptx: str
    capability: int
    """Such as 90."""
    suffix: str = ""
    """`a` or `f`, for code of one architecture."""

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU takes it."""
        if self.suffix:
            return self.capability == capability
        return self.capability <= capability


@dataclass(frozen=True)
class Image:
    """What a program has of one file of device code: PTX, and machine code of some GPUs."""

    codes: tuple[DeviceCode, ...]
    machine_code: tuple[int, ...] = ()
    """The compute capabilities of the machine code, which the emulator cannot execute."""


def read_image(data: bytes) -> Image:
    """The code in a fat binary, or in the text of PTX. Raises Failed with FW831 for other data."""
    if data[:4] == struct.pack("<I", _MAGIC):
        return _fat_binary(data)
    if data[:4] == b"\x7fELF":
        return Image((), (0,))
    text = data.rstrip(b"\0").decode(errors="replace")
    code = _code(text)
    if code is None:
        raise Failed(
            Diagnostic("FW831", "the program loads a module that is neither PTX nor a fat binary")
        )
    return Image((code,))


def _fat_binary(data: bytes) -> Image:
    codes, machine_code = [], []
    try:
        for kind, architecture, content in _parts(data):
            if kind != _PTX:
                machine_code.append(architecture)
            elif (code := _code(content.rstrip(b"\0").decode(errors="replace"))) is not None:
                codes.append(code)
    except struct.error:
        raise Failed(Diagnostic("FW831", "a fat binary of the program cannot be read")) from None
    return Image(tuple(codes), tuple(machine_code))


def _parts(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The kind, the architecture and the content of each part; that of machine code is empty."""
    _, _, at, size = _HEAD.unpack_from(data)
    end = at + size
    while at < end:
        kind, _, head, size, packed, _, _, _, architecture, _, _, flags = _PLAIN.unpack_from(
            data, at
        )
        content = data[at + head : at + head + size]
        if kind == _PTX and flags & (_LZ4 | _ZSTD):
            plain = _PART.unpack_from(data, at)[-1]
            content = _unpacked(content[:packed], plain, flags)
        yield kind, architecture, content if kind == _PTX else b""
        at += head + size


def _code(text: str) -> DeviceCode | None:
    found = _TARGET.search(text)
    return DeviceCode(text, int(found[1]), found[2]) if found else None


# --- compression ------------------------------------------------------------------------------


def _unpacked(data: bytes, size: int, flags: int) -> bytes:
    if size > _LARGEST:
        raise Failed(Diagnostic("FW831", f"the program has {size} bytes of PTX in one part"))
    return _of_zstd(data, size) if flags & _ZSTD else of_lz4(data)


def _of_zstd(data: bytes, size: int) -> bytes:
    """The content of what nvcc of CUDA 12.8 and later compresses."""
    name = ctypes.util.find_library("zstd") or "libzstd.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        text = "the program's PTX is compressed with Zstandard, and there is no libzstd.so.1"
        hint = "install libzstd, or build the program with nvcc --no-compress"
        raise Failed(Diagnostic("FW831", text, help=hint)) from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = (ctypes.c_void_p, ctypes.c_size_t) * 2
    room = ctypes.create_string_buffer(max(size, 1))
    if library.ZSTD_decompress(room, size, data, len(data)) != size:
        raise Failed(Diagnostic("FW831", "compressed PTX of the program cannot be read"))
    return room.raw[:size]


def of_lz4(data: bytes) -> bytes:
    """The content of a block of LZ4: literals and copies of what came before, in turn."""
    out, at = bytearray(), 0
    try:
        while at < len(data):
            token = data[at]
            count, at = _length(data, at + 1, token >> 4)
            out += data[at : at + count]
            at += count
            if at >= len(data):
                break
            back = data[at] | data[at + 1] << 8
            count, at = _length(data, at + 2, token & 15)
            _repeat(out, back, count + 4)
    except IndexError:
        raise Failed(Diagnostic("FW831", "compressed PTX of the program cannot be read")) from None
    return bytes(out)


def _length(data: bytes, at: int, count: int) -> tuple[int, int]:
    """A length that continues while bytes are 255, and what follows it."""
    more = count == 15
    while more:
        count += data[at]
        more = data[at] == 255
        at += 1
    return count, at


def _repeat(out: bytearray, back: int, count: int) -> None:
    """Append `count` bytes from `back` bytes before the end; the two may overlap."""
    if not 1 <= back <= len(out):
        raise IndexError(back)
    part = out[len(out) - back :]
    out += (part * (count // back + 1))[:count]


def choose(images: Sequence[Image], capability: int) -> list[DeviceCode]:
    """Of each image the newest PTX that the GPU takes."""
    found = []
    for image in images:
        fitting = [code for code in image.codes if code.runs_on(capability)]
        if fitting:
            found.append(max(fitting, key=lambda code: (code.capability, code.suffix)))
    return found
