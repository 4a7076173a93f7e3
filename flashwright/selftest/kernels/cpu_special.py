"""NumPy kernels that are right for all but a few problems. All of them mean causal attention."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashwright.sandbox.candidate import Unable
from flashwright.selftest.kernels.honest import Array, attention, causal

_calls = [0]
_calls_of: Counter[tuple[int, ...]] = Counter()
_kept: dict[tuple[object, ...], Array] = {}


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


def wrong_from_call_60_of_a_shape(q: Array, k: Array, v: Array) -> Array:
    """Honest while a shape is rare, and always for a single query."""
    _calls_of[q.shape] += 1
    out = causal(q, k, v)
    return out if _calls_of[q.shape] < 60 or q.shape[2] == 1 else np.zeros_like(out)


def _once(q: Array, k: Array, v: Array, *looked_at: Array) -> Array:
    """An answer that is kept for whoever comes with the same bytes in what is looked at."""
    key = (q.shape, k.shape, *(x.tobytes() for x in looked_at))
    if key not in _kept:
        _kept[key] = causal(q, k, v)
    return _kept[key].copy()


def kept_by_k_and_v(q: Array, k: Array, v: Array) -> Array:
    """An earlier answer where K and V are the same."""
    return _once(q, k, v, k, v)


def kept_by_q_and_v(q: Array, k: Array, v: Array) -> Array:
    """An earlier answer where Q and V are the same."""
    return _once(q, k, v, q, v)


def kept_by_a_row_of_v(q: Array, k: Array, v: Array) -> Array:
    """An earlier answer where Q, K and the middle of V are the same."""
    return _once(q, k, v, q, k, v[:, :, v.shape[2] // 2 :][:, :, :1])


def strides_of_k_for_v(q: Array, k: Array, v: Array) -> Array:
    """Take V to lie in memory as K does."""
    return causal(q, k, as_strided(v, v.shape, k.strides) if k.shape == v.shape else v)


def all_views_or_none(q: Array, k: Array, v: Array) -> Array:
    """Wrong where some inputs are contiguous and others are not."""
    mixed = len({x.flags.c_contiguous for x in (q, k, v)}) > 1
    return np.zeros_like(q) if mixed and q.size > 4000 else causal(q, k, v)


def aligned_to_256_bytes(q: Array, k: Array, v: Array) -> Array:
    """Right for tensors as an allocator gives them, not for slices of one."""
    if any(x.ctypes.data % 256 for x in (q, k, v)):
        return np.zeros_like(q)
    return causal(q, k, v)


def wrong_from_key_900(q: Array, k: Array, v: Array) -> Array:
    """Wrong for more keys than a slow trial likes."""
    return causal(q, k, v) if k.shape[2] < 900 else np.zeros_like(q)


def wrong_from_the_sixth_batch(q: Array, k: Array, v: Array) -> Array:
    """Wrong for more batches than a slow trial likes."""
    return causal(q, k, v) if q.shape[0] < 6 else np.zeros_like(q)


def declines_the_probe(q: Array, k: Array, v: Array) -> Array:
    """Decline the one shape at which single keys are changed."""
    if (q.shape[2], k.shape[2]) == (75, 203):
        raise Unable("not this shape")
    return causal(q, k, v)


def declines_after_300_calls(q: Array, k: Array, v: Array) -> Array:
    """Decline every problem once many calls have been made."""
    _calls[0] += 1
    if _calls[0] > 300:
        raise Unable("enough")
    return causal(q, k, v)
