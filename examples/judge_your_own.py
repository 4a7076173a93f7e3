"""Your own kernel before the judge: an attention forward pass in Triton, and the verdict on it.

    python examples/judge_your_own.py

The kernel takes any length and batch, grouped heads, fp16 and bf16, and head dims of 16 to 256 that
are powers of two. Needs an NVIDIA GPU, PyTorch and Triton. Exit code 0: accepted; 1: rejected; 2:
something is missing here.
"""

import sys

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    print(f"{error.name} is not installed: pip install torch triton", file=sys.stderr)
    sys.exit(2)

import flashwright

if not torch.cuda.is_available():
    print("this example runs a Triton kernel, and there is no NVIDIA GPU here", file=sys.stderr)
    sys.exit(2)


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, q_len, kv_len, scale,
    width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """One block: `tall` queries of one head, over the keys they may see, `wide` at a time."""
    start = tl.program_id(0) * tall
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head

    rows = start + tl.arange(0, tall)
    columns = tl.arange(0, width)
    written = rows[:, None] < q_len
    q_at = batch * q_batch + head * q_head + rows[:, None] * q_row + columns[None, :]
    q = tl.load(q_ptr + q_at, mask=written, other=0.0)

    position = rows + kv_len - q_len  # the last query is the last token
    end = tl.minimum(kv_len, start + tall + kv_len - q_len)  # no block sees further
    top = tl.full([tall], float("-inf"), tl.float32)
    total = tl.zeros([tall], tl.float32)
    out = tl.zeros([tall, width], tl.float32)
    for first in range(0, end, wide):
        keys = first + tl.arange(0, wide)
        inside = keys[:, None] < kv_len
        k = tl.load(k_ptr + keys[:, None] * k_row + columns[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * v_row + columns[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)  # for exp2
        seen = (keys[None, :] <= position[:, None]) & (keys[None, :] < kv_len)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees nothing yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        top = highest
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = batch * o_batch + head * o_head + rows[:, None] * o_row + columns[None, :]
    tl.store(o_ptr + o_at, out.to(o_ptr.dtype.element_ty), mask=written)


def attention(q, k, v):
    """Causal attention; Q, K and V are (batch, heads, length, dim), and so is what is returned."""
    batch, heads, q_len, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    sizes = (heads, heads // k.shape[1], q_len, k.shape[2], width**-0.5)
    tiles = {"width": width, "tall": 64, "wide": 32 if width > 128 else 64}
    grid = (triton.cdiv(q_len, 64), batch * heads)
    forward[grid](q, k, v, out, *strides, *sizes, **tiles, num_warps=4)
    return out


verdict = flashwright.verify(attention, "causal, heads=32, kv_heads=8, head_dim=128, dtype=bf16")
print(verdict)
for offence in verdict.offences:
    print(f"flashwright explain {offence.diagnostic.code}  # {offence.name}")
sys.exit(0 if verdict.ok else 1)
