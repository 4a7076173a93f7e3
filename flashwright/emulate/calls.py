"""Device functions: a kernel and all functions that it may call become one list of instructions.

A function has one set of registers; one that may call itself saves them when it is entered. Its
parameters, results and local variables lie in its frame, on a stack in each thread's local memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashwright.emulate.parse import bad
from flashwright.emulate.ptx import (
    Address,
    Entry,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)
from flashwright.emulate.support import refusal

BUILT_IN = ("vprintf", "__assertfail", "malloc", "free")
"""Functions that the emulator has itself: machine/builtin.cpp."""
FRAME = "%frame"
"""The register with the address of the frame in local memory."""
_ALIGN = 16  # of a frame, at least
_RECURSION = 1 << 16  # bytes of stack for functions that call themselves


@dataclass(frozen=True)
class Function:
    """A device function in the code of a kernel."""

    number: int
    """Its number among the functions of the module."""
    label: str
    parameters: int
    """The bytes of its parameters, with which its frame begins."""
    arguments: int
    """The same with its results."""
    frame: int
    recursive: bool
    """Whether it may call itself: then it saves its registers when it is entered."""
    registers: tuple[str, ...]


@dataclass(frozen=True)
class Linked:
    """A kernel with its functions. `call`, `enter` and `leave` are instructions in it."""

    entry: Entry
    functions: Mapping[str, Function]
    variables: Mapping[str, Variable]
    """The local variables, those of functions too."""
    stack: Mapping[str, int]
    """The offset of each variable of a function in the function's frame."""

    align: int
    """Of a frame."""

    @property
    def stack_bytes(self) -> int:
        """Bytes of local memory that the functions may need."""
        frames = [function.frame for function in self.functions.values()]
        cycles = any(function.recursive for function in self.functions.values())
        return sum(frames) + (_RECURSION if cycles else 0)


def link(module: Module, entry: Entry) -> Linked:
    """The kernel with all functions that it may call. Raises Failed with FW831 for a call that
    cannot be executed."""
    linker = _Linker(module, entry)
    called = _called(module, entry)
    cycles = _recursive(called, module)
    aligns = [v.align for body in called.values() for v in body.variables]
    linker.align = max([_ALIGN, *aligns])
    for body in called.values():
        linker.add(body, body.name in cycles)
    return linker.linked()


class _Linker:
    def __init__(self, module: Module, entry: Entry) -> None:
        self.entry, self.numbers = entry, {name: n for n, name in enumerate(module.functions)}
        self.align = _ALIGN
        self.functions: dict[str, Function] = {}
        self.stack: dict[str, int] = {}
        self.variables = {variable.name: variable for variable in entry.variables}
        self.registers, self.labels = dict(entry.registers), dict(entry.labels)
        self.code = list(entry.code)

    def add(self, body: Entry, recursive: bool) -> None:
        renamed = _Renamed(body)
        registers = {renamed.name(name): kind for name, kind in body.registers.items()}
        self.registers |= registers
        parameters, results, own = (
            [replace(variable, name=renamed.name(variable.name)) for variable in part]
            for part in (body.parameters, body.results, body.variables)
        )
        arguments = packed([*parameters, *results])[1]
        on_stack = [*parameters, *results, *(v for v in own if v.space == "local")]
        offsets, frame = packed(on_stack)
        self.variables |= {v.name: v for v in (*on_stack, *own)}
        self.stack |= {v.name: at for v, at in zip(on_stack, offsets, strict=True)}
        self.functions[body.name] = Function(
            self.numbers[body.name],
            renamed.name(""),
            packed(parameters)[1],
            arguments,
            aligned(frame, self.align),
            recursive,
            tuple(registers),
        )
        self._add_code(body, renamed)

    def _add_code(self, body: Entry, renamed: _Renamed) -> None:
        code = self.code
        last = code[-1].line if code else 1
        # Nothing runs from one body into the next.
        code.append(Instruction("exit", (), None, last))
        first = body.code[0] if body.code else code[-1]
        enter = replace(first, opcode="enter", operands=(Symbol(body.name),), guard=None)
        self.labels[renamed.name("")] = len(code)
        code.append(enter)
        self.labels |= {renamed.name(label): len(code) + at for label, at in body.labels.items()}
        code += [renamed.instruction(instruction) for instruction in body.code]
        code.append(replace(enter, opcode="leave", line=code[-1].line))

    def linked(self) -> Linked:
        placed = tuple(v for name, v in self.variables.items() if name not in self.stack)
        entry = replace(
            self.entry,
            registers=self.registers,
            labels=self.labels,
            code=tuple(self.code),
            variables=placed,
        )
        return Linked(entry, self.functions, self.variables, self.stack, self.align)


def packed(variables: Sequence[Variable], start: int = 0) -> tuple[list[int], int]:
    """The offset of each variable from `start` on, and their end."""
    offsets, end = [], start
    for variable in variables:
        offsets.append(aligned(end, variable.align))
        end = offsets[-1] + variable.size
    return offsets, end


def aligned(size: int, align: int) -> int:
    """The size, or the next larger one that is a multiple of `align`."""
    return -(-size // align) * align


def is_call(one: Instruction) -> bool:
    """Whether it calls a function."""
    return one.opcode.partition(".")[0] == "call"


def _called(module: Module, entry: Entry) -> dict[str, Entry]:
    """The functions that the kernel may call, by name."""
    found: dict[str, Entry] = {}
    waiting = list(_named(entry, module))
    taken = dict.fromkeys(sorted(_taken(module)), 1) if _by_address(entry) else {}
    waiting += taken.items()
    while waiting:
        name, line = waiting.pop()
        if name in found or name in BUILT_IN:
            continue
        body = module.functions.get(name)
        if body is None:
            raise bad(line, refusal(name) or f"the function {name} is not in this file")
        if body.failure is not None:
            raise body.failure
        found[name] = body
        waiting += _named(body, module)
        if not taken and _by_address(body):
            taken = dict.fromkeys(sorted(_taken(module)), line)
            waiting += taken.items()
    return found


def _by_address(body: Entry) -> bool:
    return any(is_call(one) and isinstance(one.operands[0], Register) for one in body.code)


def _taken(module: Module) -> set[str]:
    """The functions whose addresses stand in variables or are taken by code."""
    found = {name for v in module.variables for _, name, _ in v.addresses}
    for body in (*module.entries.values(), *module.functions.values()):
        found |= {name for one in body.code if not is_call(one) for name in _symbols(one.operands)}
    return found & set(module.functions)


def _named(body: Entry, module: Module) -> Iterator[tuple[str, int]]:
    """The functions that a body calls or takes the addresses of, with the line."""
    for one in body.code:
        operands = one.operands[:1] if is_call(one) else one.operands
        for name in _symbols(operands):
            if is_call(one) or name in module.functions:
                yield name, one.line


def _symbols(operands: Sequence[Operand]) -> Iterator[str]:
    for one in operands:
        if isinstance(one, Symbol):
            yield one.name
        elif isinstance(one, Vector):
            yield from _symbols(one.items)


def _recursive(called: Mapping[str, Entry], module: Module) -> set[str]:
    """The functions that may call themselves."""
    taken = _taken(module)
    after = {
        name: {n for n, _ in _named(body, module)} | (taken if _by_address(body) else set())
        for name, body in called.items()
    }
    while True:
        grown = {
            name: some.union(*(after.get(n, ()) for n in some)) for name, some in after.items()
        }
        if grown == after:
            return {name for name, some in after.items() if name in some}
        after = grown


class _Renamed:
    """A function's body with names of its own."""

    def __init__(self, body: Entry) -> None:
        self.body = body
        variables = (*body.variables, *body.parameters, *body.results)
        self.own = {*body.registers, *body.labels, *(variable.name for variable in variables)}

    def name(self, name: str) -> str:
        return f"{name}@{self.body.name}"

    def instruction(self, one: Instruction) -> Instruction:
        guard = self._operand(one.guard) if one.guard else None
        assert guard is None or isinstance(guard, Register)
        operands = tuple(self._operand(operand) for operand in one.operands)
        opcode = one.opcode
        if opcode.startswith(("ld.param", "st.param", "cvta.param", "cvta.to.param")):
            opcode = opcode.replace(".param", ".local")
        elif opcode.partition(".")[0] == "ret":
            opcode, operands = "leave", (Symbol(self.body.name),)
        return replace(one, opcode=opcode, operands=operands, guard=guard)

    def _operand(self, one: Operand) -> Operand:
        if isinstance(one, Register | Symbol):
            return replace(one, name=self.name(one.name)) if one.name in self.own else one
        if isinstance(one, Vector):
            return Vector(tuple(self._operand(item) for item in one.items))
        if isinstance(one, Pair):
            return Pair(self._operand(one.first), self._operand(one.second))
        if isinstance(one, Address):
            base, at = self._operand(one.base), one.coordinates
            assert isinstance(base, Register | Symbol) or base == one.base
            coordinates = self._operand(at) if at is not None else None
            assert coordinates is None or isinstance(coordinates, Vector)
            return replace(one, base=base, coordinates=coordinates)
        return one
