"""Which blocks of keys a query reads, by how much its group attends to their means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_ROOM = 1 << 27
"""Weights that are held at once: of each head by PyTorch, of each group by a kernel."""


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


@dataclass(frozen=True)
class Choice:
    """What is looked at to choose blocks: queries (batch, queries, heads, dim), the last of `keys`
    positions; the means of whole blocks; and (batch, heads, queries) the log-sum-exp of each head
    over the means of those that lie before the query, or end at it."""

    q: Any
    means: Any
    lse: Any
    keys: int
    block: int
    scale: float

    @cached_property
    def place(self) -> Any:
        """Where the queries stand."""
        return positions(self.q.shape[1], self.keys, self.q.device)

    @property
    def own(self) -> Any:
        """The block in which each query stands."""
        return self.place // self.block

    @property
    def count(self) -> int:
        """How many blocks there are, with the last one that may not be whole."""
        return -(-self.keys // self.block)

    def blocks(self, counts: Any, weigh: Weigh, pick: Pick) -> Any:
        """The blocks that each query reads, int32 (batch, queries, kv heads, most of `counts`), -1
        where there is none: its own, the first and the one before its own, then those to whose
        means the heads of its group attend most together, all before its own."""
        batch, queries, heads, _ = self.q.shape
        kv_heads, most = self.means.shape[2], most_of(counts)
        held = batch * (heads if self.q.is_cpu else kv_heads) * self.count
        step = max(1, _ROOM // max(1, held))
        parts = [slice(n, min(n + step, queries)) for n in range(0, queries, step)]
        found = [pick(weigh(self, rows), self.own[rows], most) for rows in parts]
        none = self.q.new_empty(batch, kv_heads, 0, most)
        return limited(torch.cat(found or [none], dim=2), counts)


def most_of(counts: Any) -> int:
    """The most blocks that a query reads."""
    if not isinstance(counts, torch.Tensor):
        return int(counts)
    return int(counts.max()) if counts.numel() else 0


def limited(found: Any, counts: Any) -> Any:
    """The first `counts` of the blocks that were found, with kv heads behind queries."""
    found = found.transpose(1, 2).int()
    if not isinstance(counts, torch.Tensor):
        return found
    beyond = torch.arange(found.shape[3], device=found.device) >= counts[..., None]
    return found.masked_fill(beyond, -1)


Weigh = Callable[[Choice, slice], Any]
"""How much the groups of some queries attend to each block: (batch, kv heads, queries, blocks). A
block that ends behind the query has 0. There may be more columns than blocks."""

Pick = Callable[[Any, Any, int], Any]
"""The blocks that some queries read, from their weights, the block in which each query stands, and
how many are wanted: (batch, kv heads, queries, blocks), -1 where there is none."""


def weights(choice: Choice, rows: slice) -> Any:
    """A Weigh by PyTorch, which takes one step for each head and block."""
    q, means, lse = choice.q[:, rows], choice.means, choice.lse[:, :, rows]
    kv_heads, missing = means.shape[2], choice.count - means.shape[1]
    grouped = q.unflatten(2, (kv_heads, -1)).movedim(1, 3)  # (batch, kv heads, group, rows, dim)
    scores = exact(grouped) @ exact(means.transpose(1, 2)[:, :, None]).mT * choice.scale
    logs = lse.unflatten(1, (kv_heads, -1))[..., None]
    sums = torch.exp(scores - torch.where(logs == -torch.inf, 0.0, logs)).sum(2)
    sums = torch.nn.functional.pad(sums, (0, missing))
    number, place = torch.arange(choice.count, device=q.device), choice.place[rows, None] + 1
    return sums.masked_fill(number >= place // choice.block, 0.0)


def heaviest(weights: Any, own: Any, most: int) -> Any:
    """A Pick by PyTorch."""
    number = torch.arange(weights.shape[3], device=own.device)
    first, before = torch.where(own > 0, 0, -1), torch.where(own > 1, own - 1, -1)
    fixed = torch.stack((own, first, before), dim=-1).expand(*weights.shape[:3], 3)
    left = weights.masked_fill((number == 0) | (number >= own[:, None] - 1), -1.0)
    best, taken = left.topk(min(max(most - 3, 0), weights.shape[3]), dim=-1)
    found = torch.cat((fixed, torch.where(best < 0, -1, taken)), dim=-1)
    return torch.nn.functional.pad(found, (0, max(0, most - found.shape[3])), value=-1)[..., :most]
