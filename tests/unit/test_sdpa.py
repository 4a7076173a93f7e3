"""F.scaled_dot_product_attention on our kernels: what PyTorch's dispatcher does with them.

There is no GPU here, so the operator is taken over for CPU tensors, where PyTorch has none, and
attention is PyTorch's own. tests/gpu/test_flex_backend.py has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from flashwright.flex import sdpa  # noqa: E402

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls that PyTorch's own kernel gets; ours are in place meanwhile."""
    found: Calls = []

    class Old:
        def call_boxed(self, keys: Any, query: Any, *more: Any, scale: Any) -> Any:
            found.append((*more[2:], scale))
            return sdpa._results(query, more[0], query.clone(), query[..., 0].float())

    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Old())
    monkeypatch.setattr(sdpa, "attention", attention)
    handle = sdpa.activate("CPU")
    yield found
    handle.remove()


def attention(q: Any, k: Any, v: Any, *, causal: bool, scale: Any, return_lse: bool) -> Any:
    """What the kernels compute, in fp32."""
    if q.dtype == torch.float64:
        raise sdpa.NoKernel("query is torch.float64")
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.mT * (scale or q.shape[3] ** -0.5)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def problem(dtype: Any = torch.float16) -> list[Any]:
    packed = torch.randn(2, 12, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2)]


def test_it_is_registered_and_not_active_until_asked() -> None:
    from torch.nn import attention as api

    sdpa.register()
    assert "flashwright" in api.list_flash_attention_impls()
    assert api.current_flash_attention_impl() is None


@pytest.mark.parametrize("causal", [False, True])
def test_a_plain_call_is_ours(causal: bool, calls: Calls) -> None:
    q, k, v = problem()
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found[0].float(), wanted, rtol=1e-2, atol=1e-3)
    assert found[0].stride() == torch.empty_like(q).stride()  # as PyTorch's own, traced
    assert found[1].shape == q.shape[:3]
    assert found[4:6] == (12, 12)
    assert not calls


def test_other_calls_are_pytorchs_and_told_once(calls: Calls, recwarn: Any) -> None:
    q, k, v = problem()
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    with pytest.warns(RuntimeWarning, match=r"dropout_p is 0.5"):
        operator(q, k, v, 0.5, True)
    operator(q, k, v, 0.5, True)
    assert len([w for w in recwarn if "dropout_p" in str(w.message)]) == 0
    with pytest.warns(RuntimeWarning, match="is_causal with 7 queries and 12 keys"):
        operator(q[:, :, :7], k, v, 0.0, True)
    with pytest.warns(RuntimeWarning, match=r"query is torch.float64"):
        operator(*problem(torch.float64), scale=0.25)
    assert calls == [
        (0.5, True, False, None),
        (0.5, True, False, None),
        (0.0, True, False, None),
        (0.0, False, False, 0.25),
    ]


def test_the_place_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        call_boxed = None

    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Old())
    monkeypatch.setattr(sdpa, "attention", attention)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    handle = sdpa.activate("CPU")
    operator(*problem())
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        operator(*problem())


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has CUDA here")
def test_without_cuda_there_is_nothing_to_replace() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        sdpa.activate()
