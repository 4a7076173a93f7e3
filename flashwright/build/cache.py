"""What was compiled before, by the content of everything that went into it.

An entry is one file, put into its place in one step: a reader sees a whole one or none. Its first
line is a digest of the rest, so an entry that a disk or a person has damaged is seen, thrown away
and built again; the second is JSON with the facts. Processes that build the same thing at once take
turns, and the later ones find it done. The cache never makes a build fail: where it cannot be used,
it says so and the build goes on without it.
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
LEFT_OVER = 3600.0  # seconds after which a work folder belongs to nobody alive
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """What one build gave."""

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
    """One name for all that decides a build: the texts, and every file under the folders."""
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
    """A folder of entries. No method raises for what is wrong with the disk; `trouble` says it."""

    def __init__(self, root: Path | None = None, most: int | None = None) -> None:
        self.root = folder() if root is None else root
        self.most = limit() if most is None else most
        self.trouble: str | None = None
        self.kernels = self.root / "kernels"

    def get(self, key: str) -> Entry | None:
        """The entry, if it is there and whole; a damaged one is thrown away."""
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
                os.utime(path)  # used now: it is not the next to go
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry; then throw away the longest unused ones beyond the limit."""
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
        """An empty folder that goes when the work is done, or an hour after it was killed."""
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
    def turn(self, key: str, patience: float) -> Iterator[None]:
        """Wait until nobody else builds this; not longer than `patience`, for it only saves work.

        The lock is the operating system's: it goes with the process that holds it.
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
        """Oldest use first, never the entry just made."""
        files = []
        for path in self.kernels.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may be at it too
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
        """Remove what killed builds have left."""
        for place in parent.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - place.stat().st_mtime > LEFT_OVER:
                    shutil.rmtree(place, ignore_errors=True)


def _packed(entry: Entry) -> bytes:
    told = {"facts": dict(entry.facts), "cubin": len(entry.cubin), "ptx": len(entry.ptx)}
    rest = json.dumps(told).encode() + b"\n" + entry.cubin + entry.ptx
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def _unpacked(data: bytes) -> Entry | None:
    sha256, _, rest = data.partition(b"\n")
    if sha256 != hashlib.sha256(rest).hexdigest().encode():
        return None
    head, _, body = rest.partition(b"\n")
    told = json.loads(head)
    return Entry(told["facts"], body[: told["cubin"]], body[told["cubin"] :])
