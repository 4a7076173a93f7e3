"""Requirements of cases: why one cannot be tried on this machine."""

from __future__ import annotations

import functools
import importlib.util
import platform
import shutil

from flashwright.build import driver, toolchain
from flashwright.selftest.case import SelftestCase

_MODULES = {"torch": "PyTorch", "triton": "Triton"}
MACHINES = ("aarch64", "x86_64")


def missing(case: SelftestCase) -> str:
    """The reason why a case cannot be tried, such as `no GPU`; empty if it can."""
    needed = ("gpu", "torch", *case.needs) if case.on == "gpu" else case.needs
    return next((why for why in map(_reason, needed) if why), "")


@functools.cache
def _reason(name: str) -> str:
    """Why a requirement is not met; empty if it is."""
    if name == "gpu":
        return "no GPU" if driver.missing() else ""
    if name == "nvcc":
        return "" if toolchain.has_nvcc() else "no CUDA compiler"
    if name == "c++":
        return "" if shutil.which("c++") or shutil.which("g++") else "no C++ compiler"
    if name in MACHINES:
        return "" if platform.machine() == name else f"it is code for {name}"
    if importlib.util.find_spec(name) is None:
        return f"{_MODULES.get(name, name)} is not installed"
    return ""
