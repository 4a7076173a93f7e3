"""tuning.json: all that was tried on a package, with its figures, and what was kept of it.

The file is written anew whenever something is known, so a tuning that is interrupted goes on where
it was; at its end it stays in the package and says where the choice is from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flashwright.build.package import TUNING
from flashwright.files import cannot, write
from flashwright.lang.diagnostic import Diagnostic, Failed


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Figure(_Told):
    """How long a kernel took at one length."""

    seconds: float
    spread: float
    samples: int


class Tried(_Told):
    """One candidate, and all that is known of it."""

    name: str
    params: dict[str, int]
    model_us: list[float] = []
    """The model's estimate at each length."""
    built: bool = False
    registers: int | None = None
    judged: bool = False
    failure: str = ""
    """Why it was not timed, or not to the end."""
    out: bool = False
    """Whether it failed while it was timed."""
    first: dict[int, Figure] = {}
    """By length: everybody, shortly. All as if timed beside the present one's first time."""
    final: dict[int, Figure] = {}
    """By length: the best of them, beside each other, for as long as a benchmark takes."""


class Kept(_Told):
    """A class of lengths and its kernel."""

    lengths: list[int]
    """Those that were measured."""
    up_to: int | None
    """Keys; None: all that are left."""
    kernel: str
    """`.` is the package's own."""
    tried: str
    """The candidate's name."""


class Tuning(_Told):
    """A tuning, as far as it has come."""

    schema_version: int = 1
    gpu: str
    """What the kernels are translated for."""
    card: str
    environment: dict[str, str]
    """Versions of the driver, the compiler and what else a time may depend on."""
    started: str
    """UTC, ISO 8601."""
    spec: dict[str, Any]
    code: str
    """Digest of code.tl, which was tuned."""
    lengths: list[int]
    tokens: int
    wanted: int
    """How many candidates were to be tried."""
    seed: int
    tried: list[Tried] = []
    kept: list[Kept] = []
    best: str = ""
    """The candidate that is the fastest over all lengths."""
    note: str = ""
    """Why something was left out."""
    complete: bool = False

    def at(self, length: int) -> dict[str, Figure]:
        """The figures of a length that may be compared: the final ones, where there are any."""
        running = [one for one in self.tried if not one.failure]
        final = {one.name: one.final[length] for one in running if length in one.final}
        first = {one.name: one.first[length] for one in running if length in one.first}
        return final or first

    def by_name(self) -> dict[str, Tried]:
        """The candidates."""
        return {one.name: one for one in self.tried}

    def save(self, folder: Path) -> None:
        """Write it into a package."""
        write(folder / TUNING, self.model_dump_json(indent=1) + "\n")


def read(folder: Path) -> Tuning | None:
    """The tuning of a package; None where there was none, Failed where it cannot be read."""
    path = folder / TUNING
    try:
        return Tuning.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot("read", path, error) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{path} is no record of a tuning: {where}: {first['msg']}"
        hint = "leave --resume away: the package is then tuned anew"
        raise Failed(Diagnostic("FW001", text, help=hint)) from None


_MATTERS = ("gpu", "card", "environment", "spec", "code", "lengths", "tokens", "wanted")
_NO_MATTER = ("flashwright", "python")


def differences(before: Tuning, now: Tuning) -> list[str]:
    """What is not as it was: figures of both would not belong together."""
    found = []
    for name in _MATTERS:
        old, new = (_comparable(getattr(one, name)) for one in (before, now))
        if old != new:
            found.append({"code": "code.tl", "wanted": "number of candidates"}.get(name, name))
    return found


def _comparable(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {n: v for n, v in value.items() if n not in _NO_MATTER}
