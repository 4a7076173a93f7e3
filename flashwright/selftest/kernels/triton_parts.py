"""Honest Triton kernels of other forms: split-KV, with and without atomic sums, and persistent."""

from typing import Any

import torch
import triton
import triton.language as tl

TALL, WIDE = 64, 64
PARTS = 4  # of the keys
MANY_PARTS = 16  # so that the order of their sum shows
PROGRAMS = 64  # of the persistent kernel


@triton.jit
def tile(
    q_ptr,
    k_ptr,
    v_ptr,
    q_row,
    k_row,
    v_row,
    start,
    low,
    high,
    q_len,
    first,
    scale,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Rows from `start` on against the keys from `low` to `high`: sums, maxima and weights' sums.

    Row 0 stands at the position `first`. Scores are in powers of two.
    """
    rows = start + tl.arange(0, tall)
    columns = tl.arange(0, width)[None, :]
    q = tl.load(q_ptr + rows[:, None] * q_row + columns, mask=rows[:, None] < q_len, other=0.0)
    top = tl.full([tall], float("-inf"), tl.float32)
    total = tl.zeros([tall], tl.float32)
    out = tl.zeros([tall, width], tl.float32)
    for begin in range(low, high, wide):
        keys = begin + tl.arange(0, wide)
        inside = keys < high
        k = tl.load(k_ptr + keys[:, None] * k_row + columns, mask=inside[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        seen = inside[None, :] & (keys[None, :] <= rows[:, None] + first)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2(s - safe[:, None])
        fade = tl.exp2(top - safe)
        top = new
        total = total * fade + tl.sum(w, 1)
        v = tl.load(v_ptr + keys[:, None] * v_row + columns, mask=inside[:, None], other=0.0)
        out = out * fade[:, None] + tl.dot(w.to(v.dtype), v)
    return out, top, total


@triton.jit
def persistent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    heads,
    group,
    q_len,
    kv_len,
    blocks,
    tiles,
    scale,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Each program takes one tile of queries after the other, until there are none."""
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = (number % blocks) * tall
        head = (number // blocks) % heads
        batch = (number // blocks // heads).to(tl.int64)
        out, _, total = tile(
            q_ptr + batch * q_batch + head * q_head,
            k_ptr + batch * k_batch + (head // group) * k_head,
            v_ptr + batch * v_batch + (head // group) * v_head,
            q_row,
            k_row,
            v_row,
            start,
            0,
            kv_len,
            q_len,
            kv_len - q_len,
            scale,
            width,
            tall,
            wide,
        )
        rows = start + tl.arange(0, tall)
        tl.store(
            o_ptr
            + batch * o_batch
            + head * o_head
            + rows[:, None] * o_row
            + tl.arange(0, width)[None, :],
            (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(o_ptr.dtype.element_ty),
            mask=rows[:, None] < q_len,
        )


@triton.jit
def part_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    top_ptr,
    total_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    group,
    q_len,
    kv_len,
    step,
    every,
    scale,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """One tile of queries against one part of the keys, into the workspace."""
    start = tl.program_id(0) * tall
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    low = tl.program_id(2) * step
    out, top, total = tile(
        q_ptr + batch * q_batch + head * q_head,
        k_ptr + batch * k_batch + (head // group) * k_head,
        v_ptr + batch * v_batch + (head // group) * v_head,
        q_row,
        k_row,
        v_row,
        start,
        low,
        tl.minimum(low + step, kv_len),
        q_len,
        kv_len - q_len,
        scale,
        width,
        tall,
        wide,
    )
    rows = start + tl.arange(0, tall)
    at = tl.program_id(2).to(tl.int64) * every + tl.program_id(1) * q_len + rows
    columns = tl.arange(0, width)[None, :]
    tl.store(part_ptr + at[:, None] * width + columns, out, mask=rows[:, None] < q_len)
    tl.store(top_ptr + at, top, mask=rows < q_len)
    tl.store(total_ptr + at, total, mask=rows < q_len)


@triton.jit
def combine_kernel(
    part_ptr, top_ptr, total_ptr, o_ptr, every, parts: tl.constexpr, width: tl.constexpr
):
    """Add the parts of one row, each weighed by its maximum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    n = tl.arange(0, parts).to(tl.int64)
    tops = tl.load(top_ptr + n * every + row)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights * tl.load(total_ptr + n * every + row), 0)
    found = tl.load(part_ptr + (n[:, None] * every + row) * width + columns[None, :])
    out = tl.sum(weights[:, None] * found, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + row * width + columns, out.to(o_ptr.dtype.element_ty))


@triton.jit
def add_kernel(
    part_ptr,
    top_ptr,
    total_ptr,
    sum_ptr,
    weight_ptr,
    every,
    parts: tl.constexpr,
    width: tl.constexpr,
):
    """Add one part of one row to the row's sums: in whichever order the parts come."""
    row = tl.program_id(0).to(tl.int64) // parts
    columns = tl.arange(0, width)
    top = tl.max(tl.load(top_ptr + tl.arange(0, parts).to(tl.int64) * every + row), 0)
    at = tl.program_id(0).to(tl.int64) % parts * every + row
    weight = tl.exp2(tl.load(top_ptr + at) - tl.where(top == float("-inf"), 0.0, top))
    part = tl.load(part_ptr + at * width + columns)
    tl.atomic_add(sum_ptr + row * width + columns, weight * part)
    tl.atomic_add(weight_ptr + row, weight * tl.load(total_ptr + at))


@triton.jit
def divide_kernel(sum_ptr, weight_ptr, o_ptr, width: tl.constexpr):
    """The sums of one row by its weights' sum."""
    row = tl.program_id(0).to(tl.int64)
    at = row * width + tl.arange(0, width)
    total = tl.load(weight_ptr + row)
    out = tl.load(sum_ptr + at) / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + at, out.to(o_ptr.dtype.element_ty))


def persistent(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by as many programs as stay on the GPU."""
    batch, heads, q_len, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    blocks = triton.cdiv(q_len, TALL)
    tiles = blocks * heads * batch
    persistent_kernel[(min(PROGRAMS, tiles),)](
        *(q, k, v, out),
        *(s for x in (q, k, v, out) for s in x.stride()[:3]),
        *(heads, heads // k.shape[1], q_len, k.shape[2], blocks, tiles, width**-0.5),
        width=width,
        tall=TALL,
        wide=WIDE,
    )
    return out


def split_kv(q: Any, k: Any, v: Any) -> Any:
    """Causal attention in two launches: parts of the keys, then their sum."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel():
        parts, tops, totals, every = _parts(q, k, v, PARTS)
        more = {"parts": PARTS, "width": q.shape[3]}
        combine_kernel[(every,)](parts, tops, totals, out, every, **more)
    return out


def atomic_sums(q: Any, k: Any, v: Any) -> Any:
    """The same with sums by atomic additions: two runs differ by rounding."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel():
        parts, tops, totals, every = _parts(q, k, v, MANY_PARTS)
        width = q.shape[3]
        sums = torch.zeros((every, width), dtype=torch.float32, device=q.device)
        weights = torch.zeros(every, dtype=torch.float32, device=q.device)
        add_kernel[(MANY_PARTS * every,)](
            *(parts, tops, totals, sums, weights, every), parts=MANY_PARTS, width=width
        )
        divide_kernel[(every,)](sums, weights, out, width=width)
    return out


def _parts(q: Any, k: Any, v: Any, count: int) -> tuple[Any, Any, Any, int]:
    """The sums, maxima and weights' sums of `count` parts of the keys, and the rows of each."""
    batch, heads, q_len, width = q.shape
    every = batch * heads * q_len
    parts = torch.empty((count, every, width), dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, count, every), dtype=torch.float32, device=q.device)
    step = triton.cdiv(triton.cdiv(k.shape[2], count), WIDE) * WIDE
    part_kernel[(triton.cdiv(q_len, TALL), batch * heads, count)](
        *(q, k, v, parts, tops, totals),
        *(s for x in (q, k, v) for s in x.stride()[:3]),
        *(heads, heads // k.shape[1], q_len, k.shape[2], step, every, width**-0.5),
        width=width,
        tall=TALL,
        wide=WIDE,
    )
    return parts, tops, totals, every
