"""What the translator did with a program, and what it did not do: where, why, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flashwright.lang.diagnostic import Diagnostic, Edit, Fix
from flashwright.lang.nodes import Num, Param, Span, Tree, line_span

Lines = tuple[int, int]

NO_WGMMA = "FW812"
NO_TMA = "FW813"
NOT_OVERLAPPED = "FW814"
NO_PING_PONG = "FW815"
NOT_SPLIT = "FW816"
NOT_PERSISTENT = "FW817"
NOT_AHEAD = "FW818"
SPARING = "FW819"
UNVERIFIED = "FW820"
NO_QUEUE = "FW883"


@dataclass(frozen=True)
class ParamEdit:
    """The param that restores the fast path: its new value, or None where it is to be removed."""

    name: str
    value: int | None = None


@dataclass(frozen=True)
class Remark:
    """Something that a GPU can do and this kernel does not, with the TL lines that it hangs on."""

    code: str
    text: str
    lines: Lines | None = None
    help: str = ""
    edit: ParamEdit | None = None

    @property
    def advice(self) -> str:
        """What restores the fast path, in words; empty where nothing is known to."""
        edit = self.edit
        if self.help or edit is None:
            return self.help
        return (
            f"remove `param {edit.name}`"
            if edit.value is None
            else f"let {edit.name} be {edit.value}"
        )

    def record(self) -> dict[str, Any]:
        """The remark for build.json."""
        line = self.lines[0] if self.lines else None
        return {"code": self.code, "line": line, "text": self.text, "help": self.advice}


@dataclass(frozen=True)
class LoopReport:
    """How a loop with GEMMs was scheduled."""

    line: int
    overlapped: bool
    split: bool = False
    """Unmasked iterations have a loop of their own."""
    early_exit: bool = False
    """A warpgroup skips iterations in which a mask leaves nothing of its rows."""
    ahead: int = 0
    """Iterations by which copies run ahead, without TMA."""

    def in_words(self, products: str) -> str:
        """The loop in a phrase. Only wgmma is asynchronous, so that a loop can be overlapped."""
        if products == "wgmma":
            done = ["overlapped" if self.overlapped else "not overlapped"]
            done += ["masked iterations split"] if self.split else []
            done += ["early exit"] if self.early_exit else []
        elif self.ahead:
            done = [f"copies run {self.ahead} iteration{'s' if self.ahead > 1 else ''} ahead"]
        else:
            done = ["copies do not run ahead"]
        return f"loop at line {self.line}: {', '.join(done)}"


@dataclass
class Report:
    """The path that a kernel takes."""

    products: str = "mma.sync"
    """wgmma or mma.sync."""
    copies: str = "cp.async"
    """TMA, cp.async, or registers where there is neither."""
    persistent: bool = False
    ping_pong: bool = False
    registers: int = 255
    """Registers that a thread that computes may use."""
    dealt: bool = False
    """setmaxnreg gives them, so that ptxas reports those of the launch only."""
    blocks: int = 1
    """Blocks that an SM is to hold at once: __launch_bounds__ caps the registers for them."""
    sparing: bool = False
    """The translation that needs fewer registers."""
    loops: list[LoopReport] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    @property
    def no_wgmma(self) -> str:
        """Why there is no wgmma, with the line; empty where nothing is known to prevent it."""
        found = next((r for r in self.remarks if r.code == NO_WGMMA), None)
        if found is None:
            return ""
        return f"{found.text}{f', line {found.lines[0]}' if found.lines else ''}"

    def remark(
        self,
        code: str,
        text: str,
        lines: Lines | None,
        help: str = "",
        edit: ParamEdit | None = None,
    ) -> None:
        """Note something that was not done; once for each line."""
        found = Remark(code, text, lines, help, edit)
        if found not in self.remarks:
            self.remarks.append(found)

    def record(self, used: int | None = None) -> dict[str, Any]:
        """The schedule for build.json. `used` are the registers that ptxas reports."""
        left = None if used is None or self.dealt else max(0, self.registers - used)
        return {
            "products": self.products,
            "copies": self.copies,
            "persistent": self.persistent,
            "ping_pong": self.ping_pong,
            "registers": {"most": self.registers, "setmaxnreg": self.dealt, "left": left},
            "blocks": self.blocks,
            "sparing": self.sparing,
            "loops": [dict(vars(loop)) for loop in self.loops],
            "remarks": [remark.record() for remark in self.remarks],
        }

    def in_words(self) -> str:
        """The path in a line."""
        copies = "copies by way of registers" if self.copies == "registers" else self.copies
        path = [self.products, copies]
        path += ["persistent"] if self.persistent else []
        path += ["ping-pong"] if self.ping_pong else []
        path += ["sparing registers"] if self.sparing else []
        return "; ".join([", ".join(path), *(loop.in_words(self.products) for loop in self.loops)])

    def registers_in_words(self, used: int) -> str:
        """How many registers a thread uses, and how many are left."""
        if self.dealt:
            return f"{used} registers a thread at launch, {self.registers} where it computes"
        left = max(0, self.registers - used)
        return f"{used} registers a thread, {left} of {self.registers} left"


# --- notes ------------------------------------------------------------------------------------


def notes(report: Report, source: str, tree: Tree) -> list[Diagnostic]:
    """The remarks as notes, each under its TL line, in the order of the lines."""
    found = [_note(remark, source, tree) for remark in report.remarks]
    return sorted(found, key=lambda d: (d.span.start if d.span else 0, d.code))


def _note(remark: Remark, source: str, tree: Tree) -> Diagnostic:
    span = None
    if remark.lines is not None:
        first, last = (line_span(source, line) for line in remark.lines)
        span = first.to(last) if first and last else first
    fix = _fix(remark.edit, source, tree) if remark.edit else None
    help = None if fix else remark.advice or None
    return Diagnostic(remark.code, remark.text, span, help=help, fix=fix)


def param_lines(tree: Tree, name: str) -> Lines | None:
    """The lines of a param; None where the program has none of that name."""
    found = next((p for p in _params(tree) if p.name.id == name), None)
    return (found.span.line, found.span.end_line) if found else None


def _params(tree: Tree) -> Iterator[Param]:
    return (stmt for stmt in tree.body if isinstance(stmt, Param))


def _fix(edit: ParamEdit, source: str, tree: Tree) -> Fix | None:
    """The edit; None where other statements depend on the param."""
    params = {p.name.id: p for p in _params(tree)}
    there = params.get(edit.name)
    name = there.earlier or edit.name if there else edit.name
    if len(re.findall(rf"\b{re.escape(name)}\b", _code(source))) != (there is not None):
        return None
    if edit.value is None:
        if there is None:
            return None
        text = source[there.span.start : there.span.end]
        start, end = _whole_line(source, there.span)
        return Fix(f"remove `{text}`", (Edit(start, end, ""),))
    wanted = f"param {edit.name} = {edit.value}"
    if there is None:
        if not params:
            return None
        _, end = _whole_line(source, [*params.values()][-1].span)
        return Fix(f"write `{wanted}`", (Edit(end, end, f"{wanted}\n"),))
    if not isinstance(there.value, Num):
        return None
    place = there.value.span
    return Fix(f"write `{wanted}`", (Edit(place.start, place.end, str(edit.value)),))


def _code(source: str) -> str:
    return re.sub(r"//.*", "", source)


def _whole_line(source: str, span: Span) -> tuple[int, int]:
    """The lines of a statement, with their ends."""
    start = source.rfind("\n", 0, span.start) + 1
    end = source.find("\n", span.end)
    return start, len(source) if end < 0 else end + 1
