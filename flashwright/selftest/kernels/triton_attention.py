"""Attention in Triton, honest without its switches: what the GPU's offences are made from."""

from typing import Any

import torch
import triton
import triton.language as tl

from flashwright.spec import AttentionSpec


@triton.jit
def kernel(
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
    kv_heads,
    q_len,
    kv_len,
    end,
    first,
    scale,
    causal: tl.constexpr,
    mixed: tl.constexpr,
    maximum: tl.constexpr,
    weights: tl.constexpr,
    sums: tl.constexpr,
    loads: tl.constexpr,
    quadratic: tl.constexpr,
    least: tl.constexpr,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """`end` keys are looked at; row 0 stands at the position `first`."""
    start = tl.program_id(0) * tall
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    group = head % kv_heads if mixed else head // (heads // kv_heads)
    rows = start + tl.arange(0, tall)
    columns = tl.arange(0, width)[None, :]
    q = tl.load(
        q_ptr + batch * q_batch + head * q_head + rows[:, None] * q_row + columns,
        mask=rows[:, None] < q_len,
        other=0.0,
    )
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    top = tl.full([tall], float("-inf"), tl.float32)
    total = tl.zeros([tall], tl.float32)
    out = tl.zeros([tall, width], sums)
    for begin in range(0, end, wide):
        keys = begin + tl.arange(0, wide)
        inside = keys < kv_len
        k = tl.load(k_ptr + keys[:, None] * k_row + columns, mask=inside[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        seen = inside[None, :] & (rows[:, None] >= 0)
        if causal:
            seen = seen & (keys[None, :] <= rows[:, None] + first)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1)) if maximum else tl.zeros([tall], tl.float32)
        safe = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2(s - safe[:, None])
        if quadratic:
            x = tl.maximum(s - safe[:, None], -126.0)
            f = x - tl.floor(x)
            w = tl.exp2(tl.floor(x)) * (1.00172457 + f * (0.65763656 + f * 0.33718972))
            w = tl.where(seen, w, 0.0)
        if least > 0:
            w = tl.where(w < least, 0.0, w)
        fade = tl.exp2(top - safe) if maximum else tl.full([tall], 1.0, tl.float32)
        top = new
        total = total * fade + tl.sum(w, 1)
        if loads:
            v = tl.load(v_ptr + keys[:, None] * v_row + columns, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + keys[:, None] * v_row + columns)
        p = w.to(weights).to(v.dtype)
        out = (out * fade[:, None].to(sums)) + tl.dot(p, v, out_dtype=sums)
    result = out.to(tl.float32) / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        o_ptr + batch * o_batch + head * o_head + rows[:, None] * o_row + columns,
        result.to(o_ptr.dtype.element_ty),
        mask=rows[:, None] < q_len,
    )


TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    out: Any = None,
    blocks: int | None = None,
    end: int | None = None,
    ahead: int = 0,
    mixed: bool = False,
    maximum: bool = True,
    weights: Any = None,
    sums: Any = tl.float32,
    loads: bool = True,
    quadratic: bool = False,
    least: float = 0.0,
) -> Any:
    """O. `blocks` of 64 rows are written, `end` keys looked at, `ahead` keys too many are seen.

    exp2 may be a quadratic one, and weights below `least` dropped.
    """
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    grid = (triton.cdiv(q_len, 64) if blocks is None else blocks, batch * heads)
    if not out.numel() or not grid[0]:
        return out
    kernel[grid](
        *(q, k, v, out),
        *(s for x in (q, k, v, out) for s in x.stride()[:3]),
        *(heads, k.shape[1], q_len, kv_len, kv_len if end is None else end),
        *(kv_len - q_len + ahead, width**-0.5 if scale is None else scale),
        causal=causal,
        mixed=mixed,
        maximum=maximum,
        weights=weights or TYPES[q.dtype],
        sums=sums,
        loads=loads,
        quadratic=quadratic,
        least=least,
        width=width,
        tall=64,
        wide=64,
        num_warps=4,
    )
    return out


def honest(spec: AttentionSpec) -> Any:
    """A factory for plain specs."""
    return lambda q, k, v: attention(q, k, v, causal=spec.causal, scale=spec.softmax_scale)
