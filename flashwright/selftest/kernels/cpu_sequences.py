"""NumPy kernels for sequences of any lengths: packed with a causal mask, and a decode over pages.

Beside two honest ones each makes one mistake with where a sequence begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashwright.selftest.kernels.honest import Array, attention

Rows = tuple[Array, Array]
"""O and LSE."""
Alone = Callable[[Array, Array, Array], Rows]
"""The attention of one sequence, as batches of one."""


def _causal(q: Array, k: Array, v: Array) -> Rows:
    return attention(q, k, v, causal=True)


# --- packed -------------------------------------------------------------------------------------


def _packed(q: Array, k: Array, v: Array, rows: Array, keys: Array, alone: Alone) -> list[Array]:
    """O and LSE from the first and last row and key of each sequence. Other rows stay NaN."""
    out = [np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:2], np.nan, np.float32)]
    for (row, end), (key, last) in zip(rows, keys, strict=True):
        found = alone(q[None, :, row:end], k[None, :, key:last], v[None, :, key:last])
        for whole, part in zip(out, found, strict=True):
            whole[:, row:end] = part[0]
    return out


def _ranges(starts: Array) -> Array:
    """The first and the last position of each sequence."""
    return np.stack([starts[:-1], starts[1:]], axis=1)


def packed(q: Array, k: Array, v: Array, starts_q: Array, starts_k: Array) -> list[Array]:
    """Each sequence alone."""
    return _packed(q, k, v, _ranges(starts_q), _ranges(starts_k), _causal)


def key_of_the_next_one(
    q: Array, k: Array, v: Array, starts_q: Array, starts_k: Array
) -> list[Array]:
    """The first key of the next sequence is seen by all rows."""
    last = _ranges(starts_k) + np.array([0, 1])

    def alone(q: Array, k: Array, v: Array) -> Rows:
        seen = attention(q, k, v, causal=True, ahead=1)
        return seen if k.shape[2] > 1 else (np.zeros_like(q), np.full(q.shape[:3], -np.inf))

    return _packed(q, k, v, _ranges(starts_q), last, alone)


def row_of_the_next_one(
    q: Array, k: Array, v: Array, starts_q: Array, starts_k: Array
) -> list[Array]:
    """A row behind the last sequence is written too."""
    out = packed(q, k, v, starts_q, starts_k)
    out[0][:, starts_q[-1]] = 0
    return out


def keys_from_the_first_one(
    q: Array, k: Array, v: Array, starts_q: Array, starts_k: Array
) -> list[Array]:
    """All sequences read the keys of the first one: where a sequence begins is not looked up."""
    ranges = _ranges(starts_k)
    return _packed(q, k, v, _ranges(starts_q), ranges - ranges[:, :1], _causal)


def nothing_of_sequences_without_keys(
    q: Array, k: Array, v: Array, starts_q: Array, starts_k: Array
) -> list[Array]:
    """0 / 0 where a sequence has no key."""
    out = packed(q, k, v, starts_q, starts_k)
    for (row, end), (key, last) in zip(_ranges(starts_q), _ranges(starts_k), strict=True):
        out[0][:, row:end] = np.nan if key == last else out[0][:, row:end]
    return out


# --- a decode over pages ------------------------------------------------------------------------


def _paged(
    q: Array, caches: tuple[Array, Array], table: Array, lengths: Array, alone: Alone
) -> Rows:
    """O and LSE of sequences of so many keys, from pages (pages, heads, positions, dim)."""
    out, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    heads, size = caches[0].shape[1:3]
    for b, (pages, count) in enumerate(zip(table, lengths, strict=True)):
        rows = (c[pages[: -(-count // size)]].swapaxes(0, 1) for c in caches)
        k, v = (x.reshape(1, heads, -1, x.shape[3])[:, :, :count] for x in rows)
        out[b], lse[b] = (x[0] for x in alone(q[b : b + 1], k, v))
    return out, lse


def paged(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """Each sequence alone."""
    return _paged(q, (k, v), table, lengths, attention)


def pages_in_order(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """The table is not read: the pages of a sequence are those behind the previous one's."""
    counts = -(-lengths // k.shape[2])
    first = np.cumsum(counts) - counts
    return _paged(q, (k, v), first[:, None] + np.arange(table.shape[1]), lengths, attention)


def position_behind_the_last(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """A key too many is counted, if its page has room."""
    more = lengths + (lengths % k.shape[2] > 0)
    return _paged(q, (k, v), table, more, attention)


def page_behind_the_last(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """One page more is looked up in the table than a sequence has."""
    counts = -(-lengths // k.shape[2])
    for pages, count in zip(table, counts, strict=True):
        _ = k[pages[: count + 1]]
    return paged(q, k, v, table, lengths)


def parts_not_rescaled(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """Two parts of the keys, whose sums are added although each has a maximum of its own."""

    def alone(q: Array, k: Array, v: Array) -> Rows:
        half = -(-k.shape[2] // 2)
        if half == k.shape[2]:
            return attention(q, k, v)
        halves = ((k[:, :, :half], v[:, :, :half]), (k[:, :, half:], v[:, :, half:]))
        (one, lse), (other, _) = (attention(q, *half, out=np.float32) for half in halves)
        return ((one + other) / 2).astype(q.dtype), lse + np.float32(np.log(2))

    return _paged(q, (k, v), table, lengths, alone)


def longest_alone(q: Array, k: Array, v: Array, table: Array, lengths: Array) -> Rows:
    """All sequences have as many keys as the longest one."""
    most = np.minimum(lengths.max(initial=0), (table < len(k)).sum(axis=1) * k.shape[2])
    return _paged(q, (k, v), table, np.where(lengths > 0, most, 0), attention)
