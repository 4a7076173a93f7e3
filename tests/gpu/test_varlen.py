"""Packed sequences on a GPU, against the same sequences one at a time in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashwright  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

QUERIES, KEYS = [3, 0, 700, 1, 128, 129], [9, 5, 700, 4097, 0, 200]
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (255, 0)},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.9, 8)},
    "sink": {"causal": True, "sink": torch.linspace(-1, 1, 8)},
}


def starts(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def tensors(width: int, kind: Any = torch.bfloat16) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((sum(QUERIES), 8), (sum(KEYS), 2), (sum(KEYS), 2))
    made = [torch.randn(*shape, width, device="cuda").to(kind) for shape in shapes]
    return [*made, starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)]


def on_cpu(given: list[Any], settings: dict[str, Any]) -> Any:
    moved = [x.cpu() if isinstance(x, torch.Tensor) else x for x in given]
    return flashwright.flash_attn_varlen_func(*moved, **settings, return_softmax_lse=True)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_sequence_is_attention(name: str, width: int) -> None:
    given, settings = tensors(width), SETTINGS[name]
    wanted = on_cpu(given, settings)
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
    out, lse = flashwright.flash_attn_varlen_func(*given, **moved, return_softmax_lse=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out.float().cpu(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.cpu(), wanted[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_each_sequence(name: str, exactly: bool, width: int) -> None:
    given, settings = tensors(width), SETTINGS[name]
    torch.manual_seed(1)
    grad = torch.randn(sum(QUERIES), 8, width, device="cuda").bfloat16()

    def gradients(device: str) -> Any:
        leaves = [x.to(device).requires_grad_() for x in given[:3]]
        rest = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given[3:]]
        numbers = {n: x for n, x in settings.items() if isinstance(x, torch.Tensor)}
        own = {n: x.to(device, copy=True).requires_grad_() for n, x in numbers.items()}
        how = {**settings, **own, "deterministic": exactly}
        out = flashwright.flash_attn_varlen_func(*leaves, *rest, **how)
        return torch.autograd.grad(out, [*leaves, *own.values()], grad.to(device, out.dtype))

    found = gradients("cuda")
    for ours, right in zip(found, gradients("cpu"), strict=True):
        error = (ours.float().cpu() - right.float()).norm() / right.float().norm()
        assert error < 0.02
    if exactly:
        for again in (gradients("cuda") for _ in range(3)):
            assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def test_slices_of_one_projection() -> None:
    """Q, K and V with strides, as a model's projection gives them."""
    packed = torch.randn(500, 12, 64, device="cuda").bfloat16()
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    both = starts([100, 400])
    out = flashwright.flash_attn_varlen_func(q, k, v, both, both, 400, 400, causal=True)
    wanted = on_cpu([q, k, v, both, both, 400, 400], {"causal": True})
    torch.testing.assert_close(out.float().cpu(), wanted[0].float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_a_sequence_holds_is_seen_by_no_other(poison: float) -> None:
    given = tensors(128)
    right = flashwright.flash_attn_varlen_func(*given, causal=True)
    queries, keys = given[3].tolist(), given[4].tolist()
    given[0][queries[2] : queries[3]] = poison
    for tensor in given[1:3]:
        tensor[keys[2] : keys[3]] = poison
    found = flashwright.flash_attn_varlen_func(*given, causal=True)
    rows = [*range(queries[2]), *range(queries[3], queries[-1])]
    assert torch.equal(found[rows], right[rows])


def test_a_graph_is_replayed_with_other_lengths() -> None:
    given = tensors(64)
    flashwright.flash_attn_varlen_func(*given, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashwright.flash_attn_varlen_func(*given, causal=True)
    given[3].copy_(starts([1, 700, 60, 0, 100, 100]))
    given[4].copy_(starts([4097, 700, 90, 24, 50, 50]))
    graph.replay()
    wanted = on_cpu(given, {"causal": True})
    torch.testing.assert_close(out.float().cpu(), wanted[0].float(), atol=0.02, rtol=0.02)
