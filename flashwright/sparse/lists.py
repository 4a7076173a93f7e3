"""The blocks that queries name, as kernels read them: merged over neighbouring queries, and for
each block the queries that name it. A block of keys is a tile of a kernel here, or several; a tile
is told by the place of its first key."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

Lists = dict[str, Any]
"""Tensors by the names that kernels have for them."""

_NONE = 2**31 - 1


def tiles_of(blocks: Any, block: int, size: int, place: Any, first: Any) -> Any:
    """The tiles of `size` keys that queries read, (batch, kv heads, queries, slots), rising along
    the slots; -1 where there is none. `blocks` are (batch, queries, kv heads, slots), of `block`
    keys, counted from `first` on; queries stand at `place`, and tiles behind it are left out."""
    parts, begins = block // size, _first_keys(blocks, block)
    if parts > 1:
        inside = torch.arange(0, block, size, device=begins.device, dtype=torch.int32)
        begins = (begins[..., None] + inside).flatten(3)
    first, place = (x.int()[:, None] for x in (first, place))
    seen = (begins >= 0) & (begins <= place - first)
    return torch.where(seen, begins + first, -1).sort(dim=3).values


def _first_keys(blocks: Any, block: int) -> Any:
    """Where blocks begin; -1 and what is far behind all keys stay so."""
    return blocks.clamp(-1, _NONE // block - 1).transpose(1, 2).int().contiguous() * block


def merged(tiles: Any, queries: int) -> Lists:
    """What each group of neighbouring queries reads: `count` tiles, listed once in `tile`, and in
    `named` a bit for each query that names it. A tile that a query names twice is listed twice."""
    slots, many = tiles.shape[3], -(-tiles.shape[2] // queries)
    tiles = pad(tiles, (0, 0, 0, many * queries - tiles.shape[2]), value=-1)
    code = torch.where(tiles < 0, _NONE, tiles * slots + _times_before(tiles))
    code, order = code.unflatten(2, (many, queries)).flatten(3).sort(dim=3)
    there = code != _NONE
    new = there & (code != pad(code, (1, 0), value=-1)[..., :-1])
    width = code.shape[3]  # one place more is for what is not there
    slot = torch.where(there, new.cumsum(3) - 1, width)
    room = (*code.shape[:3], width + 1)
    bits = torch.bitwise_left_shift(1, order // max(slots, 1)).int()
    return {
        "count": new.sum(3, dtype=torch.int32),
        "tile": code.new_zeros(room).scatter_(3, slot, code // max(slots, 1)),
        "named": code.new_zeros(room).scatter_add_(3, slot, bits),
    }


def _times_before(tiles: Any) -> Any:
    """How often a query has named a tile in the slots before, which rise."""
    slot = torch.arange(tiles.shape[3], device=tiles.device, dtype=torch.int32)
    return slot - torch.searchsorted(tiles, tiles, out_int32=True)


def by_tile(tiles: Any, every: Any, most: int | None) -> Lists:
    """The queries that name each tile of `every`, which rise, one tile after the other in
    `queries`. An item is one tile, at `begin`, and at most so many of its queries: `size` from
    `first` on. Items at the end may have none. With None each tile is one item."""
    batch, heads, tokens, slots = tiles.shape
    most = tokens * slots + 1 if most is None else most
    code = torch.where(tiles < 0, _NONE, tiles).flatten(2).contiguous()
    code, order = code.sort(dim=2, stable=True)
    wanted = every.int().expand(batch, heads, -1).contiguous()
    bounds, past = (torch.searchsorted(code, wanted, right=right) for right in (False, True))
    named = past - bounds
    parts = (named + most - 1) // most
    ends, count = parts.cumsum(2), every.shape[0]
    item = torch.arange(count + tokens * slots // most, device=tiles.device)
    item = item.expand(batch, heads, -1).contiguous()
    tile = torch.searchsorted(ends, item, right=True).clamp(max=count - 1)
    before = (item - (ends - parts).gather(2, tile)) * most
    found = {
        "queries": order // max(slots, 1),
        "begin": every[tile],
        "first": bounds.gather(2, tile) + before,
        "size": (named.gather(2, tile) - before).clamp(0, most),
    }
    return {name: x.int() for name, x in found.items()}
