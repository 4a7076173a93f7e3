"""Classes with the signatures of FlashInfer's batch wrappers: `plan` once a step, `run` in layers.

`plan` turns FlashInfer's lists of pages into a table on the device. It looks at the lengths on the
host, and so waits for the GPU unless they are there. `run` waits for nothing. Log-sum-exps have
base 2 and the axes (tokens, heads), as FlashInfer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from math import e as euler
from math import log2, prod, sqrt
from typing import Any

import torch

from flashwright.flex.task import NoKernel
from flashwright.serving.arguments import CACHE_TYPES
from flashwright.serving.kvcache import flash_attn_with_kvcache
from flashwright.serving.varlen import flash_attn_varlen_func

LAYOUTS = ("NHD", "HND")
_FEW = 64
"""Rows of a KV head up to which queries, if all sequences have as many, go to a decode's kernel."""
_PAGES = 64
"""The width of a table is a multiple of it, so that calls of many steps have one form."""
NO_EFFECT = {
    "float_workspace_buffer": "kernels need no workspace: its device is used",
    **dict.fromkeys(
        ("use_tensor_cores", "backend", "enable_pdl"), "a choice of FlashInfer's kernels"
    ),
    **dict.fromkeys(
        ("paged_kv_indptr_buffer", "qo_indptr_buf", "paged_kv_indptr_buf", "kv_indptr_buf"),
        "the wrapper's own memory keeps its place in a CUDA graph",
    ),
    **dict.fromkeys(("rope_scale", "rope_theta"), "read by FlashInfer with ROPE_LLAMA alone, too"),
    "use_fp16_qk_reduction": "scores are always summed in fp32",
    "non_blocking": "plan copies as the order of the stream needs it",
    **dict.fromkeys(
        (
            *("block_tables", "seq_lens", "seq_lens_q", "max_token_per_sequence"),
            "max_sequence_kv",
        ),
        "what the lists of pages say as well",
    ),
}
"""Arguments of FlashInfer's that change no result, and why."""


@dataclass(frozen=True)
class _Plan:
    """What `run` needs, beside the table."""

    heads: int
    kv_heads: int
    width: int
    batch: int
    settings: Mapping[str, Any]
    """Those of FlashAttention's functions."""
    splits: int = 0
    longest: tuple[int, int] = (0, 0)
    """Queries and keys of a sequence."""
    alike: int | None = None
    """The queries of each sequence, if all have as many."""
    tokens: int | None = None
    """The queries of all sequences; None if a CUDA graph may have room for more."""
    width_of_v: int | None = None
    page: int | None = None
    """The positions of a page."""
    keys: int | None = None
    """The keys of all sequences, if they lie behind each other."""
    types: Mapping[str, Any] = field(default_factory=dict)
    """Those that plan was given, by the tensors that have them."""

    def check(self, q: Any, k: Any, v: Any) -> None:
        """Raise ValueError unless tensors, with tokens before heads, are as planned."""
        keys = (self.page, self.kv_heads) if self.page is not None else (self.kv_heads,)
        value_width = self.width if self.width_of_v is None else self.width_of_v
        for name, tensor, shape in (
            ("q", q, (self.heads, self.width)),
            ("k", k, (*keys, self.width)),
            ("v", v, (*keys, value_width)),
        ):
            planned = ", ".join(map(str, shape))
            if tensor.ndim != 1 + len(shape) or tuple(tensor.shape[1:]) != shape:
                text = f"{name} must be (any, {planned}), as planned"
                raise ValueError(f"{text}; it is {tuple(tensor.shape)}")
        for name, wanted in self.types.items():
            found = (q if name in ("q_data_type", "o_data_type") else k).dtype
            if found != wanted:
                raise ValueError(f"{name} was planned as {wanted}; the tensor has {found}")
        if self.tokens is not None and q.shape[0] != self.tokens:
            raise ValueError(f"q has {q.shape[0]} tokens, and {self.tokens} were planned")


class _Wrapper:
    """What the wrappers share."""

    def __init__(self, workspace: Any, layout: str, graph: bool) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"kv_layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
        self._device, self._layout, self._graph = workspace.device, layout, graph
        self._planned: _Plan | None = None
        self._numbers: dict[str, Any] = {}
        """Tensors that a CUDA graph may have captured: they keep their place."""

    def reset_workspace_buffer(self, *buffers: Any) -> None:
        """Does nothing: kernels need no workspace of the caller's."""

    def _for(self, q: Any, k: Any, v: Any) -> _Plan:
        """The plan for these queries, keys and values."""
        if self._planned is None:
            raise RuntimeError("call plan() before run()")
        self._planned.check(q, k, v)
        return self._planned

    def _put(self, name: str, tensor: Any) -> Any:
        """Keep a tensor of numbers for `run`, where a graph finds it again."""
        made = tensor.to(self._device, torch.int32)
        old = self._numbers.get(name)
        if not self._graph or old is None:
            self._numbers[name] = made.contiguous()
        elif old.shape != made.shape:
            text = f"a plan for a CUDA graph keeps its sizes: {name} had the shape"
            raise ValueError(f"{text} {tuple(old.shape)}, not {tuple(made.shape)}")
        else:
            old.copy_(made)
        return self._numbers[name]

    def _longest(self, queries: Any, keys: Any) -> tuple[int, int]:
        """Queries and keys of the longest sequence; in a CUDA graph those of the first plan."""
        found = int(queries.max()), int(keys.max())
        if not self._graph or self._planned is None:
            return found
        before = self._planned.longest
        if found[0] > before[0] or found[1] > before[1]:
            text = "a plan for a CUDA graph may not have longer sequences than the first one"
            raise ValueError(f"{text}: {found} queries and keys, not {before}")
        return before

    def _pages(self, cache: Any) -> tuple[Any, Any]:
        """K and V as (pages, positions, heads, dim)."""
        if isinstance(cache, torch.Tensor) and (cache.ndim != 5 or cache.shape[1] != 2):
            text = "paged_kv_cache must have five axes, (pages, 2, ...), or be a pair of tensors"
            raise ValueError(f"{text}; its shape is {tuple(cache.shape)}")
        k, v = cache if isinstance(cache, tuple | list) else cache.unbind(1)
        return (k.transpose(1, 2), v.transpose(1, 2)) if self._layout == "HND" else (k, v)

    def _table(self, indptr: Any, indices: Any, last: Any, size: int, room: int | None) -> Any:
        """Put the table and the lengths of lists of pages. Returns how many pages each sequence
        has, on the host. `room` is the width of the table, if it is fixed."""
        counts = _counts("the list of pages' indptr", indptr, indices.shape[0])
        if last.shape[0] != len(counts):
            text = f"last_page_len has {last.shape[0]} numbers, and indptr {len(counts)} sequences"
            raise ValueError(text)
        if last.is_cpu and not bool(((last > 0) & (last <= size))[counts > 0].all()):
            raise ValueError(f"last_page_len must be 1 to {size}, the page size, where pages are")
        most = int(counts.max())
        if room is not None and most > room:
            raise ValueError(
                f"a sequence has {most} pages, and the buffer of indices room for {room} of each"
            )
        width = room or max(-(-most // _PAGES), 1) * _PAGES
        first, last = (x.to(self._device) for x in (indptr, last))
        begin, end = first[:-1, None], first[1:, None]
        places = begin + torch.arange(width, device=self._device)
        pages = indices.to(self._device)
        pages = pages if pages.numel() else pages.new_zeros(1)
        named = pages[places.clamp(max=pages.numel() - 1).long()]
        self._put("table", torch.where(places < end, named, 0))
        own = (end - begin)[:, 0]
        self._put("lengths", torch.where(own > 0, (own - 1) * size + last, 0))
        return counts

    @staticmethod
    def _call(
        plan: _Plan, k: Any, scales: tuple[Any, ...], window: int | None, sinks: Any
    ) -> tuple[dict[str, Any], Any]:
        """The arguments of a function of ours, and what O is multiplied by. `scales` are those of
        Q, K and V."""
        named: dict[str, Any] = {**plan.settings, "sink": sinks}
        if window is not None:
            named["window_size"] = _window(window, bool(named["causal"]))
        if all(factor is None for factor in scales):
            return named, None
        *factors, after = (None if _is_one(factor) else factor for factor in scales)
        if k.dtype in CACHE_TYPES:
            named |= {"k_descale": factors.pop(), "v_descale": after}
            after = None
        given = [factor for factor in factors if factor is not None]
        if any(isinstance(factor, torch.Tensor) for factor in given):
            raise NoKernel("q_scale and k_scale must be numbers, except k_scale of 8-bit caches")
        if given:
            named["softmax_scale"] = prod(given, start=_scale(named["softmax_scale"], plan.width))
        return named, after

    @staticmethod
    def _results(found: tuple[Any, Any], after: Any, out: Any, lse: Any) -> Any:
        """What `run` returns, from O and the log-sum-exp (tokens, heads) in base e, if wanted."""
        result, logs = found
        result = result if after is None else (result * after).to(result.dtype)
        result = result if out is None else _copied("out", out, result)
        if logs is None:
            return result
        logs = (logs * log2(euler)).contiguous()
        return result, logs if lse is None else _copied("lse", lse, logs)


def _copied(name: str, place: Any, found: Any) -> Any:
    """A result in the caller's tensor."""
    if place.shape != found.shape or place.dtype != found.dtype:
        wanted = f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(f"{name} must be {wanted}; it is {place.dtype}, {tuple(place.shape)}")
    return place.copy_(found)


def _counts(name: str, indptr: Any, room: int | None = None) -> Any:
    """How many of a list each sequence has, on the host. Raises ValueError for an indptr that does
    not rise, or that names more than there are."""
    numbers = indptr.cpu()
    counts = numbers.diff()
    if indptr.ndim != 1 or not len(counts):
        raise ValueError(f"{name} must have one number more than there are sequences")
    if int(numbers[0]) < 0 or int(counts.min()) < 0:
        raise ValueError(f"{name} must rise; it is {numbers.tolist()}")
    if room is not None and int(numbers[-1]) > room:
        raise ValueError(f"{name} ends at {int(numbers[-1])}, and the list has {room} entries")
    return counts


def _is_one(factor: Any) -> bool:
    return not isinstance(factor, torch.Tensor) and factor == 1


def _scale(scale: float | None, width: int) -> float:
    return 1 / sqrt(width) if scale is None else scale


def _window(left: int, causal: bool) -> tuple[int, int]:
    return (left, 0) if causal and left >= 0 else (left, -1)


def _settings(
    causal: bool, window: int, cap: float | None, scale: float | None, others: Mapping[str, Any]
) -> dict[str, Any]:
    """FlashAttention's settings. Raises NoKernel for other arguments of FlashInfer's that have an
    effect."""
    if others["pos_encoding_mode"] != "NONE":
        mode = others["pos_encoding_mode"]
        raise NoKernel(f"pos_encoding_mode={mode!r}: rotate q and k before the call")
    _refuse({n: x for n, x in others.items() if n not in {*NO_EFFECT, *_HEEDED}})
    found = {"softmax_scale": scale, "causal": causal, "softcap": cap or 0.0}
    return {**found, "window_size": _window(window, causal)}


_TYPES = ("q_data_type", "kv_data_type", "o_data_type")
_HEEDED = ("pos_encoding_mode", "disable_split_kv", *_TYPES)


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise NoKernel for arguments of FlashInfer's that no kernel takes."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            raise NoKernel(f"{name}: no kernel takes it")


def _types(given: Mapping[str, Any]) -> dict[str, Any]:
    """The types of a plan, from those of torch and their names. Raises NoKernel for an O that has
    another type than q."""
    named = {name: given[name] for name in _TYPES if given.get(name) is not None}
    found = {n: getattr(torch, x) if isinstance(x, str) else x for n, x in named.items()}
    q = found.get("q_data_type")
    if q is not None and found.get("o_data_type", q) != q:
        raise NoKernel("o_data_type: O has the type of q")
    return found


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Decode over pages: one query a sequence, or `q_len_per_req`.

    Arguments in NO_EFFECT change no result. Others that no kernel takes are NoKernel. With
    `use_cuda_graph` the batch has the size of the buffers, and a sequence has room for as many
    pages as `paged_kv_indices_buffer` has for each.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        _refuse({"jit_args": jit_args})
        buffers = paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self._room = _room(*buffers) if use_cuda_graph else None

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        **others: Any,
    ) -> None:
        """Look at the pages of a step. Tensors of other types than these are refused by `run`."""
        others |= {"pos_encoding_mode": pos_encoding_mode, "q_data_type": q_data_type or data_type}
        others["kv_data_type"] = kv_data_type or data_type
        types = _types(others)
        settings = _settings(window_left >= 0, window_left, logits_soft_cap, sm_scale, others)
        self._table(indptr, indices, last_page_len, page_size, self._room)
        batch = last_page_len.shape[0]
        splits = 1 if others.get("disable_split_kv") else 0
        sizes = num_qo_heads, num_kv_heads, head_dim, batch
        self._planned = _Plan(*sizes, settings, splits, page=page_size, types=types)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        q_len_per_req: int | None = None,
    ) -> Any:
        """O, (tokens, heads, dim), and with `return_lse` the log-sum-exp."""
        k, v = self._pages(paged_kv_cache)
        plan = self._for(q, k, v)
        scales = q_scale, k_scale, v_scale
        named, after = self._call(plan, k, scales, window_left, sinks)
        count = q_len_per_req or 1
        if q.shape[0] != plan.batch * count:
            text = f"q has {q.shape[0]} tokens, and {plan.batch} sequences were planned"
            raise ValueError(f"{text}, with {count} each")
        if count > 1 or (window_left is not None and window_left >= 0):
            named["causal"] = True
            named["window_size"] = _window(named["window_size"][0], causal=True)
        named |= {"num_splits": plan.splits, "return_softmax_lse": return_lse}
        found = _decoded(self._numbers, q, k, v, count, named)
        return self._results(found, after, out, lse)

    run_return_lse = partialmethod(run, return_lse=True)
    begin_forward = plan


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Prompts, or parts of prompts, whose keys lie in pages.

    As for decode; with `use_cuda_graph` no sequence of a later plan is longer than the longest of
    the first.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        _refuse({"jit_args": jit_args, "jit_kwargs": jit_kwargs})
        _refuse({"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf})
        buffers = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._room = _room(*buffers) if use_cuda_graph else None

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        **others: Any,
    ) -> None:
        """Look at the queries and the pages of a step."""
        others |= {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}
        others |= {"pos_encoding_mode": pos_encoding_mode, "q_data_type": q_data_type}
        types = _types({**others, "kv_data_type": kv_data_type})
        settings = _settings(causal, window_left, logits_soft_cap, sm_scale, others)
        queries = _counts("qo_indptr", qo_indptr)
        if len(queries) != paged_kv_last_page_len.shape[0]:
            text = f"qo_indptr has {len(queries)} sequences"
            raise ValueError(f"{text}, and paged_kv_last_page_len {len(paged_kv_last_page_len)}")
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        counts = self._table(*pages, page_size, self._room)
        room = self._numbers["table"].shape[1] * page_size
        longest = self._longest(queries, torch.full_like(counts, room))
        self._put("queries", qo_indptr)
        few = longest[0] * (num_qo_heads // num_kv_heads) <= _FEW and not self._graph
        alike = longest[0] if few and int(queries.min()) == longest[0] > 0 else None
        splits = 1 if others.get("disable_split_kv") else 0
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, len(queries)
        tokens = None if self._graph else int(queries.sum())
        of_keys = head_dim_vo, page_size, None, types
        self._planned = _Plan(*sizes, settings, splits, longest, alike, tokens, *of_keys)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """O, (tokens, heads, dim), and with `return_lse` the log-sum-exp."""
        k, v = self._pages(paged_kv_cache)
        plan, numbers = self._for(q, k, v), self._numbers
        scales = q_scale, k_scale, v_scale
        named, after = self._call(plan, k, scales, window_left, sinks)
        named["return_softmax_lse"] = return_lse
        if plan.alike is not None:
            named["num_splits"] = plan.splits
            found = _decoded(numbers, q, k, v, plan.alike, named)
        else:
            named |= {"block_table": numbers["table"], "seqused_k": numbers["lengths"]}
            starts = numbers["queries"], None
            found = _packed(q, k, v, *starts, *plan.longest, **named)
        return self._results(found, after, out, lse)

    run_return_lse = partialmethod(run, return_lse=True)
    begin_forward = plan


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Prompts whose keys lie behind each other: (tokens, heads, dim), or with HND (heads, tokens,
    dim)."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        _refuse({"jit_args": jit_args, "jit_kwargs": jit_kwargs})
        _refuse({"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf})

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        **others: Any,
    ) -> None:
        """Look at the lengths of a step."""
        others |= {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}
        others |= {"pos_encoding_mode": pos_encoding_mode, "q_data_type": q_data_type}
        types = _types({**others, "kv_data_type": kv_data_type})
        settings = _settings(causal, window_left, logits_soft_cap, sm_scale, others)
        queries, keys = _counts("qo_indptr", qo_indptr), _counts("kv_indptr", kv_indptr)
        if len(queries) != len(keys):
            text = f"qo_indptr has {len(queries)} sequences, and kv_indptr {len(keys)}"
            raise ValueError(text)
        longest = self._longest(queries, keys)
        self._put("queries", qo_indptr)
        self._put("keys", kv_indptr)
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, len(queries)
        tokens = None if self._graph else int(queries.sum())
        of_keys = head_dim_vo, None, None if self._graph else int(kv_indptr[-1]), types
        self._planned = _Plan(*sizes, settings, 0, longest, None, tokens, *of_keys)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """O, (tokens, heads, dim), and with `return_lse` the log-sum-exp."""
        if self._layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        plan, numbers = self._for(q, k, v), self._numbers
        if plan.keys is not None and k.shape[0] < plan.keys:
            raise ValueError(f"k has {k.shape[0]} tokens, and {plan.keys} were planned")
        scales = q_scale, k_scale, v_scale
        named, after = self._call(plan, k, scales, window_left, sinks)
        starts = numbers["queries"], numbers["keys"]
        named["return_softmax_lse"] = return_lse
        found = _packed(q, k, v, *starts, *plan.longest, **named)
        return self._results(found, after, out, lse)

    run_return_lse = partialmethod(run, return_lse=True)
    begin_forward = plan


def _room(indices: Any, last: Any) -> int:
    """The pages that a sequence may have in a CUDA graph."""
    if indices is None or last is None:
        raise ValueError(
            "use_cuda_graph needs the buffers of page indices and of last page lengths: they have "
            "room for the batch and the pages of a graph"
        )
    return max(int(indices.shape[0]) // max(int(last.shape[0]), 1), 1)


def _decoded(
    numbers: Mapping[str, Any], q: Any, k: Any, v: Any, count: int, named: dict[str, Any]
) -> tuple[Any, Any]:
    """O and LSE, (tokens, heads), of sequences that have `count` queries each."""
    named["block_table"], named["cache_seqlens"] = numbers["table"], numbers["lengths"]
    tokens, heads, width = q.shape
    found = flash_attn_with_kvcache(q.view(tokens // count, count, heads, width), k, v, **named)
    out, lse = found if named["return_softmax_lse"] else (found, None)
    rows = out.squeeze(1) if count == 1 else out.flatten(0, 1)
    return rows, lse if lse is None else lse.transpose(1, 2).flatten(0, 1)


def _packed(q: Any, k: Any, v: Any, *sizes: Any, **named: Any) -> tuple[Any, Any]:
    """O and LSE, (tokens, heads), of packed queries."""
    found = flash_attn_varlen_func(q, k, v, *sizes, **named)
    return (found[0], found[1].T) if named["return_softmax_lse"] else (found, None)
