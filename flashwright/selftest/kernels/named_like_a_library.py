"""An honest Triton kernel whose name is like those of libraries: flash_fwd_softmax_kernel."""

from typing import Any

import torch
import triton
import triton.language as tl

from flashwright.selftest.kernels.triton_parts import TALL, WIDE, tile


@triton.jit
def flash_fwd_softmax_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    heads,
    group,
    q_len,
    kv_len,
    scale,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """One tile of queries; all tensors are contiguous."""
    start = tl.program_id(0) * tall
    number = tl.program_id(1).to(tl.int64)
    shared = number // heads * (heads // group) + number % heads // group
    out, _, total = tile(
        q_ptr + number * q_len * width,
        k_ptr + shared * kv_len * width,
        v_ptr + shared * kv_len * width,
        width,
        width,
        width,
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
        o_ptr + (number * q_len + rows[:, None]) * width + tl.arange(0, width)[None, :],
        (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(o_ptr.dtype.element_ty),
        mask=rows[:, None] < q_len,
    )


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by the kernel above."""
    batch, heads, q_len, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    q, k, v = (x.contiguous() for x in (q, k, v))
    flash_fwd_softmax_kernel[(triton.cdiv(q_len, TALL), batch * heads)](
        *(q, k, v, out),
        *(heads, heads // k.shape[1], q_len, k.shape[2], width**-0.5),
        width=width,
        tall=TALL,
        wide=WIDE,
    )
    return out
