"""MLA decode over a latent cache on a GPU, against PyTorch, a sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashwright.serving.mla import flash_mla_with_kvcache  # noqa: E402
from tests.unit.test_mla import problem  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LENGTHS = [0, 1, 17, 128, 4097, 32768]
WIDTH, VALUES = 576, 512


def compare(given: Any, **settings: Any) -> None:
    """The kernel's O and LSE are PyTorch's."""
    moved = [x.cuda() for x in given]
    found = [x.cpu() for x in flash_mla_with_kvcache(*moved, VALUES, **settings)]
    wanted = flash_mla_with_kvcache(*given, VALUES, **settings)
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("splits", [None, 1, 7, 64])
def test_splits(splits: int | None) -> None:
    torch.manual_seed(0)
    compare(problem(1, 128, WIDTH, LENGTHS)[0], num_splits=splits)


@pytest.mark.parametrize("heads", [1, 3, 9, 16, 63, 64, 126, 128])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_heads_and_queries(heads: int, queries: int) -> None:
    torch.manual_seed(0)
    compare(problem(queries, heads, WIDTH, [20, 300, 5000])[0], causal=True)


def test_a_scale() -> None:
    torch.manual_seed(0)
    compare(problem(1, 16, WIDTH, [700, 64])[0], softmax_scale=192**-0.5)


def test_a_graph_is_replayed_with_other_lengths() -> None:
    torch.manual_seed(0)
    given = [x.cuda() for x in problem(1, 128, WIDTH, [100, 5000, 40])[0]]
    flash_mla_with_kvcache(*given, VALUES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(*given, VALUES)
    given[3].copy_(torch.tensor([64, 4999, 0]))
    graph.replay()
    wanted = flash_mla_with_kvcache(*(x.cpu() for x in given), VALUES)
    torch.testing.assert_close(out.cpu().float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.cpu(), wanted[1], atol=1e-3, rtol=1e-3)
