"""Attention in fp64, and how far a kernel may be from it.

Tensors are laid out (batch, heads, length, dim). Clarity comes before speed. Only one block of rows
of one head is in memory at a time, so lengths of thousands are possible.

The query in row i stands at position p = i + kv_len - q_len: the last query is the last token.
In NSA's compressed branch a column is a block of tokens, so there p = i + tokens - q_len, where the
dim `tokens` is the length in tokens (default: q_len), and block j covers the tokens
j * stride .. j * stride + block - 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashwright.judge import sequences
from flashwright.spec import AttentionSpec

Array = NDArray[Any]
Floats = NDArray[np.float64]
Inputs = Mapping[str, Array]
Dims = Mapping[str, int]

NOISE = "noise of O"
_ROWS = 512  # rows of scores held at a time: 64 MB each at 16k keys


def positions(
    spec: AttentionSpec, q_len: int, kv_len: int, tokens: int | None = None
) -> NDArray[np.int64]:
    """The position p of every query row. `tokens` matters in the compressed branch only."""
    end = kv_len
    if spec.branch == "compressed":
        end = q_len if tokens is None else tokens
    return np.arange(q_len, dtype=np.int64) + (end - q_len)


def visible(
    spec: AttentionSpec, q_len: int, kv_len: int, tokens: int | None = None
) -> NDArray[np.bool_]:
    """The mask (q_len, kv_len) of the spec. Selected blocks restrict it further (`chosen`)."""
    return _seen(spec, positions(spec, q_len, kv_len, tokens), kv_len)


def _seen(spec: AttentionSpec, p: NDArray[np.int64], kv_len: int) -> NDArray[np.bool_]:
    row, key = p[:, None], np.arange(kv_len)[None, :]
    seen = np.ones((len(p), kv_len), dtype=np.bool_)
    if spec.branch == "compressed":
        last = key * spec.stride + spec.block - 1
        return seen & (last <= row) if spec.causal else seen
    if spec.causal:
        seen &= key <= row
    if spec.window is not None:
        near = np.abs(row - key) < spec.window
        seen &= near | (key < (spec.sink_tokens or 0))
    return seen


def chosen(spec: AttentionSpec, idx: Array, kv_len: int) -> NDArray[np.bool_]:
    """Which keys lie in the selected blocks of each row: idx (rows, top_k) -> (rows, kv_len)."""
    blocks = -(-kv_len // spec.selected_block)
    table = np.zeros((len(idx), blocks), dtype=np.bool_)
    row, slot = np.nonzero((idx >= 0) & (idx < blocks))
    table[row, idx[row, slot]] = True
    return table[:, np.arange(kv_len) // spec.selected_block]


def scores(
    spec: AttentionSpec,
    q: Floats,
    k: Floats,
    p: NDArray[np.int64] | None = None,
    slope: float | None = None,
    idx: Array | None = None,
) -> Floats:
    """Logits (rows, kv_len) of one head: scale, softcap, ALiBi, then -inf for masked keys.

    `p` are the rows' positions (default: those of a whole Q), `slope` this head's ALiBi slope,
    `idx` the rows' selected blocks.
    """
    kv_len = len(k)
    p = positions(spec, len(q), kv_len) if p is None else p
    s: Floats = (q @ k.T) * spec.softmax_scale
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
    if spec.alibi:
        if slope is None:
            raise ValueError("ALiBi needs the head's slope")
        s += slope * (np.arange(kv_len)[None, :] - p[:, None])
    seen = _seen(spec, p, kv_len)
    if spec.branch == "selected":
        if idx is None:
            raise ValueError("branch 'selected' needs the rows' block indices")
        seen &= chosen(spec, idx, kv_len)
    s[~seen] = -np.inf
    return s


def attention(
    spec: AttentionSpec, inputs: Inputs, dims: Dims | None = None, noise: bool = False
) -> dict[str, Floats]:
    """O (batch, heads, q_len, v_dim) and LSE (batch, heads, q_len), natural logarithm.

    A row without visible keys has O = 0 and LSE = -inf, or the sink's logit with a sink. `noise`
    adds the noise of O: the error of O if each of its terms has an error of 1 (see compare). A
    subnormal weight has the absolute error of the smallest normal one. Of sequences of any lengths
    each is computed alone; the outputs lie as Q does, and are NaN where no sequence is.
    """
    if spec.batch is not None:
        each = spec.each
        return sequences.attention(spec, inputs, lambda one: attention(each, one, noise=noise))
    batch, heads, q_len = _check_sizes(spec, inputs, dims or {})
    out = np.zeros((batch, heads, q_len, spec.value_dim))
    spread = np.zeros_like(out) if noise else None
    lse = np.full((batch, heads, q_len), -np.inf)
    for b, h in itertools.product(range(batch), range(heads)):
        keys = "K" if spec.latent else "V"
        v = _head(inputs, keys, b, h, heads)[:, : spec.value_dim]
        sink = float(inputs["Sink"][h]) if spec.sink else -np.inf
        for rows, s in _score_rows(spec, inputs, dims or {}, b, h):
            top = np.maximum(s.max(axis=1, initial=-np.inf), sink)
            top[top == -np.inf] = 0  # a row without visible keys: avoids inf - inf
            weight = np.exp(s - top[:, None])
            total = weight.sum(axis=1) + np.exp(sink - top)
            some = total > 0
            out[b, h, rows][some] = (weight[some] @ v) / total[some, None]
            lse[b, h, rows][some] = top[some] + np.log(total[some])
            if spread is not None:
                full = np.where(weight > 0, np.maximum(weight, SMALLEST_WEIGHT[spec.dtype]), 0)
                terms = full[some] / total[some, None]
                spread[b, h, rows][some] = np.sqrt(terms**2 @ v**2)
    found = {"O": out, "LSE": lse}
    return found if spread is None else {**found, NOISE: spread}


class Weights(NamedTuple):
    """The weights and scores of one head."""

    weights: Floats
    """exp(score - the row's greatest score), 0 for masked keys; without the sink."""
    scores: Floats


def weights(spec: AttentionSpec, inputs: Inputs, dims: Dims | None, b: int, h: int) -> Weights:
    """The true unnormalised weights and the scores (q_len, kv_len) of one head: to localise errors.

    They hold the whole head at once, so lengths should stay in the thousands.
    """
    _check_sizes(spec, inputs, dims or {})
    s = np.concatenate([s for _, s in _score_rows(spec, inputs, dims or {}, b, h)])
    top = s.max(axis=1, initial=-np.inf, keepdims=True)
    return Weights(np.exp(s - np.where(top == -np.inf, 0, top)), s)


def _score_rows(
    spec: AttentionSpec, inputs: Inputs, dims: Dims, b: int, h: int
) -> Iterator[tuple[slice, Floats]]:
    q, heads = inputs["Q"][b, h], inputs["Q"].shape[1]
    k = _head(inputs, "K", b, h, heads)
    p = positions(spec, len(q), len(k), dims.get("tokens"))
    slope = float(inputs["Slopes"][h]) if spec.alibi else None
    idx = _kv_head(inputs["Idx"], b, h, heads) if spec.branch == "selected" else None
    for start in range(0, max(len(q), 1), _ROWS):  # one empty block when there is no query
        rows = slice(start, min(start + _ROWS, len(q)))
        part = None if idx is None else idx[rows]
        yield rows, scores(spec, q[rows].astype(np.float64), k, p[rows], slope, part)


def _kv_head(tensor: Array, b: int, h: int, heads: int) -> Array:
    part: Array = tensor[b, h * tensor.shape[1] // heads]
    return part


def _head(inputs: Inputs, name: str, b: int, h: int, heads: int) -> Floats:
    """The keys or values that a query head reads, times their scale."""
    found: Floats = _kv_head(inputs[name], b, h, heads).astype(np.float64)
    scales = inputs.get(f"{name}Descale")
    return found if scales is None else found * float(_kv_head(scales, b, h, heads))


def _check_sizes(spec: AttentionSpec, inputs: Inputs, dims: Dims) -> tuple[int, int, int]:
    """The sizes of the problem. A ValueError names a tensor that does not fit; NumPy would
    broadcast it."""
    for name in ("Q", "K"):
        if name not in inputs or inputs[name].ndim != 4:
            raise ValueError(f"{name} must be given as (batch, heads, length, dim)")
    batch, heads, q_len, _ = inputs["Q"].shape
    _, kv_heads, kv_len, _ = inputs["K"].shape
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"K has {kv_heads} heads, which do not divide Q's {heads}")
    wanted: dict[str, tuple[int, ...]] = {
        "Q": (batch, heads, q_len, spec.head_dim),
        "K": (batch, kv_heads, kv_len, spec.head_dim),
    }
    if not spec.latent:
        wanted["V"] = (batch, kv_heads, kv_len, spec.value_dim)
    if spec.alibi:
        wanted["Slopes"] = (heads,)
    if spec.sink:
        wanted["Sink"] = (heads,)
    wanted |= dict.fromkeys(spec.scales.values(), (batch, kv_heads))
    if spec.branch == "selected":
        wanted["Idx"] = (batch, kv_heads, q_len, spec.top_k)
    for name, shape in wanted.items():
        found = inputs[name].shape if name in inputs else None
        if found != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {found}")
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    for name, size in sizes.items():
        if dims.get(name, size) != size:
            raise ValueError(f"dim {name} is {dims[name]}, but the tensors say {size}")
    return batch, heads, q_len


# How far a kernel may be off. The unit is the roundoff of the type in which the weights P enter the
# second GEMM and O is stored. An honest kernel (fp32 scores, sums, accumulator; P and O rounded),
# played in NumPy and not on a GPU, over every kind of inputs, keys 5 to 1500 and widths 8 to 128,
# had at most 0.6 units of relative RMS error (1.0 where the output has under 1000 elements), and
# single elements at most 2.5 units of their row's RMS above 1.5 units of their own size. The limits
# leave two to three times that.
# tanh is expected in fp32: with a random relative error of 2^-11, the bound of tanh.approx, the
# play had 9 units of RMS error and 100 of an element's in fp16 (1.2 and 7 in bf16), and is refused.
ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {
        "fp16": 2.0**-11,
        "bf16": 2.0**-8,
        "fp8": 2.0**-4,  # P in e4m3 weighs far more than O in bf16
        "e4m3": 2.0**-4,
        "e5m2": 2.0**-3,
        # Not 2^-24: sums over thousands of keys, and room for the GPU's fast exp2 and log2. The
        # play's LSE had 2^-22 of RMS error, and 2^-18 in its worst element (outliers).
        "fp32": 2.0**-19,
    }
)
SMALLEST_WEIGHT: Mapping[str, float] = MappingProxyType(
    {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp8": 2.0**-6, "fp32": 2.0**-126}
)
"""The smallest normal weight, if the row's greatest is 1."""
RMS_LIMIT = 2.0  # of the relative RMS error, in units
ROW_LIMIT = 5.0  # of one element's error, in units of its row's RMS ...
OWN_LIMIT = 1.5  # ... plus in units of its own size: its own rounding
# LSE is as exact as the scores, and a tensor core keeps few bits of an fp8 sum. Hopper's rule, as
# an H200 recorded it (tests/hardware): a score of d products is d/32 sums of 33 terms, the sum so
# far and 32 products. Each term is cut off toward zero 13 bits below the largest, so it loses
# anything between nothing and 2^-13 of that, 2^-13 / sqrt(3) in the RMS. The largest is at most the
# sum of |q k|, and as much as that where one product is most of a score. There the losses of the
# 33/32 d terms, of either sign, make 2^-13 sqrt(33/32 d / 3) of the score in the RMS: the unit for
# LSE. By the rule, played in NumPy over every kind of inputs at d 64 and 128, the worst element
# (outliers) had half of what this allows, and the RMS error a quarter.
FP8_KEPT_BITS = 13
FP8_TERMS_PER_PRODUCT = 33 / 32
# A kernel's exp2 is off by the same for all weights with the same fraction in their exponent, its
# roundings are not: the mean over many rows tells them apart. Played in NumPy, a cubic exp2 (as in
# FlashAttention-4) is 1e-4 off, a quadratic one 2e-3 and weights that are cut off to bf16 3e-3.
WEIGHT_LIMIT = 5e-4  # of a weight's mean relative error
EXP2_LIMIT = 1.5e-4  # of what it leaves in LSE, whose sums are not rounded: a cubic has 0.9e-4
ROUNDED = 0.42  # the RMS of one rounding's relative error, in units
SURE = 4.0  # standard errors of the mean beyond the limit
_SMALLEST = {"fp16": 2.0**-24}  # below it O is rounded to 0; other types go down to 2^-126


@dataclass(frozen=True)
class Miss:
    """One wrong element: its index, the found and the expected value, and the allowed error if the
    element has one of its own."""

    index: tuple[int, ...]
    found: float
    expected: float
    allowed: float | None = None

    def __str__(self) -> str:
        told = f"{self.index}: {self.found:.6g} instead of {self.expected:.6g}"
        return (
            told if self.allowed is None else f"{told}, allowed is an error of {self.allowed:.2g}"
        )


@dataclass(frozen=True)
class Comparison:
    """How far an output is from the oracle's. RMS means the RMS of the expected output."""

    ok: bool
    reason: str
    """What is wrong, in one line; empty if ok."""
    size: int = 0
    max_abs: float = 0.0
    relative_rms: float = 0.0
    """RMS of the error over RMS."""
    relative_max: float = 0.0
    """Greatest error over RMS."""
    bad: int = 0
    """Elements outside their limit."""
    nonfinite: int = 0
    """Number of NaN and infinities at elements whose expected value is finite."""
    stray: int = 0
    """Number of elements written that belong to no sequence."""
    first: Miss | None = None
    worst: Miss | None = None
    of_limit: float | None = None
    """The greatest error over its limit, for gradients."""
    weight_error: float | None = None
    """The greatest mean relative error of a weight, for inputs that show it."""


def compare(
    found: Array,
    expected: Array,
    dtype: str,
    tolerance: float | None = None,
    floor: float = 0.0,
    noise: Array | None = None,
    excused: float = 0.0,
) -> Comparison:
    """Whether `found` is the expected output, up to the rounding of `dtype`.

    `tolerance` replaces the limit of the relative RMS error; the limits of single elements move
    with it. `floor` is the least RMS that errors are measured against. Infinities must match
    exactly. A row is the last axis. `noise` has for each element the root of the sum of its terms'
    squares: large terms that cancel leave rounding errors that no kernel can avoid. `excused` is
    added to the limit of each element.
    """
    if found.shape != expected.shape:
        return Comparison(False, f"the shape is {found.shape}, not {expected.shape}")
    if not expected.size:
        return Comparison(True, "")
    f, e = (np.atleast_1d(x.astype(np.float64)) for x in (found, expected))
    if np.isnan(e).any():
        return Comparison(False, f"the reference has {int(np.isnan(e).sum())} NaN", e.size)
    unit = ROUNDOFF[dtype] if tolerance is None else tolerance / RMS_LIMIT
    smallest = max(_SMALLEST.get(dtype, 2.0**-126), excused)
    finite = np.isfinite(e)
    known = np.where(finite, e, 0.0)
    broken = finite & ~np.isfinite(f)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(f - known), np.where(f == e, 0.0, np.inf))
    error[broken] = np.inf  # NaN too
    row = np.maximum(_rms(known, finite, axis=-1), floor)
    if noise is not None:
        row = np.maximum(row, noise)
    wrong = error > unit * (ROW_LIMIT * row + OWN_LIMIT * np.abs(known)) + smallest
    rms = max(float(_rms(known, finite)[(0,) * e.ndim]), floor)
    with np.errstate(over="ignore"):
        rms_error = float(np.sqrt(np.mean(error[finite] ** 2))) if finite.any() else 0.0
    result = Comparison(
        ok=True,
        reason="",
        size=e.size,
        max_abs=float(error.max()),
        relative_rms=ratio(rms_error, rms),
        relative_max=ratio(float(error.max()), rms),
        bad=int(wrong.sum()),
        nonfinite=int(broken.sum()),
        first=_miss(f, e, int(np.argmax(wrong))) if wrong.any() else None,
        worst=_miss(f, e, int(np.argmax(np.where(wrong, error, -1)))) if wrong.any() else None,
    )
    # Rounding to zero is allowed, as it is for single elements.
    excess = 1.0 if noise is None else max(1.0, ratio(float(np.sqrt(np.mean(noise**2))), rms))
    limit = RMS_LIMIT * unit * scatter(e.size) * excess + ratio(smallest, rms)
    reason = _reason(result, limit, not f.any() and bool((np.abs(known) > smallest).any()))
    return replace(result, ok=not reason, reason=reason)


def scatter(count: float) -> float:
    """The factor on the limit of a mean over `count` elements: a mean of few scatters more."""
    return float(1 + 4 / np.sqrt(max(count, 1)))


def rows_that_count(array: Array) -> float:
    """How many rows make up the sum of squares: all if they are alike, 1 if one is all of it."""
    each = np.square(array, dtype=np.float64).sum(axis=-1)
    most = float(np.square(each).sum())
    return float(each.sum()) ** 2 / most if most else 0.0


def variation(
    one: Array, other: Array, dtype: str, tolerance: float | None = None, floor: float = 0.0
) -> tuple[float, float]:
    """The RMS of the difference of two runs over their RMS, and how much that may be: one unit.

    If few elements dominate the sum, one different rounding is most of the difference, so the limit
    is wider. The arguments are those of `compare`, which allows a run RMS_LIMIT units.
    """
    if one.shape != other.shape:
        return np.inf, 0.0
    if not one.size:
        return 0.0, 0.0
    a, b = (np.atleast_1d(x.astype(np.float64)) for x in (one, other))
    finite = np.isfinite(a) & np.isfinite(b)
    alike = finite | (a == b) | (np.isnan(a) & np.isnan(b))
    if not alike.all():
        return np.inf, 0.0
    known = [np.where(finite, x, 0.0) for x in (a, b)]
    rms = max(floor, *(float(_rms(x, finite)[(0,) * x.ndim]) for x in known))
    differs = float(_rms(known[0] - known[1], finite)[(0,) * a.ndim])
    unit = ROUNDOFF[dtype] if tolerance is None else tolerance / RMS_LIMIT
    smallest = _SMALLEST.get(dtype, 2.0**-126)
    return ratio(differs, rms), unit * scatter(_effective_count(known[0])) + ratio(smallest, rms)


def _effective_count(x: Floats) -> int:
    """The effective number of elements in a sum of squares: 1 if one of them dominates."""
    large = float(np.abs(x).max())
    part = (x / large) ** 2 if large > 0 else np.ones_like(x)
    return max(1, int(part.sum() ** 2 / (part**2).sum()))


def compare_lse(spec: AttentionSpec, found: Array, expected: Array) -> Comparison:
    """`compare` for the log-sum-exp. Its error is the sum's relative error, so the floor is 1.

    The error of the weights' exp2 is allowed on top.
    """
    tolerance = lse_fp8_tolerance(spec.head_dim) if spec.dtype == "fp8" else None
    return compare(found, expected, "fp32", tolerance, floor=1.0, excused=EXP2_LIMIT)


def compare_weights(
    result: Comparison, found: Array, expected: Array, noise: Array, shown: Array, dtype: str
) -> Comparison:
    """A comparison for `spectrum` inputs: wrong if a weight's mean relative error is too large.

    `shown` has for each column of O the weight that it shows. If a column's elements are alike, so
    are their roundings: the mean may be off by as much as that of the exact output, rounded.
    """
    some, unit = expected > 0, ROUNDOFF[dtype]
    known = np.where(some, expected, 1.0)
    last = 2 * unit * 2.0 ** np.floor(np.log2(known))  # the last bit of each element
    errors = (found / known - 1, np.rint(known / last) * last / known - 1, 1 + (noise / known) ** 2)
    axes = tuple(range(expected.ndim - 1))
    found_sum, rounded_sum, squares, count = (
        np.bincount(shown, np.where(some, x, 0.0).sum(axis=axes)) for x in (*errors, some)
    )
    count = np.maximum(count, 1)
    mean, sure = found_sum / count, SURE * ROUNDED * unit * np.sqrt(squares) / count
    limit = WEIGHT_LIMIT + np.abs(rounded_sum) / count + sure
    worst = int(np.argmax(np.abs(mean) - limit))
    result = replace(result, weight_error=float(np.abs(mean).max()))
    if abs(mean[worst]) <= limit[worst]:
        return result
    told = f"{abs(mean[worst]):.1e} too {'large' if mean[worst] > 0 else 'small'} in the mean"
    text = f"the weights that column {worst} shows are {told}, above {limit[worst]:.1e}"
    return replace(result, ok=False, reason=text)


def lse_fp8_tolerance(head_dim: int) -> float:
    """The relative RMS error that the LSE of fp8 scores may have."""
    lost = np.sqrt(FP8_TERMS_PER_PRODUCT * head_dim / 3)
    return float(RMS_LIMIT * lost * 2.0**-FP8_KEPT_BITS)


def _rms(x: Floats, counted: NDArray[np.bool_], axis: int | None = None) -> Floats:
    total = (x**2).sum(axis=axis, keepdims=True)
    mean: Floats = np.sqrt(total / np.maximum(counted.sum(axis=axis, keepdims=True), 1))
    return mean


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 / 0 is 0."""
    return part / whole if whole > 0 else (0.0 if part == 0 else np.inf)


def _miss(found: Floats, expected: Floats, flat: int) -> Miss:
    index = tuple(int(i) for i in np.unravel_index(flat, found.shape))
    return Miss(index, float(found[index]), float(expected[index]))


def _reason(result: Comparison, limit: float, zero: bool) -> str:
    if zero:
        return "every element is 0"
    if result.nonfinite:
        return f"{result.nonfinite} of {result.size} elements are NaN or infinite"
    if result.bad and result.worst is not None:
        return f"{result.bad} of {result.size} elements are wrong, the worst at {result.worst}"
    if result.relative_rms > limit:
        return f"the relative RMS error is {result.relative_rms:.2e}, above {limit:.2e}"
    return ""
