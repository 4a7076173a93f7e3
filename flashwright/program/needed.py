"""Statements as text shows them: the names that each reads and writes, and those that some stores
need. Tiles of one name in several spaces count as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from flashwright.lang.nodes import (
    Allocate,
    Comment,
    Compute,
    Copy,
    For,
    Grid,
    If,
    Let,
    Name,
    Param,
    Reshape,
    Statement,
    expressions,
    statements,
)
from flashwright.program.vocabulary import split


def names(stmt: Statement) -> tuple[set[str], set[str]]:
    """The names that a statement reads or writes, and those that it writes; of one that is no
    assignment, all count as both."""
    touched = {base_name(e) for e in expressions(stmt) if isinstance(e, Name)}
    match stmt:
        case Copy() | Reshape():
            written = [stmt.target or stmt.name]
        case Compute():
            in_place = [a for a in stmt.args if isinstance(a, Name)] if stmt.target is None else []
            written = [n for n in (stmt.target, *stmt.state, *stmt.rescale, *in_place) if n]
        case Let(name) | Allocate(name):
            written = [name]
        case _:
            return touched, touched
    return touched | {base_name(n) for n in written}, {base_name(n) for n in written}


def base_name(name: Name) -> str:
    """The name of a tile without its space."""
    return split(name.id)[0]


def is_store(stmt: Statement) -> bool:
    """Whether a statement writes to global memory."""
    return isinstance(stmt, Copy) and stmt.dest == "global"


def needed(kernel: Iterable[Statement], stores: Collection[Statement]) -> tuple[Statement, ...]:
    """A kernel with these of its stores alone, and what they need."""
    body = _filtered(kernel, lambda s: not is_store(s) or s in stores)
    frame = (s for s in statements(body) if is_store(s) or isinstance(s, Grid | For | If))
    live = {name for stmt in frame for name in names(stmt)[0]}
    before = -1
    while len(live) > before:
        before = len(live)
        for stmt in statements(body):
            touched, written = names(stmt)
            if isinstance(stmt, Let | Compute | Copy | Reshape) and written & live:
                live |= touched
    free = (Grid, Param, Comment)
    kept = _filtered(body, lambda s: isinstance(s, free) or is_store(s) or bool(names(s)[1] & live))
    gemms = [s for s in statements(kept) if isinstance(s, Compute) and s.operation == "gemm"]
    taken = {a.id for gemm in gemms for a in gemm.args if isinstance(a, Name)}
    return _filtered(kept, lambda s: not isinstance(s, Reshape) or (s.target or s.name).id in taken)


def _filtered(
    body: Iterable[Statement], keep: Callable[[Statement], bool]
) -> tuple[Statement, ...]:
    """The statements to keep, also in loops and branches; a branch without statements goes."""
    made: list[Statement] = []
    for stmt in body:
        match stmt:
            case For():
                made.append(replace(stmt, body=_filtered(stmt.body, keep)))
            case If(_, then, orelse):
                arms = _filtered(then, keep), _filtered(orelse, keep)
                made += [replace(stmt, then=arms[0], orelse=arms[1])] if any(arms) else []
            case _ if keep(stmt):
                made.append(stmt)
    return tuple(made)
