"""A kernel package as a torch operator, on the CPU: dispatch, tracing, gradients, the reference."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwright
from flashwright import spec as specs
from flashwright.build import classes
from flashwright.build.load import CUBIN, PLAN
from flashwright.judge import oracle
from flashwright.lang.diagnostic import Failed
from flashwright.spec import AttentionSpec
from tests.share import some
from tests.unit.fake_gpu import DIMS, cubin, make_plan, plan_tensor

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flashwright.pytorch import operator, rules  # noqa: E402
from flashwright.pytorch.operator import Operator  # noqa: E402
from flashwright.pytorch.signature import Signature  # noqa: E402
from tests.gpu import test_torch_operator as script  # noqa: E402

pytestmark = pytest.mark.filterwarnings(  # of torch itself
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)
Package = Callable[..., Path]
HEADS, KV_HEADS, DIM = 4, 2, 16


def make_spec(**options: Any) -> AttentionSpec:
    usual = {"variant": "gqa", "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    return AttentionSpec.make(**{**usual, **options})


def plan_of(spec: AttentionSpec, **changes: Any) -> Any:
    """The launch plan that a kernel for a spec has, as far as a caller sees it."""
    kind, out = spec.input_dtype, spec.output_dtype
    wide, narrow = f"D:{spec.value_dim}", f"D:{spec.head_dim}"
    tensors = [
        plan_tensor("Q", f"B:batch H:heads L:q_len {narrow}", kind),
        plan_tensor("K", f"B:batch H:kv_heads L:kv_len {narrow}", kind),
        plan_tensor("V", f"B:batch H:kv_heads L:kv_len {wide}", kind),
        *[plan_tensor("Slopes", "H:heads", "fp32")] * spec.alibi,
        *[plan_tensor("Sink", "H:heads", "fp32")] * spec.sink,
        plan_tensor("O", f"B:batch H:heads L:q_len {wide}", out),
        *[plan_tensor("LSE", "B:batch H:heads L:q_len", "fp32")] * spec.lse,
    ]
    return make_plan(**{"tensors": tuple(tensors), **changes})


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Writes the files of a package that decide what its operator is; no kernel is needed."""

    def write(spec: AttentionSpec | None = None, name: str = "package", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        spec = spec or make_spec()
        (folder / PLAN).write_text(plan_of(spec, **changes).dump())
        (folder / classes.SPEC).write_text(specs.dump(spec))
        return folder

    return write


@pytest.fixture
def causal(package: Package) -> Operator:
    return flashwright.torch_operator(package(make_spec(causal=True)))


def problem(
    spec: AttentionSpec | None = None,
    batch: int = 2,
    q_len: int = 5,
    kv_len: int = 7,
    dtype: Any = None,
    grad: bool = False,
    seed: int = 0,
) -> list[Any]:
    """Q, K, V and what else a spec has as inputs."""
    spec = spec or make_spec()
    torch.manual_seed(seed)
    shapes = [
        (batch, spec.heads, q_len, spec.head_dim),
        (batch, spec.kv_heads, kv_len, spec.head_dim),
        (batch, spec.kv_heads, kv_len, spec.value_dim),
        *[(spec.heads,)] * (spec.alibi + spec.sink),
    ]
    found = [torch.randn(shape) for shape in shapes]
    if dtype is not None:
        found[:3] = [x.to(dtype) for x in found[:3]]
    return [x.requires_grad_(grad) for x in found]


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's own attention, causal in the way of our specs."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, enable_gqa=True)


# --- the result on the CPU --------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 3},
    {"window": 2, "causal": True},
    {"window": 2, "sink_tokens": 2},
    {"window": 2, "sink_tokens": 1, "causal": True},
    {"softcap": 0.7},
    {"alibi": True},
    {"alibi": True, "causal": True},
    {"sink": True},
    {"sink": True, "causal": True},
    {"scale": 0.3},
    {"v_dim": 8},
    {"head_dim": 8, "v_dim": 24},
    {"kv_heads": 4},
    {"kv_heads": 1},
    {"branch": "window", "window": 3},
    {"lse": False},
    {"causal": True, "window": 3, "sink_tokens": 1, "softcap": 2.0, "alibi": True, "sink": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "full")
def test_the_cpu_result_is_the_oracles(package: Package, options: dict[str, Any]) -> None:
    spec = make_spec(**options)
    attention = flashwright.torch_operator(package(spec))
    names = ["Q", "K", "V", *["Slopes"] * spec.alibi, *["Sink"] * spec.sink]
    for q_len, kv_len in ((5, 7), (7, 5), (3, 0), (0, 3), (1, 9)):  # more rows than keys; none
        given = problem(spec, q_len=q_len, kv_len=kv_len)
        truth = oracle.attention(spec, dict(zip(names, (x.numpy() for x in given), strict=True)))
        found = attention(*given, return_lse=True) if spec.lse else (attention(*given),)
        for name, result in zip(attention.outputs, found, strict=True):
            assert result.dtype == torch.float32
            assert result.is_contiguous()
            np.testing.assert_allclose(result.numpy(), truth[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_result_has_the_type_of_the_inputs(causal: Operator, dtype: str) -> None:
    kind = getattr(torch, dtype)
    given = problem(dtype=kind)
    out, lse = causal(*given, return_lse=True)
    assert (out.dtype, lse.dtype) == (kind, torch.float32)
    exact = causal(*(x.double() for x in given))
    torch.testing.assert_close(out, exact.to(kind))


def test_fp8_inputs_give_bf16(package: Package) -> None:
    attention = flashwright.torch_operator(package(make_spec(dtype="fp8")))
    given = problem(dtype=torch.float8_e4m3fn)
    assert attention(*given).dtype == torch.bfloat16
    torch.testing.assert_close(
        attention(*given).float(), attention(*(x.float() for x in given)), rtol=1e-2, atol=1e-2
    )


def test_by_name_and_without_an_lse(package: Package, causal: Operator) -> None:
    q, k, v = problem()
    assert causal.inputs == ("q", "k", "v")
    assert causal.outputs == ("O", "LSE")
    assert causal(q, v=v, k=k).equal(causal(q, k, v))
    alone = flashwright.torch_operator(package(make_spec(lse=False)))
    assert alone.outputs == ("O",)
    with pytest.raises(ValueError, match="return_lse: the kernel has no LSE; its outputs are O"):
        alone(q, k, v, return_lse=True)


REFUSED: list[tuple[str, type[Exception], str]] = [
    ("k=k[:, :, 1:]", ValueError, r"`v` must be 6 long on axis 2 \(kv_len of `k`\), not 7"),
    ("k=k[:1]", ValueError, r"`k` must be 2 long on axis 0 \(batch of `q`\), not 1"),
    ("q=q[..., :8]", ValueError, r"`q` must be 16 long on axis 3 \(the kernel is made for it\)"),
    ("q=q[:, :3]", ValueError, r"kv_heads = 2 must divide heads = 3"),
    ("q=q[0]", ValueError, r"`q` must have 4 axes \(B, H, L, D\); its shape is \(4, 5, 16\)"),
    ("k=k.half()", TypeError, r"`k` is torch.float16, but `q` is torch.float32: give k.to\("),
    ("q=q.int()", TypeError, r"`q` must have a floating-point type, not torch.int32"),
    ("k=k.to('meta')", ValueError, r"`k` is on meta, `q` on cpu: move one to the other"),
    ("k=3", RuntimeError, r"value of type 'Tensor' for argument 'k'"),
]


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED, ids=[r[0] for r in REFUSED])
def test_wrong_arguments_are_named(
    causal: Operator, change: str, kind: type[Exception], words: str
) -> None:
    q, k, v = problem()
    changes = eval(f"dict({change})", {"q": q, "k": k, "v": v})
    with pytest.raises(kind, match=words):
        causal(**{"q": q, "k": k, "v": v, **changes})


def test_what_cannot_be_computed_here_says_why(package: Package, tmp_path: Path) -> None:
    def refused(words: str, folder: Path) -> None:
        attention = flashwright.torch_operator(folder)
        with pytest.raises(NotImplementedError, match=f"no implementation for CPU.*{words}.*CUDA"):
            attention(*problem())

    refused("defined by mine.py", package(make_spec(reference="mine.py")))
    refused("branch 'compressed'", package(make_spec(branch="compressed", causal=True)))
    refused("`dims` is not written", package(make_spec(dims={"pages": 4})))
    refused("reads Q, K, V, the spec has Q, K, V, Sink", edited(package(), "sink = true"))
    folder = package()
    (folder / classes.SPEC).unlink()
    refused("has no spec.toml", folder)
    (folder / classes.SPEC).write_text("dtype = 7")
    with pytest.raises(Failed, match=r"spec.toml:1: dtype"):
        flashwright.torch_operator(folder)


def edited(folder: Path, line: str) -> Path:
    with (folder / classes.SPEC).open("a") as file:
        file.write(line + "\n")
    return folder


# --- what torch does with it ------------------------------------------------------------------


@pytest.mark.parametrize("grad", some([True, False]))
def test_opcheck(package: Package, grad: bool) -> None:
    """Schema, fake tensors with exact strides, autograd registration, AOT with dynamic shapes."""
    spec = make_spec(causal=True, sink=True)
    attention = flashwright.torch_operator(package(spec))
    q, *rest = problem(spec, dtype=None if grad else torch.bfloat16, grad=grad)
    strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad)
    done = torch.library.opcheck(attention.op, (strided, *rest))
    assert set(done.values()) == {"SUCCESS"}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_whole_for_all_lengths(causal: Operator) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *x: causal(*x, return_lse=True)[0].sin(),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for q_len, kv_len in ((5, 7), (6, 9), (11, 10)):
        given = problem(q_len=q_len, kv_len=kv_len)
        torch.testing.assert_close(compiled(*given), causal(*given).sin())
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert causal.op in {node.target for node in graph.graph.nodes}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", some([True, False]))
def test_a_compiled_model_is_trained_on_the_cpu(causal: Operator, dynamic: bool) -> None:
    def loss(*x: Any) -> Any:
        return causal(*x).sin().sum()

    given = problem(grad=True)
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given), given)
    expected = torch.autograd.grad(sdpa(*given).sin().sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_exported_with_dynamic_lengths(causal: Operator) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return causal(q, k, v)

    batch, q_len, kv_len = (torch.export.Dim(name) for name in ("batch", "q_len", "kv_len"))
    keys = {0: batch, 2: kv_len}
    shapes = {"q": {0: batch, 2: q_len}, "k": keys, "v": keys}
    program = torch.export.export(Model(), tuple(problem()), dynamic_shapes=shapes)
    assert causal.op in {n.target for n in program.run_decompositions().graph.nodes}
    other = problem(batch=3, q_len=9, kv_len=11)
    torch.testing.assert_close(program.module()(*other), causal(*other))


def test_vmap_folds_an_axis_into_the_batch(package: Package) -> None:
    spec = make_spec(causal=True, alibi=True)
    attention = flashwright.torch_operator(package(spec))
    many = [problem(spec, seed=seed) for seed in range(3)]
    _, k, _, slopes = many[0]
    q, v = (torch.stack([each[i] for each in many], axis) for i, axis in ((0, 0), (2, 1)))
    mapped = torch.vmap(lambda q, v: attention(q, k, v, slopes, return_lse=True), in_dims=(0, 1))
    out, lse = mapped(q, v)
    for i, each in enumerate(many):
        expected = attention(each[0], k, each[2], slopes, return_lse=True)
        torch.testing.assert_close((out[i], lse[i]), expected)
    with pytest.raises(ValueError, match=r"vmap over `slopes`.*no batch axis"):
        torch.vmap(attention)(q, *(torch.stack([x] * 3) for x in (k, k, slopes)))


def test_autocast(package: Package) -> None:
    spec = make_spec(alibi=True, dtype="fp16")
    attention = flashwright.torch_operator(package(spec))
    given = problem(spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(*given, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    rounded = [*(x.bfloat16() for x in given[:3]), given[3]]
    assert out.equal(attention(*rounded))
    # On a GPU the inputs take the types of the kernel, whatever autocast's own is.
    rule = rules.Autocast(Signature(plan_of(spec)), lambda *taken: [x.dtype for x in taken])
    half, single, double = torch.float16, torch.float32, torch.float64
    assert rule.on_cuda(*rounded) == [half, half, half, single]
    assert rule.on_cuda(*(x.double() for x in given)) == [double] * 4
    fp8 = rules.Autocast(Signature(plan_of(make_spec(dtype="fp8"))), rule.operator)
    assert fp8.on_cuda(*given[:3]) == [single] * 3


def test_fake_cuda_tensors_get_the_outputs_of_the_kernel(causal: Operator) -> None:
    half, single = torch.float16, torch.float32
    with FakeTensorMode():
        packed = torch.empty(2, 5, HEADS, DIM, dtype=half, device="cuda:0")
        k = torch.empty(2, KV_HEADS, 7, DIM, dtype=half, device="cuda:0")
        out, lse = causal(packed.transpose(1, 2), k, k, return_lse=True)
        assert (out.shape, out.dtype, out.device) == ((2, HEADS, 5, DIM), half, packed.device)
        assert out.transpose(1, 2).is_contiguous()  # as Q is
        assert lse.is_contiguous()
        q = torch.empty(2, HEADS, 5, DIM, dtype=half, device="cuda:0")
        assert causal(q, k, k).is_contiguous()
        assert (lse.shape, lse.dtype, lse.device) == ((2, HEADS, 5), single, packed.device)
        with pytest.raises(TypeError, match=r"`k` must be torch.float16, not torch.float32"):
            causal(packed.transpose(1, 2), k.float(), k)


def test_a_dim_that_no_tensor_shows_is_a_number_of_the_schema(package: Package) -> None:
    spec = make_spec(branch="compressed", causal=True)
    blocks = plan_tensor("O", "B:batch H:heads L:tokens,4,ceil_div D:16")
    tensors = (*plan_of(spec).tensors[:3], blocks)
    folder = package(spec, tensors=tensors, dims=(*DIMS, "tokens"))
    attention = flashwright.torch_operator(folder)
    assert "Tensor v, SymInt tokens) -> Tensor" in str(attention.op._schema)
    q, k, v = (x.half().to("meta") for x in problem())
    assert attention(q, k, v, tokens=9).shape == (2, HEADS, 3, DIM)


# --- gradients --------------------------------------------------------------------------------


def test_gradients_on_the_cpu_are_those_of_the_definition(package: Package) -> None:
    spec = make_spec(causal=True, alibi=True, sink=True, softcap=2.0)
    attention = flashwright.torch_operator(package(spec))
    given = [x.double().requires_grad_() for x in problem(spec, q_len=3, kv_len=2)]
    assert torch.autograd.gradcheck(attention, given, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attention, given, fast_mode=True)


def test_derivatives_by_torch_func(causal: Operator) -> None:
    q, k, v = problem()
    derivative = torch.func.grad(lambda q: causal(q, k, v).sin().sum())
    torch.testing.assert_close(
        derivative(q), torch.func.grad(lambda q: sdpa(q, k, v).sin().sum())(q)
    )
    torch.testing.assert_close(torch.vmap(derivative)(torch.stack([q, q]))[1], derivative(q))
    with pytest.raises(ValueError, match="`k` must be 2 long on axis 0"):
        torch.func.grad(lambda q: causal(q, k[:1], v).sum())(q)


def test_one_tensor_as_several_inputs_and_rows_without_keys(package: Package) -> None:
    spec = make_spec(kv_heads=HEADS, causal=True)
    attention = flashwright.torch_operator(package(spec))
    x, y = (torch.randn(1, HEADS, 4, DIM, requires_grad=True) for _ in range(2))
    (found,) = torch.autograd.grad(attention(x, x, x).sin().sum(), x)
    (expected,) = torch.autograd.grad(sdpa(x, x, x).sin().sum(), x)
    torch.testing.assert_close(found, expected)
    out, lse = attention(y, x[:, :, :1], x[:, :, :1], return_lse=True)  # 3 of 4 rows see no key
    (out.sum() + lse[..., 3:].sum()).backward()
    assert bool(y.grad.isfinite().all())
    assert bool(x.grad.isfinite().all())


@pytest.fixture
def without_backward(package: Package) -> Operator:
    """An operator whose kernel is no torch code, as on a GPU, but takes CPU tensors."""
    attention = flashwright.torch_operator(package(make_spec(reference="mine.py")))
    name = attention.op._schema.name.split("::")[1]
    library = torch.library.Library("flashwright", "IMPL")

    def kernel(q: Any, k: Any, v: Any) -> Any:
        return q.detach() * 2, q.new_zeros(q.shape[:-1], dtype=torch.float32)

    with warnings.catch_warnings(action="ignore"):
        library.impl(name, kernel, "CPU", allow_override=True)
    attention.library = library  # type: ignore[attr-defined]  # kept alive
    return attention


LOST = r"of flashwright::attention_\w+: a tensor requires a gradient.*torch\.no_grad\(\)"


def test_a_gradient_that_no_kernel_computes_is_an_error(without_backward: Operator) -> None:
    q, k, v = problem(grad=True)
    assert not without_backward(*(x.detach() for x in (q, k, v))).requires_grad
    with torch.no_grad():
        assert not without_backward(q, k, v).requires_grad
    for needing in ((q, k.detach(), v.detach()), (q.detach(), k.detach(), v)):
        out = without_backward(*needing)  # the forward works
        with pytest.raises(RuntimeError, match=LOST):
            out.sum().backward()
    assert q.grad is None
    assert v.grad is None


def test_so_is_any_other_derivative(without_backward: Operator) -> None:
    from torch.autograd import forward_ad

    q, k, v = problem()
    with pytest.raises(RuntimeError, match=LOST):
        torch.func.grad(lambda q: without_backward(q, k, v).sum())(q)
    with pytest.raises(RuntimeError, match=LOST):
        torch.func.jvp(lambda q: without_backward(q, k, v), (q,), (q,))
    with forward_ad.dual_level():
        assert without_backward(q, k, v).equal(q * 2)
        with pytest.raises(RuntimeError, match=LOST):
            without_backward(forward_ad.make_dual(q, q), k, v)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_so_it_is_in_a_compiled_model(without_backward: Operator, dynamic: bool) -> None:
    compiled = torch.compile(
        lambda *x: without_backward(*x).sin(), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    q, k, v = problem(grad=True)
    out = compiled(q, k, v)
    torch.testing.assert_close(out, (q * 2).sin())
    with pytest.raises(RuntimeError, match=LOST):
        out.sum().backward()
    assert q.grad is None


# --- registration and the kernel --------------------------------------------------------------


def test_one_operator_for_each_content(package: Package, tmp_path: Path) -> None:
    one = flashwright.torch_operator(package(make_spec(causal=True)))
    assert flashwright.torch_operator(str(tmp_path / "package")) is one
    same = flashwright.torch_operator(package(make_spec(causal=True), name="copy"))
    assert same.op is one.op
    other = flashwright.torch_operator(package(make_spec(causal=True, scale=0.5)))
    assert other.op is not one.op
    given = problem()
    assert not other(*given).equal(one(*given))  # the first one is not changed by that
    (tmp_path / "package" / CUBIN).write_bytes(cubin())
    assert flashwright.torch_operator(tmp_path / "package").op not in (one.op, other.op)


def test_a_model_with_an_operator_is_copied_and_pickled(causal: Operator) -> None:
    assert copy.deepcopy(causal) is causal
    assert pickle.loads(pickle.dumps(causal)) is causal


def test_the_kernel_is_loaded_at_the_first_call_with_cuda_tensors(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, called = [], []

    class Kernel:
        def launch(self, tensors: Any, dims: Any, check_only: bool = False) -> None:
            called.append((tensors, dims, check_only))

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return Kernel()

    monkeypatch.setattr(classes, "load", load)
    folder = package(dims=(*DIMS, "tokens"))
    flashwright.torch_operator(folder)
    on_cuda = operator._OnCuda(Signature(classes.read_plan(folder)), operator._Package(folder))
    assert not loaded
    q, k, v = problem(dtype=torch.float16)
    dims = [None] * len(DIMS) + [9]
    for _ in range(2):
        out, lse = on_cuda(q, k, v, 9)
        same(called.pop(), ((q, k, v, out, lse), dims, False))
        (alone,) = on_cuda.launch((q, k, v, 9), all_outputs=False)
        same(called.pop(), ((q, k, v, alone, None), dims, False))
    assert loaded == [folder]
    with pytest.raises(IndexError):
        on_cuda(q[0, 0, 0], k, v, 9)
    same(called.pop(), ((q[0, 0, 0], k, v, None, None), dims, True))  # the launcher says why


def same(found: Any, wanted: Any) -> None:
    """Two launches are the same, where tensors are the same memory."""
    places = [
        [t if t is None else t.data_ptr() for t in tensors] for tensors, *_ in (found, wanted)
    ]
    assert places[0] == places[1]
    assert [list(found[1]), found[2]] == [wanted[1], wanted[2]]


def test_the_dispatcher_is_left_out_only_if_it_has_nothing_to_do() -> None:
    seen = operator.undisturbed

    class Subclass(torch.Tensor):
        pass

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    tensors, recorded = problem(), problem(grad=True)
    assert seen(tensors)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert seen(recorded)
    assert not seen(recorded)
    assert not seen([tensors[0], "K", tensors[2]])
    assert not seen([*tensors[:2], tensors[2].as_subclass(Subclass)])
    for context in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        forward_ad.dual_level(),
        Mode(),
        torch.device("meta"),
        FakeTensorMode(),
    ):
        with context:
            assert not seen(tensors)
    found = []
    torch.vmap(lambda x: found.append(seen([x] * 3)) or x)(tensors[0])
    torch.jit.trace(lambda x: found.append(seen([x] * 3)) or x, tensors[0], check_trace=False)
    torch.compile(lambda x: x + seen([x] * 3), backend="eager", fullgraph=True)(tensors[0])
    assert found == [False, False]


@pytest.mark.parametrize(("batch", "q_len"), [(2, 5), (1, 1), (2, 1)])
def test_o_lies_in_memory_as_q_does(causal: Operator, batch: int, q_len: int) -> None:
    """What follows an attention layer takes (batch, length, heads, dim) without a copy."""
    q, k, v = problem(batch=batch, q_len=q_len)
    expected = causal(q, k, v)
    assert expected.is_contiguous()
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.cat([rows_first.transpose(1, 2)] * 2, dim=2)[:, :, :HEADS].transpose(1, 2)
    for given in (rows_first, packed):
        out = causal(given, k, v)
        assert out.transpose(1, 2).is_contiguous()
        assert out.equal(expected)
        done = torch.library.opcheck(causal.op, (given, k, v))
        assert set(done.values()) == {"SUCCESS"}


def test_the_script_that_times_calls_on_a_gpu_can_make_each_of_them(
    causal: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def qkv(grad: bool = False, **sizes: Any) -> list[Any]:
        return problem(grad=grad, dtype=torch.float16)

    monkeypatch.setattr(script, "operator", lambda: causal)
    monkeypatch.setattr(script, "folder", lambda: "")
    monkeypatch.setattr(flashwright, "load", lambda folder: lambda *tensors, **more: None)
    monkeypatch.setattr(script, "problem", qkv)
    monkeypatch.setattr(script, "host_microseconds", lambda call: (call(), 0.0)[1])
    script.main()
    assert capsys.readouterr().out.count(" us\n") == 15


def test_a_package_that_changed_before_its_first_call_is_not_run(package: Package) -> None:
    folder = package()
    (folder / CUBIN).write_bytes(cubin())
    found = operator._Package(folder)
    (folder / CUBIN).write_bytes(cubin(90))
    with pytest.raises(Failed, match="has changed since its operator was made"):
        found.load()


def test_a_kernel_that_writes_its_input_is_no_operator(package: Package) -> None:
    tensors = (*plan_of(make_spec()).tensors[:3], plan_tensor("O", "B:batch", read=True))
    with pytest.raises(Failed, match="`O` is read and written"):
        flashwright.torch_operator(package(tensors=tensors))
    tensors = (*tensors[:3], plan_tensor("O", "B:batch", flat=True))
    with pytest.raises(Failed, match="`O` has a size that only a caller knows"):
        flashwright.torch_operator(package(tensors=tensors))


def test_torch_is_imported_for_an_operator_only(package: Package) -> None:
    code = f"""import sys, flashwright
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as if it were not installed
try: flashwright.torch_operator({str(package())!r})
except ImportError as error: print(error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'flashwright[torch]'" in done.stdout
