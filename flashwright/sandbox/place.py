"""The surroundings of a candidate's process: its folder, its environment, the files it may open."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from flashwright.confine import landlock, seal
from flashwright.confine.start import CALLS, FILES, UNCONFINED, Policy
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits

IN_WORKER = "FLASHWRIGHT_WORKER"
"""An environment variable that is set in a candidate's process."""
_KEPT = ("PATH", "LANG", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "CC", "CXX")
_KEPT_BEGINNINGS = ("CUDA", "NVIDIA", "TORCH", "TRITON", "LC_", "FLASHWRIGHT", "PYTORCH")
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
_CACHE = re.compile(r"CACHE|T(?:ORCH|RITON)_HOME")
_SYSTEM = (  # what Python, PyTorch and CUDA's driver read
    *(*landlock.SYSTEM, "/proc", "/sys", "/run/opengl-driver", "/run/nvidia"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/os-release"),
    *("/etc/nvidia", "/etc/OpenCL", "/etc/vulkan"),
)
_DEVICES = (  # not all of /dev, which has disks and other processes' shared memory
    *("null", "zero", "full", "random", "urandom"),
    *("nvidiactl", "nvidia[0-9]*", "nvidia-uvm", "nvidia-caps"),  # not what debuggers watch with
    *("nvhost*", "nvmap", "nvgpu", "dxg"),  # Tegra, and Windows' subsystem for Linux
)
TOOLS_FILES = ("/proc",)
"""What a tool has to leave to the process that it starts, whose own part of /proc nobody knows
before."""
READS = "FLASHWRIGHT_CANDIDATE_READS"
"""Further files and folders that a candidate may read, separated as in PATH. It has no effect for
a candidate that a model wrote."""
_PACKAGE = "launch.json"
_THREADS = "/proc/self/task"
"""The driver names its threads through this folder, and does not start if it cannot."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def opened(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError for a pipe or a link, on which the judge
    would wait."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(number, "rb")


def make_folder() -> Path:
    """A new temporary folder, in memory if there is room."""
    shared = _SHARED_MEMORY
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    room = usable and shutil.disk_usage(shared).free > _ROOM
    return Path(tempfile.mkdtemp(prefix="flashwright-", dir=shared if room else None))


def environment(folder: Path) -> dict[str, str]:
    """The environment of a candidate's process: without the user's keys and home folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name in _KEPT or name.startswith(_KEPT_BEGINNINGS)) and not _SECRET.search(name)
    }
    package = str(Path(__file__).parents[2])
    paths = [package, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    absolute = os.pathsep.join(str(Path(p).resolve()) for p in paths)
    return {
        **kept,
        "PYTHONPATH": absolute,
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        IN_WORKER: "1",
    }


# --- what it may do ---------------------------------------------------------------------------


def policy(
    candidate: Candidate,
    folder: Path,
    env: Mapping[str, str],
    limits: Limits,
    before: Sequence[str] = (),
) -> Policy:
    """The policy of a candidate's process: it computes and writes to its folder only.

    `before` is the command of a tool that it runs under.
    """
    devices = (str(path) for name in _DEVICES for path in Path("/dev").glob(name))
    kept = {name: value for name, value in env.items() if not _CACHE.search(name)}
    own = (candidate.where,) if candidate.untrusted else tuple(_candidate_files(candidate))
    return Policy(
        readable=(*_SYSTEM, *dict.fromkeys((*_installed(), *own))),
        writable=(str(folder), _THREADS, *devices, *_tool_files(before)),
        file_bytes=limits.file_bytes,
        environment={**kept, "TMPDIR": str(folder)},  # caches go to its HOME, which is there too
        must=confinement(),
        watched=bool(before),
    )


def confinement() -> tuple[str, ...]:
    """The kinds of confinement that this system has: FILES (Landlock), CALLS (seccomp)."""
    files = (FILES,) if landlock.available() else ()
    return (*files, CALLS) if seal.available() else files


def need_confinement(candidate: Candidate) -> None:
    """Raise Failed with FW851 if a model wrote the candidate and this system has no Landlock."""
    allowed = os.environ.get(UNCONFINED) == "1"
    if not candidate.untrusted or landlock.available() or allowed:
        return
    text = f"{candidate.name} is not run: a model wrote it, and this system has no Landlock"
    hint = (
        "its code could open all of your files. Linux has Landlock since 5.13; --unconfined, or "
        f"{UNCONFINED}=1, runs the code anyway, best in a container"
    )
    raise Failed(Diagnostic("FW851", text, help=hint))


def _candidate_files(candidate: Candidate) -> Iterator[str]:
    """The files that a candidate of the user's may read: its folder, its modules, those in
    FLASHWRIGHT_CANDIDATE_READS."""
    yield from filter(None, os.environ.get(READS, "").split(os.pathsep))
    if candidate.kind == "package":
        yield candidate.where
        # Kernels in sibling folders are measured in one process.
        yield from (str(plan.parent) for plan in Path(candidate.where).parent.glob(f"*/{_PACKAGE}"))
        return
    beside = [Path(candidate.where)] if Path(candidate.where).is_absolute() else []
    yield from map(str, beside)
    for place in {*(path.parent for path in beside), *(Path(p or ".").resolve() for p in sys.path)}:
        yield from _modules(place)


def _modules(folder: Path) -> Iterator[str]:
    """A folder of code, or only the modules in a folder that holds other files as well."""
    if not _holds_other_files(folder):
        yield str(folder)
        return
    yield from map(str, folder.glob("*.py"))
    yield from (str(file.parent) for file in folder.glob("*/__init__.py"))


def _tool_files(command: Sequence[str]) -> Iterator[str]:
    """The files that a tool writes to: those its options name, and the folder of its sockets."""
    if command:
        yield tempfile.gettempdir()
    for path in map(Path, command[1:]):
        if path.is_absolute() and path.parent.is_dir():
            path.touch()
            yield str(path)


def _installed() -> Iterator[str]:
    """The folders of Python and its packages, except a folder with all of a user's files."""
    home, here = _home(), Path.cwd()
    yield str(Path(__file__).parents[2])
    for prefix in (sys.prefix, sys.base_prefix):
        everything = home.is_relative_to(Path(prefix).resolve())
        yield from (f"{prefix}/bin", f"{prefix}/lib") if everything else (prefix,)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    toolkits = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    for path in (Path(p).resolve() for p in (*sys.path, *libraries, *toolkits) if p):
        if not _holds_other_files(path) and not here.is_relative_to(path):
            yield str(path)


def _holds_other_files(folder: Path) -> bool:
    """Whether a folder holds all of a user's files, or temporary files of other candidates."""
    held = (_home(), Path(tempfile.gettempdir()).resolve(), _SHARED_MEMORY)
    return any(path.is_relative_to(folder) for path in held)


def _home() -> Path:
    return Path(os.path.expanduser("~")).resolve()
