"""Flashwright writes attention kernels: thought through in TL, checked, run, and translated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.build.load import Kernel

__version__ = "0.1.0"


def load(folder: str | Path) -> Kernel:
    """The kernel in a folder, as a function: `flashwright.load(folder)(q, k, v)`."""
    from flashwright.build import load as package  # only now: the command line needs none of it

    return package.load(folder)
