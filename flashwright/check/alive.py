"""Live ranges: which register tiles hold a value that is still needed, statement by statement.

A tile is alive from the statement that gives it a value to the last one that reads it; what a loop
carries from one iteration to the next is alive throughout the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.lang.nodes import Compute, For, If, Reshape, Statement
from flashwright.program.program import Key, Program

Alive = frozenset[Key]


@dataclass(frozen=True)
class Moment:
    """A statement, and the register tiles that are alive while it runs."""

    stmt: Statement
    tiles: Alive


def moments(program: Program) -> Iterator[Moment]:
    """Every statement that computes or moves something, with what is alive there."""
    found: dict[int, Moment] = {}
    _body(program, program.tree.body, frozenset(), found)
    yield from found.values()


def _body(
    program: Program, body: tuple[Statement, ...], after: Alive, found: dict[int, Moment]
) -> Alive:
    """What is alive before a body, given what is alive behind it."""
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
        found[id(stmt)] = Moment(stmt, after | read | written)
    return (after - written) | read


def _registers(keys: set[Key]) -> Alive:
    return frozenset(key for key in keys if key[1] == "register")
