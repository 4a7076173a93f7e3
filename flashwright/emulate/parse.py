"""Parses PTX text. Unknown syntax is an error with its line."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashwright.emulate.ptx import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    SourceLine,
    Symbol,
    Variable,
    Vector,
)
from flashwright.lang.diagnostic import Diagnostic, Failed

_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16, "pred": 1}
_ALIGNMENTS = tuple(1 << n for n in range(11))
_TOKEN = re.compile(
    r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*|\d+U?"
    r"|%?[A-Za-z_$][\w$]*(?:\.(?:[xyzw]|b[0-7]+|h[0-3]+)\b)?|[\[\]{}(),+|!<>=*-]|\S"
)
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"(?P<how>(?:\.(?:visible|extern|weak|const|global|shared|local|param)\s+)+)"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$%]+)"
    r"(?P<size>(?:\[\d*\])*)\s*(?:=\s*(?P<data>.*))?$",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?P<whole>-?0[xX][0-9a-fA-F]+|-?\d+)U?|0[fF](?P<float>[0-9a-fA-F]{8})"
    r"|0[dD](?P<double>[0-9a-fA-F]{16})"
)
_INITIAL = re.compile(r"(?:generic\(([\w$]+)\)|([A-Za-z_$][\w$]*))\s*(\+\d+)?")
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?", re.DOTALL
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?(.*)", re.DOTALL)
_FUNCTION = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)*\.func\s*(?:\(([^()]*)\))?\s*([\w$]+)\s*"
    r"(?:\(([^()]*)\))?(.*)",
    re.DOTALL,
)
_CALL = re.compile(
    r"\s*(?:\(([^()]*)\)\s*,)?\s*(%?[\w$]+)\s*(?:,\s*\(([^()]*)\))?\s*(?:,\s*[\w$]+)?\s*"
)
_DIRECTIVE = re.compile(r"\.([a-z]+)\s*(\d+(?:\s*,\s*\d+)*)?")
_IGNORED = (".version", ".address_size", ".pragma", ".file", ".callprototype", ".calltargets")
TARGETS = ".branchtargets"
"""The labels of brx, which stand among the instructions."""
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_WITHOUT_LABELS = re.compile(r"^\s*(?:[\w$]+\s*:(?!:)\s*)*")
_DEPTH = 32  # of calls inlined into each other
MOST_REGISTERS = 1 << 18  # that a kernel declares; the largest we know have 30,000
MOST_VARIABLE = 1 << 28  # bytes
UNREADABLE = (ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""The errors that malformed text can cause in the parser."""


def parse(text: str) -> Module:
    """The parsed module. Raises Failed with FW831 at a line that it cannot read."""
    return _Parser(text).module()


def bad(line: int, text: str) -> Failed:
    """The Failed (FW831) for a line of PTX that cannot be read or executed."""
    return Failed(Diagnostic("FW831", f"PTX line {line}: {text}"))


@dataclass
class _Scope:
    """A block in braces inside a kernel, with its own names."""

    number: int
    start: int
    """The index of its first instruction."""
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class _Body:
    """A kernel or a device function while it is parsed."""

    name: str
    parameters: tuple[Variable, ...]
    directives: dict[str, tuple[int, ...]]
    results: tuple[Variable, ...] | None = None
    """None for a kernel."""
    failure: Failed | None = None
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    scopes: list[_Scope] = field(default_factory=list)

    def leave(self) -> None:
        """Close the innermost scope and resolve the jumps inside it to its labels."""
        scope = self.scopes.pop()
        own = {label: f"{label}@{scope.number}" for label in scope.labels}
        self.labels |= {own[label]: at for label, at in scope.labels.items()}
        for n in range(scope.start, len(self.code)) if own else ():
            one = self.code[n]
            if not one.opcode.startswith(("bra", "brx", TARGETS)):
                continue
            operands = (
                Symbol(own.get(to.name, to.name)) if isinstance(to, Symbol) else to
                for to in one.operands
            )
            self.code[n] = replace(one, operands=tuple(operands))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _without_comments(text)
        # They stand at the end, behind all that speaks of them.
        self.files = {int(number): name for number, name in _FILE.findall(self.text)}
        self.target = ""
        self.variables: list[Variable] = []
        self.entries: dict[str, Entry] = {}
        self.functions: dict[str, Entry] = {}
        self.body: _Body | None = None
        self.source_lines: tuple[SourceLine, ...] = ()
        self.inlined: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.fresh = 0
        self.section = False
        """Whether the parser is inside a debug section, which is not executed."""

    def module(self) -> Module:
        for line, statement, end in _statements(self.text):
            try:
                self._statement(line, statement, end)
            except UNREADABLE:
                self._fail(line, bad(line, f"cannot read `{statement.strip()[:60]}`"), end)
            except Failed as failed:
                self._fail(line, failed, end)
        return Module(self.target, self.entries, tuple(self.variables), self.functions)

    def _fail(self, line: int, failed: Failed, end: str) -> None:
        """A function that is not called may have lines that cannot be read."""
        if self.body is None or self.body.results is None:
            raise failed
        self.body.failure = self.body.failure or failed
        if end == "}":
            self._close(line)

    # --- statements ---------------------------------------------------------------------------

    def _statement(self, line: int, text: str, end: str) -> None:
        if self.section:
            self.section = end != "}"
            return
        body = self.body
        while body is not None and (label := _LABEL.match(text)):
            labels = body.scopes[-1].labels if body.scopes else body.labels
            labels[label[1]] = len(body.code)
            line += text[: label.end()].count("\n")
            text = text[label.end() :]
        line += len(text[: len(text) - len(text.lstrip())].split("\n")) - 1
        text = text.strip()
        if end == "{":
            self._open(line, text)
        elif text:
            self._plain(line, text)
        if end == "}":
            self._close(line)

    def _open(self, line: int, text: str) -> None:
        if self.body is not None:
            self.fresh += 1
            self.body.scopes.append(_Scope(self.fresh, len(self.body.code)))
            return
        if text.startswith(".section"):
            self.section = True
            return
        entry, function = _ENTRY.match(text), _FUNCTION.match(text)
        if entry is not None:
            parameters = self._parameters(line, entry[2])
            self.body = _Body(entry[1], parameters, _directives(entry[3]))
        elif function is not None:
            results, parameters = (self._parameters(line, function[n]) for n in (1, 3))
            self.body = _Body(function[2], parameters, {}, results)
        else:
            raise bad(line, f"only kernels can be executed, not `{text.split('(')[0][:60]}`")

    def _parameters(self, line: int, text: str | None) -> tuple[Variable, ...]:
        parts = [part.strip() for part in (text or "").split(",")]
        return tuple(self._variable(line, part) for part in parts if part)

    def _close(self, line: int) -> None:
        body = self.body
        if body is None:
            raise bad(line, "`}` without a matching `{`")
        if body.scopes:
            body.leave()
            return
        made = self.entries if body.results is None else self.functions
        made[body.name] = Entry(
            body.name,
            body.parameters,
            body.registers,
            tuple(body.variables),
            tuple(body.code),
            body.labels,
            body.directives,
            body.results or (),
            body.failure,
        )
        self.body, self.source_lines = None, ()

    def _plain(self, line: int, text: str) -> None:
        if text.startswith(".reg"):
            self._registers(line, text)
        elif re.match(r"\.loc\s", text):
            self._loc(text)
        elif text.startswith(".target"):
            self.target = text.split()[1].rstrip(",")
        elif text.startswith(_IGNORED) or _FUNCTION.match(text):  # or a declaration
            return
        elif text.startswith(TARGETS) and self.body is not None:
            labels = _Operands(line, text[len(TARGETS) :], self._register, self._symbol).all()
            self.body.code.append(Instruction(TARGETS, labels, None, line))
        elif text.startswith("."):
            self._declare(self._variable(line, text))
        elif self.body is None:
            raise bad(line, f"`{text[:60]}` stands outside of any kernel")
        else:
            self.body.code.append(self._instruction(line, text))

    def _declare(self, variable: Variable) -> None:
        body = self.body
        if body is None:
            self.variables.append(variable)
            return
        if variable.space == "param":  # of a call
            variable = replace(variable, space="local")
        if body.scopes:
            own = f"{variable.name}@{body.scopes[-1].number}"
            body.scopes[-1].variables[variable.name] = own
            variable = replace(variable, name=own)
        body.variables.append(variable)

    def _loc(self, text: str) -> None:
        found = _LOC.match(text)
        if found is None:
            return
        at = (int(found[1]), int(found[2]), int(found[3]))
        if found[4]:
            self.inlined[at] = (int(found[4]), int(found[5]), int(found[6]))
        source_lines: list[SourceLine] = []
        here: tuple[int, int, int] | None = at
        while here is not None and len(source_lines) < _DEPTH:
            source_lines.append(SourceLine(self.files.get(here[0], ""), here[1]))
            here = self.inlined.get(here) if here != at or found[4] else None
        self.source_lines = tuple(source_lines)

    def _registers(self, line: int, text: str) -> None:
        found, body = _REGISTERS.match(text), self.body
        if found is None or body is None:
            raise bad(line, f"cannot read `{text[:60]}`")
        for name in found[2].split(","):
            name = name.strip()
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            if many and int(many[2]) + len(body.registers) > MOST_REGISTERS:
                raise bad(line, f"more than {MOST_REGISTERS} registers")
            if many:
                body.registers.update({f"{many[1]}{n}": found[1] for n in range(int(many[2]))})
            elif body.scopes:
                own = f"{name}@{body.scopes[-1].number}"
                body.scopes[-1].registers[name] = own
                body.registers[own] = found[1]
            else:
                body.registers[name] = found[1]

    def _variable(self, line: int, text: str) -> Variable:
        found = _VARIABLE.match(text)
        if found is None:
            raise bad(line, f"cannot read `{text[:60]}`")
        kind = re.sub(r"^[usf]", "b", found["type"])
        if kind not in _SIZES:
            raise bad(line, f"there is no type .{found['type']}")
        size = _SIZES[kind]
        unsized = False
        for number in re.findall(r"\[(\d*)\]", found["size"]):
            unsized |= not number
            size *= int(number or 0)
        if size > MOST_VARIABLE:
            raise bad(line, f"a variable of {size} bytes is too large")
        space = next(
            s
            for s in (*found["how"].replace(".", "").split()[::-1], "global")
            if s in ("const", "global", "shared", "local", "param")
        )
        if space != "shared" and ".extern" in found["how"]:
            raise bad(line, f"the variable {found['name']} is defined in another file")
        data, addresses = self._data(line, found["data"] or "", _SIZES[kind])
        align, real = int(found["align"] or _SIZES[kind]), found["type"].startswith("f")
        if align not in _ALIGNMENTS or len(data) > max(size, 1):
            raise bad(line, f"cannot read `{text[:60]}`")
        return Variable(found["name"], space, align, size, data, addresses, real)

    def _data(
        self, line: int, text: str, size: int
    ) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
        """The bytes of an initialiser, and the addresses in it."""
        data, addresses = b"", []
        for part in re.sub(r"[{}]", " ", text).split(",") if text.strip() else ():
            number, address = _NUMBER.fullmatch(part.strip()), _INITIAL.fullmatch(part.strip())
            if number:
                word = number["float"] or number["double"]
                value = int(word, 16) if word else int(number["whole"], 0)
                data += (value % (1 << 8 * size)).to_bytes(size, "little")
            elif address and size == _SIZES["b64"]:
                addresses.append((len(data), address[1] or address[2], int(address[3] or 0)))
                data += bytes(size)
            else:
                raise bad(line, f"cannot read the initialiser `{part.strip()[:60]}`")
        return data, tuple(addresses)

    # --- instructions -------------------------------------------------------------------------

    def _instruction(self, line: int, text: str) -> Instruction:
        guard = None
        if text.startswith("@"):
            guarded, _, text = text[1:].partition(" ")
            guard = self._register(guarded.lstrip("!").strip(), guarded.startswith("!"))
            text = text.strip()
        found = re.match(r"[a-z][\w.:]*", text)
        if found is None:
            raise bad(line, f"cannot read `{text[:60]}`")
        opcode, rest = found[0], text[found.end() :]
        if opcode.partition(".")[0] == "call":
            return Instruction(opcode, self._call(line, rest), guard, line, self.source_lines)
        operands = _Operands(line, rest, self._register, self._symbol).all()
        if opcode.startswith(("ld.param", "st.param")) and self._is_of_call(operands):
            opcode = opcode.replace(".param", ".local")
        return Instruction(opcode, operands, guard, line, self.source_lines)

    def _call(self, line: int, text: str) -> tuple[Operand, ...]:
        """The function, its results and its parameters."""
        found = _CALL.fullmatch(text)
        if found is None:
            raise bad(line, f"cannot read `call {text.strip()[:60]}`")
        target = Register(found[2]) if found[2].startswith("%") else Symbol(found[2])
        given = [[part.strip() for part in (found[n] or "").split(",")] for n in (1, 3)]
        results, parameters = (
            Vector(tuple(Symbol(self._symbol(name)) for name in names if name)) for names in given
        )
        return target, results, parameters

    def _is_of_call(self, operands: Sequence[Operand]) -> bool:
        """Whether an access is to a variable of a call, not to a parameter of the kernel."""
        bases = [one.base for one in operands if isinstance(one, Address)]
        names = {one.name for one in (self.body.variables if self.body else ())}
        return any(isinstance(base, Symbol) and base.name in names for base in bases)

    def _symbol(self, name: str) -> str:
        for scope in reversed(self.body.scopes if self.body else []):
            if name in scope.variables:
                return scope.variables[name]
        return name

    def _register(self, name: str, negated: bool = False) -> Register:
        body = self.body
        for scope in reversed(body.scopes if body else []):
            if name in scope.registers:
                return Register(scope.registers[name], negated)
        return Register(name, negated)


class _Operands:
    """The operands of one instruction."""

    def __init__(
        self,
        line: int,
        text: str,
        register: Callable[..., Register],
        symbol: Callable[[str], str],
    ) -> None:
        self.line, self.text = line, text
        self.register, self.symbol = register, symbol
        self.tokens = _TOKEN.findall(text)
        self.at = 0

    def all(self) -> tuple[Operand, ...]:
        found: list[Operand] = []
        while self.at < len(self.tokens):
            found.append(self._operand())
            if self.at < len(self.tokens):
                self._take(",")
        return tuple(found)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise bad(self.line, f"expected `{wanted}` in `{self.text.strip()[:60]}`")
        self.at += 1

    def _operand(self) -> Operand:
        one = self._single()
        if self._peek() == "|":
            self._take("|")
            return Pair(one, self._single())
        return one

    def _single(self) -> Operand:
        token = self._peek()
        if token == "{":
            return self._vector()
        if token == "[":
            return self._address()
        self.at += 1
        if token == "!":
            name = self._peek()
            self.at += 1
            return self.register(name, True)
        if token == "-":
            inner = self._single()
            if isinstance(inner, Immediate):
                return Immediate(-inner.value, inner.bits)
            raise bad(self.line, f"cannot read `{self.text.strip()[:60]}`")
        return self._word(token)

    def _word(self, token: str) -> Operand:
        if token[:2] in ("0f", "0F") and len(token) == 10:
            return Immediate(int(token[2:], 16), 32)
        if token[:2] in ("0d", "0D") and len(token) == 18:
            return Immediate(int(token[2:], 16), 64)
        if token == "WARP_SZ":
            return Immediate(32)
        if "." in token and token[:1].isdigit():
            return Immediate(int.from_bytes(struct.pack("<d", float(token)), "little"), 64)
        if token[:1].isdigit():
            return Immediate(int(token.rstrip("U"), 0))
        if token[:1] == "%" or token == "_":
            return self.register(token)
        if re.fullmatch(r"[A-Za-z_$][\w$]*", token):
            found = self.register(token)
            return found if found.name != token else Symbol(self.symbol(token))
        raise bad(self.line, f"cannot read `{token}` in `{self.text.strip()[:60]}`")

    def _vector(self) -> Vector:
        self._take("{")
        items = [self._single()]
        while self._peek() == ",":
            self._take(",")
            items.append(self._single())
        self._take("}")
        return Vector(tuple(items))

    def _address(self) -> Address:
        self._take("[")
        base = self._single()
        if not isinstance(base, Register | Symbol | Immediate):
            raise bad(self.line, f"no address in `{self.text.strip()[:60]}`")
        offset, coordinates = 0, None
        while self._peek() in ("+", "-"):
            sign = -1 if self._peek() == "-" else 1
            self.at += 1
            by = self._single()
            if not isinstance(by, Immediate):
                raise bad(self.line, f"no offset in `{self.text.strip()[:60]}`")
            offset += sign * by.value
        if self._peek() == ",":
            self._take(",")
            coordinates = self._vector()
        self._take("]")
        return Address(base, offset, coordinates)


def _directives(text: str) -> dict[str, tuple[int, ...]]:
    """The directives between a kernel's parameters and its body, with their numbers."""
    return {
        name: tuple(int(n) for n in re.findall(r"\d+", numbers))
        for name, numbers in _DIRECTIVE.findall(text)
    }


def _without_comments(text: str) -> str:
    """The text with comments replaced by blanks, so that line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.DOTALL)


def _statements(text: str) -> Iterator[tuple[int, str, str]]:
    """Statements with their line and what ends them: `;`, `{`, `}`, or for directives the line."""
    line, start, inside = 1, 0, 0
    depth = 0
    at = 0
    while at < len(text):
        sign = text[at]
        if sign == "\n" and not depth and _is_directive(text[start:at]):
            yield line, text[start:at], "\n"
            line += text.count("\n", start, at + 1)
            start = at + 1
        elif sign == "(" or sign == "[":
            depth += 1
        elif sign == ")" or sign == "]":
            depth -= 1
        elif sign == ";" and not inside:
            yield line, text[start:at], ";"
            line += text.count("\n", start, at + 1)
            start = at + 1
        elif sign in "{}" and not depth:
            if sign == "{" and _is_operand(text[start:at]):
                inside += 1
            elif sign == "}" and inside:
                inside -= 1
            else:
                yield line, text[start:at], sign
                line += text.count("\n", start, at + 1)
                start = at + 1
        at += 1


def _is_directive(text: str) -> bool:
    first = _WITHOUT_LABELS.sub("", text).split(None, 1)[:1]
    return bool(first) and first[0] in (".version", ".target", ".address_size", ".file", ".loc")


def _is_operand(text: str) -> bool:
    """Whether a brace behind this opens a list of operands, and no block or initialiser's end."""
    words = _WITHOUT_LABELS.sub("", text).strip()
    return bool(words) and not words.startswith(
        (".entry", ".visible", ".func", ".weak", ".section")
    )


def names(operands: Sequence[Operand]) -> Iterator[str]:
    """All registers in some operands."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from names(operand.items)
        elif isinstance(operand, Pair):
            yield from names((operand.first, operand.second))
        elif isinstance(operand, Address):
            yield from names(
                (operand.base, *(operand.coordinates.items if operand.coordinates else ()))
            )
