"""Locates findings: thread and block, and the lines of PTX, CUDA source and TL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType

from flashwright.build.compile import NAME
from flashwright.emulate.emulate import GAP, HEAP_BASE, Finding
from flashwright.emulate.ptx import Immediate, Instruction, Register, Symbol
from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.nodes import Span, line_span
from flashwright.lower.source_map import SourceMap

LANES = 32
CODES: Mapping[str, str] = MappingProxyType(
    {
        "out_of_bounds": "FW833",
        "misaligned": "FW834",
        "read_only": "FW835",
        "unwritten": "FW836",
        "race": "FW837",
        "deadlock": "FW838",
        "divergent": "FW839",
        "proxy": "FW840",
        "transaction": "FW841",
        "register": "FW842",
        "fence": "FW843",
        "barrier": "FW844",
        "trap": "FW845",
    }
)
"""The diagnostic code of each kind of finding."""
_VERBS = {
    "ld": "reads",
    "ldu": "reads",
    "ldmatrix": "reads",
    "st": "writes",
    "stmatrix": "writes",
    "cp": "copies",
    "atom": "changes",
    "red": "changes",
}
# The first details of findings that have a meaning of their own (run.h).
NOT_BEGUN, EXITED, NOBODY_WRITES, OTHER_BLOCK, NARROW_SCOPE, UNDEFINED = -1, -2, -2, -3, -4, -5
_TYPE = re.compile(r"\.[busf](8|16|32|64|128)$")
_MOST_HEAP = 1 << 36
_MOST_CALLS = 4
_WINDOWS = {
    0x7F: "shared",
    0x7E: "local",
    0x7D: "parameter",
}  # of generic addresses: run.h has them
_NEAR = 1 << 19  # bytes up to which an address counts as near a tensor


@dataclass(frozen=True)
class Extent:
    """The address range of a tensor in emulated memory."""

    name: str
    base: int
    size: int


@dataclass(frozen=True)
class Origin:
    """The source, TL and source map of a kernel's PTX, with the grid and tensors of its launch."""

    source: str = NAME
    """The name of the file that nvcc compiled; other files are headers."""
    map: SourceMap = field(default_factory=SourceMap)
    tl: str = ""
    """The text of the TL program."""
    grid: tuple[int, ...] = ()
    tensors: tuple[Extent, ...] = ()
    shown: str = ""
    """The name of the source in messages, if nvcc compiled it under another name."""
    text: str = ""
    """The text of the source, shown if there is no TL."""


@dataclass(frozen=True)
class Location:
    """The lines of an instruction in PTX, CUDA source and TL, as far as they are known."""

    ptx: int
    source: int | None = None
    tl: int | None = None
    name: str = NAME
    program: str = "code.tl"
    calls: tuple[str, ...] = ()
    """The lines of the calls that it was inlined into, the innermost first."""

    def __str__(self) -> str:
        """`code.tl:36, kernel.cu:88, PTX line 1203`."""
        found = [f"{self.program}:{self.tl}"] if self.tl is not None else []
        found += [f"{self.name}:{self.source}"] if self.source is not None else []
        found += [f"called at {place}" for place in self.calls]
        return ", ".join([*found, f"PTX line {self.ptx}"])


def locate(instruction: Instruction, origin: Origin) -> Location:
    """The lines of an instruction.

    Of the calls that it was inlined into, the first one with a line of TL counts, else the
    innermost one outside headers. A barrier or a wait belongs to the line of TL before it.
    """
    own = (p.line for p in instruction.source_lines if PurePath(p.file).name == origin.source)
    lines = [line for line in own if line > 0]  # the compiler's own additions are at line 0
    name = origin.shown or origin.source
    if not lines:
        header = None if origin.tl else _in_header(instruction)
        return header or Location(instruction.line, name=name, program=origin.map.tl)
    line = next((one for one in lines if origin.map.tl_line(one) is not None), lines[0])
    tl = origin.map.tl_line(line)
    tl = origin.map.tl_before(line) if tl is None else tl
    calls = () if origin.tl else _calls_of(instruction, origin, line)
    return Location(instruction.line, line, tl, name, origin.map.tl, calls)


def _calls_of(instruction: Instruction, origin: Origin, line: int) -> tuple[str, ...]:
    """The lines in the source of the calls that an instruction was inlined into."""
    own = [p.line for p in instruction.source_lines if PurePath(p.file).name == origin.source]
    outer = [one for one in dict.fromkeys(own) if one > 0 and one != line]
    return tuple(f"{origin.shown or origin.source}:{one}" for one in outer[:_MOST_CALLS])


def _in_header(instruction: Instruction) -> Location | None:
    """The line in the header that has the kernel; None if no line is known."""
    known = [place for place in instruction.source_lines if place.line > 0 and place.file]
    if not known:
        return None
    inner = next(place for place in known if place.file == known[-1].file)
    return Location(instruction.line, inner.line, name=PurePath(inner.file).name)


def thread(finding: Finding) -> str:
    """`thread 37 (warp 1, lane 5)`, or the warp if the finding is about all of its lanes."""
    if finding.lane < 0:
        return f"warp {finding.warp}"
    number = LANES * finding.warp + finding.lane
    return f"thread {number} (warp {finding.warp}, lane {finding.lane})"


def block(number: int, grid: Sequence[int]) -> str:
    """`block (3, 0, 1)`: its coordinates in the grid, the fastest first."""
    if len(grid) < 2 or all(count == 1 for count in grid[1:]):
        return f"block {number}"
    found = []
    for count in grid:
        found.append(number % max(count, 1))
        number //= max(count, 1)
    return f"block ({', '.join(map(str, found))})"


def diagnostics(findings: Sequence[Finding], origin: Origin) -> tuple[Diagnostic, ...]:
    """Findings as diagnostics: equal findings at one line are reported once, with a count.

    One source line gives many instructions, because loops are unrolled. Findings are grouped by
    line if it is known, else by instruction.
    """
    groups: dict[tuple[str, object, object], list[Finding]] = {}
    for one in findings:
        other = _line(one.other, origin) if one.other is not None else None
        groups.setdefault((one.kind, _line(one.instruction, origin), other), []).append(one)
    return tuple(_diagnostic(group, origin) for group in groups.values())


def _line(instruction: Instruction, origin: Origin) -> tuple[str, int]:
    found = locate(instruction, origin)
    return ("", found.ptx) if found.source is None else (found.name, found.source)


def _diagnostic(group: Sequence[Finding], origin: Origin) -> Diagnostic:
    first = group[0]
    here = locate(first.instruction, origin)
    who = f"{thread(first)} of {block(first.block, origin.grid)}"
    more = f"; at {len(group)} instructions of that line" if len(group) > 1 else ""
    calls = "".join(f", called at {locate(one, origin)}" for one in first.callers)
    text = f"{first.kind} at {here}{calls}: {who} {_told(first, origin)}{more}"
    hint = f"`{first.instruction.opcode}`"
    secondary: tuple[Label, ...] = ()
    if first.other is not None:
        there = locate(first.other, origin)
        hint += f", and `{first.other.opcode}` at {there}"
        span = _span(there, origin)
        if span is not None and span != _span(here, origin):
            secondary = (Label(span, _OTHER.get(first.kind, "the other")),)
    return Diagnostic(CODES[first.kind], text, _span(here, origin), secondary=secondary, help=hint)


def _span(found: Location, origin: Origin) -> Span | None:
    """The span of the line in TL, or in the source if there is no TL."""
    if origin.tl and found.tl is not None:
        return line_span(origin.tl, found.tl)
    own = found.name == (origin.shown or origin.source)
    if not origin.tl and origin.text and found.source is not None and own:
        return line_span(origin.text, found.source)
    return None


_NOUNS = {
    "divergent": "the instruction",
    "proxy": "the store",
    "register": "the wgmma",
    "fence": "the write",
}
_BOXES = {
    "misaligned": "which is no multiple of 16 bytes",
    "out_of_bounds": "before the tensor: a load may, a store may not",
}
_OTHER = {
    "race": "the access that it collides with",
    "proxy": "written here",
    "divergent": "the undefined value is used here",
    "register": "the wgmma that is under way",
    "fence": "written here",
}


# --- what happened, by kind -------------------------------------------------------------------


def _told(one: Finding, origin: Origin) -> str:
    verb = _VERBS.get(one.instruction.opcode.partition(".")[0], "uses")
    size = _size(one.instruction)
    count = f"{size} bytes at " if size else ""
    where = _address(one, origin)
    noun = _NOUNS.get(one.kind, "the access")
    other = f"{noun} at {locate(one.other, origin)}" if one.other else noun
    first, second = one.detail
    if one.kind == "deadlock":
        return _waits(one, origin)
    if one.kind == "out_of_bounds" and (told := _no_memory(one, origin)):
        return told
    if one.kind == "misaligned" and one.instruction.opcode.startswith("wmma"):
        stored = "store" in one.instruction.opcode
        told = f"{'writes' if stored else 'reads'} a fragment at {where}, with a stride of {second}"
        return f"{told}: fragments of this kind begin at multiples of {first} bytes"
    if one.kind in _BOXES and second and "bulk.tensor" in one.instruction.opcode:
        return _box(one, origin)
    if one.kind == "divergent" and first == UNDEFINED:
        absent = f"which does not execute {one.instruction.opcode} or is not in the mask"
        return f"reads the register of lane {one.address}, {absent}; {other} uses what it gets"
    if one.kind == "divergent" and one.lane >= 0:
        return f"executes {one.instruction.opcode} with the mask {one.address:#x}, without itself"
    if one.kind == "divergent":
        return f"executes {one.instruction.opcode} with only a part of its warp"
    if one.kind == "trap":
        return f"fails the assertion `{one.text}`" if one.text else "stops the kernel"
    if one.kind == "race" and first == NOT_BEGUN:
        return f"{verb} {count}{where}, which may not have begun: there is no barrier.cluster"
    if one.kind == "race" and first == EXITED and one.other:
        return f"{verb} {count}{where}, which may have exited at {locate(one.other, origin)}"
    if one.kind == "race" and first == OTHER_BLOCK:
        return f"{verb} {where} with nothing that orders it and, in another block, {other}"
    if one.kind == "race" and first == NARROW_SCOPE:
        return f"{verb} {where} in a scope too small for it or for {other}, in another block"
    if one.kind == "out_of_bounds" and one.instruction.opcode.startswith("mapa"):
        return f"asks for rank {first} of its cluster, which has fewer blocks"
    if one.kind == "race" and one.other == one.instruction and first > 0:
        return f"{verb} {count}{where}, where lane {first} writes another value at the same time"
    return {
        "out_of_bounds": f"{verb} {count}{where}, where there is nothing",
        "misaligned": f"{verb} {count}{where}, which is no multiple of {size or 'its size'}",
        "read_only": f"{verb} {where}, which is only for reading",
        "unwritten": f"{verb} {where}, which nothing has written",
        "race": f"{verb} {where} with no barrier between it and {other}",
        "proxy": f"reads {where} by the asynchronous proxy with no fence.proxy.async since {other}",
        "transaction": f"completes {second} bytes on the barrier at {one.address:#x}, which "
        f"expects {first}",
        "register": f"touches a register of {other}, which has not been waited for",
        "fence": f"takes a register with no wgmma.fence since {other}",
        "barrier": f"uses the barrier at {one.address:#x}, which is not initialised or has more "
        "arrivals than it counts",
    }[one.kind]


def _no_memory(one: Finding, origin: Origin) -> str | None:
    """What is wrong with a call, or with memory of malloc."""
    opcode, address = one.instruction.opcode, f"address {one.address:#x}"
    frees = _calls(one.instruction, "free")
    if opcode == "enter":
        return "calls a function, and the stack has no room for it"
    if opcode.startswith("call") and isinstance(one.instruction.operands[0], Register):
        return f"calls {address}, where there is no function with these parameters"
    if not frees and not _in_heap(one):
        return None
    offset, size = one.detail
    verb = "frees" if frees else _VERBS.get(opcode.partition(".")[0], "uses")
    if not size:
        return f"{verb} {address}, which malloc has not given"
    what = f"memory of {size} bytes" if frees else _address(one, origin)
    if offset >= size:
        return f"{verb} {what}"
    freed = f"at {locate(one.other, origin)}" if one.other else "by an earlier launch"
    return f"{verb} {what}, which was freed {freed}"


def _in_heap(one: Finding) -> bool:
    return HEAP_BASE <= one.address < HEAP_BASE + _MOST_HEAP


def _calls(instruction: Instruction, name: str) -> bool:
    """Whether it calls a function of that name."""
    return instruction.opcode.startswith("call") and instruction.operands[0] == Symbol(name)


def _box(one: Finding, origin: Origin) -> str:
    """A TMA box with a start at which an H200 raises an illegal instruction."""
    axis, start = one.detail
    extents = (e.name for e in origin.tensors if e.base <= one.address < e.base + e.size)
    name = next((f"`{name}`" for name in extents), f"the tensor at {one.address:#x}")
    along = "the innermost axis" if axis == 0 else f"axis {axis} (0 is the innermost)"
    return f"copies a box of {name} that begins at {start} along {along}, {_BOXES[one.kind]}"


def _waits(one: Finding, origin: Origin) -> str:
    arrivals, amount = one.detail
    if arrivals == NOBODY_WRITES:
        more = f"; {amount} clusters or blocks have not begun" if amount else ""
        return f"waits for ever for a change of {_address(one, origin)}{more}"
    if arrivals < 0:
        return "does not come to an end: it was stopped after millions of instructions"
    own = "mbarrier" in one.instruction.opcode
    name = f"the mbarrier at {one.address:#x}" if own else f"barrier {one.address}"
    return f"waits for ever at {name}{_missing(arrivals, amount)}"


def _missing(arrivals: int, amount: int) -> str:
    found = [f"{arrivals} arrivals"] if arrivals else []
    found += [f"{amount} bytes"] if amount else []
    return f": {' and '.join(found)} are missing" if found else ""


def _size(instruction: Instruction) -> int | None:
    """The bytes that one lane moves, if the opcode says so."""
    opcode = instruction.opcode
    if opcode.startswith(("ldmatrix", "stmatrix")):
        return 16
    if opcode.startswith("cp.async") and "bulk" not in opcode:
        numbers = [o.value for o in instruction.operands if isinstance(o, Immediate)]
        return numbers[0] if numbers else None
    kind = _TYPE.search(opcode)
    if kind is None or opcode.partition(".")[0] not in _VERBS:
        return None
    wide = re.search(r"\.v([248])\b", opcode)
    return int(kind[1]) // 8 * (int(wide[1]) if wide else 1)


def _address(one: Finding, origin: Origin) -> str:
    """An address in words: a byte of a tensor, or an address in shared memory."""
    opcode = one.instruction.opcode
    if _in_heap(one):
        return "byte {} of memory for which malloc was asked {} bytes".format(*one.detail)
    for extent in origin.tensors:
        if extent.base <= one.address < extent.base + extent.size:
            return f"byte {one.address - extent.base} of `{extent.name}`"
    beside = [(_beyond(e, one.address), e) for e in origin.tensors]
    near = [(gap, e) for gap, e in beside if abs(gap) < _NEAR]
    if near:
        gap, extent = min(near, key=lambda n: abs(n[0]))
        side = "behind the end of" if gap >= 0 else "before the beginning of"
        return f"byte {abs(gap)} {side} `{extent.name}`"
    generic, offset = _WINDOWS.get(one.address >> 40), one.address % (1 << 40)
    shared = ".shared" in opcode or "matrix" in opcode or generic == "shared"
    rank = offset >> 24
    if 0 < rank <= 16 and (shared or one.kind in ("race", "unwritten", "barrier")):
        return f"shared address {offset & 0xFFFFFF:#x} of rank {rank - 1} of its cluster"
    if generic is not None:
        return f"{generic} address {offset:#x}, by a generic address"
    shared |= opcode.startswith(("atom", "red")) and one.address < GAP
    space = "shared" if shared else "local" if ".local" in opcode else "global"
    return f"{space} address {one.address:#x}"


def _beyond(extent: Extent, address: int) -> int:
    end = extent.base + extent.size
    return address - end if address >= end else address - extent.base
