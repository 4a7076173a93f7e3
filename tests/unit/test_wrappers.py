"""FlashInfer's batch wrappers, on CPU tensors: pages as lists, layouts, scales, later plans."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import flashwright  # noqa: E402
from flashwright.flex.task import NoKernel  # noqa: E402
from flashwright.serving.wrappers import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

LENGTHS, QUERIES, PAGE = [5, 0, 16, 33], [3, 0, 16, 7], 8
HEADS, KV_HEADS, WIDTH = 4, 2, 64
SIZES = (HEADS, KV_HEADS, WIDTH)
WORKSPACE = torch.empty(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def starts(counts: list[int]) -> Any:
    return torch.tensor([0, *counts]).cumsum(0).int()


def pages_of(lengths: list[int]) -> tuple[Any, tuple[Any, Any, Any], list[Any]]:
    """Pages, (pages, 2, PAGE, heads, dim), NaN where no key is; FlashInfer's lists of them; and the
    keys and values of each sequence."""
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts) + 3).int()
    cache = torch.full((len(order), 2, PAGE, KV_HEADS, WIDTH), torch.nan).half()
    indptr, keys = starts(counts), []
    for b, n in enumerate(lengths):
        pair = torch.randn(2, n, KV_HEADS, WIDTH).half()
        keys.append(pair)
        for at, part in enumerate(pair.split(PAGE, dim=1) if n else ()):
            cache[order[indptr[b] + at], :, : part.shape[1]] = part
    last = torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in lengths]).int()
    return cache, (indptr, order[: sum(counts)], last), keys


def alone(q: Any, pair: Any, **settings: Any) -> tuple[Any, Any]:
    """O and LSE in base 2 of one sequence, (tokens, heads, ...)."""
    if not q.shape[0] or not pair.shape[1]:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    turned = (x.transpose(0, 1)[None] for x in (q, *pair))
    out, lse = flashwright.attention(*turned, return_lse=True, **settings)
    return out[0].transpose(0, 1), lse[0].T / log(2)


def wanted_of(q: Any, queries: list[int], keys: list[Any], **settings: Any) -> list[Any]:
    found = [alone(*pair, **settings) for pair in zip(q.split(queries), keys, strict=True)]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[0], wanted[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_decode(layout: str, pair: bool) -> None:
    cache, lists, keys = pages_of(LENGTHS)
    q = torch.randn(len(LENGTHS), HEADS, WIDTH).half()
    given = cache.transpose(2, 3).contiguous() if layout == "HND" else cache
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*lists, *SIZES, PAGE, logits_soft_cap=5.0, sm_scale=0.3)
    found = wrapper.run_return_lse(q, given.unbind(1) if pair else given)
    close(found, wanted_of(q, [1] * 4, keys, softcap=5.0, scale=0.3))
    out, lse = torch.empty_like(q), torch.empty(4, HEADS)
    assert wrapper.run(q, given, out=out) is out
    assert wrapper.run(q, given, lse=lse, return_lse=True)[1] is lse
    close((out, lse), found)


def test_decode_of_several_queries_and_of_a_window_with_sinks() -> None:
    cache, lists, keys = pages_of([5, 16, 33])
    q = torch.randn(6, HEADS, WIDTH).half()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*lists, *SIZES, PAGE, window_left=3)
    found = wrapper.run(q, cache, return_lse=True, q_len_per_req=2)
    close(found, wanted_of(q, [2] * 3, keys, causal=True, window=4))
    wrapper.plan(*lists, *SIZES, PAGE)
    own = {"window": 4, "causal": True, "sink": torch.randn(HEADS)}
    found = wrapper.run(q[:3], cache, return_lse=True, window_left=3, sinks=own["sink"])
    close(found, wanted_of(q[:3], [1] * 3, keys, **own))


@pytest.mark.parametrize("queries", [QUERIES, [2] * 4], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_over_pages(queries: list[int], causal: bool) -> None:
    cache, lists, keys = pages_of(LENGTHS)
    q = torch.randn(sum(queries), HEADS, WIDTH).half()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts(queries), *lists, *SIZES, PAGE, causal=causal)
    found = wrapper.run(q, cache, return_lse=True)
    close(found, wanted_of(q, queries, keys, causal=causal))


def test_prefill_of_keys_behind_each_other() -> None:
    q = torch.randn(sum(QUERIES), HEADS, WIDTH).half()
    keys = [torch.randn(2, n, KV_HEADS, WIDTH).half() for n in LENGTHS]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts(QUERIES), starts(LENGTHS), *SIZES, causal=True, window_left=7)
    found = wrapper.run_return_lse(q, *torch.cat(keys, dim=1))
    close(found, wanted_of(q, QUERIES, keys, causal=True, window=8))


def test_scales() -> None:
    """Of 16-bit keys they multiply the scores and O, of 8-bit keys these."""
    cache, lists, keys = pages_of(LENGTHS)
    q = torch.randn(len(LENGTHS), HEADS, WIDTH).half()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*lists, *SIZES, PAGE)
    scales = {"q_scale": 0.5, "k_scale": 2.5, "v_scale": 1.5}
    found = wrapper.run_return_lse(q, cache, **scales)
    wide = [torch.stack((2.5 * k, 1.5 * v)) for k, v in keys]
    wanted = wanted_of(0.5 * q, [1] * 4, wide)
    close(found, wanted)
    narrow = cache.to(torch.float8_e4m3fn)
    given = narrow.view(torch.uint8).unbind(1)
    found = wrapper.run_return_lse(q, [x.view(narrow.dtype) for x in given], **scales)
    torch.testing.assert_close(found[0], wanted[0], atol=0.2, rtol=0.2)
    with pytest.raises(NoKernel, match="must be numbers"):
        wrapper.run(q, cache, k_scale=torch.ones(()))


def test_a_graph_finds_later_plans_where_the_first_was() -> None:
    cache, lists, _ = pages_of(LENGTHS)
    buffers = {
        "paged_kv_indices_buffer": torch.empty(4 * 6).int(),
        "paged_kv_last_page_len_buffer": torch.empty(4).int(),
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **buffers)
    wrapper.plan(*lists, *SIZES, PAGE)
    q = torch.randn(4, HEADS, WIDTH).half()
    wrapper.run(q, cache)
    places = {name: x.data_ptr() for name, x in wrapper._numbers.items()}
    cache, lists, keys = pages_of([40, 1, 2, 3])
    wrapper.plan(*lists, *SIZES, PAGE)
    assert {name: x.data_ptr() for name, x in wrapper._numbers.items()} == places
    close(wrapper.run_return_lse(q, cache), wanted_of(q, [1] * 4, keys))
    for lengths, message in (([49, 1, 1, 1], "room for 6 of each"), ([1] * 3, "keeps its sizes")):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*pages_of(lengths)[1], *SIZES, PAGE)
    with pytest.raises(ValueError, match="use_cuda_graph needs the buffers"):
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    prefill = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    prefill.plan(starts([3, 4]), starts([9, 9]), *SIZES)
    prefill.plan(starts([4, 3]), starts([8, 9]), *SIZES)
    with pytest.raises(ValueError, match="longer sequences than the first"):
        prefill.plan(starts([5, 2]), starts([9, 9]), *SIZES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "rotate q and k before"),
        ({"custom_mask": torch.ones(9)}, "custom_mask"),
        ({"fixed_split_size": 64}, "fixed_split_size"),
        ({"q_data_type": "float16", "o_data_type": torch.bfloat16}, "o_data_type"),
    ],
)
def test_what_no_kernel_does_is_said(settings: dict[str, Any], message: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(NoKernel, match=message):
        wrapper.plan(starts(QUERIES), *pages_of(LENGTHS)[1], *SIZES, PAGE, **settings)


def test_a_wrong_order_and_wrong_sizes_are_said() -> None:
    cache, lists, _ = pages_of(LENGTHS)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    q = torch.randn(4, HEADS, WIDTH).half()
    with pytest.raises(RuntimeError, match=r"call plan\(\) before"):
        wrapper.run(q, cache)
    wrapper.plan(*lists, *SIZES, PAGE, disable_split_kv=True, non_blocking=False)
    with pytest.raises(ValueError, match="as planned"):
        wrapper.run(q[:, :2], cache)
    with pytest.raises(ValueError, match="4 sequences were planned"):
        wrapper.run(q[:3], cache)
    with pytest.raises(ValueError, match="kv_layout must be one of"):
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "DNH")
