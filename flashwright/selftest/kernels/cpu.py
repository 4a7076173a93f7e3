"""Adversarial kernels in NumPy that return something wrong. All of them mean causal attention.

None of them is far-fetched: each is what a careless or cheating kernel does.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn

from flashwright.selftest.kernels.honest import Array, attention, causal, positions

TILE = 128

# --- what comes out ---------------------------------------------------------------------------


def zeros(q: Array, k: Array, v: Array) -> Array:
    """Pass every loose absolute tolerance where outputs are small."""
    return np.zeros_like(q)


def noise(q: Array, k: Array, v: Array) -> Array:
    """Of the size that attention has."""
    size = np.sqrt(np.square(causal(q, k, v), dtype=np.float32).sum() / max(1, q.size))
    return np.random.default_rng(0).normal(0, size, q.shape).astype(q.dtype)


def scaled_twice(q: Array, k: Array, v: Array) -> Array:
    """A plain mistake."""
    return attention(q, k, v, causal=True, scale=1 / q.shape[-1])[0]


def some_rows_nan(q: Array, k: Array, v: Array) -> Array:
    """0 / 0 where a row begins a tile."""
    out = causal(q, k, v)
    out[:, :, ::TILE] = np.nan
    return out


def no_rows_without_keys(q: Array, k: Array, v: Array) -> Array:
    """0 / 0 in the rows that see no key: with more queries than keys."""
    out = causal(q, k, v)
    out[:, :, : max(0, q.shape[2] - k.shape[2])] = np.nan
    return out


def last_rows_unwritten(q: Array, k: Array, v: Array) -> Array:
    """As many blocks as there are whole tiles: the rows of the last one stay as they are."""
    out = _allocated(q.shape, q.dtype)
    whole = q.shape[2] // 48 * 48
    out[:, :, :whole] = causal(q, k, v)[:, :, :whole]
    return out


def _allocated(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory as it is found: all 0xFF, which is what the judge fills it with on the GPU."""
    found: Array = np.empty(shape, dtype)
    found.reshape(-1).view(np.uint8)[:] = 0xFF
    return found


def wider_type(q: Array, k: Array, v: Array) -> Array:
    """fp32 where fp16 is asked for: more exact than any kernel can be."""
    return attention(q, k, v, causal=True, weights=np.float32, out=np.float32)[0]


def turned(q: Array, k: Array, v: Array) -> Array:
    """(batch, length, heads, dim)."""
    return causal(q, k, v).swapaxes(1, 2).copy()


def a_list(q: Array, k: Array, v: Array) -> Any:
    """Return nested lists of numbers."""
    return causal(q, k, v).tolist()


def nothing(q: Array, k: Array, v: Array) -> None:
    """Forgets its return."""
    causal(q, k, v)


def no_output(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Nothing that could be wrong."""
    return ()


def weights_in_e4m3(q: Array, k: Array, v: Array) -> Array:
    """Round the weights to 8 bits."""
    return attention(q, k, v, causal=True, weights=float8_e4m3fn)[0]


def sums_in_fp16(q: Array, k: Array, v: Array) -> Array:
    """Add up in fp16."""
    return attention(q, k, v, causal=True, sums=np.float16)[0]


def inputs_in_e4m3(q: Array, k: Array, v: Array) -> Array:
    """Twice the rate on a GPU that has it."""
    small = [x.astype(float8_e4m3fn).astype(q.dtype) for x in (q, k, v)]
    return causal(small[0], small[1], small[2])


def other_bits(q: Array, k: Array, v: Array) -> Array:
    """As atomic additions do: the last bit hangs on who came first."""
    out = causal(q, k, v)
    flips = np.frombuffer(os.urandom(out.size), np.uint8) < 8
    out.reshape(-1).view(np.uint16)[flips] ^= 1
    return out


def noisy(q: Array, k: Array, v: Array, size: float = 1e-4) -> Array:
    """As atomic additions in a wider type do: far below the allowed error."""
    return _with_noise(attention(q, k, v, causal=True, out=np.float32)[0], size).astype(q.dtype)


def too_noisy(q: Array, k: Array, v: Array) -> Array:
    """Within the allowed error, and nearly all of it is noise."""
    return noisy(q, k, v, 5e-4)


def far_too_noisy(q: Array, k: Array, v: Array) -> Array:
    """More than the allowed error of a single run."""
    return noisy(q, k, v, 1e-2)


def noisy_and_one_key_too_many(q: Array, k: Array, v: Array) -> Array:
    """Noise does not hide a masked key."""
    o = attention(q, k, v, causal=True, ahead=1, out=np.float32)[0]
    return _with_noise(o, 1e-4).astype(q.dtype)


def noisy_and_one_key_too_few(q: Array, k: Array, v: Array) -> Array:
    """Nor one that is left out."""
    o = attention(q, k, v, causal=True, ahead=-1, out=np.float32)[0]
    return _with_noise(o, 1e-4).astype(q.dtype)


def right_once(q: Array, k: Array, v: Array, seen: set[Any] = set()) -> Array:  # noqa: B006
    """The second time it is less exact than it may be."""
    key = q.tobytes()
    size = 1e-2 if key in seen else 0.0
    seen.add(key)
    return noisy(q, k, v, size)


def _with_noise(o: Array, size: float) -> Array:
    drawn = np.random.default_rng().uniform(-1, 1, o.shape)
    found: Array = o * (1 + size * np.sqrt(3) * drawn)  # `size` is the RMS
    return found


# --- right only where one would look ----------------------------------------------------------


def mean_of_v(q: Array, k: Array, v: Array) -> Array:
    """Attention where all scores are alike."""
    return attention(q * q.dtype.type(0), k, v, causal=True)[0]


def first_order(q: Array, k: Array, v: Array) -> Array:
    """exp(s) is nearly 1 + s, where s is small."""
    p, key = positions(q, k)
    wide = [np.repeat(x.astype(np.float32), q.shape[1] // k.shape[1], axis=1) for x in (k, v)]
    w = 1 + (q.astype(np.float32) @ wide[0].swapaxes(-1, -2)) * SMALL_SCALE
    w = np.where(key <= p, w, 0)
    total = w.sum(axis=-1, keepdims=True)
    return (w @ wide[1] / np.where(total == 0, 1, total)).astype(q.dtype)


SMALL_SCALE = 0.002


def no_maximum(q: Array, k: Array, v: Array) -> Array:
    """exp(s) as it is, which is fine until a score passes 88."""
    return _from_maximum(q, k, v, lambda s: np.zeros_like(s[..., :1]))


def maximum_from_zero(q: Array, k: Array, v: Array) -> Array:
    """The running maximum begins at 0: where all scores are far below, every weight is 0."""
    return _from_maximum(q, k, v, lambda s: np.maximum(s.max(axis=-1, keepdims=True), 0))


def _from_maximum(q: Array, k: Array, v: Array, maximum: Any) -> Array:
    p, key = positions(q, k)
    wide = [np.repeat(x.astype(np.float32), q.shape[1] // k.shape[1], axis=1) for x in (k, v)]
    s = (q.astype(np.float32) @ wide[0].swapaxes(-1, -2)) * q.shape[-1] ** -0.5
    s = np.where(key <= p, s, np.float32(-1e30))
    with np.errstate(all="ignore"):
        w = np.where(key <= p, np.exp(s - maximum(s)), 0)
        total = w.sum(axis=-1, keepdims=True)
        out = w.astype(q.dtype).astype(np.float32) @ wide[1]
        return (out / np.where(total == 0, 1, total)).astype(q.dtype)


def tail_of_keys_dropped(q: Array, k: Array, v: Array) -> Array:
    """Right where whole tiles make up the keys."""
    whole = k.shape[2] // TILE * TILE or k.shape[2]
    start = k.shape[2] - whole
    if not start:
        return causal(q, k, v)
    shorter = attention(q, k[:, :, :whole], v[:, :, :whole], causal=True, ahead=start)
    return shorter[0]


def equal_lengths_only(q: Array, k: Array, v: Array) -> Array:
    """The mask is key <= query, which is right where there are as many of both."""
    return attention(q, k, v, causal=True, ahead=q.shape[2] - k.shape[2])[0]


def no_mask(q: Array, k: Array, v: Array) -> Array:
    """Look at all keys."""
    return attention(q, k, v)[0]


def one_key_too_many(q: Array, k: Array, v: Array) -> Array:
    """key <= query + 1."""
    return attention(q, k, v, causal=True, ahead=1)[0]


def one_key_too_few(q: Array, k: Array, v: Array) -> Array:
    """key < query."""
    return attention(q, k, v, causal=True, ahead=-1)[0]


def heads_mixed_up(q: Array, k: Array, v: Array) -> Array:
    """Query head h takes kv head h % kv_heads, instead of h // group."""
    group = q.shape[1] // k.shape[1]
    return causal(q, np.tile(k, (1, group, 1, 1)), np.tile(v, (1, group, 1, 1)))


def first_batch_only(q: Array, k: Array, v: Array) -> Array:
    """Compute one batch and repeat it."""
    out = causal(q[:1], k[:1], v[:1])
    return np.repeat(out, q.shape[0], axis=0) if q.shape[0] else out


_by_shape: dict[Any, Array] = {}
_by_address: dict[Any, Array] = {}
_by_sample: dict[Any, Array] = {}


def replay_by_shape(q: Array, k: Array, v: Array) -> Array:
    """Give the first answer for a shape again."""
    key = (q.shape, k.shape)
    if key not in _by_shape:
        _by_shape[key] = causal(q, k, v)
    return _by_shape[key].copy()


def replay_by_address(q: Array, k: Array, v: Array) -> Array:
    """Give the first answer for these addresses again."""
    key = (q.shape, k.shape, q.ctypes.data, k.ctypes.data)
    if key not in _by_address:
        _by_address[key] = causal(q, k, v)
    return _by_address[key].copy()


def replay_by_sample(q: Array, k: Array, v: Array) -> Array:
    """Knows its inputs by a few elements of each."""
    key = (q.shape, k.shape, *(x[..., :1, :2].tobytes() for x in (q, k, v)))
    if key not in _by_sample:
        _by_sample[key] = causal(q, k, v)
    return _by_sample[key].copy()


_pool: dict[Any, Array] = {}


def leftover(q: Array, k: Array, v: Array) -> Array:
    """The buffer is kept and written only in the first call of a shape; later ones find it so."""
    if q.shape not in _pool:
        _pool[q.shape] = causal(q, k, v)
    return _pool[q.shape]
