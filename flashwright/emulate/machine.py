"""The machine that executes PTX: a C++ library, from a platform wheel or compiled once here.

`hatch_build.py` imports this module to compile the library into a wheel, in an environment without
the dependencies: imports at the top are limited to the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from flashwright.build.cache import Cache, digest
from flashwright.emulate.structs import Launch, Region
from flashwright.lang.diagnostic import Diagnostic, Failed

FOLDER = Path(__file__).parent / "machine"
BUILT_IN = Path(__file__).parent / "prebuilt"
"""The folder of the library in an installed platform wheel; a checkout and a pure wheel have none.
"""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-strict-aliasing", "-pthread")
FLAGS = (*_FLAGS, "-march=native")
# What a wheel's library needs of a processor, as Linux names it; without fma it would be slow.
_FEATURES = {"x86_64": ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")}
_NAMES = {"bmi1": "bmi"}  # in options of the compiler
_CPU = Path("/proc/cpuinfo")


class Machine(Protocol):
    """Executes a launch, in this process or in another one (machine_process.py)."""

    def __call__(self, told: Launch, sizes: Mapping[str, int], regions: Sequence[Region]) -> int:
        """The number of findings, or -1 minus the index of an instruction that it does not know.

        `sizes` has the bytes behind the pointers of the launch, but for names and regions.
        """


def here(told: Launch, sizes: Mapping[str, int], regions: Sequence[Region]) -> int:
    """The machine in this process."""
    return int(library().fw_run(ctypes.byref(told)))


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, compiled if it is not in the cache. Raises Failed with FW821 without a
    compiler."""
    return ctypes.CDLL(str(library_file(tell=True)))


@functools.cache
def known() -> frozenset[str]:
    """The names of all instructions that the machine executes."""
    names = library().fw_names
    names.restype = ctypes.c_char_p
    return frozenset(names().decode().split())


def library_file(tell: bool = False) -> Path:
    """The path of the compiled library: the wheel's, or one that this machine compiles once.

    Raises Failed with FW821 without a compiler. `tell` prints a line before it is compiled.
    """
    built = _built_in()
    if built is not None:
        return built
    compiler = os.environ.get("CXX", "c++")
    cache = Cache()
    key = digest([compiler, *FLAGS, _processor()], [FOLDER])
    path = cache.root / f"machine-{key[:32]}.so"
    if not path.is_file():
        with cache.locked(key, patience=600):
            if not path.is_file():  # the previous holder of the lock may have compiled it
                if tell:
                    text = "flashwright: compiling the emulator, once; this takes a while"
                    print(text, file=sys.stderr, flush=True)
                _compile(compiler, path, FLAGS)
    return path


def compile_portable(folder: Path) -> Path:
    """Compile the library for all processors of this kind, into a folder. Raises Failed."""
    features = _FEATURES.get(platform.machine(), ())
    options = (f"-m{_NAMES.get(one, one)}" for one in features)
    path = folder / _built_in_name()
    _compile(os.environ.get("CXX", "c++"), path, (*_FLAGS, *options))
    return path


def _built_in_name() -> str:
    """A name that only the library of these sources has."""
    return f"machine-{digest([], [FOLDER])[:32]}.so"


@functools.cache
def _built_in() -> Path | None:
    """The wheel's library, if it can be loaded here."""
    path = BUILT_IN / _built_in_name()
    if not path.is_file() or not {*_FEATURES.get(platform.machine(), ())} <= _features():
        return None
    try:
        ctypes.CDLL(str(path))
    except OSError:  # such as an older C library
        return None
    return path


def _features() -> set[str]:
    """The instruction sets of this processor."""
    lines = _processor().splitlines()
    return set(next((line.split() for line in lines if line.startswith("flags")), ()))


@functools.cache
def _processor() -> str:
    """What the compiled code depends on: a cache may be shared with other machines."""
    try:
        lines = _CPU.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("flags", "Features", "vendor_id", "cpu family", "model", "CPU part")
    return "\n".join(line for line in lines if line.partition("\t")[0].strip() in kept)


def _compile(compiler: str, path: Path, flags: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as place:
        objects = compile_objects([compiler, *flags], FOLDER, Path(place))
        linked = f"{place}/machine.so"
        run_compiler([compiler, "-shared", "-pthread", *objects, "-o", linked])
        os.replace(linked, path)


def compile_objects(command: Sequence[str], folder: Path, place: Path) -> list[str]:
    """Compile the sources in a folder, several at a time; returns the files at `place`. Raises
    Failed with FW821."""
    # The largest take longest.
    sources = sorted(folder.glob("*.cpp"), key=lambda p: p.stat().st_size, reverse=True)
    made = [str(place / f"{source.stem}.o") for source in sources]
    commands = [
        [*command, "-c", str(source), "-o", one] for source, one in zip(sources, made, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run_compiler, commands))
    return made


def run_compiler(command: Sequence[str]) -> None:
    """Run a C++ compiler. Raises Failed with FW821."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        text = f"the emulator needs a C++ compiler: {command[0]}: {error.strerror}"
        raise Failed(Diagnostic("FW821", text, help="install g++ or clang++, or set CXX")) from None
    if done.returncode:
        raise Failed(Diagnostic("FW821", f"the emulator cannot be compiled: {done.stderr[:800]}"))
