"""The GPUs of this machine from the CUDA driver, or the reason why none can be used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.lang.diagnostic import Diagnostic, Failed

LIBRARY = "libcuda.so.1"
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Card:
    """A GPU of this machine."""

    number: int
    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> str:
        """The architecture, such as sm_90."""
        return "sm_{}{}".format(*self.capability)

    def takes(self, arch: str) -> bool:
        """Whether it can run a kernel for an architecture, from its cubin or its PTX.

        PTX runs on every later GPU; that of sm_90a and the like runs on that one only.
        """
        number = self.capability[0] * 10 + self.capability[1]
        wanted = re.fullmatch(r"sm_(\d+)([af]?)", arch)
        if wanted is None:
            return False
        return number == int(wanted[1]) if wanted[2] else number >= int(wanted[1])


def cards() -> tuple[Card, ...]:
    """The GPUs of this machine, at least one. Raises Failed with FW851 and the reason if none."""
    found, reason = _look()
    if not found:
        hint = "a kernel package can be made, checked and built here, and run where there is a GPU"
        raise Failed(Diagnostic("FW851", f"no GPU can be used here: {reason}", help=hint))
    return found


def missing() -> str | None:
    """The reason why no GPU can be used, or None."""
    found, reason = _look()
    return None if found else reason


@functools.cache
def _look() -> tuple[tuple[Card, ...], str]:
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return (), f"there is no NVIDIA driver ({LIBRARY} is not found)"
    count = ctypes.c_int()
    result = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if result:
        return (), f"the NVIDIA driver says {error_name(cuda, result)}"
    if not count.value:
        return (), "the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)"
    return tuple(_card(cuda, number) for number in range(count.value)), ""


def _card(cuda: ctypes.CDLL, number: int) -> Card:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Card(number, name.value.decode(errors="replace"), (capability[0], capability[1]))


@contextlib.contextmanager
def while_capturing() -> Iterator[None]:
    """What is done inside may be done while this thread captures a stream. Otherwise calls of the
    driver that initialise a library end the capture. Does nothing without a driver."""
    try:
        exchange = ctypes.CDLL(LIBRARY).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchanged = not exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchanged:
            exchange(ctypes.byref(mode))


def error_name(cuda: ctypes.CDLL, result: int) -> str:
    """The driver's name of an error."""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(result, ctypes.byref(name))
    return (name.value or b"error %d" % result).decode()
