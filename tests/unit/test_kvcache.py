"""flash_attn_with_kvcache: decode over a cache. Without a GPU the CUDA path is tried with an
operator that interprets the program that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.splits import split_count
from flashwright.author.builtin.variants import make_spec
from flashwright.build.steps import Steps
from flashwright.check.check import check
from flashwright.generate.packed import PackedOrder
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.spec import Batch

torch = pytest.importorskip("torch")
import flashwright  # noqa: E402
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import NoKernel  # noqa: E402
from flashwright.serving import kernels, kvcache, tree  # noqa: E402
from flashwright.serving.kvcache import flash_attn_with_kvcache  # noqa: E402
from tests.share import some  # noqa: E402
from tests.unit.emulated import needs_compilers  # noqa: E402
from tests.unit.test_emulate_backward import launched as emulated  # noqa: E402
from tests.unit.test_varlen import in_pages  # noqa: E402
from tests.unit.together import kernels as kernels_of  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_packed  # noqa: E402

LENGTHS = [0, 1, 17, 128, 200]
ROOM = 208


@pytest.fixture(autouse=True)
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackedOrder, "make", make_packed)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(flex, "_TASKS", {})
    torch.manual_seed(0)
    return interpret_operators(monkeypatch)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function as it is with CUDA tensors."""

    def call(*given: Any, **settings: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(flex, "card_of", lambda device: CARD)
            patch.setattr(kvcache, "_on_cpu", lambda tensor: False)
            return flash_attn_with_kvcache(*given, **settings)

    return call


def problem(queries: int = 1, heads: int = 6) -> tuple[Any, list[tuple[Any, Any]], Any]:
    """Queries, the keys and values of each sequence, and their lengths."""
    q = torch.randn(len(LENGTHS), queries, heads, 64).bfloat16()
    keys = [tuple(torch.randn(n, 2, 64).bfloat16() for _ in "kv") for n in LENGTHS]
    return q, keys, torch.tensor(LENGTHS, dtype=torch.int32)  # type: ignore[return-value]


def in_entries(keys: list[tuple[Any, Any]]) -> list[Any]:
    """Caches with an entry for each sequence, NaN behind its keys."""
    caches = [torch.full((len(keys), ROOM, 2, 64), torch.nan).bfloat16() for _ in "kv"]
    for b, pair in enumerate(keys):
        for cache, rows in zip(caches, pair, strict=True):
            cache[b, : len(rows)] = rows
    return caches


def alone(q: Any, keys: list[tuple[Any, Any]], **settings: Any) -> tuple[Any, Any]:
    """Each sequence by `flashwright.attention`; without keys 0 and -inf."""
    found = []
    for row, pair in zip(q, keys, strict=True):
        if not len(pair[0]):
            empty = torch.zeros_like(row.transpose(0, 1)[None])
            found.append((empty, torch.full(empty.shape[:-1], -torch.inf)))
            continue
        one = (x.transpose(0, 1)[None] for x in (row, *pair))
        found.append(flashwright.attention(*one, return_lse=True, **settings))
    return torch.cat([o for o, _ in found]).transpose(1, 2), torch.cat([lse for _, lse in found])


def close(found: Any, wanted: Any) -> None:
    assert found[0].shape == wanted[0].shape
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=1e-4)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
    "window": (
        {"causal": True, "window_size": (15, 0), "softcap": 20.0},
        {"causal": True, "window": 16, "softcap": 20.0},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("queries", [1, 3])
def test_pytorch_computes_each_sequence(name: str, queries: int) -> None:
    ours, theirs = SETTINGS[name]
    q, keys, lengths = problem(queries)
    wanted = alone(q, keys, **theirs)
    given = {"cache_seqlens": lengths, "return_softmax_lse": True, **ours}
    close(flash_attn_with_kvcache(q, *in_entries(keys), **given), wanted)
    table, *caches = in_pages(16, keys)
    close(flash_attn_with_kvcache(q, *caches, block_table=table, **given), wanted)


CACHES: list[tuple[int | None, int]] = [(48, 3), (None, 3), (1, 0), (None, 0), (64, 1)]
GROUPS = [(10, 2), (2, 16), (14, 1), (32, 1), (32, 16)]
"""Heads and queries."""


@pytest.mark.parametrize("cache", some(CACHES, 3), ids=str)
def test_a_kernel_computes_it(
    cache: tuple[int | None, int], on_gpu: Any, launched: list[tuple[str, ...]]
) -> None:
    page, splits = cache
    q, keys, lengths = problem()
    caches, settings = in_entries(keys), {"cache_seqlens": lengths, "num_splits": splits}
    if page is not None:
        settings["block_table"], *caches = in_pages(page, keys)
    found = on_gpu(q, *caches, return_softmax_lse=True, **settings)
    assert launched == [("O", "LSE")]
    close(found, alone(q, keys))


@pytest.mark.parametrize("group", some(GROUPS, 5), ids=str)
def test_heads_of_a_group_are_rows_of_a_tile(group: tuple[int, int], on_gpu: Any) -> None:
    """Groups of 1, 5, 7 and 16."""
    heads, queries = group
    q, keys, lengths = problem(queries, heads)
    settings = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    close(on_gpu(q, *in_entries(keys), **settings), alone(q, keys, causal=True))


EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (15, 0)},
    "softcap": {"softcap": 20.0},
    "sink": {"sink": torch.linspace(-1.5, 1.5, 6)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.9, 6)},
}


@pytest.mark.parametrize("name", some(EXTRAS, 3))
def test_options(name: str, on_gpu: Any) -> None:
    q, keys, lengths = problem(3)
    table, *caches = in_pages(16, keys)
    settings = {"cache_seqlens": lengths, "block_table": table, "causal": True, **EXTRAS[name]}
    wanted = flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **settings)
    close(on_gpu(q, *caches, return_softmax_lse=True, **settings), wanted)


def tree_of(queries: int) -> Any:
    """Chains of two: token n has token n - 2 and its ancestors before it."""
    distance = torch.arange(queries)[:, None] - torch.arange(queries)
    return ((distance >= 0) & (distance % 2 == 0)).expand(len(LENGTHS), -1, -1)


@pytest.mark.parametrize("page", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_a_tree_of_queries(page: int | None, on_gpu: Any, launched: list[tuple[str, ...]]) -> None:
    """As its chains, each a sequence of its own behind the same keys."""
    q, keys, lengths = problem(5)
    keys, lengths = keys[2:], lengths[2:]
    q, mask = q[2:], tree_of(5)[2:].clone()
    caches, settings = in_entries(keys), {"cache_seqlens": lengths, "return_softmax_lse": True}
    if page is not None:
        settings["block_table"], *caches = in_pages(page, keys)
    found = [
        flash_attn_with_kvcache(q, *caches, tree_mask=mask, **settings),
        on_gpu(q, *caches, tree_mask=mask, num_splits=3, **settings),
    ]
    assert launched == [("O", "LSE")]
    for first in (0, 1):
        own = torch.arange(first, 5, 2)
        rows = [tuple(torch.cat((x[:-5], x[-5:][own])) for x in pair) for pair in keys]
        wanted = alone(q[:, own], rows, causal=True)  # type: ignore[arg-type]
        for out, lse in found:
            close((out[:, own], lse[:, :, own]), wanted)


def test_a_tree_as_bytes_and_as_bits() -> None:
    q, keys, lengths = problem(5)
    caches, settings = in_entries(keys), {"cache_seqlens": lengths, "causal": True}
    mask = tree_of(5) & (torch.rand(len(LENGTHS), 5, 5) < 0.7)
    wanted = flash_attn_with_kvcache(q, *caches, tree_mask=mask, **settings)
    bits = (mask.long() << torch.arange(5)).sum(-1)
    for other in (128 * mask.byte(), bits):
        torch.testing.assert_close(
            flash_attn_with_kvcache(q, *caches, tree_mask=other, **settings), wanted
        )
    for bad, error in ((bits[:, 1:], ValueError), (bits.int(), TypeError), (mask[1:], ValueError)):
        with pytest.raises(error, match="tree_mask"):
            flash_attn_with_kvcache(q, *caches, tree_mask=bad, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"causal": True, "sink": torch.randn(6)},
    ],
    ids=len,
)
def test_a_prefix_that_sequences_share(
    settings: dict[str, Any], on_gpu: Any, launched: list[tuple[str, ...]]
) -> None:
    """As if each sequence had it before its own keys."""
    q, keys, lengths = (x[2:] if settings else x for x in problem(3))  # as many keys as queries
    common = [torch.randn(70, 2, 64).bfloat16() for _ in "kv"]
    whole = [tuple(torch.cat(parts) for parts in zip(common, pair, strict=True)) for pair in keys]
    wanted = alone(q, whole, **settings)  # type: ignore[arg-type]
    given = {"cache_seqlens": lengths, "prefix_k": common[0], "prefix_v": common[1]}
    for call in (flash_attn_with_kvcache, on_gpu):
        close(call(q, *in_entries(keys), return_softmax_lse=True, **given, **settings), wanted)
    assert launched == [("O", "LSE")] * 2


def test_states_of_parts_of_the_keys() -> None:
    q, k, v = (torch.randn(1, 2, n, 16).half() for n in (5, 40, 40))
    wanted = flashwright.attention(q, k, v, return_lse=True)
    parts = [(k[:, :, at], v[:, :, at]) for at in (slice(13), slice(13, None))]
    states = [flashwright.attention(q, *part, return_lse=True) for part in parts]
    rows = [(out.transpose(1, 2), lse) for out, lse in states]
    close(flashwright.merge_states(*rows[0], *rows[1]), (wanted[0].transpose(1, 2), wanted[1]))
    empty = torch.zeros_like(rows[0][0]), torch.full_like(rows[0][1], -torch.inf)
    close(flashwright.merge_states(*rows[0], *empty), rows[0])
    close(flashwright.merge_states(*empty, *rows[0]), rows[0])
    both, none = flashwright.merge_states(*empty, *empty)
    assert not both.any()
    assert (none == -torch.inf).all()
    with pytest.raises(ValueError, match="lse2 must have"):
        flashwright.merge_states(*rows[0], rows[1][0], rows[1][1].mT)


def test_the_usual_scale_needs_no_kernel_of_its_own(on_gpu: Any) -> None:
    q, keys, lengths = problem()
    caches = in_entries(keys)
    for scale in (None, 0.125, 64**-0.5):
        on_gpu(q, *caches, cache_seqlens=lengths, softmax_scale=scale)
    assert len(kernels._KERNELS) == 1


def test_entries_and_padding(on_gpu: Any) -> None:
    """Sequences whose entries lie elsewhere, with unused positions before their keys."""
    q, keys, lengths = problem()
    entries = torch.tensor([4, 0, 6, 2, 1], dtype=torch.int32)
    before = torch.tensor([0, 3, 5, 0, 8], dtype=torch.int32)
    caches = [torch.full((7, ROOM, 2, 64), torch.nan).bfloat16() for _ in "kv"]
    for entry, first, pair in zip(entries, before, keys, strict=True):
        for cache, rows in zip(caches, pair, strict=True):
            cache[entry, first : first + len(rows)] = rows
    settings = {"cache_batch_idx": entries, "cache_leftpad": before, "return_softmax_lse": True}
    wanted = alone(q, keys)
    for call in (flash_attn_with_kvcache, on_gpu):
        close(call(q, *caches, cache_seqlens=lengths + before, **settings), wanted)
    wider = [torch.cat((x, x), dim=1)[:, :ROOM] for x in caches]  # entries that are further apart
    close(on_gpu(q, *wider, cache_seqlens=lengths + before, **settings), wanted)


@pytest.mark.parametrize("page", [None, 16])
def test_new_keys_are_appended(page: int | None) -> None:
    q, keys, lengths = problem(2)
    new = [torch.randn(len(LENGTHS), 2, 2, 64).bfloat16() for _ in "kv"]
    settings: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    caches = in_entries(keys)
    if page is not None:
        room = [tuple(torch.cat((x, x[:0].new_zeros(2, 2, 64))) for x in pair) for pair in keys]
        settings["block_table"], *caches = in_pages(page, room)  # type: ignore[arg-type]
    found = flash_attn_with_kvcache(q, *caches, *new, return_softmax_lse=True, **settings)
    both = [
        tuple(torch.cat(parts) for parts in zip(pair, rows, strict=True))
        for pair, rows in zip(keys, zip(*new, strict=True), strict=True)
    ]
    close(found, alone(q, both, causal=True))  # type: ignore[arg-type]
    again = flash_attn_with_kvcache(q, *caches, **{**settings, "cache_seqlens": lengths + 2})
    torch.testing.assert_close(again, found[0])


@pytest.mark.parametrize("pairs", [True, False])
def test_queries_and_new_keys_are_rotated(pairs: bool) -> None:
    """Scores depend on distances alone: behind a cache they are as they are from the start."""
    angles = torch.arange(ROOM)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": pairs}
    q, new = torch.randn(1, 4, 2, 64), [torch.randn(1, 4, 2, 64) for _ in "kv"]
    found = []
    for first in (0, 9):
        caches = [torch.zeros(1, ROOM, 2, 64) for _ in "kv"]
        before = torch.tensor([first], dtype=torch.int32)
        given = (x.half() for x in (q, *caches, *new))
        settings = {"cache_seqlens": before, "cache_leftpad": before, "causal": True, **turn}
        found.append(flash_attn_with_kvcache(*given, **settings))
    torch.testing.assert_close(found[0], found[1], atol=2e-3, rtol=2e-3)
    plain = flash_attn_with_kvcache(q.half(), *(x.half() for x in new), causal=True)
    assert (found[0] - plain).abs().max() > 0.1


def test_splits_fill_the_gpu() -> None:
    card = gpus.find("h200")
    assert split_count(card, 1000, 65536) == 1
    assert split_count(card, 8, 65536) == 15  # 120 of 132 SMs: 16 would fill 97 %
    assert split_count(card, 1, 100) == 2  # no more than there are steps
    assert split_count(card, 1, 64) == 1
    assert split_count(card, 100, 8192) == 5


def test_lengths_are_read_by_the_kernel(on_gpu: Any, launched: list[tuple[str, ...]]) -> None:
    """As a CUDA graph replays it: other lengths, and nothing else of the call changes."""
    q, keys, lengths = problem()
    caches = in_entries(keys)
    first = on_gpu(q, *caches, cache_seqlens=lengths)
    lengths.copy_(torch.tensor([0, 1, 10, 100, 30]))
    other = on_gpu(q, *caches, cache_seqlens=lengths)
    assert len(launched) == 2
    torch.testing.assert_close(first[:2], other[:2])
    shorter = [tuple(x[:n] for x in pair) for pair, n in zip(keys, lengths, strict=True)]
    close((other, torch.zeros(())), (alone(q, shorter)[0], torch.zeros(())))  # type: ignore[arg-type]


def test_arguments_of_a_known_form_are_not_looked_at_again(
    on_gpu: Any, launched: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tensors of the same shapes and strides, anywhere in memory."""
    looks: list[Any] = []
    look = kvcache._given

    def counted(*given: Any) -> Any:
        looks.append(given)
        return look(*given)

    monkeypatch.setattr(kvcache, "_given", counted)
    for n, width in enumerate((ROOM, ROOM, ROOM + 8)):
        q, keys, lengths = problem()
        caches = [torch.cat((x, x), dim=1)[:, :width] for x in in_entries(keys)]
        settings = {"cache_seqlens": lengths.clone(), "return_softmax_lse": True}
        close(on_gpu(q, *caches, **settings), alone(q, keys))
        assert len(looks) == (1 if n < 2 else 2)
        assert launched[n] == ("O", "LSE")


def test_another_form_is_looked_at(on_gpu: Any) -> None:
    q, keys, lengths = problem()
    caches = dict(zip(("k_cache", "v_cache"), in_entries(keys), strict=True))
    given = {"q": q, **caches, "cache_seqlens": lengths}
    on_gpu(**given)
    changes: list[tuple[dict[str, Any], Any, str]] = [
        ({"q": q.half()}, ValueError, "make them alike"),
        ({"cache_seqlens": lengths.long()}, TypeError, "cache_seqlens must be int32"),
        ({"k_cache": given["k_cache"][:, :-1]}, ValueError, "the same positions"),
        ({"q": q.clone().requires_grad_()}, NoKernel, "no gradient"),
        ({"sink": torch.zeros(2)}, NoKernel, "sink must have a number for each"),
    ]
    for change, error, message in changes:
        with pytest.raises(error, match=message):
            on_gpu(**given | change)


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize(
    ("gpu", "page", "queries"),
    [("h200", None, 2), ("h200", 16, 2), ("a100", 64, 2), ("h200", 16, 5)],
)
def test_the_kernels_compute_it(gpu: str, page: int | None, queries: int) -> None:
    """Compiled, and under emulation: two queries a sequence, or a tree of five; seven heads in a
    group."""
    card, lengths = gpus.find(gpu), [0, 1, 130, 64, 17]
    spec = make_spec("gqa", heads=14, kv_heads=2, head_dim=64, dtype="bf16", causal=True)
    mods = tree.mods() if queries > 2 else None
    order = PackedOrder(spec.of_sequences(Batch(False, True, page, queries)), card, mods)
    programs = check(parse(order.code())).kernels
    q = torch.randn(len(lengths), queries, 14, 64).bfloat16()
    keys = [tuple(torch.randn(n, 2, 64).bfloat16() for _ in "kv") for n in lengths]
    given = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "causal": True}
    if page is None:
        caches = in_entries(keys)  # type: ignore[arg-type]
        arrays = {"StartsK": np.arange(len(lengths), dtype=np.int32) * ROOM}
    else:
        given["block_table"], *caches = in_pages(page, keys)  # type: ignore[arg-type]
        arrays = {"Table": given["block_table"].numpy()}
    if mods is not None:
        given["tree_mask"] = tree_of(queries).clone()
        arrays["Tree"] = given["tree_mask"].numpy().view(ml_dtypes.float8_e4m3fn)
    arrays["LengthsK"] = given["cache_seqlens"].numpy()
    arrays["Q"] = in_bf16(q.transpose(1, 2))
    arrays["O"] = np.full_like(arrays["Q"], np.nan)
    arrays["LSE"] = np.full(arrays["Q"].shape[:-1], np.nan, np.float32)
    laid = caches if page is not None else [x.flatten(0, 1) for x in caches]
    arrays |= {n: in_bf16(x.transpose(-3, -2)) for n, x in zip("KV", laid, strict=True)}
    dims = {"batch": len(lengths), "heads": 14, "kv_heads": 2, "q_len": queries, "kv_len": ROOM}
    dims |= {"pages": len(caches[0]), "max_pages": 1, "kv_tokens": len(lengths) * ROOM, "splits": 3}
    if page is not None:
        dims["max_pages"] = given["block_table"].shape[1]
    made = kernels_of([(format_tree(p.tree), spec) for p in programs], gpu)
    found = emulated(made, Steps.of(Kernels(programs)), arrays, dims, "eager")
    wanted = flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **given)
    out = torch.from_numpy(found["O"].astype(np.float32)).transpose(1, 2)
    close((out, torch.from_numpy(found["LSE"])), wanted)


def in_bf16(tensor: Any) -> Any:
    return np.ascontiguousarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))


def new_rows(batch: int, tokens: int) -> dict[str, Any]:
    return {name: torch.zeros(batch, tokens, 2, 64).bfloat16() for name in "kv"}


def angles(positions: int, *columns: int) -> dict[str, Any]:
    names = ("rotary_cos", "rotary_sin")
    return {n: torch.ones(positions, x) for n, x in zip(names, columns, strict=True)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"cache_seqlens": torch.zeros(3)},
            TypeError,
            r"cache_seqlens must be int32 of shape \(5\)",
        ),
        ({"block_table": torch.zeros(5, 9)}, TypeError, "block_table must be int32"),
        (
            {"cache_seqlens": None, "block_table": torch.zeros(5, 9).int()},
            ValueError,
            "needs cache",
        ),
        ({"window_size": (7, 3)}, NoKernel, "window_size"),
        ({"k": torch.zeros(5, 1, 2, 64)}, ValueError, "pass both k and v"),
        ({"prefix_k": torch.zeros(9, 2, 64)}, ValueError, "pass both prefix_k and prefix_v"),
        (
            dict.fromkeys(("prefix_k", "prefix_v"), torch.zeros(9, 1, 64).bfloat16()),
            ValueError,
            "the heads of k_cache",
        ),
        ({"cache_seqlens": ROOM + 1}, ValueError, f"the cache has room for {ROOM}"),
        ({"sink": torch.zeros(2)}, NoKernel, "sink must have a number for each of 6 heads"),
        ({"sink": [0.0] * 6}, TypeError, "sink must be a torch.Tensor, not list"),
        ({"tree_mask": [1]}, TypeError, "tree_mask must be a torch.Tensor, not list"),
        ({"window_size": 7}, TypeError, r"window_size must be \(left, right\)"),
        ({"cache_seqlens": LENGTHS}, TypeError, "cache_seqlens must be a torch.Tensor, not list"),
        (
            {"cache_seqlens": torch.tensor([0, 1, 17, 128, 209]).int()},
            ValueError,
            "cache_seqlens has 209: the cache has room for 208",
        ),
        ({"cache_batch_idx": torch.arange(1, 6).int()}, ValueError, "cache_batch_idx has 5: the"),
        ({"cache_leftpad": torch.ones(5).int()}, ValueError, "must not be above cache_seqlens"),
        ({"num_splits": -1}, ValueError, "num_splits must be a number of thread blocks"),
        ({"num_splits": 1.5}, ValueError, "num_splits must be a number of thread blocks"),
        (new_rows(5, 9), ValueError, "no room for 9 new keys behind 200"),
        (new_rows(1, 1), ValueError, r"k must have the shape \(5, 1, 2, 64\), as q and the cache"),
        ({**new_rows(5, 2), "v": new_rows(5, 1)["v"]}, ValueError, "v must have the shape"),
        ({n: x.float() for n, x in new_rows(5, 1).items()}, TypeError, "k must be torch.bfloat16"),
        (angles(200, 32, 32), ValueError, "have 200 positions, and 201 are needed"),
        (angles(300, 32, 16), ValueError, "must have one shape"),
        (angles(300, 48, 48), ValueError, r"must have one shape, \(positions, 32\) or less wide"),
        (
            dict.fromkeys(("prefix_k", "prefix_v"), torch.zeros(9, 2, 32).bfloat16()),
            ValueError,
            "prefix_k is 32 wide and q 64",
        ),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], error: Any, message: str) -> None:
    q, keys, lengths = problem()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, *in_entries(keys), **{"cache_seqlens": lengths, **change})


def test_what_does_not_fit_is_said_with_a_gpu_too(on_gpu: Any) -> None:
    q, keys, lengths = problem()
    for change in ({"sink": [0.0] * 6}, {"tree_mask": [1]}, {"cache_seqlens": LENGTHS}):
        with pytest.raises(TypeError, match=r"must be a torch.Tensor, not list"):
            on_gpu(q, *in_entries(keys), **{"cache_seqlens": lengths, **change})
    with pytest.raises(ValueError, match="num_splits must be"):
        on_gpu(q, *in_entries(keys), cache_seqlens=lengths, num_splits=-1)
    with pytest.raises(ValueError, match="k_cache is 32 wide and q 64"):
        on_gpu(q, *(x[..., :32] for x in in_entries(keys)), cache_seqlens=lengths)


def test_a_prefix_in_fp8_is_refused_as_it_has_no_scales() -> None:
    q, keys, lengths = problem()
    caches = [x.nan_to_num().to(torch.float8_e4m3fn) for x in in_entries(keys)]
    given = {"cache_seqlens": lengths, "k_descale": 2.0, "v_descale": 2.0}
    prefix = torch.randn(9, 2, 64).bfloat16()
    flash_attn_with_kvcache(q, *caches, **given, prefix_k=prefix, prefix_v=prefix)
    narrow = prefix.to(torch.float8_e4m3fn)
    with pytest.raises(NoKernel, match="has no scales: pass prefix_k and prefix_v in the type"):
        flash_attn_with_kvcache(q, *caches, **given, prefix_k=narrow, prefix_v=narrow)


def test_a_page_that_is_not_there_is_said() -> None:
    q, keys, lengths = problem()
    table, *caches = in_pages(16, keys)
    table[4, 0] = 99
    with pytest.raises(ValueError, match="block_table has 99: the last page is"):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table)


def test_no_sequence_and_no_position() -> None:
    q, keys, _ = problem()
    caches = in_entries(keys)
    out, lse = flash_attn_with_kvcache(q[:0], *(x[:0] for x in caches), return_softmax_lse=True)
    assert (out.shape, lse.shape) == (q[:0].shape, (0, 6, 1))
    out, lse = flash_attn_with_kvcache(q, *(x[:, :0] for x in caches), return_softmax_lse=True)
    close((out, lse), (torch.zeros_like(q), torch.full((5, 6, 1), -torch.inf)))


def test_there_are_no_gradients() -> None:
    q, keys, _ = problem()
    with pytest.raises(NoKernel, match="has no gradient"):
        flash_attn_with_kvcache(q.requires_grad_(), *in_entries(keys))
    with torch.no_grad():
        flash_attn_with_kvcache(q, *in_entries(keys))
