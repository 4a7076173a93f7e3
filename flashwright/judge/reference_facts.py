"""What a user's reference takes and gives, found by calling it: for whoever writes a kernel for it.

Its text alone does not say which shapes `make_inputs` draws, or what a row without keys gives. So
it is called on three small problems, and each size of each input is told by the dims that it
follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.judge.inputs import make_inputs, narrowed
from flashwright.judge.problems import sizes
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.sandbox.tensors import dtype_name
from flashwright.spec import AttentionSpec, BadSpec

Array = NDArray[Any]

# Queries, keys, batches, kv heads: no two alike in a problem. The last has fewer keys than queries.
PROBLEMS = ((7, 11, 2, 5), (13, 17, 3, 2), (19, 6, 2, 3))
_LETTERS = {"batch": "B", "heads": "H", "kv_heads": "H", "q_len": "L", "kv_len": "L"}
_OTHERS = "MRSTUW"


@dataclass(frozen=True)
class InputFacts:
    """An input: its axes as (letter, size), and its type."""

    name: str
    axes: tuple[tuple[str, str], ...]
    dtype: str


@dataclass(frozen=True)
class ReferenceFacts:
    """What is known of a reference; None where a call did not show it."""

    drawn: tuple[InputFacts, ...] = ()
    """The inputs that its make_inputs draws."""
    reads: tuple[str, ...] = ()
    """The names that its text asks for; empty where it does not show them."""
    outputs: tuple[str, ...] | None = None
    empty_rows: bool | None = None
    """Whether queries before the first key give 0 (and LSE -inf)."""


def facts_of(where: str | Path, spec: AttentionSpec) -> ReferenceFacts:
    """What the reference of a spec takes and gives; BadSpec where the file cannot be used."""
    reference = ReferenceProcess(where)
    dims = [{**spec.dims, **sizes(spec, *problem)} for problem in PROBLEMS]
    drawn = [reference.make_inputs(np.random.default_rng(0), one) for one in dims]
    made = [narrowed(one, spec.input_dtype) for one in drawn if one is not None]
    inputs = tuple(_inputs(made, dims)) if len(made) == len(dims) else ()
    last = {**make_inputs(spec, dims[-1], 0), **(made[-1] if made else {})}
    known = {name.lower() for name in last}  # a parameter may also be a size, or have a default
    reads = tuple(n for n in reference.reads if not reference.by_name or n.lower() in known)
    try:
        found = reference(last, dims[-1])
    except BadSpec:  # it wants inputs that only a program declares
        return ReferenceFacts(inputs, reads)
    before = dims[-1]["q_len"] - dims[-1]["kv_len"]
    rows = found["O"][:, :, :before] if found.get("O", np.zeros(0)).ndim == 4 else None
    empty = None if rows is None or np.isnan(rows).any() else not rows.any()
    return ReferenceFacts(inputs, reads, tuple(found), empty)


def _inputs(
    made: Sequence[Mapping[str, Array]], dims: Sequence[Mapping[str, int]]
) -> Iterator[InputFacts]:
    """The inputs that every problem has, with as many axes."""
    for name, array in made[0].items():
        every = [one[name] for one in made if name in one and one[name].ndim == array.ndim]
        if len(every) == len(made):
            found = [_size([a.shape[n] for a in every], dims) for n in range(array.ndim)]
            yield InputFacts(name, tuple(_lettered(found)), dtype_name(array.dtype))


def _size(seen: Sequence[int], dims: Sequence[Mapping[str, int]]) -> str:
    """A size by the dims that it follows, or as it was seen on the first problem."""
    alike = (name for name in dims[0] if [one[name] for one in dims] == list(seen))
    if name := next(alike, ""):
        return name
    if len(set(seen)) == 1:
        return str(seen[0])
    for name in dims[0]:
        values = [one[name] for one in dims]
        for factor in (1, 2, 3, 4):
            more = {size - factor * value for size, value in zip(seen, values, strict=True)}
            if len(more) == 1:
                return _sum(name if factor == 1 else f"{factor} * {name}", more.pop())
    both = {n - one["q_len"] - one["kv_len"] for n, one in zip(seen, dims, strict=True)}
    if len(both) == 1:
        return _sum("q_len + kv_len", both.pop())
    problem = ", ".join(f"{name} = {value}" for name, value in dims[0].items())
    return f"{seen[0]} where {problem}"


def _sum(text: str, more: int) -> str:
    return text if more == 0 else f"{text} + {more}" if more > 0 else f"{text} - {-more}"


def _lettered(found: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The sizes with letters for their axes: TL's where a size has one, others for the rest."""
    letters: list[str | None] = []
    for size in found:
        letter = _LETTERS.get(size)
        letters.append(letter if letter not in letters else None)
    free = [letter for letter in _OTHERS if letter not in letters]
    last = len(found) - 1
    if last >= 0 and letters[last] is None and (last >= 2 or letters[:last] == ["L"]):
        letters[last] = "D"
        if last >= 1 and letters[last - 1] is None and "L" not in letters:
            letters[last - 1] = "L"
    for letter, size in zip(letters, found, strict=True):
        yield letter or free.pop(0), size
