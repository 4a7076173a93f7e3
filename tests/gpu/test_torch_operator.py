"""A kernel as a torch operator on a GPU. `python -m tests.gpu.test_torch_operator` prints what a
call costs the host: the kernel as a function, as an operator, and PyTorch's own attention."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashwright
from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.build.classes import SPEC as SPEC_FILE
from tests.gpu.made import code_of, package_of

torch = pytest.importorskip("torch")

SPEC = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="fp16", causal=True)
GPU = "a100"
CLOSE = {"rtol": 1e-2, "atol": 2e-3}


def operator() -> Any:
    return flashwright.torch_operator(folder())


@functools.cache
def folder() -> Path:
    """A copy of the package, with its spec."""
    found = Path(tempfile.mkdtemp(prefix="flashwright-tests-"), "package")
    shutil.copytree(package_of(code_of(SPEC, GPU), GPU).where, found)
    (found / SPEC_FILE).write_text(specs.dump(SPEC))
    atexit.register(shutil.rmtree, found.parent, ignore_errors=True)
    return found


def problem(length: int = 130, grad: bool = False, seed: int = 0, batch: int = 2) -> list[Any]:
    """Q, K and V as views of one packed projection."""
    torch.manual_seed(seed)
    packed = torch.randn(batch, length, 8, 64, device="cuda", dtype=torch.float16)
    found = [x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2)]
    return [x.detach().requires_grad_(grad) for x in found]


def sdpa(q: Any, k: Any, v: Any) -> Any:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, enable_gqa=True)


def test_the_result_is_that_of_sdpa_and_of_the_cpu() -> None:
    given = problem()
    out, lse = operator()(*given, return_lse=True)
    assert out.transpose(1, 2).is_contiguous()  # as Q is
    torch.testing.assert_close(out, sdpa(*given), **CLOSE)
    expected = operator()(*(x.cpu().float() for x in given), return_lse=True)
    torch.testing.assert_close(out.cpu().float(), expected[0], **CLOSE)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-4, atol=1e-4)


def test_opcheck() -> None:
    done = torch.library.opcheck(operator().op, tuple(problem()))
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_with_inductor(mode: str) -> None:
    """Inductor makes Q; the graph has one operator for all lengths."""
    attention = operator()
    compiled = torch.compile(
        lambda q, k, v: attention(q * 2, k, v).sin(), fullgraph=True, dynamic=True, mode=mode
    )
    with torch.no_grad():
        for length in (130, 200, 77):
            q, k, v = problem(length)
            torch.testing.assert_close(compiled(q, k, v), sdpa(q * 2, k, v).sin(), **CLOSE)


def test_captured_in_a_cuda_graph() -> None:
    attention, given = operator(), problem()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*given)
    for seed in (1, 2):
        for old, new in zip(given, problem(seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.testing.assert_close(out, sdpa(*given), **CLOSE)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_the_kernel_lacks_is_an_error(compiled: bool) -> None:
    attention: Any = operator()
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = problem(grad=True)
    out = attention(q, k, v)
    torch.testing.assert_close(out, sdpa(q, k, v), **CLOSE)
    with pytest.raises(RuntimeError, match=r"requires a gradient.*torch\.no_grad"):
        out.sum().backward()
    assert q.grad is None


def test_autocast_and_vmap() -> None:
    attention, (q, k, v) = operator(), problem()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(q.float(), k.float(), v.float())
    assert out.dtype == torch.float16  # the kernel's
    assert out.equal(attention(q, k, v))
    mapped = torch.vmap(attention, in_dims=(0, None, 0))(
        torch.stack([q, q]), k, torch.stack([v, v])
    )
    assert mapped[1].equal(out)


def test_wrong_tensors_are_named() -> None:
    q, k, v = problem()
    with pytest.raises(ValueError, match="`V` has kv_len = 129"):
        operator()(q, k, v[:, :, 1:])
    with pytest.raises(TypeError, match="`K` must be fp16; it is bfloat16"):
        operator()(q, k.bfloat16(), v)


def host_microseconds(call: Callable[[], object], calls: int = 500) -> float:
    """The host's time for a call, the least of several rounds; the GPU is idle at its start."""
    best = float("inf")
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def gate(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * torch.sigmoid(score)


def main() -> None:
    """Print a line for each way to call it, with problems so small that the host is the slower."""
    attention, kernel = operator(), flashwright.load(folder())
    q, k, v = problem(length=16, batch=1)
    q2, k2, v2 = problem(length=16, batch=1, grad=True)
    ways: dict[str, Callable[[], object]] = {
        "kernel": lambda: kernel(q, k, v),
        "kernel, with LSE": lambda: kernel(q, k, v, outputs=("O", "LSE")),
        "operator": lambda: attention(q, k, v),
        "flashwright.attention": lambda: flashwright.attention(q, k, v, causal=True),
        "flashwright.flex_attention": lambda: flashwright.flex_attention(
            q, k, v, score_mod=gate, enable_gqa=True
        ),
        "torch SDPA": lambda: sdpa(q, k, v),
        "two empty tensors": lambda: (q.new_empty(q.shape), q.new_empty(q.shape[:-1])),
    }
    for mode in (torch.inference_mode, torch.no_grad):
        for name, call in ways.items():
            with mode():
                print(f"{name + ', ' + mode.__name__:40}{host_microseconds(call):8.2f} us")
    recorded = host_microseconds(lambda: attention(q2, k2, v2))
    print(f"{'operator, requires_grad':40}{recorded:8.2f} us")


if __name__ == "__main__":
    main()
