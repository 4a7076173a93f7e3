"""PTX as data: what a module declares, and its instructions with the lines they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashwright.lang.diagnostic import Failed


@dataclass(frozen=True)
class Register:
    """A virtual register, or a special one such as %tid.x; `negated` for a predicate's `!`."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A constant: a whole number, or the bits of a floating-point one."""

    value: int
    bits: int = 0
    """32 or 64 where it was written as a floating-point number, else 0."""


@dataclass(frozen=True)
class Symbol:
    """A variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Several operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; a tensor's also has coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Vector | None = None


@dataclass(frozen=True)
class Pair:
    """`d|p`: a result and its predicate."""

    first: Operand
    second: Operand


Operand = Register | Immediate | Symbol | Vector | Address | Pair


@dataclass(frozen=True)
class SourceLine:
    """A line of the source that PTX was compiled from."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """One instruction with its lines in PTX and source."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    """The predicate under which it is executed."""
    line: int
    """The line of the PTX."""
    source_lines: tuple[SourceLine, ...] = ()
    """Lines of the source: the innermost first, then the calls that it was inlined into."""


@dataclass(frozen=True)
class Variable:
    """A variable in shared or constant memory, or a parameter."""

    name: str
    space: str
    align: int
    size: int
    """Bytes; 0 for shared memory that the launch sizes."""
    data: bytes = b""
    addresses: tuple[tuple[int, str, int], ...] = ()
    """Where the data has addresses: the offset, the variable, and what is added to its address."""
    real: bool = False
    """Whether it is a floating-point number."""


@dataclass(frozen=True)
class Entry:
    """A kernel or a device function: its parameters, registers, labels and instructions."""

    name: str
    parameters: tuple[Variable, ...]
    registers: Mapping[str, str]
    """The type of each register."""
    variables: tuple[Variable, ...]
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]
    """The index of the instruction behind each label."""
    directives: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What it demands of a launch, such as maxntid: the numbers behind each directive."""
    results: tuple[Variable, ...] = ()
    """Of a device function."""
    failure: Failed | None = None
    """Why a device function cannot be read."""


@dataclass(frozen=True)
class Module:
    """A file of PTX."""

    target: str
    entries: Mapping[str, Entry]
    variables: tuple[Variable, ...] = ()
    """Outside of any kernel."""
    functions: Mapping[str, Entry] = field(default_factory=dict)
    """The device functions that are not inlined."""
