"""Folders as data, so that a job takes its files to another machine and brings back its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from flashwright.files import cannot, replace

FolderFiles = Mapping[str, bytes]
"""Contents by path, with `/` between folders."""


def packed(folder: Path) -> dict[str, bytes]:
    """All files of a folder and its subfolders. Raises Failed with FW001."""
    try:
        every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}
    except OSError as error:
        raise cannot("read", folder, error) from None


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
