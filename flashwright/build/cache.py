"""The build cache: compiled kernels by a digest of everything that went into them.

An entry is one file, written atomically: a reader sees a whole entry or none. Its first line is a
digest of the rest, so a damaged entry is detected, removed and built again; the second is JSON with
the resource usage. Processes that build the same kernel at once wait for each other, and the later
ones find it in the cache. The cache never makes a build fail: if it cannot be used, the build
continues without it and reports why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.files import replace, take_lock

MIB = 1 << 20
LIMIT = 512 * MIB  # some thousand kernels
LEFT_OVER = 3600.0  # seconds after which a work folder counts as abandoned
FORMAT = 1


@dataclass(frozen=True)
class CacheEntry:
    """The result of one build."""

    facts: Mapping[str, Any]
    cubin: bytes
    ptx: bytes


def folder() -> Path:
    """The user's cache: $FLASHWRIGHT_CACHE, else flashwright in the usual place."""
    named = os.environ.get("FLASHWRIGHT_CACHE")
    if named:
        return Path(named)
    usual = os.environ.get("XDG_CACHE_HOME")
    # A relative XDG_CACHE_HOME is to be ignored (XDG base directory specification).
    if usual and Path(usual).is_absolute():
        return Path(usual, "flashwright")
    try:
        return Path.home() / ".cache" / "flashwright"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir(), "flashwright")


def limit() -> int:
    """The most bytes the cache may hold: $FLASHWRIGHT_CACHE_MB, else half a GiB."""
    text = os.environ.get("FLASHWRIGHT_CACHE_MB", "")
    return int(text) * MIB if text.isdecimal() else LIMIT


def digest(parts: Sequence[str | bytes], trees: Sequence[Path]) -> str:
    """A digest of the texts and of every file under the folders: the key of a build."""
    whole = hashlib.sha256(f"flashwright {FORMAT}\n".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(b"%d\n" % len(data) + data)
    for tree in trees:
        for path in sorted(p for p in tree.rglob("*") if p.is_file()):
            data = path.read_bytes()
            name = path.relative_to(tree).as_posix()
            whole.update(f"{name}\n{len(data)}\n".encode() + data)
    return whole.hexdigest()


class Cache:
    """A folder of entries. No method raises for errors of the disk; `trouble` has the message."""

    def __init__(self, root: Path | None = None, most: int | None = None) -> None:
        self.root = folder() if root is None else root
        self.most = limit() if most is None else most
        self.trouble: str | None = None
        self.kernels = self.root / "kernels"

    def get(self, key: str) -> CacheEntry | None:
        """The entry, or None. A damaged entry is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        entry = _unpacked(data)
        with contextlib.suppress(OSError):
            if entry is None:
                path.unlink()
            else:
                os.utime(path)  # marks it as recently used
        return entry

    def put(self, key: str, entry: CacheEntry) -> None:
        """Store an entry, then evict the least recently used ones beyond the limit."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, _packed(entry))
        except OSError as error:
            self._note(error)
            return
        with contextlib.suppress(OSError):
            self._prune(path)

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty work folder, removed at the end, or by a later run if the process is killed."""
        try:
            parent = self.root / "work"
            parent.mkdir(parents=True, exist_ok=True)
            self._sweep(parent)
            place = Path(tempfile.mkdtemp(dir=parent))
        except OSError as error:
            self._note(error)
            place = Path(tempfile.mkdtemp(prefix="flashwright-"))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, key: str, patience: float) -> Iterator[None]:
        """Hold the lock of a key. After `patience` seconds, continue without: it only saves work.

        The operating system releases the lock when the process ends.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                locks = self.root / "locks"
                locks.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(locks / key[:3], "w"))  # a bounded number of them
                until = time.monotonic() + patience
                while time.monotonic() < until and not take_lock(file):
                    time.sleep(0.05)
            yield

    def _path(self, key: str) -> Path:
        return self.kernels / key[:2] / key

    def _note(self, error: OSError) -> None:
        self.trouble = f"{self.root}: {error.strerror or type(error).__name__}"

    def _prune(self, newest: Path) -> None:
        """Evict the least recently used entries, never the newest."""
        files = []
        for path in self.kernels.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may remove it too
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.most:
                break
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size

    def _sweep(self, parent: Path) -> None:
        """Remove work folders of killed builds."""
        for place in parent.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - place.stat().st_mtime > LEFT_OVER:
                    shutil.rmtree(place, ignore_errors=True)


def _packed(entry: CacheEntry) -> bytes:
    told = {"facts": dict(entry.facts), "cubin": len(entry.cubin), "ptx": len(entry.ptx)}
    rest = json.dumps(told).encode() + b"\n" + entry.cubin + entry.ptx
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def _unpacked(data: bytes) -> CacheEntry | None:
    sha256, _, rest = data.partition(b"\n")
    if sha256 != hashlib.sha256(rest).hexdigest().encode():
        return None
    head, _, body = rest.partition(b"\n")
    told = json.loads(head)
    return CacheEntry(told["facts"], body[: told["cubin"]], body[told["cubin"] :])
