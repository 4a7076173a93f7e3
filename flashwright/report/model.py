"""What a report is made of, as frozen data. gather.py fills it; the renderers only read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashwright.judge.verdict import EMULATION
from flashwright.lower.report import LoopReport
from flashwright.lower.report import Report as Path
from flashwright.lower.source_map import Stretch
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord, RunRecord
from flashwright.spec import AttentionSpec

State = Literal["right", "rejected", "emulated", "cpu", "unjudged", "changed", "missing"]
"""What is known of a kernel. `emulated` and `cpu`: right there, and not run on a GPU."""


class _Told(BaseModel):
    """Part of a verdict as JSON holds it; what is missing there is not known."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Offence(_Told):
    """Why a candidate is unacceptable."""

    name: str
    code: str = ""
    message: str = ""


class Check(_Told):
    """A question that was asked; `passed` is None where it could not be."""

    name: str
    question: str = ""
    passed: bool | None = None
    tried: int = 0
    note: str = ""


class Case(_Told):
    """One output of one problem, and the library's error beside it."""

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


class Picture(_Told):
    """The error in each cell of a grid over O: rows follow the query, columns the head dim."""

    dims: dict[str, int] = {}
    error: tuple[tuple[float, ...], ...] = Field(default=(), repr=False)


class Verdict(_Told):
    """What the judge said: Verdict.record() of judge/verdict.py, read back."""

    ok: bool
    candidate: str = ""
    device: str = ""
    arch: str = ""
    seed: int | None = None
    offences: tuple[Offence, ...] = ()
    checks: tuple[Check, ...] = ()
    cases: tuple[Case, ...] = ()
    library: str | None = None
    unable: str | None = None
    worst: float | None = None
    worst_ratio: float | None = None
    picture: Picture | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    missing: str = ""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, told: Any) -> Any:
        """The sanitizer's findings are offences too."""
        if not isinstance(told, dict):
            return told
        offences, more = (told.get(n, ()) for n in ("offences", "sanitizer"))
        if isinstance(offences, list | tuple) and isinstance(more, list | tuple):
            told = {**told, "offences": (*offences, *more)}
        return told

    @property
    def outputs(self) -> int:
        """How many outputs were compared with fp64."""
        return len(self.cases)

    @property
    def right(self) -> bool:
        """Accepted, and nothing in the record speaks against it."""
        bad = any(c.passed is False for c in self.checks) or any(not c.ok for c in self.cases)
        return self.ok and not self.offences and not bad and not self.missing

    @property
    def open(self) -> bool:
        """Too little was tried for a verdict, and nothing wrong was found."""
        return bool(self.missing) and not self.offences and all(c.ok for c in self.cases)

    @property
    def on_gpu(self) -> bool:
        """It was run on a GPU, whose name is then known."""
        return self.device.lower() not in ("", "cpu", EMULATION)

    @property
    def where(self) -> str:
        """The GPU's name; for an emulation also what was emulated."""
        emulated = self.device == EMULATION and self.arch
        return f"{self.device} of {self.arch}" if emulated else self.device


class ScheduledLoop(_Told):
    """How a loop with GEMMs was scheduled."""

    line: int
    overlapped: bool = False
    split: bool = False
    early_exit: bool = False
    ahead: int = 0


class ScheduleRemark(_Told):
    """Something that the GPU can do and the kernel does not."""

    code: str
    line: int | None = None
    text: str
    help: str = ""

    @property
    def in_words(self) -> str:
        """The remark in a line."""
        where = f", line {self.line}" if self.line else ""
        return f"{self.code}{where}: {self.text}{f' ({self.help})' if self.help else ''}"


class Registers(_Told):
    """What a thread that computes may use, and what is left; None where ptxas does not say."""

    most: int = 0
    setmaxnreg: bool = False
    left: int | None = None


class Schedule(_Told):
    """The path that a kernel takes: `schedule` of build.json."""

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
        """The path, the registers that are left, and a line for each thing that is not done."""
        path = Path(
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
class Kernel:
    """One kernel: what it was asked to be, its texts, and what is known of it."""

    name: str
    """As a reader tells it from the others of the report."""
    spec: AttentionSpec | None
    gpu: str
    """The GPU it was translated for."""
    folder: str = ""
    """As the user named it; empty where it comes from a benchmark's records."""
    tl: str = field(default="", repr=False)
    source: str = field(default="", repr=False)
    map: tuple[Stretch, ...] = field(default=(), repr=False)
    reasoning: str = field(default="", repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict)
    ptxas: Mapping[str, int] = field(default_factory=dict)
    """registers, spills, stack, shared and threads, as far as they are known."""
    schedule: Schedule | None = None
    """Of a kernel that the translator made; None where it is not known."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    cpu: tuple[Case, ...] = ()
    """The problems of the run on the CPU, where there was one."""
    claimed: tuple[str, ...] = ()
    not_claimed: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """What stopped `generate`."""
    skipped: tuple[str, ...] = ()
    """Why stages of `generate` did not run."""
    changed: tuple[str, ...] = ()
    """Files that are no longer those which were judged."""
    why: str = ""
    """Why there is no kernel."""

    @property
    def state(self) -> State:
        """What may be said of it: the worst that is known."""
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
    """What the paper found in a cell, for its own system on its GPU."""

    gpu: str
    unit: str
    value: float
    ratio: float | None = None
    """How many times as fast as the fastest library that the paper compares with."""
    library: str = ""


@dataclass(frozen=True)
class Cell:
    """One problem of a benchmark: the figures by contestant, and why others have none."""

    name: str
    kernel: str
    length: int | None
    numbers: Mapping[str, NumberRecord] = field(default_factory=dict)
    absent: Mapping[str, AbsentRecord] = field(default_factory=dict)
    counts: bool = True
    """False where the judge rejects our kernel: then its time is no speed."""
    paper: PaperFigure | None = None

    def tflops(self, who: str) -> float | None:
        """The rate of a contestant in TFLOPS; None if it has no figure."""
        found = self.numbers.get(who)
        return found.tflops if found else None

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as the peer we are."""
        ours, theirs = self.numbers.get(OURS), self.numbers.get(peer)
        if not self.counts or ours is None or theirs is None or ours.seconds <= 0:
            return None
        return theirs.seconds / ours.seconds if theirs.seconds > 0 else None

    def best_peer(self) -> str | None:
        """The fastest of the others."""
        others = [n for n in self.numbers.values() if n.who != OURS and n.seconds > 0]
        return min(others, key=lambda n: n.seconds).who if others else None

    def best_ratio(self) -> float | None:
        """The ratio to the fastest of the others."""
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
    cells: tuple[Cell, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Its kernels in the order of the cells, and the name of each in the report."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """By kernel: which of the measured products is its ceiling."""

    @property
    def peers(self) -> tuple[str, ...]:
        """All contestants but us: those that were announced, then any others that have lines."""
        seen = (w for c in self.cells for w in (*c.numbers, *c.absent))
        order = dict.fromkeys((*self.record.contestants, *seen))
        return tuple(who for who in order if who != OURS)

    def of(self, kernel: str) -> tuple[Cell, ...]:
        """A kernel's cells by length."""
        mine = (c for c in self.cells if c.kernel == kernel)
        return tuple(sorted(mine, key=lambda c: c.length or 0))

    def ceiling(self, kernel: str) -> float | None:
        """The measured rate of a large matrix product in the kernel's dtype."""
        return self.record.matmul.get(self.dtypes.get(kernel, ""))

    @property
    def measured(self) -> int:
        """Cells in which everybody has a figure or a reason."""
        wanted = set(self.record.contestants)
        return sum(wanted <= {*c.numbers, *c.absent} for c in self.cells)


@dataclass(frozen=True)
class Report:
    """Everything that was given, as one thing."""

    title: str
    kernels: tuple[Kernel, ...]
    benches: tuple[Bench, ...] = ()
    given: tuple[str, ...] = ()
    """What it was made of, as the user named it."""

    def kernel(self, name: str) -> Kernel | None:
        """The kernel of that name; None if the report has none."""
        return next((k for k in self.kernels if k.name == name), None)
