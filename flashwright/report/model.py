"""The data of a report, frozen. gather.py builds it; the renderers only read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashwright.judge.verdict import EMULATION
from flashwright.lower.report import LoopReport
from flashwright.lower.report import Report as SchedulePath
from flashwright.lower.source_map import Stretch
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord, RunRecord
from flashwright.spec import AttentionSpec

State = Literal["right", "rejected", "emulated", "cpu", "unjudged", "changed", "missing"]
"""The state of a kernel. `emulated` and `cpu`: right there, but not run on a GPU."""


class _RecordedModel(BaseModel):
    """Base of data read from JSON records; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedOffence(_RecordedModel):
    """Why a candidate is unacceptable."""

    name: str
    code: str = ""
    message: str = ""


class RecordedCheck(_RecordedModel):
    """One check of the judge; `passed` is None if it could not run."""

    name: str
    question: str = ""
    passed: bool | None = None
    tried: int = 0
    note: str = ""


class RecordedCase(_RecordedModel):
    """One output of one problem: its error and the library's."""

    dims: dict[str, int] = {}
    kind: str = ""
    output: str = "O"
    ok: bool
    relative_rms: float
    relative_max: float | None = None
    library_rms: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """The error relative to the library's; None if there is no library error."""
        return self.relative_rms / self.library_rms if self.library_rms else None

    @property
    def problem(self) -> str:
        """The sizes in a few words."""
        dims = dict(self.dims)
        q, kv = dims.pop("q_len", None), dims.pop("kv_len", None)
        heads, kv_heads = dims.pop("heads", None), dims.pop("kv_heads", None)
        words = [
            f"{q} queries, {kv} keys" if q is not None and kv is not None else "",
            f"batch {dims.pop('batch')}" if "batch" in dims else "",
            f"{heads} on {kv_heads} heads" if heads is not None and kv_heads is not None else "",
            *(f"{name} {size}" for name, size in dims.items()),
        ]
        return ", ".join(filter(None, words))


class ErrorMap(_RecordedModel):
    """The error in each cell of a grid over O: rows follow the query, columns the head dim."""

    dims: dict[str, int] = {}
    error: tuple[tuple[float, ...], ...] = Field(default=(), repr=False)


class RecordedVerdict(_RecordedModel):
    """A verdict read back from `Verdict.record()` of judge/verdict.py."""

    ok: bool
    candidate: str = ""
    device: str = ""
    arch: str = ""
    seed: int | None = None
    offences: tuple[RecordedOffence, ...] = ()
    checks: tuple[RecordedCheck, ...] = ()
    cases: tuple[RecordedCase, ...] = ()
    library: str | None = None
    unable: str | None = None
    worst: float | None = None
    worst_ratio: float | None = None
    picture: ErrorMap | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    missing: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_sanitizer(cls, data: Any) -> Any:
        """Add the sanitizer's findings to the offences."""
        if not isinstance(data, dict):
            return data
        offences, more = (data.get(n, ()) for n in ("offences", "sanitizer"))
        if isinstance(offences, list | tuple) and isinstance(more, list | tuple):
            data = {**data, "offences": (*offences, *more)}
        return data

    @property
    def outputs(self) -> int:
        """How many outputs were compared with fp64."""
        return len(self.cases)

    @property
    def right(self) -> bool:
        """Accepted, and no offence, failed check or wrong case in the record."""
        bad = any(c.passed is False for c in self.checks) or any(not c.ok for c in self.cases)
        return self.ok and not self.offences and not bad and not self.missing

    @property
    def open(self) -> bool:
        """Too little was tried for a verdict, and nothing wrong was found."""
        return bool(self.missing) and not self.offences and all(c.ok for c in self.cases)

    @property
    def on_gpu(self) -> bool:
        """Whether the verdict comes from a run on a GPU."""
        return self.device.lower() not in ("", "cpu", EMULATION)

    @property
    def where(self) -> str:
        """The GPU's name; for an emulation also what was emulated."""
        emulated = self.device == EMULATION and self.arch
        return f"{self.device} of {self.arch}" if emulated else self.device


class ScheduledLoop(_RecordedModel):
    """How a loop with GEMMs was scheduled."""

    line: int
    overlapped: bool = False
    split: bool = False
    early_exit: bool = False
    ahead: int = 0


class ScheduleRemark(_RecordedModel):
    """A capability of the GPU that the kernel does not use."""

    code: str
    line: int | None = None
    text: str
    help: str = ""

    @property
    def in_words(self) -> str:
        """The remark in one line, with its code and place."""
        where = f", line {self.line}" if self.line else ""
        return f"{self.code}{where}: {self.text}{f' ({self.help})' if self.help else ''}"


class Registers(_RecordedModel):
    """The register limit of a computing thread, and the registers left; None if unknown."""

    most: int = 0
    setmaxnreg: bool = False
    left: int | None = None


class RecordedSchedule(_RecordedModel):
    """The schedule of a kernel: `schedule` of build.json."""

    products: str
    copies: str
    persistent: bool = False
    ping_pong: bool = False
    sparing: bool = False
    registers: Registers = Registers()
    loops: tuple[ScheduledLoop, ...] = ()
    remarks: tuple[ScheduleRemark, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The schedule, the registers left, and a line for each remark."""
        path = SchedulePath(
            products=self.products,
            copies=self.copies,
            persistent=self.persistent,
            ping_pong=self.ping_pong,
            sparing=self.sparing,
            loops=[LoopReport(**dict(loop)) for loop in self.loops],
        )
        most, left = self.registers.most, self.registers.left
        registers = f"{left} of {most} registers left" if left is not None else ""
        if self.registers.setmaxnreg:
            registers = f"setmaxnreg gives a thread that computes {most} registers"
        said = (path.in_words(), registers, *(remark.in_words for remark in self.remarks))
        return tuple(filter(None, said))


@dataclass(frozen=True)
class ReportKernel:
    """One kernel of a report: its spec, its texts, and all results."""

    name: str
    """Its name, unique within the report."""
    spec: AttentionSpec | None
    gpu: str
    """The GPU it was translated for."""
    folder: str = ""
    """Its folder as the user named it; empty for a kernel of a benchmark's records."""
    tl: str = field(default="", repr=False)
    source: str = field(default="", repr=False)
    map: tuple[Stretch, ...] = field(default=(), repr=False)
    reasoning: str = field(default="", repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict)
    ptxas: Mapping[str, int] = field(default_factory=dict)
    """Registers, spills, stack, shared memory and threads, if known."""
    schedule: RecordedSchedule | None = None
    """The schedule of a translated kernel; None if it is not known."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    verdict: RecordedVerdict | None = None
    cpu: tuple[RecordedCase, ...] = ()
    """The problems of the run on the CPU, if there was one."""
    claimed: tuple[str, ...] = ()
    not_claimed: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """What stopped `generate`."""
    skipped: tuple[str, ...] = ()
    """Why stages of `generate` did not run."""
    changed: tuple[str, ...] = ()
    """Files that have changed since they were judged."""
    why: str = ""
    """Why there is no kernel."""

    @property
    def state(self) -> State:
        """The state of the kernel: the worst result counts."""
        if self.why:
            return "missing"
        unknown = self.verdict is None or self.verdict.open
        if self.failures or not (unknown or (self.verdict and self.verdict.right)):
            return "rejected"
        if self.changed:
            return "changed"
        if self.verdict is None or self.verdict.open:
            return "unjudged"
        if self.verdict.device == EMULATION:
            return "emulated"
        return "right" if self.verdict.on_gpu else "cpu"


@dataclass(frozen=True)
class PaperFigure:
    """The paper's figure for its own system in a cell, on its GPU."""

    gpu: str
    unit: str
    value: float
    ratio: float | None = None
    """How many times as fast as the fastest library that the paper compares with."""
    library: str = ""


@dataclass(frozen=True)
class CellResults:
    """The results of one cell: numbers by contestant, and the reasons of those without one."""

    name: str
    kernel: str
    length: int | None
    numbers: Mapping[str, NumberRecord] = field(default_factory=dict)
    absent: Mapping[str, AbsentRecord] = field(default_factory=dict)
    counts: bool = True
    """False if the judge rejects our kernel: its times then count in no ratio."""
    paper: PaperFigure | None = None

    def tflops(self, who: str) -> float | None:
        """The rate of a contestant in TFLOPS; None if it has no figure."""
        found = self.numbers.get(who)
        return found.tflops if found else None

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as the peer ours is; None if one of them does not count."""
        ours, theirs = self.numbers.get(OURS), self.numbers.get(peer)
        if not self.counts or ours is None or theirs is None or ours.seconds <= 0:
            return None
        return theirs.seconds / ours.seconds if theirs.seconds > 0 else None

    def best_peer(self) -> str | None:
        """The fastest peer; None if no peer has a figure."""
        others = [n for n in self.numbers.values() if n.who != OURS and n.seconds > 0]
        return min(others, key=lambda n: n.seconds).who if others else None

    def best_ratio(self) -> float | None:
        """Our ratio to the fastest peer."""
        peer = self.best_peer()
        return self.ratio(peer) if peer is not None else None

    @property
    def spread(self) -> float | None:
        """The relative spread of our time; None if it is not measured."""
        ours = self.numbers.get(OURS)
        return ours.spread if ours else None


@dataclass(frozen=True)
class Bench:
    """One run of the benchmark."""

    record: RunRecord
    source: str
    """The file, as the user named it."""
    cells: tuple[CellResults, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Its kernels in the order of the cells, and the name of each in the report."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtype of each kernel, which selects the measured ceiling."""

    @property
    def peers(self) -> tuple[str, ...]:
        """All contestants but ours: those of the run's record, then others that have records."""
        seen = (w for c in self.cells for w in (*c.numbers, *c.absent))
        order = dict.fromkeys((*self.record.contestants, *seen))
        return tuple(who for who in order if who != OURS)

    def of(self, kernel: str) -> tuple[CellResults, ...]:
        """A kernel's cells by length."""
        mine = (c for c in self.cells if c.kernel == kernel)
        return tuple(sorted(mine, key=lambda c: c.length or 0))

    def ceiling(self, kernel: str) -> float | None:
        """The measured rate of a large matrix product in the kernel's dtype."""
        return self.record.matmul.get(self.dtypes.get(kernel, ""))

    @property
    def measured(self) -> int:
        """The number of cells in which every contestant has a figure or a reason."""
        wanted = set(self.record.contestants)
        return sum(wanted <= {*c.numbers, *c.absent} for c in self.cells)


@dataclass(frozen=True)
class Report:
    """All kernels and benchmarks of a report."""

    title: str
    kernels: tuple[ReportKernel, ...]
    benches: tuple[Bench, ...] = ()
    given: tuple[str, ...] = ()
    """The sources, as the user named them."""

    def kernel(self, name: str) -> ReportKernel | None:
        """The kernel of that name; None if the report has none."""
        return next((k for k in self.kernels if k.name == name), None)
