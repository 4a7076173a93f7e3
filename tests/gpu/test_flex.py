"""FlexAttention's functions on a GPU: right, and how fast beside FlexAttention itself.

`python -m tests.gpu.test_flex [LENGTH [HEAD_DIM ...]]` prints the times of every function of
examples/flex_mods.py beside compiled FlexAttention, in one run, and what the first call costs.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import statistics
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


def gallery(batch: int, heads: int, length: int, device: str = "cuda") -> Any:
    """The functions of the example, with tensors of these sizes."""
    os.environ |= {"FLEX_MODS": f"{batch},{heads},{length}", "FLEX_MODS_DEVICE": device}
    spec = importlib.util.spec_from_file_location("flex_mods", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def on_cpu(module: Any) -> Any:
    """The same functions, with the same tensors on the CPU."""
    found = gallery(module.BATCH, module.HEADS, module.LENGTH, "cpu")
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            setattr(found, name, value.cpu())
    return found


def problem(
    batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None
) -> list[Any]:
    torch.manual_seed(0)
    shapes = [heads, kv_heads or heads, kv_heads or heads]
    return [torch.randn(batch, h, length, dim, device="cuda", dtype=torch.bfloat16) for h in shapes]


def way(module: Any, name: str) -> dict[str, Any]:
    """The arguments that give flex_attention this function."""
    from torch.nn.attention.flex_attention import create_block_mask

    function = getattr(module, name)
    if name not in names("MASKS"):
        return {"score_mod": function}
    named = {step.argval for step in dis.get_instructions(function)}
    batch, heads = module.BATCH if "b" in named else None, module.HEADS if "h" in named else None
    sizes = (batch, heads, module.LENGTH, module.LENGTH)
    return {"block_mask": create_block_mask(function, *sizes, device=module.DEVICE)}


def names(kind: str) -> list[str]:
    """The names in the example's MASKS or SCORES, read from its text."""
    text = FILE.read_text().partition(f"{kind} = (")[2].partition(")")[0]
    return text.replace("\n", " ").replace(",", " ").split()


@pytest.mark.parametrize("name", [*names("MASKS"), *names("SCORES")])
def test_it_computes_what_flex_attention_does(name: str) -> None:
    """Against FlexAttention in fp64, uncompiled and on the CPU: vmap of CUDA's logsigmoid fails."""
    from torch.nn.attention import flex_attention as flex

    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    module = gallery(2, 4, 512)
    given = problem(2, 4, 512, 64, kv_heads=2)
    how = way(module, name)
    out, lse = flashwright.flex_attention(*given, enable_gqa=True, return_lse=True, **how)
    wide = [t.double().cpu() for t in given]
    aux = flex.AuxRequest(lse=True)
    wanted, more = flex.flex_attention(
        *wide, enable_gqa=True, return_aux=aux, **way(on_cpu(module), name)
    )
    torch.testing.assert_close(out.double().cpu(), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double().cpu(), more.lse, atol=1e-3, rtol=1e-3)


def test_attention_by_keywords_is_sdpa() -> None:
    q, k, v = problem(2, 8, 700, 128)
    out = flashwright.attention(q, k, v, causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)


def test_gradients_are_those_of_sdpa() -> None:
    """By the derived backward, which the first backward() makes."""
    given = [t.requires_grad_() for t in problem(1, 4, 128, 64)]
    wide = [t.detach().double().requires_grad_() for t in given]
    weights = torch.randn_like(given[0])
    (flashwright.attention(*given, causal=True) * weights).sum().backward()
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    (wanted * weights).sum().backward()
    for ours, theirs in zip(given, wide, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() < 0.02 * theirs.grad.norm()


def test_a_derivative_by_torch_func_is_an_error() -> None:
    q, k, v = problem(1, 4, 128, 64)
    with pytest.raises(RuntimeError, match="derivative of flashwright::"):
        torch.func.grad(lambda x: flashwright.attention(x, k, v, causal=True).float().sum())(q)


# --- times ------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], rounds: int = 7, calls: int = 6) -> float:
    """The median time of a call on the GPU, of calls that follow each other."""
    call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(times)[rounds // 2]


class Pair:
    """One function: ours and compiled FlexAttention, called once, with the seconds it took."""

    def __init__(self, module: Any, name: str, dim: int) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self.name = name
        given = problem(module.BATCH, module.HEADS, module.LENGTH, dim)
        how = way(module, name)
        compiled = torch.compile(flex_attention)
        self.calls = [
            lambda: flashwright.flex_attention(*given, **how),
            lambda: compiled(*given, **how),
        ]
        outs, self.firsts = [], []
        for call in self.calls:
            begin = time.perf_counter()
            outs.append(call())
            torch.cuda.synchronize()
            self.firsts.append(time.perf_counter() - begin)
        torch.testing.assert_close(outs[0], outs[1], atol=0.03, rtol=0.03)

    def row(self) -> tuple[float, str]:
        """FlexAttention's time by ours, and a line of the table."""
        ours, theirs = map(seconds, self.calls)
        times = f"{ours * 1e3:8.3f} {theirs * 1e3:8.3f} {theirs / ours:6.2f}"
        return theirs / ours, f"{self.name:22} {times} {self.firsts[0]:6.1f} {self.firsts[1]:6.1f}"


def main() -> None:
    """Print a table: each function, both times, their ratio, both first calls."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    module = gallery(2, 16, length)
    for dim in [int(text) for text in sys.argv[2:]] or [64, 128]:
        ratios = []
        print(f"d{dim}, {length} tokens, bf16: ms, ms of FlexAttention, ratio; first calls in s")
        for name in [*names("MASKS"), *names("SCORES")]:
            torch._dynamo.reset()
            try:
                ratio, line = Pair(module, name, dim).row()
            except Exception as error:
                told = str(error).splitlines()
                print(f"{name:22} {type(error).__name__}: {told[0][:100] if told else ''}")
                continue
            ratios.append(ratio)
            print(line, flush=True)
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"geometric mean {mean:.2f}, worst {min(ratios):.2f}, of {len(ratios)}")


if __name__ == "__main__":
    main()
