"""torch.compile(model, backend="flashwright") and our kernels behind SDPA, on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import attention as api  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    AuxRequest,
    create_block_mask,
    flex_attention,
)

CLOSE = {"rtol": 2e-2, "atol": 5e-3}
LENGTH = 700


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A store of its own, no compiled models, and no call that is left to PyTorch."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flashwright")
        yield
    torch._dynamo.reset()


def compiled(model: Callable[..., Any], **more: Any) -> Any:
    """The backend itself: whether its entry point is installed does not matter here."""
    from flashwright.flex.backend import backend

    return torch.compile(model, backend=backend, fullgraph=True, **more)


def problem(length: int = LENGTH, seed: int = 0, grad: bool = False) -> list[Any]:
    """Q, K, V as views of a packed projection."""
    torch.manual_seed(seed)
    packed = torch.randn(2, length, 8, 64, device="cuda", dtype=torch.float16)
    found = [x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2)]
    return [x.detach().requires_grad_(grad) for x in found]


def documents(length: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.randint(0, 4, (length,), device="cuda").sort().values


def mask_of(document: Any) -> Any:
    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i >= j)

    return create_block_mask(same_document, None, None, len(document), len(document))


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


class Documents(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """ALiBi and documents, with LSE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", SLOPES.cuda())

    def forward(self, q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.slopes[h] * (j - i)

        aux = AuxRequest(lse=True)
        out, found = flex_attention(q * 2, k, v, alibi, block_mask, enable_gqa=True, return_aux=aux)
        return out.transpose(1, 2).flatten(-2), found.lse


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_model_is_that_of_inductor(mode: str | None) -> None:
    """Captured tensors are others in each call, also when Inductor replays a CUDA graph."""
    model = Documents()
    ours, theirs = compiled(model, mode=mode), torch.compile(model, fullgraph=True)
    with torch.inference_mode():
        for seed in (0, 0, 1, 2):
            given = [*problem(seed=seed), mask_of(documents(LENGTH, seed))]
            assert_same([t.clone() for t in ours(*given)], theirs(*given))


def test_one_kernel_for_all_lengths() -> None:
    model = Documents()
    ours = compiled(model, dynamic=True)
    theirs = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (300, 1000, 517):
            given = [*problem(length), mask_of(documents(length))]
            assert_same(ours(*given), theirs(*given))


def test_blocks_that_are_chosen_later_are_inductors() -> None:
    """The lists agree with the function when the model is compiled, and not any more later."""
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH)

    def model(q: Any, k: Any, v: Any) -> Any:
        return (flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True),)

    ours, theirs, given = compiled(model), torch.compile(model, fullgraph=True), problem()
    with torch.no_grad():
        assert_same(ours(*given), theirs(*given))
        before = theirs(*given)[0].clone()
        block_mask.full_kv_num_blocks.clamp_(max=1)
        with pytest.warns(RuntimeWarning, match="not that of its mask function"):
            found = ours(*given)
        assert_same(found, theirs(*given))
        assert not torch.equal(found[0], before)


def gradients(model: Callable[..., Any], given: list[Any], learned: Any) -> list[Any]:
    """Of Q, K, V and the slopes, for a loss of all outputs."""
    wanted = [*given[:3], learned]
    weights = torch.linspace(-1, 1, LENGTH, device="cuda")
    out, lse = model(*given)
    loss = (out.float() * weights[:, None]).sum() + (lse * weights).sum()
    return [grad.float() for grad in torch.autograd.grad(loss, wanted)]


def assert_gradients(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).square().mean().sqrt() < 0.02 * other.square().mean().sqrt()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_inductor(checkpointed: bool) -> None:
    """Of the slopes too. Inductor has LSE's gradient and ours; a call that stays PyTorch's is a
    warning, which is an error here."""
    model = Documents()
    model.slopes.requires_grad_()

    def checkpoint(*given: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(model, *given, use_reentrant=False)

    given = [*problem(grad=True), mask_of(documents(LENGTH))]
    run = compiled(checkpoint if checkpointed else model)
    wanted = gradients(torch.compile(model, fullgraph=True), given, model.slopes)
    assert_gradients(gradients(run, given, model.slopes), wanted)


def test_one_backward_for_all_lengths() -> None:
    model = Documents()
    run = compiled(model, dynamic=True)
    plain = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (300, 1000, 517):
        given, found = [*problem(length, grad=True), mask_of(documents(length))], []
        for way in (run, plain):
            loss = way(*given)[0].float().square().sum()
            found.append([grad.float() for grad in torch.autograd.grad(loss, given[:3])])
        assert_gradients(*found)


@pytest.fixture
def sdpa() -> Iterator[Callable[..., Any]]:
    """F.scaled_dot_product_attention on our kernels."""
    from flashwright.flex import sdpa as ours

    ours.register()
    api.activate_flash_attention_impl("flashwright")
    with api.sdpa_kernel(api.SDPBackend.FLASH_ATTENTION):
        yield torch.nn.functional.scaled_dot_product_attention
    api.restore_flash_attention_impl()


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_ours_with_pytorchs_backward(causal: bool, sdpa: Callable[..., Any]) -> None:
    given = problem(grad=True)
    out = sdpa(*given, is_causal=causal, enable_gqa=True)
    out.float().square().sum().backward()
    found = [out.detach(), *(t.grad.clone() for t in given)]
    other = [t.detach().float().requires_grad_() for t in given]
    with api.sdpa_kernel(api.SDPBackend.MATH):
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *other, is_causal=causal, enable_gqa=True
        )
    wanted.square().sum().backward()
    for one, two in zip(found, [wanted.detach(), *(t.grad for t in other)], strict=True):
        torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=2e-2)


def test_sdpa_leaves_dropout_to_pytorch(sdpa: Callable[..., Any]) -> None:
    with pytest.warns(RuntimeWarning, match="dropout_p"):
        assert sdpa(*problem(), dropout_p=0.5, enable_gqa=True).isfinite().all()
