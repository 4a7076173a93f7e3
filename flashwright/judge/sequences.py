"""Sequences of any lengths: problems with them, their tensors as a spec lays them out, and one of
them at a time.

What no sequence owns is poisoned: keys past the end of one, positions and pages that none has and
the rest of the last page are NaN; entries of the table past the end name no page. Queries past the
last sequence are numbers, so that a kernel that stores rows of them is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.spec import AttentionSpec

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Pair = tuple[int, int]
"""The queries and the keys of a sequence."""

BATCH = 5
"""The fewest sequences of a problem that has any."""
EDGES = (17, 63, 64, 65, 127, 128, 129)
"""Lengths of sequences beside the longest one: ragged, and around whole tiles."""
NO_PAGE = 2_147_480_000
"""What the table has where a sequence has no page."""
ROOM = 3
"""Positions of a cache behind the longest sequence."""
SPARE = 2
"""Tokens behind the last sequence, and pages of no sequence."""
SPLITS = 5


def sized(spec: AttentionSpec, dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a problem, with several sequences and no more queries than the spec has; for a
    decode also by how many thread blocks the keys are split."""
    found = dict(dims)
    if spec.batch is None:
        return found
    found["batch"] = max(BATCH, dims["batch"]) if dims["batch"] else 0
    if spec.decode is not None:
        found["q_len"] = min(spec.decode, dims["q_len"])
    if spec.decode is not None and not spec.unsplit:
        found["splits"] = spec.dims.get("splits", 1 + dims["kv_len"] % SPLITS)
    return found


def lengths(spec: AttentionSpec, dims: Mapping[str, int], seed: int) -> list[Pair]:
    """The lengths of the sequences of a problem, the longest among them, in an order that the seed
    draws. Which lengths there are depends on the sizes alone, and so do all shapes."""
    q_len, kv_len, batch = (dims[name] for name in ("q_len", "kv_len", "batch"))
    some = [n for n in (*EDGES, kv_len - 1, kv_len // 2) if 1 < n < kv_len] or [kv_len]
    turned = [some[(n + kv_len) % len(some)] for n in range(len(some))]
    keys = [kv_len, 0, 1, *itertools.islice(itertools.cycle(turned), max(0, batch - 3))]
    rows = [q_len] * batch
    if spec.packed:
        few = [min(n, q_len) for n in (17, 1, q_len // 2, 0, 65, q_len)]
        rows = [q_len, *itertools.islice(itertools.cycle(few), max(0, batch - 1))]
    pairs = list(zip(rows, keys, strict=False))[:batch]
    return [pairs[n] for n in np.random.default_rng([seed, len(pairs)]).permutation(len(pairs))]


# --- laid out -----------------------------------------------------------------------------------


def laid(spec: AttentionSpec, made: Inputs, pairs: Sequence[Pair], seed: int) -> dict[str, Array]:
    """The tensors of a problem, from those of a rectangular batch of the longest lengths."""
    rng = np.random.default_rng([seed, len(pairs), 1])
    queries, keys = ([pair[side] for pair in pairs] for side in (0, 1))
    found = dict(made)
    if spec.packed:
        found["Q"], found["StartsQ"] = _behind(made["Q"], queries, 1.0)
    batch = spec.batch
    assert batch is not None
    if batch.page is not None:
        return found | _in_pages(made, keys, batch.page, rng)
    if batch.lengths:
        return found | _in_cache(made, keys, rng)
    for name in _held(made):
        found[name], found["StartsK"] = _behind(made[name], keys, _poison(made[name].dtype))
    return found


def _held(tensors: Inputs) -> list[str]:
    """The tensors that have a row for each key."""
    return [name for name in "KV" if name in tensors]


def _poison(dtype: np.dtype[Any]) -> Any:
    """What no kernel may see of a type: NaN, or its greatest number."""
    return np.array(np.iinfo(dtype).max if dtype.kind == "i" else np.nan, dtype)[()]


def _behind(array: Array, counts: Sequence[int], spare: float) -> tuple[Array, Array]:
    """(heads, tokens, dim) from (batch, heads, positions, dim), and where each sequence begins."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    _, heads, _, width = array.shape
    packed = np.full((heads, int(starts[-1]) + SPARE, width), spare, array.dtype)
    for b, (start, count) in enumerate(zip(starts, counts, strict=False)):
        packed[:, start : start + count] = array[b, :, :count]
    return packed, starts


def _in_cache(made: Inputs, counts: Sequence[int], rng: np.random.Generator) -> dict[str, Array]:
    """K and V with room behind each sequence and for one more; where each begins, and its keys."""
    step = made["K"].shape[2] + ROOM
    starts = rng.permutation(len(counts) + 1)[: len(counts)] * step
    found = {"StartsK": starts.astype(np.int32), "LengthsK": np.array(counts, np.int32)}
    for name in _held(made):
        _, heads, _, width = made[name].shape
        shape = (heads, (len(counts) + 1) * step, width)
        found[name] = np.full(shape, _poison(made[name].dtype))
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            found[name][:, start : start + count] = made[name][b, :, :count]
    return found


def _in_pages(
    made: Inputs, counts: Sequence[int], size: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Pages in any order, the table and the numbers of keys."""
    taken = [-(-count // size) for count in counts]
    pages = rng.permutation(sum(taken) + SPARE)
    most = -(-made["K"].shape[2] // size) + 1
    table = np.full((len(counts), most), NO_PAGE, np.int32)
    found = {"Table": table, "LengthsK": np.array(counts, np.int32)}
    for name in _held(made):
        _, heads, _, width = made[name].shape
        found[name] = np.full((len(pages), heads, size, width), _poison(made[name].dtype))
    free = iter(pages)
    for b, (own, count) in enumerate(zip(taken, counts, strict=True)):
        for n in range(own):
            table[b, n] = page = next(free)
            rows = slice(n * size, min(count, (n + 1) * size))
            for name in _held(made):
                part = made[name][b, :, rows]
                found[name][page, :, : part.shape[1]] = part
    return found


def reordered(inputs: Inputs) -> dict[str, Array]:
    """The same tensors with the sequences in the reverse order: other starts, lengths and pages."""
    found = dict(inputs)
    for name in ("LengthsK", "Table", *_SCALES):
        if name in inputs:
            found[name] = np.ascontiguousarray(inputs[name][::-1])
    for name in ("StartsQ", "StartsK"):
        if name in inputs and (name == "StartsQ" or "LengthsK" not in inputs):
            counts = np.diff(inputs[name])[::-1]
            found[name] = np.cumsum([0, *counts], dtype=np.int32)
        elif name in inputs:
            found[name] = np.ascontiguousarray(inputs[name][::-1])
    return found


# --- one at a time ------------------------------------------------------------------------------


def count(inputs: Inputs) -> int:
    """How many sequences there are."""
    return len(inputs["StartsQ"]) - 1 if "StartsQ" in inputs else len(inputs["Q"])


def rows(inputs: Inputs, b: int) -> tuple[Any, ...]:
    """The place of a sequence's rows in Q and in the outputs: heads, queries and the rest."""
    if "StartsQ" not in inputs:
        return (b,)
    first, last = inputs["StartsQ"][b : b + 2]
    return slice(None), slice(int(first), int(last))


def key(inputs: Inputs, b: int, head: int, number: int) -> tuple[int, ...]:
    """The place of a sequence's key in K and V."""
    if "Table" in inputs:
        size = inputs["K"].shape[2]
        return int(inputs["Table"][b, number // size]), head, number % size
    return head, int(inputs["StartsK"][b]) + number


def keys(inputs: Inputs, b: int) -> int:
    """How many keys a sequence has."""
    if "LengthsK" in inputs:
        return int(inputs["LengthsK"][b])
    return int(inputs["StartsK"][b + 1] - inputs["StartsK"][b])


def each_length(inputs: Inputs) -> list[Pair]:
    """The queries and the keys of each sequence."""
    queries = [inputs["Q"].shape[2]] * count(inputs)
    if "StartsQ" in inputs:
        queries = np.diff(inputs["StartsQ"]).tolist()
    return [(rows, keys(inputs, b)) for b, rows in enumerate(queries)]


def one(inputs: Inputs, b: int) -> dict[str, Array]:
    """The inputs of one sequence, as a rectangular batch of one."""
    found = {name: x for name, x in inputs.items() if name not in _PLACES}
    found["Q"] = inputs["Q"][rows(inputs, b)][None]
    for name in _held(inputs):
        found[name] = _keys(inputs, name, b)[None]
    return found | {name: inputs[name][b : b + 1] for name in _SCALES if name in inputs}


_PLACES = ("StartsQ", "StartsK", "LengthsK", "Table")
_SCALES = ("KDescale", "VDescale")
"""The tensors with numbers for each sequence and head."""


def _keys(inputs: Inputs, name: str, b: int) -> Array:
    """(heads, keys, dim)."""
    array, many = inputs[name], keys(inputs, b)
    if "Table" not in inputs:
        first = int(inputs["StartsK"][b])
        return array[:, first : first + many]
    _, heads, size, width = array.shape
    pages = inputs["Table"][b, : -(-many // size)]
    laid_out: Array = array[pages].swapaxes(0, 1).reshape(heads, len(pages) * size, width)
    return laid_out[:, :many]


def attention(
    spec: AttentionSpec, inputs: Inputs, alone: Callable[[Inputs], Mapping[str, Array]]
) -> dict[str, Array]:
    """The outputs of all sequences, from those of each; NaN in rows that no sequence has."""
    found: dict[str, Array] = {}
    shape = inputs["Q"].shape[:-1]
    for b, outputs in _each(inputs, alone):
        for name, part in outputs.items():
            whole = found.setdefault(name, np.full((*shape, *part.shape[3:]), np.nan))
            whole[rows(inputs, b)] = part[0]
    empty = {"O": np.full((*shape, spec.value_dim), np.nan), "LSE": np.full(shape, np.nan)}
    return found or empty


def _each(
    inputs: Inputs, alone: Callable[[Inputs], Mapping[str, Array]]
) -> Iterator[tuple[int, Mapping[str, Array]]]:
    for b in range(count(inputs)):
        yield b, alone(one(inputs, b))
