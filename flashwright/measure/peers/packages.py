"""Peers from other packages, available if the package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashwright.measure.peers import sequences
from flashwright.measure.peers.features import need, package, window_of
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec


def flash_attention_3(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashAttention-3 (its Hopper kernels): the package flash_attn_interface."""
    if spec.batch is not None:
        return sequences.flash_attention_3(spec)
    need(spec, "fp8", "windows", "softcap", "V of another width than K")
    library = package("flash_attn_interface")
    return _swapped(
        library.flash_attn_func,
        softmax_scale=spec.softmax_scale,
        causal=spec.causal,
        window_size=window_of(spec),
        softcap=spec.softcap or 0.0,
    )


def flash_attention_2(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashAttention-2: the package flash_attn."""
    need(spec, "windows", "softcap", "ALiBi")
    if spec.alibi and not spec.causal:
        raise Unable("its ALiBi is symmetric, which agrees with the spec only if causal")
    library = package("flash_attn")
    function = _swapped(
        library.flash_attn_func,
        softmax_scale=spec.softmax_scale,
        causal=spec.causal,
        window_size=window_of(spec),
        softcap=spec.softcap or 0.0,
    )
    if not spec.alibi:
        return function
    return lambda q, k, v, slopes: function(q, k, v, alibi_slopes=slopes)


def _swapped(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Adapt a function of (batch, length, heads, dim) tensors to (batch, heads, length, dim)."""

    def call(q: Any, k: Any, v: Any, **more: Any) -> Any:
        found = function(*(x.transpose(1, 2) for x in (q, k, v)), **settings, **more)
        out = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return call


def flash_infer(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashInfer's prefill over ragged (concatenated) sequences."""
    if spec.batch is not None:
        return sequences.flash_infer(spec)
    need(spec, "windows", "softcap", "V of another width than K")
    if spec.window is not None and not spec.causal:
        raise Unable("its windows are always causal")
    return _FlashInfer(spec, package("flashinfer"))


class _FlashInfer:
    def __init__(self, spec: AttentionSpec, library: Any) -> None:
        import torch

        self.spec, self.torch = spec, torch
        space = torch.empty(sequences.WORKSPACE, dtype=torch.uint8, device="cuda")
        self.wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
        self.planned: tuple[int, ...] = ()

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        if self.planned != (*q.shape, *k.shape):
            self._plan(q, k)
        flat = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v)]
        found = self.wrapper.run(*flat)
        return found.view(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)

    def _plan(self, q: Any, k: Any) -> None:
        """Plan for the sizes, on which alone the plan depends; timed calls do not include it."""
        spec = self.spec
        ends = [
            self.torch.arange(x.shape[0] + 1, dtype=self.torch.int32, device=x.device) * x.shape[2]
            for x in (q, k)
        ]
        self.wrapper.plan(
            *ends,
            q.shape[1],
            k.shape[1],
            spec.head_dim,
            head_dim_vo=spec.value_dim,
            causal=spec.causal,
            sm_scale=spec.softmax_scale,
            window_left=window_of(spec)[0],
            logits_soft_cap=spec.softcap or 0.0,
            q_data_type=q.dtype,
        )
        self.planned = (*q.shape, *k.shape)
