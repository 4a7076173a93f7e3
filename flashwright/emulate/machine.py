"""The machine that executes PTX: a C++ library, compiled once with the host's compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from flashwright.build.cache import Cache, digest
from flashwright.emulate.structs import Launch, Region
from flashwright.lang.diagnostic import Diagnostic, Failed

FOLDER = Path(__file__).parent / "machine"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fno-strict-aliasing", "-pthread")


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
    return ctypes.CDLL(str(library_file()))


def library_file() -> Path:
    """The path of the compiled library. Raises Failed with FW821 without a compiler."""
    compiler = os.environ.get("CXX", "c++")
    cache = Cache()
    key = digest([compiler, *FLAGS], [FOLDER])
    path = cache.root / f"machine-{key[:32]}.so"
    if not path.is_file():
        with cache.locked(key, patience=600):
            if not path.is_file():  # the previous holder of the lock may have compiled it
                _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as place:
        # The largest take longest.
        sources = sorted(FOLDER.glob("*.cpp"), key=lambda p: p.stat().st_size, reverse=True)
        objects = [f"{place}/{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = f"{place}/machine.so"
        _run([compiler, "-shared", "-pthread", *objects, "-o", linked])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        text = f"the emulator needs a C++ compiler: {command[0]}: {error.strerror}"
        raise Failed(Diagnostic("FW821", text, help="install g++ or clang++, or set CXX")) from None
    if done.returncode:
        raise Failed(Diagnostic("FW821", f"the emulator cannot be compiled: {done.stderr[:800]}"))
