"""How fast packed sequences are, beside others, in one run on a GPU.

`python -m tests.gpu.varlen_speed`: five distributions of lengths, full and causal, beside
FlashAttention-3's varlen function if it is installed, else torch's varlen_attn; and for equal
lengths our own kernel for rectangular batches. Outputs are compared before they are timed.
`flashwright bench --package` times a kernel alone over these lengths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

import flashwright
from flashwright.measure.sequences import distributions
from tests.gpu.backward_speed import Call, line, mean

HEADS, KV_HEADS = 32, 8
LIMIT = 1e-2
"""Of the difference of two libraries' outputs, relative to their norm."""


def tensors(lengths: Sequence[int], dim: int) -> list[Any]:
    torch.manual_seed(0)
    many = sum(lengths)
    shapes = ((many, HEADS), (many, KV_HEADS), (many, KV_HEADS))
    made = [torch.randn(*s, dim, device="cuda", dtype=torch.bfloat16) for s in shapes]
    starts = torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)
    return [*made, starts, starts, max(lengths), max(lengths)]


def theirs(given: list[Any], causal: bool) -> Call:
    if importlib.util.find_spec("flash_attn_interface") is not None:
        from flash_attn_interface import flash_attn_varlen_func

        def by_flash_attention() -> Sequence[Any]:
            found = flash_attn_varlen_func(*given, causal=causal)
            return (found[0] if isinstance(found, tuple) else found,)

        return by_flash_attention
    from torch.nn.attention.varlen import varlen_attn

    q, k, v, *rest = given
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return lambda: (varlen_attn(q, k, v, *rest, is_causal=causal),)


def rectangular(given: list[Any], causal: bool) -> Call:
    """Our kernel for sequences of one length."""
    length = given[5]
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in given[:3])
    return lambda: (flashwright.attention(q, k, v, causal=causal).transpose(1, 2).flatten(0, 1),)


def main() -> None:
    ratios = []
    print(f"{'':34} {'ours':>8} {'theirs':>8} ratio    difference (ms)")
    for dim in (64, 128):
        for causal in (False, True):
            for name, lengths in distributions():
                given = tensors(lengths, dim)
                kind = f"d{dim} {'causal' if causal else 'full'} {name}"

                def packed(given: list[Any] = given, causal: bool = causal) -> Sequence[Any]:
                    return (flashwright.flash_attn_varlen_func(*given, causal=causal),)

                ratios.append(line(kind, packed, theirs(given, causal), LIMIT))
                if name == "equal":
                    line(f"{kind}, rectangular", packed, rectangular(given, causal), LIMIT)
    print(mean(ratios))


if __name__ == "__main__":
    main()
