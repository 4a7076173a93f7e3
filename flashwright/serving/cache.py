"""A cache of keys and values: where those of each sequence lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashwright.serving import arguments


@dataclass(frozen=True)
class Cache:
    """Keys and values, and where those of each sequence are."""

    k: Any
    v: Any
    table: Any
    entries: Any = None
    padding: Any = None
    starts: Any = None
    """Where the keys of each sequence begin, if it is known."""

    @property
    def longest(self) -> int:
        """The most keys that a sequence may have."""
        pages = 1 if self.table is None else self.table.shape[1]
        return int(pages * self.k.shape[1])

    def tensors(self, lengths: Any) -> dict[str, Any]:
        """The tensors of a call, as reference.py names them."""
        if self.table is not None:
            return {"k": self.k, "v": self.v, "table": self.table, "lengthsk": lengths}
        (k, step), (v, other) = _behind_each_other(self.k), _behind_each_other(self.v)
        if step != other:
            raise ValueError("k_cache and v_cache must have the same strides from entry to entry")
        starts = self.starts
        if starts is None:
            starts = _made(("starts", lengths.shape[0], step, lengths.device))
        return {"k": k, "v": v, "startsk": starts, "lengthsk": lengths}

    def range(self, lengths: Any) -> tuple[Any, Any]:
        """Where the keys of each sequence begin in a cache of entries, None if as many entries from
        one to the next, and how many there are."""
        if self.entries is None and self.padding is None:
            return None, lengths
        starts = self._entries(lengths) * _behind_each_other(self.k)[1]
        if self.padding is not None:
            starts, lengths = starts + self.padding, lengths - self.padding
            if lengths.is_cpu and bool((lengths < 0).any()):
                raise ValueError("cache_leftpad must not be above cache_seqlens")
        return starts.int(), lengths.int()

    def places(self, lengths: Any, count: int) -> tuple[Any, Any]:
        """Where so many tokens behind the keys of each sequence lie: the index of their rows."""
        places = positions(lengths, count).long()
        if self.table is None:
            return self._entries(lengths).long()[:, None], places
        size = self.k.shape[1]
        return self.table.long().gather(1, places // size), places % size

    def _entries(self, lengths: Any) -> Any:
        if self.entries is not None:
            return self.entries
        return torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device)


_NUMBERS: dict[tuple[str, int, int, Any], Any] = {}


def _made(known: tuple[str, int, int, Any]) -> Any:
    """Where the entries of a cache begin ("starts"), or what all sequences have ("lengths"): for a
    batch, from a number, on a device; int32, made once."""
    kind, batch, number, device = known
    found = _NUMBERS.get(known)
    if found is None:
        found = torch.arange(batch, dtype=torch.int32, device=device) if kind == "starts" else 1
        found = torch.full((batch,), number, dtype=torch.int32, device=device) * found
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _NUMBERS[known] = found  # else it belongs to the graph, and has no numbers yet
    return found


def _behind_each_other(cache: Any) -> tuple[Any, int]:
    """A cache of entries as one tensor of tokens, and the tokens from one entry to the next."""
    entries, positions, *rest = cache.shape
    if not cache.numel():
        return cache.flatten(0, 1), positions
    far, near, *inner = cache.stride()
    if not near or far % near:
        raise ValueError("the entries of a cache must be whole rows apart: make it contiguous")
    step = far // near if entries > 1 else positions
    tokens = (entries - 1) * step + positions
    return cache.as_strided((tokens, *rest), (near, *inner)), step


def lengths_of(q: Any, cache: Cache, lengths: Any) -> Any:
    """How many keys each sequence has, as int32. Raises ValueError or TypeError, with the argument,
    for tensors that do not fit."""
    kind = "pages" if cache.table is not None else "batch"
    keys = f"{kind}, positions, heads, dim"
    given = {"q": q, "k_cache": cache.k, "v_cache": cache.v}
    axes = {"q": "batch, tokens, heads, dim", "k_cache": keys, "v_cache": keys}
    arguments.check_axes(given, axes)
    if cache.k.shape[:-1] != cache.v.shape[:-1]:
        raise ValueError("k_cache and v_cache must have the same positions and heads")
    batch, device = q.shape[0], q.device
    if cache.table is not None:
        arguments.check_numbers("block_table", cache.table, device, (batch, None))
        if cache.entries is not None or cache.padding is not None:
            raise ValueError("cache_batch_idx and cache_leftpad are for a cache without pages")
        if lengths is None:
            raise ValueError("block_table needs cache_seqlens: how many keys each sequence has")
    for name, numbers in (("cache_batch_idx", cache.entries), ("cache_leftpad", cache.padding)):
        if numbers is not None:
            arguments.check_numbers(name, numbers, device, (batch,))
    if cache.entries is not None:
        arguments.check_range(
            "cache_batch_idx", cache.entries, cache.k.shape[0] - 1, "the last entry is"
        )
    anywhere = cache.table is not None or cache.entries is not None or cache.starts is not None
    if not anywhere and cache.k.shape[0] != batch:
        raise ValueError(f"k_cache has {cache.k.shape[0]} entries and q {batch} sequences")
    if lengths is None:
        return _made(("lengths", batch, cache.k.shape[1], device))
    if isinstance(lengths, int):
        if not 0 <= lengths <= cache.longest:
            raise ValueError(
                f"cache_seqlens is {lengths}, and the cache has room for {cache.longest}"
            )
        return torch.full((batch,), lengths, dtype=torch.int32, device=device)
    arguments.check_numbers("cache_seqlens", lengths, device, (batch,))
    arguments.check_range("cache_seqlens", lengths, cache.longest, "the cache has room for")
    return lengths


def most_known(cache: Cache, lengths: Any) -> int:
    """The keys of the longest sequence as far as the host knows: 0 if a GPU has the lengths."""
    if isinstance(lengths, torch.Tensor):
        return int(lengths.max()) if lengths.is_cpu and lengths.numel() else 0
    return lengths if isinstance(lengths, int) else cache.longest


def positions(lengths: Any, count: int) -> Any:
    """The positions of `count` tokens behind the keys of each sequence."""
    return lengths[:, None] + torch.arange(count, dtype=torch.int32, device=lengths.device)
