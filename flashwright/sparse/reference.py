"""The branches of native sparse attention in PyTorch: the result on CPU tensors, and what the first
outputs of new kernels are compared with. Every step is differentiable."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.pytorch.reference import softmax
from flashwright.sparse.selection import exact

_ROOM = 1 << 24
"""Elements of keys that are held at once."""


def compressed(q: Any, means_k: Any, means_v: Any, block: int, scale: float, place: Any) -> Any:
    """O, (batch, tokens, heads, dim), and LSE, (batch, heads, tokens), over the means of those
    blocks that end at the query or before it. Queries stand at `place`."""
    q, k, v = (x.transpose(1, 2) for x in (exact(q), *_spread(q, means_k, means_v)))
    ends = torch.arange(k.shape[2], device=q.device) * block + block - 1
    seen = ends <= place[:, None]
    weights, lse = softmax(torch.where(seen, q @ k.mT * scale, -torch.inf))
    return (weights @ v).transpose(1, 2), lse


def selected(
    q: Any, k: Any, v: Any, blocks: Any, block: int, scale: float, place: Any, first: Any
) -> Any:
    """O, (batch, tokens, heads, dim), over the keys of each query's `blocks`, (batch, tokens, kv
    heads, blocks), up to its own. Queries stand at `place`, and blocks are counted from `first` on;
    those that are named twice count twice, those that are negative or behind the query not at
    all."""
    each = k.shape[0] * k.shape[2] * blocks.shape[3] * block * (k.shape[3] + v.shape[3])
    step = max(1, _ROOM // max(1, each))
    parts = [
        _selected(q[:, rows], k, v, blocks[:, rows].long(), block, scale, place[rows], first[rows])
        for rows in (slice(n, n + step) for n in range(0, q.shape[1], step))
    ]
    return torch.cat(parts, dim=1) if parts else q.new_zeros((*q.shape[:3], v.shape[3]))


def _selected(
    q: Any, k: Any, v: Any, blocks: Any, block: int, scale: float, place: Any, first: Any
) -> Any:
    inside = torch.arange(block, device=q.device)
    begins = torch.where(blocks < 0, -block - k.shape[1], blocks * block) + first[:, None, None]
    keys = (begins[..., None] + inside).flatten(3)  # (batch, tokens, kv heads, keys)
    seen = (keys >= 0) & (keys <= place[:, None, None])
    where = torch.where(seen, keys, 0)
    batch = torch.arange(k.shape[0], device=q.device)[:, None, None, None]
    head = torch.arange(k.shape[2], device=q.device)[:, None]
    picked_k, picked_v = (exact(x)[batch, where, head] for x in (k, v))
    scores = exact(q).unflatten(2, (k.shape[2], -1)) @ picked_k.mT * scale
    scores = torch.where(seen[..., None, :], scores, -torch.inf)
    return (softmax(scores)[0] @ picked_v).flatten(2, 3)


def _spread(q: Any, *tensors: Any) -> list[Any]:
    """Keys and values with a head for each query head."""
    group = q.shape[2] // tensors[0].shape[2]
    return [exact(x).repeat_interleave(group, dim=2) for x in tensors]
