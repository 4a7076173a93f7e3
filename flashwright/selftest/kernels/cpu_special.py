"""NumPy kernels that are right for all but a few problems. All of them mean causal attention."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashwright.selftest.kernels.honest import Array, attention, causal

_calls = [0]


def wrong_from_the_fourth_batch(q: Array, k: Array, v: Array) -> Array:
    """A grid that is too small leaves later batches at zero."""
    out = causal(q, k, v)
    out[3:] = 0
    return out


def wrong_from_the_twentieth_call(q: Array, k: Array, v: Array) -> Array:
    """Honest while a trial is likely to look."""
    _calls[0] += 1
    out = causal(q, k, v)
    return out if _calls[0] < 20 else np.zeros_like(out)


def wrong_from_call_600(q: Array, k: Array, v: Array) -> Array:
    """Honest for longer than most trials last."""
    _calls[0] += 1
    out = causal(q, k, v)
    return out if _calls[0] < 600 else np.zeros_like(out)


def strides_ignored(q: Array, k: Array, v: Array) -> Array:
    """Take every input for contiguous."""
    return causal(*(as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides) for x in (q, k, v)))


def offsets_of_32_bits(q: Array, k: Array, v: Array) -> Array:
    """Wrong where an element lies 2^31 elements behind the first."""
    last = sum((n - 1) * s for n, s in zip(k.shape, k.strides, strict=True)) // k.itemsize
    return causal(q, k, v) if last < 1 << 31 else np.zeros_like(q)


def independent_keys_only(q: Array, k: Array, v: Array) -> Array:
    """Right where neighbouring keys have nothing in common, as in no trained model."""
    if k.shape[2] > 32 and k.size:
        wide = k.astype(np.float32) - k.astype(np.float32).mean()
        if (wide[:, :, 1:] * wide[:, :, :-1]).mean() > 0.2 * np.square(wide).mean():
            return np.zeros_like(q)
    return causal(q, k, v)


def window_of_64(q: Array, k: Array, v: Array) -> Array:
    """Only the last 64 keys are looked at."""
    return attention(q, k, v, causal=True, window=64)[0]


def every_eighth_block_skipped(q: Array, k: Array, v: Array) -> Array:
    """Every eighth block of 16 keys has no weight: less work, and little error."""
    if k.shape[2] < 128:
        return causal(q, k, v)
    v = v.copy()
    for start in range(112, v.shape[2], 128):
        v[:, :, start : start + 16] = 0
    return causal(q, k, v)


def slightly_too_large(q: Array, k: Array, v: Array) -> Array:
    """The sum of the weights lacks a few per cent."""
    return (causal(q, k, v).astype(np.float32) * 1.03).astype(q.dtype)
