"""The compiler's process and its children; confined if a model wrote the code.

Source code can make a compiler run forever, or print the user's files. For untrusted code the
compiler gets no keys, no network and no files but its own, and its resources are limited. If the
system cannot confine it, nothing is compiled unless FLASHWRIGHT_UNCONFINED=1 is set.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashwright.build import blame
from flashwright.build.toolchain import Toolchain
from flashwright.confine import landlock, seal
from flashwright.confine.session import use
from flashwright.confine.start import (
    CALLS,
    FILES,
    NOT_CONFINED,
    NOT_STARTED,
    UNCONFINED,
    Policy,
    confined,
)
from flashwright.lang.diagnostic import Diagnostic, Failed

GB, MB = 1 << 30, 1 << 20
# These change the output of nvcc and are not part of the cache key.
HIDDEN_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
READS = "FLASHWRIGHT_COMPILER_READS"
"""Further folders that the confined compiler may read, in the form of PATH."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "NVCC_CCBIN")
_PARTS = ("bin", "lib", "lib32", "lib64", "libexec", "include")
"""The subfolders of an installation prefix that a compiler needs."""
_SHARED = (Path("/usr"), Path("/usr/local"), Path("/opt"))
_SYSTEM = (
    *(*(f"/usr/{part}" for part in _PARTS), "/usr/local/include"),
    *(*landlock.PROGRAMS, *landlock.LOADER),
    *("/dev/urandom", "/dev/zero", "/sys/devices/system/cpu"),
)
_LOG = "log.txt"
_TICK = 0.02  # seconds between two polls
_LOOK = 10  # polls between two checks of its resources


@dataclass(frozen=True)
class CompilerLimits:
    """Limits of the compiler for untrusted code: several times what our kernels need."""

    seconds: float = 120.0
    memory: int = 6 * GB
    """The sum over all of its processes."""
    processes: int = 64
    file_bytes: int = 256 * MB
    log_bytes: int = 4 * MB
    """The part of its output that is read, half from the beginning and half from the end."""


def run(command: Sequence[str], place: Path, time_limit: float) -> tuple[int, str]:
    """Run nvcc in its own session. Returns its exit status and its output.

    It starts a dozen processes. All of them are ended on Ctrl-C and on a timeout.
    """
    env = {k: v for k, v in os.environ.items() if k not in HIDDEN_FLAGS}
    env |= {"TMPDIR": str(place), "LC_ALL": "C"}  # messages in other languages cannot be parsed
    child = _start(command, place, env, subprocess.PIPE)
    try:
        said, _ = child.communicate(timeout=time_limit)
        return child.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise blame.unfinished(f"nvcc was stopped after {time_limit:g} seconds") from None
    finally:
        _end(child)


def _start(
    command: Sequence[str], place: Path, env: dict[str, str], out: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        text = f"{command[0]} cannot be run: {error.strerror}"
        raise Failed(Diagnostic("FW821", text)) from None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the whole session, if any of it still runs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    if child.returncode is None:
        child.wait()
    if child.stdout:
        child.stdout.close()


# --- code that nobody has read ----------------------------------------------------------------


def need_confinement() -> None:
    """Raises Failed with FW821 if the system cannot keep the compiler from the user's files."""
    if _unconfined():
        return
    if sys.platform != "linux" or not landlock.available():
        raise _not_confined("this system has no Landlock")


def _unconfined() -> bool:
    return os.environ.get(UNCONFINED) == "1"


def _not_confined(why: str) -> Failed:
    text = f"{why}, which keeps the compiler from other files than headers"
    hint = (
        "Linux 5.13 and later have it, where it is not switched off; "
        f"{UNCONFINED}=1 compiles what a model wrote without it, best in a container"
    )
    return Failed(Diagnostic("FW821", text, help=hint))


def run_confined(
    command: Sequence[str], place: Path, tools: Toolchain, limits: CompilerLimits
) -> tuple[int, str]:
    """Run nvcc on untrusted code. Raises Failed with FW825 if it exceeds a limit."""
    command = [os.path.abspath(command[0]), *command[1:]]
    env = environment(place)
    if sys.platform == "linux":
        command, env = confined(_policy(place, tools, limits, env), command)
    with open(place / _LOG, "w+b") as log:
        child = _start(command, place, env, log.fileno())
        try:
            _watch(child, limits)
        finally:
            _end(child)
        said = _both_ends(log.fileno(), limits.log_bytes)
    if child.returncode == NOT_CONFINED:
        raise _not_confined("this system does not do what Landlock or seccomp is asked for")
    if child.returncode == NOT_STARTED:
        hint = f"for code that a model wrote it may read no folders but its own; {READS} names more"
        raise Failed(Diagnostic("FW821", said.strip()[:500] or "nvcc cannot be run", help=hint))
    if "(File size limit exceeded)" in said or _largest(place) >= limits.file_bytes:
        raise _too_much(f"it wrote a file of more than {limits.file_bytes // MB} MB")
    return child.returncode, said


def environment(place: Path) -> dict[str, str]:
    """The environment of the confined compiler: PATH and nothing else of the user's."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"PATH": os.defpath, **kept, "HOME": str(place), "TMPDIR": str(place), "LC_ALL": "C"}


def _policy(place: Path, tools: Toolchain, limits: CompilerLimits, env: dict[str, str]) -> Policy:
    return Policy(
        readable=(*_SYSTEM, *dict.fromkeys(map(str, _toolchain(tools)))),
        writable=(str(place), "/dev/null"),
        seconds=math.ceil(limits.seconds) + 5,
        file_bytes=limits.file_bytes,
        addresses=4 * limits.memory,
        environment=env,
        must=_must(),
    )


def _must() -> tuple[str, ...]:
    """The kinds of confinement that are required."""
    if _unconfined():
        return ()
    return (FILES, CALLS) if seal.available() else (FILES,)


def _toolchain(tools: Toolchain) -> Iterator[Path]:
    """The folders of the compilers and the headers."""
    yield from (tools.device, tools.cutlass)
    host = shutil.which(os.environ.get("NVCC_CCBIN") or "gcc")
    for program in (tools.nvcc, *((Path(host),) if host else ())):
        for path in {program.absolute(), program.resolve()}:
            yield from _installed(path)
    yield from Path("/usr/local").glob("cuda*")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield from _parts(Path(os.environ[name]).absolute())
    yield from (Path(p) for p in os.environ.get(READS, "").split(os.pathsep) if p)


def _installed(program: Path) -> Iterator[Path]:
    """The folders of the installation that has PREFIX/bin/program."""
    folder = program.parent
    if folder.name == "bin":
        yield from _parts(folder.parent)
    else:
        yield folder


def _parts(prefix: Path) -> Iterator[Path]:
    """A prefix, or its subfolders for a compiler if the prefix is shared."""
    home = Path(os.path.expanduser("~")).absolute()
    if prefix in _SHARED:
        yield from (prefix / part for part in _PARTS)
    elif prefix in (home, *home.parents):
        yield prefix / "bin"
    else:
        yield prefix


def _watch(child: subprocess.Popen[bytes], limits: CompilerLimits) -> None:
    """Wait for the end of the compiler. Raises Failed with FW825 if it exceeds a limit."""
    until, ticks = time.monotonic() + limits.seconds, 0
    while child.poll() is None:
        if time.monotonic() > until:
            raise _too_much(f"it was stopped after {limits.seconds:g} seconds")
        if ticks % _LOOK == 0:
            held = use(child.pid)
            if held.memory > limits.memory:
                raise _too_much(f"it took more than {limits.memory / GB:.3g} GB of memory")
            if held.processes > limits.processes:
                raise _too_much(f"it started more than {limits.processes} processes")
        ticks += 1
        time.sleep(_TICK)


def _largest(place: Path) -> int:
    return max((p.lstat().st_size for p in place.iterdir()), default=0)


def _both_ends(file: int, most: int) -> str:
    size = os.fstat(file).st_size
    if size <= most:
        data = os.pread(file, size, 0)
    else:
        half = most // 2
        data = os.pread(file, half, 0) + b"\n...\n" + os.pread(file, half, size - half)
    return data.decode(errors="replace")


def _too_much(text: str) -> Failed:
    hint = (
        "the code makes the compiler work without end or nearly so: templates or constexpr that do "
        "not come to an end, macros that grow, loops that are unrolled too far"
    )
    return blame.unfinished(f"nvcc on this code: {text}", hint)
