"""Decode: attention of few queries over a cache, with the signature of FlashAttention's
`flash_attn_with_kvcache`.

All heads of a group are rows of one tile, since they read the same keys, and the keys of a sequence
are split over thread blocks. A second kernel puts the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

from flashwright.flex.task import NoKernel
from flashwright.generate.packed_sizes import batch_of_few, rows_for
from flashwright.gpu import Gpu
from flashwright.serving import arguments, reference
from flashwright.serving.kernels import Wanted
from flashwright.serving.varlen import kernel_tensors

MOST_SPLITS = 128
_FULL = 0.8
"""Of the SMs: with so many thread blocks, keys are not split."""
_NEAR = 0.85
"""Of the best efficiency: the fewest splits that reach it are taken."""
_KEYS = 64
"""Of one step, roughly; a split has at least one."""


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
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q, (batch, tokens, heads, dim), over the keys in a cache.

    `k_cache` and `v_cache` are (batch, positions, heads, dim), or pages, (pages, positions, heads,
    dim), whose row b of `block_table` names those of sequence b. `cache_seqlens`, a number or int32
    for each sequence, says how many keys it has. New keys `k` and `v`, (batch, tokens, heads, dim),
    are written behind them first, by PyTorch, and count as well. `cache_batch_idx` names each
    sequence's entry of the cache, `cache_leftpad` its first position. With `rotary_cos` and
    `rotary_sin`, (positions, half of the width), q and the new keys are rotated first, by PyTorch.
    With `causal` the last query stands at the last key. `num_splits` thread blocks share the keys
    of a sequence; 0 chooses for the GPU and the batch. Lengths may change between the replays of a
    CUDA graph.

    Beside 16-bit q the caches may be float8_e4m3fn. Keys are then `k_descale`, a number or float32
    (batch, KV heads), times what the cache has, values `v_descale` times; new ones are divided by
    it, unless they are float8_e4m3fn, too.

    Returns O, and with `return_softmax_lse` also the log-sum-exp (batch, heads, tokens). There are
    no gradients. CPU tensors are computed by PyTorch. Raises NoKernel with the reason where no
    kernel can be made.
    """
    for both, one, other in (
        ("k and v", k, v),
        ("rotary_cos and rotary_sin", rotary_cos, rotary_sin),
    ):
        if (one is None) != (other is None):
            raise ValueError(f"pass both {both}, or neither")
    cache = _Cache(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
    lengths = _lengths(q, cache, cache_seqlens)
    if rotary_cos is not None:
        every = causal or tuple(window_size) != (-1, -1)
        turn = partial(_rotated, cos=rotary_cos, sin=rotary_sin, pairs=rotary_interleaved)
        q = turn(q, _positions(lengths, q.shape[1] if every else 1))
        k = turn(k, _positions(lengths, k.shape[1])) if k is not None else None
    pair = {"q": q, "k": k_cache}
    narrow, scales = arguments.scales_of(pair, q.shape[0], k_descale, v_descale)
    if k is not None:
        cache.append(k, v, lengths, scales)
        lengths = lengths + k.shape[1]
    given = {"q": q, **cache.tensors(lengths), **scales}
    given |= arguments.extras_of(alibi_slopes, sink, causal, q.shape[2])
    settings = arguments.settings_of(softmax_scale, causal, window_size, softcap) | narrow
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
        raise NoKernel("attention over a cache has no gradient: use torch.no_grad()")
    if _on_cpu(q):
        found = reference.attention(arguments.spec(given, settings), given)
    else:
        page = cache.k.shape[1] if cache.table is not None else None
        found = by_kernel(given, settings, cache.longest, page, num_splits)
    return found if return_softmax_lse else found[0]


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def by_kernel(
    given: dict[str, Any], settings: dict[str, Any], longest: int, page: int | None, splits: int
) -> tuple[Any, Any]:
    """O and LSE of a decode over a cache, or over pages of some size. No sequence has more keys
    than `longest`; with 0 `splits` their number is chosen."""
    task = arguments.task(given, settings)
    batch, queries = given["q"].shape[:2]
    group = task.spec.group
    few = rows_for(queries * group, task.spec.value_dim)
    wanted = Wanted(task, batch_of_few(queries, group, task.spec.value_dim, page))
    blocks = batch * task.spec.kv_heads * ceil(queries * group / few)
    sizes = {"splits": splits or split_count(task.card, blocks, longest)}
    sizes |= {"q_len": queries, "kv_len": longest, "batch": batch}
    found = wanted.run(kernel_tensors(given), sizes, partial(reference.check, task.spec, given))
    return found["o"].transpose(1, 2), found["lse"]


def split_count(gpu: Gpu, blocks: int, longest: int) -> int:
    """Over how many thread blocks the keys of a sequence are split, if without that there are
    `blocks` of them: as few as fill whole waves of the GPU nearly as well as any number does."""
    most = min(MOST_SPLITS, gpu.sms, ceil(longest / _KEYS))
    if blocks >= _FULL * gpu.sms or most <= 1:
        return 1

    def efficiency(splits: int) -> float:
        waves = blocks * splits / gpu.sms
        return waves / ceil(waves)

    best = max(map(efficiency, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if efficiency(n) >= _NEAR * best)


@dataclass(frozen=True)
class _Cache:
    """Keys and values, and where those of each sequence are."""

    k: Any
    v: Any
    table: Any
    entries: Any
    padding: Any

    @property
    def longest(self) -> int:
        """The most keys that a sequence may have."""
        pages = 1 if self.table is None else self.table.shape[1]
        return int(pages * self.k.shape[1])

    def tensors(self, lengths: Any) -> dict[str, Any]:
        """The tensors of a call, as reference.py names them."""
        if self.table is not None:
            return {"k": self.k, "v": self.v, "table": self.table, "lengthsk": lengths}
        (k, step), (v, other) = _behind_each_other(self.k), _behind_each_other(self.v)
        if step != other:
            raise ValueError("k_cache and v_cache must have the same strides from entry to entry")
        if self.entries is None and self.padding is None:
            starts = _starts(lengths.shape[0], step, lengths.device)
            return {"k": k, "v": v, "startsk": starts, "lengthsk": lengths}
        starts = self._entries(lengths) * step
        if self.padding is not None:
            starts, lengths = starts + self.padding, lengths - self.padding
        return {"k": k, "v": v, "startsk": starts.int(), "lengthsk": lengths.int()}

    def append(self, k: Any, v: Any, lengths: Any, scales: Mapping[str, Any]) -> None:
        """Write new keys and values behind those that are there, divided by the scales of 8-bit
        ones."""
        places = _positions(lengths, k.shape[1]).long()
        if self.table is not None:
            size = self.k.shape[1]
            outer, places = self.table.long().gather(1, places // size), places % size
        else:
            outer = self._entries(lengths).long()[:, None]
        for cache, new, scale in (
            (self.k, k, scales.get("kdescale")),
            (self.v, v, scales.get("vdescale")),
        ):
            if scale is not None and new.dtype != cache.dtype:
                new = _narrowed(new.float() / scale[:, None, :, None], cache.dtype)
            rows = new.to(cache.dtype)
            if rows.element_size() == 1:  # 8-bit floats have no index
                cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
            cache[outer, places] = rows

    def _entries(self, lengths: Any) -> Any:
        if self.entries is not None:
            return self.entries
        return torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device)


def _narrowed(x: Any, kind: Any) -> Any:
    """Numbers within the range of a type, which has no infinity."""
    most = torch.finfo(kind).max
    return x.clamp(-most, most)


_STARTS: dict[tuple[int, int, Any], Any] = {}


def _starts(batch: int, step: int, device: Any) -> Any:
    """Where the entries of a cache begin, as int32; made once."""
    known = batch, step, device
    starts = _STARTS.get(known)
    if starts is None:
        starts = torch.arange(batch, dtype=torch.int32, device=device) * step
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _STARTS[known] = starts  # else it belongs to the graph, and has no numbers yet
    return starts


def _behind_each_other(cache: Any) -> tuple[Any, int]:
    """A cache of entries as one tensor of tokens, and the tokens from one entry to the next."""
    entries, positions, *rest = cache.shape
    far, near, *inner = cache.stride()
    if not near or far % near:
        raise ValueError("the entries of a cache must be whole rows apart: make it contiguous")
    step = far // near if entries > 1 else positions
    tokens = (entries - 1) * step + positions
    return cache.as_strided((tokens, *rest), (near, *inner)), step


def _lengths(q: Any, cache: _Cache, lengths: Any) -> Any:
    """How many keys each sequence has, as int32. Raises ValueError or TypeError, with the argument,
    for tensors that do not fit."""
    kind = "pages" if cache.table is not None else "batch"
    keys = f"{kind}, positions, heads, dim"
    given = {"q": q, "k_cache": cache.k, "v_cache": cache.v}
    axes = {"q": "batch, tokens, heads, dim", "k_cache": keys, "v_cache": keys}
    arguments.check_axes(given, axes)
    if cache.k.shape[:-1] != cache.v.shape[:-1]:
        raise ValueError("k_cache and v_cache must have the same positions and heads")
    batch, device = q.shape[0], q.device
    if cache.table is not None:
        arguments.check_numbers("block_table", cache.table, device, (batch, None))
        if cache.entries is not None or cache.padding is not None:
            raise ValueError("cache_batch_idx and cache_leftpad are for a cache without pages")
        if lengths is None:
            raise ValueError("block_table needs cache_seqlens: how many keys each sequence has")
    for name, numbers in (("cache_batch_idx", cache.entries), ("cache_leftpad", cache.padding)):
        if numbers is not None:
            arguments.check_numbers(name, numbers, device, (batch,))
    if cache.table is None and cache.entries is None and cache.k.shape[0] != batch:
        raise ValueError(f"k_cache has {cache.k.shape[0]} entries and q {batch} sequences")
    if lengths is None or isinstance(lengths, int):
        count = cache.k.shape[1] if lengths is None else lengths
        if not 0 <= count <= cache.longest:
            raise ValueError(
                f"cache_seqlens is {count}, and the cache has room for {cache.longest}"
            )
        return torch.full((batch,), count, dtype=torch.int32, device=device)
    arguments.check_numbers("cache_seqlens", lengths, device, (batch,))
    return lengths


def _positions(lengths: Any, count: int) -> Any:
    """The positions of `count` tokens behind the keys of each sequence."""
    return lengths[:, None] + torch.arange(count, dtype=torch.int32, device=lengths.device)


def _rotated(x: Any, places: Any, *, cos: Any, sin: Any, pairs: bool) -> Any:
    """x, (batch, tokens, heads, dim), with the first columns rotated by the angles of its places:
    neighbours as `pairs`, else the first half with the second."""
    width = 2 * cos.shape[-1]
    cos, sin = (angle[places.long()][:, :, None].float() for angle in (cos, sin))
    part, rest = x[..., :width].float(), x[..., width:]
    if pairs:
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)
