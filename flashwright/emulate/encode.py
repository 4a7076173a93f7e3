"""Encodes a kernel for the machine: operands become slots of the register file, labels numbers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.emulate.calls import BUILT_IN, FRAME, Function, aligned, link, packed
from flashwright.emulate.parse import MOST_VARIABLE, TARGETS, UNREADABLE, bad, names
from flashwright.emulate.ptx import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Symbol,
    Variable,
    Vector,
)
from flashwright.emulate.support import refusal
from flashwright.emulate.widths import BYTES, flat, narrowed, operand_width, width_of
from flashwright.lang.diagnostic import Diagnostic, Failed

LANES = 32
MODULE = 1 << 38  # where variables of the module lie in global memory
FUNCTIONS, FUNCTION = 0x7C << 40, 16  # where functions lie, one behind the other; run.h has both
_PLAIN = re.compile(r"(?:[us]|b?f)(8|16|32|64)")  # what cvt has two operands of
# Parts of an opcode that change nothing here.
_IDLE = re.compile(
    r"\.(?:aligned|uni|volatile|relaxed|acquire|release|gpu|cta|sys|weak|nc|ca|cg|cs|cv|wb|wt|lu"
    r"|L1::\w+|L2::\w+|L2_\w+|level::\w+)(?![\w:])"
)
_NOTHING = (
    *("prefetch", "prefetchu", "setmaxnreg", "griddepcontrol", "nanosleep", "applypriority"),
    *("pmevent", "discard"),
)
_NO_FENCE = ("fence.proxy", "fence.mbarrier_init")  # which order nothing between threads
_ORDERS = (
    "volatile",
    "relaxed",
    "acquire",
    "release",
)  # of accesses that may tell others something
_CLUSTER = "shared::cluster"  # the shared memory of all blocks of a cluster
_SPACES = ("param", "global", "shared", "const", "local", _CLUSTER)
_AXES = ("x", "y", "z")
# In the order of launch.cpp's `special`.
SPECIALS = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in _AXES),
    *("%laneid", "%warpid"),
    *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "ge", "gt")),
    *("%nwarpid", "%smid", "%nsmid", "%dynamic_smem_size"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in _AXES),
    *(f"%cluster_{name}.{axis}" for name in ("ctaid", "nctaid") for axis in _AXES),
    *("%cluster_ctarank", "%cluster_nctarank"),
    *("%envreg1", "%envreg2"),  # the address of the grid's workspace, its upper half first
)
# The bytes of each, and the bits that they are shifted by. All count the instructions of a warp.
CLOCKS = {
    "%clock": (4, 0),
    "%clock_hi": (4, 32),
    "%clock64": (8, 0),
    "%globaltimer": (8, 0),
    "%globaltimer_lo": (4, 0),
    "%globaltimer_hi": (4, 32),
}
_VIDEO = re.compile(
    r"v(?P<op>add|sub|absdiff|min|max|avrg|shl|shr|mad|set)(?P<parts>[24])?(?P<types>(?:\.[us]32)+)"
    r"(?P<sat>\.sat)?(?:\.(?P<compare>eq|ne|lt|le|gt|ge))?(?:\.(?P<mode>clamp|wrap))?"
    r"(?:\.(?P<second>add|min|max))?"
)
_VIDEOS = ("add", "sub", "absdiff", "min", "max", "avrg", "shl", "shr", "mad", "set")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# In the order of atomic.cpp.
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
TYPES = (
    *("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "f16x2", "bf16x2"),
    *("b16", "f16", "bf16", "b128"),
)
# Of predicates at a barrier, in the order of run.cpp.
REDUCTIONS = ("popc", "and", "or")
ACQUIRES = "ld.acquire.global"
"""The load by which a thread block waits for others."""
_VECTORS = ("v2", "v4", "v8")
# In the order of fragments.cpp.
ELEMENTS = ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s4", "u4", "b1", "s32")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_RARE_MMA = re.compile(r"\.(?:f64|[su]4|b1|m8n8k16)\.")
NORMAL, BRANCH, EXIT, SYNC, ARRIVE, MBARRIER, CLUSTER_ARRIVE, CLUSTER_WAIT, PRODUCTS = range(9)
CALL, LEAVE, BRANCH_IF = 16, 17, 18


# Operands that instructions have at least. The machine takes them as they come, so that none may be
# missing; behind instructions that are not here, it finds slots that are there.
_FEWEST = {
    **dict.fromkeys(("mov", "not", "cnot", "neg", "abs", "popc", "clz", "brev", "bfind"), 2),
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "cvt", "cvta"), 2),
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor"), 3),
    **dict.fromkeys(("shl", "shr", "setp", "set", "copysign", "bmsk"), 3),
    **dict.fromkeys(("mad", "fma", "selp", "slct", "bfe", "prmt", "shf", "sad", "dp4a", "dp2a"), 4),
    **dict.fromkeys(("lop3", "bfi"), 5),
}
_UNREAD = ("setp", "mov")  # whose results may be `_`
_MOST_MOVED = 32  # bytes of a lane that one load or store moves
_SPARE = [0] * 160


def _selected(operand: Operand) -> tuple[Operand, str]:
    """A register without the selector of its parts, and the selector, such as b3 or h10."""
    if isinstance(operand, Register) and "." in operand.name:
        name, _, selector = operand.name.rpartition(".")
        return Register(name, operand.negated), selector
    return operand, ""


def _parts(selector: str, parts: int, second: int) -> int:
    """Which parts an operand of a video instruction takes, as words.cpp has it."""
    if parts == 1:
        size = {"b": 1, "h": 2}.get(selector[:1], 4)
        return size << 4 | int(selector[1:] or 0)
    digits = selector[1:] or "".join(str(n + parts * second) for n in reversed(range(parts)))
    return sum(int(digit) << 4 * n for n, digit in enumerate(reversed(digits)))


@dataclass(frozen=True)
class PlacedVariable:
    """A variable of a module in global or constant memory."""

    variable: Variable
    offset: int

    @property
    def unset(self) -> bool:
        """Whether it is constant and has no initialiser: the host has to set it."""
        return self.variable.space == "const" and not self.variable.data


@dataclass
class EncodedKernel:
    """An encoded kernel: code, operands and memory sizes for the machine."""

    names: list[str] = field(default_factory=list)
    code: list[int] = field(default_factory=list)
    """Eight numbers for each instruction: run.h's Code behind the handler."""
    operands: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    """Registers that an instruction writes, then those that it reads, for the checks of wgmma."""
    registers: bytearray = field(default_factory=bytearray)
    specials: list[int] = field(default_factory=list)
    source: list[Instruction] = field(default_factory=list)
    shared: int = 0
    """Bytes of shared memory that are declared; the launch's own come behind them."""
    local: int = 0
    """Bytes of local memory per thread."""
    data: bytearray = field(default_factory=bytearray)
    """Variables of the module."""
    variables: dict[str, PlacedVariable] = field(default_factory=dict)
    """The same by name, in the order of their offsets."""
    parameters: tuple[Variable, ...] = ()
    offsets: tuple[int, ...] = ()
    """The byte offsets of the parameters."""
    entry: str = ""
    """The name of the kernel."""
    target: str = ""
    """The architecture that the PTX is for, such as sm_90a."""
    directives: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        """The size of all parameters together, in bytes."""
        return self.offsets[-1] + self.parameters[-1].size if self.parameters else 0

    @cached_property
    def packed(self) -> tuple[Any, list[NDArray[np.int32]]]:
        """Names, and code, operands, touched and specials, as the machine takes them."""
        names = (ctypes.c_char_p * len(self.names))(*(n.encode() for n in self.names))
        lists = (self.code, self.operands, self.touched, self.specials)
        return names, [np.array(numbers or [0], np.int32) for numbers in lists]


def refused(one: Instruction, why: str) -> Failed:
    """The Failed (FW831) for an instruction, with its lines of PTX and of the source."""
    source = next((place for place in one.source_lines if place.line > 0), None)
    where = f" ({PurePath(source.file).name}:{source.line})" if source else ""
    text = why if one.opcode in why else f"`{one.opcode}`: {why}"
    return Failed(Diagnostic("FW831", f"PTX line {one.line}{where}: {text}"))


def spelled() -> Iterator[str]:
    """Names of instructions that have operands of their own here, for the documentation."""
    yield from ("bra", "brx.idx", "call", "ret", "exit", "trap", "brkpt", "membar", "fence.proxy")
    yield from _NOTHING
    yield from (f"v{op}{parts}" for op in _VIDEOS for parts in ("", "2", "4"))
    yield from ("createpolicy", "barrier", "ldu", "bar.cta.sync.arrive.red.popc.and.or")
    yield from ("cp.reduce.async.bulk.global.shared", "cp.async.ca.cg.shared.global")
    yield from ("cp.async.bulk.tensor.1d.2d.3d.4d.5d.tile.prefetch", "cp.async.bulk.bulk_group")
    yield from (f"{kind}.{op}" for kind in ("atom", "red") for op in OPERATIONS)
    yield from (f"{kind}.{part}" for kind in ("atom", "red") for part in (*TYPES, *_VECTORS))
    yield from (f"wmma.{how}.{kind}" for how in ("load", "store", "mma") for kind in ELEMENTS)
    yield from (f"mma.sync.{kind}" for kind in ("f64", "s4", "u4", "b1", "xor", "and", "popc"))
    yield from (f"wgmma.{how}" for how in ("mma_async", "fence", "commit_group", "wait_group"))
    yield from (f"mbarrier.{how}" for how in ("arrive_drop", "expect_tx", "test_wait", "try_wait"))


def encode(module: Module, entry: Entry, start: int = MODULE) -> EncodedKernel:
    """The encoded kernel. Raises Failed with FW831 at the first invalid instruction. `start` is the
    address of the module's variables."""
    return _Encoder(module, entry, start).program()


class _Encoder:
    def __init__(self, module: Module, entry: Entry, start: int) -> None:
        self.start = start
        self.module, self.linked = module, link(module, entry)
        self.entry = entry = self.linked.entry
        self.made = EncodedKernel(
            parameters=entry.parameters,
            entry=entry.name,
            target=module.target,
            directives=entry.directives,
        )
        self.slots: dict[object, int] = {}
        self.addresses: dict[str, int] = {}
        self.line = 0
        self.jumps: list[tuple[int, str, int]] = []
        self.starts: list[int] = []
        self.now: Instruction | None = None
        self.frame = 0
        """The bytes of the frame of the function that is being encoded."""
        self._place([*module.variables, *entry.variables])

    def _place(self, variables: list[Variable]) -> None:
        """Assign addresses to variables; dynamic shared memory comes last."""
        made = self.made
        ends = {"param": 0, "shared": 0, "local": 0, "global": 0}
        sized = [v for v in variables if v.size or v.space != "shared"]
        unsized = [v for v in variables if not v.size and v.space == "shared"]
        for variable in (*self.entry.parameters, *sized, *unsized):
            space = "global" if variable.space == "const" else variable.space
            offset = -(-ends[space] // variable.align) * variable.align
            self.addresses[variable.name] = offset + (self.start if space == "global" else 0)
            ends[space] = offset + variable.size
            if ends[space] > MOST_VARIABLE:
                raise bad(1, f"more than {MOST_VARIABLE} bytes of variables in {space} memory")
            if space == "global":
                made.data += bytes(offset - len(made.data))
                made.data += variable.data.ljust(variable.size, b"\0")
                made.variables[variable.name] = PlacedVariable(variable, offset)
        self._set_addresses()
        made.offsets = tuple(self.addresses[p.name] for p in self.entry.parameters)
        made.shared, made.local = ends["shared"], ends["local"]
        self.frame = aligned(made.local, self.linked.align)
        self.stack_end = self.frame + self.linked.stack_bytes

    def _set_addresses(self) -> None:
        """Write the addresses of variables into the variables that are initialised with them."""
        for placed in self.made.variables.values():
            for at, name, more in placed.variable.addresses:
                if name in self.module.functions:
                    value = self._function_address(name)
                elif name in self.made.variables:
                    value = self.addresses[name] + more
                else:
                    own = placed.variable.name
                    raise bad(1, f"{own} is initialised with the address of {name}")
                start = placed.offset + at
                self.made.data[start : start + 8] = value.to_bytes(8, "little")

    def _function_address(self, name: str) -> int:
        return FUNCTIONS + FUNCTION * list(self.module.functions).index(name)

    def program(self) -> EncodedKernel:
        for instruction in self.entry.code:
            self.starts.append(len(self.made.names))
            self.line, self.now = instruction.line, instruction
            if why := refusal(instruction.opcode):
                raise refused(instruction, why)
            try:
                self._instruction(instruction)
            except (*UNREADABLE, AssertionError):
                raise refused(instruction, f"cannot execute {instruction.opcode}") from None
            except Failed as failed:
                why = failed.diagnostics[0].message.partition(": ")[2]
                raise refused(instruction, why) from None
        self.starts.append(len(self.made.names))
        # A kernel may end without `ret`.
        self.now = Instruction("ret", (), None, self.line)
        self._emit("", [], EXIT)
        for at, label, line in self.jumps:
            if label not in self.entry.labels:
                raise bad(line, f"there is no label {label}")
            self.made.operands[at] = self.starts[self.entry.labels[label]]
        return self.made

    # --- slots --------------------------------------------------------------------------------

    def _room(self, key: object, data: bytes) -> int:
        if key not in self.slots:
            self.slots[key] = len(self.made.registers)
            self.made.registers += data
        return self.slots[key]

    def _bytes_of(self, name: str) -> int:
        if name in SPECIALS:
            return 4
        if name == FRAME:
            return 8
        kind = self.entry.registers.get(name)
        if kind is None:
            raise bad(self.line, f"the register {name} is not declared")
        return 0 if kind == "pred" else BYTES[kind.lstrip("busf")]

    def _register(self, name: str) -> int:
        if name == "_":
            return -1
        if name in SPECIALS:
            known = name in self.slots
            slot = self._room(name, bytes(4 * LANES))
            if not known:
                self.made.specials += [SPECIALS.index(name), slot]
            return slot
        size = self._bytes_of(name)
        return self._room(name, bytes(LANES * size if size else 8))

    def _constant(self, value: int, size: int) -> int:
        """The slot of a constant of `size` bytes; 0 bytes are a predicate."""
        if not size:
            return self._room(("predicate", bool(value)), (b"\xff" if value else b"\0") * 8)
        value %= 1 << 8 * size
        return self._room((value, size), value.to_bytes(size, "little") * LANES)

    def _slot(self, operand: Operand, size: int) -> int:
        if isinstance(operand, Register) and operand.name == "%gridid":
            return self._constant(1, size)
        if isinstance(operand, Register):
            return self._negated(operand) if operand.negated else self._register(operand.name)
        if isinstance(operand, Immediate):
            return self._constant(narrowed(operand, size), size)
        if isinstance(operand, Symbol):
            if operand.name in self.linked.stack:
                return self._stack_address(operand.name)
            if operand.name in self.module.functions:
                return self._constant(self._function_address(operand.name), size)
            if operand.name not in self.addresses:
                raise bad(self.line, f"the variable {operand.name} cannot be used here")
            return self._constant(self.addresses[operand.name], size)
        raise bad(self.line, "an operand of this kind is not expected here")

    def _negated(self, operand: Register) -> int:
        """A slot with the negated predicate, for an instruction without `!` operands."""
        slot = self._room(("not", operand.name), bytes(8))
        self._emit("not.pred", [slot, self._register(operand.name)])
        return slot

    def _stack_address(self, name: str) -> int:
        """A slot with the address of a variable in the frame."""
        slot = self._room(("stack", name), bytes(8 * LANES))
        offset = self._constant(self.linked.stack[name], 8)
        self._emit("add.u64", [slot, self._register(FRAME), offset])
        return slot

    def _address(self, operand: Operand) -> list[int]:
        """Slot, bytes of it, offset."""
        if not isinstance(operand, Address):
            raise bad(self.line, "an address is expected here")
        base = operand.base
        if isinstance(base, Symbol) and base.name in self.linked.stack:
            return [self._register(FRAME), 8, self.linked.stack[base.name] + operand.offset]
        size = self._bytes_of(base.name) if isinstance(base, Register) else 8
        return [self._slot(base, size), size, operand.offset]

    def _number(self, operand: Operand) -> int:
        if not isinstance(operand, Immediate):
            raise bad(self.line, "only a constant can stand here")
        return operand.value

    # --- instructions -------------------------------------------------------------------------

    def _emit(self, name: str, operands: list[int], control: int = NORMAL) -> None:
        one = self.now
        assert one is not None
        guard = self._register(one.guard.name) if one.guard else -1
        negated = int(bool(one.guard and one.guard.negated))
        written, read = self._touched(one)
        made = self.made
        made.code += [len(made.operands), len(operands), guard, negated, control]
        made.code += [len(made.touched), len(written), len(read)]
        made.touched += [*written, *read]
        made.names.append(name)
        made.operands += operands
        made.source.append(one)

    def _touched(self, one: Instruction) -> tuple[list[int], list[int]]:
        if one.opcode.startswith("wgmma.mma_async"):
            return [], []  # it has its own rules
        stores = one.opcode.partition(".")[0] in ("st", "red", "cp", "bar", "stmatrix")
        first = 0 if stores and not one.opcode.startswith("bar.red") else 1
        parts = (one.operands[:first], one.operands[first:])
        written, read = ([n for n in names(part) if n in self.entry.registers] for part in parts)
        return [self._register(n) for n in written], [self._register(n) for n in read]

    def _instruction(self, one: Instruction) -> None:
        name = _IDLE.sub("", one.opcode).replace("shared::cta", "shared")
        first = name.partition(".")[0]
        if ".L2::cache_hint" in one.opcode:
            one = replace(one, operands=one.operands[:-1])
        if first == "bra":
            target = one.operands[0]
            assert isinstance(target, Symbol)
            self._emit("", [0], BRANCH)
            self.jumps.append((len(self.made.operands) - 1, target.name, one.line))
        elif first in ("ret", "exit"):
            self._emit("", [], EXIT)
        elif first in ("trap", "brkpt"):
            self._emit("trap", [])
        elif name.startswith("fence.proxy.async"):
            self._emit("fence.proxy.async", [])
        elif name.startswith("fence.mbarrier_init"):
            self._emit("fence.mbarrier_init", [])
        elif first == "membar" or (first == "fence" and not name.startswith(_NO_FENCE)):
            self._emit("fence", [self._scope()])
        elif first in ("fence", "", *_NOTHING) or name.startswith("cp.async.bulk.prefetch"):
            self._emit("nothing", [])
        elif first in _SPECIAL:
            _SPECIAL[first](self, name, one.operands)
        else:
            self._plain(name, one.operands)

    def _plain(self, name: str, operands: Sequence[Operand]) -> None:
        size = width_of(name)
        if name.startswith("mov.") and operands[1:] and self._is_clock(operands[1]):
            self._clock(operands)
            return
        if name.startswith("mov.") and any(isinstance(o, Vector) for o in operands):
            # Slots alone do not tell d, {a, b} from {a, b}, d.
            packs = isinstance(operands[1], Vector)
            name = name.replace("mov.", "mov.pack." if packs else "mov.unpack.")
            size //= len(flat(operands[1 if packs else 0]))
        single = [inner for operand in operands for inner in flat(operand)]
        slots = [
            self._slot(operand, operand_width(name, number, len(single), size))
            for number, operand in enumerate(single)
        ]
        stem = name.partition(".")[0]
        if len(slots) < _FEWEST.get(stem, 0):
            raise bad(self.line, f"{name} has {len(slots)} operands")
        if min(slots, default=0) < 0 and stem in _FEWEST and stem not in _UNREAD:
            raise bad(self.line, f"{name} cannot have `_` as an operand")
        self._emit(name, slots)
        if stem not in _FEWEST:
            self.made.operands += _SPARE[:16]

    def _carry(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode an instruction that reads or writes the carry flag, a predicate of the thread."""
        stem, *parts = name.split(".")
        if not stem.endswith("c") and "cc" not in parts:
            self._plain(name, operands)
            return
        slots = [self._slot(operand, width_of(name)) for operand in operands]
        if len(slots) != (4 if stem.startswith("mad") else 3) or min(slots) < 0:
            raise self._unknown()
        self._emit(name, [*slots, self._room("carry", bytes(8))])

    def _video(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode an instruction on parts of words, in the order of words.cpp."""
        found = _VIDEO.fullmatch(name)
        if found is None:
            raise self._unknown()
        which, parts, kinds = found["op"], int(found["parts"] or 1), found["types"].split(".")[1:]
        compares = _COMPARISONS.index(found["compare"]) if which == "set" else 0
        *types, a, b = ["u32", *kinds] if which == "set" else kinds
        signs = sum(bit << n for n, bit in enumerate(k[0] == "s" for k in (a, b, types[0])))
        flags = signs + 8 * bool(found["sat"]) + 16 * (found["mode"] == "wrap")
        second = ("", "add", "min", "max").index(found["second"] or "")
        (d, written), *given = [_selected(operand) for operand in operands]
        if written and parts == 1:
            raise self._unknown()
        taken = [_parts(selector, parts, n) for n, (_, selector) in enumerate(given[:2])]
        header = [_VIDEOS.index(which) + compares, second, parts, flags]
        mask = sum(1 << int(digit) for digit in written[1:]) if written else (1 << parts) - 1
        slots = [self._slot(operand, 4) for operand in (d, *(one for one, _ in given))]
        self._emit("video", [*header, mask, *taken, *slots, *slots[-1:]])

    def _brx(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode a jump to one of several labels: a jump under a condition for each."""
        index, table = operands
        assert isinstance(table, Symbol)
        slot, at = self._slot(index, 4), self.entry.labels.get(table.name, -1)
        listed = self.entry.code[at]
        if listed.opcode != TARGETS:
            raise bad(self.line, f"there is no table {table.name} of labels")
        for number, label in enumerate(listed.operands):
            assert isinstance(label, Symbol)
            self._emit("", [0, slot, number], BRANCH_IF)
            self.jumps.append((len(self.made.operands) - 3, label.name, self.line))
        self._emit("trap", [])

    def _is_clock(self, operand: Operand) -> bool:
        return isinstance(operand, Register) and operand.name in CLOCKS

    def _clock(self, operands: Sequence[Operand]) -> None:
        clock = operands[1]
        assert isinstance(clock, Register)
        size, shift = CLOCKS[clock.name]
        self._emit("clock", [self._slot(operands[0], size), size, shift])

    def _convert(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode cvt with the widths of its registers, which may exceed those of the types."""
        kinds = [_PLAIN.fullmatch(kind) for kind in name.split(".")[-2:]]
        if len(operands) != 2 or not all(kinds):
            self._plain(name, operands)
            return
        typed = [max(2, BYTES[kind[1]]) for kind in kinds if kind]  # bytes are in registers of two
        sizes = [
            self._bytes_of(operand.name) if isinstance(operand, Register) else size
            for operand, size in zip(operands, typed, strict=True)
        ]
        slots = [self._slot(o, size) for o, size in zip(operands, sizes, strict=True)]
        self._emit(name, slots + sizes if sizes != typed else slots)

    def _access(self, name: str, operands: Sequence[Operand]) -> None:
        if name.startswith("st.async"):
            self._store_async(name, operands)
            return
        parts = name.split(".")
        space = next((p for p in parts if p in _SPACES), "")
        kind = parts[-1]
        if kind.lstrip("busf") not in BYTES or len(operands) != 2:
            raise self._unknown()
        size = BYTES[kind.lstrip("busf")]
        load = parts[0] != "st"
        parts[0] = "ld" if load else "st"
        value, where = operands if load else operands[::-1]
        values = flat(value)
        if len(values) * size > _MOST_MOVED:
            raise self._unknown()
        width = size
        for register in values:
            if isinstance(register, Register) and register.name != "_":
                width = self._bytes_of(register.name)
        slots = [self._slot(v, width) for v in values]
        if size > 8:  # two halves each
            size, slots = 8, [slot + half for slot in slots for half in (0, 8)]
        header = [size, width, int(kind[0] == "s"), len(slots)]
        order = self._order() if space in ("", "global", "shared", _CLUSTER) else []
        spelled = ".".join([parts[0], *order, *([space] if space else [])])
        spelled = spelled.replace(_CLUSTER, "cluster")
        self._emit(spelled, [*header, *slots, *self._address(where), self._scope()])

    def _order(self) -> list[str]:
        """The part of the opcode that says how an access is ordered."""
        assert self.now is not None
        parts = self.now.opcode.split(".")
        return [order for order in _ORDERS if order in parts][:1]

    def _policy(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode createpolicy: there is no cache, and any number will do."""
        self._emit("mov.b64", [self._slot(operands[0], 8), self._constant(0, 8)])

    def _store_async(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.rpartition(".")[2]
        if not name.startswith("st.async") or kind.lstrip("busf") not in BYTES:
            raise self._unknown()
        to, value, barrier = operands
        size, values = BYTES[kind.lstrip("busf")], flat(value)
        places = [*self._address(to), *self._address(barrier)]
        slots = [self._slot(v, size) for v in values]
        self._emit("st.async", [*places, size, size, len(slots), *slots])

    def _scope(self) -> int:
        """How far a fence or an atomic access reaches: the block, the cluster or the grid."""
        assert self.now is not None
        parts = self.now.opcode.split(".")
        return 0 if "cta" in parts else 1 if "cluster" in parts else 2

    def _matrices(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.partition(".")[0]
        values, where = operands if kind == "ldmatrix" else operands[::-1]
        if ".m8n8." not in name or not name.endswith(".b16"):
            raise self._unknown()
        slots = [self._slot(v, 4) for v in flat(values)]
        self._emit(kind, [len(slots), int(".trans" in name), *slots, *self._address(where)])

    def _atomic(self, name: str, operands: Sequence[Operand]) -> None:
        kind, *parts = name.replace(".noftz", "").split(".")
        if parts[0] == "async":
            *operands, told = operands
            kind, barrier = "red.async", self._address(told)
        else:
            barrier = []
        shared = "shared" in parts or _CLUSTER in parts
        space = 1 if shared else 0 if "global" in parts else 2
        both, order = "acq_rel" in parts, self._order()
        acquires, releases = (both or order == [name] for name in ("acquire", "release"))
        space += 4 * acquires + 8 * releases + 16 * self._scope()
        vectors = [part for part in parts if part in _VECTORS]
        parts = [part for part in parts if part not in _VECTORS]
        count = int(vectors[0][1:]) if vectors else 1
        if parts[-1] not in TYPES or parts[-2] not in OPERATIONS:
            raise self._unknown()
        if parts[-1] in ("f32", "f64") and parts[-2] != "add":
            raise self._unknown()
        operation, number = OPERATIONS.index(parts[-2]), TYPES.index(parts[-1])
        result, where, *rest = operands if kind == "atom" else (Register("_"), *operands)
        size = width_of(parts[-1]) if "x2" not in parts[-1] else 4
        given, second, *_ = [*rest, Register("_")]
        first = [self._slot(x, size) for x in (flat(given) if vectors else [given])]
        results = [self._slot(x, size) for x in (flat(result) if vectors else [result])]
        if kind == "red":
            results *= count
        if len(first) != count or len(results) != count or (vectors and space & 3 == 1):
            raise self._unknown()
        header = [space, operation, number, self._slot(second, size)]
        self._emit(kind, [*header, *self._address(where), count, *first, *results, *barrier])

    # --- matrices -----------------------------------------------------------------------------

    def _wmma(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode wmma; a fragment lies in its registers as fragments.cpp has it."""
        parts = name.split(".")
        shape = next((found for found in map(_SHAPE.fullmatch, parts) if found), None)
        if shape is None:
            raise self._unknown()
        m, n, k = (int(size) for size in shape.groups())
        if parts[1] == "mma":
            self._product(name, operands)
            return
        stores = parts[1] == "store"
        where, what, *stride = operands if stores else (operands[1], operands[0], *operands[2:])
        part, element = "abc".index(parts[2].replace("d", "c")), ELEMENTS.index(parts[-1])
        rows, columns = ((m, k), (k, n), (m, n))[part]
        row_major = "row" in parts
        space = 1 if "shared" in parts else 0 if "global" in parts else 2
        default = Immediate(columns if row_major else rows)
        by = self._slot(stride[0] if stride else default, 4)
        slots = [self._slot(one, 8 if parts[-1] == "f64" else 4) for one in flat(what)]
        header = [part, element, rows, columns, int(row_major), space]
        listed = [*self._address(where), by, len(slots), *slots]
        self._emit(f"wmma.{parts[1]}", [*header, *listed])

    def _multiply(self, name: str, operands: Sequence[Operand]) -> None:
        """Encode mma.sync: matrix.cpp has the usual types and shapes, fragments.cpp all others."""
        if _RARE_MMA.search(name) and not name.startswith("mma.sp"):
            self._product(name, operands)
        else:
            self._plain(name, operands)

    def _product(self, name: str, operands: Sequence[Operand]) -> None:
        parts = name.split(".")
        shape = next(found for found in map(_SHAPE.fullmatch, parts) if found)
        types = [part for part in parts if part in ELEMENTS]
        if len(types) == 2:  # wmma of f16 names D and C only
            types = [types[0], "f16", "f16", types[1]]
        listed = [flat(operand) for operand in operands]
        if len(types) != 4 or len(listed) != 4:
            raise self._unknown()
        combining = 1 if "xor" in parts else 2 if "and" in parts else 0
        header = [*(int(size) for size in shape.groups()), *map(ELEMENTS.index, types)]
        header += [int("satfinite" in parts), combining, *map(len, listed)]
        size = 8 if types[0] == "f64" else 4
        self._emit("product", [*header, *(self._slot(x, size) for some in listed for x in some)])

    # --- functions ----------------------------------------------------------------------------

    def _call(self, name: str, operands: Sequence[Operand]) -> None:
        target, results, parameters = operands
        given = [item.name for item in flat(parameters) + flat(results) if isinstance(item, Symbol)]
        if isinstance(target, Symbol) and target.name in BUILT_IN:
            places = [self._address(Address(Symbol(name))) for name in given]
            self._emit(target.name, [*chain.from_iterable(places), *_SPARE[:16]])
            return
        variables = [self.linked.variables[name] for name in given]
        offsets, size = packed(variables)
        copies = [
            [*self._address(Address(Symbol(variable.name))), at, variable.size]
            for variable, at in zip(variables, offsets, strict=True)
        ]
        callable = list(self.linked.functions.values())
        if isinstance(target, Symbol):
            callable = [self.linked.functions[target.name]]
            if size != callable[0].arguments:
                raise bad(self.line, f"the function {target.name} takes other parameters")
        count = len(flat(parameters))
        self._copy_frame("frame.give", copies[:count])
        where = self._slot(target, 8) if isinstance(target, Register) else -1
        start = len(self.made.operands) + 5
        listed = [number for one in callable for number in (one.number, 0, one.arguments)]
        header = [self._register(FRAME), where, self.frame, size, len(callable)]
        self._emit("", [*header, *listed], CALL)
        for n, one in enumerate(callable):
            self.jumps.append((start + 3 * n + 1, one.label, self.line))
        self._copy_frame("frame.take", copies[count:])

    def _copy_frame(self, name: str, copies: list[list[int]]) -> None:
        """Copy variables to the beginning of the next frame, or back."""
        for *place, at, size in copies:
            next_frame = [self._register(FRAME), 8, self.frame + at]
            self._emit(name, [*place, *next_frame, size])

    def _enter(self, name: str, operands: Sequence[Operand]) -> None:
        function = self._function(operands)
        self.frame = function.frame
        sizes = [function.parameters, function.frame, self.stack_end]
        header = [self._register(FRAME), *sizes]
        self._emit("enter", [*header, *self._saved(function)])

    def _leave(self, name: str, operands: Sequence[Operand]) -> None:
        self._emit("", [self._register(FRAME), *self._saved(self._function(operands))], LEAVE)

    def _function(self, operands: Sequence[Operand]) -> Function:
        (name,) = operands
        assert isinstance(name, Symbol)
        return self.linked.functions[name.name]

    def _saved(self, function: Function) -> list[int]:
        """Slots and bytes of the registers that a function saves, behind their number."""
        names = function.registers if function.recursive else ()
        both = [(self._register(name), self._bytes_of(name)) for name in names]
        return [len(both), *chain.from_iterable(both)]

    # --- copies -------------------------------------------------------------------------------

    def _copy(self, name: str, operands: Sequence[Operand]) -> None:
        if name.startswith("cp.async.bulk"):
            self._bulk(name, operands)
        elif name.startswith("cp.reduce.async.bulk.global.shared.bulk_group."):
            to, source, size, *_ = operands
            parts = name.replace(".noftz", "").split(".")
            if parts[-1] not in TYPES or parts[-2] not in OPERATIONS:
                raise self._unknown()
            how = [OPERATIONS.index(parts[-2]), TYPES.index(parts[-1])]
            what = [*self._address(source), 0, *self._run(to, size)]
            self._emit("cp.async.bulk.reduce", [*how, *what])
        elif name in ("cp.async.commit_group", "cp.async.wait_all"):
            self._emit(name, [])
        elif name == "cp.async.wait_group":
            self._emit(name, [self._number(operands[0])])
        elif name == "cp.async.shared.global":
            to, source, size, *rest = operands
            taken = self._taken(rest[0], size) if rest else -1
            places = [*self._address(to), *self._address(source)]
            self._emit("cp.async", [*places, self._number(size), taken])
        elif name.startswith("cp.async.mbarrier.arrive"):
            counted = int(".noinc" in name)
            self._emit("cp.async.mbarrier.arrive", [*self._address(operands[0]), counted])
        else:
            raise self._unknown()

    def _taken(self, given: Operand, size: Operand) -> int:
        """The bytes of the source that cp.async copies: a number, or all unless a predicate."""
        kind = self.entry.registers.get(given.name) if isinstance(given, Register) else None
        if kind != "pred":
            return self._slot(given, 4)
        slot = self._room(("taken", given), bytes(4 * LANES))
        sizes = [self._constant(0, 4), self._slot(size, 4)]
        self._emit("selp.b32", [slot, *sizes, self._slot(given, 0)])
        return slot

    def _bulk(self, name: str, operands: Sequence[Operand]) -> None:
        tensor = int(".tensor." in name)
        if ".im2col" in name or ".tile::" in name:
            raise self._unknown()
        if name == "cp.async.bulk.commit_group":
            self._emit(name, [])
        elif name.startswith("cp.async.bulk.wait_group"):
            self._emit("cp.async.bulk.wait_group", [self._number(operands[0])])
        elif ".mbarrier::complete_tx::bytes" in name and ".global." in name:
            to, source, *rest = operands
            barrier = rest[0] if tensor else rest[1]
            what = self._box(source) if tensor else self._run(source, rest[0])
            places = [*self._address(to), *self._address(barrier)]
            mask = -1
            if ".multicast::cluster" in name:
                mask = self._slot(rest[1 if tensor else 2], 2)
            self._emit("cp.async.bulk.load", [*places, mask, tensor, *what])
        elif name.startswith("cp.async.bulk.shared::cluster.shared.mbarrier::complete_tx"):
            to, source, size, barrier = operands
            places = [*self._address(to), *self._address(barrier), *self._address(source)]
            self._emit("cp.async.bulk.copy", [*places, self._slot(size, 4)])
        elif ".bulk_group" in name and name.find(".global") < name.find(".shared"):
            to, source, *rest = operands
            what = self._box(to) if tensor else self._run(to, rest[0])
            self._emit("cp.async.bulk.store", [*self._address(source), tensor, *what])
        else:
            raise self._unknown()

    def _box(self, operand: Operand) -> list[int]:
        if not isinstance(operand, Address) or operand.coordinates is None:
            raise bad(self.line, "a tensor with its coordinates is expected here")
        at = [self._slot(c, 4) for c in flat(operand.coordinates)]
        return [*self._address(operand), len(at), *at]

    def _run(self, operand: Operand, size: Operand) -> list[int]:
        return [*self._address(operand), self._slot(size, 4)]

    # --- barriers -----------------------------------------------------------------------------

    def _barrier(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.split(".")[1]
        if kind == "cluster":
            relaxed = int(self._order() == ["relaxed"])
            self._emit("", [relaxed], CLUSTER_ARRIVE if ".arrive" in name else CLUSTER_WAIT)
        elif kind == "warp":
            self._emit("bar.warp", [self._slot(operands[0], 4)])
        elif kind in ("sync", "arrive"):
            numbers = self._barrier_numbers(operands)
            self._emit("", [*numbers, 0, 0, 0], SYNC if kind == "sync" else ARRIVE)
        elif kind == "red":
            result, *numbered, given = operands
            which = name.split(".")[2]
            numbers = self._barrier_numbers(numbered)
            reduced = [1 + REDUCTIONS.index(which), self._slot(result, 4 if which == "popc" else 0)]
            self._emit("", [*numbers, *reduced, self._slot(given, 0)], SYNC)
        else:
            raise self._unknown()

    def _barrier_numbers(self, operands: Sequence[Operand]) -> list[int]:
        """The number of a barrier and its count, 0 for all: constants, or complements of slots."""
        found = [o.value if isinstance(o, Immediate) else ~self._slot(o, 4) for o in operands]
        return [*found, 0][:2]

    def _mbarrier(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.split(".")[1]
        if kind == "init":
            self._emit("mbarrier.init", [*self._address(operands[0]), self._slot(operands[1], 4)])
        elif kind == "inval":
            self._emit("mbarrier.inval", self._address(operands[0]))
        elif kind == "expect_tx":
            sizes = [-1, -1, self._slot(operands[1], 4), 0]
            self._emit("mbarrier.arrive", [*self._address(operands[0]), *sizes])
        elif kind == "complete_tx":
            place, size = self._address(operands[0]), self._slot(operands[1], 4)
            self._emit("mbarrier.complete_tx", [*place, size])
        elif kind in ("arrive", "arrive_drop"):
            token, where, *rest = operands
            given = self._slot(rest[0], 4) if rest else -1
            how = 1 if kind == "arrive" else 2
            sizes = [-1, given, how] if ".expect_tx" in name else [given, -1, how]
            self._emit("mbarrier.arrive", [*self._address(where), self._slot(token, 8), *sizes])
        elif kind in ("try_wait", "test_wait"):
            parity = ".parity" in name
            done, where, phase = operands[:3]
            asked = [self._slot(phase, 4 if parity else 8), int(not parity)]
            self._emit("", [self._slot(done, 0), *self._address(where), *asked], MBARRIER)
        else:
            raise self._unknown()

    # --- wgmma --------------------------------------------------------------------------------

    def _wgmma(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.split(".")[1]
        if kind == "wait_group":
            self._emit("", [self._number(operands[0])], PRODUCTS)
        elif kind != "mma_async":
            self._emit(f"wgmma.{kind}", [])
        elif len(operands) < 4 or ".sp" in name:
            raise self._unknown()
        else:
            d, a, b, accumulate, *rest = operands
            # Integers have no signs, and what is not of two bytes has one major only.
            numbers = ([self._number(o) for o in rest] or [1, 1]) + [0, 0]
            registers = isinstance(a, Vector)
            turned = [0, numbers[2]] if registers else numbers[2:4]
            header = [int(registers), *turned, *numbers[:2], self._slot(accumulate, 0)]
            slots = [[self._slot(x, 4) for x in flat(d)], [self._slot(x, 8) for x in flat(a)]]
            last = self._slot(b, 8)
            self._emit(name, [*header, len(slots[0]), *slots[0], *slots[1], last])
            self.made.operands += _SPARE

    def _unknown(self) -> Exception:
        assert self.now is not None
        return bad(self.line, f"the machine does not know {self.now.opcode}")


_SPECIAL = {
    **dict.fromkeys(("ld", "st"), _Encoder._access),
    "ldu": _Encoder._access,
    "mma": _Encoder._multiply,
    "wmma": _Encoder._wmma,
    "createpolicy": _Encoder._policy,
    **dict.fromkeys(("ldmatrix", "stmatrix"), _Encoder._matrices),
    **dict.fromkeys(("bar", "barrier"), _Encoder._barrier),
    **dict.fromkeys(("atom", "red"), _Encoder._atomic),
    "cp": _Encoder._copy,
    **dict.fromkeys(("add", "addc", "sub", "subc", "mad", "madc"), _Encoder._carry),
    **dict.fromkeys((f"v{op}{n}" for op in _VIDEOS for n in ("", "2", "4")), _Encoder._video),
    "brx": _Encoder._brx,
    "call": _Encoder._call,
    "enter": _Encoder._enter,
    "leave": _Encoder._leave,
    "cvt": _Encoder._convert,
    "mbarrier": _Encoder._mbarrier,
    "wgmma": _Encoder._wgmma,
}
