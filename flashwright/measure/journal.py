"""The file of a benchmark: one record per line, written as soon as it is known.

A run may end at any moment and a disk may be full: written records stay readable, and records that
could not be written stay in memory and are tried again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import seal
from flashwright.measure.records import RECORD, Record

RECORDS = "records.jsonl"
MAX_BYTES = 64 << 20
"""Limit of a file that is read: a hundred times the paper's grid, which has 288 numbers."""

Put = Callable[[Path, int, bytes], None]
"""Writes bytes durably at an offset of a file. Raises OSError."""


def put(path: Path, at: int, data: bytes) -> None:
    """Truncate the file at the offset, write, and fsync."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, at)  # drops half a line left by a full disk
        os.lseek(handle, at, os.SEEK_SET)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """The records of a run, in memory and in its file."""

    def __init__(
        self, path: Path, known: Iterable[Record] = (), size: int = 0, put: Put = put
    ) -> None:
        self.path = path
        self.records: list[Record] = list(known)
        self.write_error = ""
        """Why a record is not on disk; empty if all are."""
        self._size, self._put = size, put
        self._waiting: list[bytes] = []
        self._last = ""
        for link in seal.chain(_plain(record) for record in self.records):
            self._last = link.value

    @classmethod
    def begin(cls, folder: Path, put: Put = put) -> tuple[Journal, str]:
        """Start a new file. An existing one is renamed to NAME.bak, and that name is returned."""
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
        """Continue a file, or start one if there is none."""
        path = folder / RECORDS
        if not path.exists():
            return cls.begin(folder, put)[0]
        lines, size, last = _read(path)
        going_on = cls(path, [line.record for line in lines], size, put)
        if lines:
            going_on._last = lines[-1].link.value
        if last is not None:
            going_on._last = last.link.value
            going_on._keep(last.record)  # with its old digest: resuming certifies nothing
        return going_on

    @property
    def unsaved(self) -> int:
        """The number of records that are not on disk."""
        return len(self._waiting)

    def add(self, record: Record) -> None:
        """Append a record with its digest and write it; a failed write sets `write_error`."""
        self._last = seal.digest(self._last, _plain(record))
        self._keep(record.model_copy(update={seal.FIELD: self._last}))

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._waiting.append(record.model_dump_json(exclude_defaults=False).encode() + b"\n")
        self.save()

    def save(self) -> bool:
        """Write the records that are not on disk; returns whether all are."""
        while self._waiting:
            line = self._waiting[0]
            try:
                self._put(self.path, self._size, line)
            except OSError as error:
                self.write_error = f"cannot write {self.path}: {error.strerror or error}"
                return False
            self._size += len(line)
            self._waiting.pop(0)
        self.write_error = ""
        return True


@dataclass(frozen=True)
class JournalLine:
    """One line of a file: its number, its record, and its link in the chain of digests."""

    number: int
    record: Record
    link: seal.Link


def read(path: Path) -> list[Record]:
    """The records of a file or of a benchmark's folder; an incomplete last line is skipped.

    Raises Failed if a line is not a record.
    """
    return [line.record for line in read_lines(path)]


def read_lines(path: Path) -> list[JournalLine]:
    """Like `read`, but as lines with their digests."""
    lines, _, last = _read(path / RECORDS if path.is_dir() else path)
    return lines if last is None else [*lines, last]


def _read(path: Path) -> tuple[list[JournalLine], int, JournalLine | None]:
    """The complete lines, their size in bytes, and a last record without a newline, if any."""
    data = _bytes(path)
    *texts, rest = data.split(b"\n")
    lines: list[JournalLine] = []
    before = ""
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                lines.append(_line(number, text, before))
            except (ValueError, RecursionError) as error:
                raise _bad(path, number, error) from None
            before = lines[-1].link.value
    size = len(data) - len(rest)
    try:
        return lines, size, _line(len(texts) + 1, rest, before)
    except (ValueError, RecursionError) as error:
        if rest.strip() and not _half(error):
            raise _bad(path, len(texts) + 1, error) from None
        return lines, size, None


def _half(error: Exception) -> bool:
    """Whether a line is not JSON, like a line that was cut off."""
    return isinstance(error, ValidationError) and error.errors()[0]["type"] == "json_invalid"


def _bytes(path: Path) -> bytes:
    """The bytes of a file. Raises Failed if there are too many (a device may be endless)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise cannot("read", path, error) from None
    if len(data) > MAX_BYTES:
        text = f"{path} is too large: a benchmark's file has at most {MAX_BYTES >> 20} MB"
        raise Failed(Diagnostic("FW001", text))
    return data


def _line(number: int, text: bytes, before: str) -> JournalLine:
    """Parse one line. Raises ValueError (also from pydantic) or RecursionError."""
    record = RECORD.validate_json(text, strict=True)
    return JournalLine(number, record, next(seal.chain([json.loads(text)], before)))


def _plain(record: Record) -> dict[str, object]:
    """The record as the JSON object of its line."""
    found: dict[str, object] = json.loads(record.model_dump_json())
    return found


def _bad(path: Path, number: int, error: Exception) -> Failed:
    text = f"{path}, line {number} is not a record of a benchmark: {_why(error)}"
    hint = "`flashwright bench` writes such files: records.jsonl in the folder it names"
    return Failed(Diagnostic("FW001", text, help=hint))


def _why(error: Exception) -> str:
    """The first invalid field and the reason."""
    if not isinstance(error, ValidationError):
        return str(error)[:200]
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part)[:100] for part in first['loc'])}: {first['msg']}"
