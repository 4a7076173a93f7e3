"""Calls of device functions: their bodies take the place of the calls.

A function has one set of registers and local variables for all its calls, because it does not call
itself. Its parameters are the variables that the call names, in local memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flashwright.emulate.parse import bad
from flashwright.emulate.ptx import (
    Address,
    Entry,
    Instruction,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

BUILT_IN = ("vprintf", "__assertfail")
_MOST_INSTRUCTIONS = 1 << 18


def inline_calls(entry: Entry, functions: Mapping[str, Entry]) -> Entry:
    """The kernel without calls. Raises Failed with FW831 for a call that cannot be executed."""
    if not any(_is_call(one) for one in entry.code):
        return entry
    made = _Inliner(functions)
    made.add(entry, _Call())
    return replace(
        entry,
        registers=made.registers,
        variables=tuple(made.variables.values()),
        code=tuple(made.code),
        labels=made.labels,
    )


def _is_call(one: Instruction) -> bool:
    return one.opcode.partition(".")[0] == "call"


@dataclass(frozen=True)
class _Call:
    """Where a body stands: in the kernel itself, or in place of a call."""

    callers: tuple[str, ...] = ()
    number: int = 0
    given: Mapping[str, str] = field(default_factory=dict)
    """The caller's variable of each parameter and result."""

    @property
    def suffix(self) -> str:
        return f"@{self.callers[-1]}" if self.callers else ""

    @property
    def end(self) -> str:
        """The label behind the body."""
        return f"end@{self.number}"


class _Inliner:
    def __init__(self, functions: Mapping[str, Entry]) -> None:
        self.functions = functions
        self.registers: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.calls = 0

    def add(self, body: Entry, call: _Call) -> None:
        """Add a body to the code."""
        self.registers |= {name + call.suffix: kind for name, kind in body.registers.items()}
        for variable in body.variables:
            name = variable.name + call.suffix
            self.variables[name] = replace(variable, name=name)
        renamed = _Renamed(body, call)
        labels: dict[int, list[str]] = {}
        for label, at in body.labels.items():
            labels.setdefault(at, []).append(label)
        for n, one in enumerate(body.code):
            self.labels |= {renamed.label(name): len(self.code) for name in labels.get(n, ())}
            self._add_one(renamed.instruction(one), call)
        after = labels.get(len(body.code), ())
        self.labels |= {renamed.label(name): len(self.code) for name in after}
        if call.callers:
            self.labels[call.end] = len(self.code)

    def _add_one(self, one: Instruction, call: _Call) -> None:
        if _is_call(one):
            self._call(one, call)
        elif one.opcode.partition(".")[0] == "ret" and call.callers:
            self.code.append(replace(one, opcode="bra", operands=(Symbol(call.end),)))
        else:
            self.code.append(one)
        if len(self.code) > _MOST_INSTRUCTIONS:
            raise bad(one.line, f"more than {_MOST_INSTRUCTIONS} instructions with all calls")

    def _call(self, one: Instruction, call: _Call) -> None:
        target, results, parameters = one.operands
        assert isinstance(results, Vector)
        assert isinstance(parameters, Vector)
        if not isinstance(target, Symbol):
            raise bad(one.line, "a function is called by its address")
        if target.name in BUILT_IN:
            given = (*results.items, *parameters.items)
            self.code.append(replace(one, opcode=target.name, operands=given))
            return
        body = self.functions.get(target.name)
        if body is None:
            raise bad(one.line, f"the function {target.name} is not in this file")
        if body.failure is not None:
            raise body.failure
        if target.name in call.callers:
            raise bad(one.line, f"the function {target.name} calls itself")
        formal = [*body.results, *body.parameters]
        actual = [*results.items, *parameters.items]
        names = [item.name for item in actual if isinstance(item, Symbol)]
        if len(names) != len(formal):
            raise bad(one.line, f"the function {target.name} takes other parameters")
        self.calls += 1
        pairs = zip(formal, names, strict=True)
        made = _Call(
            (*call.callers, target.name), self.calls, {own.name: name for own, name in pairs}
        )
        if one.guard is not None:
            skip = replace(one.guard, negated=not one.guard.negated)
            self.code.append(replace(one, opcode="bra", operands=(Symbol(made.end),), guard=skip))
        self.add(body, made)


class _Renamed:
    """The names of a body at the place of a call."""

    def __init__(self, body: Entry, call: _Call) -> None:
        self.body, self.call = body, call
        own = {variable.name for variable in body.variables}
        self.variables = {**{name: name + call.suffix for name in own}, **call.given}

    def label(self, name: str) -> str:
        return f"{name}@call{self.call.number}" if self.call.callers else name

    def instruction(self, one: Instruction) -> Instruction:
        if not self.call.callers:
            return one
        guard = self._operand(one.guard) if one.guard else None
        assert guard is None or isinstance(guard, Register)
        operands = tuple(self._operand(operand) for operand in one.operands)
        opcode = one.opcode
        if opcode.startswith(("ld.param", "st.param")):
            opcode = opcode.replace(".param", ".local")
        return replace(one, opcode=opcode, operands=operands, guard=guard)

    def _operand(self, one: Operand) -> Operand:
        if isinstance(one, Register):
            known = one.name in self.body.registers
            return replace(one, name=one.name + self.call.suffix) if known else one
        if isinstance(one, Symbol):
            label = one.name in self.body.labels and one.name not in self.variables
            return Symbol(self.label(one.name) if label else self.variables.get(one.name, one.name))
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
