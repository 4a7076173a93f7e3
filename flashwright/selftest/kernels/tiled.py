"""FlashAttention in NumPy, tile by tile, with the shortcuts that kernels take to be faster.

Each kernel at the end is a factory: it takes a spec and gives a callable for the judge. The HONEST
ones differ in their exp2 and in the order of their sums; the others save work that a spec asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import NDArray

from flashwright.selftest.kernels.honest import OUTPUTS, Array, positions
from flashwright.spec import AttentionSpec

Floats = NDArray[np.float32]
Exp2 = Callable[[Floats], Floats]
TILE, STEP = 64, 16  # keys of a tile, terms that one matrix instruction adds

# --- exp2 -------------------------------------------------------------------------------------


CUBIC = (1.0, 0.695146143, 0.227564394, 0.07711909)
"""FlashAttention-4's polynomial for 2^f, 0 <= f < 1: 0.9e-4 off at most."""
QUADRATIC = (1.00172457, 0.65763656, 0.33718972)
"""The best one: 17e-4 off at most."""


def polynomial(x: Floats, coefficients: Sequence[float]) -> Floats:
    """The whole part goes into the exponent, the rest through a polynomial."""
    x = np.maximum(x, np.float32(-127))
    whole = np.floor(x)
    value = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * (x - whole) + np.float32(coefficient)
    return np.ldexp(value, whole.astype(np.int32))


def approx(x: Floats) -> Floats:
    """As ex2.approx.ftz.f32 is: up to 2 ulp off."""
    exact = np.exp2(x.astype(np.float64))
    off = 2.0**-22 * np.sin(1e4 * x.astype(np.float64))
    return (exact * (1 + off)).astype(np.float32)


def schraudolph(x: Floats) -> Floats:
    """A line between powers of two: the bits of a float, made from an integer."""
    x = np.maximum(x, np.float32(-126))
    return ((x + np.float32(127 - 0.043)) * np.float32(2**23)).astype(np.int32).view(np.float32)


def truncated(x: Floats) -> Floats:
    """fp32 cut off to bf16."""
    cut: Floats = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


# --- the kernel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiled:
    """One FlashAttention; the defaults are as exact as kernels are."""

    spec: AttentionSpec
    exp2: Exp2 = approx
    least: float = 0.0
    """Weights below this part of the greatest so far are dropped."""
    lazy: float = 0.0
    """By how much, in powers of two, the maximum may grow before O is scaled."""
    splits: int = 1
    factor: float = 1.0
    score_sums: Any = np.float32
    value_sums: Any = np.float32
    weight_type: Any = None
    """By default that of the inputs."""
    narrow_scores: bool = False
    narrow_exp2: bool = False
    cut: bool = False
    """Weights are cut off, not rounded."""
    narrow_total: bool = False
    """The sum of weights is that of the rounded ones: good enough for O, not for LSE."""

    def __call__(self, q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, ...]:
        """O, and LSE where the spec has it."""
        others, spec = list(rest), self.spec
        slopes = others.pop(0) if spec.alibi else None
        sink = others.pop(0) if spec.sink else None
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        s = self._scores(q, k, slopes)
        bounds = np.linspace(0, s.shape[3], self.splits + 1).astype(int)
        parts = [self._part(s[..., a:b], v[:, :, a:b]) for a, b in pairwise(bounds)]
        out, lse = self._joined(parts, sink)
        return (out, lse) if spec.lse and not self.narrow_total else (out,)

    def _scores(self, q: Array, k: Array, slopes: Array | None) -> Floats:
        """In powers of two; -inf where masked."""
        spec, log2e = self.spec, np.float32(math.log2(math.e))
        s = summed(q.astype(np.float32), k.astype(np.float32).swapaxes(-1, -2), self.score_sums)
        s = s * np.float32(spec.softmax_scale)
        if self.narrow_scores:
            s = s.astype(q.dtype).astype(np.float32)
        if spec.softcap is not None:
            s = np.float32(spec.softcap) * np.tanh(s / np.float32(spec.softcap))
        p, key = positions(q, k)
        if slopes is not None:
            s = s + slopes[:, None, None] * (key - p).astype(np.float32)
        seen = np.ones(s.shape[2:], np.bool_)
        if spec.causal:
            seen &= key <= p
        if spec.window is not None:
            seen &= (np.abs(p - key) < spec.window) | (key < (spec.sink_tokens or 0))
        return np.where(seen, s * log2e, np.float32(-np.inf)).astype(np.float32)

    def _part(self, s: Floats, v: Array) -> tuple[Floats, Floats, Floats]:
        """The maximum, the sum of weights and the unscaled O of some keys."""
        top = np.full((*s.shape[:3], 1), -np.inf, np.float32)
        total = np.zeros_like(top)
        out = np.zeros((*s.shape[:3], v.shape[3]), np.float32)
        for start in range(0, s.shape[3], TILE):
            tile = s[..., start : start + TILE]
            new = np.maximum(top, tile.max(axis=-1, keepdims=True))
            with np.errstate(invalid="ignore"):
                new = np.where(new - top > self.lazy, new, top)
                drop = np.exp2(np.where(top == -np.inf, -np.inf, top - new)).astype(np.float32)
            safe = np.where(new == -np.inf, 0, new)
            w = self._weights(np.maximum(tile - safe, np.float32(-1000)), v.dtype)
            w = np.where(tile == -np.inf, 0, w)
            w = np.where(w < self.least, 0, w).astype(np.float32)
            narrow = self._narrow(w, v.dtype)
            total = total * drop + (narrow if self.narrow_total else w).sum(-1, keepdims=True)
            out = out * drop
            out = summed(narrow, v[:, :, start : start + TILE], self.value_sums, out)
            top = new
        return top, total.astype(np.float32), out

    def _weights(self, x: Floats, dtype: Any) -> Floats:
        """As ex2.approx.f16x2 where exp2 is narrow: its argument is rounded, and its result."""
        if not self.narrow_exp2:
            return self.exp2(x)
        return np.exp2(x.astype(dtype).astype(np.float32)).astype(dtype).astype(np.float32)

    def _narrow(self, w: Floats, dtype: Any) -> Floats:
        if self.cut:
            return truncated(w)
        return w.astype(self.weight_type or dtype).astype(np.float32)

    def _joined(
        self, parts: list[tuple[Floats, Floats, Floats]], sink: Array | None
    ) -> tuple[Array, Array]:
        log2e = np.float32(math.log2(math.e))
        top = np.max([part[0] for part in parts], axis=0)
        if sink is not None:
            top = np.maximum(top, sink[:, None, None] * log2e)
        safe = np.where(top == -np.inf, 0, top)
        scales = [np.exp2(part[0] - safe) for part in parts]
        total = sum(part[1] * scale for part, scale in zip(parts, scales, strict=True))
        out: Array = np.sum(
            [part[2] * scale for part, scale in zip(parts, scales, strict=True)], axis=0
        )
        if sink is not None:
            total = total + np.exp2(sink[:, None, None] * log2e - safe)
        with np.errstate(divide="ignore"):
            lse = (safe + np.log2(total))[..., 0] / log2e
        out = out * np.float32(self.factor) / np.where(total == 0, 1, total)
        return out.astype(OUTPUTS[self.spec.output_dtype]), lse.astype(np.float32)


def summed(a: Array, b: Array, dtype: Any, start: Floats | None = None) -> Floats:
    """A product of matrices; in a narrow type the sum is rounded after each instruction."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    if dtype is np.float32:
        product: Floats = a @ b
        return product if start is None else product + start
    total = np.zeros((*a.shape[:3], b.shape[3]), np.float32) if start is None else start
    for n in range(0, a.shape[3], STEP):
        with np.errstate(over="ignore", invalid="ignore"):
            total = (total + a[..., n : n + STEP] @ b[..., n : n + STEP, :]).astype(dtype)
        total = total.astype(np.float32)
    return total


# --- kernels ----------------------------------------------------------------------------------

_cubic, _quadratic = (partial(polynomial, coefficients=c) for c in (CUBIC, QUADRATIC))

plain = Tiled
cubic_exp2 = partial(Tiled, exp2=_cubic)
lazy_rescaling = partial(Tiled, lazy=8.0)
split_keys = partial(Tiled, splits=3)
rounded_weights_summed = partial(Tiled, narrow_total=True)
cubic_lazy_split = partial(Tiled, exp2=_cubic, lazy=8.0, splits=2)
HONEST = (
    *("plain", "cubic_exp2", "lazy_rescaling", "split_keys", "rounded_weights_summed"),
    "cubic_lazy_split",
)

quadratic_exp2 = partial(Tiled, exp2=_quadratic)
line_for_exp2 = partial(Tiled, exp2=schraudolph)
exp2_in_the_type = partial(Tiled, narrow_exp2=True)
scores_in_the_type = partial(Tiled, narrow_scores=True)
weights_below_2_8_dropped = partial(Tiled, least=2.0**-8)
weights_below_2_12_dropped = partial(Tiled, least=2.0**-12)
weights_below_e_13_dropped = partial(Tiled, least=math.exp(-13))
weights_below_e_20_dropped = partial(Tiled, least=math.exp(-20))
too_large = partial(Tiled, factor=1 + 2.0**-9)
weights_cut_off = partial(Tiled, cut=True)
weights_in_e4m3 = partial(Tiled, weight_type=float8_e4m3fn)
scores_summed_in_fp16 = partial(Tiled, score_sums=np.float16)
scores_summed_in_bf16 = partial(Tiled, score_sums=bfloat16)
values_summed_in_fp16 = partial(Tiled, value_sums=np.float16)
values_summed_in_bf16 = partial(Tiled, value_sums=bfloat16)
CHEATS = (
    *("quadratic_exp2", "line_for_exp2", "exp2_in_the_type", "scores_in_the_type"),
    *("weights_below_2_8_dropped", "weights_below_2_12_dropped", "weights_below_e_13_dropped"),
    *("weights_below_e_20_dropped", "too_large", "weights_cut_off", "weights_in_e4m3"),
    *("scores_summed_in_fp16", "scores_summed_in_bf16"),
    *("values_summed_in_fp16", "values_summed_in_bf16"),
)
