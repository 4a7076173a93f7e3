"""The emulator: executes a kernel's PTX on the CPU, by the rules of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.emulate.own import Array, Empty, EmulatedKernel


def kernel(
    source: str | Path, entry: str | None = None, *, arch: str = "sm_80", untrusted: bool = False
) -> EmulatedKernel:
    """A CUDA kernel from source, to launch on NumPy arrays. The arguments are those of own.py."""
    from flashwright.emulate import own  # here, because it imports NumPy

    return own.kernel(source, entry, arch=arch, untrusted=untrusted)


def empty(array: Array) -> Empty:
    """An array for a launch, as memory that is allocated and not set: a read before a write is a
    finding."""
    from flashwright.emulate import own  # here, because it imports NumPy

    return own.Empty(array)
