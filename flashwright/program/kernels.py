"""Programs of several kernels: one checked program for each, and what passes between them.

Every `grid` begins a kernel. The statements above the first one belong to all kernels, and a tensor
in global memory to all kernels from its Allocate on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashwright.lang.nodes import (
    Allocate,
    Copy,
    Dim,
    Grid,
    Index,
    Let,
    Name,
    Param,
    Statement,
    Tree,
    expressions,
    statements,
)
from flashwright.program.program import Program, Tensor
from flashwright.program.vocabulary import RESERVED_PARAMS, split

Declaration = Param | Dim | Let | Allocate


def split_kernels(tree: Tree) -> tuple[Tree, ...]:
    """The kernels of a program in order, each with the declarations that it uses."""
    shared, *kernels = sections(tree)
    if len(kernels) < 2:
        return (tree,)
    made = []
    for own in kernels:
        made.append(Tree((*_used(shared, own), *own)))
        tensors = (s for s in own if isinstance(s, Allocate) and s.space == "global")
        shared = (*shared, *tensors)
    return tuple(made)


def sections(tree: Tree) -> list[tuple[Statement, ...]]:
    """The statements above the first grid, and those of each kernel."""
    starts = [n for n, stmt in enumerate(tree.body) if isinstance(stmt, Grid)]
    return [tree.body[a:b] for a, b in itertools.pairwise((0, *starts, len(tree.body)))]


def _used(shared: tuple[Statement, ...], own: tuple[Statement, ...]) -> list[Statement]:
    """The shared statements that a kernel needs: not the declarations that it never names, and not
    the params of TL's own that it sets itself."""
    names = _names(own) | set(RESERVED_PARAMS)
    names -= {s.name.id for s in own if isinstance(s, Param)}
    read, written, _ = touched(own)
    tensors = read | written
    found: list[Statement] = []
    for stmt in reversed(shared):
        in_global = isinstance(stmt, Allocate) and stmt.space == "global"
        if not isinstance(stmt, Declaration) or declared(stmt) & (tensors if in_global else names):
            if isinstance(stmt, Dim):
                stmt = replace(stmt, names=tuple(n for n in stmt.names if n.id in names))
            names |= _names((stmt,))
            found.append(stmt)
    return found[::-1]


def declared(stmt: Declaration) -> set[str]:
    """The names that a declaration defines."""
    return {n.id for n in stmt.names} if isinstance(stmt, Dim) else {split(stmt.name.id)[0]}


def _names(body: tuple[Statement, ...]) -> set[str]:
    found = {e.id for s in statements(body) for e in expressions(s) if isinstance(e, Name)}
    return found | {split(name)[0] for name in found}


def touched(body: tuple[Statement, ...]) -> tuple[set[str], set[str], set[str]]:
    """The tensors in global memory that statements read, those that they write, and those of the
    latter that they add to."""
    read: set[str] = set()
    written: set[str] = set()
    added: set[str] = set()
    for stmt in statements(body):
        if isinstance(stmt, Copy):
            if stmt.source == "global":
                read.add(split(stmt.name.id)[0])
            if stmt.dest == "global":
                written.add(split((stmt.target or stmt.name).id)[0])
                if stmt.adds:
                    added.add(split((stmt.target or stmt.name).id)[0])
        read |= {e.tensor.id for e in expressions(stmt) if isinstance(e, Index)}
    return read, written, added


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program, which run one after another."""

    programs: tuple[Program, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the caller gives: those that no kernel writes, or one in place."""
        written = {t.name for t in self._written if not t.kept}
        return _each(t for p in self.programs for t in p.inputs if t.name not in written)

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """The tensors between the kernels: written by one, read by a later one."""
        return tuple(t for t in self._written if t.name in self._read and not t.kept)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the caller gets: written, and read by no kernel, or changed in place."""
        return tuple(t for t in self._written if t.name not in self._read or t.kept)

    @property
    def _written(self) -> tuple[Tensor, ...]:
        return _each(t for p in self.programs for t in p.outputs)

    @property
    def _read(self) -> set[str]:
        return {t.name for p in self.programs for t in p.inputs if t.read}

    @property
    def zeroed(self) -> tuple[Tensor, ...]:
        """The tensors that a kernel adds to and that no earlier one writes: they begin at 0."""
        written: set[str] = set()
        found: list[Tensor] = []
        for program in self.programs:
            found += [t for t in program.outputs if t.added and t.name not in written]
            written |= {t.name for t in program.outputs}
        return tuple(found)

    @property
    def counters(self) -> tuple[Tensor, ...]:
        """The counters of additions at turns: scratch of one kernel, which begins at 0."""
        return tuple(t for p in self.programs for t in p.counters.values())

    @property
    def dims(self) -> tuple[str, ...]:
        """The run-time sizes of all kernels."""
        return tuple(dict.fromkeys(d for p in self.programs for d in p.dims))

    def owner(self, tensor: Tensor) -> Program:
        """The first kernel that uses a tensor; it has the params of the tensor's sizes."""
        return next(p for p in self.programs if tensor.name in p.tensors)


def _each(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once."""
    return tuple({t.name: t for t in tensors}.values())
