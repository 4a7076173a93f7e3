"""The sizes that decide a kernel's path: its tiles, its ring of stages, the constants of its masks
and loops. They come from the checked program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flashwright.build import classes
from flashwright.build.package import OWN
from flashwright.check.check import check
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import (
    Binary,
    Call,
    Compute,
    Copy,
    Expr,
    For,
    If,
    Let,
    Name,
    Num,
    Param,
    Statement,
    Unary,
    expressions,
    statements,
)
from flashwright.lang.parse import parse, read
from flashwright.program.program import Program, tile_of
from flashwright.program.scalars import NotScalar, evaluate, whole
from flashwright.sandbox.tensors import Array
from flashwright.semantics.interpret import interpret
from flashwright.semantics.machine import Machine

CODE = "code.tl"
HEADS_OF_GROUP = "G"
"""The letter of the axis of the heads of a group."""
_POSITIONS = ("q_idx", "kv_idx")
_LENGTHS = (*_POSITIONS, "q_len", "kv_len", "tokens")


@dataclass(frozen=True)
class Tiling:
    """The sizes that decide a kernel's path at a length."""

    rows: int = 64
    """Queries per thread block."""
    keys: int = 64
    """Keys per iteration."""
    stages: int = 1
    """Buffers of the tile of keys: how many iterations the loads may run ahead."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """The lengths by name that positions are compared with: windows, prefixes, sink tokens."""
    diagonal: bool = False
    """Whether a mask compares the positions of queries and keys."""
    assumed: bool = False
    """Whether the sizes are a guess: a callable does not show its tiles."""
    grouped: bool = False
    """Whether tensors have an axis of the heads of a group: then all problems have whole groups."""


def tiling_of(program: Program) -> Tiling:
    """The tiling of a checked program."""
    tiles = _global_tiles(program)
    # Of packed queries and of keys in a cache, no axis is as long as q_len or kv_len.
    shared = [b for b in program.buffers.values() if b.space == "shared"]
    packed = [b.shape[0] for b in program.buffers.values() if b.name == "Q"]
    cached = [b.shape[0] for b in shared if b.name in ("K", "V")]
    keys = tiles.get("kv_len") or max(cached, default=1)
    buffers = [b for b in shared if b.shape[0] == keys]
    return Tiling(
        rows=tiles.get("q_len") or max(packed, default=1),
        keys=keys,
        stages=max((b.stages for b in buffers), default=1),
        constants=_constants(program),
        diagonal=any(
            {"q_idx", "kv_idx"} <= _names(part)
            for s in statements(program.tree.body)
            if isinstance(s, Compute) and s.where is not None
            for part in expressions(s.where)
            if isinstance(part, Binary) and part.op in ("<", "<=", ">", ">=", "==", "!=")
        ),
        grouped=any(a.label == HEADS_OF_GROUP for t in program.tensors.values() for a in t.axes),
    )


def joined(tilings: Sequence[Tiling]) -> Tiling:
    """One tiling for the kernels of a program, which all run on every problem."""
    return Tiling(
        rows=max(t.rows for t in tilings),
        keys=max(t.keys for t in tilings),
        stages=max(t.stages for t in tilings),
        constants={name: value for t in tilings for name, value in t.constants.items()},
        diagonal=any(t.diagonal for t in tilings),
        grouped=any(t.grouped for t in tilings),
    )


def _global_tiles(program: Program) -> dict[str, int]:
    """The largest tile that a Copy lays on an axis of each length."""
    found: dict[str, int] = {}
    for stmt in statements(program.tree.body):
        if not isinstance(stmt, Copy) or "global" not in (stmt.source, stmt.dest):
            continue
        for length, size in program.tiled(stmt):
            if isinstance(length, Name):
                found[length.id] = max(found.get(length.id, 1), size)
    return found


# --- constants --------------------------------------------------------------------------------


def _constants(program: Program) -> dict[str, int]:
    """The lengths that masks add to positions or compare them with, and those in bounds of loops
    and branches. Factors (a tile's size, a stride) and numbers below 2 are no lengths."""
    sized = {
        name for s in statements(program.tree.body) for name in _names_of_sizes(s)
    }  # names of tile sizes
    found: dict[str, int] = {}
    for expr in _conditions(program):
        for term in _terms(expr):
            value = _value(term, program)
            name = term.id if isinstance(term, Name) else str(value)
            if value is not None and value >= 2 and not (_names(term) & sized):
                found.setdefault(name, value)
    derived = {
        s.name.id
        for s in statements(program.tree.body)
        if isinstance(s, Param) and _names(s.value) & sized
    }
    return {name: value for name, value in found.items() if name not in derived}


def _names_of_sizes(stmt: Statement) -> Iterator[str]:
    if isinstance(stmt, Copy) and stmt.shape is not None:
        yield from (e.id for e in stmt.shape if isinstance(e, Name))


def _conditions(program: Program) -> Iterator[Expr]:
    lengths = set(_LENGTHS)
    for stmt in statements(program.tree.body):
        parts: tuple[Expr, ...] = ()
        match stmt:
            case Compute(where=where) if where is not None:
                parts = (where,)
            case For(low=low, high=high):
                parts = (low, high)
            case If(cond=cond):
                parts = (cond,)
            case Let(name=name, value=value):
                parts = (value,)
                if _names(value) & lengths:
                    lengths.add(name.id)
        yield from (part for part in parts if _names(part) & lengths)


def _terms(expr: Expr) -> Iterator[Expr]:
    """The operands of sums and comparisons, not those of products."""
    match expr:
        case Binary("*" | "%", _, _):
            return
        case Binary("/", left, _):
            yield from _terms(left)
        case Binary(_, left, right):
            yield from _terms(left)
            yield from _terms(right)
        case Unary(_, operand):
            yield from _terms(operand)
        case Call(_, args):
            for arg in args:
                yield from _terms(arg)
        case Name() | Num():
            yield expr


def _value(expr: Expr, program: Program) -> int | None:
    if isinstance(expr, Name) and expr.id not in program.params:
        return None
    try:
        found = evaluate(expr, dict(program.params))
    except NotScalar:
        return None
    return whole(found)


def _names(node: object) -> set[str]:
    return {e.id for e in expressions(node) if isinstance(e, Name)}


# --- packages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A kernel of a package, and the numbers of keys that it serves."""

    tiling: Tiling
    above: int = 0
    up_to: int | None = None
    program: Program | None = field(default=None, compare=False, repr=False)

    def serves(self, kv_len: int) -> bool:
        """Whether a problem with so many keys goes to this kernel."""
        return kv_len > self.above and (self.up_to is None or kv_len <= self.up_to)


def served_by(folder: Path) -> tuple[Served, ...]:
    """The kernels of a package and the lengths each serves. Raises Failed with FW852 if there are
    none."""
    found, above = [], 0
    for rule in classes.read(folder).rules:
        place = folder if rule.kernel == OWN else folder / rule.kernel
        programs = _programs(place)
        tiling = joined([tiling_of(p) for p in programs]) if programs else _planned(place)
        found.append(Served(tiling, above, rule.up_to, programs[0] if len(programs) == 1 else None))
        above = rule.up_to or above
    return tuple(found)


def _programs(folder: Path) -> tuple[Program, ...]:
    """The kernels of a package's TL program; none if it has none that passes the checker."""
    try:
        return check(parse(read(folder / CODE))).kernels
    except (Failed, OSError):
        return ()


def _planned(folder: Path) -> Tiling:
    """The tiling that a launch plan shows: the boxes that TMA loads."""
    boxes = {m.tensor: max(m.box[:-1], default=1) for m in classes.plan_of(folder).maps}
    return Tiling(rows=boxes.get("Q", 64), keys=boxes.get("K", 64))


# --- how far apart the scores are -------------------------------------------------------------


class _Measured(Exception):
    """Ends a run as soon as a tile has weights."""

    def __init__(self, weights: Array) -> None:
        self.weights = weights


def spread_in(
    program: Program, arrays: Mapping[str, Array], dims: Mapping[str, int]
) -> float | None:
    """The standard deviation of a row's scores, measured from the first weights of a run; None for
    a program without softmax weights, as with a sigmoid."""

    def after(stmt: Statement, machine: Machine) -> None:
        if not isinstance(stmt, Compute):
            return
        weighs = stmt.operation in ("softmax", "exp", "exp2") or any(
            isinstance(e, Call) and e.func.id.lower() in ("exp", "exp2") for e in expressions(stmt)
        )
        target = stmt.target or (stmt.args[0] if stmt.args else None)
        key = tile_of(target, program.buffers) if isinstance(target, Name) and weighs else None
        if key is not None and len(program.buffers[key].shape) == 2:
            raise _Measured(np.asarray(machine.cells[key].tile.data, dtype=np.float64))

    try:
        interpret(program, arrays, dims, observe=after)
    except _Measured as found:
        weights = found.weights[: dims.get("q_len")]  # rows past the last query are zeros
        rows = [row[(row > 0) & np.isfinite(row)] for row in weights]
        spreads = [float(np.log(row).std()) for row in rows if len(row) >= 8]
        return float(np.median(spreads)) if spreads else None
    except Failed:  # reported when the program runs for its answer
        return None
    return None
