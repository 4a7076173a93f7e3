"""Assumptions about the caller's data, for programs whose control flow depends on it.

A tensor's element may bound a loop, a flag may skip an iteration, and a dim of the program's own
may be the length of a table. The checker then runs a problem several times, each time in another
*world*: with other data, or with other sizes.

A hazard in one world is a finding. A finding about sizes (OF_SIZES) counts only if no data can
avoid it: if it occurs in every world, or in a world that the program itself describes (a length
that is compared with key positions lies within the keys). The coverage of a sum (OF_SUMS) is known
in every world: sums.py requires nothing that depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from flashwright.lang.nodes import (
    Binary,
    Call,
    Compute,
    Coord,
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
from flashwright.program.scalars import evaluate
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
    """Whether conditions on unknown data alternate between true and false; else they are true."""
    whole: bool = True
    """Whether all keys are visited, so that a program without findings here is right."""


def worlds(program: Program, dims: Mapping[str, int], step: int) -> list[World]:
    """The worlds to run a problem in; `step` is the number of keys in a tile. The first is the
    most likely one."""
    kv_len, q_len = dims["kv_len"], dims["q_len"]
    natural = World(dims, constant(kv_len))
    if ranging(program):
        return [World(dims, data) for data in _packed(program, dims)]
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
    """Data with one value for every element."""
    return lambda tensor, index, shape: value


def _running(total: int) -> Data:
    """Data that grows along its last axis from 0 to the total, such as sequence offsets."""
    return lambda tensor, index, shape: index[-1] * total // max(shape[-1] - 1, 1)


def resized(
    program: Program, world: World, step: int, tiled: Callable[[str], bool]
) -> Iterator[World]:
    """The same world with other sizes of the program's own dims, if no tile lies on such an axis:
    a table may have one entry per block of keys, or more. (A sum may have any number of parts.)"""
    kv_len, q_len = world.dims["kv_len"], world.dims["q_len"]
    counts = (*PREDEFINED_DIMS, *program.parts_stored)
    own = [d for d in program.dims if d not in counts and not tiled(d)]
    for size in (ceil(kv_len / step), kv_len, q_len + kv_len + 8) if own else ():
        yield replace(world, dims={**world.dims, **dict.fromkeys(own, size)})


# --- data-dependent control flow ---------------------------------------------------------------


def deciding(program: Program) -> frozenset[str]:
    """The tensors whose elements determine loop bounds or branches."""
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


def told(program: Program) -> frozenset[str]:
    """The tensors whose elements a world decides."""
    return (deciding(program) - placing(program)) | set(ranging(program))


@dataclass(frozen=True)
class Ranged:
    """A tensor whose elements bound ranges of an axis: the axis's length, the longest range, and
    whether the elements are where ranges begin, not how long they are."""

    length: Expr
    longest: str
    starts: bool


def ranging(program: Program) -> dict[str, Ranged]:
    """The tensors that bound ranges."""
    bounded = [(length, c.within) for _, c, length in program.ranges if c.within is not None]
    starts = {name for _, (first, _) in bounded for name in program.sources(first)}
    found: dict[str, Ranged] = {}
    for length, bounds in bounded:
        for name in {n for bound in bounds for n in program.sources(bound)}:
            longest = program.longest_ranges[length]
            found.setdefault(name, Ranged(length, longest, name in starts))
    return found


def equally_long(program: Program) -> Iterator[Expr]:
    """The lengths of axes whose ranges have data for where they begin alone: all of an axis are as
    long, such as the new keys of each sequence."""

    def read(expr: Expr) -> set[Expr]:
        return {e for e in program.spelt_out(expr) if isinstance(e, Index)}

    for _, coord, length in program.ranges:
        if coord.within is not None:
            first, last = map(read, coord.within)
            if first and last <= first:
                yield length


def _apart(program: Program) -> bool:
    """Whether a kernel writes in place, and where it does a coordinate beside the range depends on
    the sequence: data say it, or what the range is read for."""
    stores = [s for s in program.ranges if s[0].dest == "global" and program.outer(s[0]).kept]

    def names(exprs: Iterable[Expr]) -> set[Expr]:
        return {e for expr in exprs for e in program.spelt_out(expr) if isinstance(e, Name)}

    def told(copy: Copy, coord: Coord) -> bool:
        others = [c.value for c in copy.coords or () if c is not coord]
        parts = (e for bound in coord.within or () for e in program.spelt_out(bound))
        read = names(arg for e in parts if isinstance(e, Index) for arg in e.args)
        return any(map(program.chosen, others)) or bool(names(others) & read)

    return bool(stores) and all(told(copy, coord) for copy, coord, _ in stores)


def _packed(program: Program, dims: Mapping[str, int]) -> list[Data]:
    """Data for ranges that lie behind each other and fill their axis, or in pages, the shortest at
    the end or at the beginning; none is longer than the problem says. What is written where other
    coordinates tell sequences apart begins at the same place in all."""

    def begin(about: Ranged, number: int, short_first: bool) -> int:
        total, longest = evaluate(about.length, {**dims, **program.params}), dims[about.longest]
        assert isinstance(total, int | Fraction)
        at = total - (dims["batch"] - number) * longest if short_first else number * longest
        return int(min(max(at, 0), total))

    def element(name: str, number: int, short_first: bool) -> int:
        about = ranging(program).get(name)
        if about is None:
            return dims["kv_len"]
        if alike:
            return begin(about, dims["batch"] - 1 if short_first else 0, False)
        if about.length == Name(about.longest):  # each has pages of its own
            turn = dims["batch"] - 1 - number if short_first else number
            return max(dims[about.longest] - turn * (dims[about.longest] // 2), 0)
        at = begin(about, number, short_first)
        return at if about.starts else begin(about, number + 1, short_first) - at

    alike = _apart(program)
    return [
        lambda tensor, index, _: element(tensor.name, index[-1], False),
        lambda tensor, index, _: element(tensor.name, index[-1], True),
    ]


def placing(program: Program) -> frozenset[str]:
    """The tensors whose elements are coordinates, such as the page of a block of keys."""
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
    """Whether the program treats the deciding data as numbers of keys: it takes their minimum with
    `kv_len`, or compares them with `kv_idx`."""
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
