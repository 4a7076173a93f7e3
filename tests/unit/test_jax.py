"""flashwright.jax.attention.

Without a GPU the code for one is tried on the CPU: XLA calls a function that interprets the program
of the kernel, or the real launcher before the fake driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.build import classes, steps
from flashwright.build.load import CUBIN, PLAN, Kernel, read_plan
from flashwright.build.steps import StepsKernel
from flashwright.check.check import check
from flashwright.generate import backward, store
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.semantics.interpret import interpret
from tests.unit import uncompiled
from tests.unit.fake_gpu import ATTENTION, Driver, Tensor, cubin, make_plan, on_fake_gpu, process

jax = pytest.importorskip("jax", reason="JAX is not installed")
if importlib.util.find_spec("jax_tvm_ffi") is None:  # not imported here: it imports PyTorch
    pytest.skip("jax-tvm-ffi is not installed", allow_module_level=True)

Arrays = dict[str, Any]


def ours() -> Any:
    """The module, imported late: the process with the fake driver hides PyTorch from it."""
    return importlib.import_module("flashwright.jax")


def arrays(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 12,
    kv_len: int = 15,
    width: int = 16,
) -> Arrays:
    draw = np.random.default_rng(0)
    shapes = {"query": (heads, q_len), "key": (kv_heads, kv_len), "value": (kv_heads, kv_len)}
    sizes = {n: (batch, h, m, width) for n, (h, m) in shapes.items()}
    return {n: draw.standard_normal(size, np.float32) for n, size in sizes.items()}


def extras(*shape: int) -> Arrays:
    """A slope and a sink logit for each head, and a bias of this shape."""
    draw = np.random.default_rng(1)
    made = {"alibi": draw.random(4), "sink": draw.standard_normal(4)}
    made |= {"bias": draw.standard_normal(shape)} if shape else {}
    return {name: x.astype("float32") for name, x in made.items()}


# --- on the CPU -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (arrays(q_len=15, kv_len=12), {"causal": True}),  # three rows see no key
        (arrays(kv_heads=4), {"causal": True, "window": 5, "softcap": 2.0, "scale": 0.3}),
        ({**arrays(), **extras(2, 1, 12, 15)}, {"causal": True, "softcap": 5.0}),
        ({**arrays(), **extras(12, 1), **{n: arrays()[n][:1] for n in ("key", "value")}}, {}),
        (arrays(kv_len=0), {}),
    ],
)
def test_it_is_what_pytorchs_function_computes(given: Arrays, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    import flashwright

    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    wanted = flashwright.attention(**tensors, **settings, return_lse=True)
    found = jax.jit(partial(ours().attention, **settings, return_lse=True))(**given)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=2e-6, rtol=2e-6)


def test_fp8_gives_bf16() -> None:
    given = {name: x.astype(jax.numpy.float8_e4m3fn) for name, x in arrays().items()}
    o, lse = ours().attention(**given, return_lse=True)
    assert (o.dtype, lse.dtype) == ("bfloat16", "float32")
    wanted = ours().attention(**{n: x.astype("float32") for n, x in given.items()})
    np.testing.assert_allclose(np.array(o, np.float32), wanted, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    "mapped",
    [
        ("query",),
        ("key", "value", "bias"),
        ("query", "value", "sink", "bias"),
    ],
)
def test_vmap(mapped: tuple[str, ...]) -> None:
    many, given = 3, {**arrays(), **extras(1, 12, 15)}
    stacked = {n: np.stack([x, 2 * x, 3 * x], 1) for n, x in given.items()}
    fixed = {n: x for n, x in given.items() if n not in mapped}

    def one(each: Arrays) -> Any:
        return ours().attention(**each, **fixed, causal=True, return_lse=True)

    found = jax.vmap(one, in_axes=1, out_axes=2)({n: stacked[n] for n in mapped})
    for i in range(many):
        wanted = one({n: stacked[n][:, i] for n in mapped})
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.array(got)[:, :, i], want, atol=1e-5, rtol=1e-5)


def exact_gradients(given: Arrays, grads: Sequence[Any], **settings: Any) -> Arrays:
    """Those of PyTorch's function, in fp64."""
    torch = pytest.importorskip("torch")
    import flashwright

    tensors = {n: torch.from_numpy(np.array(x, np.float64)) for n, x in given.items()}
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    found = flashwright.attention(**tensors, **settings, return_lse=True)[: len(grads)]
    torch.autograd.backward(found, [torch.from_numpy(np.array(x, np.float64)) for x in grads])
    return dict(zip(given, (leaf.grad.numpy() for leaf in leaves), strict=True))


def gradients(attention: Any, given: Arrays, grads: Sequence[Any], **settings: Any) -> Arrays:
    """By jax.vjp, under jax.jit. Without a gradient of the LSE it is not asked for."""

    def pulled(given: Arrays) -> Arrays:
        lse = len(grads) > 1
        _, pull = jax.vjp(lambda given: attention(**given, **settings, return_lse=lse), given)
        found: Arrays = pull(tuple(grads) if lse else grads[0])[0]
        return found

    return dict(jax.jit(pulled)(given))


def results(given: Arrays, lse: bool) -> list[Any]:
    """Gradients of O, and of the LSE."""
    draw, shape = np.random.default_rng(2), given["query"].shape
    dtype = given["query"].dtype
    grads = [draw.standard_normal(shape).astype(dtype), draw.standard_normal(shape[:3])]
    return [grads[0], *([grads[1].astype("float32")] if lse else [])]


@pytest.mark.parametrize(
    ("given", "settings", "lse"),
    [
        (arrays(q_len=15, kv_len=12), {"causal": True}, False),  # three rows see no key
        ({**arrays(), **extras(2, 1, 12, 15)}, {"causal": True, "softcap": 5.0}, True),
        ({**arrays(), **extras(12, 1), **{n: arrays()[n][:1] for n in ("key", "value")}}, {}, True),
    ],
)
def test_gradients_are_pytorchs(given: Arrays, settings: dict[str, Any], lse: bool) -> None:
    grads = results(given, lse)
    found = gradients(ours().attention, given, grads, **settings)
    for name, wanted in exact_gradients(given, grads, **settings).items():
        np.testing.assert_allclose(found[name], wanted, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("mapped", [("query", "key", "value"), ("query",), ("value", "sink")])
def test_vmap_of_gradients(mapped: tuple[str, ...]) -> None:
    """The mapped axis joins the batch, or not where a sink is shared by the batch."""
    given = {**arrays(), **({"sink": extras()["sink"]} if "sink" in mapped else {})}
    stacked = {n: np.stack([given[n], 2 * given[n]]) for n in mapped}
    fixed = {n: x for n, x in given.items() if n not in mapped}

    def grad(each: Arrays) -> Any:
        loss = jax.grad(lambda all_: (ours().attention(**all_, causal=True) ** 2).sum())
        return loss({**fixed, **each})

    found = jax.vmap(grad)(stacked)
    for i in range(2):
        for name, wanted in grad({n: x[i] for n, x in stacked.items()}).items():
            np.testing.assert_allclose(found[name][i], wanted, atol=2e-5, rtol=1e-4, err_msg=name)


def test_second_derivatives_are_refused() -> None:
    q, k, v = arrays().values()
    first = jax.grad(lambda q: ours().attention(q, k, v).sum())
    told = "a second derivative has no kernel: call jax.lax.stop_gradient on the arrays"
    for second in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match=told):
            second(lambda q: first(q).sum())(q)
    stopped = jax.grad(lambda q: (first(jax.lax.stop_gradient(q)) * q).sum())(q)
    np.testing.assert_allclose(stopped, first(q), atol=1e-6)


def zeros(shape: int | tuple[int, ...], dtype: str = "float32") -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": zeros((4, 12, 16))}, "query has 3 axes: pass (batch, heads, length, dim)"),
        ({"key": zeros((2, 2, 15, 8))}, "key must have the shape (2, 2, 15, 16)"),
        ({"value": zeros((2, 2, 14, 16))}, "value must have the shape (2, 2, 15, 16)"),
        ({"key": zeros((3, 2, 15, 16))}, "key must have the shape (2, 2, 15, 16)"),
        ({n: zeros((2, 3, 15, 16)) for n in ("key", "value")}, "kv_heads = 3 must divide"),
        ({"sink": zeros(3)}, "sink must have the shape (4,), not (3,)"),
        ({"alibi": zeros((4, 1))}, "alibi must have the shape (4,), not (4, 1)"),
        ({"bias": zeros((7, 15))}, "bias has 7 along q_len, which is 12 here"),
        ({"key": zeros((2, 2, 15, 16), "float16")}, "key is float16 and query float32"),
    ],
)
def test_wrong_arrays_are_named(changes: Arrays, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ours().attention(**{**arrays(), **changes})


def test_without_jax_tvm_ffi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    ours()
    monkeypatch.delitem(sys.modules, "flashwright.jax")
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    with pytest.raises(ImportError, match=r"pip install 'flashwright\[jax\]'"):
        ours()


# --- as on a GPU ------------------------------------------------------------------------------


class Interpreted:
    """A kernel that interprets the program of its package."""

    shift = 0
    zeroed = scratch = ()

    def __init__(self, folder: Path) -> None:
        program = check(parse((folder / "code.tl").read_text()), gpus.find("h200")).program
        assert program is not None
        self.program, self.inputs = program, tuple(t.name for t in program.inputs)

    def of_tensors(self, names: Sequence[str]) -> Any:
        def run(*tensors: Any) -> None:
            given = dict(zip(names, map(np.from_dlpack, tensors), strict=True))
            kv_heads = {"kv_heads": given["K"].shape[1]}
            found = interpret(self.program, {n: given[n] for n in self.inputs}, kv_heads)
            for name in names[len(self.inputs) :]:
                write(given[name], np.roll(found[name], self.shift, axis=2))

        return run


class InterpretedSteps(StepsKernel):
    """A backward that interprets the programs of its package."""

    factor = 1.0

    def __init__(self, folder: Path) -> None:
        record = steps.read(folder)
        assert record is not None
        kernels = [Kernel.__new__(Kernel) for _ in record.steps]
        for kernel, name in zip(kernels, record.steps, strict=True):
            kernel._describe(read_plan(folder / name), lambda *_: None)
        super().__init__(kernels, record)
        self.programs = check(parse((folder / "code.tl").read_text())).kernels

    def of_tensors(self, names: Sequence[str], dims: Any = None) -> Any:
        def run(*tensors: Any) -> None:
            given = dict(zip(names, map(np.from_dlpack, tensors), strict=True))  # results come last
            for program in self.programs:
                read = [t.name for t in (*program.inputs, *program.outputs) if t.name in names]
                kv_heads = {"kv_heads": given["K"].shape[1]}
                found = interpret(program, {n: given[n] for n in read}, kv_heads)
                for name, values in found.items():
                    write(given[name], values * (self.factor if name == "dK" else 1))

        return run


def write(target: np.ndarray, values: np.ndarray) -> None:
    """Into memory that DLPack calls read-only."""
    made = np.ascontiguousarray(values, target.dtype)
    ctypes.memmove(target.ctypes.data, made.ctypes.data, made.nbytes)


def register_on_cpu(name: str, function: Any, *, platform: str, allow_cuda_graph: bool) -> None:
    import jax_tvm_ffi
    import tvm_ffi

    assert allow_cuda_graph
    made = tvm_ffi.convert(function)
    jax_tvm_ffi.register_ffi_target(name, made, platform=platform, pass_owned_tensor=True)


@contextlib.contextmanager
def lowered_as_on_gpu(module: Any) -> Iterator[None]:
    """The lowering for GPUs in place of that for the CPU."""
    from jax.interpreters import mlir

    def lower_as_on(platform: str) -> None:
        for operation, rules in module._RULES.items():
            lowering = mlir.lower_fun(rules[platform], multiple_results=True)
            mlir.register_lowering(operation, lowering, platform="cpu")
        jax.clear_caches()

    lower_as_on("cuda")
    try:
        yield
    finally:
        lower_as_on("cpu")


@pytest.fixture
def as_on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    uncompiled.without_compiler(monkeypatch, tmp_path / "cache")
    module = ours()
    monkeypatch.setattr(module, "card", lambda number: gpus.find("h200"))
    monkeypatch.setattr(module, "load", Interpreted)
    monkeypatch.setattr(classes, "load", InterpretedSteps)
    monkeypatch.setattr(module, "_PLATFORM", "cpu")
    monkeypatch.setattr(module, "_FOLDERS", {})
    fake = SimpleNamespace(register_ffi_target=register_on_cpu)
    monkeypatch.setattr(module, "jax_tvm_ffi", fake)
    with lowered_as_on_gpu(module):
        yield module


def in_fp16(given: Arrays) -> Arrays:
    return {n: x.astype("float16") if x.ndim == 4 else x for n, x in given.items()}


def test_a_kernel_is_made_once_checked_and_called_under_jit(
    as_on_gpu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    real = as_on_gpu.compare_rows
    monkeypatch.setattr(as_on_gpu, "compare_rows", lambda *a: (checked.append(a), real(*a)))
    settings = {"causal": True, "window": 9, "softcap": 4.0}
    given = in_fp16({**arrays(batch=3, q_len=20), **extras(20, 15)})
    given |= {n: given[n][:1] for n in ("key", "value")}  # one batch of keys serves all
    run = partial(as_on_gpu.attention, **settings)
    out, lse = jax.jit(partial(run, return_lse=True))(**given)
    told = capsys.readouterr().err
    assert told.count("making a kernel, once") == 1
    assert len(checked) == 2  # the first head and the last
    as_on_gpu._FOLDERS.clear()  # another process
    jax.clear_caches()
    np.testing.assert_array_equal(run(**given), out)
    assert capsys.readouterr().err == ""
    assert len(checked) == 2
    names = {"query": "q", "key": "k", "value": "v", "alibi": "slopes"}
    exact = {names.get(n, n): np.array(x, np.float64) for n, x in given.items()}
    how = as_on_gpu._Settings(**settings, scale=None, lse=True)
    wanted = as_on_gpu._defined(np, np.float64, exact, how)
    np.testing.assert_allclose(out, wanted[0], atol=0.01)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-4)


def test_a_wrong_kernel_is_not_used_and_not_kept(
    as_on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interpreted, "shift", 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a new kernel is wrong: at batch"):
            as_on_gpu.attention(**in_fp16(arrays()), scale=0.5)
        assert list((tmp_path / "cache" / store.PACKAGES).iterdir()) == []


def test_gradients_are_those_of_the_derived_backward(
    as_on_gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a row of each kind of gradient: by query, by key, by head, by score, and of the batch's
    sums; kernels that add up begin at 0."""
    sizes = {"batch": 3, "q_len": 20, "width": 64}
    given = in_fp16({**arrays(**sizes), **extras(20, 15)})
    given |= {n: given[n][:1] for n in ("key", "value")}
    settings = {"causal": True, "window": 9, "softcap": 4.0}
    for lse in (False, True):
        grads = results(given, lse)
        found = gradients(as_on_gpu.attention, given, grads, **settings)
        for name, wanted in exact_gradients(given, grads, **settings).items():
            error = np.sqrt(np.mean((np.array(found[name], np.float64) - wanted) ** 2))
            assert error < 0.01 * np.sqrt(np.mean(wanted**2)), name
    assert capsys.readouterr().err.count("making a kernel, once: the backward pass of") == 2


@pytest.mark.slow
def test_a_wrong_backward_is_not_used_and_not_kept(
    as_on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterpretedSteps, "factor", 1.5)
    given = in_fp16(arrays(width=64))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a new backward is wrong: a row of dk is"):
            gradients(as_on_gpu.attention, given, results(given, False), scale=0.2)
        kept = (tmp_path / "cache" / store.PACKAGES).iterdir()
        assert [f.name for f in kept if "backward" in f.name] == []


def test_why_there_is_no_backward(as_on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise Failed(Diagnostic("FW908", "line 3: top-k has no gradient"))

    monkeypatch.setattr(backward, "backward", refuse)
    given = in_fp16(arrays(width=64))
    told = "line 3: top-k has no gradient: call jax.lax.stop_gradient on its inputs"
    with pytest.raises(as_on_gpu.NoKernel, match=told):
        gradients(as_on_gpu.attention, given, results(given, False), scale=0.3)


def test_what_no_kernel_is_made_for_is_refused(as_on_gpu: Any) -> None:
    with pytest.raises(as_on_gpu.NoKernel, match="query is float32: kernels take float16"):
        as_on_gpu.attention(**arrays())
    with pytest.raises(as_on_gpu.NoKernel, match="window: must be at least 1"):
        as_on_gpu.attention(**in_fp16(arrays()), window=0)


# --- the real launcher ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("no C and C++ compiler here")
    with process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


@on_fake_gpu
def test_xlas_buffers_reach_the_launch_without_pytorch() -> None:
    """The launcher takes memory of a GPU only, so XLA's CPU memory is called that on its way."""
    import tempfile

    assert "torch" not in sys.modules
    sys.modules["torch"] = None  # type: ignore[assignment]
    module, seen = ours(), []

    def register(name: str, function: Any, **settings: Any) -> None:
        def on_gpu(*tensors: Any) -> None:
            given = [Tensor(np.from_dlpack(t)) for t in tensors]
            seen.append([t.address for t in given])
            function(*given)

        register_on_cpu(name, on_gpu, **settings)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        tensors = (ATTENTION[4], *ATTENTION[:3], ATTENTION[5])  # O first, no slopes
        (folder / PLAN).write_text(make_plan(tensors=tensors).dump())
        (folder / CUBIN).write_bytes(cubin(90))
        patch.setattr(module, "find_or_make", lambda order: (folder, False))
        patch.setattr(module, "_PLATFORM", "cpu")
        patch.setattr(module, "jax_tvm_ffi", SimpleNamespace(register_ffi_target=register))
        draw = [np.ones((2, h, n, 64), np.float16) for h, n in ((6, 300), (3, 77), (3, 77))]
        q, k, v = (jax.device_put(x) for x in draw)
        driver = Driver()
        for lse in (False, True):
            with lowered_as_on_gpu(module):
                jax.block_until_ready(module.attention(q, k, v, return_lse=lse))
            address = dict(zip(("Q", "K", "V", "O", "LSE"), seen[-1], strict=False))
            assert len(address) == 4 + lse
            assert [address[n] for n in "QKV"] == [x.unsafe_buffer_pointer() for x in (q, k, v)]
            launched = driver.parameters("Q4qQ4qQ4qQ4qQ3q5i4x")
            found = dict(zip(("O", "Q", "K", "V"), launched[:20:5], strict=True)) | {
                "LSE": launched[20]
            }
            assert found == {"LSE": 0, **address}
            assert launched[-5:] == (2, 6, 3, 300, 77)
    assert math.prod(driver.last.grid) == 3 * 6 * 2
