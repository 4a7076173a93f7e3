"""Where a candidate's process lives: its folder, its environment, and the files it leaves."""

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
"""Set in a candidate's process."""
_KEPT = ("PATH", "LANG", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "CC", "CXX")
_KEPT_BEGINNINGS = ("CUDA", "NVIDIA", "TORCH", "TRITON", "LC_", "FLASHWRIGHT", "PYTORCH")
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
_CACHE = re.compile(r"CACHE|T(?:ORCH|RITON)_HOME")
_SYSTEM = (  # what Python, PyTorch and CUDA's driver look at
    *(*landlock.SYSTEM, "/proc", "/sys", "/run/opengl-driver", "/run/nvidia"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/os-release"),
    *("/etc/nvidia", "/etc/OpenCL", "/etc/vulkan"),
)
_DEVICES = (  # not all of /dev: what others have in shared memory is there, and disks are
    *("null", "zero", "full", "random", "urandom"),
    *("nvidiactl", "nvidia[0-9]*", "nvidia-uvm", "nvidia-caps"),  # not what debuggers watch with
    *("nvhost*", "nvmap", "nvgpu", "dxg"),  # Tegra, and Windows' subsystem for Linux
)
READS = "FLASHWRIGHT_CANDIDATE_READS"
"""Further files and folders that a candidate may read, as in PATH; not one that a model wrote."""
_PACKAGE = "launch.json"
_THREADS = "/proc/self/task"
"""The driver gives its threads names, and does not start where it cannot."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def opened(path: Path) -> BinaryIO:
    """A plain file to read: whoever has put a pipe or a link there would make the judge wait."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} is no plain file")
    return os.fdopen(number, "rb")


def make_folder() -> Path:
    """A folder in memory where there is room for it: tensors go through it."""
    shared = _SHARED_MEMORY
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    room = usable and shutil.disk_usage(shared).free > _ROOM
    return Path(tempfile.mkdtemp(prefix="flashwright-", dir=shared if room else None))


def environment(folder: Path) -> dict[str, str]:
    """What a candidate may know of the user's environment: no keys, no home."""
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
    """What a candidate's process may do: compute, with its folder to write in.

    `before` is the command of a tool that it runs under.
    """
    devices = (str(path) for name in _DEVICES for path in Path("/dev").glob(name))
    kept = {name: value for name, value in env.items() if not _CACHE.search(name)}
    own = (candidate.where,) if candidate.untrusted else tuple(_own(candidate))
    return Policy(
        readable=(*_SYSTEM, *dict.fromkeys((*_installed(), *own))),
        writable=(str(folder), _THREADS, *devices, *_tool_files(before)),
        file_bytes=limits.file_bytes,
        environment={**kept, "TMPDIR": str(folder)},  # caches go to its HOME, which is there too
        must=confinement(),
        watched=bool(before),
    )


def confinement() -> tuple[str, ...]:
    """What this system can refuse a process."""
    files = (FILES,) if landlock.available() else ()
    return (*files, CALLS) if seal.available() else files


def need_confinement(candidate: Candidate) -> None:
    """FW851 for what a model wrote, where its process could open every file of the user's."""
    allowed = os.environ.get(UNCONFINED) == "1"
    if not candidate.untrusted or landlock.available() or allowed:
        return
    text = f"{candidate.name} is not run: a model wrote it, and this system has no Landlock"
    hint = (
        "its code could open every file of yours. Linux has Landlock since 5.13; --unconfined, or "
        f"{UNCONFINED}=1, runs the code nevertheless, best in a container"
    )
    raise Failed(Diagnostic("FW851", text, help=hint))


def _own(candidate: Candidate) -> Iterator[str]:
    """What belongs to code that the user chose: its folder, where modules are, what is named."""
    yield from filter(None, os.environ.get(READS, "").split(os.pathsep))
    if candidate.kind == "package":
        yield candidate.where
        # Kernels that are built side by side are measured in one process.
        yield from (str(plan.parent) for plan in Path(candidate.where).parent.glob(f"*/{_PACKAGE}"))
        return
    beside = [Path(candidate.where)] if Path(candidate.where).is_absolute() else []
    yield from map(str, beside)
    for place in {*(path.parent for path in beside), *(Path(p or ".").resolve() for p in sys.path)}:
        yield from _modules(place)


def _modules(folder: Path) -> Iterator[str]:
    """A folder of code; only the modules in one that holds other things as well."""
    if not _shared(folder):
        yield str(folder)
        return
    yield from map(str, folder.glob("*.py"))
    yield from (str(file.parent) for file in folder.glob("*/__init__.py"))


def _tool_files(command: Sequence[str]) -> Iterator[str]:
    """Where a tool writes to: files that its options name, and where it has its sockets."""
    if command:
        yield tempfile.gettempdir()
    for path in map(Path, command[1:]):
        if path.is_absolute() and path.parent.is_dir():
            path.touch()
            yield str(path)


def _installed() -> Iterator[str]:
    """Where Python and its packages are; never a folder that all of somebody's files are in."""
    home, here = _home(), Path.cwd()
    yield str(Path(__file__).parents[2])
    for prefix in (sys.prefix, sys.base_prefix):
        everything = home.is_relative_to(Path(prefix).resolve())
        yield from (f"{prefix}/bin", f"{prefix}/lib") if everything else (prefix,)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    toolkits = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    for path in (Path(p).resolve() for p in (*sys.path, *libraries, *toolkits) if p):
        if not _shared(path) and not here.is_relative_to(path):
            yield str(path)


def _shared(folder: Path) -> bool:
    """Whether all of a user's files are in it, or temporary ones, other candidates' too."""
    held = (_home(), Path(tempfile.gettempdir()).resolve(), _SHARED_MEMORY)
    return any(path.is_relative_to(folder) for path in held)


def _home() -> Path:
    return Path(os.path.expanduser("~")).resolve()
