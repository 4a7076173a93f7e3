"""Lists of blocks the other way round: which blocks of queries visit each block of keys.

A backward pass that walks lists (grad/listed.py) has inputs `CountsOfKeys`, `BlocksOfKeys`: they
say for blocks of keys what the forward's `Counts` and `Blocks` say for blocks of queries.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashwright.grad.listed import OF_KEYS

_END = OF_KEYS.lower()
_KNOWN: Any = WeakTensorKeyDictionary()
"""By the tensor of blocks: the counts and versions of lists that were turned before, and what they
became. All layers of a model have the same ones."""


def of_keys(names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a backward that are lists for blocks of keys, made from the forward's."""
    lists = [name.removesuffix(_END) for name in names if name.endswith(_END)]
    if not lists:
        return {}
    tensors = [given[name] for name in lists]
    blocks = max(tensors, key=lambda t: t.dim())
    counts = [t for t in tensors if t is not blocks]
    found = _turned(blocks, counts)
    ordered = iter(found[1:])
    return {
        name + _END: found[0] if t is blocks else next(ordered)
        for name, t in zip(lists, tensors, strict=True)
    }


def _turned(blocks: Any, counts: list[Any]) -> list[Any]:
    """The blocks and the counts for blocks of keys, made once for the same tensors."""
    if isinstance(blocks, FakeTensor):
        return _turn(blocks, counts)
    versions = [t._version for t in (blocks, *counts)]
    known = _KNOWN.get(blocks)
    same = known is not None and all(map(operator.is_, known[0], counts)) and known[1] == versions
    if not same:
        known = _KNOWN[blocks] = (counts, versions, _turn(blocks, counts))
    made: list[Any] = known[2]
    return made


def _turn(blocks: Any, counts: list[Any]) -> list[Any]:
    """The same without a look at those made before. Each count is of blocks at the begin of a list:
    what more counts include comes first."""
    tables = [dense(count, blocks) for count in counts]
    order = torch.stack(tables).sum(0).sort(dim=-2, descending=True, stable=True).indices
    return [
        order.transpose(-1, -2).int().contiguous(),
        *(table.sum(-2, dtype=torch.int32) for table in tables),
    ]


def dense(counts: Any, blocks: Any) -> Any:
    """Lists of blocks as a table: 1 for the first `counts` of each list, 0 for the others."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
    table = torch.zeros(
        (*blocks.shape[:-1], blocks.shape[-1] + 1), dtype=torch.int32, device=blocks.device
    )
    places = torch.where(listed, blocks, blocks.shape[-1]).long()
    table.scatter_(-1, places, 1)
    return table[..., :-1].contiguous()
