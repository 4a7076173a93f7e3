"""What the checker knows of a tile: where its elements come from and what has become of them.

On the GPU a tile is only numbers. Here it also carries where they come from, such as keys 64 to 127
of head 3. So the checker finds a GEMM over different keys, a store to the wrong rows or a missed
block at the statement that causes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from flashwright.lang.diagnostic import Label
from flashwright.lang.nodes import Copy, Expr, Span, Statement
from flashwright.program.scalars import Reader, Unknown, Value


@dataclass(frozen=True)
class Where:
    """The positions along one axis of a tile: `size` of them from `start`, on a tensor's axis.

    `dim` identifies the axis by its size (`kv_len`, `128`), so that K's keys and V's keys are the
    same axis and a key is not a head dimension. `start` is Unknown if it depends on tensor data.
    """

    dim: str
    start: int | Unknown
    size: int
    extent: int = field(compare=False)
    label: str = field(compare=False)
    tensor: str = field(compare=False)
    copy: Copy = field(compare=False, repr=False)
    chosen: bool = field(default=False, compare=False)
    """Whether `start` depends on tensor data: then no loop along the axis is expected."""
    parts: tuple[int, ...] = field(default=(), compare=False)
    """The widths of the tiles that several Copies put side by side along this axis."""
    first: int | Unknown | None = field(default=None, compare=False)
    """Where the range begins whose positions are counted, if there is one; `extent` is its length.
    """
    group: int = field(default=0, compare=False)
    """The rows in a page, if the rows are counted over pages along an axis of the tensor."""

    @property
    def begin(self) -> int | Unknown:
        """Where the tile begins in the tensor."""
        if self.first is None or isinstance(self.start, Unknown):
            return self.start
        return self.first if isinstance(self.first, Unknown) else self.first + self.start

    def outside(self) -> Iterator[tuple[int, int]]:
        """The positions of the tile before the start of the tensor, and past its end."""
        if isinstance(self.start, Unknown):
            return
        end = self.start + self.size
        if self.start < 0:
            yield self.start, min(end, 0)
        if end > self.extent:
            yield max(self.start, self.extent), end

    def same_columns(self, other: Where) -> bool:
        """Whether both are the same columns of heads, which may be of different widths: MLA's
        values are the first columns of its keys."""
        fixed = self.dim.isdigit() and other.dim.isdigit() and self.label == other.label
        return fixed and (self.start, self.size) == (other.start, other.size)

    def __str__(self) -> str:
        axis = self.label if self.dim.isdigit() else self.dim
        if isinstance(self.start, Unknown):
            return f"{axis} at {self.start}"
        return f"{axis} {self.start}..{self.start + self.size - 1}"


class Place(NamedTuple):
    """The index of a tile on an axis that is not one of its own: its head, its batch."""

    value: Value
    tensor: str
    copy: Copy
    chosen: bool = False
    """Whether it depends on tensor data, as the page of a block of keys does."""


@dataclass(eq=False)
class Epoch:
    """One value of a running maximum; `stmt` is the statement that set it."""

    stmt: Statement
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True)
class Kind:
    """The role of a value in the softmax: a maximum, a difference of two, the factor between two,
    scores relative to one, or weights (exponentials and sums of them) relative to one."""

    name: Literal["max", "diff", "factor", "relative", "weights"]
    now: Epoch | None = None
    before: Epoch | None = None


@dataclass(frozen=True, eq=False)
class Masked:
    """A mask applied to a tile, with the context to evaluate it for other keys."""

    stmt: Statement
    where: Expr
    env: Mapping[str, Value]
    axes: tuple[Where | None, ...]
    varying: frozenset[str]
    read: Reader
    """Reads the elements of tensors in the condition."""
    sources: frozenset[str]
    """The tensors that the condition reads."""

    def side(self, dim: str) -> int | None:
        """The axis of the masked tile that lies along `dim`: 1 for its columns, 0 for its rows."""
        return next((n for n in (1, 0) if (w := self.axes[n]) is not None and w.dim == dim), None)


KEYS_AS_ROWS = ("kv_len", "q_len")
"""The dims of a tile in which `kv_idx` is the row's position and `q_idx` the column's."""


def axis_of(position: str, axes: tuple[Where | None, ...]) -> int:
    """The axis of a tile that `q_idx` or `kv_idx` goes along: `q_idx` along the rows, unless the
    rows are keys and the columns are queries, or heads of a group."""
    dims = tuple(w.dim if w is not None else "" for w in axes)
    swapped = dims == KEYS_AS_ROWS or (dims[0] == KEYS_AS_ROWS[0] and of_heads(axes[-1]))
    return int((position == "kv_idx") != swapped)


def of_heads(where: Any) -> bool:
    """Whether a tile's columns are heads: neither positions alone nor elements of rows."""
    return where is not None and (where.label not in ("L", "D") or where.group > 0)


def together(tiles: Iterable[Tile]) -> tuple[Masked, ...]:
    """The masks of several tiles, each condition once (its latest)."""
    return tuple({id(m.where): m for t in tiles for m in t.masks}.values())


class Part(NamedTuple):
    """Positions that one addition put into a sum, and the masks applied to them."""

    low: int
    high: int
    masks: tuple[Masked, ...]


@dataclass(frozen=True)
class Coverage:
    """The part of an axis that a sum covers so far."""

    dim: str
    tensor: str
    extent: int
    ranges: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    """The additions that the joined ranges consist of."""
    stmt: Statement
    axis: str
    """The name of the axis in messages."""
    demanded: bool
    """Whether the sum must cover the whole axis: a run-time length always, a fixed one (such as
    half of a head) only if a loop runs along it, a data-dependent one never."""
    known: bool = True
    open: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """The tensors that determine where the loop along the axis begins, and where it ends."""

    def missing(self, told: frozenset[str]) -> list[tuple[int, int]]:
        """The parts of the axis that are not in the sum. If tensor data determine the first or the
        last of them, these are not missing, unless a mask names the tensor (`told`)."""
        gaps, at = [], 0
        for low, high in self.ranges:
            if low > at and (at > 0 or self.open[0] <= told):
                gaps.append((at, low))
            at = max(at, high)
        if at < self.extent and self.open[1] <= told:
            gaps.append((at, self.extent))
        return gaps

    def overlaps(self, other: Coverage) -> Iterator[Part]:
        """The known parts that both contain, with the masks of both."""
        if not (self.known and other.known and _common(self.ranges, other.ranges)):
            return  # the usual case; there may be thousands of parts
        for one, two in itertools.product(self.parts, other.parts):
            low, high = max(one.low, two.low), min(one.high, two.high)
            if low < high:
                yield Part(low, high, one.masks + two.masks)

    def join(self, other: Coverage) -> Coverage:
        """The union of both coverages; the latest statement wins."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((*self.ranges, *other.ranges)):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        parts = self.parts + other.parts
        if _common(self.ranges, other.ranges):
            parts = tuple(dict.fromkeys(parts))  # x + x covers the same as x
        known = self.known and other.known
        both = (self.open[0] | other.open[0], self.open[1] | other.open[1])
        ranges = tuple(merged)
        return replace(other, ranges=ranges, parts=parts, demanded=known, known=known, open=both)


def _common(one: Iterable[tuple[int, int]], two: Iterable[tuple[int, int]]) -> bool:
    """Whether two half-open ranges overlap, as far as their bounds are known."""
    pairs = itertools.product(one, two)
    return any(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


CoverKey = tuple[str, ...]
"""An axis of a tensor, and the page or other part of it that the sum covers."""
Covered = Mapping[CoverKey, Coverage]


def covering(
    where: Where, tile: Tile, stmt: Statement, dims: Collection[str]
) -> dict[CoverKey, Coverage]:
    """The coverage of a sum over one axis of a tile; `dims` are the axes of the axis's tensor."""
    of_range = f"the range of {where.dim}"  # packed sequences are parts, as batch elements are
    own = {
        dim: p
        for dim, p in tile.at.items()
        if (dim in dims and dim != where.dim) or (dim == of_range and p.tensor == where.tensor)
    }
    part = [f"{dim} {p.value}" for dim, p in own.items()]
    paged = any(p.chosen for p in own.values())
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
    """The fixed coordinates that remain after a sum: those of its rows' tensor, and of the keys if
    it still has them. The page of a summed key is dropped."""
    tensors = {w.tensor for i, w in enumerate(axes) if w is not None and (i == 0 or w.label == "L")}
    return {dim: place for dim, place in at.items() if place.tensor in tensors}


@dataclass(frozen=True)
class Tile:
    """A tile's value: what is known of it, and its numbers if the machine has an arithmetic."""

    shape: tuple[int, ...]
    axes: tuple[Where | None, ...]
    dtype: str
    at: Mapping[str, Place] = field(default_factory=dict)
    covered: Covered = field(default_factory=dict)
    layout: Literal["C", "A"] | None = None
    kind: Kind | None = None
    masks: tuple[Masked, ...] = ()
    start: bool = False
    """Whether it is a constant: the initial value of a sum or a maximum."""
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
    """The first range of columns that no piece fills, half-open."""
    gaps, at = [], 0
    for column in (*sorted(pieces), width):
        if column > at:
            gaps.append((at, column))
        at = column + pieces[column].shape[1] if column in pieces else width
    return gaps


Operand = Tile | Value
"""The value of an expression: a tile or a scalar."""


@dataclass
class Cell:
    """The present contents of a buffer, the statement that wrote them, and their uses."""

    tile: Tile
    writer: Statement
    read: bool = False
    skipped: bool = False
    """Whether a skipped branch or loop would have read it."""
    served: bool = False
    """Whether this value, or one that it continues, went into another buffer."""


@dataclass(frozen=True)
class Frame:
    """The rows and columns that an expression is computed over."""

    shape: tuple[int, ...]
    axes: tuple[Where | None, ...]


def origins(*places: Where) -> tuple[Label, ...]:
    """Labels for the Copies that loaded the positions."""
    seen: Mapping[Span, Label] = {
        p.copy.span: Label(p.copy.span, f"`{p.tensor}`: {p}") for p in places
    }
    return tuple(seen.values())
