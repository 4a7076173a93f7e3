"""The backends of torch's scaled_dot_product_attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from flashwright.measure.peers.features import first_line, is_memory, need
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec


def torch_flash(spec: AttentionSpec) -> Callable[..., Any]:
    """The FlashAttention-2 that is part of torch."""
    return _backend(spec, "FLASH_ATTENTION")


def torch_cudnn(spec: AttentionSpec) -> Callable[..., Any]:
    """The fused attention of cuDNN."""
    return _backend(spec, "CUDNN_ATTENTION")


def torch_efficient(spec: AttentionSpec) -> Callable[..., Any]:
    """The memory-efficient kernel that came from xFormers."""
    if spec.kv_heads != spec.heads:
        raise Unable("it does not support GQA or MQA")
    return _backend(spec, "EFFICIENT_ATTENTION")


def _backend(spec: AttentionSpec, name: str) -> Callable[..., Any]:
    # Only cuDNN supports V of another width; the other backends report it themselves.
    need(spec, "V of another width than K")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, name, None)
    if backend is None:
        raise Unable("this version of torch does not have it")
    settings = {
        "is_causal": spec.causal,
        "scale": spec.softmax_scale,
        "enable_gqa": spec.kv_heads != spec.heads,
    }

    def attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **settings)

    def explained(q: Any, k: Any, v: Any) -> Any:
        try:
            return attention(q, k, v)
        except (RuntimeError, NotImplementedError) as error:
            if is_memory(error):
                raise
            raise Unable(_why(lambda: attention(q, k, v), error)) from None

    return explained


def _why(again: Callable[[], Any], error: Exception) -> str:
    """The reason that a backend refuses a problem: torch puts it in warnings, not in the error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            again()
        except (RuntimeError, NotImplementedError) as same:
            error = same
    lines = [str(w.message).splitlines()[0] for w in said] + [first_line(error)]
    # Such a line introduces the reasons of each backend, also of backends that are disabled.
    reasons = [line for line in lines if "not used because" not in line]
    return reasons[0].partition(" (Triggered")[0]
