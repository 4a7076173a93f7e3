"""The fields of a receipt: by which rule each is compared, and what came of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

from flashwright.files import sha256

Rule = Literal["exact", "within", "record", "told"]
"""exact: as it is found again. within: the same, up to a tolerance. record: it follows from other
fields. told: it was seen once and cannot be seen again; the digest alone vouches for it."""

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
"""Every field of every kind of record; a test sees to it that none is forgotten."""

Status = Literal["holds", "differs", "unchecked", "told"]

CLOSE = 1e-6
"""Of what is computed twice from the same numbers."""
LONG = 120


@dataclass(frozen=True)
class Field:
    """What became of one field."""

    name: str
    """Such as `kernel.tl`, or `number.seconds (torch cuDNN)`."""
    status: Status
    recorded: object = None
    found: object = None
    why: str = ""
    """Where it is not checked, why not; else by what rule it is wrong."""

    def record(self) -> dict[str, object]:
        """The fields as plain data, for JSON."""
        return dict(vars(self))

    @property
    def in_words(self) -> str:
        """The field, what the file says and what was found."""
        told = f"{self.name}: recorded {_shown(self.recorded)}, found {_shown(self.found)}"
        return f"{told} ({self.why})" if self.why else told


def exact(name: str, recorded: object, found: object, why: str = "") -> Field:
    """The same or not."""
    same = recorded == found
    return Field(
        name, "holds" if same else "differs", _plain(recorded), _plain(found), "" if same else why
    )


def near(
    name: str, recorded: float | None, found: float | None, within: float, why: str = ""
) -> Field:
    """The same up to a part of it."""
    if recorded is None or found is None:
        return exact(name, recorded, found, why)
    change = found / recorded - 1 if recorded else math.copysign(math.inf, found or 1)
    if abs(change) <= within or recorded == found:
        return Field(name, "holds", recorded, found)
    moved = f"{change:+.1%}" if within > CLOSE else why
    return Field(name, "differs", recorded, found, moved)


def unchecked(name: str, recorded: object, why: str, found: object = None) -> Field:
    """It could not be compared here."""
    return Field(name, "unchecked", _plain(recorded), _plain(found), why)


def _plain(value: object) -> object:
    """A value as messages have it: of a long text its digest, of a long list its digest too."""
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
