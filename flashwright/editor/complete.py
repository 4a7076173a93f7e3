"""Completion: the words and names that may stand at a place of a text.

The grammar decides: the parser reads the statement up to the place and is asked what it accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashwright.check.names import Names
from flashwright.check.shapes import show
from flashwright.editor.analysis import Known
from flashwright.editor.names import kernels_at, scalars
from flashwright.editor.places import in_comment
from flashwright.lang.build import Machine, Tok, tokens
from flashwright.lang.format import format_stmt
from flashwright.lang.parse import retype
from flashwright.lang.recover import CLAUSES, FORMS, STATEMENTS, WORDS
from flashwright.program.vocabulary import (
    ARITHMETIC,
    DTYPES,
    FUNCTIONS,
    POSITIONS,
    PREDEFINED_DIMS,
    STATEMENT_VERBS,
    VERBS,
    split,
)

Kind = Literal["keyword", "verb", "function", "tile", "tensor", "number", "type", "axis"]
EXPRESSION = {"AND": "and", "OR": "or", "NOT": "not", "NEW": "new"}
LAYOUT_WORDS = ("MMA_C", "MMA_A", "MMA_M", "MMA_N", "MMA_N_new")
NEW_NAME = ("PARAM", "DIM", "LET", "GRID", "FOR")
"""Statements whose first name is a new one."""


@dataclass(frozen=True)
class Completion:
    """A word that may stand at a place, what it is, and a line about it."""

    label: str
    kind: Kind
    detail: str = ""


def complete(known: Known | None, text: str, offset: int) -> list[Completion]:
    """The words that may stand at a place, in place of the one that ends there."""
    if in_comment(text, offset):
        return []
    match = re.search(r"[A-Za-z_]\w*\Z", text[:offset])
    start = match.start() if match else offset
    before = [t for t in tokens(text[:start]) if t.type != "COMMENT"]
    heads = [n for n, tok in enumerate(before) if tok.type in STATEMENTS]
    begun = before[heads[-1] :] if heads else []
    fresh = not text[text.rfind("\n", 0, start) + 1 : start].strip()
    machine = _machine(begun)
    found: list[Completion] = []
    if fresh and (machine is None or machine.between_statements()):
        found += [Completion(w, "keyword", FORMS.get(k, "")) for k, w in STATEMENTS.items()]
    if machine is not None and begun:
        found += _clauses(machine)
        if machine.accepts("NAME") or machine.accepts("NUMBER"):
            line = text.count("\n", 0, start) + 1
            kernels = kernels_at(known, known.lines(text).get(line)) if known is not None else []
            found += _names(begun, kernels)
    return list({item.label: item for item in found}.values())


def _machine(begun: list[Tok]) -> Machine | None:
    """The parser behind the words of a statement; None if they are no part of one."""
    machine = Machine()
    if begun and begun[0].type in ("END", "ELSE"):
        return None
    for n, tok in enumerate(begun):
        last = n == len(begun) - 1
        retype(tok, None if last else begun[n + 1], machine)
        if last and tok.type == "NAME" and tok.text.lower() in VERBS and machine.accepts("VERB"):
            tok.type = "VERB"
        if not machine.accepts(tok.type):
            return None
        machine.feed(tok)
    return machine


def _clauses(machine: Machine) -> Iterator[Completion]:
    for kind, word in (WORDS | CLAUSES | EXPRESSION).items():
        if machine.accepts(kind):
            yield Completion(word, "keyword")


def _names(begun: list[Tok], kernels: list[Names]) -> Iterator[Completion]:
    """The names that fit behind the words of a statement."""
    head, last = begun[0].type, begun[-1].type
    kinds = [tok.type for tok in begun]
    if last == "AS":
        yield from (Completion(n, "type", f"{size} bytes") for n, size in DTYPES.items())
    elif head == "RESHAPE" and "FROM" in kinds:
        yield from (Completion(word, "keyword") for word in LAYOUT_WORDS)
    elif "COORDINATE" in kinds and last in ("LSQB", "COMMA") and kinds.count("LSQB") == 1:
        yield from _axes(split(begun[1].text)[0], kernels)
    elif head in NEW_NAME and (
        len(begun) == 1 or head == "DIM" or (head == "GRID" and last == "COMMA")
    ):
        return
    elif head in ("ALLOCATE", "COPY", "RESHAPE") and len(begun) == 1:
        yield from _tensors(kernels)
        yield from _tiles(kernels)
    elif last in CLAUSES:
        yield from _tiles(kernels)
        yield from _tensors(kernels)
    else:
        if head == "COMPUTE" and len(begun) == 1:
            yield from (Completion(spelt(v), "verb") for v in (*STATEMENT_VERBS, *ARITHMETIC))
        yield from _values(kernels, head)


def spelt(verb: str) -> str:
    """A verb as programs write it."""
    return "GEMM" if verb == "gemm" else verb.capitalize()


def _values(kernels: list[Names], head: str) -> Iterator[Completion]:
    if head in ("COMPUTE", "RESHAPE"):
        yield from _tiles(kernels)
    for kernel in kernels:
        for name, stmt in scalars(kernel).items():
            yield Completion(name, "number", format_stmt(stmt))
    yield from (Completion(n, "number", "known when the kernel is called") for n in PREDEFINED_DIMS)
    yield from (Completion(name, "number", "a position") for name in POSITIONS if head == "COMPUTE")
    yield from (Completion(name, "function") for name in FUNCTIONS)


def _tiles(kernels: list[Names]) -> Iterator[Completion]:
    """The tiles of the kernels. Where a name is in both spaces, the plain one means registers."""
    for kernel in kernels:
        for (name, space), buffer in kernel.buffers.items():
            hidden = space == "shared" and (name, "register") in kernel.buffers
            label = f"{name}_shared" if hidden else name
            yield Completion(label, "tile", f"{show(buffer)} in {space}, {buffer.dtype}")


def _tensors(kernels: list[Names]) -> Iterator[Completion]:
    for kernel in kernels:
        for tensor in kernel.tensors.values():
            yield Completion(tensor.name, "tensor", format_stmt(tensor.declared))


def _axes(name: str, kernels: list[Names]) -> Iterator[Completion]:
    for kernel in kernels:
        if name in kernel.tensors:
            for axis in kernel.tensors[name].axes:
                yield Completion(axis.label, "axis", f"an axis of {name}")
