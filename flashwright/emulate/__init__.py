"""The kernel's PTX executed on the CPU, under the hardware's own rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.emulate.own import Kernel


def kernel(
    source: str | Path, entry: str | None = None, *, arch: str = "sm_80", untrusted: bool = False
) -> Kernel:
    """A CUDA kernel of your own, to launch on NumPy arrays: see own.py."""
    from flashwright.emulate import own  # only now: it takes NumPy along

    return own.kernel(source, entry, arch=arch, untrusted=untrusted)
