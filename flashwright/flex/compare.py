"""A captured function against the function itself, at random elements.

Capture records what a function does once. What a recording cannot hold (NumPy on an index, a value
that the function computed from an index beforehand) would be silently wrong: here it shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

ELEMENTS = 48
CLOSE = 1e-4


def elements(dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Elements to compare: the corners, one on the diagonal, then random ones."""
    draw = random.Random(0)
    sizes = {f"{n}_idx": dims[d] for n, d in _SIZES.items()}
    yield dict.fromkeys(sizes, 0)
    yield {name: size - 1 for name, size in sizes.items()}
    for number in range(ELEMENTS):
        found = {name: draw.randrange(size) for name, size in sizes.items()}
        if number % 4 == 0:
            found["kv_idx"] = min(found["q_idx"], sizes["kv_idx"] - 1)
        yield found


_SIZES = {"batch": "batch", "head": "heads", "q": "q_len", "kv": "kv_len"}


def differs(found: float, expected: float) -> bool:
    """Whether two results are not the same number, up to rounding in fp32."""
    if math.isnan(expected) or math.isinf(expected):
        return not (found == expected or (math.isnan(found) and math.isnan(expected)))
    return not abs(found - expected) <= CLOSE * max(1.0, abs(expected))
