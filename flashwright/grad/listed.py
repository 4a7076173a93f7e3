"""A loop over blocks of keys that tensors list, for each block of queries:

    let r = floor(block_idx * BM / RowBlock)
    for i = 0:Counts[.., r] * (KeyBlock / BN)
      let tile = Blocks[.., r, floor(i * BN / KeyBlock)] * (KeyBlock / BN) + i % (KeyBlock / BN)

A backward pass walks the same lists the other way round. It takes them as inputs (`CountsOfKeys`,
`BlocksOfKeys`): for each block of keys, how many blocks of queries visit it, and which.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashwright.grad.algebra import ZERO, Product, add, call, div, mul
from flashwright.lang import nodes as tl

OF_KEYS = "OfKeys"
"""Ends the name of a list that says for blocks of keys what the forward's says for queries."""


@dataclass(frozen=True)
class Listed:
    """The lists of a loop. `place` has the indices of a block of queries in them, that block at
    position `at`; `rows` and `columns` are the queries and the keys of a block."""

    counts: str
    blocks: str
    place: tuple[tl.Expr, ...]
    at: int
    rows: tl.Expr
    columns: tl.Expr
    size: tl.Expr
    """The keys of a tile."""
    prefixes: list[str] = field(default_factory=list, compare=False)
    """The tensors that say how many blocks at the begin of a list have something in common."""

    def prefix(self, condition: tl.Binary, var: tl.Name, end: tl.Expr) -> tl.Name | None:
        """A name for `i < Full[.., r] * (KeyBlock / BN)`, given the end spelt out; None for other
        conditions. The owner of the keys says what it means in its loop."""
        found = _in_tiles(end, self.columns, self.size)
        if condition != tl.Binary("<", var, condition.right) or found is None:
            return None
        if found.args != self.place:
            return None
        if found.tensor.id not in self.prefixes:
            self.prefixes.append(found.tensor.id)
        return in_prefix(found.tensor.id)

    def index(self, tensor: str, block: tl.Expr, *more: tl.Expr) -> tl.Expr:
        """An element of the lists for a block of keys."""
        place = (*self.place[: self.at], block, *self.place[self.at + 1 :], *more)
        return tl.Index(tl.Name(tensor + OF_KEYS), place)

    def query_tile(self, block: tl.Expr, step: tl.Expr, size: tl.Expr) -> tl.Expr:
        """The tile of queries of a step, `size` of them each."""
        here = self.index(self.blocks, block, call("floor", div(mul(step, size), self.rows)))
        tiles = div(self.rows, size)
        return add(mul(here, tiles), tl.Binary("%", step, tiles))

    def declared(self, name: str, counts: tl.Allocate, blocks: tl.Allocate) -> tl.Allocate:
        """A list for blocks of keys, as its like for blocks of queries is declared."""
        rows, columns = counts.shape[self.at], blocks.shape[-1]
        shape = list(counts.shape)
        shape[self.at] = replace(rows, size=columns.size)
        if name == self.blocks:
            shape.append(replace(columns, size=rows.size))
        return tl.Allocate(tl.Name(name + OF_KEYS), "global", tuple(shape), counts.dtype)


def in_prefix(tensor: str) -> tl.Name:
    """The name of the condition that a block is among the first ones that a tensor counts."""
    return tl.Name(f"@{tensor}")


def find_listed(
    tile: tl.Expr, loop: tl.For, high: tl.Expr, query: tl.Name, size: tl.Expr
) -> Listed | None:
    """The lists, if a loop's tile of keys (spelt out, as the loop's end) comes from them; `size` is
    the number of queries of the forward's tile."""
    match tile:
        case tl.Binary("+", first, within) if loop.low == ZERO:
            for keys in filter(None, (_block_of(e, loop.var) for e in tl.expressions(first))):
                if within == tl.Binary("%", loop.var, div(keys[1], keys[0])):
                    blocks, counts = (_in_tiles(e, keys[1], keys[0]) for e in (first, high))
                    return _lists(blocks, counts, keys, query, size)
    return None


def _lists(
    blocks: tl.Index | None,
    counts: tl.Index | None,
    keys: tuple[tl.Expr, tl.Expr],
    query: tl.Name,
    size: tl.Expr,
) -> Listed | None:
    """The lists, if both tensors are read at the same block of queries."""
    if blocks is None or counts is None or blocks.args[:-1] != counts.args:
        return None
    place, (tile, columns) = counts.args, keys
    for at, index in enumerate(place):
        others = (*place[:at], *place[at + 1 :])
        rows = _block_of(index, query)
        if (
            rows is not None
            and rows[0] == size
            and not any(query in tl.value_names(e) for e in others)
        ):
            return Listed(counts.tensor.id, blocks.tensor.id, place, at, rows[1], columns, tile)
    return None


def _in_tiles(expr: tl.Expr, block: tl.Expr, tile: tl.Expr) -> tl.Index | None:
    """The element of a tensor, of `Tensor[..] * (block / tile)`."""
    found = Product.of(expr)
    match found.tops:
        case (tl.Index() as element, other) if other == block and found.bottoms == (tile,):
            return element
    return None


def _block_of(expr: tl.Expr, var: tl.Name) -> tuple[tl.Expr, tl.Expr] | None:
    """The sizes of a tile and of a block, of `floor(var * tile / block)`."""
    match expr:
        case tl.Call(tl.Name("floor"), (tl.Binary("/", tl.Binary("*", tl.Name(id), size), block),)):
            return (size, block) if id == var.id else None
    return None
