"""Kernels without a GEMM for wide heads: a loop over parts of the columns.

A warp has 16 rows of a tile in registers, so that two tiles with 256 columns fill all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flashwright.grad.algebra import substitute
from flashwright.lang.nodes import (
    Allocate,
    Call,
    Comment,
    Compute,
    Coord,
    Copy,
    For,
    Grid,
    Name,
    Num,
    Param,
    Statement,
    expressions,
)
from flashwright.program.needed import base_name, names
from flashwright.program.scalars import Scalar, Unknown, evaluate, whole
from flashwright.program.vocabulary import DEFAULT_LABELS

MOST = 128
"""The most columns of a tile."""
_PARTS = (128, 64, 32, 16)
_COLUMN = Name("column_idx")


@dataclass(frozen=True)
class _Columns:
    """The columns of a kernel's tiles: how many, how many in a part, the tiles that have them, and
    the letter of the last axis of each tensor."""

    total: int
    part: int
    tiles: set[str]
    letters: Mapping[str, str]


def narrowed(kernel: tuple[Statement, ...], shared: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The kernel with a loop over the columns if its tiles are wide, and it can have one: its
    statements work on elements, and sum rows up. `shared` are the statements above all kernels."""
    columns = _columns(kernel, shared)
    if columns is None or any(isinstance(s, For) for s in kernel):
        return kernel
    frame = [s for s in kernel if isinstance(s, Grid | Param | Comment | Allocate)]
    rest = (s for s in kernel if not isinstance(s, Grid | Param | Comment | Allocate))
    body = [part for s in rest for part in _apart(s, columns.tiles)]
    inside = [s for s in body if names(s)[0] & columns.tiles]
    sums = [s for s in inside if isinstance(s, Compute) and not names(s)[1] & columns.tiles]
    late = {name for s in sums for name in names(s)[1]}
    before: list[Statement] = []
    after: list[Statement] = []
    for stmt in (s for s in body if s not in inside):
        touched, written = names(stmt)
        waits = bool(touched & late)
        (after if waits else before).append(stmt)
        late |= written if waits else set()
    read = {name for s in inside if s not in sums for name in names(s)[0]}
    read |= {name for s in sums for name in names(s)[0] - names(s)[1]}
    if not all(map(_sums_rows, sums)) or read & late or _twice([*before, *inside]):
        return kernel
    start = (Compute(None, (Num("0"),), mode="get", target=s.target) for s in sums)
    loop = tuple(_part(s, columns) for s in inside)
    title = [s for s in frame if isinstance(s, Comment)]
    head = [_part(s, columns) for s in frame if not isinstance(s, Comment)]
    high = Num(str(columns.total // columns.part))
    return (*head, *before, *start, For(_COLUMN, Num("0"), high, loop), *after, *title)


def _columns(kernel: Iterable[Statement], shared: Iterable[Statement]) -> _Columns | None:
    """The columns of the kernel's tiles, if all have the same number and it is too large."""
    params: dict[str, Scalar] = {}
    letters: dict[str, str] = {}
    for stmt in shared:
        if isinstance(stmt, Param):
            value = evaluate(stmt.value, params)
            assert not isinstance(value, Unknown)  # params are numbers
            params[stmt.name.id] = value
        elif isinstance(stmt, Allocate):
            last = stmt.shape[-1].label
            usual = DEFAULT_LABELS.get(len(stmt.shape), ("?",))
            letters[base_name(stmt.name)] = last.id if last else usual[-1]
    copies = [s for s in kernel if isinstance(s, Copy) and s.shape and len(s.shape) == 2]
    sizes = {whole(evaluate(s.shape[1], params)) for s in copies if s.shape}
    total = sizes.pop() if len(sizes) == 1 else None
    if total is None or total <= MOST:
        return None
    part = next((n for n in _PARTS if total % n == 0), None)
    if part is None:
        return None
    tiles = {base_name(s.target or s.name) for s in copies if s.source == "global"}
    tiles |= {base_name(s.name) for s in copies}
    tiles |= {base_name(s.name) for s in kernel if isinstance(s, Allocate) and len(s.shape) == 2}
    return _Columns(total, part, tiles, letters)


def _apart(stmt: Statement, tiles: set[str]) -> list[Statement]:
    """A sum over the columns apart from what is computed of it: `rowsum(dO * O) - dLSE`."""
    if not isinstance(stmt, Compute) or stmt.target is None or names(stmt)[1] & tiles:
        return [stmt]
    calls = [e for e in expressions(stmt) if isinstance(e, Call) and e.func.id == "rowsum"]
    if len(calls) != 1 or calls[0] == stmt.args[0]:
        return [stmt]
    target = stmt.target
    rest = tuple(substitute(a, lambda e: target if e == calls[0] else None) for a in stmt.args)
    if names(replace(stmt, args=rest))[0] & tiles:
        return [stmt]
    return [replace(stmt, args=(calls[0],)), replace(stmt, args=rest, mode="get new")]


def _sums_rows(stmt: Compute) -> bool:
    """Whether a statement is a sum over the columns and nothing else."""
    match stmt.args:
        case (Call(Name("rowsum")),):
            return stmt.mode == "get"
    return False


def _twice(body: Iterable[Statement]) -> bool:
    """Whether a vector is written twice, so that its value depends on the order."""
    written = [name for s in body if isinstance(s, Compute) for name in names(s)[1]]
    return len(written) > len(set(written))


def _part(stmt: Statement, columns: _Columns) -> Statement:
    """A statement for a part of the columns."""
    width = Num(str(columns.part))
    match stmt:
        case Allocate(shape=(rows, wide)):
            return replace(stmt, shape=(rows, replace(wide, size=width)))
        case Copy(shape=(rows, _)):
            tensor = stmt.name if stmt.source == "global" else stmt.target or stmt.name
            letter = columns.letters[base_name(tensor)]
            coords = (*(stmt.coords or ()), Coord(Name(letter), _COLUMN))
            return replace(stmt, shape=(rows, width), coords=coords)
        case Compute() if stmt.target is not None and base_name(stmt.target) not in columns.tiles:
            return replace(stmt, mode="accumulate")
    return stmt
