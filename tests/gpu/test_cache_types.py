"""Decode and prompts over caches of 8 bits on a GPU, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashwright.serving.kvcache import flash_attn_with_kvcache  # noqa: E402
from flashwright.serving.varlen import flash_attn_varlen_func  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LENGTHS = [0, 1, 17, 128, 4097, 20000]
ROOM = 20480
HEADS = 2
NARROW = [torch.float8_e4m3fn, torch.int8]


def problem(
    queries: int, heads: int, width: int, kind: Any, narrow: Any
) -> tuple[Any, list[Any], list[Any]]:
    """q, caches of entries with NaN behind each sequence's keys, or 127, and scales."""
    torch.manual_seed(0)
    q = torch.randn(len(LENGTHS), queries, heads, width).to(kind)
    caches = []
    whole = not narrow.is_floating_point
    for _ in "kv":
        cache = (48 if whole else 2) * torch.randn(len(LENGTHS), ROOM, HEADS, width)
        for b, length in enumerate(LENGTHS):
            cache[b, length:] = 127 if whole else torch.nan
        caches.append((cache.clamp(-128, 127) if whole else cache).to(narrow))
    size = 24 if whole else 1
    return q, caches, [(torch.rand(len(LENGTHS), HEADS) + 0.5) / size for _ in "kv"]


def in_pages(size: int, caches: list[Any]) -> tuple[Any, list[Any]]:
    """A table, and the entries as pages in another order."""
    count = ROOM // size
    order = torch.randperm(len(LENGTHS) * count)
    pages = []
    for cache in caches:
        parts = cache.view(torch.uint8).unflatten(1, (count, size)).flatten(0, 1)
        laid = torch.empty_like(parts)
        laid[order] = parts
        pages.append(laid.view(cache.dtype))
    return order.reshape(len(LENGTHS), count).int(), pages


def compare(q: Any, caches: list[Any], scales: list[Any], **settings: Any) -> None:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    given = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    given |= {"k_descale": scales[0], "v_descale": scales[1], **settings}
    wanted = flash_attn_with_kvcache(q, *caches, **given)
    moved = {n: x.cuda() if torch.is_tensor(x) else x for n, x in given.items()}
    found = flash_attn_with_kvcache(q.cuda(), *(x.cuda() for x in caches), **moved)
    torch.testing.assert_close(found[0].cpu().float(), wanted[0].float(), atol=0.03, rtol=0.02)
    torch.testing.assert_close(found[1].cpu(), wanted[1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_entries(width: int, kind: Any, narrow: Any) -> None:
    compare(*problem(1, 8, width, kind, narrow))


@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize(("queries", "heads"), [(1, 8), (4, 14), (16, 16)])
def test_pages_and_groups(page: int, queries: int, heads: int, narrow: Any) -> None:
    q, caches, scales = problem(queries, heads, 128, torch.bfloat16, narrow)
    table, pages = in_pages(page, caches)
    compare(q, pages, scales, block_table=table)


@pytest.mark.parametrize("splits", [1, 7, 64])
def test_splits_and_one_number(splits: int) -> None:
    q, caches, _ = problem(1, 8, 128, torch.bfloat16, NARROW[0])
    compare(q, caches, [0.5, None], num_splits=splits)


@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_new_keys_are_written(narrow: Any) -> None:
    """Behind those that are there, divided by the scales: as PyTorch writes them, but for one unit
    where a quotient lies between two numbers."""
    _, caches, scales = problem(1, 8, 128, torch.bfloat16, narrow)
    q, *new = (torch.randn(len(LENGTHS), 2, n, 128).bfloat16() for n in (8, HEADS, HEADS))
    given = {"causal": True, "rotary_cos": torch.randn(ROOM, 64)}
    given |= {"rotary_sin": torch.randn(ROOM, 64), "cache_seqlens": torch.tensor(LENGTHS).int()}
    given |= {"k_descale": scales[0], "v_descale": scales[1]}
    found = [cache.cuda() for cache in caches]
    moved = {n: x.cuda() if torch.is_tensor(x) else x for n, x in given.items()}
    flash_attn_with_kvcache(q.cuda(), *found, *(x.cuda() for x in new), **moved)
    flash_attn_with_kvcache(q, *caches, *new, **given)
    near = {"atol": 1.0, "rtol": 0.0} if narrow is torch.int8 else {"atol": 0.02, "rtol": 0.13}
    for ours, theirs in zip(found, caches, strict=True):
        ours, theirs = ours.cpu().float(), theirs.float()
        torch.testing.assert_close(ours, theirs, equal_nan=True, **near)


@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("page", [16, 128])
def test_prompts(page: int, narrow: Any) -> None:
    """Sequences with as many queries as keys, at most 300."""
    q, caches, scales = problem(300, 8, 128, torch.bfloat16, narrow)
    counts = [min(n, 300) for n in LENGTHS]
    table, pages = in_pages(page, caches)
    rows = torch.cat([x[300 - n :] for x, n in zip(q, counts, strict=True)])
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    given = [rows, *pages, starts]
    named = {"seqused_k": used, "block_table": table, "causal": True}
    named |= {"k_descale": scales[0], "v_descale": scales[1]}
    wanted = flash_attn_varlen_func(*given, None, 300, ROOM, **named)
    moved = {n: x.cuda() if torch.is_tensor(x) else x for n, x in named.items()}
    found = flash_attn_varlen_func(*(x.cuda() for x in given), None, 300, ROOM, **moved)
    torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=0.03, rtol=0.02)
