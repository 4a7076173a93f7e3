"""Sizes of a generated program: tiles, types, and the lengths of its problems."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.fuzz.choices import Choices
from flashwright.fuzz.draft import Draft

GPUS = ("h200", "a100", "l40s", "t4")
_SHARE = (("h200", 45), ("a100", 20), ("l40s", 15), ("t4", 20))
MOST_REGISTERS = 130  # of a thread for its tiles
MOST_BLOCKS, MOST_TRIPS = 6, 6


@dataclass
class ProgramSizes:
    """The GPU, element type, tile sizes and warps of a program."""

    gpu: str
    dtype: str
    warps: int
    bm: int
    bn: int
    head_dim: int
    v_dim: int
    shares: int = 1  # warpgroups that share rows and split the columns

    @property
    def rows(self) -> int:
        """The rows of all warps together."""
        return 16 * self.warps // self.shares

    def registers(self, streams: int, outputs: int) -> int:
        """Registers of a thread for the tiles of scores and outputs."""
        words = self.bm * (self.bn * streams + self.v_dim * outputs)
        return words // (32 * self.warps)


def choose_gpu(choices: Choices, gpus: tuple[str, ...] = GPUS) -> str:
    """A GPU; the first choice of every program."""
    return choices.weighted([(name, weight) for name, weight in _SHARE if name in gpus])


def choose_sizes(draft: Draft, gpu: str) -> ProgramSizes:
    """Draw tiles and types for a GPU; most of them are valid."""
    c = draft.c
    dtype = _dtype(c, gpu)
    eight = dtype == "e4m3"
    warps = c.weighted([(4, 66), (8, 16), (2, 8), (1, 4), (12, 6)])
    bm = 16 * warps * c.weighted([(1, 82), (2, 18)])
    if bm > 192:
        bm = 16 * warps
    by_columns = gpu == "h200" and not eight and warps > 4 and c.chance(0.5)
    wide = [(32, 40), (64, 22), (16, 18), (48, 8), (96, 4), (80, 3), (128, 3), (40, 1), (24, 1)]
    bn = c.weighted([(n, w) for n, w in wide if not eight or n % 32 == 0])
    depths = [(32, 46), (64, 30), (16, 6), (48, 6), (128, 4), (96, 4), (80, 3), (112, 1)]
    depths = [(n, w) for n, w in depths if not eight or n % 32 == 0]
    head_dim = c.weighted(depths)
    v_dim = head_dim if not c.chance(0.3) else c.weighted(depths)
    shares = warps // 4 if by_columns else 1
    if by_columns:
        bm, v_dim = 64, 64 * shares * c.weighted([(1, 80), (2, 20)])
        bn = c.weighted([(n * shares // 2, w) for n, w in ((64, 50), (32, 50))])
        draft.tag("by columns")
    draft.tag(f"dtype:{dtype}", f"warps:{warps}", f"bn:{bn}", f"d:{head_dim}")
    if bm > 16 * warps:
        draft.tag("bm:two-per-warp")
    if v_dim != head_dim:
        draft.tag("v_dim")
    return ProgramSizes(gpu, dtype, warps, bm, bn, head_dim, v_dim, shares)


def _dtype(c: Choices, gpu: str) -> str:
    if gpu == "t4":
        return "fp16"
    wide = [("fp16", 50), ("bf16", 35)]
    return c.weighted([*wide, ("e4m3", 12)] if gpu in ("l40s", "h200") else wide)


def length(c: Choices, tile: int, most: int, ring: int = 2) -> int:
    """A length around the multiples of a tile and around the depth of its ring."""
    options = [2 * tile, tile, 1, tile + 1, tile - 1, 2 * tile + 1, 2 * tile - 1, 3 * tile]
    options += [ring * tile - 1, ring * tile + 1, 3 * tile + 8, tile // 2 + 3, 4 * tile + 5]
    options += [5 * tile + tile // 2, most * tile]
    return max(1, min(c.pick(options), most * tile))


def problems(
    draft: Draft, sizes: ProgramSizes, group: int, paged: bool, count: int = 2
) -> tuple[dict[str, int], ...]:
    """Problems of a few thread blocks and a few iterations."""
    c, found = draft.c, []
    for _ in range(count):
        batch, kv_heads = c.weighted([((1, 1), 60), ((1, 2), 20), ((2, 1), 20)])
        rows = max(1, MOST_BLOCKS // (batch * kv_heads * group))
        q_len = length(c, sizes.bm, min(rows, 3))
        kv_len = length(c, sizes.bn, MOST_TRIPS)
        if c.chance(0.3):
            kv_len = q_len
        dims = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads}
        dims |= {"q_len": q_len, "kv_len": kv_len}
        if paged:
            blocks = -(-kv_len // sizes.bn)
            dims |= {"n_blocks": blocks + c.below(2), "pages": blocks + 1 + c.below(3)}
        found.append(dims)
    return tuple(found)
