"""Decode: attention of few queries over a cache, with the signature of FlashAttention's
`flash_attn_with_kvcache`.

All heads of a group are rows of one tile, since they read the same keys, and the keys of a sequence
are split over thread blocks. A second kernel puts the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch

from flashwright.author.builtin.splits import rows_for, split_count
from flashwright.flex.task import NoKernel
from flashwright.generate.packed_sizes import batch_of_few
from flashwright.serving import arguments, reference, tree
from flashwright.serving.append import New
from flashwright.serving.cache import Cache, lengths_of, most_known
from flashwright.serving.kernels import Asked, Wanted, attend
from flashwright.serving.merge import merge_states
from flashwright.serving.varlen import kernel_tensors
from flashwright.spec import AttentionSpec

_SMALL = 8 << 20
"""Bytes that surely stay in the L2 between two kernels."""
ARGUMENTS = {
    "k": "k_cache",
    "v": "v_cache",
    "table": "block_table",
    "startsk": "cache_batch_idx",
    "lengthsk": "cache_seqlens",
    "tree": "tree_mask",
    "kdescale": "k_descale",
    "vdescale": "v_descale",
    **arguments.ARGUMENTS,
}
"""The arguments of the function by what its tensors are called here."""


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    tree_mask: Any = None,
    prefix_k: Any = None,
    prefix_v: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q, (batch, tokens, heads, dim), over the keys in a cache.

    `k_cache` and `v_cache` are (batch, positions, heads, dim), or pages, (pages, positions, heads,
    dim), whose row b of `block_table` names those of sequence b. `cache_seqlens`, a number or int32
    for each sequence, says how many keys it has. New keys `k` and `v`, (batch, tokens, heads, dim),
    are written behind them first, and count as well. `cache_batch_idx` names each
    sequence's entry of the cache, `cache_leftpad` its first position. With `rotary_cos` and
    `rotary_sin`, (positions, half of the width), q and the new keys are rotated first.
    With `causal` the last query stands at the last key. `num_splits` thread blocks share the keys
    of a sequence; 0 chooses for the GPU and the batch. Lengths may change between the replays of a
    CUDA graph.

    `tree_mask` says which of the newest `tokens` keys each query sees, on top of the other masks:
    bool or uint8 (batch, tokens, tokens), or int64 (batch, tokens) with a bit for each key, the
    lowest for the first. Every query sees the keys before these. A window and ALiBi count places
    in the cache.

    `prefix_k` and `prefix_v`, (tokens, heads, dim), are keys and values before those of all
    sequences, such as a prompt that they share. They are read once for the batch, and every query
    sees all of them.

    Beside 16-bit q the caches may be float8_e4m3fn or int8. Keys are then `k_descale`, a number or
    float32 (batch, KV heads), times what the cache has, values `v_descale` times; None is 1. New
    ones are divided by it and rounded, in int8 to the nearest whole number, and kept within the
    type's range, unless they have the cache's type already.

    Returns O, and with `return_softmax_lse` also the log-sum-exp (batch, heads, tokens). There are
    no gradients. CPU tensors are computed by PyTorch. Raises NoKernel with the reason where no
    kernel can be made.
    """
    _check_pairs(k, v, rotary_cos, rotary_sin, prefix_k, prefix_v)
    causal, window = arguments.masks_of(causal, window_size)
    starts = None
    if isinstance(tree_mask, torch.Tensor) and tree_mask.dtype != torch.bool:
        tree_mask = tree.as_bools(tree_mask, q)
    if not (
        k is rotary_cos is cache_batch_idx is cache_leftpad is None
        and (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor))
    ):
        cache = Cache(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
        most = most_known(cache, cache_seqlens)
        cache_seqlens = lengths_of(q, cache, cache_seqlens)
        before = 0 if prefix_k is None else prefix_k.shape[0]
        new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved, before)
        ordered = causal or window != (-1, -1)
        new.check(q, cache, most, ordered)
        pair = {"q": q, "k": k_cache}
        _, scales = arguments.scales_of(pair, q.shape[0], k_descale, v_descale)
        q, cache_seqlens = new.written(q, cache, cache_seqlens, ordered, scales)
        starts, cache_seqlens = cache.range(cache_seqlens)
    tensors = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "table": block_table,
        "startsk": starts,
        "lengthsk": cache_seqlens,
        "slopes": arguments.in_fp32(alibi_slopes),
        "sink": arguments.in_fp32(sink),
        "tree": tree_mask,
    }
    options: tuple[Any, ...] = (softmax_scale, causal, window, softcap, num_splits)
    options = (*options, *arguments.take_scales(tensors, k_descale, v_descale))
    if prefix_k is None or not prefix_k.shape[0]:
        found = _attention(tensors, options, return_softmax_lse)
    else:
        own = _attention(tensors, options, lse=True)
        found = merge_states(*_over_prefix(tensors, options, prefix_k, prefix_v), *own)
    return (found[0], found[1]) if return_softmax_lse else found[0]


def _check_pairs(k: Any, v: Any, cos: Any, sin: Any, prefix_k: Any, prefix_v: Any) -> None:
    """Raise ValueError if one of two arguments that belong together is missing."""
    if (k is None) != (v is None):
        raise ValueError("pass both k and v, or neither")
    if (cos is None) != (sin is None):
        raise ValueError("pass both rotary_cos and rotary_sin, or neither")
    if (prefix_k is None) != (prefix_v is None):
        raise ValueError("pass both prefix_k and prefix_v, or neither")


def _attention(tensors: dict[str, Any], options: tuple[Any, ...], lse: bool) -> Sequence[Any]:
    """O, and LSE if it is wanted."""
    if _on_cpu(tensors["q"]):
        given, settings = _given(tensors, options)
        reference.check_numbers(given, ARGUMENTS)
        return reference.attention(arguments.spec(given, settings), given)
    return attend(("kvcache", *options), tensors, lse, partial(_asked, tensors, options))


def _over_prefix(
    tensors: dict[str, Any], options: tuple[Any, ...], k: Any, v: Any
) -> tuple[Any, Any]:
    """O and LSE over keys, (tokens, heads, dim), that all queries of all sequences see: these are
    queries of one sequence, so that the keys are read once."""
    scale, causal, window, softcap, *_ = options
    arguments.check_axes(
        {"prefix_k": k, "prefix_v": v},
        dict.fromkeys(("prefix_k", "prefix_v"), "tokens, heads, dim"),
    )
    if k.shape[:-1] != v.shape[:-1] or k.shape[1] != tensors["k"].shape[2]:
        raise ValueError(
            "prefix_k and prefix_v must have the same tokens, and the heads of k_cache"
        )
    arguments.check_widths(tensors["q"], "prefix_k", k)
    if k.dtype in arguments.CACHE_TYPES and k.dtype != tensors["q"].dtype:
        text = f"prefix_k in {k.dtype} has no scales: pass prefix_k and prefix_v in the type of q"
        raise NoKernel(text)
    masks = arguments.settings_of(scale, causal, window, softcap)
    if "window" in masks or tensors["slopes"] is not None:
        raise NoKernel("prefix_k: a window and ALiBi count places in the cache: leave them away")
    q = tensors["q"]
    batch, queries, heads, _ = q.shape
    every = {**dict.fromkeys(tensors), "q": q.reshape(1, batch * queries, heads, -1)}
    every |= {"k": k[None], "v": v[None]}
    plain = (scale, False, (-1, -1), softcap, 0, None, None)
    out, lse = _attention(every, plain, lse=True)
    return out.view(batch, queries, heads, -1), lse.view(heads, batch, queries).transpose(0, 1)


def _on_cpu(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cpu", False))


def _given(
    tensors: Mapping[str, Any], options: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a call, as reference.py names them, and the settings of its spec. Raises an
    error with the argument for what does not fit."""
    scale, causal, window, softcap, splits, *numbers = options
    arguments.check_tensors(tensors, ARGUMENTS, "q", "k", "v")
    arguments.check_splits(splits)
    q, k, v, table, starts, lengths, slopes, sink, mask, *_ = tensors.values()
    cache = Cache(k, v, table, None, None, starts)
    lengths = lengths_of(q, cache, lengths)
    arguments.check_widths(q, "k_cache", k)
    given = {"q": q, **cache.tensors(lengths)}
    scales = arguments.given_scales(tensors, numbers)
    narrow, own = arguments.scales_of({"q": q, "k": k}, q.shape[0], *scales)
    given |= own | arguments.extras_of(slopes, sink, causal, q.shape[2])
    if mask is not None:
        given["tree"] = tree.as_bools(mask, q)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
        raise NoKernel("attention over a cache has no gradient: use torch.no_grad()")
    return given, arguments.settings_of(scale, causal, window, softcap) | narrow


def _asked(tensors: Mapping[str, Any], options: tuple[Any, ...]) -> Asked:
    """What a kernel is made for and called with."""
    given, settings = _given(tensors, options)
    cache = Cache(tensors["k"], tensors["v"], tensors["table"])
    page = cache.k.shape[1] if cache.table is not None else None
    return decode(given, settings, cache.longest, page, options[4])


def decode(
    given: dict[str, Any], settings: dict[str, Any], longest: int, page: int | None, splits: int
) -> Asked:
    """A decode over a cache, or over pages of some size. No sequence has more keys than `longest`;
    with 0 `splits` their number is chosen."""
    task = arguments.task(given, settings)
    batch, queries = given["q"].shape[:2]
    group = task.spec.group
    mods, alike = None, queries
    if "tree" in given:
        mods, alike = tree.mods(), max(1, min(queries, tree.ROWS // group))
    few = rows_for(alike * group, task.spec.value_dim)
    form = batch_of_few(alike, group, task.spec.value_dim, page)
    blocks = batch * task.spec.kv_heads * ceil(queries * group / few)
    splits = splits or split_count(task.card, blocks, longest)
    sizes = {"splits": splits}
    if splits == 1 and _parts_cost(task.spec, batch * queries, longest):
        form, sizes = replace(form, unsplit=True), {}
    wanted = Wanted(task, form, mods)
    sizes |= {"q_len": queries, "kv_len": longest, "batch": batch}
    check = partial(reference.check, task.spec, given)
    read = kernel_tensors(given)
    if "tree" in read:
        read["tree"] = read["tree"].view(torch.float8_e4m3fn)
    return Asked(wanted, read, sizes, check)


def _parts_cost(spec: AttentionSpec, queries: int, longest: int) -> bool:
    """Whether it costs time to store O in fp32 and to load it again: the parts of so many queries
    do not stay in the L2, and are more than 1 % of the keys that they read. A kernel of its own
    stores such results without parts."""
    part = 4 * spec.heads * spec.value_dim
    columns = spec.head_dim + (0 if spec.latent else spec.value_dim)
    keys = longest * spec.kv_heads * columns * (1 if spec.kv_dtype else 2)
    return queries * part > _SMALL and 200 * part > keys
