"""Caches of 8-bit keys and values beside 16-bit queries."""

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
from flashwright.program.kernels import Kernels
from flashwright.rewrite.sequences import Batch

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
E4M3 = torch.float8_e4m3fn
HEADS = 2


def problem(heads: int = 6, queries: int = 2, width: int = 64, kind: Any = torch.bfloat16) -> Any:
    """Queries, caches of entries with NaN behind each sequence's keys, scales, and the caches with
    the numbers that the scales make of them."""
    torch.manual_seed(0)
    q = torch.randn(len(LENGTHS), queries, heads, width).to(kind)
    scales = [torch.rand(len(LENGTHS), HEADS) + 0.5 for _ in "kv"]
    caches = [(3 * torch.randn(len(LENGTHS), ROOM, HEADS, width)).to(E4M3) for _ in "kv"]
    for cache in caches:
        cache.view(torch.uint8)[:, ::7, :, ::5] = 3  # subnormal
        for b, length in enumerate(LENGTHS):
            cache[b, length:] = torch.nan
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
        pages.append(page.view(E4M3))
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
    ("h200", None, "bf16", 64),
    pytest.param("h200", 16, "fp16", 128, marks=pytest.mark.slow),
    pytest.param("a100", 16, "bf16", 96, marks=pytest.mark.slow),
]


@needs_compilers
@pytest.mark.parametrize(("gpu", "page", "dtype", "width"), DECODE)
def test_the_kernels_compute_it(gpu: str, page: int | None, dtype: str, width: int) -> None:
    """Compiled, and under emulation: scales for each sequence and head, seven heads in a group."""
    made = {"heads": 14, "kv_heads": HEADS, "head_dim": width, "dtype": dtype, "causal": True}
    spec = make_spec("gqa", kv_dtype="fp8", **made)
    order = PackedOrder(spec, gpus.find(gpu), Batch(False, True, page), 16)
    programs = check(parse(order.code())).kernels
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    q, caches, scales, wide = problem(14, width=width, kind=kind)
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
        arrays[name] = bits.view(ml_dtypes.float8_e4m3fn)
    dims = {"batch": len(LENGTHS), "heads": 14, "kv_heads": HEADS, "q_len": 2, "kv_len": ROOM}
    dims |= {"pages": len(laid[0]), "max_pages": 1, "kv_tokens": len(laid[0]), "splits": 3}
    if page is not None:
        dims["max_pages"] = ROOM // page
    steps = kernels_of([(format_tree(p.tree), spec) for p in programs], gpu)
    found = emulated(steps, Steps.of(Kernels(programs)), arrays, dims, "eager")
    out = torch.from_numpy(found["O"].astype(np.float32)).transpose(1, 2)
    close((out, torch.from_numpy(found["LSE"])), wanted_of(q, wide))
