"""How fast decode over a cache is, beside FlashAttention-3, in one run on a GPU.

`python -m tests.gpu.decode_speed`: one query a sequence, contiguous and in pages of 16, 64 and 128,
beside FlashAttention-3 (`flash_attn_interface`) if it is installed. Prints milliseconds of CUDA
graphs, as engines launch a decode, and the GB/s of keys and values that are read; then what a call
takes of the host without a graph, and its launches alone. Outputs are compared before they are
timed. `--cache fp8` times caches in e4m3 beside the same numbers in bf16, both ours. `flashwright
bench --package` times a kernel alone over these shapes, with a cold L2.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from flashwright.measure.sequences import DECODES
from flashwright.serving import kernels
from flashwright.serving.kvcache import flash_attn_with_kvcache
from tests.gpu.backward_speed import Call, line, mean, times

WIDTH, LIMIT = 128, 1e-2


def tensors(batch: int, keys: int, heads: int, kv_heads: int, page: int | None) -> dict[str, Any]:
    """The arguments that both functions have."""
    torch.manual_seed(0)
    entries, rows = (batch, keys) if page is None else (batch * keys // page, page)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    found = {"q": torch.randn(batch, 1, heads, WIDTH, **options)}
    for name in ("k_cache", "v_cache"):
        found[name] = torch.randn(entries, rows, kv_heads, WIDTH, **options)
    found["cache_seqlens"] = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    if page is not None:
        found["table"] = torch.randperm(entries, device="cuda").int().reshape(batch, -1)
    return found


def ours(given: dict[str, Any]) -> Call:
    table = given.get("table")
    named = {name: x for name, x in given.items() if name != "table"}
    return lambda: (flash_attn_with_kvcache(**named, block_table=table),)


def theirs(given: dict[str, Any]) -> Call | None:
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    from flash_attn_interface import flash_attn_with_kvcache as by_flash_attention

    named = {name: x for name, x in given.items() if name != "table"}

    def call() -> Sequence[Any]:
        table = given.get("table")
        found = by_flash_attention(**named, page_table=table, pack_gqa=True)
        return (found[0] if isinstance(found, tuple) else found,)

    return call


def graphed(call: Call) -> Call:
    """The call as a CUDA graph, which keeps the call's tensors."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()

    def replay(_kept: Call = call) -> Sequence[Any]:
        graph.replay()
        return found

    return replay


def host_time(call: Call, calls: int = 300) -> float:
    """Microseconds of a call that the GPU does not hold up."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(calls):
        call()
    found = (perf_counter() - begin) / calls
    torch.cuda.synchronize()
    return 1e6 * found


def launches(call: Call) -> Call:
    """What our call gives to the launcher, and nothing around it. The call comes first."""
    call()
    bound = next(reversed(kernels._READY.values()))._bound
    seen: list[tuple[Any, ...]] = []
    launch = bound._launch
    bound._launch = lambda *given: (seen.append(given), launch(*given))
    call()
    bound._launch = launch
    return lambda: (launch(*seen[0]),)


def narrow(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with caches in e4m3, and the first ones with the numbers that these have."""
    small = {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    given.update({name: x.to(torch.bfloat16) for name, x in small.items()})
    return {**given, **small, "k_descale": 1.0, "v_descale": 1.0}


def compare_caches() -> None:
    """e4m3 beside bf16: milliseconds, the ratio, and GB/s of the caches in e4m3."""
    print(f"{'':34} {'fp8':>8} {'bf16':>8} ratio    difference (ms)")
    ratios = []
    for page in (None, 16, 64, 128):
        for shape in DECODES:
            batch, keys, heads, kv_heads = shape
            given = tensors(*shape, page)
            kind = f"{batch} x {keys}, {heads}/{kv_heads}" + (f", pages of {page}" if page else "")
            call = graphed(ours(narrow(given)))
            ratios.append(line(kind, call, graphed(ours(given)), LIMIT))
            read = 2 * batch * keys * kv_heads * WIDTH
            print(f"  {read / 1e6 / times(call)[0]:.0f} GB/s")
    print(mean(ratios))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", choices=("bf16", "fp8"), default="bf16")
    if parser.parse_args().cache == "fp8":
        compare_caches()
        return
    ratios = []
    print(f"{'':34} {'ours':>8} {'theirs':>8} ratio    difference (ms)")
    for page in (None, 16, 64, 128):
        for shape in DECODES:
            batch, keys, heads, kv_heads = shape
            given = tensors(*shape, page)
            kind = f"{batch} x {keys}, {heads}/{kv_heads}" + (f", pages of {page}" if page else "")
            call, other = graphed(ours(given)), theirs(given)
            if other is not None:
                ratios.append(line(kind, call, graphed(other), LIMIT))
            read = 4 * batch * keys * kv_heads * WIDTH
            print(f"  {read / 1e6 / times(call)[0]:.0f} GB/s")
    if ratios:
        print(mean(ratios))
    for page in (None, 16):
        given = tensors(4, 128, 32, 8, page)
        call, other = ours(given), theirs(given)
        told = f"{host_time(call):.1f}, of which launches {host_time(launches(call)):.1f}"
        told += f"; theirs {host_time(other):.1f}" if other is not None else ""
        print("host, us a call:", told)


if __name__ == "__main__":
    main()
