"""What the translator did with a program, and what it did not do: where, why, and what helps."""

from __future__ import annotations

from dataclasses import dataclass, field

Lines = tuple[int, int]


@dataclass(frozen=True)
class Remark:
    """Something that a GPU can do and this kernel does not, with the TL lines that it hangs on."""

    code: str
    text: str
    lines: Lines | None = None
    help: str = ""


@dataclass(frozen=True)
class LoopReport:
    """How a loop with GEMMs was scheduled."""

    line: int
    overlapped: bool
    split: bool = False
    """Unmasked iterations have a loop of their own."""
    early_exit: bool = False
    """A warpgroup skips iterations in which a mask leaves nothing of its rows."""


@dataclass
class Report:
    """The path that a kernel takes."""

    products: str = "mma.sync"
    """wgmma or mma.sync."""
    copies: str = "cp.async"
    """TMA, cp.async, or registers where there is neither."""
    persistent: bool = False
    ping_pong: bool = False
    loops: list[LoopReport] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, code: str, text: str, lines: Lines | None, help: str = "") -> None:
        """Note something that was not done."""
        self.remarks.append(Remark(code, text, lines, help))
