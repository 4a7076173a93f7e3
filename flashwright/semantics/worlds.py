"""What the checker assumes where only the caller's data would tell.

A length that is read from a tensor ends a loop, a flag skips a round, a dim of the program's own
says how long a table is. The checker then runs a problem several times, each time in another
*world*: with other data, or with other sizes.

A hazard in one world is a finding. A finding about sizes (OF_SIZES) is one only if the data cannot
be such that it goes away: if it shows in every world, or in a world that the program itself
speaks of (a length that is compared with key positions lies within the keys). What a sum has
taken in (OF_SUMS) is known in every world: sums.py asks for nothing that data decide about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from flashwright.lang.nodes import (
    Binary,
    Call,
    Compute,
    Copy,
    Expr,
    For,
    Grid,
    If,
    Index,
    Name,
    Statement,
    expressions,
    statements,
)
from flashwright.program.program import Program, Tensor
from flashwright.program.vocabulary import PREDEFINED_DIMS

OF_SUMS = ("FW604", "FW606")
OF_SIZES = (*OF_SUMS, "FW306", "FW605", "FW609", "FW610")

Data = Callable[[Tensor, tuple[int, ...], tuple[int, ...]], int]
"""An element of a tensor, by its index and the lengths of the axes."""


@dataclass(frozen=True)
class World:
    """One assumption about the caller's data."""

    dims: Mapping[str, int]
    data: Data
    alternates: bool = False
    """Whether conditions on unknown data are false every other time, and not always true."""
    whole: bool = True
    """Whether everything is visited, so that a program without findings here is right."""


def worlds(program: Program, dims: Mapping[str, int], step: int) -> list[World]:
    """The worlds to run a problem in; `step` is the number of keys in a tile. The first is the
    most likely one."""
    kv_len, q_len = dims["kv_len"], dims["q_len"]
    natural = World(dims, constant(kv_len))
    if not deciding(program):
        return [natural]
    if not deciding(program) - placing(program):
        return [natural, World(dims, constant(0), alternates=True, whole=False)]
    lengths = (q_len, ceil(kv_len / step), 1)
    return [
        natural,
        *(World(dims, constant(n)) for n in lengths if n < kv_len or not is_length(program)),
        World(dims, _running(kv_len)),
        World(dims, constant(0), alternates=True, whole=False),
        World(dims, lambda _, index, __: sum(index) % 2, alternates=True, whole=False),
    ]


def constant(value: int) -> Data:
    """Data that is the same everywhere."""
    return lambda tensor, index, shape: value


def _running(total: int) -> Data:
    """Data that grows along its last axis, from 0 to the total: where sequences begin."""
    return lambda tensor, index, shape: index[-1] * total // max(shape[-1] - 1, 1)


def resized(
    program: Program, world: World, step: int, tiled: Callable[[str], bool]
) -> Iterator[World]:
    """The world with other sizes of the program's own dims, where no tile lies on such an axis:
    a table may be as long as there are blocks of keys, or longer."""
    kv_len, q_len = world.dims["kv_len"], world.dims["q_len"]
    own = [d for d in program.dims if d not in PREDEFINED_DIMS and not tiled(d)]
    for size in (ceil(kv_len / step), kv_len, q_len + kv_len + 8) if own else ():
        yield replace(world, dims={**world.dims, **dict.fromkeys(own, size)})


# --- which tensors decide ---------------------------------------------------------------------


def deciding(program: Program) -> frozenset[str]:
    """The tensors whose elements decide how often a loop runs or whether a branch does."""
    found: set[str] = set()
    for stmt in statements(program.tree.body):
        for expr in _decisions(stmt):
            found |= program.sources(expr)
    return frozenset(found)


def _decisions(stmt: Statement) -> tuple[Expr, ...]:
    match stmt:
        case For():
            return stmt.low, stmt.high
        case If(cond):
            return (cond,)
        case Grid(axes):
            return tuple(bound for axis in axes for bound in (axis.low, axis.high))
    return ()


def placing(program: Program) -> frozenset[str]:
    """The tensors whose elements say where something lies: the page of a block of keys."""
    found: set[str] = set()
    for stmt in statements(program.tree.body):
        if isinstance(stmt, Copy):
            for coord in stmt.coords or ():
                found |= program.sources(coord.value)
        for expr in expressions(stmt):
            if isinstance(expr, Index):
                found.update(*(program.sources(arg) for arg in expr.args))
    return frozenset(found)


def is_length(program: Program) -> bool:
    """Whether the program says that the deciding data are numbers of keys: it takes the minimum
    of them and `kv_len`, or compares them with `kv_idx`."""
    names = deciding(program)
    said: set[str] = set()
    for stmt in statements(program.tree.body):
        for expr in expressions(stmt):
            parts: tuple[Expr, ...] = ()
            if isinstance(expr, Call) and expr.func.id.lower() == "min":
                parts = expr.args
            elif isinstance(stmt, Compute) and isinstance(expr, Binary) and expr.op in _ORDERS:
                parts = (expr.left, expr.right)
            if any(Name("kv_len") in expressions(p) or p == Name("kv_idx") for p in parts):
                said.update(*(program.sources(part) for part in parts))
    return bool(names) and names <= said


_ORDERS = ("<", "<=", ">", ">=")
