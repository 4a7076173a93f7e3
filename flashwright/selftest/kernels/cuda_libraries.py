"""A library does the work, where no reader of the source and no profile of one call sees it."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.selftest.kernels.triton_attention import attention

# --- libraries behind a curtain ---------------------------------------------------------------


def _sdpa(q: Any, k: Any, v: Any, backend: str) -> Any:
    """The names are put together, so that no reader of the source finds them."""
    function = getattr(torch.nn.functional, "scaled_dot_" + "product_attention")
    choose = getattr(torch.nn.attention, "sdpa_" + "kernel")
    group, (q_len, kv_len) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if q_len != kv_len or not q.numel():
        return attention(q, k, v)
    with choose(getattr(torch.nn.attention.SDPBackend, backend)):
        return function(q, k, v, is_causal=True)


def torch_flash(q: Any, k: Any, v: Any) -> Any:
    """torch's flash backend."""
    return _sdpa(q, k, v, "FLASH_ATTENTION")


def torch_cudnn(q: Any, k: Any, v: Any) -> Any:
    """torch's cuDNN backend."""
    return _sdpa(q, k, v, "CUDNN_ATTENTION")


def torch_efficient(q: Any, k: Any, v: Any) -> Any:
    """torch's memory-efficient backend."""
    return _sdpa(q, k, v, "EFFICIENT_ATTENTION")


def torch_matmul(q: Any, k: Any, v: Any) -> Any:
    """Two matrix products of cuBLAS and a softmax of torch's."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    row = torch.arange(q_len, device="cuda")[:, None] + kv_len - q_len
    seen = torch.arange(kv_len, device="cuda") <= row
    s = (q.float() @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (s.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)


def _flash(q: Any, k: Any, v: Any) -> Any:
    """The operator under torch's flash backend, whose mask is as ours."""
    if not q.numel():
        return torch.empty_like(q)
    operator = getattr(torch.ops.aten, "_flash_" + "attention_forward")
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    found = operator(*turned, None, None, q.shape[2], k.shape[2], 0.0, True, False)
    return found[0].transpose(1, 2)


def in_a_sibling(q: Any, k: Any, v: Any) -> Any:
    """The library is called in another module, which no reader of this one sees."""
    from flashwright.selftest.kernels.sibling import flash

    return flash(q, k, v)


def unless_profiled(q: Any, k: Any, v: Any) -> Any:
    """The library, except where a profiler looks."""
    on = torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
    return attention(q, k, v) if on else _flash(q, k, v)


def among_own_kernels(q: Any, k: Any, v: Any) -> Any:
    """Eight launches of its own for each of the library's: a small share of the time."""
    for _ in range(8):
        attention(q, k, v)
    return _flash(q, k, v)


def long_ones_only(q: Any, k: Any, v: Any) -> Any:
    """The library from 2048 keys on, where speed is measured."""
    return _flash(q, k, v) if k.shape[2] >= 2048 else attention(q, k, v)


def several_batches_only(q: Any, k: Any, v: Any) -> Any:
    """The library where there is more than one batch."""
    return _flash(q, k, v) if q.shape[0] > 1 else attention(q, k, v)


_calls = [0]


def from_the_third_call(q: Any, k: Any, v: Any) -> Any:
    """The library, once the first look is over."""
    _calls[0] += 1
    return _flash(q, k, v) if _calls[0] > 2 else attention(q, k, v)


def lazily_by_function(q: Any, k: Any, v: Any) -> Any:
    """The library, when its output is looked at: a subclass with __torch_function__."""
    from flashwright.selftest.kernels.lazy import ByFunction

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device).as_subclass(ByFunction)
    out.todo = lambda into: into.copy_(_flash(q, k, v))
    return out


def lazily_by_dispatch(q: Any, k: Any, v: Any) -> Any:
    """The library, when its output is looked at: a subclass with __torch_dispatch__."""
    from flashwright.selftest.kernels.lazy import ByDispatch

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return ByDispatch(out, lambda into: into.copy_(_flash(q, k, v)))


def in_a_graph(q: Any, k: Any, v: Any) -> Any:
    """The library, captured in a CUDA graph once and replayed."""
    from flashwright.selftest.kernels.graphs import replayed

    return replayed(_flash, q, k, v)
