"""What a benchmark leaves behind: one line of JSON for each thing that is known, in one file.

    run       the machine, the settings and the ceilings; first
    kernel    one of our kernels: its TL, its source, their digests, and the verdict on it
    number    one contestant in one cell: how long it took, and how that was checked
    absent    one contestant in one cell that has no number, and why

A line is written as soon as it is known and never changed: an interrupted run is a shorter file.
Where two lines speak of the same thing, the later one counts. Each number is a receipt: with its
kernel and its run it says all that is needed to measure it again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

OURS = "flashwright"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunRecord(_Record):
    """The machine, the settings and the ceilings of a run."""

    record: Literal["run"] = "run"
    schema_version: int = 1
    id: str
    """Digest of the settings and the machine."""
    started: str
    """UTC, ISO 8601."""
    title: str
    """Such as `table 1`."""
    table: int | None = None
    """The paper's table, where it is one."""
    card: str
    arch: str
    translated_for: str
    layout: str
    contestants: tuple[str, ...]
    """Ours first, then the peers."""
    cells: tuple[str, ...]
    """The names of all cells that are to be measured."""
    environment: dict[str, str]
    """Versions: flashwright, python, torch, CUDA, cuDNN, driver, and of each peer."""
    clocks: dict[str, float] = {}
    """MHz, watts and degrees before the run, as far as the driver tells."""
    matmul: dict[str, float] = {}
    """Measured rate of a large matrix product, TFLOPS by dtype."""
    copy_gbs: float | None = None
    """Measured rate of a copy in device memory, bytes read and written, GB/s."""
    settings: dict[str, str] = {}
    """What else was asked for, such as `l2`: a run that goes on has to have the same."""
    seed: int


class KernelRecord(_Record):
    """One of our kernels, or why there is none (then `why` is not empty)."""

    record: Literal["kernel"] = "kernel"
    name: str
    """Such as `mha d64 causal`."""
    spec: dict[str, Any]
    gpu: str
    """The GPU it was translated for."""
    tl: str = ""
    source: str = ""
    map: dict[str, Any] = {}
    """kernel.map.json: which lines of the source came from which of the TL."""
    reasoning: str = ""
    hashes: dict[str, str] = {}
    """SHA-256 of tl, source and cubin."""
    ptxas: dict[str, int] = {}
    """registers, spills, stack, shared memory and threads of a block."""
    seconds: dict[str, float] = {}
    """How long the author, the translation and the compiler took."""
    verdict: dict[str, Any] = {}
    """The judge's record (judge/verdict.py), without the spec, which stands above."""
    why: str = ""
    others: dict[str, str] = {}
    """Where a package has several kernels: its classes.json, and the TL and source of the others,
    by the names of their files."""


class NumberRecord(_Record):
    """How long one contestant took in one cell."""

    record: Literal["number"] = "number"
    run: str
    """The id of its run."""
    cell: str
    """Such as `mha d64 causal 4096`."""
    kernel: str
    """The kernel's name: the cell without its length."""
    length: int
    batch: int
    who: str
    seconds: float
    """The median, with a cold L2."""
    spread: float
    """Half the distance of the quartiles, relative to the median."""
    samples: int
    warm_seconds: float | None = None
    """The median with a warm L2, where that was asked for."""
    tflops: float
    """By the paper's formula."""
    share: float | None = None
    """Of the measured matrix product."""
    gbs: float | None = None
    """Bytes that must be moved over the time, where the problem is bound by memory."""
    checked: int = 0
    """Outputs of timed calls that were compared with fp64."""
    relative_rms: float | None = None
    """The greatest error among them."""
    seed: int
    """From which the inputs of every timed call were drawn."""
    clock_mhz: float | None = None


class AbsentRecord(_Record):
    """A contestant that has no number in a cell."""

    record: Literal["absent"] = "absent"
    run: str
    cell: str
    who: str
    why: str
    offence: str | None = None
    """The offence's name where the judge rejects it."""


Record = RunRecord | KernelRecord | NumberRecord | AbsentRecord
RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="record")])
