"""The fields of a receipt: the rule by which each is compared, and the result."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

from flashwright.files import sha256

Rule = Literal["exact", "within", "record", "told"]
"""exact: must be equal when found again. within: equal up to a tolerance. record: follows from
other fields. told: was observed once and cannot be checked again; only the digest protects it."""

RULES: dict[str, dict[str, Rule]] = {
    "run": {
        "digest": "record",
        "record": "record",
        "schema_version": "record",
        "id": "record",
        "started": "told",
        "title": "told",
        "table": "record",
        "card": "exact",
        "arch": "exact",
        "translated_for": "record",
        "layout": "told",
        "contestants": "record",
        "cells": "record",
        "environment": "exact",
        "clocks": "told",
        "matmul": "within",
        "copy_gbs": "within",
        "settings": "record",
        "seed": "record",
    },
    "kernel": {
        "digest": "record",
        "record": "record",
        "name": "record",
        "spec": "record",
        "gpu": "exact",
        "tl": "record",
        "source": "exact",
        "map": "exact",
        "reasoning": "told",
        "hashes": "exact",
        "ptxas": "exact",
        "seconds": "told",
        "verdict": "exact",
        "why": "record",
        "others": "record",
    },
    "number": {
        "digest": "record",
        "record": "record",
        "run": "record",
        "cell": "record",
        "kernel": "record",
        "length": "record",
        "batch": "record",
        "who": "record",
        "seconds": "within",
        "spread": "told",
        "samples": "told",
        "wall_seconds": "told",
        "warm_seconds": "within",
        "tflops": "record",
        "share": "record",
        "gbs": "record",
        "checked": "told",
        "relative_rms": "within",
        "seed": "record",
        "clock_mhz": "told",
        "where": "told",
    },
    "absent": {
        "digest": "record",
        "record": "record",
        "run": "record",
        "cell": "record",
        "who": "record",
        "why": "told",
        "offence": "exact",
    },
}
"""Every field of every kind of record (a test checks that none is missing)."""

FieldStatus = Literal["holds", "differs", "unchecked", "told"]

CLOSE = 1e-6
"""Relative tolerance of values computed twice from the same numbers."""
LONG = 120


@dataclass(frozen=True)
class Field:
    """The result of checking one field."""

    name: str
    """Such as `kernel.tl`, or `number.seconds (torch cuDNN)`."""
    status: FieldStatus
    recorded: object = None
    found: object = None
    why: str = ""
    """Why the field was not checked, or the rule that it breaks."""

    def record(self) -> dict[str, object]:
        """The fields as plain data, for JSON."""
        return dict(vars(self))

    @property
    def in_words(self) -> str:
        """The field, its recorded value and the value found, in one line."""
        text = f"{self.name}: recorded {_shown(self.recorded)}, found {_shown(self.found)}"
        return f"{text} ({self.why})" if self.why else text


def exact(name: str, recorded: object, found: object, why: str = "") -> Field:
    """A field that must be equal."""
    same = recorded == found
    return Field(
        name, "holds" if same else "differs", _plain(recorded), _plain(found), "" if same else why
    )


def near(
    name: str, recorded: float | None, found: float | None, within: float, why: str = ""
) -> Field:
    """A field that must be equal up to a relative tolerance."""
    if recorded is None or found is None:
        return exact(name, recorded, found, why)
    change = found / recorded - 1 if recorded else math.copysign(math.inf, found or 1)
    if abs(change) <= within or recorded == found:
        return Field(name, "holds", recorded, found)
    moved = f"{change:+.1%}" if within > CLOSE else why
    return Field(name, "differs", recorded, found, moved)


def unchecked(name: str, recorded: object, why: str, found: object = None) -> Field:
    """A field that could not be compared here, with the reason."""
    return Field(name, "unchecked", _plain(recorded), _plain(found), why)


def _plain(value: object) -> object:
    """A value for messages: a long text or list is replaced by its digest."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    if len(text) <= LONG:
        return list(value) if isinstance(value, tuple) else value
    return f"sha256 {sha256(text)[:16]}, {len(text)} characters"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if value != "" else "nothing"
