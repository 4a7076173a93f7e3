"""Gradients through a kernel's operator, with kernels that are interpreted on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.build.steps import Steps, StepsKernel
from flashwright.check.check import check, checked_program
from flashwright.generate.backward import BackwardOrder
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret
from flashwright.spec import AttentionSpec
from tests.unit.test_several_kernels import problem

torch = pytest.importorskip("torch")
from flashwright.flex.gradient_trial import GradientTrial  # noqa: E402
from flashwright.flex.task import WrongKernel  # noqa: E402
from flashwright.pytorch import operator, rules  # noqa: E402
from flashwright.pytorch.lists import of_keys  # noqa: E402
from flashwright.pytorch.signature import Signature  # noqa: E402
from tests.unit.test_steps import Interpreted  # noqa: E402

CARD = gpus.find("a100")
assert operator  # it registers the operator that refuses
SPEC = AttentionSpec.make(
    variant="gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", causal=True
)


class Backward:
    """The derived backward of a forward program, interpreted."""

    def __init__(self, code: str) -> None:
        programs = check(parse(code)).kernels
        kernel = StepsKernel([Interpreted(p) for p in programs], Steps.of(Kernels(programs)))
        self.inputs = tuple(name.lower() for name in kernel.inputs)
        self.dims: tuple[str, ...] = ()  # the tensors show every dim
        self.outputs = kernel.outputs
        self.compute = lambda *given: kernel(*given, outputs=kernel.outputs)


@lru_cache
def forward() -> tuple[Any, BackwardOrder]:
    code = write_code(write_sketch(SPEC), SPEC, CARD).code
    return checked_program(parse(code)), BackwardOrder(code, CARD, SPEC)


def attention(derived: Any, trial: rules.BackwardTrial = lambda *_: None) -> rules.Gradient:
    program, _ = forward()

    def run(*tensors: Any) -> Any:
        given = {n: t.detach().float().numpy() for n, t in zip("QKV", tensors, strict=True)}
        found = interpret(program, given)
        out = torch.from_numpy(found["O"].astype(np.float32)).bfloat16()
        return out, torch.from_numpy(found["LSE"])

    signature = Signature(translate(program, CARD).plan)
    return rules.Gradient("gqa", signature, run, None, derived, lambda of, *both: trial(*both))


def leaves(q_len: int, kv_len: int) -> tuple[list[Any], Any, dict[str, Any]]:
    given, expected = problem(q_len, kv_len)
    made = {n: torch.from_numpy(given[n].astype(np.float32)).bfloat16() for n in ("Q", "K", "V")}
    grad = torch.from_numpy(given["dO"].astype(np.float32)).bfloat16()
    return [t.requires_grad_() for t in made.values()], grad, expected


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 90), (90, 40)])
def test_gradients(q_len: int, kv_len: int) -> None:
    tensors, grad, expected = leaves(q_len, kv_len)
    _, order = forward()
    out, _ = attention(lambda of: Backward(order.code))(*tensors)
    out.backward(grad)
    for name, tensor in zip(("dQ", "dK", "dV"), tensors, strict=True):
        error = np.sqrt(np.mean((tensor.grad.float().numpy() - expected[name]) ** 2))
        assert error < 5e-3 * np.sqrt(np.mean(expected[name] ** 2)), name


WRONG = {
    "dQ": ("Compute dQsum_register * Scale", "Compute dQsum_register"),
    "dK": ("Compute dK_register * Scale", "Compute dK_register"),
    "dV": ("Compute 0 and get dV_register", "Compute 1 and get dV_register"),
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_first_gradients_are_checked(wrong: str) -> None:
    """Each gradient: a kernel that is wrong in one of them only is refused."""
    tensors, grad, _ = leaves(70, 90)
    code = forward()[1].code
    assert not wrong or WRONG[wrong][0] in code
    code = code.replace(*WRONG[wrong]) if wrong else code
    out, _ = attention(lambda of: Backward(code), GradientTrial(SPEC, None, None, {}))(*tensors)
    if not wrong:
        out.backward(grad)
        return
    with pytest.raises(WrongKernel, match=f"a new backward is wrong: .* {wrong} is"):
        out.backward(grad)


def test_where_gradients_vanish_a_right_one_passes() -> None:
    """With one key, dQ and dK are 0, and a kernel that gets O in 16 bits has noise there."""
    tensors, grad, _ = leaves(1, 1)
    code = forward()[1].code
    out, _ = attention(lambda of: Backward(code), GradientTrial(SPEC, None, None, {}))(*tensors)
    out.backward(grad)


def test_functions_of_the_user_are_what_is_checked() -> None:
    """The kernel is right for the spec, and the functions say something else."""
    tensors, grad, _ = leaves(40, 40)
    code = forward()[1].code
    trial = GradientTrial(SPEC, lambda s, b, h, q, k: s + 0.5 * (k % 2), None, {})
    out, _ = attention(lambda of: Backward(code), trial)(*tensors)
    with pytest.raises(WrongKernel):
        out.backward(grad)


def test_a_gradient_that_is_one_number() -> None:
    """Of `sum()` the gradient is an expanded number, which kernels cannot read."""
    tensors, _, _ = leaves(20, 20)
    _, order = forward()
    attention(lambda of: Backward(order.code))(*tensors)[0].sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in tensors)


def test_only_what_is_asked_for() -> None:
    tensors, grad, _ = leaves(20, 20)
    q = tensors[0].detach()
    _, order = forward()
    attention(lambda of: Backward(order.code))(q, *tensors[1:])[0].backward(grad)
    assert q.grad is None
    assert tensors[1].grad is not None


def test_why_there_is_none() -> None:
    tensors, grad, _ = leaves(20, 20)
    out, _ = attention(lambda of: "line 3: top-k has no gradient")(*tensors)
    with pytest.raises(RuntimeError, match="line 3: top-k has no gradient"):
        out.backward(grad)


def test_why_there_is_none_in_a_checkpointed_layer() -> None:
    """Its saved tensors may be asked for once only."""
    tensors, grad, _ = leaves(20, 20)

    def layer(*given: Any) -> Any:
        return attention(lambda of: "line 3: top-k has no gradient")(*given)[0]

    out = torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=False)
    with pytest.raises(RuntimeError, match="line 3: top-k has no gradient"):
        out.backward(grad)


def backward_of(of: rules.BackwardOf) -> Backward:
    """The backward that takes gradients of these outputs."""
    _, order = forward()
    return Backward(replace(order, outputs=of.outputs).code)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_gradient_of_the_lse(weight: float) -> None:
    """With and without a gradient of O."""
    tensors, grad, _ = leaves(70, 90)
    out, lse = attention(backward_of)(*tensors)
    visible = torch.ones(70, 90, dtype=torch.bool).tril(20)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    q, k, v = exact[0], *(t.repeat_interleave(2, 1) for t in exact[1:])
    scores = (q @ k.mT / 8).masked_fill(~visible, -torch.inf)
    wanted = (scores.logsumexp(-1) ** 2).sum()
    loss = (lse**2).sum()
    if weight:
        wanted = wanted + (scores.softmax(-1) @ v * grad.double()).sum()
        loss = loss + (out.float() * grad.float()).sum()
    wanted.backward()
    loss.backward()
    for tensor, right in zip(tensors, exact, strict=True):
        expected = torch.zeros_like(right) if right.grad is None else right.grad
        error = (tensor.grad.double() - expected).pow(2).mean().sqrt()
        assert error <= 5e-3 * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("setting", [None, False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_which_backward_is_deterministic(setting: bool | None, asked: bool | None) -> None:
    """What the call asks for, else PyTorch's setting when the gradients are computed."""
    tensors, grad, _ = leaves(20, 20)
    seen: list[rules.BackwardOf] = []

    def derived(of: rules.BackwardOf) -> Backward:
        seen.append(of)
        return Backward(replace(forward()[1], deterministic=of.deterministic).code)

    if asked is None:
        out, _ = attention(derived)(*tensors)
    else:
        with rules.with_backward(asked):
            out, _ = attention(derived)(*tensors)
    torch.use_deterministic_algorithms(bool(setting))
    try:
        out.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [
        rules.BackwardOf(("O",), ("q", "k", "v"), bool(setting if asked is None else asked))
    ]


def test_a_warning_is_enough_where_pytorch_says_so() -> None:
    tensors, grad, _ = leaves(20, 20)

    def derived(of: rules.BackwardOf) -> Any:
        return "line 3: no order" if of.deterministic else Backward(forward()[1].code)

    out, _ = attention(derived)(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="line 3: no order"):
            out.backward(grad, retain_graph=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="is not deterministic: line 3: no order"):
            out.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tensors[0].grad is not None


def test_lists_are_turned_once_and_anew_when_they_change() -> None:
    lists = {
        "counts": torch.tensor([[2, 1]], dtype=torch.int32),
        "full": torch.tensor([[1, 0]], dtype=torch.int32),
        "blocks": torch.tensor([[[2, 0, 1], [2, 1, 0]]], dtype=torch.int32),
    }
    names = [f"{name}ofkeys" for name in lists]
    first = of_keys(names, lists)
    assert first["countsofkeys"].tolist() == [[1, 0, 2]]
    assert first["fullofkeys"].tolist() == [[0, 0, 1]]
    assert first["blocksofkeys"][0, 2].tolist() == [0, 1]  # the full one first
    assert of_keys(names, lists)["blocksofkeys"] is first["blocksofkeys"]
    lists["counts"][0, 1] = 2
    assert of_keys(names, lists)["countsofkeys"].tolist() == [[1, 1, 2]]
    lists["counts"] = torch.tensor([[3, 0]], dtype=torch.int32)
    assert of_keys(names, lists)["countsofkeys"].tolist() == [[1, 1, 1]]
    assert of_keys(["q", "k"], {}) == {}


def test_the_package_has_a_spec_and_all_kernels() -> None:
    _, order = forward()
    assert order.name.startswith("a100-backward-")
    assert "the backward pass of" in order.in_words()
    assert len(check(parse(order.code), CARD).kernels) == 3
    other = replace(order, deterministic=True)
    assert other.name != order.name
    assert "the deterministic backward pass of" in other.in_words()
