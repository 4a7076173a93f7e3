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
    whole = (cache / 0.05).round().clamp(-128, 127).to(torch.int8)
    wrapper.plan(*lists, *SIZES, PAGE, kv_data_type="int8")
    smaller = {**scales, "k_scale": 2.5 * 0.05, "v_scale": 1.5 * 0.05}
    found = wrapper.run_return_lse(q, whole, **smaller)
    torch.testing.assert_close(found[0], wanted[0], atol=0.2, rtol=0.2)


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
        ({"block_extend_offset": torch.zeros(1)}, "block_extend_offset"),
    ],
)
def test_what_no_kernel_does_is_said(settings: dict[str, Any], message: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(NoKernel, match=message):
        wrapper.plan(starts(QUERIES), *pages_of(LENGTHS)[1], *SIZES, PAGE, **settings)


def test_arguments_without_effect_change_nothing() -> None:
    cache, lists, _ = pages_of(LENGTHS)
    q = torch.randn(sum(QUERIES), HEADS, WIDTH).half()
    hints = {"use_fp16_qk_reduction": True, "rope_scale": 2.0, "rope_theta": 5e5}
    more = {"non_blocking": False, "seq_lens": torch.tensor(LENGTHS), "max_sequence_kv": 33}
    found = []
    for settings in ({}, hints | more):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
        wrapper.plan(starts(QUERIES), *lists, *SIZES, PAGE, causal=True, **settings)
        found.append(wrapper.run(q, cache, enable_pdl=bool(settings)))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=["mine"]),
        lambda: BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, jit_kwargs={"use_custom": 1}),
        lambda: BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, custom_mask_buf=torch.zeros(9)),
        lambda: BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, mask_indptr_buf=torch.zeros(9)),
    ],
)
def test_a_wrapper_for_what_no_kernel_does_is_refused(make: Any) -> None:
    with pytest.raises(NoKernel, match="no kernel takes it"):
        make()


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"head_dim_vo": 32}, {}, r"v must be \(any, 8, 2, 32\), as planned"),
        ({"page_size": 4}, {}, r"k must be \(any, 4, 2, 64\), as planned"),
        ({"num_kv_heads": 4}, {}, r"k must be \(any, 8, 4, 64\), as planned"),
        ({"kv_data_type": "float8_e4m3fn"}, {}, "kv_data_type was planned as torch.float8_e4m3fn"),
        ({"q_data_type": torch.bfloat16}, {}, "q_data_type was planned as torch.bfloat16"),
        ({"o_data_type": torch.bfloat16}, {}, "o_data_type was planned as torch.bfloat16"),
        ({}, {"q": torch.zeros(25, HEADS, WIDTH).half()}, "25 tokens, and 26 were planned"),
        ({}, {"out": torch.zeros(26, HEADS, WIDTH)}, "out must be torch.float16 of shape"),
        ({}, {"lse": torch.zeros(HEADS, 26)}, r"lse must be torch.float32 of shape \(26, 4\)"),
        ({}, {"paged_kv_cache": torch.zeros(4, PAGE, 2, 64)}, "must have five axes"),
    ],
)
def test_tensors_that_were_not_planned_are_refused(
    settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    cache, lists, _ = pages_of(LENGTHS)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": WIDTH}
    pages = {**sizes, "page_size": PAGE, **settings}
    planned = {"page_size": pages["page_size"]} if "page_size" in settings else {}
    kept = lists if not planned else (lists[0], lists[1], lists[2].clamp(max=4))
    wrapper.plan(starts(QUERIES), *kept, **pages)
    given = {"q": torch.zeros(26, HEADS, WIDTH).half(), "paged_kv_cache": cache, **change}
    with pytest.raises(ValueError, match=message):
        wrapper.run(**given, return_lse=True)


def test_types_that_were_planned_are_taken() -> None:
    cache, lists, keys = pages_of(LENGTHS)
    q = torch.randn(4, HEADS, WIDTH).half()
    for types in ({"data_type": "float16"}, {"q_data_type": "half", "kv_data_type": torch.half}):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(*lists, *SIZES, PAGE, **types)
        close(wrapper.run_return_lse(q, cache), wanted_of(q, [1] * 4, keys))
    wrapper.plan(*lists, *SIZES, PAGE, data_type="bfloat16")
    with pytest.raises(ValueError, match="q_data_type was planned as"):
        wrapper.run(q, cache)


def test_values_of_another_width() -> None:
    keys = [
        (torch.randn(n, KV_HEADS, WIDTH).half(), torch.randn(n, KV_HEADS, 32).half())
        for n in LENGTHS
    ]
    q = torch.randn(sum(QUERIES), HEADS, WIDTH).half()
    k, v = (torch.cat(parts) for parts in zip(*keys, strict=True))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "HND")
    wrapper.plan(starts(QUERIES), starts(LENGTHS), *SIZES, head_dim_vo=32)
    found = wrapper.run(q, k.transpose(0, 1), v.transpose(0, 1))
    rows = zip(q.split(QUERIES), keys, strict=True)
    turned = ([x.transpose(0, 1)[None] for x in (rows_of, *pair)] for rows_of, pair in rows)
    wanted = [flashwright.attention(*given)[0].transpose(0, 1) for given in turned]
    torch.testing.assert_close(found, torch.cat(wanted), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: starts([3, 0, 16])}, "qo_indptr has 3 sequences, and paged_kv_last_page_len 4"),
        ({0: torch.tensor([0, 5, 3, 6, 9]).int()}, "qo_indptr must rise"),
        ({1: torch.tensor([0, 2, 1, 3, 8]).int()}, "indptr must rise"),
        ({1: starts([1, 0, 2, 9])}, "indptr ends at 12, and the list has 8 entries"),
        ({3: torch.tensor([5, 0, 9, 1]).int()}, "last_page_len must be 1 to 8, the page size"),
        ({3: torch.tensor([5, 0, 0, 1]).int()}, "last_page_len must be 1 to 8, the page size"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change: dict[int, Any], message: str) -> None:
    given = [starts(QUERIES), *pages_of(LENGTHS)[1]]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ValueError, match=message):
        wrapper.plan(*(change.get(n, x) for n, x in enumerate(given)), *SIZES, PAGE)


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
