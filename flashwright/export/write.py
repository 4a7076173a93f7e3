"""Writes an export: all of its files, or none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed

Files = Mapping[str, str | bytes]


def check_target(target: Path) -> None:
    """Raise Failed with FW001 unless the folder is new or empty."""
    try:
        there = target.is_symlink() or target.exists()
        free = not there or (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise cannot("use", target, error) from None
    if not free:
        text = f"{target} is there already, and an export writes a new folder"
        raise Failed(Diagnostic("FW001", text, help="give another folder with --out, or remove it"))


def write(target: Path, files: Files) -> None:
    """Write the files aside, then rename the folder: a killed export leaves no half of it.

    Raises Failed with FW001 if the folder is in use or cannot be written.
    """
    check_target(target)
    target = Path(os.path.abspath(target))  # `.` has no name
    aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        for name, data in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        os.rename(aside, target)
    except OSError as error:
        raise cannot("write", target, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
