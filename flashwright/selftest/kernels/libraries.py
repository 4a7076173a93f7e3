"""Libraries as candidates: factories for the specs they know, with our meaning of causal.

Torch's own causal mask begins at the first key, ours ends at the last one: where lengths differ the
mask is given, and rows without any key are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright.spec import AttentionSpec


def flash(spec: AttentionSpec) -> Callable[..., Any]:
    """The operator under torch's flash backend: its mask is as ours."""

    def call(q: Any, k: Any, v: Any) -> Any:
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        if not q.numel():
            return torch.empty_like(q)
        found = torch.ops.aten._flash_attention_forward(
            *turned, None, None, q.shape[2], k.shape[2], 0.0, spec.causal, False
        )
        return found[0].transpose(1, 2)

    return call


def cudnn(spec: AttentionSpec) -> Callable[..., Any]:
    """torch's cuDNN backend."""
    return _backend(spec, SDPBackend.CUDNN_ATTENTION)


def efficient(spec: AttentionSpec) -> Callable[..., Any]:
    """torch's memory-efficient backend."""
    return _backend(spec, SDPBackend.EFFICIENT_ATTENTION)


def math(spec: AttentionSpec) -> Callable[..., Any]:
    """torch's plain backend."""
    return _backend(spec, SDPBackend.MATH)


USUAL = (256, 256)


def _backend(spec: AttentionSpec, backend: Any) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        lengths = q.shape[2], k.shape[2]
        if not q.numel():
            return torch.empty_like(q)
        if not spec.causal or lengths[0] == lengths[1]:
            return _tried(q, k, v, backend, is_causal=spec.causal)
        empty = max(0, lengths[0] - lengths[1])  # rows that see nothing
        out = torch.zeros_like(q)
        if empty:
            out[:, :, empty:] = _tried(q[:, :, empty:], k, v, backend, is_causal=True)
            return out
        row = torch.arange(lengths[0], device="cuda")[:, None] + lengths[1] - lengths[0]
        mask = torch.arange(lengths[1], device="cuda") <= row
        return _tried(q, k, v, backend, attn_mask=mask)

    return call


def _tried(q: Any, k: Any, v: Any, backend: Any, **options: Any) -> Any:
    """A shape that a backend does not take (cuDNN: length 1) is for the plain one."""
    function = torch.nn.functional.scaled_dot_product_attention
    try:
        with sdpa_kernel(backend):
            return function(q, k, v, **options)
    except RuntimeError:
        if (q.shape[2], k.shape[2]) == USUAL:
            raise
    with sdpa_kernel(SDPBackend.MATH):
        return function(q, k, v, **options)


def flex(spec: AttentionSpec) -> Callable[..., Any]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Any, k: Any, v: Any) -> Any:
        q_len, kv_len = q.shape[2], k.shape[2]

        def seen(b: Any, h: Any, row: Any, key: Any) -> Any:
            return key <= row + (kv_len - q_len)

        mask = create_block_mask(seen, None, None, q_len, kv_len) if spec.causal else None
        return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return call


def naive(spec: AttentionSpec) -> Callable[..., Any]:
    """Two products and a softmax, in fp32."""

    def call(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
        s = q.float() @ k.mT * spec.softmax_scale
        if spec.causal:
            q_len, kv_len = q.shape[2], k.shape[2]
            row = torch.arange(q_len, device="cuda")[:, None] + kv_len - q_len
            s = s.masked_fill(torch.arange(kv_len, device="cuda") > row, float("-inf"))
        return (s.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)

    return call


def flash_attention_3(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashAttention-3, where it is installed."""
    from flash_attn_interface import flash_attn_func

    def call(q: Any, k: Any, v: Any) -> Any:
        if not q.numel():
            return torch.empty_like(q)
        found = flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)),
            softmax_scale=spec.softmax_scale,
            causal=spec.causal,
        )
        out = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return call


def compiled(spec: AttentionSpec) -> Callable[..., Any]:
    """Two products and a softmax, by torch.compile."""
    return torch.compile(naive(spec), dynamic=True)  # type: ignore[no-any-return]
