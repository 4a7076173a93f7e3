"""MLA decode (absorbed): few queries over a latent cache in pages, with the signatures of FlashMLA.

A key is its latent part, which is its value as well, and a rope part. All heads share it: they are
the rows of a tile, as in kvcache.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from flashwright.flex.task import NoKernel
from flashwright.serving import arguments, reference
from flashwright.serving.kernels import Asked, attend
from flashwright.serving.kvcache import decode

TYPES = (torch.bfloat16, torch.float16)
_TOKEN = 656
"""Bytes: 512 numbers in e4m3, four scales in fp32, 64 numbers of the rope part in bf16."""
ARGUMENTS = {"k": "k_cache", "table": "block_table", "lengthsk": "cache_seqlens"}


class SchedulerMetadata:
    """What FlashMLA plans for a batch. It is empty: our kernels read the lengths themselves."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[SchedulerMetadata, None]:
    """The metadata and the splits that `flash_mla_with_kvcache` takes, for any arguments of
    FlashMLA's function. They are empty, and serve any batch."""
    return SchedulerMetadata(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    k_descale: Any = None,
) -> tuple[Any, Any]:
    """Attention of q, (batch, tokens, heads, dim), over a latent cache in pages.

    `k_cache` is (pages, positions, 1, dim); the first `head_dim_v` columns of a key are its value.
    Row b of `block_table`, int32, names the pages of sequence b, and `cache_seqlens`, int32, says
    how many keys it has. With `causal` the last query stands at the last key. The default of
    `softmax_scale` is 1 / sqrt(dim), as in FlashMLA. `tile_scheduler_metadata` and `num_splits` may
    be what `get_mla_metadata` gives; they change nothing, except that a number of splits is taken.
    Lengths and tables may change between the replays of a CUDA graph.

    Beside 16-bit q the cache may be float8_e4m3fn or int8. Keys and values are then `k_descale`, a
    number or float32 (batch, 1), times what it has; None is 1. `is_fp8_kvcache` may say so. There
    it does not mean FlashMLA's tokens of 656 bytes, which no kernel reads.

    Returns O, (batch, tokens, heads, head_dim_v), and the log-sum-exp (batch, heads, tokens): 0 and
    -inf without keys. There are no gradients. CPU tensors are computed by PyTorch. Raises NoKernel
    with the reason where no kernel can be made, as for sparse attention.
    """
    _refuse_others(
        {
            "indices": indices,
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
    )
    chosen = num_splits is None or isinstance(num_splits, torch.Tensor)  # FlashMLA's own
    splits = 0 if chosen else num_splits
    tensors = {"q": q, "k": k_cache, "table": block_table, "lengthsk": cache_seqlens}
    is_tensor = isinstance(k_descale, torch.Tensor)
    tensors["kdescale"] = k_descale if is_tensor else None
    number = None if is_tensor else k_descale
    options = softmax_scale, causal, head_dim_v, splits, is_fp8_kvcache, number
    if _on_cpu(q):
        given, settings = _given(tensors, options)
        reference.check_numbers(given, ARGUMENTS)
        return reference.attention(arguments.spec(given, settings), given)
    out, lse = attend(("mla", *options), tensors, True, partial(_asked, tensors, options))
    return out, lse


def _given(
    tensors: Mapping[str, Any], options: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a call, as reference.py names them, and the settings of its spec. Raises an
    error with the argument for what does not fit."""
    scale, causal, head_dim_v, splits, is_fp8, number = options
    needed = ("q", "k", "table", "lengthsk")
    arguments.check_tensors(tensors, ARGUMENTS, *needed)
    arguments.check_splits(splits)
    _check(tensors, head_dim_v, is_fp8)
    given = {name: tensors[name] for name in needed}
    given["v"] = given["k"][..., :head_dim_v]
    descale = number if tensors["kdescale"] is None else tensors["kdescale"]
    narrow, scales = arguments.scales_of(given, given["q"].shape[0], descale, descale)
    given |= scales
    if torch.is_grad_enabled() and (given["q"].requires_grad or given["k"].requires_grad):
        raise NoKernel("MLA decode has no gradient: use torch.no_grad()")
    return given, arguments.settings_of(scale, causal, (-1, -1), 0.0) | {"latent": True} | narrow


def _asked(tensors: Mapping[str, Any], options: tuple[Any, ...]) -> Asked:
    """What a kernel is made for and called with."""
    given, settings = _given(tensors, options)
    page = given["k"].shape[1]
    return decode(given, settings, given["table"].shape[1] * page, page, options[3])


def _on_cpu(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cpu", False))


def _refuse_others(options: Mapping[str, Any]) -> None:
    """Raise NoKernel for what FlashMLA has beside dense decode."""
    for name, value in options.items():
        if value is not None:
            raise NoKernel(f"{name}: kernels are for dense decode without sinks; leave it out")


def _check(given: Mapping[str, Any], head_dim_v: int, is_fp8: bool) -> None:
    """Raise ValueError or TypeError, with the argument, for tensors that do not fit."""
    named = {"q": given["q"], "k_cache": given["k"]}
    axes = {"q": "batch, tokens, heads, dim", "k_cache": "pages, positions, 1, dim"}
    arguments.check_axes(named, axes)
    q, cache = named.values()
    if q.dtype not in TYPES:
        raise TypeError(f"q must be bfloat16 or float16; it is {q.dtype}")
    if is_fp8 and cache.shape[3] == _TOKEN:
        text = f"k_cache has FlashMLA's tokens of {_TOKEN} bytes, which no kernel reads"
        raise NoKernel(f"{text}: pass float8_e4m3fn of the width of q, and k_descale")
    narrow = [kind for kind, name in arguments.CACHE_TYPES.items() if name == "fp8" or not is_fp8]
    kinds = narrow if is_fp8 else [q.dtype, *narrow]
    if cache.dtype not in kinds or cache.device != q.device:
        wanted = " or ".join(str(kind) for kind in kinds)
        theirs = f"{cache.dtype} on {cache.device}"
        raise TypeError(f"k_cache must be {wanted} on {q.device}; it is {theirs}")
    if cache.shape[2] != 1:
        raise ValueError(f"k_cache must have one head, which all share; it has {cache.shape[2]}")
    if cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache is {cache.shape[3]} wide and q {q.shape[3]}: make them alike")
    if not isinstance(head_dim_v, int) or not 0 < head_dim_v < q.shape[3]:
        text = (
            f"head_dim_v must be a whole number above 0 and below {q.shape[3]}, the width of a key"
        )
        raise ValueError(f"{text}; it is {head_dim_v}")
    batch, device = q.shape[0], q.device
    arguments.check_numbers("block_table", given["table"], device, (batch, None))
    arguments.check_numbers("cache_seqlens", given["lengthsk"], device, (batch,))
