"""Where a candidate's process lives: its folder, its environment, and the files it leaves."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

IN_WORKER = "FLASHWRIGHT_WORKER"
"""Set in a candidate's process."""
_KEPT = ("PATH", "LANG", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "CC", "CXX")
_KEPT_BEGINNINGS = ("CUDA", "NVIDIA", "TORCH", "TRITON", "LC_", "FLASHWRIGHT", "PYTORCH")
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
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
