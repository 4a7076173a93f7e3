"""FlashInfer's batch wrappers on a GPU, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashwright.serving import wrappers  # noqa: E402
from tests.unit.test_wrappers import (  # noqa: E402
    HEADS,
    PAGE,
    SIZES,
    WIDTH,
    pages_of,
    starts,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LENGTHS = [1, 700, 33, 5000]
DEVICES = ("cuda", "cpu")


def run(make: Any, lists: Any, rows: Any, given: Any, **settings: Any) -> list[Any]:
    """O and the log-sum-exp on each device; the lists of pages are there, other lists on the host,
    as engines have them."""
    found = []
    for device in DEVICES:
        wrapper = make(torch.empty(0, device=device), settings.get("layout", "NHD"))
        wrapper.plan(*rows, *(x.to(device) for x in lists), *SIZES, *settings.get("plan", ()))
        out = wrapper.run(*(x.to(device) for x in given), return_lse=True)
        found.append([x.cpu() for x in out])
    return found


def close(found: Any) -> None:
    ours, right = found
    torch.testing.assert_close(ours[0], right[0], atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(ours[1], right[1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("queries", [[1] * 4, [3] * 4, [1, 600, 33, 80]], ids=str)
def test_pages(layout: str, queries: list[int]) -> None:
    torch.manual_seed(0)
    cache, lists, _ = pages_of(LENGTHS)
    cache = cache.transpose(2, 3).contiguous() if layout == "HND" else cache
    given = torch.randn(sum(queries), HEADS, WIDTH).half(), cache
    make = wrappers.BatchPrefillWithPagedKVCacheWrapper
    close(run(make, lists, (starts(queries),), given, layout=layout, plan=(PAGE,)))
    if queries == [1] * 4:
        make = wrappers.BatchDecodeWithPagedKVCacheWrapper
        close(run(make, lists, (), given, layout=layout, plan=(PAGE,)))


def test_keys_behind_each_other() -> None:
    torch.manual_seed(0)
    queries = [1, 600, 0, 80]
    rows = starts(queries), starts(LENGTHS)
    keys = torch.randn(2, sum(LENGTHS), SIZES[1], WIDTH).half()
    given = torch.randn(sum(queries), HEADS, WIDTH).half(), *keys
    close(run(wrappers.BatchPrefillWithRaggedKVCacheWrapper, (), rows, given))


def test_a_graph_is_replayed_after_another_plan() -> None:
    torch.manual_seed(0)
    buffers = {
        "paged_kv_indices_buffer": torch.empty(4 * 1000, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.empty(4, dtype=torch.int32),
    }
    workspace = torch.empty(0, device="cuda")
    make = wrappers.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(workspace, use_cuda_graph=True, **buffers)
    problems = [pages_of(lengths) for lengths in (LENGTHS, [6000, 1, 0, 77])]
    q = torch.randn(4, HEADS, WIDTH).half()
    room = max(len(cache) for cache, *_ in problems)
    cache = torch.zeros(room, *problems[0][0].shape[1:], dtype=q.dtype, device="cuda")
    rows = q.cuda()
    graph = torch.cuda.CUDAGraph()
    for n, (pages, lists, _) in enumerate(problems):
        cache[: len(pages)] = pages.cuda()
        wrapper.plan(*lists, *SIZES, PAGE)
        if n == 0:
            wrapper.run(rows, cache)
            with torch.cuda.graph(graph):
                found = wrapper.run(rows, cache, return_lse=True)
        graph.replay()
        right = make(torch.empty(0))
        right.plan(*lists, *SIZES, PAGE)
        close(([x.cpu() for x in found], right.run(q, pages, return_lse=True)))
