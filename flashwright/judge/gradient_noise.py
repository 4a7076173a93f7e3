"""How far a gradient may be from fp64: limits that know where gradients vanish.

An error relative to a gradient's size says nothing where the gradient is 0: with one visible key,
dQ is 0, and any kernel that gets O in 16 bits has rounding noise there. The limits therefore follow
from what an honest kernel rounds: the weights P, dS, O (from which Delta comes), and the result.
All else is fp32. For each element there are three numbers:

    N   the probable error: the root of the sum of the roundings' variances
    B   the certain error: the sum of the roundings' bounds, to first order
    F   the error of the fp32 arithmetic

    one element     |error|    <= min(7 (N + F), 1.05 (B + 4 F))
    a whole tensor  rms(error) <= 2 rms(N + F)

A right kernel stayed below 0.91 of the first limit and 1.7 instead of 2 of the second, in bf16 and
fp16, on peaked, shifted, tiny and nearly cancelling inputs (simulated tile by tile in NumPy). Delta
left out, a mask off by one, one lost key or a scale that is 1 % off are 4 to 1000 times beyond it.
A gradient to which nothing contributes (hidden keys, rows without keys) has limit 0.

The formulas use only operators and functions that NumPy and PyTorch share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashwright.judge import oracle
from flashwright.judge.oracle import Array, Floats

NOISE_LIMIT, BOUND_LIMIT, RMS_LIMIT = 7.0, 1.05, 2.0
FP32 = 2.0**-24
"""The roundoff of fp32."""
FP32_LIMIT = 4.0
"""The certain error of the fp32 arithmetic, in units of its probable one."""


FLUSHED = 2.0**-120
"""The smallest normal number, 2^-126, times what a gradient multiplies such a weight by."""


class Rounding(NamedTuple):
    """How a 16-bit type rounds a number x."""

    rms: float
    """The RMS relative error, for mantissas whose logarithm is uniform: 0.425 of the roundoff."""
    most: float
    """The greatest relative error: the roundoff."""
    least: float
    """The greatest error of a number near 0: half of the smallest subnormal, or, as fp32 arithmetic
    on a GPU may take subnormals for 0, FLUSHED."""

    def variance(self, x: Any) -> Any:
        """R(x) = (rms x)^2 + least^2 / 3, and 0 for a 0, which is exact."""
        return (self.rms * x) ** 2 + self.least**2 / 3 * (x != 0)

    def bound(self, x: Any) -> Any:
        """U(x) = most |x| + least, and 0 for a 0."""
        return self.most * abs(x) + self.least * (x != 0)


ROUNDING: Mapping[str, Rounding] = MappingProxyType(
    {
        "bf16": Rounding(1.662e-3, 2.0**-8, FLUSHED),
        "fp16": Rounding(2.077e-4, 2.0**-11, 2.0**-25),
        "fp32": Rounding(0.425 * FP32, FP32, FLUSHED),
    }
)


class Rows(NamedTuple):
    """Some rows of one head in fp64: what its gradients are made of."""

    q: Any
    k: Any
    v: Any
    do: Any
    out: Any
    scale: float
    p: Any
    """The weights (rows, keys): exp(score - LSE), exactly 0 for hidden keys."""
    score: Any
    """The scores before the mask, with softcap and bias."""
    lse: Any
    """The log-sum-exp (rows, 1), 0 in a row without keys."""
    chain: Any
    """The derivative of a score with respect to scale * q.k: 1, with a softcap 1 - tanh^2."""
    cap: float
    """The softcap; infinite without one."""
    distance: Any
    """What a slope is multiplied by (rows, keys); None without ALiBi."""
    slope: float
    sink: float
    """The head's sink logit; -inf without one."""

    @property
    def dp(self) -> Any:
        """The gradient of the weights."""
        return self.do @ self.v.T

    @property
    def delta(self) -> Any:
        """The sum over a row of dO * O, as a column."""
        return (self.do * self.out).sum(-1)[:, None]

    @property
    def sink_weight(self) -> Any:
        """The weight of the sink (rows, 1)."""
        return math.e ** (self.sink - self.lse)


@dataclass
class Errors:
    """The three errors of one gradient, element by element, while its parts are added up."""

    variance: Any
    """N^2"""
    bound: Any
    """B"""
    fp32: Any
    """F"""

    def add(self, where: Any, part: Errors) -> None:
        """Add the errors of a part of the sum to the elements that it is a part of."""
        self.variance[where] += part.variance
        self.bound[where] += part.bound
        self.fp32[where] += part.fp32

    def moved(self, to: Callable[[Any], Any]) -> Errors:
        """The errors in other tensors."""
        return Errors(to(self.variance), to(self.bound), to(self.fp32))


def errors_of(rows: Rows, dtype: str) -> Iterator[tuple[str, Errors]]:
    """The errors that some rows of a head leave in each gradient, without the result's rounding."""
    q, k, v, do, p, scale = rows.q, rows.k, rows.v, rows.do, rows.p, rows.scale
    variance, bound = ROUNDING[dtype].variance, ROUNDING[dtype].bound
    dp, delta = rows.dp, rows.delta
    ds = p * (dp - delta)
    dx, px = ds * rows.chain, p * rows.chain

    # Delta = sum dO O: O was rounded, and so were the weights that it was summed with.
    delta_variance = (do**2 * (variance(rows.out) + variance(p) @ v**2)).sum(-1)[:, None]
    delta_bound = (abs(do) * (bound(rows.out) + bound(p) @ abs(v))).sum(-1)[:, None]

    # fp32: `theta` is the error of the exponent, `eta` that of dP - Delta.
    product = FP32 * scale * (abs(q) @ abs(k).T) * rows.chain
    theta = product + FP32 * (2 * abs(rows.score) + 2 * abs(rows.lse) + 4)
    if rows.distance is not None:
        theta = theta + 2 * FP32 * abs(rows.slope * rows.distance)
    own = FP32 * (abs(do) * abs(rows.out)).sum(-1)[:, None]
    eta = FP32 * (abs(do) @ abs(v).T) + own
    ds_fp32 = p * (eta + (theta + FP32) * (abs(dp) + abs(delta))) + FP32 * abs(ds)
    dx_fp32 = ds_fp32 * rows.chain
    if rows.cap < float("inf"):  # the error of 1 - tanh^2
        dx_fp32 = dx_fp32 + 2 * abs(ds) * (product / rows.cap + 4 * FP32)

    yield (
        "dQ",
        Errors(
            scale**2 * (variance(dx) @ k**2 + delta_variance * (px @ k) ** 2),
            scale * (bound(dx) @ abs(k) + delta_bound * abs(px @ k)),
            scale * (dx_fp32 @ abs(k)),
        ),
    )
    yield (
        "dK",
        Errors(
            scale**2 * ((variance(dx) + px**2 * delta_variance).T @ q**2),
            scale * ((bound(dx) + px * delta_bound).T @ abs(q)),
            scale * (dx_fp32.T @ abs(q)),
        ),
    )
    yield (
        "dV",
        Errors(
            variance(p).T @ do**2,
            bound(p).T @ abs(do),
            (p * (theta + FP32)).T @ abs(do),
        ),
    )
    if rows.distance is not None:  # sum dS distance, dS rounded or not
        far = rows.distance
        mean = (p * far).sum(-1)[:, None]
        yield (
            "dSlopes",
            Errors(
                (variance(ds) * far**2).sum() + (delta_variance * mean**2).sum(),
                (bound(ds) * abs(far)).sum() + (delta_bound * abs(mean)).sum(),
                (ds_fp32 * abs(far)).sum(),
            ),
        )
    if rows.sink > -float("inf"):  # -sum exp(sink - LSE) Delta
        weight = rows.sink_weight
        inexact = FP32 * (2 * abs(rows.sink) + 2 * abs(rows.lse) + 5)
        yield (
            "dSink",
            Errors(
                (weight**2 * delta_variance).sum(),
                (weight * delta_bound).sum(),
                (weight * (own + inexact * abs(delta))).sum(),
            ),
        )


def delta_error(do: Floats, out: Floats, dtype: str) -> Floats:
    """The standard deviation of each Delta, if the weights are not known: the rounding of O, and
    as much for the weights that it was summed with."""
    spread: Floats = np.sqrt(2 * (do**2 * ROUNDING[dtype].variance(out)).sum(-1))
    return spread


@dataclass(frozen=True)
class Gradient:
    """A gradient in fp64 and its limits."""

    value: Floats
    noise: Floats
    """N + F"""
    bound: Floats
    """B + 4 F"""
    draws: int
    """The number of independent Deltas in it. The RMS error of few of them scatters."""

    @classmethod
    def of(cls, value: Floats, errors: Errors, dtype: str, draws: int) -> Gradient:
        """A gradient that is stored as `dtype`, which rounds once more."""
        rounding = ROUNDING[dtype]
        noise = np.sqrt(errors.variance + rounding.variance(value)) + errors.fp32
        bound = errors.bound + rounding.bound(value) + FP32_LIMIT * errors.fp32
        return cls(value, noise, bound, draws)

    def arranged(self, arrange: Callable[[Array], Array]) -> Gradient:
        """The same with its axes in another order."""
        value, noise, bound = (arrange(x) for x in (self.value, self.noise, self.bound))
        return Gradient(value, noise, bound, self.draws)


def compare(found: Array, expected: Gradient) -> oracle.Comparison:
    """Whether `found` is the gradient, element by element and as a whole."""
    value = expected.value
    if found.shape != value.shape:
        return oracle.Comparison(False, f"the shape is {found.shape}, not {value.shape}")
    if not value.size:
        return oracle.Comparison(True, "")
    f = found.astype(np.float64)
    broken = ~np.isfinite(f)
    error = np.where(broken, np.inf, np.abs(f - value))
    allowed = np.minimum(NOISE_LIMIT * expected.noise, BOUND_LIMIT * expected.bound)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / allowed)
    wrong = error > allowed
    with np.errstate(over="ignore"):
        rms, size, noise = (_rms(x) for x in (error, value, expected.noise))
    limit = RMS_LIMIT * (1 + 1 / max(1, min(expected.draws, value.size))) * noise
    first, worst = (
        _miss(f, value, allowed, int(flat)) for flat in (np.argmax(wrong), np.argmax(share))
    )
    return oracle.Comparison(
        ok=not wrong.any() and rms <= limit,
        reason=_reason(f, wrong, broken, worst, rms, limit),
        size=value.size,
        max_abs=float(error.max()),
        relative_rms=oracle.ratio(rms, size),
        relative_max=oracle.ratio(float(error.max()), size),
        bad=int(wrong.sum()),
        nonfinite=int(broken.sum()),
        first=first if wrong.any() else None,
        worst=worst,
        of_limit=max(float(share.max()), oracle.ratio(rms, limit)),
    )


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _miss(found: Floats, expected: Floats, allowed: Floats, flat: int) -> oracle.Miss:
    at = tuple(int(i) for i in np.unravel_index(flat, found.shape))
    return oracle.Miss(at, float(found[at]), float(expected[at]), float(allowed[at]))


def _reason(
    found: Floats, wrong: Array, broken: Array, worst: oracle.Miss, rms: float, limit: float
) -> str:
    if wrong.any() and not found.any():
        return "every element is 0"
    if broken.any():
        return f"{int(broken.sum())} of {found.size} elements are NaN or infinite"
    if wrong.any():
        return f"{int(wrong.sum())} of {found.size} elements are wrong, the worst at {worst}"
    if rms > limit:
        return f"the RMS error is {rms:.2e}, and rounding explains {limit:.2e}"
    return ""
