"""Attention in NumPy as a good kernel has it: fp32 inside, weights and output rounded.

The switches are for those who break it (cpu.py); without them it is what a spec asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import NDArray

from flashwright.spec import AttentionSpec

Array = NDArray[Any]
OUTPUTS: dict[str, Any] = {"fp16": np.float16, "bf16": bfloat16}


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: int | None = None,
    ahead: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Array | None = None,
    sink: Array | None = None,
    weights: Any = None,
    sums: Any = np.float32,
    out: Any = None,
) -> tuple[Array, Array]:
    """O and LSE. `ahead` keys too many are seen; `weights` and `sums` are the types of those."""
    heads, width = q.shape[1], q.shape[3]
    wide = [np.repeat(x.astype(np.float32), heads // k.shape[1], axis=1) for x in (k, v)]
    s = (q.astype(np.float32) @ wide[0].swapaxes(-1, -2)) * (scale or width**-0.5)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    p, key = positions(q, k)
    if slopes is not None:
        s = s + slopes[:, None, None] * (key - p)
    seen = np.ones(s.shape[2:], np.bool_)
    if causal:
        seen &= key <= p + ahead
    if window is not None:
        seen &= np.abs(p - key) < window
    s = np.where(seen, s, -np.inf)
    first = -np.inf if sink is None else sink[:, None, None]
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), first)
    top = np.where(top == -np.inf, 0, top).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        w = np.exp(s - top)
        total = w.sum(axis=-1, keepdims=True) + (0 if sink is None else np.exp(first - top))
        w = w.astype(weights or q.dtype)
        o = added(w, wide[1], sums) / np.where(total == 0, 1, total)
        lse = (top + np.log(total))[..., 0]
    return o.astype(out or q.dtype), lse.astype(np.float32)


def positions(q: Array, k: Array) -> tuple[Array, Array]:
    """Of the queries, as a column, and of the keys, as a row: the last query is the last token."""
    q_len, kv_len = q.shape[2], k.shape[2]
    return np.arange(q_len)[:, None] + (kv_len - q_len), np.arange(kv_len)[None, :]


def added(w: Array, v: Array, dtype: Any) -> Array:
    """The second product; in a narrow type it is summed key by key, as an MMA would."""
    if dtype is np.float32:
        return w.astype(np.float32) @ v
    total: Array = np.zeros((*w.shape[:3], v.shape[3]), dtype)
    for key in range(w.shape[3]):
        total += w[..., key, None].astype(dtype) * v[:, :, key, None].astype(dtype)
    return total


def honest(spec: AttentionSpec) -> Callable[..., Any]:
    """A factory: the attention of any spec without NSA's branches."""

    def call(q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, Array]:
        others = list(rest)
        slopes = others.pop(0) if spec.alibi else None
        sink = others.pop(0) if spec.sink else None
        return attention(
            *(q, k, v),
            causal=spec.causal,
            window=spec.window,
            scale=spec.softmax_scale,
            softcap=spec.softcap,
            slopes=slopes,
            sink=sink,
            weights=float8_e4m3fn if spec.dtype == "fp8" else None,
            out=OUTPUTS[spec.output_dtype],
        )

    return call


def causal(q: Array, k: Array, v: Array) -> Array:
    """What most of the offences are made from."""
    return attention(q, k, v, causal=True)[0]
