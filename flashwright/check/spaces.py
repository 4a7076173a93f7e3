"""Spaces: the Copies that the hardware supports, and the memory spaces of operands."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.check.names import Names
from flashwright.check.operations import is_elementwise
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.nodes import (
    SPACES,
    Compute,
    Copy,
    Name,
    Transpose,
    Tree,
    expressions,
    statements,
    value_names,
)
from flashwright.program.program import tile_of
from flashwright.program.vocabulary import split

ANYWHERE = frozenset((a, b) for a in SPACES for b in SPACES if a != b)


def check_copies(tree: Tree, gpu: Gpu | None) -> Iterator[Diagnostic]:
    """Findings about Copies for which the GPU (any GPU, if none is given) has no instruction."""
    possible = gpu.copies if gpu else ANYWHERE
    for stmt in statements(tree.body):
        if isinstance(stmt, Copy) and (stmt.source, stmt.dest) not in possible:
            who = gpu.title if gpu else "a GPU"
            text = f"{who} cannot copy from {stmt.source} to {stmt.dest}"
            hint = None
            if (stmt.source, stmt.dest) == ("shared", "global"):
                hint = "only TMA (Hopper) stores from shared memory; go through registers"
            elif stmt.source == stmt.dest:
                hint = "a Copy moves data between two different spaces"
            yield Diagnostic("FW401", text, stmt.span, help=hint)


def check_operands(names: Names) -> Iterator[Diagnostic]:
    """Findings about operands of Compute statements, and of additions by index, that are in the
    wrong space."""
    for stmt in statements(names.tree.body):
        if isinstance(stmt, Copy) and stmt.index:
            yield from _by_index(stmt, names)
        if not isinstance(stmt, Compute):
            continue
        if stmt.operation == "gemm" and len(stmt.args) == 2:
            yield from _gemm(stmt, names)
        else:
            yield from _elementwise(stmt, names)


def _gemm(stmt: Compute, names: Names) -> Iterator[Diagnostic]:
    left, right = stmt.args
    if isinstance(right, (Name, Transpose)) and _space(right, names) == "register":
        text = "the second operand of a GEMM is read from shared memory"
        yield Diagnostic("FW402", text, right.span, help="Copy it from register to shared first")
    if isinstance(left, Transpose) and _space(left, names) == "register":
        text = "a register tile cannot be transposed on its way into a GEMM"
        yield Diagnostic("FW402", text, left.span)
    if stmt.target is not None and _space(stmt.target, names) == "shared":
        text = "a GEMM accumulates in registers"
        yield Diagnostic("FW402", text, stmt.target.span, help="Allocate the result in register")


def _elementwise(stmt: Compute, names: Names) -> Iterator[Diagnostic]:
    verb = stmt.verb.id if stmt.verb and not is_elementwise(stmt) else "Compute"
    for expr in expressions(stmt):
        if not isinstance(expr, Name) or expr.id in names.scalars or expr is stmt.verb:
            continue
        if _space(expr, names) == "shared":
            yield in_registers(verb, expr)


def _by_index(stmt: Copy, names: Names) -> Iterator[Diagnostic]:
    verb = "An addition by index"
    if stmt.source == "shared":
        yield in_registers(verb, stmt.name)
    for name in (n for arg in stmt.index for n in value_names(arg)):
        if name.id not in names.scalars and _space(name, names) == "shared":
            yield in_registers(verb, name)


def in_registers(verb: str, name: Name) -> Diagnostic:
    """FW402 for an elementwise operand in shared memory."""
    text = f"{verb} works on registers; `{name.id}` is in shared memory"
    hint = f"`Copy {split(name.id)[0]} from shared to register` first"
    return Diagnostic("FW402", text, name.span, help=hint)


def _space(operand: Name | Transpose, names: Names) -> str | None:
    name = operand.operand if isinstance(operand, Transpose) else operand
    key = tile_of(name, names.buffers)
    return key[1] if key else None
