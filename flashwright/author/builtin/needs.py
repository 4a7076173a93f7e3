"""Workloads and tilings of the cost model, and the resources that a block needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from flashwright.gpu import Gpu

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "int8": 1}

# Hopper has no mma.sync for fp8: ptxas converts the operands to f16, twice as large, beside the
# slices of operands that a thread holds already (see Gpu.registers).
UNPACKED_REGISTERS = 32
# Where the rows of a tile may not be whole 16 bytes, three warps beside the producer copy it: their
# 16 registers are taken from those of the others. (A tile of fp32 spilled with 16 and not with 32.)
SCORE_REGISTERS = 8  # of each thread of that warpgroup, for each byte
WIDEST = 256  # columns that wgmma multiplies at once, so of O in a warpgroup
FEW_KEYS = 80
"""Keys of a step with which a product of two shared tiles leaves no room for other copies: for 64
rows it reads 4096 / BN + 64 bytes a clock, and shared memory has 128."""


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 stage", "2 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Workload:
    """One kernel's work, and the reference problem its sizes are chosen for (16k tokens in all).

    `window` is how many keys a query sees, itself included, to its left; without `causal` it sees
    as many to its right; the first `sinks` keys it sees whatever the window. With `rows_fixed` the
    rows of a tile are heads of one group at one position; `cols_fixed` dictates the keys per step
    (a selected block). Where keys are selected, kv_len is how many of them a query reads. `options`
    add work to every score. `score_bytes` are those of further tensors with an element for each
    score (a bias), and `key_vectors` have a number for each key. `listed` are the queries and keys
    of a block, where lists say which blocks are visited: tiles divide them. With `kv_dtype` K and V
    have that type in memory, and are converted to `dtype` in shared memory. With `latent` V is the
    first columns of K.
    """

    qk_dim: int
    v_dim: int
    dtype: str = "fp16"
    kv_dtype: str | None = None
    latent: bool = False
    batch: int = 4
    heads: int = 16
    kv_heads: int = 16
    q_len: int = 4096
    kv_len: int = 4096
    causal: bool = False
    window: int | None = None
    sinks: int = 0
    options: tuple[str, ...] = ()
    score_bytes: int = 0
    key_vectors: int = 0
    listed: tuple[int, int] | None = None
    rows_fixed: int | None = None
    cols_fixed: int | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K and V, as they are multiplied."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def mask(self) -> str:
        """The kind of mask in the steps at the edge of the visible keys."""
        return "window" if self.window is not None else "causal" if self.causal else "ragged"

    @property
    def key_bytes(self) -> int:
        """Bytes of one key with its value."""
        return self.key_columns * ELEMENT_BYTES[self.kv_dtype or self.dtype]

    @property
    def key_columns(self) -> int:
        """Columns of one key with its value."""
        return self.qk_dim if self.latent else self.qk_dim + self.v_dim


@dataclass(frozen=True, order=True)
class Tiling:
    """Query rows per block, keys per step, buffers for K and V, compute warps; buffers for Q, and
    which parts of Hopper's schedule are off (the model does not price either)."""

    bm: int
    bn: int
    stages: int
    warps: int
    q_stages: int = 1
    off: tuple[str, ...] = ()

    def __str__(self) -> str:
        stages, warps = count(self.stages, "stage"), count(self.warps, "warp")
        more = [f"{self.q_stages} buffers for Q"] if self.q_stages > 1 else []
        more += [f"no {name}" for name in self.off]
        return ", ".join([f"{self.bm}x{self.bn} with {stages} and {warps}", *more])


@dataclass(frozen=True)
class Footprint:
    """The shared memory and registers of one block."""

    shared_bytes: int
    registers: int
    register_limit: int


# --- by which instructions --------------------------------------------------------------------


def takes_wgmma(workload: Workload, gpu: Gpu) -> bool:
    """Whether some tiling of a workload goes by TMA and wgmma, as the translator has it
    (lower/passes/specialize_warps.py): no gathered rows, in fp8 O twice in registers, as V is
    transposed, and rows that are a multiple of 16 bytes long. Two warpgroups can share an O of up
    to 512 columns."""
    size = workload.element_bytes
    widest = 2 * WIDEST if size == 2 else 128
    whole = all(columns * size % 16 == 0 for columns in (workload.qk_dim, workload.v_dim))
    return gpu.wgmma and workload.rows_fixed is None and workload.v_dim <= widest and whole


def tile_width(columns: int, workload: Workload, gpu: Gpu) -> int:
    """How wide the tiles of tensors with so many columns are; the columns beyond are zeros.

    An MMA takes 16 columns of 16 bits, or 32 of 8 bits. For TMA and wgmma it is a multiple of 32
    columns: 64 for 40, 96 for 72 and 80, 128 for 112. In 16 bits a swizzle then spans at least 64
    bytes. A box of TMA is as wide as the swizzle, so with 32 bytes there would be twice as many
    boxes, each row of which is a quarter of what L2 and shared memory move at once. (Bank conflicts
    do not decide it: the 32-byte swizzle has none either.) The price is P V's zeros, as Q K^T
    leaves its own out (ir.Gemm.depth): over both GEMMs 7 % (112), 10 % (72, 80) and 17 % (40) more
    tensor time than with multiples of 16. A multiple of 64 columns would cost 30 % at 80. All of
    this is counted, not timed.
    """
    narrow = workload.element_bytes == 1 or workload.kv_dtype is not None
    step = 32 if takes_wgmma(workload, gpu) or narrow else 16
    if columns == workload.v_dim and shares_columns(workload, gpu):
        step = 128  # a swizzle's row of 64 columns for each of two warpgroups
    return -(-columns // step) * step


def shares_columns(workload: Workload, gpu: Gpu) -> bool:
    """Whether O has more columns than a warpgroup's registers hold, so that two have the same 64
    rows and each half of the columns."""
    return takes_wgmma(workload, gpu) and workload.v_dim > WIDEST


def uses_wgmma(workload: Workload, tiling: Tiling, gpu: Gpu) -> bool:
    """Warpgroups of 64 rows each, or several with the same 64; anything else runs on mma.sync."""
    along = tiling.warps // gpu.beside(tiling.bm, tiling.warps)
    whole = tiling.bm % 64 == 0 and along * 16 == tiling.bm
    return takes_wgmma(workload, gpu) and whole


@cache
def without_wgmma(gpu: Gpu) -> Gpu:
    """The GPU for an mma.sync kernel: no producer warp, and P replaces S in registers."""
    if not gpu.wgmma:
        return gpu
    usual = Gpu.register_overhead
    return replace(gpu, wgmma=False, reshape_in_place=True, register_overhead=usual)


def turns_tiles(workload: Workload, tiling: Tiling, gpu: Gpu) -> bool:
    """Whether fp8 wgmma transposes V in shared memory and needs a second O in registers."""
    return workload.element_bytes == 1 and uses_wgmma(workload, tiling, gpu)


def holds_queries(workload: Workload, tiling: Tiling, gpu: Gpu) -> bool:
    """Whether Q is multiplied from registers: where each score has a number of its own, which comes
    through shared memory as well, and a step has few keys. On an H200 a bias in fp32 (d128) takes
    0.88 to 0.94 of the time."""
    if not workload.score_bytes or tiling.bn > FEW_KEYS or workload.element_bytes != 2:
        return False
    several = gpu.beside(tiling.bm, tiling.warps) > 1
    return uses_wgmma(workload, tiling, gpu) and not several


# --- shared memory and registers ---------------------------------------------------------------


def footprint(workload: Workload, tiling: Tiling, gpu: Gpu) -> Footprint:
    """The shared memory and registers that one block of a tiling needs."""
    bm, bn = tiling.bm, tiling.bn
    size = workload.element_bytes
    qk_dim, v_dim = (tile_width(d, workload, gpu) for d in (workload.qk_dim, workload.v_dim))
    queries = tiling.q_stages * bm * qk_dim * size
    columns = qk_dim if workload.latent else qk_dim + v_dim
    shared = queries + tiling.stages * bn * columns * size
    if workload.kv_dtype is not None:  # and what K and V are converted to
        converted = 2 if uses_wgmma(workload, tiling, gpu) else 1
        bytes_of_column = tiling.stages * ELEMENT_BYTES[workload.kv_dtype] + converted * size
        shared = queries + bn * columns * bytes_of_column
    tiles = bm * v_dim * 4 + bm * bn * (4 + workload.score_bytes)
    if uses_wgmma(workload, tiling, gpu):  # copied ahead; of vectors a few numbers at a time
        shared += tiling.stages * bn * (bm * workload.score_bytes + 4 * workload.key_vectors)
    else:  # a thread has a quarter of a tile's columns, and all warps have the same ones
        tiles += workload.key_vectors * bn * 32 * tiling.warps
    if turns_tiles(workload, tiling, gpu):  # V before it is transposed, and a step of O
        shared += tiling.stages * bn * v_dim
        tiles += bm * v_dim * 4
    if gpu.beside(bm, tiling.warps) > 1:  # P for all warpgroups, and the maxima that they exchange
        shared += bm * bn * size + 8 * bm * (tiling.warps // 4)
    held = holds_queries(workload, tiling, gpu)
    if held:
        tiles += bm * qk_dim * size
    by_mma_sync = not uses_wgmma(workload, tiling, gpu)
    card = without_wgmma(gpu) if by_mma_sync else gpu
    if not card.reshape_in_place and not held:  # then the numbers come when P has gone
        tiles += bm * bn * size
    # Row maximum, row sum and the rescale factor; each of the four threads of a quad has a copy.
    tiles += 3 * bm * 4 * 4
    registers = card.registers(tiles, tiling.warps)
    if gpu.wgmma and by_mma_sync and size == 1:
        registers += UNPACKED_REGISTERS
    limit = card.register_limit(tiling.warps)
    if workload.score_bytes and not by_mma_sync:
        limit -= -(-4 * SCORE_REGISTERS * workload.score_bytes // tiling.warps)
    return Footprint(shared, registers, limit)


def comfort(workload: Workload, gpu: Gpu) -> int:
    """Registers that a thread should have beyond the estimate, lest it spill.

    On Hopper a spill also serialises wgmma (C7511). With mma.sync ptxas fetches operands ahead as
    far as registers go and then spills a few others: with 204 for tiles (d128 128x64, d64 128x128)
    it did so in half of the kernels, with 188 in none; for sm_100 it did with 188 as well.
    """
    if takes_wgmma(workload, gpu):
        if workload.element_bytes == 2:
            return 16 if workload.score_bytes else 8
        # 128x128 at d128 has 238 of 240 and does not spill; with ALiBi and a causal mask 128x128 at
        # d96, which has 206, does.
        return (16 + 20 * workload.causal) * bool(workload.options)
    # A slope or a position for each row; addresses of a third swizzle atom along k.
    wide = workload.qk_dim * workload.element_bytes > 256
    blackwell = gpu.capability >= 100
    return 28 + 8 * bool(workload.options) + 8 * wide + 8 * blackwell
