"""Live ranges of register tiles, statement by statement.

A tile is live from the statement that writes it to the last one that reads it; a tile that a loop
carries from one iteration to the next is live throughout the loop. Tiles that are converted a few
elements at a time are never live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashwright.lang.nodes import Compute, For, If, Reshape, Statement
from flashwright.program.conversions import converted_tiles
from flashwright.program.program import Key, Program

Alive = frozenset[Key]


@dataclass(frozen=True)
class Moment:
    """A statement, and the register tiles that are live while it runs."""

    stmt: Statement
    tiles: Alive


def moments(program: Program) -> Iterator[Moment]:
    """Every statement that reads or writes tiles, with the tiles that are live there."""
    found: dict[int, Moment] = {}
    _body(program, program.tree.body, frozenset(), found)
    passing = converted_tiles(program)
    for moment in found.values():
        yield replace(moment, tiles=moment.tiles - passing) if passing else moment


def _body(
    program: Program, body: tuple[Statement, ...], after: Alive, found: dict[int, Moment]
) -> Alive:
    """The tiles that are live before a body, given those that are live after it."""
    for stmt in reversed(body):
        match stmt:
            case If():
                after = _body(program, stmt.then, after, found) | _body(
                    program, stmt.orelse, after, found
                )
            case For():
                first = _body(program, stmt.body, after, found)
                after |= _body(program, stmt.body, after | first, found)
            case _:
                after = _statement(program, stmt, after, found)
    return after


def _statement(program: Program, stmt: Statement, after: Alive, found: dict[int, Moment]) -> Alive:
    read, written = (_registers(keys) for keys in (program.reads(stmt), program.writes(stmt)))
    if isinstance(stmt, Compute | Reshape) or read or written:
        reused = _reused(program, stmt, read - written - after, written)
        found[id(stmt)] = Moment(stmt, (after | read | written) - reused)
    return (after - written) | read


def _reused(program: Program, stmt: Statement, last: Alive, written: Alive) -> Alive:
    """The tiles whose registers the result takes: elementwise work reads them for the last time."""
    if not isinstance(stmt, Compute) or stmt.operation == "gemm" or stmt.mode != "get":
        return frozenset()
    shapes = {program.buffers[key].shape for key in written}
    fitting = sorted(key for key in last if program.buffers[key].shape in shapes)
    return frozenset(fitting[:1])


def _registers(keys: set[Key]) -> Alive:
    return frozenset(key for key in keys if key[1] == "register")
