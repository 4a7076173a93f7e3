"""The emulator: executes a kernel's PTX on the CPU, by the rules of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.emulate.own import EmulatedKernel


def kernel(
    source: str | Path, entry: str | None = None, *, arch: str = "sm_80", untrusted: bool = False
) -> EmulatedKernel:
    """A CUDA kernel from source, to launch on NumPy arrays. The arguments are those of own.py."""
    from flashwright.emulate import own  # here, because it imports NumPy

    return own.kernel(source, entry, arch=arch, untrusted=untrusted)
