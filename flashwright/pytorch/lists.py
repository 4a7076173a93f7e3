"""Lists of blocks the other way round: which blocks of queries visit each block of keys.

A backward pass that walks lists (grad/listed.py) has inputs `CountsOfKeys`, `BlocksOfKeys`: they
say for blocks of keys what the forward's `Counts` and `Blocks` say for blocks of queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flashwright.grad.listed import OF_KEYS
from flashwright.pytorch.made_once import MadeOnce

_END = OF_KEYS.lower()


def of_keys(names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a backward that are lists for blocks of keys, made from the forward's."""
    lists = [name.removesuffix(_END) for name in names if name.endswith(_END)]
    if not lists:
        return {}
    tensors = [given[name] for name in lists]
    blocks = max(tensors, key=lambda t: t.dim())
    counts = [t for t in tensors if t is not blocks]
    found = _TURNED(blocks, counts)
    ordered = iter(found[1:])
    return {
        name + _END: found[0] if t is blocks else next(ordered)
        for name, t in zip(lists, tensors, strict=True)
    }


def _turn(blocks: Any, *counts: Any) -> list[Any]:
    """The blocks and the counts for blocks of keys. Each count is of blocks at the begin of a list:
    what more counts include comes first."""
    tables = [dense(count, blocks) for count in counts]
    order = torch.stack(tables).sum(0).sort(dim=-2, descending=True, stable=True).indices
    return [
        order.transpose(-1, -2).int().contiguous(),
        *(table.sum(-2, dtype=torch.int32) for table in tables),
    ]


_TURNED = MadeOnce(_turn)
"""All layers of a model have the same lists."""


def dense(counts: Any, blocks: Any) -> Any:
    """Lists of blocks as a table: 1 for the first `counts` of each list, 0 for the others."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
    table = torch.zeros(
        (*blocks.shape[:-1], blocks.shape[-1] + 1), dtype=torch.int32, device=blocks.device
    )
    places = torch.where(listed, blocks, blocks.shape[-1]).long()
    table.scatter_(-1, places, 1)
    return table[..., :-1].contiguous()
