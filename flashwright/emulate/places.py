"""Where a finding is: thread and block, and the lines of PTX, of the CUDA source and of TL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType

from flashwright.build.compile import NAME
from flashwright.emulate.emulate import Finding
from flashwright.emulate.ptx import Immediate, Instruction
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
"""The code under which each kind of finding is explained."""
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
_TYPE = re.compile(r"\.[busf](8|16|32|64|128)$")
_NEAR = 1 << 19  # bytes up to which an address counts as beside a tensor


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies in the emulated memory."""

    name: str
    base: int
    size: int


@dataclass(frozen=True)
class Origin:
    """What is known of where a kernel's PTX came from, and of its launch."""

    source: str = NAME
    """The file that nvcc compiled, by its name; lines of other files are those of headers."""
    map: SourceMap = field(default_factory=SourceMap)
    tl: str = ""
    """The text of the TL program, for what is shown beside its lines."""
    grid: tuple[int, ...] = ()
    tensors: tuple[Extent, ...] = ()
    shown: str = ""
    """What to call the source, where nvcc was given it by another name."""
    text: str = ""
    """Of the source: its lines are shown where there is no TL."""


@dataclass(frozen=True)
class Place:
    """The lines of an instruction, as far as they are known."""

    ptx: int
    source: int | None = None
    tl: int | None = None
    name: str = NAME
    program: str = "code.tl"

    def __str__(self) -> str:
        """`code.tl:36, kernel.cu:88, PTX line 1203`."""
        found = [f"{self.program}:{self.tl}"] if self.tl is not None else []
        found += [f"{self.name}:{self.source}"] if self.source is not None else []
        return ", ".join([*found, f"PTX line {self.ptx}"])


def place(instruction: Instruction, origin: Origin) -> Place:
    """The lines of an instruction.

    Of the calls that it was inlined into, that line of the source counts which has a line of TL;
    where none has, the innermost that is not in a header. A barrier or a wait belongs to the line
    of TL before it.
    """
    own = (p.line for p in instruction.places if PurePath(p.file).name == origin.source)
    lines = [line for line in own if line > 0]  # the compiler's own additions are at line 0
    name = origin.shown or origin.source
    if not lines:
        return Place(instruction.line, name=name, program=origin.map.tl)
    line = next((one for one in lines if origin.map.tl_line(one) is not None), lines[0])
    tl = origin.map.tl_line(line)
    tl = origin.map.tl_before(line) if tl is None else tl
    return Place(instruction.line, line, tl, name, origin.map.tl)


def thread(finding: Finding) -> str:
    """`thread 37 (warp 1, lane 5)`, or the warp where it is about all of it."""
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
    """What was found, for people: the same thing at the same line is told once, with a count.

    One line of source is many instructions, because loops are unrolled: lines count where they
    are known, else instructions.
    """
    groups: dict[tuple[str, object, object], list[Finding]] = {}
    for one in findings:
        other = _line(one.other, origin) if one.other is not None else None
        groups.setdefault((one.kind, _line(one.instruction, origin), other), []).append(one)
    return tuple(_diagnostic(group, origin) for group in groups.values())


def _line(instruction: Instruction, origin: Origin) -> tuple[str, int]:
    found = place(instruction, origin)
    return ("ptx", found.ptx) if found.source is None else ("source", found.source)


def _diagnostic(group: Sequence[Finding], origin: Origin) -> Diagnostic:
    first = group[0]
    here = place(first.instruction, origin)
    who = f"{thread(first)} of {block(first.block, origin.grid)}"
    more = f"; at {len(group)} instructions of that line" if len(group) > 1 else ""
    text = f"{first.kind} at {here}: {who} {_told(first, origin)}{more}"
    hint = f"`{first.instruction.opcode}`"
    secondary: tuple[Label, ...] = ()
    if first.other is not None:
        there = place(first.other, origin)
        hint += f", and `{first.other.opcode}` at {there}"
        span = _span(there, origin)
        if span is not None and span != _span(here, origin):
            secondary = (Label(span, _OTHER.get(first.kind, "the other")),)
    return Diagnostic(CODES[first.kind], text, _span(here, origin), secondary=secondary, help=hint)


def _span(found: Place, origin: Origin) -> Span | None:
    """Its line in TL, or in the source where there is no TL at all."""
    if origin.tl and found.tl is not None:
        return line_span(origin.tl, found.tl)
    if not origin.tl and origin.text and found.source is not None:
        return line_span(origin.text, found.source)
    return None


_NOUNS = {"proxy": "the store", "register": "the wgmma", "fence": "the write"}
_BOXES = {
    "misaligned": "which is no multiple of 16 bytes",
    "out_of_bounds": "before the tensor: a load may, a store may not",
}
_OTHER = {
    "race": "the access that it collides with",
    "proxy": "written here",
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
    other = f"{noun} at {place(one.other, origin)}" if one.other else noun
    first, second = one.detail
    if one.kind == "deadlock":
        return _waits(one)
    if one.kind in _BOXES and second and "bulk.tensor" in one.instruction.opcode:
        return _box(one, origin)
    if one.kind == "divergent":
        return f"executes {one.instruction.opcode} with only a part of its warp"
    if one.kind == "trap":
        return "stops the kernel"
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


def _box(one: Finding, origin: Origin) -> str:
    """Of TMA: a box that begins where an H200 stops with an illegal instruction."""
    axis, start = one.detail
    extents = (e.name for e in origin.tensors if e.base <= one.address < e.base + e.size)
    name = next((f"`{name}`" for name in extents), f"the tensor at {one.address:#x}")
    along = "the innermost axis" if axis == 0 else f"axis {axis} (0 is the innermost)"
    return f"copies a box of {name} that begins at {start} along {along}, {_BOXES[one.kind]}"


def _waits(one: Finding) -> str:
    arrivals, amount = one.detail
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
    """How many bytes one lane moves, where the opcode says it."""
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
    """An address in words: a tensor and the byte in it, or a place in shared memory."""
    opcode = one.instruction.opcode
    for extent in origin.tensors:
        if extent.base <= one.address < extent.base + extent.size:
            return f"byte {one.address - extent.base} of `{extent.name}`"
    beside = [(_beyond(e, one.address), e) for e in origin.tensors]
    near = [(gap, e) for gap, e in beside if abs(gap) < _NEAR]
    if near:
        gap, extent = min(near, key=lambda n: abs(n[0]))
        side = "behind the end of" if gap >= 0 else "before the beginning of"
        return f"byte {abs(gap)} {side} `{extent.name}`"
    shared = ".shared" in opcode or "matrix" in opcode
    return f"{'shared' if shared else 'global'} address {one.address:#x}"


def _beyond(extent: Extent, address: int) -> int:
    end = extent.base + extent.size
    return address - end if address >= end else address - extent.base
