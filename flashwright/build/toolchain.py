"""Finds nvcc, the host compiler and the headers. Errors say how to install what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashwright.lang.diagnostic import Diagnostic, Failed

OLDEST = (12, 0)  # the first nvcc with sm_90a; CUTLASS 4 supports it too
USUAL = Path("/usr/local/cuda/bin")  # the default of NVIDIA's installers, which do not change PATH
GET_NVCC = (
    "pip install 'flashwright[nvcc]' gets it without root; or install the CUDA toolkit and put its "
    "bin on PATH, or name the file in FLASHWRIGHT_NVCC"
)
CUTLASS = "nvidia-cutlass==4.2.0.0"
"""The Python package with the headers as data; its dependencies are not used."""
GET_CUTLASS = (
    f"pip install --no-deps {CUTLASS} gets them, 40 MB; or name a CUTLASS checkout in "
    "FLASHWRIGHT_CUTLASS"
)
GET_HOST = (
    "nvcc lets the host's C++ compiler read the headers: install g++ (on Debian and Ubuntu: apt "
    "install g++), or name one in NVCC_CCBIN"
)


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the two include folders."""

    nvcc: Path
    version: str
    """Such as 13.0.88."""
    cutlass: Path
    """The folder with cute/ and cutlass/."""
    device: Path
    """The folder with fw/, the headers of the generated code."""
    warnings: tuple[Diagnostic, ...] = ()
    """Compilers that were found earlier and cannot be used (FW830)."""


@dataclass(frozen=True)
class _Compiler:
    path: Path
    version: str
    unusable: tuple[str, ...] = ()
    """The fault of each compiler that was tried before this one."""


def find() -> Toolchain:
    """The tools on this machine. Raises Failed with everything that is missing."""
    missing: list[Diagnostic] = []
    found: list[Any] = []
    for look in (_nvcc, _cutlass, _host):
        try:
            found.append(look())
        except Failed as failed:
            missing.extend(failed.diagnostics)
    if missing:
        raise Failed(*missing)
    nvcc, cutlass, _ = found
    return Toolchain(nvcc.path, nvcc.version, cutlass, device(), _warnings(nvcc))


def _warnings(taken: _Compiler) -> tuple[Diagnostic, ...]:
    hint = "repair or remove it, or name the compiler to use in FLASHWRIGHT_NVCC"
    texts = (f"{why}; {taken.path} is used instead" for why in taken.unusable)
    return tuple(Diagnostic("FW830", text, help=hint) for text in texts)


def has_nvcc() -> bool:
    """Whether there is a compiler that runs and is new enough."""
    try:
        _nvcc()
    except Failed:
        return False
    return True


def device() -> Path:
    """The include folder of Flashwright's own headers."""
    return Path(__file__).parents[1] / "device"


def _lacks(what: str, how: str) -> Failed:
    return Failed(Diagnostic("FW821", what, help=how))


# --- the compiler -----------------------------------------------------------------------------


def _nvcc() -> _Compiler:
    named = os.environ.get("FLASHWRIGHT_NVCC")
    if named:
        if _is_program(Path(named)):
            return _Compiler(Path(named), _version(Path(named)))
        text = f"FLASHWRIGHT_NVCC is {named}, and that is not a program"
        raise _lacks(text, "name the file nvcc itself, or unset it to have one looked for")
    unusable: list[str] = []
    for path in filter(_is_program, dict.fromkeys(_places())):
        try:
            return _Compiler(path, _version(path), tuple(unusable))
        except Failed as failed:
            unusable.append(failed.diagnostics[0].message)
    text = "there is no CUDA compiler: no nvcc in CUDA_HOME, on PATH or among Python's packages"
    raise _lacks("; ".join(unusable) or text, GET_NVCC)


def _places() -> Iterator[Path]:
    """The candidate paths of nvcc, in order of preference."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "bin", "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield USUAL / "nvcc"
    for folder in _wheels():
        yield from sorted(folder.glob("cu*/bin/nvcc"), reverse=True)  # CUDA 13 and later


def _wheels() -> list[Path]:
    """The `nvidia` folders in site-packages, which NVIDIA's Python packages share."""
    spec = find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version(nvcc: Path) -> str:
    """The version that nvcc prints. Raises Failed with FW821 if it does not run or is too old.

    The file alone is no proof: it may be a wrapper of a toolkit that was removed.
    """
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it does not answer"
        raise _lacks(f"{nvcc} cannot be run: {reason}", GET_NVCC) from None
    said = (done.stderr + done.stdout if done.returncode else done.stdout + done.stderr).strip()
    line = said.split("\n")[0][:200] or "nothing"
    if done.returncode:
        text = f"{nvcc} --version fails with exit status {done.returncode}; it says: {line}"
        raise _lacks(text, GET_NVCC)
    told = re.search(r"release \d+\.\d+, V(\d+)\.(\d+)\.(\d+)", done.stdout)
    if told is None:
        raise _lacks(f"{nvcc} does not say its version; it says: {line}", GET_NVCC)
    if (int(told[1]), int(told[2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        text = f"{nvcc} is of CUDA {told[1]}.{told[2]}; {wanted} or newer is needed"
        raise _lacks(text, GET_NVCC)
    return ".".join(told.groups())


# --- what it reads with, and what it reads ----------------------------------------------------


def _host() -> Path:
    """The host C++ compiler, which nvcc needs even for device code."""
    named = os.environ.get("NVCC_CCBIN")
    wanted = named or ("cl" if sys.platform == "win32" else "gcc")
    if named and Path(named).is_dir():
        return Path(named)
    path = shutil.which(wanted)
    if path is None:
        text = f"NVCC_CCBIN is {named}, and that" if named else f"{wanted}"
        raise _lacks(f"there is no C++ compiler for nvcc: {text} is not there", GET_HOST)
    return Path(path)


def _cutlass() -> Path:
    """The headers of CUTLASS and CuTe. The package has them as data: it is never imported."""
    for variable in ("FLASHWRIGHT_CUTLASS", "CUTLASS_PATH"):
        named = os.environ.get(variable)
        if not named:
            continue
        for folder in (Path(named), Path(named, "include")):
            if (folder / "cute" / "tensor.hpp").is_file():
                return folder.resolve()
        text = f"{variable} is {named}, and there is no cute/tensor.hpp in it or in its include/"
        raise _lacks(text, "name a CUTLASS checkout, or unset it to use the Python package")
    spec = find_spec("cutlass_library")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place, "source", "include")
        if (folder / "cute" / "tensor.hpp").is_file():
            return folder
    raise _lacks("the headers of CUTLASS (CuTe) are not there", GET_CUTLASS)
