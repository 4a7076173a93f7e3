"""Problems of sequences of any lengths that `bench` measures: packed batches, and decodes.

A record has a problem's name, the number of its sequences, and its tokens or keys: they say all
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.author.builtin.splits import rows_for, split_count
from flashwright.gpu import Gpu
from flashwright.spec import AttentionSpec, BadSpec

TOKENS = 32_768
"""Of a packed batch."""
DECODES = (
    (1, 65536, 32, 8),
    (8, 8192, 32, 8),
    (32, 8192, 32, 8),
    (64, 4096, 64, 8),
    (128, 2048, 32, 8),
    (256, 1024, 32, 8),
    (16, 32768, 32, 4),
)
"""Sequences, keys, heads and KV heads; a package is measured with its own heads."""
_CHAT = (0.3, 0.3, 0.25, 0.1, 0.05)
_NO_PAGE = 2**31 - 1
"""What a table has behind the pages of a sequence."""

Pair = tuple[int, int]
"""The queries and the keys of a sequence."""


@dataclass(frozen=True)
class Sequences:
    """A problem: its name, and the lengths of its sequences."""

    name: str
    """One word, such as `uniform`, or `8x8192` for 8 sequences of 8192 keys."""
    length: int
    """All tokens of a packed batch, else the keys of each sequence."""
    pairs: tuple[Pair, ...]


def distributions(tokens: int = TOKENS) -> Iterator[tuple[str, list[int]]]:
    """Lengths of sequences with so many tokens together."""
    rng = np.random.default_rng(0)
    long = min(2048, tokens)
    yield "equal", _until(tokens, lambda: long)
    yield "uniform", _until(tokens, lambda: int(rng.integers(1, 4096)))
    yield "log-normal", _until(tokens, lambda: int(np.exp(rng.normal(6, 1))) + 1)
    yield "one-long", [tokens - tokens // 2, *_until(tokens // 2, lambda: 128)]
    # Short questions, some with a long context before them.
    yield "chat", _until(tokens, lambda: int(rng.choice([40, 120, 350, 1200, 7000], p=_CHAT)))


def _until(tokens: int, draw: Callable[[], int]) -> list[int]:
    """Drawn lengths, the last one cut, until all tokens are taken."""
    found: list[int] = []
    while (rest := tokens - sum(found)) > 0:
        found.append(min(draw(), rest))
    return found


def problems(spec: AttentionSpec, tokens: int | None = None) -> list[Sequences]:
    """The problems of a package: for packed queries each distribution of lengths, else the decodes,
    with as many queries as the spec has."""
    if spec.packed:
        total = tokens or TOKENS
        return [Sequences(n, total, _alike(some)) for n, some in distributions(total)]
    return [_decode(spec, count, keys) for count, keys, *_ in DECODES]


def _alike(lengths: Sequence[int]) -> tuple[Pair, ...]:
    return tuple((n, n) for n in lengths)


def _decode(spec: AttentionSpec, count: int, keys: int) -> Sequences:
    return Sequences(f"{count}x{keys}", keys, ((spec.decode or 1, keys),) * count)


def named(spec: AttentionSpec, name: str, length: int, count: int) -> Sequences:
    """The problem of a record. Raises BadSpec if a spec has none of this name."""
    if spec.packed:
        found = dict(distributions(length)).get(name)
        if found is not None and len(found) == count:
            return Sequences(name, length, _alike(found))
    elif name == f"{count}x{length}":
        return _decode(spec, count, length)
    raise BadSpec(f"{spec.in_words}: there is no problem {name!r} of {count} sequences")


def splits_of(spec: AttentionSpec, pairs: Sequence[Pair], gpu: Gpu) -> int:
    """Over how many thread blocks the keys of a sequence are split, as serving does it."""
    queries, keys = (max((pair[side] for pair in pairs), default=0) for side in (0, 1))
    rows = rows_for((spec.decode or 1) * spec.group, spec.value_dim)
    blocks = len(pairs) * spec.kv_heads * ceil(queries * spec.group / rows)
    return split_count(gpu, blocks, keys)


def places_of(spec: AttentionSpec, pairs: Sequence[Pair], seed: int) -> dict[str, NDArray[Any]]:
    """The tensors that say where the sequences lie, one behind the other or in pages in any order,
    and the scales of 8-bit caches."""
    batch, rng = spec.batch, np.random.default_rng([seed, len(pairs)])
    assert batch is not None
    queries, keys = ([pair[side] for pair in pairs] for side in (0, 1))
    found: dict[str, NDArray[Any]] = {}
    if spec.packed:
        found["StartsQ"] = _starts(queries)
    if batch.page is not None:
        found["Table"] = _table(keys, batch.page, rng)
    else:
        starts = _starts(keys)
        found["StartsK"] = starts[:-1] if batch.lengths else starts
    if batch.page is not None or batch.lengths:
        found["LengthsK"] = np.array(keys, np.int32)
    if spec.kv_dtype is not None:
        for name in ("KDescale", "VDescale"):
            drawn = rng.uniform(0.5, 2.0, (len(pairs), spec.kv_heads))
            found[name] = drawn.astype(np.float32)
    return found


def _starts(lengths: Sequence[int]) -> NDArray[Any]:
    return np.array([0, *accumulate(lengths)], np.int32)


def _table(keys: Sequence[int], size: int, rng: np.random.Generator) -> NDArray[Any]:
    counts = [ceil(n / size) for n in keys]
    pages = iter(rng.permutation(sum(counts)))
    table = np.full((len(keys), max(counts, default=0)), _NO_PAGE, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = [next(pages) for _ in range(count)]
    return table
