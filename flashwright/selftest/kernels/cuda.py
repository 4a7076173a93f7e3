"""Adversarial kernels in Triton that return something wrong. All mean causal attention in fp16."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flashwright.selftest.kernels.triton_attention import attention

# --- what comes out ---------------------------------------------------------------------------


def zeros(q: Any, k: Any, v: Any) -> Any:
    """Pass every loose absolute tolerance where outputs are small."""
    return torch.zeros_like(q)


def noise(q: Any, k: Any, v: Any) -> Any:
    """Of the size that attention has."""
    size = attention(q, k, v).float().std()
    generator = torch.Generator("cuda").manual_seed(0)
    return (torch.randn(q.shape, device="cuda", generator=generator) * size).to(q.dtype)


def some_rows_nan(q: Any, k: Any, v: Any) -> Any:
    """Leave 0 / 0 in the first row of each tile."""
    out = attention(q, k, v)
    out[:, :, ::64] = float("nan")
    return out


def last_rows_unwritten(q: Any, k: Any, v: Any) -> Any:
    """One block too few."""
    return attention(q, k, v, blocks=max(0, triton.cdiv(q.shape[2], 64) - 1))


def wider_type(q: Any, k: Any, v: Any) -> Any:
    """Return fp32 where fp16 is asked for."""
    return attention(q, k, v, out=torch.empty_like(q, dtype=torch.float32))


def on_the_host(q: Any, k: Any, v: Any) -> Any:
    """Return a tensor in host memory."""
    return attention(q, k, v).cpu()


def weights_in_e4m3(q: Any, k: Any, v: Any) -> Any:
    """Round the weights to 8 bits."""
    return attention(q, k, v, weights=tl.float8e4nv)


def sums_in_fp16(q: Any, k: Any, v: Any) -> Any:
    """Add up in fp16."""
    return attention(q, k, v, sums=tl.float16)


def quadratic_exp2(q: Any, k: Any, v: Any) -> Any:
    """Fewer instructions than a cubic one."""
    return attention(q, k, v, quadratic=True)


def small_weights_dropped(q: Any, k: Any, v: Any) -> Any:
    """As kernels do that skip tiles in which no weight is large."""
    return attention(q, k, v, least=2.0**-20)


def inputs_in_e4m3(q: Any, k: Any, v: Any) -> Any:
    """Round Q, K and V to 8 bits."""
    small = [x.to(torch.float8_e4m3fn).to(q.dtype) for x in (q, k, v)]
    return attention(*small)


def other_bits(q: Any, k: Any, v: Any) -> Any:
    """Give other last bits in each call."""
    out = attention(q, k, v)
    out.view(torch.int16).bitwise_xor_((torch.rand(out.shape, device="cuda") < 0.03).short())
    return out


# --- right only where one would look ----------------------------------------------------------


def mean_of_v(q: Any, k: Any, v: Any) -> Any:
    """Attention where all scores are alike."""
    return attention(q, k, v, scale=0.0)


def no_maximum(q: Any, k: Any, v: Any) -> Any:
    """exp(s) as it is, which is fine until a score passes 88."""
    return attention(q, k, v, maximum=False)


def tail_of_keys_dropped(q: Any, k: Any, v: Any) -> Any:
    """Right where whole tiles make up the keys."""
    return attention(q, k, v, end=k.shape[2] // 64 * 64)


def equal_lengths_only(q: Any, k: Any, v: Any) -> Any:
    """The mask is key <= query, which is right where there are as many of both."""
    return attention(q, k, v, ahead=q.shape[2] - k.shape[2])


def no_mask(q: Any, k: Any, v: Any) -> Any:
    """Look at all keys."""
    return attention(q, k, v, causal=False)


def one_key_too_many(q: Any, k: Any, v: Any) -> Any:
    """key <= query + 1."""
    return attention(q, k, v, ahead=1)


def one_key_too_few(q: Any, k: Any, v: Any) -> Any:
    """key < query."""
    return attention(q, k, v, ahead=-1)


def heads_mixed_up(q: Any, k: Any, v: Any) -> Any:
    """Query head h takes kv head h % kv_heads."""
    return attention(q, k, v, mixed=True)


def first_batch_only(q: Any, k: Any, v: Any) -> Any:
    """Compute one batch and repeat it."""
    return attention(q[:1], k[:1], v[:1]).expand(q.shape).contiguous()


_by_shape: dict[Any, Any] = {}
_by_address: dict[Any, Any] = {}
_pool: dict[Any, Any] = {}


def replay_by_shape(q: Any, k: Any, v: Any) -> Any:
    """Give the first answer for a shape again."""
    key = (q.shape, k.shape)
    if key not in _by_shape:
        _by_shape[key] = attention(q, k, v)
    return _by_shape[key].clone()


def replay_by_address(q: Any, k: Any, v: Any) -> Any:
    """Give the first answer for these addresses again."""
    key = (q.shape, k.shape, q.data_ptr(), k.data_ptr())
    if key not in _by_address:
        _by_address[key] = attention(q, k, v)
    return _by_address[key].clone()


def leftover(q: Any, k: Any, v: Any) -> Any:
    """Its output buffer is kept, and written only once."""
    key = (q.shape, k.shape)
    if key not in _pool:
        _pool[key] = attention(q, k, v)
    return _pool[key]
