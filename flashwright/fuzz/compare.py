"""Compares a kernel's outputs with the interpreter's, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FACTOR = 8.0
"""The tolerance, as a multiple of the largest movement in a row of perturbed runs."""
_UNIT = {
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    "fp32": 2.0**-22,
    "e4m3": 2.0**-3,
    "e5m2": 2.0**-2,
    "int32": 0.0,
    "int8": 0.0,
}
_LEAST = 1e-6


def difference(found: Array, expected: Array, moved: Sequence[Array], dtype: str) -> str | None:
    """What is wrong with an output, or None; `moved` are the outputs of perturbed runs."""
    got, want = (np.asarray(x, np.float64) for x in (found, expected))
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    with np.errstate(all="ignore"):
        noise = np.max([np.abs(np.asarray(m, np.float64) - want) for m in moved], axis=0)
        steady = np.isfinite(noise)
        noise = np.where(steady, noise, 0.0)
        # A row's weights are rounded together: one element may not have moved by chance.
        row = noise.max(axis=-1, keepdims=True) if noise.ndim and noise.size else noise
        least = _LEAST if _UNIT[dtype] else 1  # of whole numbers
        limit = FACTOR * row + 1.01 * _UNIT[dtype] * np.abs(want) + least
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        bad = ~same & ~(np.abs(got - want) <= limit)
        bad &= steady | (np.isnan(got) != np.isnan(want))
    count = int(bad.sum())
    if not count:
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    text = f"{count} of {bad.size} elements, first at {at}: {got[at]:.6g}, not {want[at]:.6g}"
    return f"{text} (limit {float(limit[at]):.2g})"
