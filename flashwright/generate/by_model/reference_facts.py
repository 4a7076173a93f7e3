"""The inputs and outputs of a user's reference, for the prompts: found by calling it.

The text of the function does not say which shapes `make_inputs` draws, or what a row without keys
gives. So the function is called on three small problems, and each size of an input is given by the
dims that it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.author.llm.operator_words import Given, Line
from flashwright.files import sha256
from flashwright.judge.inputs import make_inputs, narrowed
from flashwright.judge.problems import sizes
from flashwright.judge.reference import split
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.sandbox.tensors import dtype_name
from flashwright.spec import AttentionSpec, BadSpec

Array = NDArray[Any]

# Queries, keys, batches, kv heads: no two alike in a problem. The last has fewer keys than queries.
PROBLEMS = ((7, 11, 2, 5), (13, 17, 3, 2), (19, 6, 2, 3))
_LETTERS = {"batch": "B", "heads": "H", "kv_heads": "H", "q_len": "L", "kv_len": "L"}
_OTHERS = "MRSTUW"


_USUAL_LETTERS = {4: "BHLD", 3: "BHL", 2: "LD", 1: "L"}
_FOUND: dict[str, Given | None] = {}


def of_reference(where: Path, spec: AttentionSpec) -> Given | None:
    """The inputs and outputs of a reference, found once for each text of it; None if unusable."""
    try:
        text = Path(split(str(where))[0]).read_bytes()
        key = sha256(text + f"{where}{spec.model_dump_json()}".encode())
        if key not in _FOUND:
            _FOUND[key] = _call(where, spec)
    except (OSError, BadSpec):
        return None  # the judge reports it, if it cannot use the file either
    return _FOUND[key]


def _call(where: Path, spec: AttentionSpec) -> Given:
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
        return Given(inputs, reads)
    before = dims[-1]["q_len"] - dims[-1]["kv_len"]
    rows = found["O"][:, :, :before] if found.get("O", np.zeros(0)).ndim == 4 else None
    empty = None if rows is None or np.isnan(rows).any() else not rows.any()
    return Given(inputs, reads, tuple(found), empty)


def _inputs(
    made: Sequence[Mapping[str, Array]], dims: Sequence[Mapping[str, int]]
) -> Iterator[Line]:
    """The inputs that every problem has, with as many axes."""
    for name, array in made[0].items():
        every = [one[name] for one in made if name in one and one[name].ndim == array.ndim]
        if len(every) == len(made):
            found = [_size([a.shape[n] for a in every], dims) for n in range(array.ndim)]
            yield name, _shape(found), dtype_name(array.dtype), "input"


def _shape(sizes: Sequence[str]) -> str:
    """The sizes as an Allocate has them: with letters, unless these are TL's usual ones."""
    axes = [*_lettered(sizes)]
    usual = "".join(letter for letter, _ in axes) == _USUAL_LETTERS.get(len(axes))
    return ", ".join(size if usual else f"{letter}: {size}" for letter, size in axes)


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
