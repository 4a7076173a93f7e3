"""MLA decode over a latent cache. Without a GPU the CUDA path is tried with an operator that
interprets the program that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.build.steps import Steps
from flashwright.check.check import check
from flashwright.generate.packed import PackedOrder
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels

torch = pytest.importorskip("torch")
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import NoKernel  # noqa: E402
from flashwright.serving import kernels, kvcache, mla  # noqa: E402
from flashwright.serving.mla import flash_mla_with_kvcache, get_mla_metadata  # noqa: E402
from tests.unit.emulated import needs_compilers  # noqa: E402
from tests.unit.test_emulate_backward import launched as emulated  # noqa: E402
from tests.unit.test_kvcache import in_bf16  # noqa: E402
from tests.unit.together import kernels as kernels_of  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_packed  # noqa: E402

LENGTHS = [0, 1, 64, 130, 17]
PAGE = 64
NARROW = (96, 64)
"""Columns of a key and of a value, where they need not be DeepSeek's."""


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
            patch.setattr(mla, "_on_cpu", lambda tensor: False)
            return flash_mla_with_kvcache(*given, **settings)

    return call


def problem(
    queries: int, heads: int, width: int, lengths: list[int] = LENGTHS
) -> tuple[tuple[Any, Any, Any, Any], list[Any]]:
    """Q, a cache in pages, its table and the lengths; and the keys of each sequence. Where no key
    is the pages are NaN, and the table names none."""
    q = torch.randn(len(lengths), queries, heads, width).bfloat16()
    keys = [torch.randn(n, width).bfloat16() for n in lengths]
    counts = [-(-n // PAGE) for n in lengths]
    free = iter(torch.randperm(sum(counts) + 2).tolist())
    cache = torch.full((sum(counts) + 2, PAGE, 1, width), torch.nan).bfloat16()
    table = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    for b, rows in enumerate(keys):
        for n, part in enumerate(rows.split(PAGE) if len(rows) else ()):
            table[b, n] = page = next(free)
            cache[page, : len(part), 0] = part
    return (q, cache, table, torch.tensor(lengths, dtype=torch.int32)), keys


def alone(q: Any, keys: list[Any], values: int, causal: bool = False) -> tuple[Any, Any]:
    """The definition, in fp64: each sequence by itself."""
    outs, logs = [], []
    for row, own in zip(q.double(), keys, strict=True):
        scores = torch.einsum("qhd,kd->hqk", row, own.double()) / q.shape[3] ** 0.5
        if causal:
            place = torch.arange(len(own)) - (len(own) - len(row))
            scores[:, place[None, :] > torch.arange(len(row))[:, None]] = -torch.inf
        logs.append(torch.logsumexp(scores, dim=-1))
        weights = torch.nan_to_num(scores.softmax(dim=-1))
        outs.append(torch.einsum("hqk,kd->qhd", weights, own[:, :values].double()))
    return torch.stack(outs), torch.stack(logs)


def close(found: Any, wanted: Any) -> None:
    assert found[0].shape == wanted[0].shape
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1].float(), wanted[1].float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("queries", "causal"), [(1, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_pytorch_and_a_kernel_compute_it(queries: int, causal: bool, on_gpu: Any) -> None:
    width, values = NARROW
    given, keys = problem(queries, 6, width)
    wanted = alone(given[0], keys, values, causal)
    for call in (flash_mla_with_kvcache, on_gpu):
        close(call(*given, values, *get_mla_metadata(given[3], 6, 1), causal=causal), wanted)


UNIT = {torch.float8_e4m3fn: 1, torch.int8: 32}
"""What 1 is in a cache of 8 bits, about."""


def narrow_cache(table: Any, keys: list[Any], kind: Any) -> tuple[Any, list[Any]]:
    """Keys of 8 bits in the pages of a table, of NaN or 127 where no key is; and the keys."""
    kept = [(UNIT[kind] * rows.float()).clamp(-128, 127).to(kind) for rows in keys]
    pages = 1 + int(table[table < 2**31 - 1].max())
    spare = 127 if kind is torch.int8 else torch.nan
    cache = torch.full((pages, PAGE, 1, keys[0].shape[1]), spare).to(kind)
    for b, rows in enumerate(kept):
        for n, part in enumerate(rows.split(PAGE) if len(rows) else ()):
            cache[table[b, n], : len(part), 0] = part
    return cache, kept


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_cache_of_8_bits(kind: Any, on_gpu: Any) -> None:
    """Keys and values are what it has, times a number for each sequence or one for all."""
    width, values = NARROW
    (q, _, table, lengths), keys = problem(2, 6, width)
    cache, kept = narrow_cache(table, keys, kind)
    for scales in (torch.rand(len(keys), 1) + 0.5, 0.5):
        each = scales[:, 0] if torch.is_tensor(scales) else torch.full((len(keys),), scales)
        wide = [x.float() * scale for x, scale in zip(kept, each / UNIT[kind], strict=True)]
        wanted = alone(q, wide, values, causal=True)
        for call in (flash_mla_with_kvcache, on_gpu):
            given = {"causal": True, "k_descale": scales / UNIT[kind]}
            given |= {"is_fp8_kvcache": kind is not torch.int8}
            close(call(q, cache, table, lengths, values, **given), wanted)


def test_keys_are_split_as_asked(on_gpu: Any) -> None:
    width, values = NARROW
    given, keys = problem(1, 6, width)
    close(on_gpu(*given, values, num_splits=3), alone(given[0], keys, values))


def program(**settings: Any) -> Kernels:
    order = PackedOrder(make_spec("mla-decode", **settings), gpus.find("h200"))
    verdict = check(parse(order.code()), order.gpu)
    assert not verdict.errors
    return Kernels(verdict.kernels)


@pytest.mark.slow
def test_a_key_is_copied_once() -> None:
    """The tile of the latent part serves both products; two warpgroups share its columns."""
    first, second = program().programs
    made = translate(first, gpus.find("h200"))
    assert made.report is not None
    assert made.report.products == "wgmma"
    assert sum(b.bytes * b.stages for b in first.buffers.values() if b.space == "shared") == (
        64 * 576 * 2 * 3
    )
    assert made.report.loops[0].overlapped
    loop = made.source[made.source.index("wait_ahead") - 600 :]
    order = [
        "start_product<false, false",  # O += P V of the tile before
        "Klatent_ring.wait_ahead()",
        "Klatent_shared.stage(Klatent_ring.ahead())",  # the scores of this one
        "Klatent_ring.release()",  # the next one can come
        "exchange.max",
        "all_ones(drops)",
        "to_shared",
    ]
    places = [loop.index(text) for text in order]
    assert places == sorted(places)
    assert translate(second, gpus.find("h200")).source  # sums in pieces of columns


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "unsplit", "narrow"), [(128, True, None), (16, False, None), (16, False, "fp8")]
)
def test_the_kernels_compute_it(heads: int, unsplit: bool, narrow: str | None) -> None:
    """Compiled, without spills, and under emulation."""
    lengths = [130, 1, 0] if heads == 16 else [70]
    queries = 2 if heads == 16 else 1
    both = program(heads=heads, causal=True, unsplit=unsplit, kv_dtype=narrow)
    (q, cache, table, counts), keys = problem(queries, heads, 576, lengths)
    arrays = {"Q": in_bf16(q.transpose(1, 2)), "K": in_bf16(cache.transpose(1, 2))}
    if narrow:
        cache, kept = narrow_cache(table, keys, torch.float8_e4m3fn)
        bits = cache.view(torch.uint8).transpose(1, 2).contiguous().numpy()
        arrays["K"] = bits.view(ml_dtypes.float8_e4m3fn)
        arrays["KDescale"] = np.linspace(0.5, 1.5, len(lengths), dtype=np.float32)[:, None]
        keys = [x.float() * float(s[0]) for x, s in zip(kept, arrays["KDescale"], strict=True)]
    arrays |= {"Table": table.numpy(), "LengthsK": counts.numpy()}
    shape = (len(lengths), heads, queries)
    arrays["O"] = np.full((*shape, 512), np.nan, arrays["Q"].dtype)
    arrays["LSE"] = np.full(shape, np.nan, np.float32)
    dims = {"batch": len(lengths), "heads": heads, "kv_heads": 1, "q_len": queries}
    dims |= {} if unsplit else {"splits": 2}
    dims |= {"kv_len": 256, "pages": len(cache), "max_pages": table.shape[1]}
    spec = make_spec("mla-decode", heads=heads, kv_dtype=narrow)
    made = kernels_of([(format_tree(p.tree), spec) for p in both.programs], "h200")
    found = emulated(made, Steps.of(both), arrays, dims, "eager")
    out = torch.from_numpy(found["O"].astype(np.float32)).transpose(1, 2)
    close((out, torch.from_numpy(found["LSE"])), alone(q, keys, 512, causal=True))


NARROW_CACHE = torch.zeros(9, PAGE, 1, 96).bfloat16()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": torch.zeros(5, 9)}, TypeError, "block_table must be int32"),
        ({"cache_seqlens": torch.zeros(3).int()}, TypeError, r"cache_seqlens must be int32 of"),
        ({"head_dim_v": 96}, ValueError, "head_dim_v must be a whole number above 0"),
        ({"k_cache": NARROW_CACHE[..., 0]}, ValueError, "k_cache must have the axes"),
        ({"k_cache": NARROW_CACHE.expand(9, PAGE, 2, 96)}, ValueError, "one head, which all"),
        ({"k_cache": NARROW_CACHE[..., :80]}, ValueError, "k_cache is 80 wide and q 96"),
        ({"k_cache": NARROW_CACHE.half()}, TypeError, "k_cache must be torch.bfloat16"),
        ({"q": torch.zeros(5, 1, 6, 96)}, TypeError, "q must be bfloat16 or float16"),
        ({"is_fp8_kvcache": True}, TypeError, "k_cache must be torch.float8_e4m3fn on"),
        (
            {"is_fp8_kvcache": True, "k_cache": torch.zeros(9, 64, 1, 656).to(torch.uint8)},
            NoKernel,
            "tokens of 656 bytes",
        ),
        ({"k_descale": 0.5}, NoKernel, "k_descale and v_descale are for keys in"),
        ({"num_splits": -1}, ValueError, "num_splits must be a number of thread blocks"),
        ({"num_splits": [1]}, ValueError, "num_splits must be a number of thread blocks"),
        ({"cache_seqlens": torch.tensor([0, 1, 64, 130, 999]).int()}, ValueError, "has 999: the p"),
        ({"cache_seqlens": 3}, TypeError, "cache_seqlens must be a torch.Tensor, not int"),
        ({"indices": torch.zeros(5, 1, 8).int()}, NoKernel, "indices: kernels are for dense"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], error: Any, message: str) -> None:
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    given = dict(zip(names, problem(1, 6, 96)[0], strict=True))
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**{**given, "head_dim_v": 64, **change})


def test_there_are_no_gradients() -> None:
    (q, *rest), _ = problem(1, 6, 96)
    with pytest.raises(NoKernel, match="has no gradient"):
        flash_mla_with_kvcache(q.requires_grad_(), *rest, 64)


def test_keys_that_are_not_split_have_a_kernel_without_parts(
    on_gpu: Any, launched: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are thread blocks enough, O is stored as it is."""
    monkeypatch.setattr(kvcache, "_SMALL", 0)
    made = []
    monkeypatch.setattr(PackedOrder, "make", lambda *a: (made.append(a[0].spec), make_packed(*a)))
    width, values = NARROW
    given, keys = problem(1, 6, width)
    for splits in (1, 2):
        close(on_gpu(*given, values, num_splits=splits), alone(given[0], keys, values))
    assert [spec.unsplit for spec in made] == [True, False]
