"""Inputs for a kernel's trial: several distributions, because a wrong kernel may suit one of them.

normal      the usual one
scaled      tiny values: flat weights and outputs so small that a loose absolute limit passes zeros
shifted     a mean far from 0: logits near 100, which overflow unless the maximum is subtracted
peaked      logits so spread that a few keys take everything: a wrong mask or offset shows
one_hot_v   V picks keys apart, so that O shows the weights themselves
outliers    a few elements 32 times larger, as trained models have
large       V near the end of its type's range: sums in a type as narrow overflow
alike       neighbouring rows are alike, as in every trained model: not independent draws
repeated    all keys of a head are the same: the mean of V
tail        the first key takes nearly all weight and its value is 0: O is what small weights carry
spectrum    weights of every size, and V undoes it: each column of O shows one weight's mean error
cancelling  large terms in a score cancel: a sum in a narrow type loses the small ones

Q and K are scaled so that scores of normal inputs have a standard deviation of about 1. Where it is
8, as in a program without a softmax scale, the weights are one-hot, and a mask that is off by one
key changes nothing in most rows. Where it is 0.01 the weights are flat, and a wrong score passes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.judge import sequences
from flashwright.sandbox.tensors import DTYPES
from flashwright.spec import AttentionSpec

Array = NDArray[Any]

KINDS = (
    *("normal", "scaled", "shifted", "opposed", "peaked", "one_hot_v", "outliers", "large"),
    *("alike", "repeated", "tail", "spectrum", "cancelling"),
)

_ELEMENTWISE = ("normal", "scaled", "shifted", "opposed", "peaked", "outliers", "alike")
"""Kinds that are drawn for each tensor in the same way."""
_MOST = {"fp16": 65504.0, "bf16": 3.3895e38, "e4m3": 448.0, "e5m2": 57344.0, "fp32": 3.4e38}
_MOST["int8"] = _MOST["fp32"]  # which is scaled
_SCALE, _SHIFT, _PEAK, _OUTLIER, _ALIKE = 0.05, 3.0, 3.0, 32.0, 0.9
_TAIL = {"bf16": 14.0, "fp32": 14.0, "fp16": 6.0}
"""The distance of the first key's score from the others. fp16 has no smaller normal weights."""
_SPECTRUM = {"bf16": 40.0, "fp16": 13.5, "e4m3": 6.0, "int8": 6.0}
"""The smallest weight, as a power of 1/2. The narrower types have no smaller normal numbers."""
_JITTER = 0.035
"""Standard deviation of a weight's logarithm from row to row: many roundings of one exponent."""
_SIZES = 32  # of weights
_GOLDEN = (math.sqrt(5) - 1) / 2
_CANCELLED = 64.0
"""The terms that cancel in a score. A sum in fp16 is then off by up to 1/64, in fp32 by 2^-18."""
# The scale of V: the largest of millions of elements stays finite, and so does an fp32 sum of
# thousands. An fp16 sum overflows.
_LARGE = {"fp16": 8e3, "bf16": 1e30, "e4m3": 64.0, "e5m2": 8e3, "fp32": 1e30, "int8": 64.0}


FLAT, ONE_HOT = 0.5, 3.0
"""Q and K are scaled if the standard deviation of a row's scores is outside of these two ..."""
AT_LEAST, AT_MOST = 1.0, 2.0
"""... to one of these."""
_LEAST_FACTOR = {"fp16": 2.0**-6, "bf16": 2.0**-40, "e4m3": 2.0**-3}  # no underflow to zeros


def spread_of(spec: AttentionSpec) -> float:
    """The standard deviation of a row's scores where Q and K are standard normal."""
    return spec.softmax_scale * math.sqrt(spec.head_dim)


def factor_of(spread: float, dtype: str) -> float:
    """The factor for Q and for K that makes the weights neither one-hot nor flat."""
    if not spread > 0 or FLAT <= spread <= ONE_HOT:
        return 1.0
    aim = AT_LEAST if spread < FLAT else AT_MOST
    factor = math.sqrt(aim / spread)
    return min(max(factor, _LEAST_FACTOR.get(dtype, 0.0)), 1 / _LEAST_FACTOR.get(dtype, 2.0**-40))


def named_factor(name: str, dtype: str, spread: float | None) -> float:
    """The factor of one tensor of a custom program: `factor_of` for Q and K, else 1."""
    return factor_of(spread, dtype) if spread is not None and name in ("Q", "K") else 1.0


def make_inputs(
    spec: AttentionSpec,
    dims: Mapping[str, int],
    seed: int,
    kind: str = "normal",
    spread: float | None = None,
) -> dict[str, Array]:
    """Q, K, V in their types, and Slopes, Sink, Idx, the scales of K and V and the gradient dO if
    the spec has them.

    `dims` has batch, q_len, kv_len, and heads and kv_heads if they differ from the spec's. `spread`
    is the spread of the scores of standard normal inputs (default: from the spec's scale). Each
    tensor has its own random stream: an option that adds a tensor does not change the others.
    Sequences of any lengths lie as the spec says, and are as long as sequences.py draws them.
    """
    if spec.batch is not None:
        made = make_inputs(spec.each, dims, seed, kind, spread)
        return sequences.laid(spec, made, sequences.lengths(spec, dims, seed), seed)
    batch, q_len, kv_len = (_size(dims, name) for name in ("batch", "q_len", "kv_len"))
    heads, kv_heads = dims.get("heads", spec.heads), dims.get("kv_heads", spec.kv_heads)
    shapes = {
        "Q": (batch, heads, q_len, spec.head_dim),
        "K": (batch, kv_heads, kv_len, spec.head_dim),
        "V": (batch, kv_heads, kv_len, spec.value_dim),
    }
    plain = kind if kind in _ELEMENTWISE else "normal"
    spread = spread_of(spec) if spread is None else spread
    factor = factor_of(spread, spec.key_dtype)
    if kind == "spectrum":
        factor = math.sqrt(_JITTER / spread)
    inputs: dict[str, Array] = {}
    for name, shape in shapes.items():
        dtype = spec.input_dtype if name == "Q" else spec.key_dtype
        own = kind if name == "V" and kind in ("one_hot_v", "large") else plain
        stream, scaled = _stream(seed, name), 1.0 if name == "V" else factor
        drawn = _in_range(shape, dtype, stream, own, scaled)
        inputs[name] = drawn if dtype == "int8" else drawn.astype(DTYPES[dtype])
    if spec.latent:  # a view, until all is arranged
        inputs["V"] = spec.values(inputs)
    if kind == "repeated" and kv_len:
        inputs["K"][:] = inputs["K"][:, :, :1]
    scale = spread / math.sqrt(spec.head_dim)
    if kind in _ARRANGED and kv_len:
        _ARRANGED[kind](inputs, scale, spec.key_dtype)
    if kind == "opposed":  # every score far below 0: a maximum that starts at 0 shows
        inputs["K"] = -inputs["K"]
    if spec.alibi:
        inputs["Slopes"] = (2.0 ** (-8 * np.arange(1, heads + 1) / heads)).astype(np.float32)
    if spec.sink:
        inputs["Sink"] = _sinks(spec, inputs, _stream(seed, "Sink"))
    exponent = 0.0 if kind in _ARRANGED else 1.0  # 1 where the kind is about the size of weights
    for name, factors in spec.scales.items():
        drawn = _stream(seed, factors).uniform(-exponent, exponent, (batch, kv_heads))
        inputs[factors] = (2.0**drawn).astype(np.float32)
        if spec.key_dtype == "int8":  # when all is arranged
            inputs[name], found = quantized(inputs[name])
            inputs[factors] *= found
    if kind == "spectrum":
        _neutralise_bias(inputs, spec.input_dtype)
    if spec.backward:
        inputs["dO"] = random_tensor(
            (batch, heads, q_len, spec.value_dim),
            spec.output_dtype,
            _stream(seed, "dO"),
            factor=1 / _LARGE[spec.output_dtype] if kind == "large" else 1.0,
        )
    if spec.branch == "selected":
        inputs["Idx"] = _blocks(spec, (batch, kv_heads, q_len), kv_len, _stream(seed, "Idx"))
    if spec.latent:
        del inputs["V"]
    return inputs


def _favour_first_key(inputs: dict[str, Array], scale: float, dtype: str) -> None:
    """The first key's score is the same for all queries, far above the others'."""
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    above, column = math.sqrt(_TAIL.get(dtype, 4.0) / scale), _lead_column(k, v)
    q[..., column], k[..., column] = above, 0
    k[:, :, 0], v[:, :, 0] = 0, 0
    k[:, :, 0, column] = above


def _lead_column(k: Array, v: Array) -> int:
    """A column of K that is none of V."""
    return -1 if np.shares_memory(k, v) else 0


def _spread_weights(inputs: dict[str, Array], scale: float, dtype: str) -> None:
    """Give the keys of a column one weight 2^-x, and a V of about 2^x there and 0 elsewhere.

    Neighbouring keys have sizes from the whole range, and so has every window.
    """
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    column = np.arange(k.shape[2]) % v.shape[3]
    size = _SPECTRUM[dtype] * (weight_shown(v.shape[3])[column] * _GOLDEN % 1.0)
    lead = math.sqrt(_SPECTRUM[dtype] * math.log(2) / scale)
    at = _lead_column(k, v)
    drawn = 1 + np.abs(v[..., 0].astype(np.float64)) % 1 / 2
    v[:] = 0
    if np.shares_memory(k, v):
        q[..., : v.shape[3]] = 0
    q[..., at], k[..., at] = lead, -size * math.log(2) / (scale * lead)
    v[:, :, np.arange(k.shape[2]), column] = drawn * 2.0 ** np.round(size)


def weight_shown(columns: int) -> NDArray[np.int64]:
    """The index of the weight that each column of O shows, for `spectrum` inputs."""
    return np.arange(columns) % _SIZES


def _neutralise_bias(inputs: dict[str, Array], dtype: str) -> None:
    """Set slopes to 0 and sinks to the smallest weight: others would move or hide the weights."""
    for name, value in (("Slopes", 0.0), ("Sink", -_SPECTRUM[dtype] * math.log(2))):
        if name in inputs:
            inputs[name][:] = value


def _cancel_terms(inputs: dict[str, Array], scale: float, dtype: str) -> None:
    """Make the first quarter of each product large, and let the last quarter cancel it."""
    q, k = inputs["Q"], inputs["K"]
    part = max(1, q.shape[3] // 4)
    size = math.sqrt(_CANCELLED / (scale * part))
    signs = np.where(k[..., :1] < 0, -1.0, 1.0)
    q[..., :part], k[..., :part] = size, size * signs
    q[..., -part:], k[..., -part:] = size, -size * signs


_ARRANGED = {"tail": _favour_first_key, "spectrum": _spread_weights, "cancelling": _cancel_terms}
"""Kinds that rearrange normal inputs."""


def narrowed(made: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """A user's inputs in types that kernels take; the reference then gets the same numbers.

    NumPy draws float64 and int64 where the user says nothing: these become `dtype` (fp32 where a
    number is beyond its range) and int32.
    """
    return {name: _narrow(array, dtype) for name, array in made.items()}


def _narrow(array: Array, dtype: str) -> Array:
    if array.dtype in DTYPES.values():
        return array
    if array.dtype.kind in "iub":
        return array.astype(DTYPES["int32"])
    with np.errstate(over="ignore"):
        narrow: Array = array.astype(DTYPES[dtype])
    same = np.isfinite(narrow.astype(np.float32)) == np.isfinite(array)
    return narrow if same.all() else array.astype(np.float32)


def random_tensor(
    shape: tuple[int, ...],
    dtype: str,
    rng: np.random.Generator,
    kind: str = "normal",
    factor: float = 1.0,
) -> Array:
    """One tensor of a custom program times a factor, rounded to the dtype and within its range.

    int32 gives indices below the last axis's size, as in a block table; int8 the whole range.
    """
    if dtype not in DTYPES:
        raise ValueError(f"no such dtype: {dtype}; there are {', '.join(DTYPES)}")
    if kind not in KINDS:
        raise ValueError(f"no such kind of inputs: {kind}; there are {', '.join(KINDS)}")
    if dtype == "int32":
        return rng.integers(0, max(1, shape[-1] if shape else 1), shape, dtype=np.int32)
    drawn = _in_range(shape, dtype, rng, kind, factor)
    return quantized(drawn)[0] if dtype == "int8" else drawn.astype(DTYPES[dtype])


def _in_range(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator, kind: str, factor: float
) -> Array:
    """The same before it is rounded."""
    drawn: Array = _draw(shape, rng, kind) * np.float32(
        _LARGE[dtype] if kind == "large" else factor
    )
    return np.asarray(np.clip(drawn, -_MOST[dtype], _MOST[dtype]))


def quantized(array: Array) -> tuple[Array, Array]:
    """Numbers of int8, and by how much those of a matrix have to be multiplied."""
    last = tuple(range(max(0, array.ndim - 2), array.ndim))
    size = np.abs(array).max(axis=last, keepdims=True, initial=0)
    scales = np.where(size > 0, size / 127, 1).astype(np.float32)
    numbers = np.rint(array / scales)
    numbers = np.where(numbers < -126, -128, numbers)  # the least one is there as well
    return numbers.astype(np.int8), scales.squeeze(last)


def _draw(shape: tuple[int, ...], rng: np.random.Generator, kind: str) -> NDArray[np.float32]:
    if kind == "one_hot_v" and len(shape) >= 2:
        length, width = shape[-2:]
        hot = np.arange(length)[:, None] % max(width, 1) == np.arange(width)
        return np.broadcast_to(hot, shape).astype(np.float32)
    x = rng.standard_normal(shape, dtype=np.float32)
    if kind == "scaled":
        x *= _SCALE
    elif kind in ("shifted", "opposed"):
        x += _SHIFT
    elif kind == "peaked":
        x *= _PEAK
    elif kind == "alike" and x.ndim >= 2:
        for row in range(1, x.shape[-2]):
            x[..., row, :] *= math.sqrt(1 - _ALIKE**2)
            x[..., row, :] += _ALIKE * x[..., row - 1, :]
    elif kind == "outliers" and x.size:
        rare = rng.integers(0, x.size, 1 + x.size // 1000)
        x.reshape(-1)[rare] *= _OUTLIER
    return x


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _size(dims: Mapping[str, int], name: str) -> int:
    if name not in dims:
        raise ValueError(f"dims lack {name}")
    return dims[name]


def _sinks(
    spec: AttentionSpec, inputs: Mapping[str, Array], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Sink logits near the rows' log-sum-exp: far below it, a kernel without sinks would pass."""
    q, k = inputs["Q"], inputs["K"]
    heads = q.shape[1]
    noise = rng.standard_normal(size=(heads,))
    if not q.size or not k.size:
        return noise.astype(np.float32)
    group, rows = heads // k.shape[1], np.linspace(0, q.shape[2] - 1, 8).astype(int)
    middle = np.empty(heads)
    for h in range(heads):
        s = q[0, h, rows].astype(np.float64) @ k[0, h // group].astype(np.float64).T
        s *= spec.softmax_scale
        if spec.softcap is not None:
            s = spec.softcap * np.tanh(s / spec.softcap)
        top = s.max(axis=1)
        middle[h] = np.median(top + np.log(np.exp(s - top[:, None]).sum(axis=1)))
    return (middle + noise).astype(np.float32)


def _blocks(
    spec: AttentionSpec, shape: tuple[int, int, int], kv_len: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Each query's selected blocks: its own and others at or before it, sorted, padded with -1."""
    batch, kv_heads, q_len = shape
    count = -(-kv_len // spec.selected_block)
    p = np.arange(q_len) + kv_len - q_len
    own = p // spec.selected_block  # negative where the query stands before the first key
    block = np.arange(count)
    idx = np.full((*shape, spec.top_k), -1, dtype=np.int32)
    taken = min(spec.top_k, count)
    for b in range(batch):
        for h in range(kv_heads):
            lot = rng.random((q_len, count))
            lot[block == own[:, None]] = -1  # drawn first
            lot[block > own[:, None]] = 2  # never drawn before a block that may be seen
            pick = np.argsort(lot, axis=1)[:, :taken]
            pick = np.where(pick <= own[:, None], pick, count)
            pick.sort(axis=1)
            idx[b, h, :, :taken] = np.where(pick < count, pick, -1)
    return idx
