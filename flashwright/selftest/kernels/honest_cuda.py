"""Honest GPU kernels with unusual habits. All mean causal attention, and call no library."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flashwright.selftest.kernels.graphs import replayed
from flashwright.selftest.kernels.triton_attention import TYPES, attention, kernel

_kept: dict[Any, Any] = {}
_aside: list[Any] = []


def plain(q: Any, k: Any, v: Any) -> Any:
    """One launch of one kernel."""
    return attention(q, k, v)


def on_a_stream_that_waits(q: Any, k: Any, v: Any) -> Any:
    """A stream of its own waits for the caller's, and the caller's for it."""
    if not _aside:
        _aside.append(torch.cuda.Stream())
    out, caller = torch.empty_like(q), torch.cuda.current_stream()
    _aside[0].wait_stream(caller)
    with torch.cuda.stream(_aside[0]):
        attention(q, k, v, out=out)
    caller.wait_stream(_aside[0])
    return out


def graph(q: Any, k: Any, v: Any) -> Any:
    """A CUDA graph is captured for each shape and replayed."""
    return replayed(attention, q, k, v)


def workspace(q: Any, k: Any, v: Any) -> Any:
    """Its output buffer is kept from call to call, and written anew in each."""
    if q.shape not in _kept:
        _kept[q.shape] = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return attention(q, k, v, out=_kept[q.shape])


def transposed_output(q: Any, k: Any, v: Any) -> Any:
    """O lies as (batch, length, heads, dim), and is returned as a view in the usual order."""
    batch, heads, q_len, width = q.shape
    out = torch.empty((batch, q_len, heads, width), dtype=q.dtype, device=q.device)
    return attention(q, k, v, out=out.transpose(1, 2))


def padded_output(q: Any, k: Any, v: Any) -> Any:
    """Rows are padded to a whole tile, and the output is a slice of that."""
    batch, heads, q_len, width = q.shape
    rows = triton.cdiv(max(q_len, 1), 64) * 64
    out = torch.zeros((batch, heads, rows, width), dtype=q.dtype, device=q.device)
    return attention(q, k, v, out=out[:, :, :q_len])


def takes_its_own_head_dim_only(q: Any, k: Any, v: Any) -> Any:
    """Raise where the problem is outside of the spec that it was written for."""
    if q.shape[3] != 64 or q.dtype != torch.float16:
        raise ValueError("the head dim must be 64, the type fp16")
    return attention(q, k, v)


def two_halves(q: Any, k: Any, v: Any) -> Any:
    """Two launches, one for each half of the heads."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    half, shared = k.shape[1] // 2, q.shape[1] // k.shape[1]
    for first, last in ((0, half), (half, k.shape[1])):
        part = slice(first * shared, last * shared)
        attention(q[:, part], k[:, first:last], v[:, first:last], out=out[:, part])
    return out


_autotuned = triton.autotune(
    configs=[
        triton.Config({"tall": 64, "wide": 64}, num_warps=4),
        triton.Config({"tall": 128, "wide": 64}, num_warps=8),
        triton.Config({"tall": 64, "wide": 32}, num_warps=4),
    ],
    key=["width"],
)(kernel)


def autotuned(q: Any, k: Any, v: Any) -> Any:
    """Triton measures three configurations in the first call, and keeps the fastest."""
    batch, heads, q_len, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    _autotuned[lambda chosen: (triton.cdiv(q_len, chosen["tall"]), batch * heads)](
        *(q, k, v, out),
        *(s for x in (q, k, v, out) for s in x.stride()[:3]),
        *(heads, k.shape[1], q_len, k.shape[2], k.shape[2], k.shape[2] - q_len, width**-0.5),
        causal=True,
        mixed=False,
        maximum=True,
        weights=TYPES[q.dtype],
        sums=tl.float32,
        loads=True,
        quadratic=False,
        least=0.0,
        width=width,
    )
    return out
