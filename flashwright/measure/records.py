"""The records of a benchmark: one JSON object per line, in one file.

    run       the machine, the settings and the ceilings; first
    kernel    one of our kernels: its TL, its source, their digests, and the verdict on it
    number    one contestant in one cell: how long it took, and how that was checked
    absent    one contestant in one cell that has no number, and why

A line is written as soon as it is known and never changed: an interrupted run is a shorter file.
If two lines are about the same thing, the later one counts. Each number is a receipt: with its
kernel and its run it has all that is needed to measure it again. Each line has a digest of itself
and of the line before it (seal.py).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

OURS = "flashwright"


def _finite(value: Any) -> Any:
    """A JSON value. Raises ValueError if it contains NaN or infinity at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("Input should be a finite number")
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _finite(one)
    return value


def _verdict(value: dict[str, Any]) -> dict[str, Any]:
    """Check the fields of a verdict that are read: `ok`, and the names of the offences."""
    offences = value.get("offences", [])
    if not isinstance(value.get("ok", False), bool):
        raise ValueError("ok should be true or false")
    if not isinstance(offences, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in offences
    ):
        raise ValueError("offences should be a list of objects with a name")
    return value


Above = Annotated[float, Field(gt=0)]
Least = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(gt=0, le=2**24)]
"""A length, a batch size or a number of calls; larger values are not measured."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]
Facts = Annotated[dict[str, Any], AfterValidator(_finite)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    digest: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of this line and of the digest before it; empty in files of older versions."""


class RunRecord(_Record):
    """The machine, the settings and the ceilings of a run."""

    record: Literal["run"] = "run"
    schema_version: Literal[1] = 1
    id: str
    """Digest of the settings and of the machine."""
    started: str
    """UTC, ISO 8601."""
    title: str
    """Such as `table 1`."""
    table: int | None = None
    """The number of the paper's table, if the run is one."""
    card: Name
    arch: str
    translated_for: str
    layout: Annotated[str, Field(pattern="^(bshd|bhsd)$")]
    contestants: tuple[str, ...]
    """Ours first, then the peers."""
    cells: tuple[str, ...]
    """The names of all cells to measure."""
    environment: dict[str, str]
    """Versions: flashwright, python, torch, CUDA, cuDNN, driver, and of each peer."""
    clocks: dict[str, Least] = {}
    """Clocks, power and temperature before the run, as far as the driver reports them."""
    matmul: dict[str, Above] = {}
    """Measured rate of a large matrix product, TFLOPS by dtype."""
    copy_gbs: Above | None = None
    """Measured rate of a copy in device memory, bytes read and written, GB/s."""
    settings: dict[str, str] = {}
    """Other settings, such as `l2`; a resumed run must have the same."""
    seed: Count


class KernelRecord(_Record):
    """One of our kernels, or why there is none (then `why` is not empty)."""

    record: Literal["kernel"] = "kernel"
    name: Name
    """Such as `mha d64 causal`."""
    spec: Facts
    gpu: str
    """The GPU it was translated for."""
    tl: str = ""
    source: str = ""
    map: Facts = {}
    """kernel.map.json: which source lines came from which TL lines."""
    reasoning: str = ""
    hashes: dict[str, str] = {}
    """SHA-256 of tl, source and cubin."""
    ptxas: dict[str, Count] = {}
    """Registers, spills, stack, shared memory and threads of a block."""
    seconds: dict[str, Least] = {}
    """How long the author, the translation and the compiler took."""
    verdict: Annotated[Facts, AfterValidator(_verdict)] = {}
    """The judge's record (judge/verdict.py), without the spec."""
    why: str = ""
    others: dict[str, str] = {}
    """For a package with several kernels: its classes.json, and TL and source of the other kernels,
    by file name."""


class NumberRecord(_Record):
    """How long one contestant took in one cell."""

    record: Literal["number"] = "number"
    run: str
    """The id of its run."""
    cell: str
    """Such as `mha d64 causal 4096`."""
    kernel: str
    """The kernel's name: the cell without its length."""
    length: Size
    batch: Size
    who: Name
    seconds: Above
    """The median, with a cold L2."""
    spread: Least
    """Half the interquartile range, relative to the median."""
    samples: Size
    wall_seconds: Least | None = None
    """Per call of a burst, by the wall clock, less the work between its calls."""
    warm_seconds: Above | None = None
    """The median with a warm L2, if it was asked for."""
    tflops: Above
    """By the paper's formula."""
    share: Above | None = None
    """`tflops` over the measured rate of the matrix product."""
    gbs: Above | None = None
    """Bytes that must be moved over the time, if the problem is memory-bound."""
    checked: Count = 0
    """Outputs of timed calls that were compared with fp64."""
    relative_rms: Least | None = None
    """The greatest error among them."""
    seed: Count
    """The seed of the inputs of all timed calls."""
    clock_mhz: Least | None = None
    where: str = ""
    """The host and its GPU, if a fleet measured it."""


class AbsentRecord(_Record):
    """A contestant that has no number in a cell."""

    record: Literal["absent"] = "absent"
    run: str
    cell: str
    who: str
    why: str
    offence: str | None = None
    """The offence's name if the judge rejects it."""


Record = RunRecord | KernelRecord | NumberRecord | AbsentRecord
RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="record")])
