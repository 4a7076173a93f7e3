"""flashwright.jax.attention on a GPU: right, under jax.jit, in CUDA graphs, and from the cache.

`python -m tests.gpu.test_jax [LENGTH]` prints the time of a call on the GPU and on the host beside
cuDNN's attention in JAX.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.judge import oracle
from flashwright.judge.inputs import make_inputs
from flashwright.spec import AttentionSpec

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests use the GPU too
jax = pytest.importorskip("jax", reason="JAX is not installed")
fj = pytest.importorskip("flashwright.jax", reason="jax-tvm-ffi is not installed")


@pytest.fixture(autouse=True)
def on_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip(f"this JAX runs on {jax.default_backend()}")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("FLASHWRIGHT_CACHE", str(folder))
        yield folder


CASES: list[dict[str, Any]] = [
    {"heads": 4, "head_dim": 64, "dtype": "fp16"},
    {"heads": 4, "head_dim": 128, "dtype": "bf16", "causal": True},
    {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "fp16", "causal": True},
    {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", "causal": True, "window": 100},
    {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "bf16", "softcap": 20.0},
    {"heads": 4, "kv_heads": 1, "head_dim": 64, "dtype": "bf16", "causal": True, "sink": True},
    {"heads": 4, "head_dim": 128, "dtype": "fp16", "causal": True, "alibi": True},
]


def problem(case: dict[str, Any], q_len: int, kv_len: int) -> tuple[Any, ...]:
    """The spec of a case, its inputs, and the arguments of the call."""
    spec = AttentionSpec.make(variant="gqa", **case)
    inputs = make_inputs(spec, {"batch": 2, "q_len": q_len, "kv_len": kv_len}, seed=0)
    names = {"query": "Q", "key": "K", "value": "V", "sink": "Sink", "alibi": "Slopes"}
    given = {n: jax.device_put(inputs[name]) for n, name in names.items() if name in inputs}
    how = {n: case[n] for n in ("causal", "window", "softcap") if n in case}
    return spec, inputs, given, how


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_and_under_jit_the_same(case: dict[str, Any]) -> None:
    for lengths in ((300, 300), (130, 517)):
        spec, inputs, given, how = problem(case, *lengths)
        out, lse = fj.attention(**given, **how, return_lse=True)
        wanted = oracle.attention(spec, inputs)
        found = oracle.compare(np.array(out), wanted["O"], spec.output_dtype)
        assert found.ok, found.reason
        found = oracle.compare_lse(spec, np.array(lse), wanted["LSE"])
        assert found.ok, found.reason
        again = jax.jit(lambda given, how=how: fj.attention(**given, **how) + 0)(given)
        np.testing.assert_array_equal(np.array(again), np.array(out))


def test_a_bias_and_one_batch_of_keys() -> None:
    draw = np.random.default_rng(0)
    shapes = {"q": (3, 4, 200, 64), "k": (1, 2, 260, 64), "v": (1, 2, 260, 64)}
    given = {n: draw.standard_normal(s).astype("float16") for n, s in shapes.items()}
    bias = draw.standard_normal((4, 1, 260)).astype("float32")
    out = fj.attention(*map(jax.device_put, given.values()), bias=jax.device_put(bias))
    how = fj._Settings(False, None, None, None, True)
    wanted, _ = fj._defined(np, np.float64, {**given, "bias": bias[None]}, how)
    np.testing.assert_allclose(np.array(out, np.float64), wanted, atol=0.005, rtol=0.01)


def test_vmap() -> None:
    _, _, given, how = problem(CASES[2], 130, 130)
    run = partial(fj.attention, **how)
    mapped = jax.vmap(lambda q: run(q[None], given["key"][:1], given["value"][:1])[0])
    found = mapped(given["query"])
    for i in range(2):
        alone = run(given["query"][i : i + 1], given["key"][:1], given["value"][:1])[0]
        np.testing.assert_array_equal(np.array(found[i]), np.array(alone))


def gradients(given: dict[str, Any], grads: list[Any], **how: Any) -> dict[str, Any]:
    """Of all arrays, under jax.jit; of the LSE too if there are two `grads`."""
    lse = len(grads) > 1

    @jax.jit
    def pulled(given: Any, grads: Any) -> Any:
        _, pull = jax.vjp(lambda given: fj.attention(**given, **how, return_lse=lse), given)
        return pull(tuple(grads) if lse else grads[0])[0]

    return {name: np.array(x, np.float64) for name, x in pulled(given, grads).items()}


def assert_gradients(given: dict[str, Any], lse: bool, **how: Any) -> None:
    """They are those of the definition, which the CPU computes in fp32 from the same arrays."""
    draw, q = np.random.default_rng(2), given["query"]
    do, dlse = (draw.standard_normal(shape, np.float32) for shape in (q.shape, q.shape[:3]))
    grads = [do.astype(q.dtype), dlse][: 1 + lse]
    found = gradients(given, jax.device_put(grads), **how)
    wide = {name: np.array(x, np.float32) for name, x in given.items()}
    exact = jax.device_put((wide, [g.astype("float32") for g in grads]), jax.devices("cpu")[0])
    for name, wanted in gradients(*exact, **how).items():
        error = np.sqrt(np.mean((found[name] - wanted) ** 2) / np.mean(wanted**2))
        assert error < (0.008 if wanted.ndim == 4 else 0.04), f"{name}: {error:.2g}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: dict[str, Any]) -> None:
    for lengths in ((300, 300), (130, 517)):
        _, _, given, how = problem(case, *lengths)
        assert_gradients(given, lse=lengths[0] == 130, **how)


def test_gradients_of_a_bias_and_of_one_batch_of_keys() -> None:
    draw = np.random.default_rng(0)
    shapes = {"query": (3, 4, 200, 64), "key": (1, 2, 260, 64), "value": (1, 2, 260, 64)}
    given = {n: draw.standard_normal(s).astype("float16") for n, s in shapes.items()}
    given["bias"] = draw.standard_normal((4, 200, 260)).astype("float32")
    assert_gradients(jax.device_put(given), lse=False)


def test_a_layer_trains() -> None:
    """The loss of a layer falls, with jax.checkpoint around its attention."""
    draw = np.random.default_rng(0)
    x = jax.device_put(draw.standard_normal((2, 300, 256), np.float32))
    weights = jax.device_put(draw.standard_normal((256, 3 * 256), np.float32) / 16)

    @jax.checkpoint
    def layer(weights: Any) -> Any:
        heads = (x @ weights).reshape(2, 300, 3, 4, 64).transpose(2, 0, 3, 1, 4)
        return fj.attention(*heads.astype("bfloat16"), causal=True).astype("float32")

    target = layer(-weights)
    step = jax.jit(jax.value_and_grad(lambda w: ((layer(w) - target) ** 2).mean()))
    losses = []
    for _ in range(10):
        loss, grad = step(weights)
        weights, losses = weights - 30 * grad, [*losses, float(loss)]
    assert losses[-1] < 0.9 * losses[0], losses


def test_arrays_on_the_cpu_of_this_machine() -> None:
    _, _, given, how = problem(CASES[2], 130, 130)
    out = fj.attention(**given, **how)
    on_cpu = jax.device_put(given, jax.devices("cpu")[0])
    wide = {n: x.astype("float32") for n, x in on_cpu.items()}
    wanted = jax.jit(partial(fj.attention, **how))(**wide)
    assert wanted.devices() == {jax.devices("cpu")[0]}
    np.testing.assert_allclose(np.array(out, np.float32), wanted, atol=0.005, rtol=0.01)


CHILD = """
import sys
sys.modules["torch"] = None  # nothing here needs PyTorch
import jax, numpy as np
import flashwright.jax as fj
draw = np.random.default_rng(0)
layer = jax.jit(lambda q, k, v: fj.attention(q * 2, k, v, causal=True) * 2)
for number in range(6):  # a CUDA graph is captured, then launched and updated
    given = [draw.standard_normal((1, 2, 256, 64)).astype("float16") for _ in range(3)]
    arrays = jax.device_put(given)
    q, k, v = given
    how = fj._Settings(True, None, None, None, True)
    wanted, _ = fj._defined(np, np.float64, {"q": q * 2, "k": k, "v": v}, how)
    for _ in range(2):
        np.testing.assert_allclose(np.array(layer(*arrays)), 2 * wanted, atol=0.01, rtol=0.02)
"""


def test_another_process_finds_the_kernel_and_runs_it_in_a_cuda_graph() -> None:
    graphs = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    for flags, made in (("", 1), ("", 0), (graphs, 0)):
        environment = {**os.environ, "XLA_FLAGS": flags}
        command = [sys.executable, "-c", CHILD]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("making a kernel, once") == made


# --- times ------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any], calls: int, wait: bool, rounds: int = 9) -> float:
    """The median time of a call, of calls that follow each other; the GPU's with `wait`, else the
    host's alone."""
    times = []
    jax.block_until_ready(call())
    for _ in range(rounds):
        start = time.perf_counter()
        found = [call() for _ in range(calls)][-1]
        if wait:
            jax.block_until_ready(found)
        times.append((time.perf_counter() - start) / calls)
        jax.block_until_ready(found)
    return sorted(times)[rounds // 2]


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    ways = {"flashwright": jax.jit(partial(fj.attention, causal=True)), "cuDNN": jax.jit(cudnn)}
    batch, heads, dim = max(1, 16384 // length), 16, 128
    work = 2 * batch * heads * length**2 * dim
    for name, run in ways.items():
        ours = name == "flashwright"
        draw = np.random.default_rng(0)

        def arrays(b: int, n: int, ours: bool = ours, draw: Any = draw) -> list[Any]:
            shape = (b, heads, n, dim) if ours else (b, n, heads, dim)
            made = [draw.standard_normal(shape, np.float32) for _ in range(3)]
            return [jax.device_put(x.astype(jax.numpy.bfloat16)) for x in made]

        given, small = arrays(batch, length), arrays(1, 16)
        gpu = seconds(lambda run=run, given=given: run(*given), 20, wait=True)
        host = seconds(lambda run=run, small=small: run(*small), 500, wait=False)
        speed = f"{gpu * 1e3:8.3f} ms {work / gpu / 1e12:8.0f} TFLOPS"
        print(f"{name:14}{speed}{host * 1e6:8.1f} us of the host", flush=True)


if __name__ == "__main__":
    main()
