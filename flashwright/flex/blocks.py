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
    table = _table(block_mask)
    visited = table > 0
    order = torch.sort((~visited).to(torch.int8), dim=-1, stable=True).indices
    counts = visited.sum(dim=-1, dtype=torch.int32)
    mask: Function = block_mask.mask_mod
    if not torch.equal(table, _table_of(mask, table, lengths, (rows, columns))):
        mask = _with_table(mask, table, rows, columns)
    return Blocked(mask, counts.contiguous(), order.int().contiguous(), (rows, columns))


def _with_table(mask_mod: Function, table: Any, rows: int, columns: int) -> Function:
    """The mask where the lists say something else than the function."""
    several = tuple(size > 1 for size in table.shape[:2])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        here = table[b if several[0] else 0, h if several[1] else 0, q // rows, kv // columns]
        return (here == 2) | ((here == 1) & mask_mod(b, h, q, kv))

    return mask


def _table(block_mask: Any) -> Any:
    """For each pair of blocks: 0 skipped, 1 masked by the function, 2 fully visible."""
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return partial
    full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return torch.where(full == 1, 2, partial)


def _dense(counts: Any, indices: Any) -> Any:
    """Lists of blocks as a table of 0 and 1."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros(
        (*indices.shape[:-1], indices.shape[-1] + 1), dtype=torch.int32, device=indices.device
    )
    places = torch.where(listed, indices, indices.shape[-1]).long()
    table.scatter_(-1, places, 1)
    return table[..., :-1].contiguous()


def _table_of(mask_mod: Function, like: Any, lengths: Any, size: tuple[int, int]) -> Any:
    """The table that the mask function gives by itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(
        mask_mod, *like.shape[:2], *lengths, device=like.device, BLOCK_SIZE=size
    )
    return _table(made)
