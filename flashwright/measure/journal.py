"""The file of a benchmark: each record a line, on disk as soon as it is known.

A run may be ended at any moment, and a disk may be full: what was written stays readable, and what
could not be written is kept and tried again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.records import RECORD, Record

RECORDS = "records.jsonl"

Put = Callable[[Path, int, bytes], None]
"""Write bytes at a place of a file, for good; OSError where that is not possible."""


def put(path: Path, at: int, data: bytes) -> None:
    """Cut the file off there, write, and wait until the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, at)  # half a line that a full disk has left
        os.lseek(handle, at, os.SEEK_SET)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """The records of a run, in memory and, as far as the disk allows, in its file."""

    def __init__(
        self, path: Path, known: Iterable[Record] = (), size: int = 0, put: Put = put
    ) -> None:
        self.path = path
        self.records: list[Record] = list(known)
        self.trouble = ""
        """Why something is not on disk; empty where everything is."""
        self._size, self._put = size, put
        self._waiting: list[bytes] = []

    @classmethod
    def begin(cls, folder: Path, put: Put = put) -> tuple[Journal, str]:
        """A new file; one that is there already is kept as NAME.bak, which is then returned."""
        path, kept = folder / RECORDS, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                kept = f"{RECORDS}.bak"
                os.replace(path, folder / kept)
        except OSError as error:
            raise cannot("use", folder, error) from None
        return cls(path, put=put), kept

    @classmethod
    def resume(cls, folder: Path, put: Put = put) -> Journal:
        """Go on with a file; where there is none, begin one."""
        path = folder / RECORDS
        if not path.exists():
            return cls.begin(folder, put)[0]
        records, size, last = _read(path)
        going_on = cls(path, records, size, put)
        if last is not None:
            going_on.add(last)
        return going_on

    @property
    def unsaved(self) -> int:
        """Records that are not on disk."""
        return len(self._waiting)

    def add(self, record: Record) -> None:
        """Keep a record, and write it; a disk that does not take it is no end."""
        self.records.append(record)
        self._waiting.append(record.model_dump_json(exclude_defaults=False).encode() + b"\n")
        self.save()

    def save(self) -> bool:
        """Write what is not on disk yet; whether all is."""
        while self._waiting:
            line = self._waiting[0]
            try:
                self._put(self.path, self._size, line)
            except OSError as error:
                self.trouble = f"cannot write {self.path}: {error.strerror or error}"
                return False
            self._size += len(line)
            self._waiting.pop(0)
        self.trouble = ""
        return True


def read(path: Path) -> list[Record]:
    """The records of a file or of a benchmark's folder; half a line at its end is left out.

    Failed where a line is no record.
    """
    records, _, last = _read(path / RECORDS if path.is_dir() else path)
    return records if last is None else [*records, last]


def _read(path: Path) -> tuple[list[Record], int, Record | None]:
    """The records of whole lines, how many bytes these are, and a last one without a line's end."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from None
    *lines, rest = data.split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(RECORD.validate_json(line))
            except ValidationError as error:
                raise _bad(path, number, error) from None
    size, last = len(data) - len(rest), None
    with contextlib.suppress(ValidationError):
        last = RECORD.validate_json(rest)
    return records, size, last


def _bad(path: Path, number: int, error: ValidationError) -> Failed:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    text = f"{path}, line {number} is no record of a benchmark: {where}: {first['msg']}"
    hint = "`flashwright bench` writes such files: records.jsonl in the folder it names"
    return Failed(Diagnostic("FW001", text, help=hint))
