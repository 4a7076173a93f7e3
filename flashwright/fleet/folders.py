"""Folders as data, so that a job takes its files to another machine and brings back its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from flashwright.files import cannot, replace

FolderFiles = Mapping[str, bytes]
"""Contents by path, with `/` between folders."""
Change = tuple[str, bytes | None]
"""A path and its new content; None if it is gone."""
_HALF = ".tmp"
"""The end of the names of files that are being written (files.py)."""


def packed(folder: Path) -> dict[str, bytes]:
    """All files of a folder and its subfolders, none if it is missing. Raises Failed, FW001."""
    try:
        every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}
    except OSError as error:
        raise cannot("read", folder, error) from None


def apply(changes: Iterable[Change], folder: Path) -> None:
    """Make changes to a folder, in their order."""
    for name, data in changes:
        if data is not None:
            unpack({name: data}, folder)
            continue
        try:
            (folder / _inside(name)).unlink(missing_ok=True)
        except OSError as error:
            raise cannot("write", folder, error) from None


def unpack(files: FolderFiles, folder: Path) -> Path:
    """Write files into a folder; returns it. Files that are there and not named stay."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            path = folder / _inside(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, data)
    except OSError as error:
        raise cannot("write", folder, error) from None
    return folder


def _inside(name: str) -> PurePosixPath:
    """A path that stays in its folder: a worker may be a machine of somebody else's."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise PermissionError(1, "it would be outside of the folder", name)
    return path


@dataclass
class FolderChanges:
    """Watches a folder from when it is made: what has changed since it was last asked."""

    folder: Path
    _known: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._look()

    def take(self) -> tuple[Change, ...]:
        """The changes since the last call, in the order in which the files were written."""
        before, self._known = self._known, self._look()
        gone = [name for name in before if name not in self._known]
        new = [name for name, stamp in self._known.items() if before.get(name) != stamp]
        new.sort(key=lambda name: self._known[name])
        return (
            *((name, None) for name in gone),
            *((name, (self.folder / name).read_bytes()) for name in new),
        )

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """The time, the number and the size of each file."""
        found = {}
        for path in self.folder.rglob("*"):
            if path.name.endswith(_HALF) or not path.is_file():
                continue
            stamp = path.stat()
            name = path.relative_to(self.folder).as_posix()
            found[name] = (stamp.st_mtime_ns, stamp.st_ino, stamp.st_size)
        return found
