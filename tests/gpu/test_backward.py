"""Gradients on a GPU: generated backward passes before the judge, and flashwright.attention's, by
derived ones, against fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashwright
from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.generate import pipeline
from tests.unit.test_by_model import Nobody

torch = pytest.importorskip("torch")
from flashwright.flex import fallback  # noqa: E402

LIMIT = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Of the RMS error, relative to the gradient's RMS: about three times that of one rounding."""
HEADS, KV_HEADS = 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi": [0.5, 0.25, 0.125, 0.0625]},
    "sink": {"causal": True, "sink": [0.5, -1.0, 0.0, 2.0]},
}


def problem(dim: int, dtype: Any, q_len: int, kv_len: int) -> tuple[list[Any], Any]:
    """Q, K and V that require gradients, and the gradient of O."""
    torch.manual_seed(0)
    shapes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len), (HEADS, q_len))
    made = [torch.randn(2, h, n, dim, device="cuda", dtype=dtype) for h, n in shapes]
    return [t.requires_grad_() for t in made[:3]], made[3]


def gradients(tensors: list[Any], grad: Any, settings: dict[str, Any], by: Any) -> list[Any]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    kind, device = leaves[0].dtype, leaves[0].device
    more = {
        n: torch.tensor(x, device=device, dtype=torch.float32 if kind.itemsize < 8 else kind)
        for n, x in settings.items()
        if isinstance(x, list)
    }
    extra = [t.requires_grad_() for t in more.values()]
    out = by(*leaves, **{**settings, **more})
    out.backward(grad)
    return [t.grad for t in (*leaves, *extra)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_gradients(dim: int, option: str) -> None:
    for q_len, kv_len in ((130, 200), (200, 130), (512, 512)):
        tensors, grad = problem(dim, torch.bfloat16, q_len, kv_len)
        found = gradients(tensors, grad, OPTIONS[option], flashwright.attention)
        exact = [t.detach().cpu().double() for t in tensors]
        wanted = gradients(exact, grad.cpu().double(), OPTIONS[option], fallback.attention)
        for name, one, other in zip("QKV?", found, wanted, strict=False):
            error = (one.cpu().double() - other).norm() / other.norm()
            limit = LIMIT[torch.bfloat16] * (1 if name in "QKV" else 5)  # few numbers, which cancel
            assert error < limit, f"d{name} {q_len} x {kv_len}: {error:.2g}"


@pytest.mark.parametrize("gpu", ["h200", "a100", "t4"])
@pytest.mark.parametrize("option", ["full", "causal", "window", "softcap", "alibi", "sink"])
def test_the_judge_accepts_a_generated_backward(gpu: str, option: str, tmp_path: Path) -> None:
    card = gpus.find(gpu)
    if not driver.cards()[0].takes(card.arch):
        pytest.skip(f"a kernel for {card.arch} does not run here")
    flags = {n: True if n in ("alibi", "sink") else x for n, x in OPTIONS[option].items()}
    dtype = "fp16" if gpu == "t4" else "bf16"
    spec = make_spec("gqa", heads=HEADS, kv_heads=KV_HEADS, head_dim=64, dtype=dtype, **flags)
    run = pipeline.generate(spec.differentiated(), card, tmp_path, Nobody(), last="verdict")
    assert run.ok, run.failed
    assert run.gpu_verdict is not None
    asked = {check.name: check.passed for check in run.gpu_verdict.checks}
    assert all(asked[name] for name in ("fp64", "repeat", "views", "mask", "guards", "exactness"))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_gradients_have_the_same_bits(dim: int, option: str) -> None:
    """With many blocks of keys, while others run; and they are those of any order, but for
    rounding."""
    tensors, grad = problem(dim, torch.bfloat16, 4000, 4100)
    exact = {**OPTIONS[option], "deterministic": True}
    first = gradients(tensors, grad, exact, flashwright.attention)
    for _ in range(10):
        again = gradients(tensors, grad, exact, flashwright.attention)
        assert all(map(torch.equal, again, first))
    plain = gradients(tensors, grad, OPTIONS[option], flashwright.attention)
    for name, one, other in zip("QKV", first, plain, strict=False):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < LIMIT[torch.bfloat16], f"d{name}: {error:.2g}"


def test_pytorchs_setting_makes_gradients_deterministic() -> None:
    tensors, grad = problem(64, torch.bfloat16, 2000, 2000)
    how = {"causal": True, "deterministic": True}
    wanted = gradients(tensors, grad, how, flashwright.attention)
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients(tensors, grad, {"causal": True}, flashwright.attention)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("gpu", ["h200", "a100", "t4"])
def test_the_judge_accepts_a_deterministic_backward(gpu: str, tmp_path: Path) -> None:
    """It compares the bits of dQ, too."""
    card = gpus.find(gpu)
    if not driver.cards()[0].takes(card.arch):
        pytest.skip(f"a kernel for {card.arch} does not run here")
    dtype = "fp16" if gpu == "t4" else "bf16"
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 64, "dtype": dtype}
    spec = make_spec("gqa", causal=True, **sizes).differentiated(deterministic=True)
    run = pipeline.generate(spec, card, tmp_path, Nobody(), last="verdict")
    assert run.ok, run.failed
    assert run.gpu_verdict is not None
    assert {check.name: check.passed for check in run.gpu_verdict.checks}["repeat"]


def test_checkpointed_and_compiled() -> None:
    tensors, grad = problem(64, torch.bfloat16, 256, 256)
    plain = gradients(tensors, grad, {"causal": True}, flashwright.attention)

    def checkpointed(*given: Any, **settings: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(flashwright.attention, *given, use_reentrant=False, **settings)

    for how in (checkpointed, torch.compile(flashwright.attention)):
        for one, other in zip(plain, gradients(tensors, grad, {"causal": True}, how), strict=True):
            torch.testing.assert_close(
                one, other, rtol=2e-2, atol=2e-2
            )  # dQ is summed in any order


def test_a_training_step_lowers_the_loss() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)
    step = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(20):
        q, k, v = layer(x).view(2, 128, 12, 64).transpose(1, 2).split(4, dim=1)
        loss = (flashwright.attention(q, k, v, causal=True) - 1).float().square().mean()
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
