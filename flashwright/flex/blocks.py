"""Block masks: which blocks of keys each block of queries visits.

A BlockMask has a function and lists of blocks. Blocks that are in no list are skipped, and in full
blocks the function is not asked. The lists usually follow from the function. If they do not, they
are part of the mask. A kernel visits the listed blocks only, if the mask's own text does not bound
the keys (packed documents), and the keys within its bounds otherwise (a sliding window).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashwright.author.builtin.mods import BlockLists, Mods, placed
from flashwright.flex.lists import LISTS, Extent, block_table, disagreement

Function = Callable[..., Any]

ROWS, KEYS = 64, 32
"""Listed blocks are multiples of these: the smallest tile."""


@dataclass(frozen=True)
class Blocked:
    """A BlockMask as our kernels take it."""

    mask: Function
    """Whether a key is visible, lists included."""
    counts: Any
    """How many blocks are visited (batch or 1, heads or 1, blocks of queries)."""
    blocks: Any
    """Which ones, ascending, then the others (.., blocks of keys)."""
    size: tuple[int, int]
    """The queries and the keys of a block."""

    def lists_for(self, mods: Mods, tell: Callable[[str], None]) -> BlockLists | None:
        """The lists, if a kernel with these mods is to use them."""
        if not needs_lists(mods):
            return None
        if self.size[0] % ROWS or self.size[1] % KEYS:
            tell(
                "block_mask: every block is visited, as blocks of {} x {} are not whole tiles; "
                "BLOCK_SIZE=128 lets the kernel skip".format(*self.size)
            )
            return None
        several = [length > 1 for length in self.counts.shape[:2]]
        return BlockLists(*self.size, batched=several[0], per_head=several[1])


def needs_lists(mods: Mods) -> bool:
    """Whether the mask's text says too little of the keys: it reads tensors, or has no bound."""
    made = placed(Mods(None, mods.mask, mods.operands))
    unbounded = made.keys.low is None and made.keys.high is None
    return unbounded or any(ways != ("scalar",) for ways in made.ways.values())


_KNOWN: weakref.WeakKeyDictionary[Any, Blocked] = weakref.WeakKeyDictionary()


def blocked(block_mask: Any, query: Any, key: Any) -> Blocked:
    """A BlockMask for a call. Raises ValueError if it is for other lengths."""
    lengths = tuple(block_mask.seq_lengths)
    if lengths != (query.shape[2], key.shape[2]):
        told = f"{query.shape[2]} x {key.shape[2]}"
        raise ValueError(
            f"block_mask is for {lengths[0]} x {lengths[1]} tokens, the call has {told}"
        )
    if block_mask not in _KNOWN:
        _KNOWN[block_mask] = _blocked(block_mask, lengths)
    return _KNOWN[block_mask]


def _blocked(block_mask: Any, lengths: tuple[int, ...]) -> Blocked:
    rows, columns = block_mask.BLOCK_SIZE
    lists = {name: getattr(block_mask, name) for name in LISTS}
    table = block_table(**lists)
    visited = table > 0
    order = torch.sort((~visited).to(torch.int8), dim=-1, stable=True).indices
    counts = visited.sum(dim=-1, dtype=torch.int32)
    mask: Function = block_mask.mask_mod
    several = (table.shape[0] > 1, table.shape[1] > 1)
    extent = Extent(lengths[0], lengths[1], (rows, columns), several)
    if disagreement(lists, mask, extent):
        mask = _with_table(mask, table, rows, columns)
    return Blocked(mask, counts.contiguous(), order.int().contiguous(), (rows, columns))


def _with_table(mask_mod: Function, table: Any, rows: int, columns: int) -> Function:
    """The mask where the lists say something else than the function."""
    several = tuple(size > 1 for size in table.shape[:2])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        here = table[b if several[0] else 0, h if several[1] else 0, q // rows, kv // columns]
        return (here == 2) | ((here == 1) & mask_mod(b, h, q, kv))

    return mask
