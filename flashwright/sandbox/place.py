"""Where a candidate's process lives: its folder, its environment, and the files it leaves."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from flashwright.confine import landlock
from flashwright.confine.start import Policy
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
    *("null", "zero", "full", "random", "urandom", "nvidia*", "nvhost*", "nvmap", "nvgpu"),
    *("dri", "dxg"),
)
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


# --- code that nobody has read ----------------------------------------------------------------


def policy(candidate: Candidate, folder: Path, env: Mapping[str, str], limits: Limits) -> Policy:
    """What the process of an untrusted candidate may do: compute, with its folder to write in."""
    devices = (str(path) for name in _DEVICES for path in Path("/dev").glob(name))
    kept = {name: value for name, value in env.items() if not _CACHE.search(name)}
    return Policy(
        readable=(*_SYSTEM, *dict.fromkeys(_installed()), candidate.where),
        writable=(str(folder), _THREADS, *devices),
        file_bytes=limits.file_bytes,
        environment={**kept, "TMPDIR": str(folder)},  # caches go to its HOME, which is there too
    )


def _installed() -> Iterator[str]:
    """Where Python and its packages are; never a folder that all of somebody's files are in."""
    home, here = Path(os.path.expanduser("~")).resolve(), Path.cwd()
    yield str(Path(__file__).parents[2])
    for prefix in (sys.prefix, sys.base_prefix):
        everything = home.is_relative_to(Path(prefix).resolve())
        yield from (f"{prefix}/bin", f"{prefix}/lib") if everything else (prefix,)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    toolkits = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    for path in (Path(p).resolve() for p in (*sys.path, *libraries, *toolkits) if p):
        if not home.is_relative_to(path) and not here.is_relative_to(path):
            yield str(path)
