"""The gradients of attention in fp64, and how far a kernel may be from them.

With s the scale, x = s q.k, S the score of x (softcap, bias), L the log-sum-exp and P = exp(S - L):

    dP = dO V^T    Delta = rowsum(dO * O)    dS = P * (dP - Delta)    dX = dS * dS/dx
    dQ = s dX K    dK = s dX^T Q    dV = P^T dO
    dSlopes = sum dS * (key - position)      dSink = -sum exp(Sink - L) * Delta

P is exactly 0 for a hidden key, so that hidden keys and rows without keys have gradient exactly 0.
Query heads that share a kv head add up. The layout of tensors is that of oracle.py. As in
oracle_device.py, the inputs are arrays of NumPy, or tensors of PyTorch on any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from flashwright.judge import oracle_device
from flashwright.judge.gradient_noise import Errors, Gradient, Rows, errors_of
from flashwright.judge.oracle import Dims, Floats
from flashwright.judge.oracle_device import count, fp64, positions, scores, seen, zeros
from flashwright.spec import AttentionSpec

_ROWS = 512  # rows of scores held at a time
_NARROW = ("dQ", "dK", "dV")
"""The gradients that have the type of the inputs; the others are fp32."""


def names(spec: AttentionSpec) -> list[str]:
    """The inputs whose gradients are known: Q, K, V, and Slopes and Sink if the spec has them."""
    return ["Q", "K", "V", *["Slopes"] * spec.alibi, *["Sink"] * spec.sink]


def stored_as(spec: AttentionSpec, name: str) -> str:
    """The element type of an output: O, LSE or a gradient."""
    return spec.output_dtype if name == "O" or name in _NARROW else "fp32"


def gradients(
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    dims: Dims | None = None,
    lib: ModuleType = np,
) -> dict[str, Gradient]:
    """The gradients of the spec's inputs, for the gradient dO, as arrays.

    `inputs` are those of the attention, and dO; `lib` is the library that they are of.
    """
    answer = oracle_device.attention(lib, spec, inputs, dims or {})
    shapes = {f"d{name}": tuple(inputs[name].shape) for name in names(spec)}
    q = inputs["Q"]
    value = {name: zeros(lib, q, *shape) for name, shape in shapes.items()}
    errors = {n: Errors(*(zeros(lib, q, *shape) for _ in range(3))) for n, shape in shapes.items()}
    batch, heads, q_len, _ = q.shape
    for b, h in itertools.product(range(batch), range(heads)):
        shared = b, h * inputs["K"].shape[1] // heads
        for at, rows in _rows(lib, spec, inputs, dims or {}, answer, b, h):
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
    draws = batch * heads * q_len
    return {
        n: Gradient.of(_array(value[n]), errors[n].moved(_array), stored_as(spec, n), draws)
        for n in value
    }


def _rows(
    lib: Any,
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    dims: Dims,
    answer: Mapping[str, Any],
    b: int,
    h: int,
) -> Iterator[tuple[slice, Rows]]:
    """The rows of one head, in blocks."""
    heads, q_len = inputs["Q"].shape[1:3]
    g = h * inputs["K"].shape[1] // heads
    k, v = (fp64(lib, inputs[name][b, g]) for name in ("K", "V"))
    slope = float(inputs["Slopes"][h]) if spec.alibi else 0.0
    sink = float(inputs["Sink"][h]) if spec.sink else -np.inf
    scale, cap = spec.softmax_scale, spec.softcap or np.inf
    for start in range(0, q_len, _ROWS):
        at = slice(start, min(start + _ROWS, q_len))
        q, do = (fp64(lib, inputs[name][b, h, at]) for name in ("Q", "dO"))
        p = positions(lib, spec, inputs, dims, at)
        score = scores(lib, spec, q, k, p, inputs, h)
        chain = 1 - lib.tanh((q @ k.T) * scale / cap) ** 2
        distance = count(lib, k, 0, len(k))[None, :] - p if spec.alibi else None
        lse = answer["LSE"][b, h, at][:, None]
        lse = lib.where(lib.isfinite(lse), lse, 0.0)
        masked = lib.where(seen(lib, spec, inputs, p, (b, g, at)), score, -np.inf)
        given = (q, k, v, do, answer["O"][b, h, at], scale)
        yield at, Rows(*given, lib.exp(masked - lse), score, lse, chain, cap, distance, slope, sink)


def _parts(rows: Rows) -> Iterator[tuple[str, Any]]:
    """What some rows of a head add to each gradient."""
    ds = rows.p * (rows.dp - rows.delta)
    dx = ds * rows.chain
    yield "dQ", rows.scale * dx @ rows.k
    yield "dK", rows.scale * dx.T @ rows.q
    yield "dV", rows.p.T @ rows.do
    if rows.distance is not None:
        yield "dSlopes", (ds * rows.distance).sum()
    if rows.sink > -np.inf:
        yield "dSink", -(rows.sink_weight * rows.delta).sum()


def _array(x: Any) -> Floats:
    """A tensor of either library as an array."""
    found: Floats = x.cpu().numpy() if hasattr(x, "cpu") else x
    return found
