"""Native sparse attention as a whole, in fp64: the sum of its branches, each times its gate.

A query reads the blocks to whose means its group attends most. Rounding decides between blocks that
are nearly as heavy, so the answer takes the blocks that a call chose, and the choice is checked by
itself: the blocks that are always read, and others that are as heavy as the heaviest but for what
rounding gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashwright.judge import oracle_device
from flashwright.judge.oracle import ROUNDOFF
from flashwright.spec import AttentionSpec

GATES = {"compressed": "GateCmp", "selected": "GateSlc", "window": "GateSwa"}
"""The gate of each branch, (batch, tokens, heads)."""
TIES = 8.0
"""Units of rounding by which a chosen block may be lighter than one that was not: two weights, each
with rounded means, a rounded score and its own rounding."""
_ROWS = 1024  # queries at a time: 32 MB of weights for each head, with 4096 blocks


class WrongChoice(ValueError):
    """Blocks that are not the heaviest ones; the message names the first query."""


def branch_of(spec: AttentionSpec, branch: str) -> AttentionSpec:
    """The spec of one branch alone."""
    window = spec.window if branch == "window" else None
    return spec.model_copy(update={"branch": branch, "window": window})


def means(x: Any, block: int) -> Any:
    """The means of whole blocks of keys or values, (batch, heads, blocks, dim)."""
    count = x.shape[2] // block
    return x[:, :, : count * block].unflatten(2, (count, block)).mean(3)


def attention(
    lib: Any, spec: AttentionSpec, inputs: Mapping[str, Any], head: int, slack: float = 1.0
) -> Any:
    """O of one head, (tokens, dim), by the blocks that a call chose.

    `inputs` are Q of the heads of a group, K, V and Idx, the chosen blocks, of its KV head, and the
    gates of these heads; `head` counts in the group. Raises WrongChoice for blocks that may not be
    chosen; `slack` is a factor on what is allowed.
    """
    q, k, v = (oracle_device.fp64(lib, inputs[name]) for name in "QKV")
    pooled = {"K": means(k, spec.block), "V": means(v, spec.block)}
    idx = _named(lib, spec, inputs["Idx"])
    _check(lib, spec, q, pooled["K"], idx, slack)
    one, tokens = {"Q": inputs["Q"][:, head : head + 1]}, {"tokens": q.shape[2]}
    given = {
        "compressed": one | pooled,
        "selected": one | {"K": inputs["K"], "V": inputs["V"], "Idx": idx},
        "window": one | {"K": inputs["K"], "V": inputs["V"]},
    }
    out = 0.0
    for branch, tensors in given.items():
        found = oracle_device.attention(lib, branch_of(spec, branch), tensors, tokens)["O"][0, 0]
        out = out + found * oracle_device.fp64(lib, inputs[GATES[branch]])[0, :, head, None]
    return out


def _named(lib: Any, spec: AttentionSpec, idx: Any) -> Any:
    """Blocks with -1 for those behind their query, which say that there is none."""
    own = lib.arange(idx.shape[2], device=idx.device)[:, None] // spec.selected_block
    return lib.where((idx < 0) | (idx > own), -1, idx)


def weights(lib: Any, spec: AttentionSpec, q: Any, pooled: Any, rows: slice) -> Any:
    """How much the heads of a group attend to each block together: (rows, blocks). A block that
    ends behind the query has 0."""
    scores = (q[0, :, rows] @ pooled[0, 0].mT) * spec.softmax_scale
    place = lib.arange(rows.start, rows.start + scores.shape[1], device=q.device)[:, None]
    ends = lib.arange(scores.shape[2], device=q.device) * spec.block + spec.block - 1
    scores = scores.masked_fill(ends > place, float("-inf"))
    return lib.nan_to_num(lib.softmax(scores, -1)).sum(0)


def _check(lib: Any, spec: AttentionSpec, q: Any, pooled: Any, idx: Any, slack: float) -> None:
    """Raise WrongChoice for blocks of a query that may not be chosen."""
    count, block = -(-q.shape[2] // spec.selected_block), spec.selected_block
    for start in range(0, q.shape[2], _ROWS):
        some = idx[0, 0, start : start + _ROWS].long()
        rows = slice(start, start + len(some))
        own = lib.arange(rows.start, rows.stop, device=q.device)[:, None] // block
        number = lib.arange(count, device=q.device)
        fixed = (number == 0) | (number == own) | (number == own - 1)
        free = (number < own) & ~fixed
        named = lib.zeros(len(some), count + 1, dtype=lib.long, device=q.device)
        named.scatter_add_(1, lib.where(some < 0, count, some), lib.ones_like(some))
        named = named[:, :count]
        wanted = lib.minimum(own[:, 0] + 1, lib.full_like(own[:, 0], spec.top_k))
        heavy = weights(lib, spec, q, pooled, rows)
        heavy = lib.nn.functional.pad(heavy, (0, count - heavy.shape[1]))
        best = heavy.masked_fill(~free, -1.0).sort(-1, descending=True).values
        last = (wanted - fixed.sum(-1)).clamp(min=0)  # the lightest of the heaviest
        least = best.gather(1, (last - 1).clamp(min=0)[:, None])
        allowed = 1 - slack * TIES * ROUNDOFF[spec.dtype]
        light = (free & (named > 0) & (heavy < least * allowed)).any(-1)
        faults = {
            "names a block twice": (named > 1).any(-1),
            "does not read its own block, the one before or the first": (fixed & (named == 0)).any(
                -1
            ),
            "reads another number of blocks": named.sum(-1) != wanted,
            "reads blocks that are lighter than others": light,
        }
        for text, wrong in faults.items():
            if bool(wrong.any()):
                row = rows.start + int(wrong.nonzero()[0, 0])
                raise WrongChoice(f"query {row} {text}")
