"""Decode over a cache on a GPU, against PyTorch, a sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashwright.serving.kvcache import flash_attn_with_kvcache  # noqa: E402
from tests.unit.test_varlen import in_pages  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LENGTHS = [0, 1, 17, 128, 4097, 65536]


def problem(lengths: list[int], page: int, queries: int, heads: int) -> tuple[Any, dict[str, Any]]:
    """q, and the cache by the names of arguments; NaN wherever there is no key."""
    torch.manual_seed(0)
    keys = [tuple(torch.randn(n, 2, 64).bfloat16() for _ in "kv") for n in lengths]
    table, k, v = in_pages(page, keys)  # type: ignore[arg-type]
    used = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(len(lengths), queries, heads, 64).bfloat16()
    return q, {"k_cache": k, "v_cache": v, "block_table": table, "cache_seqlens": used}


def on_gpu(q: Any, cache: dict[str, Any], **settings: Any) -> Any:
    """O and LSE of the kernel, on the CPU."""
    moved = {n: x.cuda() if torch.is_tensor(x) else x for n, x in {**cache, **settings}.items()}
    found = flash_attn_with_kvcache(q.cuda(), **moved, return_softmax_lse=True)
    return [x.cpu() for x in found]


def compare(found: Any, q: Any, cache: dict[str, Any], **settings: Any) -> None:
    wanted = flash_attn_with_kvcache(q, **cache, **settings, return_softmax_lse=True)
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("page", [1, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("splits", [0, 1, 7, 64])
def test_pages_and_splits(page: int, splits: int) -> None:
    q, cache = problem(LENGTHS, page, 1, 8)
    compare(on_gpu(q, cache, num_splits=splits), q, cache)


@pytest.mark.parametrize("heads", [2, 10, 12, 14, 16, 32])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_groups_and_queries(heads: int, queries: int) -> None:
    q, cache = problem([20, 300, 5000], 16, queries, heads)
    compare(on_gpu(q, cache, causal=True), q, cache, causal=True)


@pytest.mark.parametrize(
    "settings",
    [{"window_size": (255, 0)}, {"softcap": 20.0}, {"sink": torch.linspace(-1, 1, 8)}],
    ids=lambda s: next(iter(s)),
)
def test_options(settings: dict[str, Any]) -> None:
    q, cache = problem([1, 600, 5000], 64, 2, 8)
    compare(on_gpu(q, cache, causal=True, **settings), q, cache, causal=True, **settings)


@pytest.mark.parametrize("queries", [4, 16, 64])
@pytest.mark.parametrize("splits", [0, 5])
def test_trees_of_queries(queries: int, splits: int) -> None:
    q, cache = problem([queries, 300, 5000], 16, queries, 8)
    tree = torch.rand(3, queries, queries).tril() > 0.3
    tree |= torch.eye(queries, dtype=torch.bool)
    compare(on_gpu(q, cache, tree_mask=tree, num_splits=splits), q, cache, tree_mask=tree)


@pytest.mark.parametrize("length", [1, 777, 20000])
def test_prefixes_that_sequences_share(length: int) -> None:
    q, cache = problem([0, 20, 3000] * 11, 16, 2, 8)
    pair = {name: torch.randn(length, 2, 64).bfloat16() for name in ("prefix_k", "prefix_v")}
    compare(on_gpu(q, cache, causal=True, **pair), q, cache, causal=True, **pair)


def test_a_cache_without_pages() -> None:
    q, cache = problem([0, 700, 4000], 4096, 1, 8)
    order = cache.pop("block_table")[:, 0].clamp(max=len(cache["k_cache"]) - 1)
    cache["cache_batch_idx"] = order.int()
    compare(on_gpu(q, cache), q, cache)


def test_calls_of_a_known_form() -> None:
    """Other tensors, and other numbers in the same ones, at the form's second call and later."""
    for seed in range(4):
        q, cache = problem([100, 5000, 40 + seed], 16, 1, 8)
        torch.manual_seed(seed)
        q = torch.randn_like(q)
        compare(on_gpu(q, cache), q, cache)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found = on_gpu(q, cache)
    compare(found, q, cache)


@pytest.mark.parametrize("kind", ["pages", "entries", "e4m3"])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("pairs", [None, False, True])
def test_new_keys_and_rotation(kind: str, tokens: int, pairs: bool | None) -> None:
    """The output, and the caches behind the call, with those of unused positions."""
    lengths, nothing = [100, 5000, 40], torch.full((tokens, 2, 64), torch.nan).bfloat16()
    q, cache = problem(lengths, 16, tokens, 8)
    keys = [tuple(torch.randn(n, 2, 64).bfloat16() for _ in "kv") for n in lengths]
    room = [tuple(torch.cat((x, nothing)) for x in pair) for pair in keys]
    table, k, v = in_pages(16 if kind == "pages" else 6000, room)  # type: ignore[arg-type]
    cache |= {"k_cache": k, "v_cache": v, "block_table": table}
    if kind != "pages":
        cache["cache_batch_idx"] = cache.pop("block_table")[:, 0].int()
    settings: dict[str, Any] = {"causal": True}
    if kind == "e4m3":
        for name in ("k_cache", "v_cache"):
            cache[name] = cache[name].to(torch.float8_e4m3fn)
        settings |= {"k_descale": 0.5, "v_descale": 2.0}
    new = [torch.randn(3, tokens, 2, 64).bfloat16() for _ in "kv"]
    if pairs is not None:
        angles = torch.arange(6000)[:, None] * 0.9 ** torch.arange(24)
        settings |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
        settings["rotary_interleaved"] = pairs
    for _ in range(2):  # the second call has a known form
        ours, theirs = ({n: x.clone() for n, x in cache.items()} for _ in range(2))
        moved = {n: x.cuda() if torch.is_tensor(x) else x for n, x in {**ours, **settings}.items()}
        found = flash_attn_with_kvcache(q.cuda(), **moved, k=new[0].cuda(), v=new[1].cuda())
        wanted = flash_attn_with_kvcache(q, **theirs, **settings, k=new[0], v=new[1])
        loose = 0.1 if kind == "e4m3" else 0.02
        torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=loose, rtol=loose)
        for name in ("k_cache", "v_cache"):
            pair = (moved[name].cpu().float(), theirs[name].float())
            torch.testing.assert_close(*pair, atol=loose, rtol=0.13, equal_nan=True)


def test_a_graph_is_replayed_with_other_lengths() -> None:
    q, cache = problem([100, 5000, 40], 16, 1, 8)
    moved = {n: x.cuda() for n, x in cache.items()}
    queries = q.cuda()
    flash_attn_with_kvcache(queries, **moved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(queries, **moved, return_softmax_lse=True)
    fewer = torch.tensor([0, 3000, 39], dtype=torch.int32)
    moved["cache_seqlens"].copy_(fewer)
    graph.replay()
    compare([out.cpu(), lse.cpu()], q, {**cache, "cache_seqlens": fewer})
