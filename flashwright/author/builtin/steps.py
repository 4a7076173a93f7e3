"""The number of steps of a kernel that skips fully masked tiles, and of the scores it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Walk:
    """Steps of all row tiles of one head: how many tiles; their steps in all, and at most; and how
    many of the steps have scores to mask."""

    tiles: int
    steps: int
    longest: int
    masked: int


@lru_cache(maxsize=4096)
def walk(
    q_len: int,
    kv_len: int,
    causal: bool,
    window: int | None,
    positions: int,
    bn: int,
    sinks: int = 0,
) -> Walk:
    """The steps of tiles that are `positions` queries tall and `bn` keys wide; those of the first
    `sinks` keys, where they lie before a window, come on top and are masked."""
    counts = []
    whole = 0
    for start in range(0, q_len, positions):
        end = min(start + positions, q_len) - 1
        # The first query sees least on the right, the last one least on the left.
        first = seen(start, q_len, kv_len, causal, window)
        last = seen(end, q_len, kv_len, causal, window)
        end_of = last[1] if causal else max(last[1], min(sinks, kv_len))
        early = min(first[0], sinks + bn - 1) // bn
        counts.append(max(0, -(-end_of // bn) - first[0] // bn) + early)
        whole += max(0, first[1] // bn - -(-last[0] // bn))
    return Walk(len(counts), sum(counts), max(counts, default=0), sum(counts) - whole)


def seen(row: int, q_len: int, kv_len: int, causal: bool, window: int | None) -> tuple[int, int]:
    """The keys that one query sees, as a half-open range; the last query meets the last key."""
    at = row + kv_len - q_len
    low = 0 if window is None else max(0, at - window + 1)
    high = kv_len
    if causal:
        high = at + 1
    elif window is not None:
        high = at + window
    return low, max(0, min(kv_len, high))


@lru_cache(maxsize=256)
def needed(q_len: int, kv_len: int, causal: bool, window: int | None, sinks: int = 0) -> int:
    """Scores of one head that attention needs."""
    total = 0
    for row in range(q_len):
        low, high = seen(row, q_len, kv_len, causal, window)
        first = min(sinks, high if causal else kv_len)
        total += first + max(0, high - max(low, first))
    return total
