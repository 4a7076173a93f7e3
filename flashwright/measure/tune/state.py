"""tuning.json: all candidates tried on a package, their times, and the kernels chosen.

The file is rewritten after each result, so an interrupted tuning can be resumed. At the end it
stays in the package as the record of the choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flashwright.build.package import TUNING
from flashwright.files import cannot, write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import machine


class _StateModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CandidateTime(_StateModel):
    """The time of a candidate at one length."""

    seconds: float
    spread: float
    samples: int
    where: str = ""
    """The host and its GPU."""


class CandidateState(_StateModel):
    """One candidate and all results for it."""

    name: str
    params: dict[str, int]
    model_us: list[float] = []
    """The cost model's estimate at each length."""
    built: bool = False
    registers: int | None = None
    judged: bool = False
    failure: str = ""
    """Why it was not timed at every length; empty if it was not refused."""
    out: bool = False
    """Whether it failed while it was timed."""
    first: dict[int, CandidateTime] = {}
    """By length: the short first round, scaled so that groups are comparable (see `_scale`)."""
    final: dict[int, CandidateTime] = {}
    """By length: the second round, the best candidates timed as long as in a benchmark."""


class LengthClass(_StateModel):
    """A class of lengths and the kernel that serves it."""

    lengths: list[int]
    """The measured lengths of the class."""
    up_to: int | None
    """The most keys of the class; None: no limit."""
    kernel: str
    """The kernel's folder; `.` is the package's own."""
    tried: str
    """The candidate's name."""


class Tuning(_StateModel):
    """The state of a tuning, complete or not."""

    schema_version: int = 1
    gpu: str
    """The GPU that kernels are translated for."""
    card: str
    environment: dict[str, str]
    """Versions of driver, compiler and other software that a time may depend on."""
    started: str
    """UTC, ISO 8601."""
    spec: dict[str, Any]
    code: str
    """Digest of the tuned code.tl."""
    lengths: list[int]
    tokens: int
    wanted: int
    """The number of candidates to try."""
    seed: int
    tried: list[CandidateState] = []
    kept: list[LengthClass] = []
    best: str = ""
    """The fastest candidate over all lengths."""
    note: str = ""
    """Why the tuning is incomplete."""
    complete: bool = False

    def at(self, length: int) -> dict[str, CandidateTime]:
        """The comparable times at a length: those of the second round, if there are any."""
        running = [one for one in self.tried if not one.failure]
        final = {one.name: one.final[length] for one in running if length in one.final}
        first = {one.name: one.first[length] for one in running if length in one.first}
        return final or first

    def by_name(self) -> dict[str, CandidateState]:
        """The candidates by name."""
        return {one.name: one for one in self.tried}

    def save(self, folder: Path) -> None:
        """Write tuning.json into a package."""
        write(folder / TUNING, self.model_dump_json(indent=1) + "\n")


def read(folder: Path) -> Tuning | None:
    """The tuning of a package; None if there is none. Raises Failed if it cannot be read."""
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
        text = f"{path} is not a record of a tuning: {where}: {first['msg']}"
        hint = "omit --resume to tune the package again from the start"
        raise Failed(Diagnostic("FW001", text, help=hint)) from None


_IDENTITY = ("gpu", "card", "environment", "spec", "code", "lengths", "tokens", "wanted")


def differences(before: Tuning, now: Tuning) -> list[str]:
    """The settings that differ, so that times of both tunings are not comparable."""
    found = []
    for name in _IDENTITY:
        old, new = (_comparable(getattr(one, name)) for one in (before, now))
        if old != new:
            found.append({"code": "code.tl", "wanted": "number of candidates"}.get(name, name))
    return found


def _comparable(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {n: v for n, v in value.items() if n not in machine.IGNORED_VERSIONS}
