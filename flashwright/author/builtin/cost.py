"""The cost model: the estimated time of one tiling of an attention kernel.

One block holds `bm` query rows and loops over the keys, `bn` at a time. Each term below is cycles
of one SM for one such step. The SM's units run in parallel, so a step takes as long as its busiest
unit plus the part of the others that is not hidden (`exposed`).

The instructions are counted in the kernels (counted.py). A test counts the bytes of shared memory
and L2, too, and compares them with the formulas below. The constants are few and each says where
it comes from. Those of `exposed` and `fixed_cycles` were set for wgmma so that known kernels come
out near their measured share of the dense matmul rate (FlashAttention-3 on an H200: d128 full 86 %,
d64 full 69 %), for mma.sync to timings of our own kernels on an H200. The model ranks tilings; its
microseconds are at boost clock: a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashwright.author.builtin import counted, steps
from flashwright.author.builtin.needs import (
    Tiling,
    Workload,
    comfort,
    footprint,
    tile_width,
    uses_wgmma,
)
from flashwright.gpu import Gpu

# 32 banks of 4 bytes (CUDA programming guide, shared memory, 5.x and later).
SHARED_BYTES_PER_CLOCK = 128
# Each of an SM's four schedulers issues one instruction of a warp per clock (architecture papers).
ISSUED_PER_CLOCK = 4
# Four threads share a row of an mma accumulator, and each works out its maximum and factor (PTX).
LANES_OF_A_ROW = 4
# Per step, with wgmma: loop and address arithmetic, and waiting at barriers. Guesses from
# before there were such kernels to count; with ALONE_WGMMA they give the shares named above.
ISSUE_CYCLES = 80
WAIT_CYCLES = 60
# Per step, with mma.sync, beyond what is issued: two block barriers, and the operands that are
# fetched behind them. With the counts it gives, within 1.1 %, what 300 cycles and 100 of waiting
# gave without, which were fitted to 228 timings of 57 tilings on an H200 (docs/performance.md).
MEET_CYCLES = 190
# From asking for a tile to having it in shared memory, with the memory system busy. A guess.
LATENCY_CYCLES = 700
# mma.sync cannot feed Hopper's tensor cores: the best mma.sync attention reaches 346 TFLOPS on a
# card whose dense matmuls reach 790, FlashAttention-3 681 (notes on the fastest kernels).
HOPPER_MMA_SYNC = 0.62
# The part of the lesser units' time that shows when one warp per scheduler works alone. wgmma runs
# asynchronously (softmax of one step under the GEMM of another); mma.sync code hides less. Fitted,
# as above.
ALONE_WGMMA = 0.55
ALONE_MMA_SYNC = 1.00


@dataclass(frozen=True)
class Cost:
    """An estimate with every term that went into it; cycles are of one SM for one step."""

    mma_cycles: float
    exp_cycles: float
    elementwise_cycles: float
    softmax_cycles: float
    shared_cycles: float
    load_cycles: float
    exposed: float
    stall_cycles: float
    step_cycles: float
    block_cycles: float
    occupancy: int
    blocks: int
    waves: float
    steps: float
    tail: float
    waste: float
    memory_us: float
    microseconds: float
    tflops: float

    @property
    def limit(self) -> str:
        """The unit that is busiest in a step."""
        terms = {
            "tensor cores": self.mma_cycles,
            "softmax": self.softmax_cycles,
            "shared memory": self.shared_cycles,
            "L2": self.load_cycles,
        }
        return max(terms, key=lambda name: terms[name])


# --- blocks of an SM --------------------------------------------------------------------------


def occupancy(workload: Workload, tiling: Tiling, gpu: Gpu) -> int:
    """Blocks that one SM holds at a time (0: not even one).

    A wgmma kernel has its SM to itself: setmaxnreg deals out the whole register file, and the
    grid is persistent.
    """
    need = footprint(workload, tiling, gpu)
    if need.shared_bytes > gpu.shared_per_block or need.registers > need.register_limit:
        return 0
    if uses_wgmma(workload, tiling, gpu):
        return 1
    return min(
        gpu.shared_per_sm // (need.shared_bytes + gpu.shared_reserved),
        gpu.blocks_by_registers(need.registers + comfort(workload, gpu), tiling.warps),
        gpu.threads_per_sm // (32 * tiling.warps),
        gpu.max_blocks_per_sm,
    )


# --- cycles of one step -----------------------------------------------------------------------


def mma_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """Cycles of both GEMMs at the tensor cores' dense rate: Q K^T in steps of 32 bytes, P V as wide
    as the tiles."""
    step = 32 // workload.element_bytes
    depth = -(-workload.qk_dim // step) * step
    flops = 2 * tiling.bm * tiling.bn * (depth + tile_width(workload.v_dim, workload, gpu))
    rate = gpu.flops_per_clock(workload.dtype)
    if gpu.wgmma and not uses_wgmma(workload, tiling, gpu):
        rate *= HOPPER_MMA_SYNC
    return flops / rate


def exp_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """One exponential for each score, and those of its options; one for each thread's rows."""
    each = counted.score(gpu.capability, workload.dtype, workload.options).special
    rows = LANES_OF_A_ROW * counted.row().special
    return tiling.bm * (tiling.bn * each + rows) / gpu.exp_per_clock_per_sm


def elementwise_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """The softmax's plain arithmetic, masks where a step needs them, and what wider steps do less
    often: the rescale of O, and each row's maximum and factor."""
    lanes = gpu.fp32_flops / (2 * gpu.sms * gpu.clock_ghz * 1e9)
    each = counted.score(gpu.capability, workload.dtype, workload.options).plain
    each += counted.mask(workload.mask) * masked_share(workload, tiling)
    columns = tile_width(workload.v_dim, workload, gpu)
    row = columns * counted.element().plain + LANES_OF_A_ROW * counted.row().plain
    return tiling.bm * (tiling.bn * each + row) / lanes


def softmax_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """Exponentials and arithmetic have pipes of their own, but the row maximum must be known before
    the softmax's first exponential: half of its arithmetic, and all that options do to a score."""
    bare = replace(workload, options=())
    exp, plain = exp_cycles(bare, tiling, gpu), elementwise_cycles(bare, tiling, gpu)
    more_exp = exp_cycles(workload, tiling, gpu) - exp
    more = elementwise_cycles(workload, tiling, gpu) - plain
    return max(more_exp, more + plain / 2) + max(exp, plain / 2)


def shared_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """Reads of Q, K and V from shared memory, and the writes of the next K and V.

    With mma.sync every warp reads all of K and V, so more rows per warp mean fewer reads; with
    wgmma every warpgroup does. Each reads its own rows of Q again in every step. Warpgroups that
    have the same rows read all of Q and P, and each its share of K and V.
    """
    qk_dim, v_dim = (tile_width(d, workload, gpu) for d in (workload.qk_dim, workload.v_dim))
    keys = tiling.bn * (qk_dim + v_dim) * workload.element_bytes
    readers = tiling.warps // 4 if uses_wgmma(workload, tiling, gpu) else tiling.warps
    queries = tiling.bm * qk_dim * workload.element_bytes
    if (shares := gpu.beside(tiling.bm, tiling.warps)) > 1:
        weights = tiling.bm * tiling.bn * workload.element_bytes
        return (2 * keys + shares * (queries + weights)) / SHARED_BYTES_PER_CLOCK
    return (readers * keys + queries + keys) / SHARED_BYTES_PER_CLOCK


def load_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """K and V from L2, whose bandwidth the SMs share evenly."""
    return tiling.bn * workload.key_bytes / l2_bytes_per_clock(gpu)


def l2_bytes_per_clock(gpu: Gpu) -> float:
    """One SM's share of the L2 bandwidth."""
    return gpu.l2_bandwidth / (gpu.sms * gpu.clock_ghz * 1e9)


def exposed(workload: Workload, tiling: Tiling, gpu: Gpu, blocks_per_sm: int) -> float:
    """The part of the lesser units' time that is not hidden under the busiest one.

    A scheduler with a second warp has other work to issue while the first waits: with two or
    three, nearly everything hides. Warpgroups on a ring of mbarriers run apart from each other;
    warps of one mma.sync block meet at two block barriers a step, so each further one counts half.
    """
    mine = max(1.0, tiling.warps / 4)
    if uses_wgmma(workload, tiling, gpu):
        return float(ALONE_WGMMA / mine**1.5)
    others = blocks_per_sm * (1 + (mine - 1) / 2) * min(1.0, tiling.warps / 4)
    return float(ALONE_MMA_SYNC / max(1.0, others) ** 1.5)


def issue_cycles(workload: Workload, tiling: Tiling, gpu: Gpu) -> float:
    """Addresses, copies, barriers and branches: all warps issue them, for no score in particular.

    Each lane copies 16 bytes at a time.
    """
    each = counted.overhead(gpu.cp_async, workload.element_bytes)
    copies = tiling.bn * workload.key_bytes / 16 / (32 * tiling.warps)
    return tiling.warps * (each.step + each.copy * copies) / ISSUED_PER_CLOCK


def fixed_cycles(
    workload: Workload, tiling: Tiling, gpu: Gpu, blocks_per_sm: int, slower: float
) -> float:
    """What every step costs whatever its size, so that wide steps pay.

    At a block barrier (mma.sync) all warps wait for the last one, which comes when all have
    issued; warpgroups do not meet, and other blocks of the SM fill their waits.
    """
    if uses_wgmma(workload, tiling, gpu):
        return ISSUE_CYCLES + WAIT_CYCLES / blocks_per_sm
    return issue_cycles(workload, tiling, gpu) * slower + MEET_CYCLES


def idle_schedulers(tiling: Tiling, blocks_per_sm: int) -> float:
    """How much slower the units run because some of the SM's four schedulers have no warp: each
    quarter of the SM has tensor cores, exponentials and FP32 lanes of its own."""
    return max(1.0, 4 / (tiling.warps * blocks_per_sm))


def stall_cycles(tiling: Tiling, load: float, step: float, blocks_per_sm: int) -> float:
    """What a step waits for its K and V.

    With one buffer each, V comes under QK and the next K under PV: half a step's time. Every
    further stage lends a whole step; so do the other blocks of the SM in their turns.
    """
    lent = (tiling.stages - 0.5) * blocks_per_sm * step
    return max(0.0, LATENCY_CYCLES + load * blocks_per_sm - lent) / blocks_per_sm


def block_cycles(workload: Workload, tiling: Tiling, gpu: Gpu, blocks_per_sm: int) -> float:
    """Once per block: fetch Q and the first K, store O. Other blocks of the SM work meanwhile."""
    size = workload.element_bytes
    moved = (tiling.bm * (workload.qk_dim + workload.v_dim) + tiling.bn * workload.qk_dim) * size
    return (2 * LATENCY_CYCLES + moved / l2_bytes_per_clock(gpu)) / blocks_per_sm


# --- how many steps ---------------------------------------------------------------------------


def walk(workload: Workload, tiling: Tiling) -> steps.Walk:
    """The steps of a kernel that skips fully masked tiles."""
    w = workload
    positions = 1 if w.rows_fixed else tiling.bm
    return steps.walk(w.q_len, w.kv_len, w.causal, w.window, positions, tiling.bn, w.sinks)


def masked_waste(workload: Workload, tiling: Tiling) -> float:
    """Scores computed over scores needed: tiles on the diagonal, at the edges of a window and at
    the ragged ends are computed whole."""
    w = workload
    positions = 1 if w.rows_fixed else tiling.bm
    needed = steps.needed(w.q_len, w.kv_len, w.causal, w.window, w.sinks)
    computed = walk(workload, tiling).steps * positions * tiling.bn
    return computed / needed if needed else 1.0


def masked_share(workload: Workload, tiling: Tiling) -> float:
    """The part of the steps that have a score to mask."""
    way = walk(workload, tiling)
    return way.masked / way.steps if way.steps else 0.0


# --- all together -----------------------------------------------------------------------------


def memory_us(workload: Workload, tiling: Tiling, gpu: Gpu, in_flight: int) -> float:
    """Time of the device memory traffic alone.

    Q and O move once. K and V move once as well when those of all heads in flight fit in half of
    L2. Otherwise the blocks in flight, which walk the keys of their head side by side, read them
    once together, and the next ones again.
    """
    w = workload
    query_bytes = w.batch * w.heads * w.q_len * w.key_bytes
    head_bytes = w.kv_len * w.key_bytes
    kv_bytes: float = w.batch * w.kv_heads * head_bytes
    groups = 1 if w.rows_fixed else w.heads // w.kv_heads
    sharing = walk(workload, tiling).tiles * groups
    if -(-in_flight // sharing) * head_bytes > gpu.l2_bytes / 2:
        kv_bytes *= max(1.0, sharing / in_flight)
    return (query_bytes + kv_bytes) / gpu.bandwidth * 1e6


def spread(way: steps.Walk, groups: int, sms: int) -> tuple[float, float]:
    """Steps on the busiest SM, and by how much that exceeds an even share.

    Equal blocks are dealt out whole. Unequal ones (causal) are launched longest first, which
    leaves about half an average block at the end, and never less than the longest block.
    """
    even = way.steps * groups / sms
    blocks = way.tiles * groups
    if way.longest * way.tiles == way.steps:
        busiest: float = -(-blocks // sms) * way.longest
    else:
        busiest = max(even + way.steps / way.tiles / 2, way.longest)
    return busiest, busiest / even if even else 1.0


def estimate(workload: Workload, tiling: Tiling, gpu: Gpu) -> Cost:
    """The time of the reference problem, for a tiling that fits."""
    resident = occupancy(workload, tiling, gpu)
    if resident == 0:
        raise ValueError(f"{tiling} does not fit on {gpu.title}")
    slower = idle_schedulers(tiling, resident)
    mma = mma_cycles(workload, tiling, gpu) * slower
    softmax = softmax_cycles(workload, tiling, gpu) * slower
    shared = shared_cycles(workload, tiling, gpu)
    load = load_cycles(workload, tiling, gpu)
    shown = exposed(workload, tiling, gpu, resident)
    units = [mma, softmax]
    busiest = max(*units, shared, load)
    # wgmma fetches its own operands while it multiplies; ldmatrix is issued by the same warps.
    work = sum(units) + (0.0 if uses_wgmma(workload, tiling, gpu) else shared)
    step = busiest + shown * max(0.0, work - busiest)
    step += fixed_cycles(workload, tiling, gpu, resident, slower)
    stall = stall_cycles(tiling, load, step, resident)
    step += stall

    way = walk(workload, tiling)
    w = workload
    groups = w.batch * (w.heads // w.rows_fixed if w.rows_fixed else w.heads)
    most, tail = spread(way, groups, gpu.sms)
    once = block_cycles(workload, tiling, gpu, resident)
    blocks = way.tiles * groups
    cycles = most * step + blocks / gpu.sms * once
    memory = memory_us(workload, tiling, gpu, gpu.sms * resident)
    time = max(cycles / (gpu.clock_ghz * 1e3), memory)
    needed = steps.needed(w.q_len, w.kv_len, w.causal, w.window, w.sinks) * w.batch * w.heads
    return Cost(
        mma_cycles=mma,
        exp_cycles=exp_cycles(workload, tiling, gpu) * slower,
        elementwise_cycles=elementwise_cycles(workload, tiling, gpu) * slower,
        softmax_cycles=softmax,
        shared_cycles=shared,
        load_cycles=load,
        exposed=shown,
        stall_cycles=stall,
        step_cycles=step,
        block_cycles=once,
        occupancy=resident,
        blocks=blocks,
        waves=blocks / (gpu.sms * resident),
        steps=most,
        tail=tail,
        waste=masked_waste(workload, tiling),
        memory_us=memory,
        microseconds=time,
        tflops=2 * needed * (w.qk_dim + w.v_dim) / time / 1e6,
    )
