"""The gradients of attention in fp64, and how far a kernel may be from them.

With s the scale, x = s q.k, S the score of x (softcap, bias), L the log-sum-exp and P = exp(S - L):

    dP = dO V^T    Delta = rowsum(dO * O)    dS = P * (dP - Delta)    dX = dS * dS/dx
    dQ = s dX K    dK = s dX^T Q    dV = P^T dO
    dSlopes = sum dS * (key - position)      dSink = -sum exp(Sink - L) * Delta

P is exactly 0 for a hidden key, so that hidden keys and rows without keys have gradient exactly 0.
Query heads that share a kv head add up. The layout of tensors is that of oracle.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from flashwright.judge import oracle
from flashwright.judge.gradient_noise import Errors, Gradient, Rows, errors_of
from flashwright.judge.oracle import Array, Dims, Floats, Inputs
from flashwright.sandbox.tensors import DTYPES
from flashwright.spec import AttentionSpec

_ROWS = 512  # rows of scores held at a time


def gradients(spec: AttentionSpec, inputs: Inputs, dims: Dims | None = None) -> dict[str, Gradient]:
    """The gradients of Q, K, V, and of Slopes and Sink if the spec has them, for the gradient dO.

    `inputs` are those of the attention, and dO.
    """
    answer = oracle.attention(spec, inputs, dims)
    of = ["Q", "K", "V", *["Slopes"] * spec.alibi, *["Sink"] * spec.sink]
    shapes = {f"d{name}": inputs[name].shape for name in of}
    value = {name: np.zeros(shape) for name, shape in shapes.items()}
    errors = {name: Errors(*(np.zeros(s) for _ in range(3))) for name, s in shapes.items()}
    batch, heads, q_len, _ = inputs["Q"].shape
    for b, h in itertools.product(range(batch), range(heads)):
        shared = b, h * inputs["K"].shape[1] // heads
        for at, rows in _rows(spec, inputs, dims or {}, answer, b, h):
            where: dict[str, Any] = {
                "dQ": (b, h, at),
                "dK": shared,
                "dV": shared,
                "dSlopes": h,
                "dSink": h,
            }
            for name, part in _parts(rows):
                value[name][where[name]] += part
            for name, found in errors_of(rows, spec.dtype):
                errors[name].add(where[name], found)
    kept = {name: spec.dtype if name in ("dQ", "dK", "dV") else "fp32" for name in value}
    draws = batch * heads * q_len
    return {n: Gradient.of(value[n], errors[n], kept[n], draws) for n in value}


def with_outputs(spec: AttentionSpec, inputs: Inputs, answer: Inputs) -> dict[str, Array]:
    """The inputs of a backward pass: those of the attention and dO, and its outputs as a kernel
    stores them."""
    kept = {"O": DTYPES[spec.output_dtype], "LSE": DTYPES["fp32"]}
    return {**inputs, **{n: answer[n].astype(kept[n]) for n in kept if n in answer}}


def _rows(
    spec: AttentionSpec, inputs: Inputs, dims: Dims, answer: Inputs, b: int, h: int
) -> Iterator[tuple[slice, Rows]]:
    """The rows of one head, in blocks."""
    heads, q_len = inputs["Q"].shape[1:3]
    g = h * inputs["K"].shape[1] // heads
    q, do = (_fp64(inputs[name][b, h]) for name in ("Q", "dO"))
    k, v = (_fp64(inputs[name][b, g]) for name in ("K", "V"))
    p = oracle.positions(spec, q_len, len(k), dims.get("tokens"))
    slope = float(inputs["Slopes"][h]) if spec.alibi else 0.0
    sink = float(inputs["Sink"][h]) if spec.sink else -np.inf
    for start in range(0, q_len, _ROWS):
        at = slice(start, min(start + _ROWS, q_len))
        idx = inputs["Idx"][b, g, at] if spec.branch == "selected" else None
        masked = oracle.scores(spec, q[at], k, p[at], slope, idx)
        score, cap = (q[at] @ k.T) * spec.softmax_scale, spec.softcap or np.inf
        chain = 1 - np.tanh(score / cap) ** 2
        score = cap * np.tanh(score / cap) if spec.softcap else score
        distance = np.arange(len(k))[None, :] - p[at][:, None] if spec.alibi else None
        score = score + slope * distance if distance is not None else score
        lse = answer["LSE"][b, h, at][:, None]
        lse = np.where(np.isfinite(lse), lse, 0.0)
        weights, scale = np.exp(masked - lse), spec.softmax_scale
        given = (q[at], k, v, do[at], answer["O"][b, h, at], scale)
        yield at, Rows(*given, weights, score, lse, chain, cap, distance, slope, sink)


def _parts(rows: Rows) -> Iterator[tuple[str, Array | float]]:
    """What some rows of a head add to each gradient."""
    ds = rows.p * (rows.dp - rows.delta)
    dx = ds * rows.chain
    yield "dQ", rows.scale * dx @ rows.k
    yield "dK", rows.scale * dx.T @ rows.q
    yield "dV", rows.p.T @ rows.do
    if rows.distance is not None:
        yield "dSlopes", float((ds * rows.distance).sum())
    if rows.sink > -np.inf:
        yield "dSink", -float((rows.sink_weight * rows.delta).sum())


def _fp64(array: Array) -> Floats:
    return array.astype(np.float64)
