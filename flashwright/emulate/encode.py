"""Encodes a kernel for the machine: operands become slots of the register file, labels numbers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.emulate.calls import inline_calls
from flashwright.emulate.parse import MOST_VARIABLE, UNREADABLE, bad, names
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
from flashwright.emulate.widths import BYTES, flat, narrowed, operand_width, width_of

LANES = 32
MODULE = 1 << 38  # where variables of the module lie in global memory
_PLAIN = re.compile(r"(?:[us]|b?f)(8|16|32|64)")  # what cvt has two operands of
# Parts of an opcode that change nothing here.
_IDLE = re.compile(
    r"\.(?:aligned|uni|volatile|relaxed|acquire|release|gpu|cta|sys|weak|nc|ca|cg|cs|cv|wb|wt|lu"
    r"|L1::\w+|L2::\w+|L2_\w+|level::\w+)(?![\w:])"
)
_NOTHING = ("prefetch", "prefetchu", "setmaxnreg", "griddepcontrol", "nanosleep")
_NO_FENCE = ("fence.proxy", "fence.mbarrier_init")  # which order nothing between threads
_ORDERS = (
    "volatile",
    "relaxed",
    "acquire",
    "release",
)  # of accesses that may tell others something
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
# In the order of atomic.cpp.
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
TYPES = (
    *("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "f16x2", "bf16x2"),
    *("b16", "f16", "bf16"),
)
# Of predicates at a barrier, in the order of run.cpp.
REDUCTIONS = ("popc", "and", "or")
ACQUIRES = "ld.acquire.global"
"""The load by which a thread block waits for others."""
_ADDED_AT_ONCE = {f"red.global.add.v{count}.f32": count for count in (2, 4)}
NORMAL, BRANCH, EXIT, SYNC, ARRIVE, MBARRIER, CLUSTER_ARRIVE, CLUSTER_WAIT, PRODUCTS = range(9)


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


def encode(module: Module, entry: Entry, start: int = MODULE) -> EncodedKernel:
    """The encoded kernel. Raises Failed with FW831 at the first invalid instruction. `start` is the
    address of the module's variables."""
    return _Encoder(module, entry, start).program()


class _Encoder:
    def __init__(self, module: Module, entry: Entry, start: int) -> None:
        self.start = start
        self.entry = entry = inline_calls(entry, module.functions)
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

    def _set_addresses(self) -> None:
        """Write the addresses of variables into the variables that are initialised with them."""
        for placed in self.made.variables.values():
            for at, name, more in placed.variable.addresses:
                if name not in self.made.variables:
                    own = placed.variable.name
                    raise bad(1, f"{own} is initialised with the address of {name}")
                start, value = placed.offset + at, self.addresses[name] + more
                self.made.data[start : start + 8] = value.to_bytes(8, "little")

    def program(self) -> EncodedKernel:
        for instruction in self.entry.code:
            self.starts.append(len(self.made.names))
            self.line, self.now = instruction.line, instruction
            try:
                self._instruction(instruction)
            except (*UNREADABLE, AssertionError):
                raise bad(self.line, f"cannot execute {instruction.opcode}") from None
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
            if operand.name not in self.addresses:
                raise bad(self.line, f"the variable {operand.name} cannot be used here")
            return self._constant(self.addresses[operand.name], size)
        raise bad(self.line, "an operand of this kind is not expected here")

    def _negated(self, operand: Register) -> int:
        """A slot with the negated predicate, for an instruction without `!` operands."""
        slot = self._room(("not", operand.name), bytes(8))
        self._emit("not.pred", [slot, self._register(operand.name)])
        return slot

    def _address(self, operand: Operand) -> list[int]:
        """Slot, bytes of it, offset."""
        if not isinstance(operand, Address):
            raise bad(self.line, "an address is expected here")
        base = operand.base
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
        if first == "bra":
            target = one.operands[0]
            assert isinstance(target, Symbol)
            self._emit("", [0], BRANCH)
            self.jumps.append((len(self.made.operands) - 1, target.name, one.line))
        elif first in ("ret", "exit"):
            self._emit("", [], EXIT)
        elif first in ("trap", "brkpt", "__assertfail"):
            self._emit("trap", [])
        elif name.startswith("fence.proxy.async"):
            self._emit("fence.proxy.async", [])
        elif name.startswith("fence.mbarrier_init"):
            self._emit("fence.mbarrier_init", [])
        elif first == "membar" or (first == "fence" and not name.startswith(_NO_FENCE)):
            self._emit("fence", [])
        elif first in ("fence", *_NOTHING) or name.startswith("cp.async.bulk.prefetch"):
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
        parts = name.split(".")
        space = next((p for p in parts if p in ("param", "global", "shared", "const", "local")), "")
        kind = parts[-1]
        if kind.lstrip("busf") not in BYTES or len(operands) != 2:
            raise self._unknown()
        size = BYTES[kind.lstrip("busf")]
        load = parts[0] == "ld"
        value, where = operands if load else operands[::-1]
        values = flat(value)
        if len(values) * size > _MOST_MOVED:
            raise self._unknown()
        width = size
        for register in values:
            if isinstance(register, Register) and register.name != "_":
                width = self._bytes_of(register.name)
        slots = [self._slot(v, width) for v in values]
        header = [size, width, int(kind[0] == "s"), len(slots)]
        order = self._order() if space in ("", "global", "shared") else []
        spelled = ".".join([parts[0], *order, *([space] if space else [])])
        self._emit(spelled, [*header, *slots, *self._address(where)])

    def _order(self) -> list[str]:
        """The part of the opcode that says how an access is ordered."""
        assert self.now is not None
        parts = self.now.opcode.split(".")
        return [order for order in _ORDERS if order in parts][:1]

    def _matrices(self, name: str, operands: Sequence[Operand]) -> None:
        kind = name.partition(".")[0]
        values, where = operands if kind == "ldmatrix" else operands[::-1]
        if ".m8n8." not in name or not name.endswith(".b16"):
            raise self._unknown()
        slots = [self._slot(v, 4) for v in flat(values)]
        self._emit(kind, [len(slots), int(".trans" in name), *slots, *self._address(where)])

    def _atomic(self, name: str, operands: Sequence[Operand]) -> None:
        kind, *parts = name.replace(".noftz", "").split(".")
        space = 1 if "shared" in parts else 0 if "global" in parts else 2
        both, order = "acq_rel" in parts, self._order()
        acquires, releases = (both or order == [name] for name in ("acquire", "release"))
        space += 4 * acquires + 8 * releases
        count = _ADDED_AT_ONCE.get(name, 1)
        if count > 1:
            parts.pop(-2)
        if parts[-1] not in TYPES or parts[-2] not in OPERATIONS or (".v" in name and count == 1):
            raise self._unknown()
        operation, number = OPERATIONS.index(parts[-2]), TYPES.index(parts[-1])
        result, where, *rest = operands if kind == "atom" else (Register("_"), *operands)
        size = 8 if "64" in parts[-1] else 2 if parts[-1] in TYPES[-3:] else 4
        given, second, *_ = [*rest, Register("_")]
        first = [self._slot(x, size) for x in (flat(given) if count > 1 else [given])]
        if len(first) != count:
            raise self._unknown()
        header = [space, operation, number, self._slot(result, size), self._slot(second, size)]
        self._emit(kind, [*header, *self._address(where), count, *first])

    # --- copies -------------------------------------------------------------------------------

    def _copy(self, name: str, operands: Sequence[Operand]) -> None:
        if name.startswith("cp.async.bulk"):
            self._bulk(name, operands)
        elif name in ("cp.async.commit_group", "cp.async.wait_all"):
            self._emit(name, [])
        elif name == "cp.async.wait_group":
            self._emit(name, [self._number(operands[0])])
        elif name == "cp.async.shared.global":
            to, source, size, *rest = operands
            taken = self._slot(rest[0], 4) if rest else -1
            places = [*self._address(to), *self._address(source)]
            self._emit("cp.async", [*places, self._number(size), taken])
        elif name.startswith("cp.async.mbarrier.arrive"):
            counted = int(".noinc" in name)
            self._emit("cp.async.mbarrier.arrive", [*self._address(operands[0]), counted])
        else:
            raise self._unknown()

    def _bulk(self, name: str, operands: Sequence[Operand]) -> None:
        tensor = int(".tensor." in name)
        if name == "cp.async.bulk.commit_group":
            self._emit(name, [])
        elif name.startswith("cp.async.bulk.wait_group"):
            self._emit("cp.async.bulk.wait_group", [self._number(operands[0])])
        elif ".mbarrier::complete_tx::bytes" in name and ".global." in name:
            to, source, *rest = operands
            barrier = rest[0] if tensor else rest[1]
            what = self._box(source) if tensor else self._run(source, rest[0])
            places = [*self._address(to), *self._address(barrier)]
            self._emit("cp.async.bulk.load", [*places, tensor, *what])
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
            self._emit("", [], CLUSTER_ARRIVE if ".arrive" in name else CLUSTER_WAIT)
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
        elif kind == "arrive" and ".drop" not in name:
            token, where, *rest = operands
            given = self._slot(rest[0], 4) if rest else -1
            sizes = [-1, given, 1] if ".expect_tx" in name else [given, -1, 1]
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
    **dict.fromkeys(("ldmatrix", "stmatrix"), _Encoder._matrices),
    **dict.fromkeys(("bar", "barrier"), _Encoder._barrier),
    **dict.fromkeys(("atom", "red"), _Encoder._atomic),
    "cp": _Encoder._copy,
    "cvt": _Encoder._convert,
    "mbarrier": _Encoder._mbarrier,
    "wgmma": _Encoder._wgmma,
}
