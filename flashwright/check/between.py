"""Checks between the kernels of a program: who writes a tensor, and who reads it when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.nodes import (
    Copy,
    Index,
    Span,
    Tree,
    expressions,
    statements,
)
from flashwright.program.kernels import Declaration, Kernels, declared
from flashwright.program.program import Program
from flashwright.program.vocabulary import RESERVED_PARAMS


def check_between(programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """Findings about tensors that kernels exchange."""
    writers: dict[str, int] = {}
    for number, program in enumerate(programs):
        for tensor in program.outputs:
            name, stores = tensor.name, _stores(program, tensor.name)
            if tensor.read and not tensor.kept:
                text = f"`{name}` is read and written by one kernel"
                hint = "thread blocks do not see each other: write it in an earlier kernel"
                yield Diagnostic("FW612", text, _reads(program, name)[0], help=hint)
            if tensor.added and any(not s.adds for s in stores):
                text = f"`{name}` is stored and accumulated in one kernel"
                hint = "store it in an earlier kernel, or accumulate only"
                where = (Label(next(s.span for s in stores if s.adds), "accumulated here"),)
                plain = next(s.span for s in stores if not s.adds)
                yield Diagnostic("FW610", text, plain, secondary=where, help=hint)
            elif name in writers and not tensor.added:
                first = _stores(programs[writers[name]], name)[0]
                where = (Label(first.span, "an earlier kernel writes it here"),)
                text = f"`{name}` is written by two kernels"
                yield Diagnostic("FW610", text, stores[0].span, secondary=where)
            writers[name] = number
    for number, program in enumerate(programs):
        for tensor in program.inputs:
            if writers.get(tensor.name, -1) > number:
                later = _stores(programs[writers[tensor.name]], tensor.name)[0]
                where = (Label(later.span, "a later kernel writes it here"),)
                text = f"`{tensor.name}` is read before it is written"
                span = _reads(program, tensor.name)[0]
                yield Diagnostic("FW612", text, span, secondary=where)


def check_fragments(programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """FW612 for tensors in fragments that the caller would see."""
    kernels = Kernels(tuple(programs))
    for tensor in (*kernels.inputs, *kernels.outputs):
        if tensor.declared.fragments:
            text = f"`{tensor.name}` is in fragments, but the caller passes it"
            hint = "only tensors that one kernel writes and a later one reads lie in fragments"
            yield Diagnostic("FW612", text, tensor.declared.span, help=hint)


def check_in_place(programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """Findings about tensors in place: one kernel stores to them, and does not read them."""
    kernels = Kernels(tuple(programs))
    written = {t.name for t in kernels.outputs}
    for tensor in (t for p in programs for t in p.tensors.values() if t.declared.in_place):
        if tensor.name not in written:
            text = f"`{tensor.name}` is in place, and no Copy stores to it"
            hint = "leave `in place` out"
            yield Diagnostic("FW205", text, tensor.declared.span, help=hint)
    for program in programs:
        for tensor in (t for t in program.outputs if t.kept):
            adds = [s.span for s in _stores(program, tensor.name) if s.adds]
            if adds:
                text = f"`{tensor.name}` is in place: it is stored to, not added to"
                yield Diagnostic("FW205", text, adds[0], help="leave `in place` out")
            elif tensor.read:
                text = f"`{tensor.name}` is read and written by one kernel"
                hint = "thread blocks do not see each other: read it in another kernel"
                yield Diagnostic("FW612", text, _reads(program, tensor.name)[0], help=hint)


def check_turns(programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """FW613 for turns that no counters can be kept for: the launcher of several kernels has them,
    and those of a tensor count the additions of one kernel."""
    seen: dict[str, Copy] = {}
    for program in programs:
        for name in program.counters:
            stmt = next(s for s in _stores(program, name) if s.turn is not None)
            if len(programs) == 1:
                text = "`at turn` needs a program of several kernels"
                hint = "leave it out, or let a second kernel read the sums"
                yield Diagnostic("FW613", text, stmt.span, help=hint)
            elif name in seen:
                text = f"two kernels accumulate `{name}` at turns"
                where = (Label(seen[name].span, "the first one does so here"),)
                hint = "let each kernel accumulate a tensor of its own"
                yield Diagnostic("FW613", text, stmt.span, secondary=where, help=hint)
            seen.setdefault(name, stmt)


def check_shared(tree: Tree, kernels: Sequence[Tree]) -> Iterator[Diagnostic]:
    """FW203 for declarations above the first grid that no kernel uses."""
    every = (stmt for kernel in kernels for stmt in kernel.body if isinstance(stmt, Declaration))
    kept = set(RESERVED_PARAMS).union(*map(declared, every))
    for stmt in tree.body:
        if isinstance(stmt, Declaration):
            for name in sorted(declared(stmt) - kept):
                yield Diagnostic("FW203", f"`{name}` is not used by any kernel", stmt.span)


def _stores(program: Program, name: str) -> list[Copy]:
    copies = [s for s in statements(program.tree.body) if isinstance(s, Copy)]
    return [c for c in copies if program.dest(c) == (name, "global")]


def _reads(program: Program, name: str) -> list[Span]:
    found = []
    for stmt in statements(program.tree.body):
        if isinstance(stmt, Copy) and program.source(stmt) == (name, "global"):
            found.append(stmt.span)
        found += [e.span for e in expressions(stmt) if isinstance(e, Index) and e.tensor.id == name]
    return found
