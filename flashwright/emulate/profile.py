"""Counts of an emulated launch by line of TL: instructions, MMA operations, bytes, conflicts.

These are counts of PTX, not times. SASS has other arithmetic instructions; MMA operations, bytes,
bank conflicts and sectors are those of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.emulate.emulate import COUNTS
from flashwright.emulate.places import Origin, locate
from flashwright.emulate.ptx import Instruction

Counts = NDArray[np.int64]

_KINDS: tuple[tuple[str, str], ...] = (
    ("mma", r"mma\.|wmma\."),
    ("wgmma", r"wgmma\.mma_async"),
    ("ldmatrix", r"(ld|st)matrix|movmatrix"),
    ("wait", r"cp\.async\.(bulk\.)?(wait|commit)|wgmma\.(fence|commit|wait)|mbarrier\.(try|test)_"),
    ("tma", r"cp\.(reduce\.)?async\.bulk"),
    ("cp.async", r"cp\.async"),
    ("barrier", r"bar\.|barrier|mbarrier|membar|fence"),
    ("atomic", r"atom|red\."),
    ("global", r"(ld|st|ldu)\.(\w+\.)*global|prefetch"),
    ("shared", r"(ld|st)\.(\w+\.)*shared"),
    ("parameters", r"(ld|st)\.(\w+\.)*(param|const)"),
    ("local", r"(ld|st)\.(\w+\.)*local"),
    ("generic", r"(ld|st)\."),
    ("exchange", r"shfl|vote|match|redux|elect|activemask"),
    ("conversion", r"cvt"),
    ("special", r"ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div\.(approx|full|rn)"),
    ("control", r"bra|brx|ret|exit|call|trap|setmaxnreg|griddepcontrol|nanosleep|pragma"),
    ("move", r"mov|selp|prmt|cvta|isspacep|mapa|createpolicy"),
    ("arithmetic", r"\w+(\.\w+)*\.(f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\b"),
)
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _KINDS)
KINDS = (*(name for name, _ in _KINDS), "integer")
"""The kinds of instructions, in the order in which a table has them."""
_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)")
LEVELS = ("global_read", "global_written", "shared_read", "shared_written")


def kind(instruction: Instruction) -> str:
    """What an instruction is for: one of KINDS."""
    opcode = instruction.opcode
    if opcode.startswith("cvta"):
        return "move"
    return next((name for name, known in _PATTERNS if known.match(opcode)), "integer")


def operations(instruction: Instruction) -> int:
    """Multiplications and additions of one warp; 0 if it is no MMA."""
    shape = _SHAPE.search(instruction.opcode)
    if shape is None or kind(instruction) not in ("mma", "wgmma"):
        return 0
    m, n, k = (int(size) for size in shape.groups())
    warps = 4 if instruction.opcode.startswith("wgmma") else 1  # each has a part of the product
    return 2 * m * n * k // warps


def levels(instruction: Instruction) -> tuple[str, ...]:
    """Which memory an instruction reads and writes."""
    opcode, what = instruction.opcode, kind(instruction)
    if what in ("cp.async", "tma"):
        inward = 0 < opcode.find(".shared") < opcode.find(".global")
        return ("global_read", "shared_written") if inward else ("shared_read", "global_written")
    space = {"global": "global", "shared": "shared", "ldmatrix": "shared"}.get(what)
    if space is None or opcode.startswith("movmatrix"):
        return ()
    return (f"{space}_{'written' if opcode.startswith('st') else 'read'}",)


@dataclass
class LineCounts:
    """The counts of one line, or of all."""

    line: int | None = None
    """Of TL, or of the CUDA source where there is no TL; None for what belongs to no line."""
    text: str = ""
    instructions: dict[str, int] = field(default_factory=dict)
    """Warp instructions by kind."""
    operations: int = 0
    """Multiplications and additions of MMAs."""
    bytes: dict[str, int] = field(default_factory=dict)
    """By LEVELS."""
    wavefronts: int = 0
    ideal: int = 0
    sectors: int = 0
    requests: int = 0
    waits: int = 0

    @property
    def executed(self) -> int:
        """The number of executed instructions of all kinds."""
        return sum(self.instructions.values())

    @property
    def conflicts(self) -> float | None:
        """Bank conflicts: shared-memory passes over the minimum; None without accesses."""
        return self.wavefronts / self.ideal if self.ideal else None

    @property
    def sectors_a_request(self) -> float | None:
        """Sectors of 32 bytes for each request of a warp to global memory."""
        return self.sectors / self.requests if self.requests else None

    def add(self, instruction: Instruction, counts: dict[str, int]) -> None:
        """Add the counts of one instruction."""
        what = kind(instruction)
        self.instructions[what] = self.instructions.get(what, 0) + counts["executed"]
        self.operations += operations(instruction) * counts["executed"]
        for level in levels(instruction):
            self.bytes[level] = self.bytes.get(level, 0) + counts["bytes"]
        for name in ("wavefronts", "ideal", "sectors", "requests", "waits"):
            setattr(self, name, getattr(self, name) + counts[name])

    def record(self) -> dict[str, Any]:
        """The counts as JSON-compatible data."""
        return {
            "line": self.line,
            "text": self.text,
            "executed": self.executed,
            "instructions": {k: self.instructions[k] for k in KINDS if k in self.instructions},
            "operations": self.operations,
            "bytes": {level: self.bytes.get(level, 0) for level in LEVELS},
            "wavefronts": self.wavefronts,
            "ideal_wavefronts": self.ideal,
            "sectors": self.sectors,
            "requests": self.requests,
            "waits": self.waits,
        }


@dataclass(frozen=True)
class Profile:
    """All of a launch, and each line of it."""

    total: LineCounts
    lines: tuple[LineCounts, ...]
    """In the order of the lines; what belongs to none comes last."""
    of: str
    """The file of the lines, such as `code.tl`."""

    def record(self) -> dict[str, Any]:
        """The counts as JSON-compatible data."""
        return {
            "of": self.of,
            "total": self.total.record(),
            "lines": [row.record() for row in self.lines],
        }


def profile(source: Sequence[Instruction], counts: Counts, origin: Origin) -> Profile:
    """The counts of a launch (Program.source and Result.counts) by line.

    Lines are those of TL where the origin has a map to it, else those of the CUDA source.
    """
    by_tl = bool(origin.map.lines)
    shown = (origin.tl if by_tl else origin.text).split("\n")
    rows: dict[int | None, LineCounts] = {}
    total = LineCounts()
    for instruction, told in _executed(source, counts):
        here = locate(instruction, origin)
        line = here.tl if by_tl else here.source
        if line not in rows:
            known = line is not None and line <= len(shown)
            rows[line] = LineCounts(line, shown[line - 1].strip() if known and line else "")
        rows[line].add(instruction, told)
        total.add(instruction, told)
    ordered = sorted(rows.values(), key=lambda r: (r.line is None, r.line or 0))
    name = origin.map.tl if by_tl else origin.shown or origin.source
    return Profile(total, tuple(ordered), name)


def _executed(
    source: Sequence[Instruction], counts: Counts
) -> Iterator[tuple[Instruction, dict[str, int]]]:
    """Each instruction that was executed at all, with its counts by name."""
    for instruction, row in zip(source, counts, strict=True):
        if row.any():
            yield instruction, dict(zip(COUNTS, map(int, row), strict=True))
