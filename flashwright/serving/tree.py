"""Trees of queries, as speculative decoding has them: a mask over the newest keys."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.author.builtin.mods import Mods, Operand
from flashwright.lang.nodes import Compute
from flashwright.lang.parse import parse

_TEXT = (
    "Compute Mask S where kv_idx < kv_len - q_len or "
    "Tree[batch_idx, q_idx, kv_idx - (kv_len - q_len)] != 0"
)
ROWS = 64
"""The most rows of a kernel's tile: the mask of more takes registers that wide heads lack."""
BITS = torch.int64
"""The type of masks that have a bit for each key."""


def mods() -> Mods:
    """The mask as a kernel has it. It reads the bytes of a bool tensor as e4m3: 0, or another
    number."""
    (statement,) = parse(_TEXT).body
    assert isinstance(statement, Compute)
    operand = Operand("Tree", ("batch", "q_len", "q_len"), "e4m3")
    return Mods(mask=statement.where, operands=(operand,))


def as_bools(mask: Any, queries: Any) -> Any:
    """A mask as bool (batch, tokens, tokens), from such a one, from uint8, or from int64 (batch,
    tokens) with a bit for each key. Raises TypeError or ValueError for others."""
    batch, tokens = queries.shape[:2]
    if mask.device != queries.device:
        raise ValueError(f"tree_mask is on {mask.device}, q on {queries.device}")
    wanted = (batch, tokens) if mask.dtype == BITS else (batch, tokens, tokens)
    if mask.dtype not in (torch.bool, torch.uint8, BITS):
        text = "tree_mask must be bool or uint8 (batch, tokens, tokens), or int64 (batch, tokens)"
        raise TypeError(f"{text}; it is {mask.dtype}")
    if tuple(mask.shape) != wanted or (mask.dtype == BITS and tokens > 64):
        text = f"tree_mask in {mask.dtype} must have the shape {wanted}"
        limit = ", for at most 64 tokens" if mask.dtype == BITS else ""
        raise ValueError(f"{text}{limit}; it has {tuple(mask.shape)}")
    if mask.dtype == BITS:
        places = torch.arange(tokens, device=mask.device)
        mask = (mask[:, :, None] >> places) & 1
    return mask if mask.dtype == torch.bool else mask != 0


def seen(tree: Any, keys: int) -> Any:
    """Which of all keys each query of a sequence sees, from its tree, (tokens, tokens)."""
    tokens = tree.shape[0]
    before = tree.new_ones((tokens, max(keys - tokens, 0)))
    return torch.cat((before, tree[:, max(tokens - keys, 0) :]), dim=1)
