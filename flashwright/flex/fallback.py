"""The same attention by PyTorch: on CPU tensors, and on request where no kernel can be made.

On the CPU every score is in memory at once, and gradients work; on a GPU it is FlexAttention,
compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashwright.flex.task import check_settings, check_shapes
from flashwright.pytorch.reference import softmax

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
    """What `flashwright.attention` computes. Raises ValueError for what does not fit."""
    named = {"q": query, "k": key, "v": value, "slopes": given.get("alibi"), "sink": sink}
    if given.get("bias") is not None:
        named["bias"] = given["bias"]
    check_shapes(named)
    check_settings(window, softcap, scale)
    shift = key.shape[2] - query.shape[2]
    score = score_of(softcap, shift, **{n: given.get(n) for n in ("alibi", "bias", "score_mod")})
    mask = mask_of(causal, window, shift, given.get("mask_mod"))
    run = dense if query.device.type == "cpu" else _compiled
    out, lse = run(query, key, value, score, mask, scale, sink)
    return (out, lse) if return_lse else out


def dense(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Function | None,
    mask_mod: Function | None,
    scale: float | None = None,
    sink: Any = None,
    places: Sequence[Any] | None = None,
) -> tuple[Any, Any]:
    """O and LSE in fp32 (fp64 for fp64 inputs), every score in memory. O has the query's type,
    and is bf16 for fp8, as kernels give it.

    `places` are the batches, heads, queries and keys that the tensors hold; all if not given.
    """
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    shared = query.shape[1] // key.shape[1]
    k, v = (t.to(kind).repeat_interleave(shared, dim=1) for t in (key, value))
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    scores = query.to(kind) @ k.transpose(2, 3) * factor
    if places is None:
        places = [torch.arange(n, device=query.device) for n in scores.shape]
    if score_mod is not None:
        scores = over(score_mod, with_score=True)(scores, *places).to(kind)
    if mask_mod is not None:
        seen = over(mask_mod, with_score=False)(*places)
        if seen.dtype != torch.bool:
            raise TypeError(f"mask_mod gives {seen.dtype}: it must say True or False (torch.bool)")
        scores = scores.masked_fill(~seen, -math.inf)
    weights, lse = softmax(scores, sink)
    return (weights @ v).to(torch.bfloat16 if query.itemsize == 1 else query.dtype), lse


def over(function: Function, with_score: bool) -> Function:
    """A function of one element over whole tensors: (score), batches, heads, rows, keys."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    first = (0,) if with_score else ()
    mapped = function
    for axis in reversed(range(4)):
        indices = tuple(0 if n == axis else None for n in range(4))
        mapped = torch.vmap(mapped, in_dims=(*first, *indices))

    def run(*args: Any) -> Any:
        sizes = [len(places) for places in args[-4:]]
        if not all(sizes):  # vmap cannot look up anything for no element
            return args[0] if with_score else torch.ones(sizes, dtype=torch.bool)
        with TransformGetItemToIndex():
            return mapped(*args)

    return run


def _compiled(
    query: Any,
    key: Any,
    value: Any,
    score: Function,
    mask: Function,
    scale: float | None,
    sink: Any,
) -> tuple[Any, Any]:
    """FlexAttention, compiled. A sink joins the denominator: the output shrinks by its share."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def hidden(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(mask(b, h, q, kv), score(s, b, h, q, kv), -math.inf)

    out, aux = torch.compile(flex_attention)(
        query,
        key,
        value,
        score_mod=hidden,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sink is None:
        return out, aux.lse
    lse = torch.logaddexp(aux.lse, sink.float()[:, None])
    return (out * torch.exp(aux.lse - lse)[..., None]).to(out.dtype), lse


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
            place = tuple(i if n > 1 else 0 for i, n in zip(place, bias.shape, strict=True))
            s = s + (bias[place] if place else bias)
        return s if score_mod is None else score_mod(s, b, h, q, kv)

    return score


def mask_of(causal: bool, window: int | None, shift: int, mask_mod: Function | None) -> Function:
    """The masks of attention by keywords as one function."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = kv >= 0
        if causal:
            seen = seen & (kv <= q + shift)
        if window is not None:
            seen = seen & ((q + shift - kv).abs() < window)
        return seen if mask_mod is None else seen & mask_mod(b, h, q, kv)

    return mask
