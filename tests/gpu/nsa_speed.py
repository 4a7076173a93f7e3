"""How fast native sparse attention is, beside the fla library, in one run on a GPU.

`python -m tests.gpu.nsa_speed`: 64 query heads on 4 KV heads, 128 wide, 16 blocks of 64 keys, bf16,
4k to 64k tokens. The selected branch alone, forward and with its gradients: with blocks drawn for
each query (`random`), with blocks of which each query shares three quarters with the one before
(`drifting`), and with those that change as much once in 64 queries (`alike`); the first block and
the last two are always read. Then compressed blocks, their choice and selected
blocks together: with random tensors, and with queries that are like their neighbours, so that these
choose nearly the same (`whole, drifting`). The window is left out, which fla computes by
flash-attn. Beside them, our causal attention of the same tensors. Results are compared before they
are timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashwright
from tests.gpu.backward_speed import Call, line, mean, times

HEADS, KV_HEADS, WIDTH, BLOCKS, BLOCK = 64, 4, 128, 16, 64
FORWARD, BACKWARD = (4096, 8192, 16384, 32768, 65536), (4096, 8192, 16384)
LIMIT = 1e-2
OTHERS = 0.2
"""The same where each library chooses the blocks: rounding decides between those that are near, of
which long sequences have more. `flashwright bench --table 9` checks the choice by itself."""


def blocks_of(tokens: int, kind: str) -> Any:
    """Blocks for each query and KV head, -1 where there are fewer. Those of the `alike` kind change
    by a quarter from one block of queries to the next, `drifting` ones from query to query."""
    own = torch.arange(tokens, device="cuda") // BLOCK
    count, step = tokens // BLOCK, BLOCK if kind == "alike" else 1
    lot = torch.rand(tokens // step, count, KV_HEADS, device="cuda")
    if kind != "random":  # each is drawn again in a quarter of the steps
        again = torch.rand_like(lot) < 0.25
        rows = torch.arange(len(lot), device="cuda")[:, None, None]
        lot = lot.gather(0, torch.where(again, rows, 0).cummax(0).values)
    lot = lot.repeat_interleave(step, dim=0)
    number = torch.arange(count, device="cuda")
    behind = number > own[:, None]
    always = (number == 0) | (number == own[:, None]) | (number == own[:, None] - 1)
    lot = torch.where(always[..., None], 2.0, lot).masked_fill(behind[..., None], -1)
    best, found = lot.topk(min(BLOCKS, count), dim=1)
    found = torch.where(best < 0, -1, found).movedim(1, 2)
    return torch.nn.functional.pad(found, (0, BLOCKS - found.shape[2]), value=-1)[None]


def tensors(tokens: int) -> tuple[list[Any], Any]:
    """Q, K, V, and a gate for all branches."""
    torch.manual_seed(tokens)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    rows = [torch.randn(1, tokens, heads, WIDTH, **options) for heads in shapes]
    return rows, torch.rand(1, tokens, HEADS, **options)


def drifting(q: Any) -> Any:
    """Queries each of which is like the one before: of the blocks that they choose, neighbours
    share three quarters (with 4096 tokens, 64 keys a block, groups of 16, 16 blocks)."""
    new, like = q.float(), torch.zeros_like(q, dtype=torch.float32)
    for back in range(32):  # what is left of older ones is small
        like[:, back:] += 0.7 ** (back / 2) * new[:, : q.shape[1] - back]
    return (0.3**0.5 * like).to(q.dtype)


def ours(given: list[Any], gate: Any, blocks: Any = None) -> Any:
    compress = gate if blocks is None else None
    return flashwright.nsa(*given, compress, gate, None, blocks, BLOCKS, BLOCK, 0)


def theirs(given: list[Any], gate: Any, blocks: Any = None) -> Any:
    from fla.ops.nsa import parallel_nsa

    named = {"g_slc": gate, "block_counts": BLOCKS, "block_size": BLOCK}
    named |= {"g_cmp": gate} if blocks is None else {"block_indices": blocks}
    return parallel_nsa(*given, **named)


def forward(compute: Callable[..., Any], *given: Any) -> Call:
    def call() -> Sequence[Any]:
        with torch.no_grad():
            return (compute(*given),)

    return call


def training(compute: Callable[..., Any], given: list[Any], *more: Any) -> Call:
    """Forward and backward."""
    leaves = [x.detach().requires_grad_() for x in given]
    grad = given[0].flip(1)
    return lambda: torch.autograd.grad(compute(leaves, *more), leaves, grad)


def main() -> None:
    peer = importlib.util.find_spec("fla") is not None
    print(f"{'':34} {'ours':>8} {'theirs':>8} ratio    difference (ms)")
    ratios: dict[str, list[float]] = {}
    for tokens in FORWARD:
        given, gate = tensors(tokens)
        cases: list[tuple[str, Any, tuple[Any, ...]]] = []
        for kind in ("random", "drifting", "alike"):
            more = (gate, blocks_of(tokens, kind))
            cases.append((kind, forward, more))
            cases += [(f"{kind}, with gradients", training, more)] * (tokens in BACKWARD)
        cases.append(("whole", forward, (gate,)))
        cases.append(("whole, drifting", forward, (gate,)))
        like = [drifting(given[0]), *given[1:]]
        for kind, way, more in cases:
            used, own = like if kind == "whole, drifting" else given, kind.startswith("whole")
            call, name = way(ours, used, *more), f"{kind}, {tokens} tokens"
            if peer:
                other, limit = way(theirs, used, *more), OTHERS if own else LIMIT
                ratios.setdefault(kind, []).append(line(name, call, other, limit))
            else:
                print(f"{name:34} {times(call)[0]:8.3f}", flush=True)
        turned = [x.transpose(1, 2) for x in given]
        causal = forward(lambda *x: flashwright.attention(*x, causal=True), *turned)
        print(f"{f'causal attention, {tokens} tokens':34} {times(causal)[0]:8.3f}", flush=True)
    for kind, found in ratios.items():
        print(f"{kind}: {mean(found)}")


if __name__ == "__main__":
    main()
