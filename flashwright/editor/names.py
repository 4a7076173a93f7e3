"""What a name at a place means: a tile, a tensor or a number, and where it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.check.names import Names
from flashwright.editor.analysis import Known
from flashwright.lang.nodes import (
    Allocate,
    Copy,
    Dim,
    For,
    Grid,
    Let,
    Param,
    Space,
    Span,
    Statement,
    statements,
)
from flashwright.program.program import Buffer, Tensor
from flashwright.program.vocabulary import split

NEAREST: tuple[Space, ...] = ("register", "shared", "global")
"""The order in which a Compute looks for a tile of a name."""


@dataclass(frozen=True)
class Meant:
    """What a name means in a kernel; `stmt` is the statement on whose line it stands."""

    found: Buffer | Tensor | Statement
    kernel: Names
    stmt: Statement | None

    @property
    def declared(self) -> Span:
        """Where it is declared."""
        if isinstance(self.found, Buffer | Tensor):
            return self.found.declared.span
        return self.found.span


def meant(known: Known, text: str, word: Span) -> list[Meant]:
    """What a word of a text means. A Copy moves a tile from one space to another, so its name means
    both; elsewhere it is the nearest one."""
    name = text[word.start : word.end]
    line = known.lines(text).get(word.line)
    stmt = known.statement(line) if line is not None else None
    for kernel in kernels_at(known, line):
        found: list[Buffer | Tensor | Statement] = [*_tiles(name, kernel, stmt)]
        if not isinstance(stmt, Copy):
            found = found[:1]
        scalar = scalars(kernel).get(name)
        found += [scalar] if scalar is not None and not found else []
        if found:
            return [Meant(one, kernel, stmt) for one in found]
    return []


def kernels_at(known: Known, line: int | None) -> list[Names]:
    """The kernels of a program, the one at a line first."""
    kernels = list(known.kernels)
    here = [k for k in kernels if k.grid is not None and line and k.grid.span.line <= line][-1:]
    return [*here, *(k for k in kernels if k not in here)]


def scalars(kernel: Names) -> dict[str, Statement]:
    """The numbers of a kernel, by name, with the statements that declare them."""
    found: dict[str, Statement] = {}
    for stmt in statements(kernel.tree.body):
        match stmt:
            case Param(name):
                found |= {name.id: stmt, **({stmt.earlier: stmt} if stmt.earlier else {})}
            case Let(name) | For(name):
                found[name.id] = stmt
            case Dim(names):
                found |= {n.id: stmt for n in names}
            case Grid(axes):
                found |= {axis.name.id: stmt for axis in axes}
    return found


def _tiles(name: str, kernel: Names, stmt: Statement | None) -> Iterator[Buffer | Tensor]:
    base, told = split(name)
    spaces: tuple[Space, ...] = (told,) if told else NEAREST
    if isinstance(stmt, Copy):
        ends = ((stmt.dest, stmt.target or stmt.name), (stmt.source, stmt.name))
        spaces = tuple(s for s, end in ends if split(end.id)[0] == base) or spaces
    elif isinstance(stmt, Allocate) and split(stmt.name.id)[0] == base:
        spaces = (stmt.space,)
    for space in spaces:
        if space == "global" and base in kernel.tensors:
            yield kernel.tensors[base]
        elif (base, space) in kernel.buffers:
            yield kernel.buffers[base, space]
