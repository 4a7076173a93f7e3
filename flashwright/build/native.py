"""The launcher's shared library: from a platform wheel, or compiled once on this machine.

`hatch_build.py` imports this module to compile the launcher into a wheel, in an environment without
the dependencies: imports at the top are limited to the standard library.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

from flashwright.build import cache
from flashwright.build.cache import Cache
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed

SOURCE = Path(__file__).parent / "launcher"
BUILT_IN = SOURCE / "launcher.so"
"""The library in an installed platform wheel; a checkout and a pure wheel have none."""
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
PATIENCE = 120.0  # time limit of the compiler in seconds; it takes about five
GET_FFI = "pip install 'apache-tvm-ffi>=0.1.11,<0.2'"
GET_COMPILER = "install g++ (on Debian and Ubuntu: apt install g++), or name a compiler in CXX"


@functools.cache
def launcher() -> Any:
    """The loaded library: make, of_tensors, at_places, form, in_order, synchronize. Raises
    Failed if unavailable."""
    from flashwright.build.driver import while_capturing

    with while_capturing():  # the first call of a process may be in a CUDA graph
        return _loaded()


def _loaded() -> Any:
    ffi = _ffi()
    if BUILT_IN.is_file():
        try:
            return ffi.load_module(str(BUILT_IN))
        except (RuntimeError, ValueError, OSError) as error:  # such as an older C library
            text = f"the wheel's launcher cannot be loaded, so this machine compiles one: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    return ffi.load_module(str(library()))


def library() -> Path:
    """The path of the library, compiled if it is not in the cache. Raises Failed."""
    ffi, compiler = _ffi(), _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    parts = [ffi.__version__, platform.machine(), compiler, version, *FLAGS]
    store = Cache()
    key = cache.digest(parts, [SOURCE])
    target = store.root / "launcher" / f"{key[:32]}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", target, error) from None
    with store.locked(key, PATIENCE), store.workplace() as place:
        if not target.is_file():
            compile_to(place / "launcher.so")
            os.replace(place / "launcher.so", target)  # atomically
    return target


def compile_to(target: Path) -> None:
    """Compile the launcher into a file with the host's compiler. Raises Failed."""
    _ffi()
    from tvm_ffi import libinfo

    compiler = _compiler()
    shared = Path(libinfo.find_libtvm_ffi())
    includes = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    command = [compiler, *FLAGS, *(f"-I{path}" for path in sorted(includes))]
    command += [str(SOURCE / "launcher.cpp"), "-o", str(target), str(shared), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise _no_launcher(f"{compiler} took more than {PATIENCE:g} s") from None
    if done.returncode:
        first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr.strip())
        raise _no_launcher(f"{compiler} cannot compile it: {first}")


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    missing = f"CXX names {named}, which is not there" if named else "there is no C++ compiler"
    raise _no_launcher(missing, GET_COMPILER)


def _ffi() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise _no_launcher(f"the package apache-tvm-ffi is missing ({error})", GET_FFI) from None
    return tvm_ffi


def _no_launcher(why: str, hint: str | None = None) -> Failed:
    return Failed(Diagnostic("FW852", f"the launcher cannot be made: {why}", help=hint))
