"""A kernel as a function: strides, layouts, streams, graphs, frameworks, wrong arguments."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.build.load import Kernel
from flashwright.judge import oracle_device
from flashwright.judge.flash import relative_rms
from tests.gpu.made import built_for, code_of, fresh, kernel_of

SPEC = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="fp16", causal=True)
GPU = "a100"
CLOSE = 2e-3  # of relative RMS, in fp16


def kernel() -> Kernel:
    return kernel_of(code_of(SPEC, GPU), GPU)


def problem(batch: int = 2, q_len: int = 100, kv_len: int = 130, seed: int = 0) -> Any:
    """Q, K and V."""
    import torch

    torch.manual_seed(seed)
    shapes = [(batch, 4, q_len, 64), (batch, 2, kv_len, 64), (batch, 2, kv_len, 64)]
    return [torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]


def truth(q: Any, k: Any, v: Any) -> dict[str, Any]:
    import torch

    return oracle_device.attention(torch, SPEC, {"Q": q, "K": k, "V": v}, {})


def close(found: Any, expected: Any) -> bool:
    error = relative_rms(found, expected)
    return found.shape == expected.shape and error is not None and error < CLOSE


def test_positional_named_and_both() -> None:
    q, k, v = problem()
    expected = truth(q, k, v)["O"]
    for found in (kernel()(q, k, v), kernel()(Q=q, K=k, V=v), kernel()(q, V=v, K=k)):
        assert close(found, expected)
        assert found.dtype == q.dtype
        assert found.is_contiguous()


def test_the_lse_is_given_where_it_is_asked_for() -> None:
    q, k, v = problem()
    expected = truth(q, k, v)
    out, lse = kernel()(q, k, v, outputs=("O", "LSE"))
    assert close(out, expected["O"])
    assert float((lse - expected["LSE"]).abs().max()) < 1e-4
    (alone,) = kernel()(q, k, v, outputs=["LSE"])  # O is then a null pointer
    assert alone.equal(lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout: str) -> None:
    q, k, v = problem()
    expected = truth(q, k, v)["O"]
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        expected = expected.transpose(1, 2)
    assert close(kernel()(q, k, v, layout=layout), expected)


def test_strided_inputs_and_output() -> None:
    import torch

    packed = torch.randn(2, 90, 8, 64, device="cuda", dtype=torch.float16)
    q, k, v = (x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2))
    wide = torch.full((2, 90, 4, 128), float("nan"), device="cuda", dtype=torch.float16)
    out = wide[..., 64:].transpose(1, 2)
    assert kernel()(q, k, v, out=out) is out
    assert close(out, truth(q, k, v)["O"])
    assert bool(wide[..., :64].isnan().all())  # nothing is written beside it
    shared = k[:1].expand(2, -1, -1, -1)  # a stride of 0, as for a common prefix
    assert close(kernel()(q, shared, v), truth(q, shared, v)["O"])


def test_an_empty_batch_and_no_keys() -> None:
    q, k, v = problem(batch=0)
    assert kernel()(q, k, v).shape == (0, 4, 100, 64)
    q, k, v = problem(kv_len=0)
    out, lse = kernel()(q, k, v, outputs=("O", "LSE"))
    assert bool((out == 0).all())
    assert bool((lse == float("-inf")).all())


def test_the_current_stream() -> None:
    """The inputs are made late on a side stream: a launch anywhere else would read the old ones."""
    import torch

    q, k, v = problem()
    late = [torch.zeros_like(x) for x in (q, k, v)]
    run, side = kernel(), torch.cuda.Stream()
    run(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y)
        found = run(*late)
    side.synchronize()
    assert close(found, truth(q, k, v)["O"])


def test_cuda_graphs_from_the_first_call_on() -> None:
    import torch

    run = fresh(code_of(SPEC, GPU), GPU)
    q, k, v = problem()
    out = torch.zeros_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(q, k, v, out=out)
        again = run(q, k, v)
    for seed in (1, 2):
        for old, new in zip((q, k, v), problem(seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, truth(q, k, v)["O"])
        assert out.equal(again)


def test_the_first_call_of_a_process_is_captured() -> None:
    kernel()  # compiled here, so that the process finds it in the cache
    run = "from tests.gpu.test_launch import capture_at_once; capture_at_once()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", run], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def capture_at_once() -> None:
    """What that process does: it loads the launcher and the kernel while a stream is captured."""
    import torch

    code, (q, k, v) = code_of(SPEC, GPU), problem()
    built_for(code, GPU)
    out = torch.zeros_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh(code, GPU)(q, k, v, out=out)
    graph.replay()
    assert close(out, truth(q, k, v)["O"])


def test_a_thread_without_a_context() -> None:
    q, k, v = problem()
    expected, run = truth(q, k, v)["O"], fresh(code_of(SPEC, GPU), GPU)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(run(q, k, v))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [close(f, expected) for f in found] == [True] * 4


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    import torch

    given = problem()
    q, k, v = (cupy.from_dlpack(x) for x in given)
    expected = truth(*given)["O"]
    side = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with side:
        found = kernel()(q, k, v)
    side.synchronize()
    for one in (found, kernel()(q, k, v)):
        assert isinstance(one, cupy.ndarray)
        assert close(torch.from_dlpack(one), expected)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    import numpy as np
    import torch

    if jax.default_backend() != "gpu":
        pytest.skip(f"this jax runs on {jax.default_backend()}")
    given = problem()
    q, k, v = (jax.numpy.asarray(x.cpu().numpy()) for x in given)
    out, lse = kernel()(q, k, v, outputs=("O", "LSE"))
    assert isinstance(out, jax.Array)
    expected = truth(*given)
    assert close(torch.from_numpy(np.array(out)).cuda(), expected["O"])
    assert close(torch.from_numpy(np.array(lse)).cuda(), expected["LSE"])


WRONG: list[tuple[str, type[Exception], str]] = [
    ("K=k.cpu()", ValueError, r"`K` must be on a CUDA device; it is on the CPU"),
    ("K=k.bfloat16()", TypeError, r"`K` must be fp16; it is bfloat16"),
    ("Q=q.float()", TypeError, r"`Q` must be fp16; it is float32"),
    ("Q=q[0]", ValueError, r"`Q` must have 4 axes \(B, H, L, D\); its shape is \(4, 100, 64\)"),
    ("V=v[:, :, 1:]", ValueError, r"`V` has kv_len = 129 .*, but `K` has kv_len = 130"),
    ("V=v[:1]", ValueError, r"`V` has batch = 1 .*, but `Q` has batch = 2"),
    ("Q=q[..., :32]", ValueError, r"`Q` must be 64 wide on axis D, not 32"),
    ("Q=q[:, :3]", ValueError, r"kv_heads = 2 must divide heads = 3"),
    ("K=k.mT.contiguous().mT", ValueError, r"`K` must be contiguous along its last axis"),
    ("K=odd", ValueError, r"`K` must begin at a multiple of 16 bytes"),
    ("out=q[:, :, 1:]", ValueError, r"`O` has q_len = 99"),
    ("out=q.float()", TypeError, r"`O` must be fp16; it is float32"),
    ("out=q[:, :1].expand_as(q)", ValueError, r"`O` is written, but its elements share memory"),
    ("K=None", TypeError, r"the input `K` is missing; needed: Q, K, V"),
    ("k=k", TypeError, r"there is no input `k`: did you mean K\?"),
    ("outputs=['P']", TypeError, r"there is no output `P`: there are O, LSE"),
    ("layout='sbhd'", ValueError, r"layout must be 'bhsd' or 'bshd'"),
]


@pytest.mark.parametrize(("change", "kind", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_arguments(change: str, kind: type[Exception], words: str) -> None:
    import torch

    q, k, v = problem()
    odd = torch.zeros(k.numel() + 1, device="cuda", dtype=k.dtype)[1:].view(k.shape)
    changes = eval(f"dict({change})", {"q": q, "k": k, "v": v, "odd": odd})
    with pytest.raises(kind, match=words):
        kernel()(**{"Q": q, "K": k, "V": v, **changes})
    torch.cuda.synchronize()
    assert close(kernel()(q, k, v), truth(q, k, v)["O"])  # nothing is broken by it


def test_two_devices() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    q, k, v = problem()
    with pytest.raises(ValueError, match="`K` is on cuda:1, but `Q` is on cuda:0"):
        kernel()(q, k.to("cuda:1"), v)
    elsewhere = [x.to("cuda:1") for x in (q, k, v)]
    assert close(kernel()(*elsewhere).to("cuda:0"), truth(q, k, v)["O"])
