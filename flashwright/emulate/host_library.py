"""The library that stands in for CUDA in a program: C++, from a platform wheel or compiled here.

`hatch_build.py` imports this module to compile the library into a wheel, in an environment without
the dependencies: imports at the top are limited to the standard library.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from flashwright.build.cache import Cache, digest
from flashwright.emulate.machine import BUILT_IN, compile_objects, run_compiler

SOURCES = Path(__file__).parent / "host"
NAME = "libflashwright_cuda.so"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden")
# The libraries that programs ask for: their file, and the version of their symbols.
_ASKED = {"libcudart.so.12": "libcudart.so.12", "libcudart.so.13": "libcudart.so.13"}
_ASKED |= {"libcudart.so.11.0": "libcudart.so.11.0", "libcuda.so.1": ""}


def library_folder() -> Path:
    """The folder with the library and with the names that programs ask for: the wheel's, or one
    that this machine compiles once. Raises Failed with FW821 without a compiler."""
    built = _built_in()
    if built is not None:
        return built
    compiler = os.environ.get("CXX", "c++")
    cache = Cache()
    key = digest([compiler, *FLAGS, *_ASKED], [SOURCES])
    path = cache.root / f"host-{key[:32]}"
    if not path.is_dir():
        with cache.locked(key, patience=600):
            if not path.is_dir():  # the previous holder of the lock may have compiled it
                _compile(compiler, path)
    return path


def compile_portable(folder: Path) -> Path:
    """Compile the library into a folder of a folder. Raises Failed."""
    path = folder / _built_in_name()
    _compile(os.environ.get("CXX", "c++"), path)
    return path


def _built_in_name() -> str:
    """A name that only the library of these sources has."""
    return f"host-{digest([], [SOURCES])[:32]}"


@functools.cache
def _built_in() -> Path | None:
    """The wheel's library, if it can be loaded here, in a process of its own: it changes the
    libraries of its process."""
    path = BUILT_IN / _built_in_name()
    if not path.is_dir():
        return None
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    command = [sys.executable, "-c", code, str(path / NAME)]
    return path if subprocess.run(command, capture_output=True).returncode == 0 else None


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as place:
        work, made = Path(place, "work"), Path(place, "made")
        work.mkdir()
        made.mkdir()
        objects = compile_objects([compiler, *FLAGS], SOURCES, work)
        library = made / NAME
        linked = ("-ldl", "-lpthread", f"-Wl,-soname,{NAME}")
        run_compiler([compiler, "-shared", *objects, "-o", str(library), *linked])
        for file, version in _ASKED.items():
            _link_name(compiler, work, library, made / file, version)
        os.replace(made, path)


def _link_name(compiler: str, work: Path, library: Path, path: Path, version: str) -> None:
    """An empty library of another name, which needs the library."""
    script = work / "versions"
    script.write_text(f"{version} {{ global: *; }};\n" if version else "")
    empty = work / "empty.cpp"
    empty.write_text("")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        str(empty),
        "-o",
        str(path),
        f"-Wl,-soname,{path.name}",
    ]
    command += ["-Wl,--no-as-needed", str(library), "-Wl,-rpath,$ORIGIN"]
    run_compiler([*command, *((f"-Wl,--version-script={script}",) if version else ())])
