"""Inputs of a case: scores that are neither flat nor one-hot, and values that tell keys apart."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.fuzz.case import FuzzCase
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor
from flashwright.semantics.interpret import NUMPY_DTYPES

Array = NDArray[Any]

KINDS = ("normal", "whole", "rising", "falling", "negative")
"""normal: Gaussian. whole: small integers, exact in every type. rising, falling: keys that grow or
shrink along the sequence, so that the running maximum moves late or never. negative: all scores
far below zero."""
PAGED = "Table"
_DOCUMENT = 24  # positions of a document, on average


def make_inputs(
    case: FuzzCase, plan: LaunchPlan, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int]
) -> dict[str, Array]:
    """Every tensor that the kernel reads, in the caller's order of axes, in its element type."""
    made = {}
    for tensor in (t for t in plan.tensors if t.read):
        stream = zlib.crc32(tensor.name.encode())
        rng = np.random.default_rng([case.seed & 0xFFFFFFFF, stream])
        values = _values(case, tensor, shapes[tensor.name], dims, rng)
        made[tensor.name] = values.astype(NUMPY_DTYPES[tensor.dtype])
    return made


def _values(
    case: FuzzCase,
    tensor: PlanTensor,
    shape: tuple[int, ...],
    dims: Mapping[str, int],
    rng: np.random.Generator,
) -> Array:
    name = tensor.name
    if name == PAGED and tensor.dtype == "int32":
        return _pages(shape, dims.get("pages", 1), rng)
    if name.startswith("Doc"):
        steps = rng.random(shape) < 1 / _DOCUMENT
        return np.cumsum(steps, axis=-1)
    if name == "Lengths":
        return rng.integers(1, dims["kv_len"] + 1, shape)
    if name.startswith("Starts"):
        side = "q" if "Q" in name else "kv"
        return _starts(shape[0] - 1, dims[f"{side}_tokens"], dims[f"{side}_len"], rng)
    if tensor.dtype == "int32":
        return rng.integers(0, 3, shape)
    if name.startswith("Keep"):
        return rng.integers(0, 3, shape).astype(np.float64)
    if not name.startswith(("Q", "K")) or not shape:
        small = rng.integers(-3, 4, shape) if case.inputs == "whole" else rng.standard_normal(shape)
        return np.asarray(small, np.float64)
    return _scored(case, name, shape, rng)


def _scored(case: FuzzCase, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of Q and K, which determine the scores."""
    spread = case.spread if name.startswith("Q") else 1.0
    if case.inputs == "whole":
        unit = 2.0 ** np.round(np.log2(spread)) if spread < 1 else 1.0
        return rng.integers(-2, 3, shape) * unit
    values = rng.standard_normal(shape) * spread
    if case.inputs == "negative":
        side = 1.0 if name.startswith("Q") else -1.0
        return side * (np.abs(values) + 0.5 * spread)
    if case.inputs in ("rising", "falling") and name.startswith("K") and len(shape) > 1:
        ramp = np.linspace(0.3, 2.0, shape[-2]) if shape[-2] > 1 else np.ones(1)
        values = values * (ramp if case.inputs == "rising" else ramp[::-1])[:, None]
    return np.asarray(values)


def _starts(count: int, total: int, longest: int, rng: np.random.Generator) -> Array:
    """Where sequences begin that lie behind each other, none longer than the longest, and the end
    of the last; some have no tokens."""
    starts = [0]
    for left in reversed(range(count)):
        rest = total - starts[-1]
        least, most = max(0, rest - left * longest), min(longest, rest)
        length = least if rng.random() < 0.2 else rng.integers(least, most + 1)
        starts.append(starts[-1] + int(length))
    return np.array(starts)


def _pages(shape: tuple[int, ...], pages: int, rng: np.random.Generator) -> Array:
    """A table in which no page is used twice by a sequence."""
    rows = [rng.permutation(max(pages, shape[-1]))[: shape[-1]] for _ in range(shape[0])]
    return np.stack(rows) % max(pages, 1)
