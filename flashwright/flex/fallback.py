"""The same attention by PyTorch: on CPU tensors, and on request where no kernel can be made.

It is FlexAttention, uncompiled on the CPU: every score is in memory at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sink: Any = None,
    **given: Any,
) -> Any:
    """What `flashwright.attention` computes."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    shift = key.shape[2] - query.shape[2]
    score = score_of(softcap, shift, **{n: given.get(n) for n in ("alibi", "bias", "score_mod")})
    mask = mask_of(causal, window, shift, given.get("mask_mod"), given.get("block_mask"))

    def hidden(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        changed = score(s, b, h, q, kv)
        return torch.where(mask(b, h, q, kv), changed, -float("inf"))

    run = flex_attention if query.device.type == "cpu" else torch.compile(flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        out, aux = run(
            query,
            key,
            value,
            score_mod=hidden,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    out, lse = _with_sink(out, aux.lse, sink)
    return (out, lse) if return_lse else out


def _with_sink(out: Any, lse: Any, sink: Any) -> tuple[Any, Any]:
    """A logit for each head that joins the denominator: the output shrinks by its share."""
    if sink is None:
        return out, lse
    joined = torch.logaddexp(lse, sink.float()[None, :, None].expand_as(lse))
    share = torch.exp(lse - joined)
    return (out * share[..., None]).to(out.dtype), joined


def score_of(
    softcap: float | None, shift: int, alibi: Any, bias: Any, score_mod: Function | None
) -> Function:
    """The score of attention by keywords as one function: softcap, ALiBi, bias, then score_mod."""
    axes = bias.dim() if bias is not None else 0

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if alibi is not None:
            s = s + alibi[h] * (kv - q - shift)
        if bias is not None:
            place = (b, h, q, kv)[4 - axes :]
            s = s + bias[tuple(i if n > 1 else 0 for i, n in zip(place, bias.shape, strict=True))]
        return s if score_mod is None else score_mod(s, b, h, q, kv)

    return score


def mask_of(
    causal: bool, window: int | None, shift: int, mask_mod: Function | None, block_mask: Any
) -> Function:
    """The masks of attention by keywords as one function."""
    listed = block_mask.mask_mod if block_mask is not None else None

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = kv >= 0
        if causal:
            seen = seen & (kv <= q + shift)
        if window is not None:
            seen = seen & ((q + shift - kv).abs() < window)
        for more in (mask_mod, listed):
            if more is not None:
                seen = seen & more(b, h, q, kv)
        return seen

    return mask
