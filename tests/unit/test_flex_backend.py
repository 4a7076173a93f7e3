"""torch.compile(model, backend="flashwright").

There is no GPU here. So kernels are asked for on CPU tensors too, and each operator is the NumPy
reference that its package would have, which is written from the captured TL.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.mods import Mods
from flashwright.author.builtin.mods_reference import reference_text
from flashwright.emulate.package import read_package
from flashwright.generate import backward
from flashwright.generate.store import Order, find_or_make
from flashwright.judge.emulated import launch, new_outputs
from flashwright.lang.format import format_tree
from tests.unit import uncompiled
from tests.unit.emulated import needs_compilers

torch = pytest.importorskip("torch")
from torch._dynamo.backends import registry  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from flashwright.flex import backend as ours  # noqa: E402
from flashwright.flex import fallback  # noqa: E402

ROOT = Path(__file__).parents[2]
LIBRARY = torch.library.Library("flashwright_test", "FRAGMENT")
CLOSE = {"rtol": 2e-2, "atol": 4e-3}


class InNumPy:
    """A kernel's operator on CPU tensors."""

    def __init__(self, order: Order, number: int) -> None:
        self.mods = order.mods or Mods()
        self.order, self.calls = order, 0
        self.names = ["Q", "K", "V", *(o.name for o in self.mods.operands)]
        self.inputs = tuple(name.lower() for name in self.names)

        def compute(*tensors: Any) -> Any:
            self.calls += 1
            given = dict(zip(self.names, tensors, strict=True))
            dims = dict(zip(("batch", "heads", "q_len"), tensors[0].shape, strict=False))
            dims |= {"kv_heads": tensors[1].shape[1], "kv_len": tensors[1].shape[2]}
            for operand in self.mods.operands:
                for size, length in zip(operand.sizes, given[operand.name].shape, strict=True):
                    assert dims.setdefault(size, length) == length
            result = self.compute(given, dims)
            out = torch.from_numpy(result["O"].astype(np.float64)).to(tensors[0].dtype)
            return out.contiguous(), torch.from_numpy(result["LSE"]).float().contiguous()

        def fake(*tensors: Any) -> Any:
            q, v = tensors[0], tensors[2]
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            return q.new_empty((*q.shape[:3], v.shape[3])), lse

        name = f"attention_{number}"
        taken = ", ".join(f"Tensor {name}" for name in self.inputs)
        LIBRARY.define(f"{name}({taken}) -> (Tensor, Tensor)")
        LIBRARY.impl(name, compute, "CPU")
        torch.library.register_fake(f"flashwright_test::{name}", fake, lib=LIBRARY)
        self.op = getattr(torch.ops.flashwright_test, name).default

    def __call__(self, *tensors: Any, return_lse: bool = False) -> Any:
        out, lse = self.op(*tensors)
        return (out, lse) if return_lse else out

    def compute(self, given: dict[str, Any], dims: dict[str, int]) -> Any:
        """O and LSE, in fp64."""
        found: dict[str, Any] = {}
        exec(reference_text(self.mods, self.order.spec, {}), found)
        arrays = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
        return found["reference"]({n: t.numpy() for n, t in arrays.items()}, dims)


def emulate(kernel: InNumPy, given: dict[str, Any], dims: dict[str, int]) -> Any:
    """O and LSE of the kernel itself, from the store, under emulation."""
    folder = find_or_make(kernel.order, print)
    shape = (*given["Q"].shape[:3], given["V"].shape[3])
    outputs = {"O": (shape, "fp16"), "LSE": (shape[:3], "fp32")}
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    sizes = {**kernel.order.spec.dims, **dims}
    out = new_outputs(outputs, {})
    result = launch(read_package(folder), {**arrays, **out}, sizes, "eager", 600.0)
    assert not result.findings
    return out


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend by its name, as an installed entry point gives it."""
    text = (ROOT / "pyproject.toml").read_text()
    value = tomllib.loads(text)["project"]["entry-points"][GROUP]["flashwright"]
    torch._dynamo.list_backends()
    registry._BACKENDS["flashwright"] = EntryPoint("flashwright", value, GROUP)
    monkeypatch.setattr(ours, "_WARNED", set())
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch._dynamo.reset()


GROUP = "torch_dynamo_backends"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[InNumPy]:
    """The kernels that are made, on CPU tensors."""
    made: list[InNumPy] = []

    def operator_of(order: Order) -> InNumPy:
        for known in made:
            if known.order == order:
                return known
        _COUNT.append(order)
        made.append(InNumPy(order, len(_COUNT)))
        return made[-1]

    monkeypatch.setattr(ours, "takes", lambda device: True)
    monkeypatch.setattr(ours, "card_of", lambda device: gpus.find("h200"))
    monkeypatch.setattr(ours, "operator_of", operator_of)
    return made


@pytest.fixture
def emulated(kernels: list[InNumPy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The same, with real kernels under emulation."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(InNumPy, "compute", emulate)
    return kernels


_COUNT: list[Order] = []


def compiled(model: Callable[..., Any], **more: Any) -> Any:
    return torch.compile(
        model, backend="flashwright", fullgraph=True, options={"rest": "aot_eager"}, **more
    )


def eager(model: Callable[..., Any], *given: Any) -> Any:
    """What FlexAttention computes without a compiler."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        return model(*given)


def problem(length: int = 45, width: int = 16, seed: int = 0) -> list[Any]:
    """Q, K, V as views of a packed projection."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randn(2, length, 8, width, generator=draw).half()
    return [x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2)]


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert found.stride() == wanted.stride()


class Documents(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """ALiBi and documents, with the projections of a layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, q: Any, k: Any, v: Any, document: Any, block_mask: Any = None) -> Any:
        def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.slopes[h] * (j - i)

        def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (document[i] == document[j]) & (i >= j)

        if block_mask is None:
            block_mask = create_block_mask(
                same_document, None, None, q.shape[2], k.shape[2], device=q.device
            )
        out = flex_attention(q * 2, k, v, score_mod=alibi, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(-2).sin()


def documents(length: int, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (length,), generator=draw).sort().values


def softcapped(q: Any, k: Any, v: Any) -> Any:
    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 20 * torch.tanh(score / 20)

    out, aux = flex_attention(
        q, k, v, score_mod=softcap, enable_gqa=True, scale=0.5, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


# --- on the CPU -------------------------------------------------------------------------------


def test_on_cpu_tensors_pytorch_computes_it(recwarn: Any) -> None:
    document = documents(45)
    given = [*problem(), document, mask_of(document, 45)]
    model = Documents()
    found = compiled(model)(*given)
    assert_close(found, eager(model, *given))
    assert not [w for w in recwarn if "flashwright" in str(w.message)]


# --- kernels ----------------------------------------------------------------------------------


def test_alibi_with_documents_is_a_kernel(kernels: list[InNumPy]) -> None:
    """The model makes its BlockMask itself, so that its lists are no inputs of the graph."""
    given = [*problem(), documents(45)]
    model = Documents()
    found = compiled(model)(*given)
    assert_close(found, eager(model, *given))
    (kernel,) = kernels
    assert kernel.calls == 2  # the check of a new kernel, and the model's
    assert kernel.inputs == ("q", "k", "v", "slopes", "document", "document2")


def mask_of(document: Any, length: int) -> Any:
    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i >= j)

    return create_block_mask(same_document, None, None, length, length, device="cpu")


def test_softcap_with_shared_kv_heads_and_lse(kernels: list[InNumPy]) -> None:
    given = problem()
    found = compiled(softcapped)(*given)
    for one, wanted in zip(found, eager(softcapped, *given), strict=True):
        assert_close(one, wanted)
    (kernel,) = kernels
    assert kernel.inputs == ("q", "k", "v")
    assert kernel.order.spec.scale == 0.5


def test_captured_tensors_are_those_of_each_call(kernels: list[InNumPy]) -> None:
    """A BlockMask that is made outside: its tensors are others in each call, then written to."""
    model = Documents()
    run = compiled(model)
    for seed in (0, 1):
        document = documents(45, seed)
        given = [*problem(seed=seed), document, mask_of(document, 45)]
        assert_close(run(*given), eager(model, *given))
    model.slopes.mul_(3)
    document[10:] += 1
    again = mask_of(document, 45)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(given[4], name).copy_(getattr(again, name))
    assert_close(run(*given), eager(model, *given))
    assert len(kernels) == 1


@pytest.mark.slow
def test_one_kernel_for_all_lengths(kernels: list[InNumPy]) -> None:
    model = Documents()
    run = compiled(model, dynamic=True)
    for length in (150, 300, 203):
        document = documents(length)
        given = [*problem(length), document, mask_of(document, length)]
        assert_close(run(*given), eager(model, *given))
    (kernel,) = kernels
    assert kernel.calls >= 4  # the check of a new kernel, and three calls


def test_a_captured_number_that_changes_is_an_operand(kernels: list[InNumPy]) -> None:
    def model(q: Any, k: Any, v: Any, width: int) -> Any:
        def near(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.where((i - j).abs() < width, score, -float("inf"))

        return flex_attention(q, k, v, score_mod=near, enable_gqa=True)

    run = compiled(model)
    for width in (5, 9, 17):
        given = [*problem(), width]
        assert_close(run(*given), eager(model, *given))
    assert [len(kernel.inputs) for kernel in kernels] == [3, 4]


def test_a_longer_captured_tensor_and_two_calls_in_one_graph(kernels: list[InNumPy]) -> None:
    bias = torch.randn(64)

    def model(q: Any, k: Any, v: Any) -> Any:
        def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + bias[j]

        first = flex_attention(q, k, v, score_mod=biased, enable_gqa=True)
        return flex_attention(first, k, v, enable_gqa=True)

    given = problem()
    assert_close(compiled(model)(*given), eager(model, *given))
    assert [kernel.inputs for kernel in kernels] == [("q", "k", "v", "bias"), ("q", "k", "v")]
    assert kernels[1].order.mods is None


def test_layers_share_a_kernel_and_the_check_of_their_block_mask(
    kernels: list[InNumPy], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    compare = ours.disagreement
    monkeypatch.setattr(ours, "disagreement", lambda *a: looked.append(a) or compare(*a))
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 45, 45, device="cpu")

    def model(q: Any, k: Any, v: Any) -> Any:
        for _ in range(3):
            q = by_blocks(q, k, v, block_mask)
        return q

    given, run = problem(), compiled(model)
    for _ in range(2):
        assert_close(run(*given), eager(model, *given))
    (kernel,) = kernels
    assert kernel.calls == 1 + 2 * 3
    assert len(looked) == 1


@pytest.mark.slow
@needs_compilers
def test_the_kernel_that_is_made_computes_it(emulated: list[InNumPy]) -> None:
    """From the model to the H200's PTX."""
    document = documents(150)
    model = Documents()
    given = [*problem(150, 64), document, mask_of(document, 150)]
    assert_close(compiled(model)(*given), eager(model, *given))
    assert emulated[0].calls == 2


# --- what stays PyTorch's ---------------------------------------------------------------------


def refused(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    twice = score * 2
    return torch.erf(twice)


def by_erf(q: Any, k: Any, v: Any) -> Any:
    return flex_attention(q, k, v, score_mod=refused, enable_gqa=True)


def told(found: Any) -> list[str]:
    """Our warnings, with the line that each one is given for."""
    own = [w for w in found if "flashwright: this flex_attention stays" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}: {w.message}" for w in own]


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset}: "


def test_a_refused_operator_is_told_once_with_its_line(
    kernels: list[InNumPy], recwarn: Any
) -> None:
    run = compiled(by_erf)
    for length in (45, 46, 47):  # the second is a new compilation
        given = problem(length)
        assert_close(run(*given), eager(by_erf, *given))
    (text,) = told(recwarn)
    assert text.startswith(line_of(by_erf, 1))
    assert line_of(refused, 2) + "TL has no counterpart of aten.erf.default" in text
    assert not kernels


@pytest.mark.parametrize("inside", [True, False])
def test_under_no_grad_there_is_no_backward(
    inside: bool, kernels: list[InNumPy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)

    def model(q: Any, k: Any, v: Any) -> Any:
        if not inside:
            return flex_attention(q, k, v, enable_gqa=True)
        with torch.no_grad():
            return flex_attention(q, k, v, enable_gqa=True)

    given = problem()
    given[0] = given[0].detach().requires_grad_()
    with torch.set_grad_enabled(inside):
        found = compiled(model)(*given)
    torch.testing.assert_close(found.detach(), eager(model, *given), **CLOSE)
    assert len(kernels) == 1


def test_a_type_without_kernels_is_told(kernels: list[InNumPy], recwarn: Any) -> None:
    given = [t.float() for t in problem()]
    compiled(softcapped)(*given)
    assert "query is torch.float32" in told(recwarn)[0]
    assert not kernels


def test_autocast_decides_the_type(kernels: list[InNumPy]) -> None:
    given = [t.float() for t in problem()]

    def model(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v, enable_gqa=True)

    found = compiled(model)(*given)
    wanted = eager(model, *given)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=2e-2)
    assert [kernel.order.spec.dtype for kernel in kernels] == ["bf16"]


# --- gradients --------------------------------------------------------------------------------

FORWARD, BACKWARD = ("O", "LSE"), ("dK", "dV", "dQ")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The outputs of each launch, of operators that are real but for their kernels."""
    uncompiled.without_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(ours, "takes", lambda device: True)
    monkeypatch.setattr(ours, "card_of", lambda device: uncompiled.CARD)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # no backward on a CPU
    torch.manual_seed(0)  # the trial of gradients draws its tensors
    return uncompiled.interpret_operators(monkeypatch)


def leaves(*more: Any) -> list[Any]:
    return [t.detach().clone().requires_grad_() for t in (*problem(width=64), *more)]


def gradients(model: Callable[..., Any], given: list[Any]) -> list[Any]:
    """Of a loss that takes all outputs of a model."""
    found = model(*given)
    found = found if isinstance(found, tuple) else (found,)
    sum((out.double() * torch.arange(out.shape[2])[:, None]).sum() for out in found).backward()
    return [tensor.grad for tensor in given]


def by_definition(
    q: Any, k: Any, v: Any, score_mod: Any = None, block_mask: Any = None, **more: Any
) -> Any:
    """flex_attention, by operators that autograd follows."""
    mask_mod = block_mask.mask_mod if block_mask is not None else None
    out, lse = fallback.dense(q, k, v, score_mod, mask_mod)
    return (out, flex.AuxOutput(lse=lse)) if "return_aux" in more else out


def assert_gradients(model: Callable[..., Any], given: list[Any], **more: Any) -> None:
    """They are those of the model in fp64 without a compiler."""
    found = gradients(compiled(model, **more), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.flex_attention", by_definition)
        wanted = gradients(model, exact)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).square().mean().sqrt() < 0.005 * other.square().mean().sqrt()


def test_gradients_are_those_of_the_derived_backward(launched: list[Any], recwarn: Any) -> None:
    """A score of one's own, whose gradient is a factor, and a gradient of the LSE."""

    def model(q: Any, k: Any, v: Any) -> Any:
        def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return 2 * torch.tanh(score / 2)

        aux = AuxRequest(lse=True)
        out, found = flex_attention(q, k, v, capped, enable_gqa=True, return_aux=aux)
        return out, found.lse[..., None]

    assert_gradients(model, leaves())
    assert not told(recwarn)
    assert launched == [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD]  # the first three: the trial


def test_a_learned_slope(launched: list[Any], recwarn: Any) -> None:
    def model(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + slopes[h] * (j - i)

        return flex_attention(q, k, v, alibi, enable_gqa=True)

    assert_gradients(model, leaves(torch.rand(4)))
    assert not told(recwarn)
    assert "dSlopes" in launched[-1]


def test_a_learned_relative_bias(launched: list[Any], recwarn: Any) -> None:
    """Tables that the score reads by index, in fp32 and in fp16, one of them longer than it needs
    to be."""

    def model(q: Any, k: Any, v: Any, table: Any, buckets: Any) -> Any:
        def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            near = table[h, torch.clamp(j - i + 20, 0, 40)]
            return score + near + buckets[torch.clamp(torch.abs(i - j) // 16, 0, 5)]

        return flex_attention(q, k, v, relative, enable_gqa=True)

    given = leaves(torch.rand(4, 50), torch.rand(8).half())
    assert_gradients(model, given)
    assert not told(recwarn)
    assert {"dTable", "dBuckets"} <= set(launched[-1])


@pytest.mark.parametrize("lists", ["", "later"])
def test_activation_checkpointing(lists: str, launched: list[Any], recwarn: Any) -> None:
    """The forward is launched again before the backward. If the lists of the BlockMask change,
    PyTorch computes the layer in its own graph, which has no kernel of ours inside."""
    document = documents(45)
    block_mask = mask_of(document, 45)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    def model(q: Any, k: Any, v: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)

    run, given = compiled(model), leaves()
    assert_gradients(model, given)
    assert launched[-3:] == [FORWARD, FORWARD, BACKWARD]
    assert not told(recwarn)
    if lists:
        block_mask.kv_num_blocks.zero_()
        launched.clear()
        run(*given)
        assert not launched
        assert "the lists skip block (0, 0)" in told(recwarn)[0]


def test_lists_that_are_made_inside_a_checkpoint_are_told(
    launched: list[Any], recwarn: Any
) -> None:
    block_mask = mask_of(documents(45), 45)

    def layer(q: Any, k: Any, v: Any, none: Any) -> Any:
        counts = block_mask.kv_num_blocks + none
        mask = BlockMask.from_kv_blocks(
            counts, block_mask.kv_indices, mask_mod=block_mask.mask_mod, seq_lengths=(45, 45)
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    def model(*given: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)

    compiled(model)(*leaves(), torch.zeros((), dtype=torch.int32))
    assert "is made inside torch.utils.checkpoint; make it outside" in told(recwarn)[0]
    assert not launched


def test_what_has_no_derived_backward_is_pytorchs(launched: list[Any], recwarn: Any) -> None:
    """A kernel reads the table of four axes, and no backward gives its gradient in 16 bits."""

    def model(q: Any, k: Any, v: Any, table: Any) -> Any:
        def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + table[b, h, i // 8, j // 8]

        return flex_attention(q, k, v, biased, enable_gqa=True)

    given = leaves(torch.randn(2, 4, 16, 16, dtype=torch.float16))
    compiled(model)(*given).sum().backward()
    assert given[3].grad is not None
    assert "the backward gives no gradient of table" in told(recwarn)[0]
    assert launched == [FORWARD, FORWARD]  # the check of the new kernel, and the trial


def test_a_wrong_backward_is_pytorchs(
    launched: list[Any], recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + j % 2, enable_gqa=True)

    def wrong(tree: Any) -> str:
        text = format_tree(tree)
        assert "Compute dQsum_register * Scale" in text
        return text.replace("Compute dQsum_register * Scale", "Compute dQsum_register")

    monkeypatch.setattr(backward, "format_tree", wrong)
    compiled(model)(*leaves())
    assert launched == [FORWARD, FORWARD, BACKWARD]
    assert "a new backward is wrong" in told(recwarn)[0]


# --- block masks that are not their function's ------------------------------------------------


def chosen(length: int, which: list[int]) -> Any:
    """A BlockMask of one chosen block of 16 keys for each block of queries."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    counts = torch.ones(1, 1, len(which), dtype=torch.int32)
    indices = torch.tensor(which, dtype=torch.int32).reshape(1, 1, -1, 1)
    indices = torch.cat([indices, indices.new_zeros(1, 1, len(which), len(which) - 1)], dim=-1)
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(length, length)
    )


def by_blocks(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


def test_chosen_blocks_are_pytorchs(kernels: list[InNumPy], recwarn: Any) -> None:
    given = [*problem(48), chosen(48, [0, 0, 2])]
    compiled(by_blocks)(*given)
    assert not kernels
    assert "its BlockMask is not that of its mask function" in told(recwarn)[0]
    assert "the lists skip block (1, 1)" in told(recwarn)[0]


def test_blocks_that_are_chosen_later_are_pytorchs(kernels: list[InNumPy], recwarn: Any) -> None:
    """The first call's lists agree with the function, so there is a kernel; the second's do not."""
    whole = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 48, 48, device="cpu", BLOCK_SIZE=16
    )
    model = torch.nn.Module()
    model.forward = lambda q, k, v: by_blocks(q, k, v, whole)
    run = compiled(model)
    given = problem(48)
    assert_close(run(*given), eager(model, *given))
    (kernel,) = kernels
    before = kernel.calls
    assert not told(recwarn)
    whole.kv_num_blocks.copy_(torch.tensor([[[1, 0, 1]]]))
    assert_close(run(*given), eager(model, *given))  # uncompiled, PyTorch reads no lists
    assert kernel.calls == before
    assert "block (1, 1)" in told(recwarn)[0]
