"""Checks that a kernel.cu that a model wrote keeps the contract: its struct, its entry, its
constants. What only the compiler knows is checked afterwards, in the PTX (translation.py).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Span
from flashwright.untrusted.tokens import Token, Unreadable, read

ENTRY, STRUCT = "attention", "Params"
THREADS, SHARED = "Threads", "SharedBytes"
OPEN = (THREADS, SHARED, "Warps")
"""The constants whose values the file chooses."""
SIGNATURE = f'extern "C" __global__ void {ENTRY}(__grid_constant__ {STRUCT} const p)'
_LONGEST = 200  # characters of a constant's value
_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_SUFFIX = re.compile(r"(?<=[0-9a-fA-F])[uUlL]+$")


def broken(text: str, span: Span | None = None, hint: str | None = None) -> Failed:
    """The Failed (FW827) for a file that breaks the contract."""
    return Failed(Diagnostic("FW827", text, span, help=hint))


@dataclass(frozen=True)
class Constant:
    """An integer constant of the file; its value is None if it cannot be evaluated."""

    name: str
    value: int | None
    text: str
    span: Span


@dataclass(frozen=True)
class _Field:
    text: str
    span: Span


class ContractCheck:
    """A file and the contract's header, to compare them."""

    def __init__(self, header: str, source: str) -> None:
        self.header = read(header)
        try:
            self.source = read(source)
        except Unreadable as error:
            raise broken(f"{error.what} in the code", error.span) from None
        self.code = [t for t in self.source.tokens if t.kind != "directive"]
        self.given = [t for t in self.header.tokens if t.kind != "directive"]
        self.constants = _constants(self.code)
        self.fixed = {c.name: c.value for c in _constants(self.given) if c.name not in OPEN}

    def check(self) -> None:
        """Raise Failed (FW827) if the struct, the entry or a size differs."""
        self._names()
        self._struct()
        self._entry()
        for found in self.constants:
            wanted = self.fixed.get(found.name)
            if wanted is not None and found.value != wanted:
                text = f"{found.name} is {wanted} in the given header and `{found.text[:80]}` here"
                raise broken(text, found.span, "the launch and the tensor maps go by it")

    def constant(self, name: str) -> tuple[int, Span]:
        """A constant of the file and its span. Raises Failed if it is missing or unreadable."""
        like = f"write `constexpr int {name} = ...;` once, with numbers, + - * and parentheses"
        found = [c for c in self.constants if c.name == name]
        if len(found) != 1:
            text = f"the file has {'more than one' if found else 'no'} constant `{name}`"
            raise broken(text, found[-1].span if found else None, like)
        (one,) = found
        if one.value is None:
            raise broken(f"`{name}` cannot be read: {one.text[:80]}", one.span, like)
        return one.value, one.span

    def _names(self) -> None:
        """Fail for a macro with a name of the contract, which would change its meaning."""
        fixed = {ENTRY, STRUCT, *self.fixed, *(c.name for c in self.constants)}
        for token in self.source.tokens:
            match = re.match(r"(?:define|undef)\s+(\w+)", token.text)
            if token.kind == "directive" and match and match[1] in fixed:
                raise broken(f"`{match[1]}` is given, and no macro", token.span)

    def _struct(self) -> None:
        wanted, found = _fields(self.given), _fields(self.code)
        like = "leave the struct as it is given: the caller fills it in"
        if found is None:
            count = sum(t.text == STRUCT and b.text == "struct" for b, t in pairwise(self.code))
            text = f"there is {'more than one' if count > 1 else 'no'} `struct {STRUCT}`"
            raise broken(f"{text} with fields in the file", hint=like)
        assert wanted is not None
        for n in range(max(len(wanted), len(found))):
            there = found[n] if n < len(found) else None
            given = wanted[n].text if n < len(wanted) else None
            if there is None or given is None or there.text != given:
                span = there.span if there else found[-1].span if found else None
                text = f"field {n + 1} of {STRUCT} is `{there.text if there else 'missing'}`"
                text += (
                    f", where the contract has `{given}`" if given else ", which is one too many"
                )
                raise broken(text, span, like)

    def _entry(self) -> None:
        for n, token in enumerate(self.code):
            if token.text != ENTRY or token.kind != "name" or self._at(n + 1) != "(":
                continue
            end = next((m for m in range(n, len(self.code)) if self._at(m) == ")"), None)
            before = self._before(n)
            if end is None or "__global__" not in before:
                continue
            taken = sorted(t.text for t in self.code[n + 2 : end])
            known = {"__grid_constant__", STRUCT, "const"}
            if len(taken) != 4 or not known <= {*taken}:
                raise broken(f"`{ENTRY}` does not take what it is given", token.span, SIGNATURE)
            if "extern" not in before:
                raise broken(f'`{ENTRY}` is not `extern "C"`', token.span, SIGNATURE)
            if self._at(end + 1) == "{":
                return
        raise broken(f"there is no kernel `{ENTRY}` in the file", hint=SIGNATURE)

    def _at(self, n: int) -> str:
        return self.code[n].text if n < len(self.code) else ""

    def _before(self, n: int) -> set[str]:
        """The words before a name, back to where its declaration begins."""
        found: set[str] = set()
        for m in range(n - 1, -1, -1):
            if self._at(m) == "{" and self._at(m - 1) == '"C"':  # a block of extern "C"
                return found | {"extern"}
            if self._at(m) in (";", "{", "}"):
                break
            found.add(self._at(m))
        return found


# --- the struct -------------------------------------------------------------------------------


def _fields(tokens: Sequence[Token]) -> list[_Field] | None:
    """Type and name of each field, in order; None where there is no such struct, or two."""
    starts = [
        n + 3
        for n, (a, b) in enumerate(pairwise(tokens))
        if (a.text, b.text) == ("struct", STRUCT)
        and n + 2 < len(tokens)
        and tokens[n + 2].text == "{"
    ]
    if len(starts) != 1:
        return None
    fields: list[_Field] = []
    part: list[Token] = []
    for token in tokens[starts[0] :]:
        if token.text == "}":
            return fields if not part else [*fields, *_declared(part)]
        if token.text == ";":
            fields += _declared(part)
            part = []
        else:
            part.append(token)
    return None


def _declared(tokens: Sequence[Token]) -> list[_Field]:
    """`int a, b` as two fields of one type."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "<") - (token.text == ">")
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    if not tokens:
        return []
    if not parts[0] or any(len(part) != 1 for part in parts[1:]):
        return [_Field(_spaced(tokens), tokens[0].span)]  # like nothing that is given
    kind, names = parts[0][:-1], [parts[0][-1], *(part[0] for part in parts[1:])]
    return [_Field(_spaced([*kind, name]), name.span) for name in names]


def _spaced(tokens: Sequence[Token]) -> str:
    """`fw :: Global < fw :: bf16 , 4 > Q` as one writes it."""
    text = " ".join(token.text for token in tokens)
    return re.sub(r" ?(::|<|>|,) ?", lambda m: {">": "> ", ",": ", "}.get(m[1], m[1]), text)


# --- constants --------------------------------------------------------------------------------


def _constants(tokens: Sequence[Token]) -> list[Constant]:
    """Every `constexpr int NAME = value;`, in order: each may be made of those before it."""
    found: list[Constant] = []
    known: dict[str, int] = {}
    for n in range(len(tokens) - 4):
        head = [t.text for t in tokens[n : n + 4]]
        if head[0] != "constexpr" or head[1] != "int" or head[3] != "=":
            continue
        words: list[str] = []
        for token in tokens[n + 4 : n + 4 + _LONGEST]:
            if token.text == ";":
                break
            words.append(token.text)
        value = _value(words, known)
        found.append(Constant(head[2], value, " ".join(words), tokens[n + 2].span))
        if value is not None:
            known[head[2]] = value
    return found


def _value(words: Sequence[str], known: Mapping[str, int]) -> int | None:
    """A sum or product of numbers and constants; None where it is none."""
    text = " ".join(_SUFFIX.sub("", word).replace("'", "") for word in words)
    try:
        return _evaluated(ast.parse(text[:_LONGEST], mode="eval").body, known)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr, known: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            found = value
        case ast.Name(name) if name in known:
            found = known[name]
        case ast.BinOp(left, sign, right) if type(sign) in _SIGNS:
            found = _SIGNS[type(sign)](_evaluated(left, known), _evaluated(right, known))
        case _:
            raise ValueError("no number")
    if abs(found) >= 1 << 31:
        raise ValueError("no int")
    return found
