"""Read files as text, JSON or validated data; each error names the file and the place."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flashwright.files import cannot, content
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec, BadSpec

MAX_BYTES = 256 << 20  # a benchmark's records hold sources; more than this is some other file

Model = TypeVar("Model", bound=BaseModel)


def bad(path: Path, why: str, within: str = "") -> Failed:
    """The error of an invalid file."""
    place = f"{path}: {within}" if within else str(path)
    hint = "create it again with generate, verify --json or bench"
    return Failed(Diagnostic("FW852", f"{place}: {why}", help=hint))


def bytes_of(path: Path) -> bytes:
    """The bytes of a file. Raises Failed if it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise bad(path, f"is larger than {MAX_BYTES >> 20} MB")
    except OSError as error:
        raise cannot("read", path, error) from None
    data = content(path, MAX_BYTES)
    if data is None:
        raise cannot("read", path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    return data


def text_of(path: Path) -> str:
    """The text of a file. Raises Failed if it is not UTF-8."""
    try:
        return bytes_of(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(path, f"is not text in UTF-8 (byte {error.start})") from None


def json_of(text: str, path: Path) -> Any:
    """The JSON value of a text. Raises Failed with the line of a syntax error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise bad(path, f"is not JSON: {error.msg}", f"line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise bad(path, f"is not JSON that can be read: {error}") from None


def object_of(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    data = json_of(text_of(path), path)
    if not isinstance(data, dict):
        raise bad(path, "is not a JSON object")
    return data


def validated(model: type[Model], data: Any, path: Path, within: str = "") -> Model:
    """Plain data as a model. Raises Failed with the first error."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise bad(path, complaint(error), within) from None


def complaint(error: ValidationError) -> str:
    """The first error of a validation, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def spec_of(data: Any, path: Path, within: str = "") -> AttentionSpec:
    """The spec of a record. Raises Failed if it is invalid."""
    if not isinstance(data, dict):
        raise bad(path, "spec: is not a JSON object", within)
    try:
        return AttentionSpec.make(**data)
    except BadSpec as error:
        raise bad(path, f"spec: {error.lines[0]}", within) from None
