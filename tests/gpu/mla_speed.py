"""How fast MLA decode over a latent cache is, beside FlashMLA, in one run on a GPU.

`python -m tests.gpu.mla_speed [--heads N]`: pages of 64, bf16, beside FlashMLA (`flash_mla`) if it
is installed. Prints milliseconds of CUDA graphs, as engines launch a decode, the TFLOPS of both
products and the GB/s of the cache. Outputs are compared before they are timed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from flashwright.serving.mla import flash_mla_with_kvcache
from tests.gpu.backward_speed import Call, line, mean, times
from tests.gpu.decode_speed import graphed

BATCHES = (32, 64, 128)
KEYS = (4096, 8192, 16384, 32768)
HEADS = (128, 64, 16)
WIDTH, VALUES, PAGE, LIMIT = 576, 512, 64, 1e-2


def tensors(batch: int, keys: int, heads: int, queries: int = 1) -> list[Any]:
    """The arguments that both functions have."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = batch * keys // PAGE
    q = torch.randn(batch, queries, heads, WIDTH, **options)
    cache = torch.randn(pages, PAGE, 1, WIDTH, **options)
    table = torch.randperm(pages, device="cuda").int().reshape(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return [q, cache, table, lengths, VALUES]


def ours(given: list[Any]) -> Call:
    return lambda: flash_mla_with_kvcache(*given)


def theirs(given: list[Any]) -> Call | None:
    if importlib.util.find_spec("flash_mla") is None:
        return None
    import flash_mla

    q, lengths = given[0], given[3]
    try:
        planned = flash_mla.get_mla_metadata()
    except TypeError:  # before it planned at the first call
        planned = flash_mla.get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)

    def call() -> Sequence[Any]:
        found: Sequence[Any] = flash_mla.flash_mla_with_kvcache(*given, *planned)
        return found

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, choices=HEADS, help="default: all")
    only = parser.parse_args().heads
    ratios = []
    print(f"{'':34} {'ours':>8} {'theirs':>8} ratio    difference (ms)")
    for heads in HEADS if only is None else (only,):
        for batch in BATCHES:
            for keys in KEYS:
                given = tensors(batch, keys, heads)
                call, other = graphed(ours(given)), theirs(given)
                if other is not None:
                    ratios.append(line(f"{batch} x {keys}, {heads}", call, graphed(other), LIMIT))
                (taken,) = times(call)
                rate = 2 * batch * heads * keys * (WIDTH + VALUES) / taken / 1e9
                read = 2 * batch * keys * WIDTH / taken / 1e6
                print(f"  {batch} x {keys}, {heads}: {rate:.0f} TFLOPS, {read:.0f} GB/s")
    if ratios:
        print(mean(ratios))


if __name__ == "__main__":
    main()
