"""FlexAttention's functions on a GPU: right, and how fast beside FlexAttention itself.

`python -m tests.gpu.test_flex [LENGTH [HEAD_DIM ...]]` prints the times of every function of
examples/flex_mods.py beside compiled FlexAttention, in one run, and what the first call costs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashwright

torch = pytest.importorskip("torch")

FILE = Path(__file__).parents[2] / "examples" / "flex_mods.py"
Function = Callable[..., Any]


def gallery(batch: int, heads: int, length: int) -> Any:
    """The functions of the example, with tensors of these sizes on the GPU."""
    os.environ |= {"FLEX_MODS": f"{batch},{heads},{length}", "FLEX_MODS_DEVICE": "cuda"}
    spec = importlib.util.spec_from_file_location("flex_mods", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def problem(
    batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None
) -> list[Any]:
    torch.manual_seed(0)
    shapes = [heads, kv_heads or heads, kv_heads or heads]
    return [torch.randn(batch, h, length, dim, device="cuda", dtype=torch.bfloat16) for h in shapes]


def block_mask(function: Function, batch: int, heads: int, length: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(function, batch, heads, length, length, device="cuda")


def names(kind: str) -> list[str]:
    """The names in the example's MASKS or SCORES, read from its text."""
    text = FILE.read_text().partition(f"{kind} = (")[2].partition(")")[0]
    return text.replace("\n", " ").replace(",", " ").split()


@pytest.mark.parametrize("name", [*names("MASKS"), *names("SCORES")])
def test_it_computes_what_flex_attention_does(name: str) -> None:
    """Against FlexAttention in fp64, uncompiled."""
    from torch.nn.attention import flex_attention as flex

    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    module = gallery(2, 4, 512)
    function = getattr(module, name)
    given = problem(2, 4, 512, 64, kv_heads=2)
    how: dict[str, Any] = {"score_mod": function}
    if name in names("MASKS"):
        how = {"block_mask": block_mask(function, 2, 4, 512)}
    out, lse = flashwright.flex_attention(*given, enable_gqa=True, return_lse=True, **how)
    wide = [t.double() for t in given]
    aux = flex.AuxRequest(lse=True)
    wanted, more = flex.flex_attention(*wide, enable_gqa=True, return_aux=aux, **how)
    torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), more.lse, atol=1e-3, rtol=1e-3)


def test_attention_by_keywords_is_sdpa() -> None:
    q, k, v = problem(2, 8, 700, 128)
    out = flashwright.attention(q, k, v, causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)


def test_a_cuda_result_has_no_gradient_and_says_so() -> None:
    q, k, v = (t.requires_grad_() for t in problem(1, 4, 128, 64))
    out = flashwright.attention(q, k, v, causal=True)
    with pytest.raises(RuntimeError, match="gradient"):
        out.sum().backward()


# --- times ------------------------------------------------------------------------------------


def seconds(function: Function, rounds: int = 20) -> float:
    """The median time of a call on the GPU."""
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def compare(module: Any, name: str, length: int, dim: int) -> tuple[float, float, float, float]:
    """Seconds of ours and of FlexAttention, and of their first calls."""
    from torch.nn.attention.flex_attention import flex_attention

    batch, heads = module.BATCH, module.HEADS
    function = getattr(module, name)
    given = problem(batch, heads, length, dim)
    how: dict[str, Any] = {"score_mod": function}
    if name in names("MASKS"):
        how = {"block_mask": block_mask(function, batch, heads, length)}
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    firsts, times, outs = [], [], []
    for call in (flashwright.flex_attention, compiled):
        begin = time.perf_counter()
        outs.append(call(*given, **how))
        torch.cuda.synchronize()
        firsts.append(time.perf_counter() - begin)
        times.append(seconds(lambda call=call: call(*given, **how)))  # type: ignore[misc]
    torch.testing.assert_close(outs[0], outs[1], atol=0.03, rtol=0.03)
    return times[0], times[1], firsts[0], firsts[1]


def main() -> None:
    """Print a table: each function, both times, their ratio, both first calls."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    module = gallery(2, 16, length)
    for dim in [int(text) for text in sys.argv[2:]] or [64, 128]:
        ratios = []
        print(f"d{dim}, {length} tokens, bf16: ms, ms of FlexAttention, ratio; first calls in s")
        for name in [*names("MASKS"), *names("SCORES")]:
            try:
                ours, theirs, first, other = compare(module, name, length, dim)
            except Exception as error:
                told = str(error).splitlines()
                print(f"{name:22} {type(error).__name__}: {told[0][:100] if told else ''}")
                continue
            ratios.append(theirs / ours)
            row = f"{ours * 1e3:8.3f} {theirs * 1e3:8.3f} {theirs / ours:6.2f}"
            print(f"{name:22} {row} {first:6.1f} {other:6.1f}", flush=True)
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean {mean:.2f}, worst {min(ratios):.2f}, of {len(ratios)}")


if __name__ == "__main__":
    main()
