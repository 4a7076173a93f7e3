"""Caches of 8-bit keys and values beside 16-bit queries."""

from __future__ import annotations

import re
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
from flashwright.spec import Batch

torch = pytest.importorskip("torch")
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import NoKernel  # noqa: E402
from flashwright.serving import kernels, kvcache, varlen  # noqa: E402
from flashwright.serving.kvcache import flash_attn_with_kvcache  # noqa: E402
from flashwright.serving.varlen import flash_attn_varlen_func  # noqa: E402
from tests.unit.emulated import needs_compilers  # noqa: E402
from tests.unit.test_emulate_backward import launched as emulated  # noqa: E402
from tests.unit.together import kernels as kernels_of  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_packed  # noqa: E402

ROOM = 208
LENGTHS = [0, 1, 130, 64, 17]
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
NARROW = {"fp8": E4M3, "int8": INT8}
HEADS = 2
SLOW = pytest.mark.slow


def problem(
    heads: int = 6,
    queries: int = 2,
    width: int = 64,
    kind: Any = torch.bfloat16,
    narrow: Any = E4M3,
) -> Any:
    """Queries, caches of entries with NaN behind each sequence's keys, or 127, scales, and the
    caches with the numbers that the scales make of them."""
    torch.manual_seed(0)
    q = torch.randn(len(LENGTHS), queries, heads, width).to(kind)
    scales = [torch.rand(len(LENGTHS), HEADS) + 0.5 for _ in "kv"]
    shape = len(LENGTHS), ROOM, HEADS, width
    if narrow is INT8:
        caches = [torch.randint(-128, 128, shape, dtype=INT8) for _ in "kv"]
        scales = [scale / 32 for scale in scales]
    else:
        caches = [(3 * torch.randn(shape)).to(E4M3) for _ in "kv"]
    for cache in caches:
        cache.view(torch.uint8)[:, ::7, :, ::5] = 3  # subnormal
        for b, length in enumerate(LENGTHS):
            cache[b, length:] = 127 if narrow is INT8 else torch.nan
    wide = [c.float() * s[:, None, :, None] for c, s in zip(caches, scales, strict=True)]
    return q, caches, scales, wide


def in_pages(size: int, caches: list[Any]) -> tuple[Any, list[Any]]:
    """A table and pages in another order."""
    count = ROOM // size
    order = torch.randperm(len(LENGTHS) * count)
    table = order.reshape(len(LENGTHS), count).int()
    pages = []
    for cache in caches:
        parts = cache.view(torch.uint8).unflatten(1, (count, size)).flatten(0, 1)
        page = torch.empty_like(parts)
        page[order] = parts
        pages.append(page.view(caches[0].dtype))
    return table, pages


def settings_of(scales: list[Any]) -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    given = {"cache_seqlens": lengths, "return_softmax_lse": True, "causal": True}
    return {**given, "k_descale": scales[0], "v_descale": scales[1]}


def wanted_of(q: Any, wide: list[Any]) -> Any:
    """The same over a cache of wide numbers."""
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    given = {"cache_seqlens": lengths, "return_softmax_lse": True, "causal": True}
    out, lse = flash_attn_with_kvcache(q.half(), *(x.half() for x in wide), **given)
    return out.to(q.dtype), lse


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.03, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=5e-3, rtol=1e-3)


DECODE = [
    pytest.param("h200", None, "bf16", 64, 16, "fp8", marks=SLOW),
    pytest.param("h200", 16, "fp16", 128, 16, "fp8", marks=SLOW),
    pytest.param("h200", None, "bf16", 64, 2, "fp8", marks=SLOW),
    pytest.param("h200", 16, "bf16", 128, 2, "fp8", marks=SLOW),
    pytest.param("a100", 16, "bf16", 96, 16, "fp8", marks=SLOW),
    pytest.param("h200", 16, "bf16", 128, 2, "int8", marks=SLOW),
    pytest.param("h200", None, "fp16", 64, 16, "int8", marks=SLOW),
    pytest.param("a100", 16, "bf16", 96, 16, "int8", marks=SLOW),
]
"""With the most queries that a sequence has: few leave one consumer warpgroup, and two of which
the warps convert."""


@needs_compilers
@pytest.mark.parametrize(("gpu", "page", "dtype", "width", "most", "narrow"), DECODE)
def test_the_kernels_compute_it(
    gpu: str, page: int | None, dtype: str, width: int, most: int, narrow: str
) -> None:
    """Compiled, and under emulation: scales for each sequence and head, seven heads in a group."""
    made = {"heads": 14, "kv_heads": HEADS, "head_dim": width, "dtype": dtype, "causal": True}
    spec = make_spec("gqa", kv_dtype=narrow, **made)
    order = PackedOrder(spec.of_sequences(Batch(False, True, page, most)), gpus.find(gpu))
    programs = check(parse(order.code())).kernels
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    q, caches, scales, wide = problem(14, width=width, kind=kind, narrow=NARROW[narrow])
    if page is None:
        arrays: dict[str, Any] = {"StartsK": np.arange(len(LENGTHS), dtype=np.int32) * ROOM}
        laid = [x.flatten(0, 1) for x in caches]
    else:
        table, laid = in_pages(page, caches)
        arrays = {"Table": table.numpy()}
    arrays["LengthsK"] = np.array(LENGTHS, np.int32)
    for name, scale in zip("KV", scales, strict=True):
        arrays[f"{name}Descale"] = scale.numpy()
    own = ml_dtypes.bfloat16 if dtype == "bf16" else np.float16
    arrays["Q"] = np.ascontiguousarray(q.transpose(1, 2).float().numpy().astype(own))
    arrays["O"] = np.full_like(arrays["Q"], np.nan)
    arrays["LSE"] = np.full(arrays["Q"].shape[:-1], np.nan, np.float32)
    for name, x in zip("KV", laid, strict=True):
        bits = x.view(torch.uint8).transpose(-3, -2).contiguous().numpy()
        arrays[name] = bits.view(ml_dtypes.float8_e4m3fn if narrow == "fp8" else np.int8)
    dims = {"batch": len(LENGTHS), "heads": 14, "kv_heads": HEADS, "q_len": 2, "kv_len": ROOM}
    dims |= {"pages": len(laid[0]), "max_pages": 1, "kv_tokens": len(laid[0]), "splits": 3}
    if page is not None:
        dims["max_pages"] = ROOM // page
    steps = kernels_of([(format_tree(p.tree), spec) for p in programs], gpu)
    found = emulated(steps, Steps.of(Kernels(programs)), arrays, dims, "eager")
    out = torch.from_numpy(found["O"].astype(np.float32)).transpose(1, 2)
    close((out, torch.from_numpy(found["LSE"])), wanted_of(q, wide))


@pytest.mark.parametrize(
    ("batch", "warps", "helpers"),
    [(Batch(False, True, None, 2), 4, 7), (Batch(True, True), 8, 3)],
)
def test_one_consumer_warpgroup_leaves_room_for_more_helpers(
    batch: Batch, warps: int, helpers: int
) -> None:
    """All of them take part in each ring, and all threads have the registers that setmaxnreg
    gives: no more than an SM has, and no more than the block was launched with."""
    spec = make_spec("gqa", kv_dtype="fp8", heads=14, kv_heads=HEADS, head_dim=64, dtype="bf16")
    order = PackedOrder(spec.of_sequences(batch), gpus.find("h200"))
    program = check(parse(order.code())).kernels[0]
    made = translate(program, gpus.find("h200"))
    assert program.warps == warps
    assert made.plan.threads == 32 * (warps + 1 + helpers)
    number = "Helpers" if helpers == 7 else "fw::helpers"
    assert f"K16_ring.init(Warps, {number});" in made.source
    assert f"K_ring.init({number});" in made.source
    counts = {kind: int(n) for kind, n in re.findall(r"(de)?alloc_registers<(\d+)>", made.source)}
    launched = 65536 // made.plan.threads // 8 * 8
    given = 32 * (warps * counts[""] + (1 + helpers) * counts["de"])
    assert given <= launched * made.plan.threads
    assert counts["de"] <= launched <= counts[""]


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The functions as they are with CUDA tensors, by an operator that interprets the program."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackedOrder, "make", make_packed)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(flex, "_TASKS", {})
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    launched = interpret_operators(monkeypatch)
    for module in (kvcache, varlen):
        monkeypatch.setattr(module, "_on_cpu", lambda tensor: False)
    return launched


@pytest.mark.parametrize("narrow", NARROW)
def test_pytorch_scales_keys_and_values(narrow: str) -> None:
    q, caches, scales, wide = problem(narrow=NARROW[narrow])
    wanted = wanted_of(q, wide)
    close(flash_attn_with_kvcache(q, *caches, **settings_of(scales)), wanted)
    table, pages = in_pages(16, caches)
    close(flash_attn_with_kvcache(q, *pages, block_table=table, **settings_of(scales)), wanted)


@pytest.mark.parametrize(
    ("page", "narrow"), [pytest.param(None, "fp8", marks=SLOW), (16, "fp8"), (16, "int8")]
)
def test_a_kernel_scales_them(page: int | None, narrow: str, on_gpu: list[tuple[str, ...]]) -> None:
    q, caches, scales, wide = problem(narrow=NARROW[narrow])
    settings = settings_of(scales)
    if page is not None:
        settings["block_table"], caches = in_pages(page, caches)
    found = flash_attn_with_kvcache(q, *caches, **settings)
    assert on_gpu == [("O", "LSE")]
    close(found, wanted_of_cpu(q, wide))


def wanted_of_cpu(q: Any, wide: list[Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache, "_on_cpu", lambda tensor: True)
        return wanted_of(q, wide)


@pytest.mark.parametrize(
    "scale", [0.25, *(pytest.param(s, marks=SLOW) for s in (None, torch.full((1,), 0.25)))]
)
def test_a_number_scales_all(scale: Any, on_gpu: list[tuple[str, ...]]) -> None:
    q, caches, _, _ = problem(heads=2)
    factor = 1.0 if scale is None else 0.25
    settings = settings_of([scale, scale])
    wanted = wanted_of_cpu(q, [x.float() * factor for x in caches])
    close(flash_attn_with_kvcache(q, *caches, **settings), wanted)


def test_packed_queries_over_pages(on_gpu: list[tuple[str, ...]]) -> None:
    """Each sequence has as many queries as keys, at most 40."""
    q, caches, scales, wide = problem(queries=40)
    counts = [min(n, 40) for n in LENGTHS]
    table, pages = in_pages(16, caches)
    rows = torch.cat([x[40 - n :] for x, n in zip(q, counts, strict=True)])
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    given = {"seqused_k": used, "block_table": table, "causal": True, "return_softmax_lse": True}
    named = {"k_descale": scales[0], "v_descale": scales[1], **given}
    out, _ = flash_attn_varlen_func(rows, *pages, starts, None, 40, ROOM, **named)
    wanted, _ = wanted_of_cpu(q, wide)
    wanted = torch.cat([x[40 - n :] for x, n in zip(wanted, counts, strict=True)])
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("narrow", NARROW)
def test_new_keys_are_divided_by_the_scales(narrow: str) -> None:
    q, caches, scales, _ = problem(narrow=NARROW[narrow])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    new = [torch.randn(len(LENGTHS), 2, HEADS, 64).bfloat16() for _ in "kv"]
    new[0][0, 0, 0, 0] = 3e4  # beyond the type's range
    settings = {**settings_of(scales), "causal": False}
    flash_attn_with_kvcache(q, *caches, *new, **settings)
    for cache, scale, rows in zip(caches, scales, new, strict=True):
        for b, n in enumerate(lengths):
            found = cache[b, n : n + 2].float() * scale[b, :, None]
            unit = scale[b, :, None]
            least, most = (-448, 448) if narrow == "fp8" else (-128, 127)
            right = rows[b].float().clamp(least * unit, most * unit)
            if narrow == "int8":  # to the nearest one
                assert ((found - right).abs() <= 0.501 * unit).all()
            else:
                torch.testing.assert_close(found, right, atol=0.01, rtol=2.0**-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_descale": torch.ones(3, 2)}, ValueError, "k_descale must be a number, or"),
        ({"v_descale": torch.ones(5, 2).half()}, TypeError, "v_descale must be float32"),
    ],
)
def test_scales_that_do_not_fit(change: dict[str, Any], error: Any, message: str) -> None:
    q, caches, scales, _ = problem()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, *caches, **{**settings_of(scales), **change})


def test_scales_are_for_narrow_caches() -> None:
    q, _, scales, wide = problem()
    with pytest.raises(NoKernel, match="k_descale and v_descale are for keys in"):
        flash_attn_with_kvcache(q, *(x.bfloat16() for x in wide), **settings_of(scales))


def test_both_caches_have_one_type() -> None:
    q, caches, scales, wide = problem()
    with pytest.raises(ValueError, match=r"value is torch\.bfloat16"):
        flash_attn_with_kvcache(q, caches[0], wide[1].bfloat16(), **settings_of(scales))
