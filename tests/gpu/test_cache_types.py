"""Decode and prompts over caches in e4m3 on a GPU, against PyTorch."""

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


def problem(queries: int, heads: int, width: int, kind: Any) -> tuple[Any, list[Any], list[Any]]:
    """q, caches of entries with NaN behind each sequence's keys, and scales."""
    torch.manual_seed(0)
    q = torch.randn(len(LENGTHS), queries, heads, width).to(kind)
    caches = []
    for _ in "kv":
        cache = 2 * torch.randn(len(LENGTHS), ROOM, HEADS, width)
        for b, length in enumerate(LENGTHS):
            cache[b, length:] = torch.nan
        caches.append(cache.to(torch.float8_e4m3fn))
    return q, caches, [torch.rand(len(LENGTHS), HEADS) + 0.5 for _ in "kv"]


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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_entries(width: int, kind: Any) -> None:
    compare(*problem(1, 8, width, kind))


@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize(("queries", "heads"), [(1, 8), (4, 14), (16, 16)])
def test_pages_and_groups(page: int, queries: int, heads: int) -> None:
    q, caches, scales = problem(queries, heads, 128, torch.bfloat16)
    table, pages = in_pages(page, caches)
    compare(q, pages, scales, block_table=table)


@pytest.mark.parametrize("splits", [1, 7, 64])
def test_splits_and_one_number(splits: int) -> None:
    q, caches, _ = problem(1, 8, 128, torch.bfloat16)
    compare(q, caches, [0.5, None], num_splits=splits)


@pytest.mark.parametrize("page", [16, 128])
def test_prompts(page: int) -> None:
    """Sequences with as many queries as keys, at most 300."""
    q, caches, scales = problem(300, 8, 128, torch.bfloat16)
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
