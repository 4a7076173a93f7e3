"""Atomic writes, bounded reads and digests of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from flashwright.lang.diagnostic import Diagnostic, Failed


def take_lock(file: IO[Any]) -> bool:
    """Take the lock of an open file; False if another process holds it.

    The lock is the operating system's and ends with the process. Windows has none of this kind:
    there every process gets it.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(path: Path, data: str | bytes) -> None:
    """Write a file atomically. Raises Failed with FW001 if that is not possible."""
    try:
        target = path.resolve()  # through a link, as an ordinary write would go
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        replace(target, data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise cannot("write", path, error) from None


def replace(target: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one."""
    # A process id is not unique on a shared disk: another machine may use the same.
    temporary = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:  # Ctrl-C too: leave no partial file
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def cannot(verb: str, path: Path, error: OSError) -> Failed:
    """The Failed (FW001) for a file or folder that cannot be used."""
    reason = error.strerror or type(error).__name__
    hint = "give another folder with --out" if verb == "use" else None
    return Failed(Diagnostic("FW001", f"cannot {verb} {path}: {reason}", help=hint))


# --- files that anybody may have made ---------------------------------------------------------

MOST_BYTES = 64 << 20
"""The largest file of a kernel package. The largest kernels we know have cubins of 1 MB."""


def content(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """The bytes of a regular file, or None if there is none. Links are followed.

    Raises Failed with FW852 for a folder, a pipe or a device, and for a file that cannot be read or
    has more than `most` bytes. Opening a pipe could block, and a device may be endless.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise Failed(Diagnostic("FW852", f"{path} is not a file"))
        with open(number, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(number)
    if len(data) > most:
        raise Failed(Diagnostic("FW852", f"{path} has more than {most} bytes"))
    return data


def _unreadable(path: Path, error: OSError | ValueError) -> Failed:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return Failed(Diagnostic("FW852", f"cannot read {path}: {reason}"))


# --- files of an earlier run ------------------------------------------------------------------


def sha256(data: str | bytes) -> str:
    """The digest of a file's content, as records store it."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def recorded(path: Path) -> dict[str, str]:
    """The digests in an earlier run's record; empty without a record."""
    try:
        return dict(json.loads(content(path) or b"")["artefacts"])
    except (Failed, ValueError, KeyError, TypeError, RecursionError):
        return {}


def set_aside(folder: Path, names: Iterable[str], ours: Mapping[str, str]) -> tuple[str, ...]:
    """Remove the files of an earlier run, so that no old file passes as new.

    A file that the user has changed is renamed to NAME.bak. Returns those names.
    """
    kept = []
    try:
        for name in names:
            path = folder / name
            if path.exists() and ours.get(name) != sha256(path.read_bytes()):
                os.replace(path, folder / f"{name}.bak")
                kept.append(name)
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    return tuple(kept)
