"""Native sparse attention on a GPU, against PyTorch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashwright  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def tensors(tokens: int, group: int, batch: int = 1, kv_heads: int = 2) -> list[Any]:
    torch.manual_seed(tokens)
    shapes = (kv_heads * group, kv_heads, kv_heads)
    rows = [torch.randn(batch, tokens, heads, 128, device="cuda").bfloat16() for heads in shapes]
    gates = (torch.rand(batch, tokens, kv_heads * group, device="cuda") for _ in range(3))
    return [*rows, *(gate.bfloat16() for gate in gates)]


def agrees(given: list[Any], **how: Any) -> None:
    """With the same blocks, as rounding may choose others where two matter alike."""
    out, blocks = flashwright.nsa(*given, **how, return_block_indices=True)
    moved = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in how.items()}
    wanted = flashwright.nsa(*(x.cpu() for x in given), blocks.cpu(), **moved)
    torch.testing.assert_close(out.float().cpu(), wanted.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("tokens", [63, 1000, 4097])
def test_it_is_the_sum_of_its_branches(tokens: int, group: int) -> None:
    agrees(tensors(tokens, group))


def test_counts_that_differ() -> None:
    counts = torch.randint(1, 17, (2, 1000, 2), device="cuda")
    agrees(tensors(1000, 16, batch=2), block_counts=counts)


def test_sequences_of_a_packed_batch() -> None:
    starts = torch.tensor([0, 15, 205, 550, 800], device="cuda")
    agrees(tensors(800, 16), cu_seqlens=starts)


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("tokens", [63, 1000])
def test_gradients(tokens: int, group: int) -> None:
    given = tensors(tokens, group)
    torch.manual_seed(0)
    grad = torch.randn_like(given[0])
    _, blocks = flashwright.nsa(*given, return_block_indices=True)

    def gradients(device: str) -> list[Any]:
        leaves = [x.to(device).requires_grad_() for x in given]
        out = flashwright.nsa(*leaves, blocks.to(device))
        return list(torch.autograd.grad(out, leaves, grad.to(device)))

    for ours, right in zip(gradients("cuda"), gradients("cpu"), strict=True):
        right = right.float()  # 0 for the gate of blocks that no query sees
        assert (ours.float().cpu() - right).norm() <= 0.03 * right.norm()


def test_the_same_blocks_are_chosen() -> None:
    given = tensors(4096, 16)
    how = {"return_block_indices": True}
    (_, ours), (_, right) = (
        flashwright.nsa(*(x.to(device) for x in given), **how) for device in ("cuda", "cpu")
    )
    both = (ours.cpu()[..., None] == right[..., None, :]).any(-1)
    assert both.float().mean() > 0.98
