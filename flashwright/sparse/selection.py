"""Which blocks of keys a query reads, by how much its group attends to their means."""

from __future__ import annotations

from typing import Any

import torch

_ROOM = 1 << 26
"""Scores that are held at once."""


def in_blocks(x: Any, block: int) -> Any:
    """The whole blocks of keys or values: (batch, blocks, keys of a block, heads, dim)."""
    count = x.shape[1] // block
    return x[:, : count * block].unflatten(1, (count, block))


def means(k: Any, v: Any) -> tuple[Any, Any]:
    """The means of blocks of keys and values: (batch, blocks, heads, dim)."""
    found_k, found_v = (exact(x).mean(2).to(x.dtype) for x in (k, v))
    return found_k, found_v


def exact(x: Any) -> Any:
    """Numbers in fp32, or in fp64 if they are."""
    return x if x.dtype == torch.float64 else x.float()


def positions(queries: int, keys: int, device: Any) -> Any:
    """Where the queries stand: the last one at the last key."""
    return torch.arange(queries, device=device) + keys - queries


def chosen(q: Any, means: Any, lse: Any, keys: int, counts: Any, block: int, scale: float) -> Any:
    """The blocks that each query reads, int32 (batch, tokens, kv heads, most of `counts`), -1 where
    there is none: its own, the first and the one before its own, then those to whose means the
    heads of its group attend most together, all before its own.

    `means` are those of whole blocks, `lse` (batch, heads, tokens) is the log-sum-exp of each head
    over those that lie before the query, or end at it.
    """
    batch, queries, heads, _ = q.shape
    kv_heads, blocks = means.shape[2], -(-keys // block)
    most = counts if isinstance(counts, int) else int(counts.max())
    found = q.new_full((batch, queries, kv_heads, most), -1, dtype=torch.int32)
    step = max(1, _ROOM // max(1, batch * heads * blocks))
    own = positions(queries, keys, q.device) // block
    for first in range(0, queries, step):
        rows = slice(first, first + step)
        part = _importance(q[:, rows], means, lse[:, :, rows], own[rows], blocks, scale)
        best, taken = part.topk(min(most, blocks), dim=-1)
        found[:, rows, :, : taken.shape[-1]] = torch.where(best < 0, -1, taken).int()
    if isinstance(counts, torch.Tensor):
        beyond = torch.arange(most, device=q.device) >= counts[..., None]
        found.masked_fill_(beyond, -1)
    return found


def _importance(q: Any, means: Any, lse: Any, own: Any, blocks: int, scale: float) -> Any:
    """How much each group attends to the mean of each block, (batch, tokens, kv heads, blocks); -1
    for blocks behind the query's, and more than any sum for those that are always read."""
    kv_heads = means.shape[2]
    grouped = q.unflatten(2, (kv_heads, -1)).movedim(1, 3)  # (batch, kv heads, group, tokens, dim)
    group, keys = grouped.shape[2], means.transpose(1, 2)[:, :, None]
    if q.is_cpu:
        grouped, keys = exact(grouped), exact(keys)
    scores = grouped @ keys.mT
    logs = lse.unflatten(1, (kv_heads, group))[..., None]
    weights = torch.exp(exact(scores) * scale - torch.where(logs == -torch.inf, 0.0, logs))
    sums = torch.nn.functional.pad(weights.sum(2), (0, blocks - means.shape[1]))
    number = torch.arange(blocks, device=q.device)
    before = own[:, None] - number
    sums = torch.where(before < 0, -1.0, torch.where(before == 0, 4.0 * group, sums))
    always = torch.where(number == 0, 3.0 * group, 2.0 * group)
    kept = (before > 0) & ((number == 0) | (before == 1))
    return torch.where(kept, always, sums).transpose(1, 2)
