"""Tiles in registers that only pass through: two Copies convert a shared tile of 8-bit elements to
one of 16-bit elements, a few elements at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from flashwright.lang.nodes import Copy, For, If, Statement, statements
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES

ROWS = 16
"""Rows that are converted together."""


def converted_tiles(program: Program) -> frozenset[Key]:
    """The tiles that `Copy K from shared to register`, `Copy K from register to shared and get ...`
    need no registers for: each Copy to one is followed by the Copy from it, and nothing else names
    it."""
    body = program.tree.body
    uses = Counter(k for s in statements(body) for k in program.reads(s) | program.writes(s))
    found = Counter(key for one, two in _neighbours(body) for key in _passed(program, one, two))
    return frozenset(key for key, count in found.items() if uses[key] == 2 * count)


def _neighbours(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, Statement]]:
    """Statements that follow each other."""
    yield from pairwise(body)
    for stmt in body:
        if isinstance(stmt, For):
            yield from _neighbours(stmt.body)
        elif isinstance(stmt, If):
            yield from _neighbours(stmt.then)
            yield from _neighbours(stmt.orelse)


def _passed(program: Program, load: Statement, store: Statement) -> Iterator[Key]:
    """The tile in registers between two Copies that convert."""
    if not (isinstance(load, Copy) and isinstance(store, Copy)):
        return
    if (load.source, load.dest, store.source, store.dest) != (
        "shared",
        *2 * ("register",),
        "shared",
    ):
        return
    held = program.dest(load)
    if held != program.source(store):
        return
    before, within, after = (
        program.buffers[key] for key in (program.source(load), held, program.dest(store))
    )
    whole = len(before.shape) == 2 and before.shape[0] % ROWS == 0
    exact = within.dtype == before.dtype or DTYPES[within.dtype] > 1
    if whole and exact and (DTYPES[before.dtype], DTYPES[after.dtype]) == (1, 2):
        yield held
