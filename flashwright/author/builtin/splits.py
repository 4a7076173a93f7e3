"""How a decode fills a GPU: the rows of its tiles, and the thread blocks that share its keys."""

from __future__ import annotations

from math import ceil

from flashwright.author.builtin.needs import WIDEST
from flashwright.gpu import Gpu

ROWS = (16, 64, 128)
"""A decode's kernel is made for so many rows of a tile: the heads of a group, for each query."""
SHARED_ROWS = 64
"""Those of tiles whose columns warpgroups share."""
MOST_SPLITS = 128
_KEYS = 64
"""Of one step, roughly; a split has at least one."""
_FULL = 0.8
"""Of the SMs: with so many thread blocks, keys are not split."""
_NEAR = 0.85
"""Of the best efficiency: the fewest splits that reach it are taken."""


def rows_for(count: int, v_dim: int) -> int:
    """Which of ROWS a decode with so many rows of a kv head takes."""
    if v_dim > WIDEST:
        return SHARED_ROWS
    return next((rows for rows in ROWS if count <= rows), ROWS[-1])


def split_count(gpu: Gpu, blocks: int, longest: int) -> int:
    """Over how many thread blocks the keys of a sequence are split, if without that there are
    `blocks` of them: as few as fill whole waves of the GPU nearly as well as any number does."""
    most = min(MOST_SPLITS, gpu.sms, ceil(longest / _KEYS))
    if blocks >= _FULL * gpu.sms or most <= 1:
        return 1

    def efficiency(splits: int) -> float:
        waves = blocks * splits / gpu.sms
        return waves / ceil(waves)

    best = max(map(efficiency, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if efficiency(n) >= _NEAR * best)
