"""Kernels of ours as an attention implementation of Hugging Face transformers.

    flashwright.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="wright")

transformers calls `attend` in every layer. Where each sequence has one query, over the keys of a
cache, that is a decode: lengths are data of its kernel, so that one serves all steps, and the keys
of a sequence are split over thread blocks. All else is computed as flex/transformers.py says.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashwright.flex import transformers as layers
from flashwright.flex.task import NoKernel
from flashwright.flex.transformers import KeyRange, LayerCall
from flashwright.serving.kvcache import flash_attn_with_kvcache

OLDEST = "4.57"


def register_transformers(name: str = "wright", *, fallback: bool = False) -> None:
    """Make our kernels the attention implementation `name` of transformers.

    Then `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`.
    With `fallback` PyTorch computes what no kernel can be made for, with a warning; otherwise that
    is NoKernel with the reason. Raises ImportError without transformers, ValueError for a name that
    contains "flash".
    """
    if "flash" in name:
        raise ValueError(
            f"name {name!r}: transformers takes every name with 'flash' in it for a FlashAttention "
            "package; choose another one, such as 'wright'"
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        text = f"this needs transformers {OLDEST} or newer, which cannot be imported ({error}): "
        raise ImportError(text + "pip install 'flashwright[transformers]'") from error
    AttentionMaskInterface.register(name, layers.make_mask)
    AttentionInterface.register(name, functools.partial(attend, fallback=fallback))


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]  # torch may be absent
def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    fallback: bool = False,
    **given: Any,
) -> tuple[Any, None]:
    """The attention function of transformers' AttentionInterface.

    Returns the output as (batch, length, heads, dim), and None for the weights, which no kernel of
    ours has.
    """
    call = layers.layer_call(module, query, key, attention_mask, **given)
    if _is_decode(call, query, key, value):
        assert call.keys is not None
        try:
            return decoded(call, call.keys, *layers.autocast(query, key, value)), None
        except NoKernel:
            if not fallback:
                raise
    out = layers.compute(call, query, key, value, fallback)
    return out.transpose(1, 2).contiguous(), None


def _is_decode(call: LayerCall, query: Any, key: Any, value: Any) -> bool:
    """Whether a kernel for decode computes a layer: it has no bias and no gradients."""
    tensors = (query, key, value, *call.tensors.values())
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return call.keys is not None and "bias" not in call.tensors and not trains and _on_gpu(query)


def _on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def decoded(call: LayerCall, keys: KeyRange, query: Any, key: Any, value: Any) -> Any:
    """O of a layer with one query a sequence, (batch, 1, heads, dim)."""
    seen = (x[:, :, keys.skipped :].transpose(1, 2) for x in (key, value))
    return flash_attn_with_kvcache(
        query.transpose(1, 2),
        *seen,
        cache_seqlens=keys.end,
        cache_leftpad=keys.first,
        softmax_scale=call.scale,
        softcap=call.softcap or 0.0,
        sink=call.tensors.get("sink"),
    )
