"""The machine itself: a C++ library, compiled once with the host's compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from flashwright.build.cache import Cache, digest
from flashwright.lang.diagnostic import Diagnostic, Failed

FOLDER = Path(__file__).parent / "machine"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fno-strict-aliasing")


class Region(ctypes.Structure):
    """Global memory that a launch may use: 0 to read, 1 to read and write, 2 an output."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("use", ctypes.c_int32),
    )


class Found(ctypes.Structure):
    """One finding, as the machine writes it."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("kind", "instruction", "block", "warp", "lane", "other")),
        ("address", ctypes.c_uint64),
        ("detail", ctypes.c_int64 * 2),
    )


class Launch(ctypes.Structure):
    """fw_launch of launch.cpp."""

    _fields_ = (
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("code", ctypes.c_void_p),
        ("instructions", ctypes.c_int32),
        ("operands", ctypes.c_void_p),
        ("operand_count", ctypes.c_int32),
        ("touched", ctypes.c_void_p),
        ("touched_count", ctypes.c_int32),
        ("registers", ctypes.c_void_p),
        ("register_bytes", ctypes.c_int32),
        ("specials", ctypes.c_void_p),
        ("special_count", ctypes.c_int32),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int32),
        ("parameters", ctypes.c_void_p),
        ("parameter_bytes", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("shared_bytes", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("findings", ctypes.c_void_p),
        ("finding_room", ctypes.c_int32),
        ("counts", ctypes.c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The machine, compiled where it is not in the cache; Failed with FW821 without a compiler."""
    compiler = os.environ.get("CXX", "c++")
    cache = Cache()
    key = digest([compiler, *FLAGS], [FOLDER])
    path = cache.root / f"machine-{key[:32]}.so"
    if not path.is_file():
        with cache.turn(key, patience=600):
            if not path.is_file():  # whoever had the turn before may have made it
                _compile(compiler, path)
    return ctypes.CDLL(str(path))


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
        _run([compiler, "-shared", *objects, "-o", linked])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        text = f"the emulator needs a C++ compiler: {command[0]}: {error.strerror}"
        raise Failed(Diagnostic("FW821", text, help="install g++ or clang++, or set CXX")) from None
    if done.returncode:
        raise Failed(Diagnostic("FW821", f"the emulator cannot be compiled: {done.stderr[:800]}"))
