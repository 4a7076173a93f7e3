"""Block masks: which blocks of keys each block of queries visits.

A BlockMask has a function and lists of blocks. Blocks that are in no list are skipped, and in full
blocks the function is not asked. The lists usually follow from the function. If they do not, they
are part of the mask. A kernel visits the listed blocks if they are clearly fewer than those within
the bounds of the mask's own text (packed documents, a window with sinks), and the keys within these
bounds otherwise (causal, a sliding window).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from flashwright.author.builtin.mods import BlockLists, placed
from flashwright.flex.capture import Captured, capture
from flashwright.flex.lists import LISTS, Extent, block_table, disagreement
from flashwright.lang.nodes import Let
from flashwright.lang.parse import parse

Function = Callable[..., Any]

ROWS, KEYS = 64, 32
"""Listed blocks are multiples of these: the smallest tile."""
FEWER = 0.8
"""Lists are used if they visit at most this part of the blocks within the text's bounds."""


@dataclass(frozen=True)
class Blocked:
    """A BlockMask as our kernels take it."""

    mask: Function
    """Whether a key is visible, lists included."""
    counts: Any
    """How many blocks are visited (batch or 1, heads or 1, blocks of queries)."""
    full: Any
    """How many of them are full: these need no mask."""
    blocks: Any
    """Which ones: the full ones, the masked ones, then the others (.., blocks of keys)."""
    size: tuple[int, int]
    """The queries and the keys of a block."""
    dims: Mapping[str, int]
    """The sizes of the call that it was first given to."""
    function: Function
    """The BlockMask's own, which holds in the blocks that are masked."""

    @cached_property
    def used(self) -> BlockLists | None:
        """The lists, if a kernel is to use them. Decided once, which waits for the GPU.

        Raises NotCaptured if the function cannot become TL.
        """
        listed, full, bounded = self.visited
        costly = any(ways != ("scalar",) for ways in placed(self.captured.mods).ways.values())
        saves = listed <= FEWER * bounded or (costly and full >= (1 - FEWER) * listed)
        if not self.whole_tiles or not saves:
            return None
        several = [length > 1 for length in self.counts.shape[:2]]
        return BlockLists(*self.size, batched=several[0], per_head=several[1], full=full > 0)

    @cached_property
    def captured(self) -> Captured:
        """The mask as TL."""
        return capture(None, self.mask, self.dims, self.counts.device)

    @property
    def whole_tiles(self) -> bool:
        """Whether a block of the lists is a whole number of tiles."""
        return not (self.size[0] % ROWS or self.size[1] % KEYS)

    @property
    def decision(self) -> str:
        """Which blocks a kernel visits, and why."""
        if not self.whole_tiles:
            return (
                "its lists are not used, as blocks of {} x {} are not whole tiles; BLOCK_SIZE=128 "
                "lets the kernel skip".format(*self.size)
            )
        listed, full, bounded = self.visited
        chosen = "in its lists" if self.used is not None else "within the mask's own bounds"
        counts = (
            f"{listed:.1f} are listed, {full:.1f} of them full, {bounded:.1f} are within bounds"
        )
        return f"the kernel visits the blocks {chosen} (for a block of queries {counts})"

    @cached_property
    def visited(self) -> tuple[float, float, float]:
        """How many blocks of keys a block of queries visits on average: those in the lists, the
        full ones of them, and those within the bounds of the mask's text."""
        listed, full = (float(counts.float().mean()) for counts in (self.counts, self.full))
        return listed, full, self._bounded()

    def _bounded(self) -> float:
        """How many blocks of keys the bounds of the mask's text leave on average."""
        made, columns, end = placed(self.captured.mods), self.size[1], self.dims["kv_len"]
        values: dict[str, Any] = {**self.captured.own_dims, **self.dims, "BM": self.size[0]}
        sizes = (self.dims["batch"], self.dims["heads"], self.counts.shape[2])
        places = np.ogrid[tuple(slice(n) for n in sizes)]
        values |= zip(("batch_idx", "head_idx", "block_idx"), places, strict=True)
        ends = f"let Low = {made.keys.low or 0}\nlet High = {made.keys.high or 'kv_len'}"
        for stmt in (*made.before_loop, *parse(ends).body):
            if isinstance(stmt, Let):
                values[stmt.name.id] = self.captured.evaluate(stmt.value, values)
        first = np.floor(np.maximum(values["Low"], 0) / columns)
        blocks = np.ceil(np.minimum(values["High"], end) / columns) - first
        return float(np.broadcast_to(np.maximum(blocks, 0), sizes).mean())


_KNOWN: weakref.WeakKeyDictionary[Any, Blocked] = weakref.WeakKeyDictionary()


def blocked(block_mask: Any, query: Any, key: Any) -> Blocked:
    """A BlockMask for a call. Raises TypeError or ValueError for another one."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise TypeError(f"block_mask must be a BlockMask (create_block_mask), not {kind}")
    lengths = tuple(block_mask.seq_lengths)
    if lengths != (query.shape[2], key.shape[2]):
        told = f"{query.shape[2]} x {key.shape[2]}"
        raise ValueError(
            f"block_mask is for {lengths[0]} x {lengths[1]} tokens, the call has {told}"
        )
    sizes = (*query.shape[:2], *lengths)
    for name, own, size in zip(("batch", "heads"), block_mask.shape[:2], sizes, strict=False):
        if own not in (1, size):
            raise ValueError(f"block_mask is for {name} = {own}, the call has {size}")
    if block_mask not in _KNOWN:
        dims = dict(zip(("batch", "heads", "q_len", "kv_len"), sizes, strict=True))
        _KNOWN[block_mask] = _blocked(block_mask, dims)
    return _KNOWN[block_mask]


def _blocked(block_mask: Any, dims: Mapping[str, int]) -> Blocked:
    rows, columns = block_mask.BLOCK_SIZE
    lists = {name: getattr(block_mask, name) for name in LISTS}
    table = block_table(**lists)
    order = torch.sort(table, dim=-1, stable=True, descending=True).indices
    counts, full = ((table >= kind).sum(dim=-1, dtype=torch.int32) for kind in (1, 2))
    mask = function = block_mask.mask_mod
    several = (table.shape[0] > 1, table.shape[1] > 1)
    extent = Extent(dims["q_len"], dims["kv_len"], (rows, columns), several)
    if disagreement(lists, mask, extent):
        mask = _with_table(mask, table, rows, columns)
    lists_of = (counts.contiguous(), full.contiguous(), order.int().contiguous())
    return Blocked(mask, *lists_of, (rows, columns), dims, function)


def _with_table(mask_mod: Function, table: Any, rows: int, columns: int) -> Function:
    """The mask where the lists say something else than the function."""
    several = tuple(size > 1 for size in table.shape[:2])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        here = table[b if several[0] else 0, h if several[1] else 0, q // rows, kv // columns]
        return (here == 2) | ((here == 1) & mask_mod(b, h, q, kv))

    return mask
