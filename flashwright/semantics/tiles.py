"""What the checker knows of a tile: where its elements come from and what has become of them.

A tile on the GPU is only numbers; that its columns are keys 64 to 127 of head 3 is in the author's
mind. Here it is data, carried along by every statement, so that a GEMM over different keys, a store
to the wrong rows or a missed block is seen at the statement that does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from flashwright.lang.diagnostic import Label
from flashwright.lang.nodes import Copy, Expr, Span, Statement
from flashwright.program.scalars import Reader, Unknown, Value


@dataclass(frozen=True)
class Where:
    """The positions along one axis of a tile: `size` of them from `start`, on a tensor's axis.

    `dim` identifies the axis by its size (`kv_len`, `128`), so that K's keys and V's keys are the
    same axis and a key is not a head dimension. `start` is Unknown where a tensor decides it.
    """

    dim: str
    start: int | Unknown
    size: int
    extent: int = field(compare=False)
    label: str = field(compare=False)
    tensor: str = field(compare=False)
    copy: Copy = field(compare=False, repr=False)
    chosen: bool = field(default=False, compare=False)
    """Whether an element of a tensor decides `start`: then no walk along the axis is meant."""
    parts: tuple[int, ...] = field(default=(), compare=False)
    """The widths of the tiles that several Copies put side by side along this axis."""

    def outside(self) -> Iterator[tuple[int, int]]:
        """The positions of the tile before the start of the tensor, and past its end."""
        if isinstance(self.start, Unknown):
            return
        end = self.start + self.size
        if self.start < 0:
            yield self.start, min(end, 0)
        if end > self.extent:
            yield max(self.start, self.extent), end

    def __str__(self) -> str:
        axis = self.label if self.dim.isdigit() else self.dim
        if isinstance(self.start, Unknown):
            return f"{axis} at {self.start}"
        return f"{axis} {self.start}..{self.start + self.size - 1}"


class Place(NamedTuple):
    """The one index of a tile on an axis that it does not stretch along: its head, its batch."""

    value: Value
    tensor: str
    copy: Copy
    chosen: bool = False
    """Whether an element of a tensor decides it: the page of a block of keys."""


@dataclass(eq=False)
class Epoch:
    """One value of a running maximum; `stmt` is the statement that moved it there."""

    stmt: Statement
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True)
class Kind:
    """What a value is to the softmax: a maximum, a difference of two, the factor between two,
    scores relative to one, or weights (exponentials and sums of them) relative to one."""

    name: Literal["max", "diff", "factor", "relative", "weights"]
    now: Epoch | None = None
    before: Epoch | None = None


@dataclass(frozen=True, eq=False)
class Masked:
    """A mask that a tile has been through, with all that is needed to ask it about other keys."""

    stmt: Statement
    where: Expr
    env: Mapping[str, Value]
    rows: Where | None
    dim: str
    varying: frozenset[str]
    read: Reader
    """Elements of tensors that the condition speaks of."""
    sources: frozenset[str]
    """The tensors that they are of."""


def together(tiles: Iterable[Tile]) -> tuple[Masked, ...]:
    """The masks of several tiles, each condition once (its latest)."""
    return tuple({id(m.where): m for t in tiles for m in t.masks}.values())


class Part(NamedTuple):
    """Positions that a sum has taken in, and the masks that they came through."""

    low: int
    high: int
    masks: tuple[Masked, ...]


@dataclass(frozen=True)
class Coverage:
    """Which part of an axis a sum has taken in so far."""

    dim: str
    tensor: str
    extent: int
    ranges: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    """What the ranges, which are joined, were made of: a part for each addition."""
    stmt: Statement
    axis: str
    """What to call the axis in a message."""
    demanded: bool
    """Whether all of the axis must be taken in: a run-time length always, a fixed one (half of a
    head, say) only once a loop walks along it. Where a tensor decides, nobody can demand it."""
    known: bool = True
    open: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """The tensors that decide where the walk along the axis begins, and where it ends."""

    def missing(self, told: frozenset[str]) -> list[tuple[int, int]]:
        """The parts of the axis that are not in the sum. Where a tensor decides about the first
        or the last of them, they are not missing, unless it is `told` what is to be seen."""
        gaps, at = [], 0
        for low, high in self.ranges:
            if low > at and (at > 0 or self.open[0] <= told):
                gaps.append((at, low))
            at = max(at, high)
        if at < self.extent and self.open[1] <= told:
            gaps.append((at, self.extent))
        return gaps

    def overlaps(self, other: Coverage) -> Iterator[Part]:
        """What both have, as far as it is known, with the masks of both."""
        if not (self.known and other.known and _common(self.ranges, other.ranges)):
            return  # as in nearly every round: the parts may be thousands
        for one, two in itertools.product(self.parts, other.parts):
            low, high = max(one.low, two.low), min(one.high, two.high)
            if low < high:
                yield Part(low, high, one.masks + two.masks)

    def join(self, other: Coverage) -> Coverage:
        """Both together, the latest statement first in mind."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((*self.ranges, *other.ranges)):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        parts = self.parts + other.parts
        if _common(self.ranges, other.ranges):
            parts = tuple(dict.fromkeys(parts))  # x + x has no more of them than x
        known = self.known and other.known
        both = (self.open[0] | other.open[0], self.open[1] | other.open[1])
        ranges = tuple(merged)
        return replace(other, ranges=ranges, parts=parts, demanded=known, known=known, open=both)


def _common(one: Iterable[tuple[int, int]], two: Iterable[tuple[int, int]]) -> bool:
    """Whether two ranges overlap."""
    pairs = itertools.product(one, two)
    return any(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


CoverKey = tuple[str, ...]
"""An axis of a tensor, and the page or other part of it that the sum is over."""
Covered = Mapping[CoverKey, Coverage]


def covering(where: Where, tile: Tile, stmt: Statement) -> dict[CoverKey, Coverage]:
    """The coverage of a sum over one axis of a tile."""
    at = tile.at
    part = [f"{dim} {p.value}" for dim, p in at.items() if p.tensor == where.tensor]
    paged = any(p.chosen for p in at.values() if p.tensor == where.tensor)
    known = not isinstance(where.start, Unknown) and not where.chosen and not paged
    start = 0 if isinstance(where.start, Unknown) else where.start
    piece = Part(max(start, 0), min(start + where.size, where.extent), tile.masks)
    parts = (piece,) if piece.low < piece.high else ()
    ranges = tuple((part.low, part.high) for part in parts)
    fixed = where.dim.isdigit()
    axis = f"{where.label} of `{where.tensor}`" if fixed else where.dim
    demanded = known and not fixed
    made = Coverage(
        where.dim, where.tensor, where.extent, ranges, parts, stmt, axis, demanded, known
    )
    return {(where.dim, where.tensor, *part): made}


def kept(at: Mapping[str, Place], axes: tuple[Where | None, ...]) -> dict[str, Place]:
    """What is still said of where a tile lies after a sum: the places of its rows' tensor, and of
    the keys if it still has them. Which page a summed-up key came from is past."""
    tensors = {w.tensor for i, w in enumerate(axes) if w is not None and (i == 0 or w.label == "L")}
    return {dim: place for dim, place in at.items() if place.tensor in tensors}


@dataclass(frozen=True)
class Tile:
    """A tile's value: what is known of it, and its numbers when the program really runs."""

    shape: tuple[int, ...]
    axes: tuple[Where | None, ...]
    dtype: str
    at: Mapping[str, Place] = field(default_factory=dict)
    covered: Covered = field(default_factory=dict)
    layout: Literal["C", "A"] | None = None
    kind: Kind | None = None
    masks: tuple[Masked, ...] = ()
    start: bool = False
    """Whether it is a constant, with which a sum or a maximum begins."""
    data: Any = field(default=None, repr=False)


def side_by_side(pieces: Mapping[int, Tile], name: str, shape: tuple[int, ...]) -> Tile | None:
    """The tile that pieces make up, each at its first column; None unless they fill all columns
    and have the same rows."""
    order = [pieces[column] for column in sorted(pieces)]
    if unfilled(pieces, shape[1]) or any(p.axes[0] != order[0].axes[0] for p in order):
        return None
    columns = [piece.axes[1] for piece in order]
    first = columns[0]
    assert first is not None
    widths = tuple(piece.shape[1] for piece in order)
    joint = Where(str(shape[1]), 0, shape[1], shape[1], first.label, name, first.copy, parts=widths)
    starts = [w.start for w in columns if w is not None and w.tensor == first.tensor]
    if not isinstance(first.start, Unknown):
        in_a_row = [first.start + column for column in sorted(pieces)]
        if starts == in_a_row:  # parts of one tensor, put together again
            joint = replace(first, size=shape[1])
    at = {dim: place for piece in reversed(order) for dim, place in piece.at.items()}
    return Tile(shape, (order[0].axes[0], joint), order[0].dtype, at)


def unfilled(pieces: Mapping[int, Tile], width: int) -> list[tuple[int, int]]:
    """The columns, from and up to, that no piece fills."""
    gaps, at = [], 0
    for column in (*sorted(pieces), width):
        if column > at:
            gaps.append((at, column))
        at = column + pieces[column].shape[1] if column in pieces else width
    return gaps


Operand = Tile | Value
"""What an expression is made of: tiles and scalars."""


@dataclass
class Cell:
    """The present contents of a buffer, the statement that wrote them, and their uses."""

    tile: Tile
    writer: Statement
    read: bool = False
    skipped: bool = False
    """Whether a branch or a loop that would have read it was skipped."""
    served: bool = False
    """Whether this value, or one that it continues, went into another buffer."""


@dataclass(frozen=True)
class Frame:
    """The rows and columns that an expression is computed over."""

    shape: tuple[int, ...]
    axes: tuple[Where | None, ...]


def origins(*places: Where) -> tuple[Label, ...]:
    """The Copies that positions come from."""
    seen: Mapping[Span, Label] = {
        p.copy.span: Label(p.copy.span, f"`{p.tensor}`: {p}") for p in places
    }
    return tuple(seen.values())
