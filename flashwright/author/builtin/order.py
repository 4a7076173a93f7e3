"""The order of a loop's statements, for GPUs that multiply while they compute.

Products that need nothing of each other stand together: the scores and dP first. At the end come
the sums that take their tile from registers, what goes to shared memory, the products of it that
leave at once, and the other sums, which are multiplied while those leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flashwright.lang.nodes import Compute, Copy, Name, Reshape, Statement
from flashwright.program.needed import base_name, names
from flashwright.program.vocabulary import split


def ordered(body: Sequence[Statement], early: bool) -> list[Statement]:
    """The statements of the main loop in a better order, if that changes no value. `early`: what
    goes to shared memory comes first at the end, before the sums from registers."""
    made = list(body)
    for stmt in [s for s in made if _leaves(s)]:
        place = made.index(stmt)
        while place and _may_pass(stmt, made[place - 1]):
            place -= 1
        made.remove(stmt)
        made.insert(place, stmt)
    start = len(made)
    while start and _closing(made[start - 1]):
        start -= 1
    tail = made[start:]
    moved = {base_name(s.name) for s in tail if isinstance(s, Copy) and s.dest == "shared"}
    sorted_tail = sorted(tail, key=lambda s: _rank(s, moved, early))
    return made[:start] + (sorted_tail if _same_values(tail, sorted_tail) else tail)


def _leaves(stmt: Statement) -> bool:
    """Whether a statement is a product whose result is not a sum over the loop."""
    return isinstance(stmt, Compute) and stmt.operation == "gemm" and stmt.mode == "get"


def _may_pass(stmt: Statement, before: Statement) -> bool:
    """Whether a product may go above a statement: elementwise work on other tiles."""
    elementwise = isinstance(before, Compute) and before.operation != "gemm"
    return elementwise and _independent(stmt, before)


def _closing(stmt: Statement) -> bool:
    gemm = isinstance(stmt, Compute) and stmt.operation == "gemm"
    stores = isinstance(stmt, Copy) and stmt.source == "register"
    return gemm or stores or isinstance(stmt, Reshape)


def _rank(stmt: Statement, moved: set[str], early: bool) -> int:
    match stmt:
        case Copy(dest="shared"):
            return -1 if early else 1
        case Copy():
            return 4
        case Reshape(name):
            return 3 if base_name(name) in moved else 0
        case Compute(mode="accumulate", args=(Name() as left, _)):
            return 3 if base_name(left) in moved and split(left.id)[1] != "shared" else 0
    return 2


def _same_values(before: Sequence[Statement], after: Sequence[Statement]) -> bool:
    """Whether statements in another order give the same values: those that changed places have
    nothing to do with each other."""
    places = {id(stmt): place for place, stmt in enumerate(after)}
    pairs = itertools.combinations(before, 2)
    return all(places[id(a)] < places[id(b)] or _independent(a, b) for a, b in pairs)


def _independent(one: Statement, other: Statement) -> bool:
    touched, written = zip(*map(names, (one, other)), strict=True)
    return not (touched[0] & written[1] or touched[1] & written[0])
