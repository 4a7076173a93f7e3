"""FlashAttention in NumPy, tile by tile, with the shortcuts that kernels take to be faster.

Each factory takes a spec and gives a callable for the judge. HONEST ones differ from one another in
the order of their sums and in their exp2; CHEATS save work that a spec asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import NDArray

from flashwright.spec import AttentionSpec
from tests.offences.honest import OUTPUTS, Array, positions

Floats = NDArray[np.float32]
Exp2 = Callable[[Floats], Floats]
TILE, STEP = 64, 16  # keys of a tile, terms that one matrix instruction adds

# --- exp2 -------------------------------------------------------------------------------------


def _fitted(degree: int) -> Any:
    """The polynomial of least relative error to 2^f, 0 <= f <= 1, nearly: at Chebyshev's nodes."""
    nodes = (1 + np.cos((2 * np.arange(degree + 1) + 1) * np.pi / (2 * degree + 2))) / 2
    return np.polynomial.Polynomial.fit(nodes, 2**nodes, degree, w=2**-nodes).convert().coef


def polynomial(x: Floats, degree: int) -> Floats:
    """Whole part into the exponent, a polynomial for the rest."""
    x = np.maximum(x, np.float32(-127))
    whole = np.floor(x)
    value = np.polynomial.polynomial.polyval((x - whole).astype(np.float32), _fitted(degree))
    return np.ldexp(value.astype(np.float32), whole.astype(np.int32))


def approx(x: Floats) -> Floats:
    """As ex2.approx.ftz.f32 is: up to 2 ulp off."""
    exact = np.exp2(x.astype(np.float64))
    off = 2.0**-22 * np.sin(1e4 * x.astype(np.float64))
    return (exact * (1 + off)).astype(np.float32)


def schraudolph(x: Floats) -> Floats:
    """A line between powers of two: the bits of a float, made from an integer."""
    x = np.maximum(x, np.float32(-126))
    return ((x + np.float32(127 - 0.043)) * np.float32(2**23)).astype(np.int32).view(np.float32)


def rounded(x: Floats, dtype: Any) -> Floats:
    """exp2 of a narrow type, as ex2.approx.f16x2 is: its argument and its result are rounded."""
    return np.exp2(x.astype(dtype).astype(np.float32)).astype(dtype).astype(np.float32)


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
    score_type: Any = np.float32
    weight_type: Any = None
    cut: bool = False
    """Weights are cut off, not rounded."""
    narrow_total: bool = False
    """The sum of weights is that of the rounded ones."""

    def __call__(self, q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, Array]:
        """O and LSE."""
        others, spec = list(rest), self.spec
        slopes = others.pop(0) if spec.alibi else None
        sink = others.pop(0) if spec.sink else None
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        s = self._scores(q, k, slopes)
        bounds = np.linspace(0, s.shape[3], self.splits + 1).astype(int)
        parts = [self._part(s[..., a:b], v[:, :, a:b]) for a, b in zip(bounds, bounds[1:])]
        return self._joined(parts, sink)

    def _scores(self, q: Array, k: Array, slopes: Array | None) -> Floats:
        """In powers of two; -inf where masked."""
        spec, log2e = self.spec, np.float32(math.log2(math.e))
        s = summed(q.astype(np.float32), k.astype(np.float32).swapaxes(-1, -2), self.score_sums)
        s = (s * np.float32(spec.softmax_scale)).astype(self.score_type).astype(np.float32)
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
            w = np.where(tile == -np.inf, 0, self.exp2(np.maximum(tile - safe, -1000)))
            w = np.where(w < self.least, 0, w).astype(np.float32)
            narrow = self._narrow(w, v.dtype)
            total = total * drop + (narrow if self.narrow_total else w).sum(-1, keepdims=True)
            out = out * drop
            out = summed(narrow, v[:, :, start : start + TILE], self.value_sums, out)
            top = new
        return top, total.astype(np.float32), out

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
        out = sum(part[2] * scale for part, scale in zip(parts, scales, strict=True))
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
        return a @ b + (0 if start is None else start)
    total = np.zeros((*a.shape[:3], b.shape[3]), np.float32) if start is None else start
    for n in range(0, a.shape[3], STEP):
        total = (total + a[..., n : n + STEP] @ b[..., n : n + STEP, :]).astype(dtype)
        total = total.astype(np.float32)
    return total


cubic, quadratic = partial(polynomial, degree=3), partial(polynomial, degree=2)

HONEST: dict[str, dict[str, Any]] = {
    "ex2.approx": {},
    "cubic exp2": {"exp2": cubic},
    "lazy rescaling": {"lazy": 8.0},
    "split keys": {"splits": 3},
    "sums rounded weights": {"narrow_total": True},
    "cubic, lazy, split": {"exp2": cubic, "lazy": 8.0, "splits": 2},
}
CHEATS: dict[str, dict[str, Any]] = {
    "quadratic exp2": {"exp2": quadratic},
    "Schraudolph's exp2": {"exp2": schraudolph},
    "weights below 2^-8 dropped": {"least": 2.0**-8},
    "weights below 2^-12 dropped": {"least": 2.0**-12},
    "weights below e^-13 dropped": {"least": math.exp(-13)},
    "weights below e^-16 dropped": {"least": math.exp(-16)},
    "1 + 2^-9 too large": {"factor": 1 + 2.0**-9},
    "scores in the type": {"score_type": None},
    "exp2 in the type": {"exp2": None},
    "QK summed in fp16": {"score_sums": np.float16},
    "QK summed in bf16": {"score_sums": bfloat16},
    "PV summed in fp16": {"value_sums": np.float16},
    "PV summed in bf16": {"value_sums": bfloat16},
    "P in e4m3": {"weight_type": float8_e4m3fn},
    "P cut off to bf16": {"cut": True},
}


def named(name: str, spec: AttentionSpec) -> Tiled:
    """The kernel of a name in HONEST or CHEATS."""
    options = {**HONEST, **CHEATS}[name]
    own = OUTPUTS[spec.dtype]
    if "score_type" in options:
        options = {"score_type": own}
    if "exp2" in options and options["exp2"] is None:
        options = {"exp2": partial(rounded, dtype=own)}
    return Tiled(spec, **options)
