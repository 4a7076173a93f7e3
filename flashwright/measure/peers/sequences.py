"""Peers for sequences of any lengths: packed batches, caches and decode.

A function gets Q, K and V, then StartsQ of packed queries, then StartsK, or StartsK and LengthsK of
a cache, or Table and LengthsK. All but Q, K and V are the same tensors in every call, so that what
a library plans ahead is planned once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashwright.measure.peers.features import SEQUENCES, need, package, window_of
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec

WORKSPACE = 256 << 20  # bytes; FlashInfer's documentation asks for 128 MB


def flash_attention_3(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashAttention-3's functions for packed sequences and for decode."""
    need(spec, SEQUENCES, "windows", "softcap", "V of another width than K")
    library = package("flash_attn_interface")
    settings = {
        "softmax_scale": spec.softmax_scale,
        "causal": spec.causal,
        "window_size": window_of(spec),
        "softcap": spec.softcap or 0.0,
    }
    if not spec.packed:
        return _Decode(spec, library.flash_attn_with_kvcache, settings)
    if spec.page is not None or spec.cache:
        return _PackedOverCache(spec, library.flash_attn_with_kvcache, settings)
    return _Packed(library.flash_attn_varlen_func, settings)


class _Once:
    """What is found of the tensors of a problem, which are the same in every call."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._found: Any = None

    def of(self, find: Callable[..., Any], *tensors: Any) -> Any:
        key = tuple(x.data_ptr() for x in tensors)
        if key != self._key:
            self._key, self._found = key, find(*tensors)
        return self._found


def _longest(*starts: Any) -> list[int]:
    return [int(x.diff().max()) for x in starts]


class _Packed:
    """Keys behind each other."""

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.function, self.settings, self.known = function, settings, _Once()

    def __call__(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any) -> Any:
        longest = self.known.of(_longest, starts_q, starts_k)
        tokens = (x.transpose(0, 1) for x in (q, k, v))
        found = self.function(*tokens, starts_q, starts_k, *longest, **self.settings)
        return _first(found).transpose(0, 1)


class _PackedOverCache:
    """Packed queries over pages, or over a cache."""

    def __init__(
        self, spec: AttentionSpec, function: Callable[..., Any], settings: dict[str, Any]
    ) -> None:
        if spec.page is None:
            raise Unable("its caches have entries of one length")
        self.function, self.settings, self.known = function, settings, _Once()

    def __call__(self, q: Any, k: Any, v: Any, starts: Any, table: Any, lengths: Any) -> Any:
        (longest,) = self.known.of(_longest, starts)
        found = self.function(
            q.transpose(0, 1),
            k.transpose(1, 2),
            v.transpose(1, 2),
            cache_seqlens=lengths,
            page_table=table,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            **self.settings,
        )
        return _first(found).transpose(0, 1)


class _Decode:
    """As many queries for each sequence, over pages or over entries of one length."""

    def __init__(
        self, spec: AttentionSpec, function: Callable[..., Any], settings: dict[str, Any]
    ) -> None:
        self.function, self.settings, self.paged = function, settings, spec.page is not None

    def __call__(self, q: Any, k: Any, v: Any, place: Any, lengths: Any) -> Any:
        more = {"page_table": place} if self.paged else {}
        # The keys of a benchmark's decode lie one behind the other, as many for each sequence.
        k, v = (
            x.transpose(1, 2) if self.paged else x.transpose(0, 1).unflatten(0, (len(q), -1))
            for x in (k, v)
        )
        found = self.function(
            *(q.transpose(1, 2), k, v),
            cache_seqlens=lengths,
            pack_gqa=True,
            **more,
            **self.settings,
        )
        return _first(found).transpose(1, 2)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def flash_infer(spec: AttentionSpec) -> Callable[..., Any]:
    """FlashInfer's wrappers: packed sequences whose keys are packed too, decode over pages."""
    need(spec, SEQUENCES, "windows", "softcap", "V of another width than K")
    if spec.window is not None and not spec.causal:
        raise Unable("its windows are always causal")
    if spec.packed and spec.page is None and not spec.cache:
        return _FlashInferPacked(spec, package("flashinfer"))
    if spec.decode == 1 and spec.page is not None:
        return _FlashInferDecode(spec, package("flashinfer"))
    raise Unable("it is measured on packed batches, and on decodes of one query over pages")


def _settings(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "sm_scale": spec.softmax_scale,
        "window_left": window_of(spec)[0],
        "logits_soft_cap": spec.softcap or 0.0,
    }


def _space() -> Any:
    import torch

    return torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")


class _FlashInferPacked:
    def __init__(self, spec: AttentionSpec, library: Any) -> None:
        self.spec, self.known = spec, _Once()
        self.wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(_space(), "NHD")

    def __call__(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any) -> Any:
        def plan(starts_q: Any, starts_k: Any) -> bool:
            spec = self.spec
            sizes = (spec.heads, spec.kv_heads, spec.head_dim)
            more = {"head_dim_vo": spec.value_dim, "causal": spec.causal, "q_data_type": q.dtype}
            self.wrapper.plan(starts_q, starts_k, *sizes, **more, **_settings(spec))
            return True

        self.known.of(plan, starts_q, starts_k)
        return self.wrapper.run(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


class _FlashInferDecode:
    def __init__(self, spec: AttentionSpec, library: Any) -> None:
        self.spec, self.known = spec, _Once()
        self.wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            _space(), "NHD", use_tensor_cores=spec.group > 1
        )

    def __call__(self, q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        def plan(table: Any, lengths: Any) -> bool:
            import torch

            spec, size = self.spec, k.shape[2]
            counts = (lengths + size - 1) // size
            ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
            held = torch.arange(table.shape[1], device=table.device) < counts[:, None]
            sizes = (spec.heads, spec.kv_heads, spec.head_dim, size)
            more = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
            last = lengths - (counts - 1) * size
            self.wrapper.plan(ends, table[held], last, *sizes, **more, **_settings(spec))
            return True

        self.known.of(plan, table, lengths)
        pages = (k.transpose(1, 2), v.transpose(1, 2))
        return self.wrapper.run(q[:, :, 0], pages)[:, :, None]
