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
    Space,
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
    tiles = _tiles(body)
    frame = (s for s in statements(body) if is_store(s) or isinstance(s, Grid | For | If))
    live = {name for stmt in frame for name in _exact(stmt, tiles)[0]}
    before = -1
    while len(live) > before:
        before = len(live)
        for stmt in statements(body):
            touched, written = _exact(stmt, tiles)
            if isinstance(stmt, Let | Compute | Copy | Reshape) and written & live:
                live |= touched
    free = (Grid, Param, Comment)
    kept = _filtered(
        body, lambda s: isinstance(s, free) or is_store(s) or bool(_exact(s, tiles)[1] & live)
    )
    gemms = [s for s in statements(kept) if isinstance(s, Compute) and s.operation == "gemm"]
    taken = {a.id for gemm in gemms for a in gemm.args if isinstance(a, Name)}
    return _filtered(kept, lambda s: not isinstance(s, Reshape) or (s.target or s.name).id in taken)


def _tiles(body: tuple[Statement, ...]) -> set[tuple[str, Space]]:
    """The tiles of a kernel, by name and space."""
    found: set[tuple[str, Space]] = set()
    for stmt in statements(body):
        if isinstance(stmt, Allocate):
            found.add((base_name(stmt.name), stmt.space))
        elif isinstance(stmt, Copy):
            found.add((base_name(stmt.name), stmt.source))
            found.add((base_name(stmt.target or stmt.name), stmt.dest))
    return found


def _exact(stmt: Statement, tiles: set[tuple[str, Space]]) -> tuple[set[str], set[str]]:
    """As `names`, with the space after the name of a tile."""

    def spelt(name: Name, space: str | None = None) -> str:
        base, told = split(name.id)
        own = [s for s in ("register", "shared", "global") if (base, s) in tiles]
        space = space or told or (own[0] if own else None)
        return f"{base}@{space}" if space else base

    match stmt:
        case Copy(name, shape, coords):
            parts = (*(shape or ()), *(coords or ()), *stmt.index)
            read = [e for part in parts for e in expressions(part)]
            touched = {spelt(e) for e in read if isinstance(e, Name)}
            written = {spelt(stmt.target or name, stmt.dest)}
            return touched | written | {spelt(name, stmt.source)}, written
        case Allocate(name, space):
            return {spelt(name, space)}, {spelt(name, space)}
    touched = {spelt(e) for e in expressions(stmt) if isinstance(e, Name)}
    bases = names(stmt)[1]
    return touched, {name for name in touched if name.split("@")[0] in bases}


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
