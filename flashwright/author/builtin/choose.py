"""Choose tile sizes, stages and warps: the measured tiling (tuned.py), else the cheapest one that
fits by the cost model. The decision includes its reasons in words.

How the choices compare with the fastest known kernels (notes on attention kernels), and why they
differ where they do:

- Hopper d128 128x128 and 192/128 128x128 are theirs. They go on to 128x176 for full attention and
  128x80 at d256: the model has those within 2 % (a ragged last step at 4096 keys eats the gain).
  They also leave a thread 26 registers or fewer beside its tiles (d64 192x128, fp8 128x224): we
  keep `headroom` for the compiler and for elementwise extras, as a spill fails the build; a tuner
  may pass headroom=0. Tilings that send P through shared memory (d64 192x192, d96 192x144) are
  another kernel and not priced here.
- A100 d64 128x128 and d128 128x64 are theirs; they fill a thread's 255 registers, and a spill fails
  our build, so we take 128x112 and 128x48. T4 d128 128x64 with eight warps is theirs.
- L40S: keeping Q in registers (128x128 in 64 KB, eight warps) is another kernel as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flashwright.author.builtin import tuned
from flashwright.author.builtin.cost import Cost, estimate
from flashwright.author.builtin.needs import (
    Footprint,
    Tiling,
    Workload,
    comfort,
    count,
    footprint,
    holds_queries,
    shares_columns,
    takes_wgmma,
    turns_tiles,
)
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed

# The accuracy of the model: among estimates this close the simplest tiling is taken.
TIE = 0.02
RANKED = 8
FIELDS = ("bm", "bn", "stages", "warps")

_BN = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
# N of a wgmma may be any multiple of 8; these are the ones that fill shared memory best.
_BN_WGMMA = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
# The known mma.sync kernels have no more rows: 256 save a little L2 traffic at 4096 tokens, but a
# kernel serves short sequences too, where they leave SMs without a block.
_BM = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8)
HEADROOMS = (None, 24, 40, 64)
"""Registers to leave free: more, if the kernel spills with fewer."""


class NothingFits(ValueError):
    """No tiling fits the GPU; the message names the nearest one and what it exceeds."""


@contextmanager
def fitting() -> Iterator[None]:
    """Raises Failed with FW905 if nothing that the built-in author knows fits the GPU."""
    try:
        yield
    except NothingFits as error:
        hint = (
            "another --gpu, --dtype or a smaller --head-dim may fit; `flashwright gpus` lists them"
        )
        raise Failed(Diagnostic("FW905", str(error), help=hint)) from None


@dataclass(frozen=True)
class Candidate:
    """A tiling that fits, its resources and its estimated cost."""

    tiling: Tiling
    footprint: Footprint
    cost: Cost


@dataclass(frozen=True)
class Decision:
    """The chosen tiling, the runners-up, the number of rejected ones, and the reasons."""

    workload: Workload
    gpu: Gpu
    chosen: Candidate
    ranked: tuple[Candidate, ...]
    """The chosen one, the cheapest others, and every other one that a reason names."""
    enumerated: int
    over_shared: int
    over_registers: int
    reasons: dict[str, str]
    measured: str = ""
    """Where the choice was measured; empty if the cost model made it."""
    further: tuple[tuned.Choice, ...] = ()
    """What was measured to be faster up to some lengths, upwards."""

    @property
    def tiling(self) -> Tiling:
        """The tiling of the chosen candidate."""
        return self.chosen.tiling


def enumerate_tilings(workload: Workload, gpu: Gpu) -> list[Tiling]:
    """Every tiling worth pricing, whether it fits or not, in a fixed order."""
    step = 32 if workload.element_bytes == 1 or shares_columns(workload, gpu) else 16
    if workload.cols_fixed is not None:
        columns: tuple[int, ...] = (workload.cols_fixed,)
    else:
        columns = tuple(bn for bn in (_BN_WGMMA if gpu.wgmma else _BN) if bn % step == 0)
    # Without asynchronous copies a second buffer has nothing to fill it ahead of time.
    stages: tuple[int, ...] = (1, 2, 3, 4) if gpu.cp_async or gpu.tma else (1,)
    # With one stage the producer warp and the consumers would wait for each other.
    if takes_wgmma(workload, gpu):
        wide = shares_columns(workload, gpu) and workload.kv_dtype is None  # little room
        stages = (1, 2) if wide else (2, 3, 4)
    rows, keys = workload.listed or (0, 0)  # 0 is a multiple of everything
    return [
        Tiling(bm, bn, ahead, warps)
        for bm, warps in _rows(workload, gpu)
        for bn in columns
        for ahead in stages
        if rows % bm == 0 and keys % bn == 0
    ]


def _rows(workload: Workload, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Pairs of row tile and warps: 16 rows or a multiple of them for each warp."""
    if workload.rows_fixed is not None:
        bm = workload.rows_fixed
        # 16 heads of a group are one warp's rows; larger groups may be dealt to more warps.
        yield from ((bm, warps) for warps in _WARPS if bm % (16 * warps) == 0)
    elif shares_columns(workload, gpu):
        yield 64, 8
    elif takes_wgmma(workload, gpu):
        # A warpgroup of four warps for each 64 rows; a fourth would leave 120 registers a thread.
        yield from ((64 * groups, 4 * groups) for groups in (1, 2, 3))
    else:
        yield from ((bm, warps) for bm in _BM for warps in _WARPS if bm % (16 * warps) == 0)


def choose(
    workload: Workload, gpu: Gpu, headroom: int | None = None, keys: int | None = None
) -> Decision:
    """The measured tiling, else the cheapest that fits `gpu`. Raises NothingFits if none fits.

    `headroom` registers are kept free below the limit (by default 8 on Hopper, 28 elsewhere); where
    it is given, the model alone decides. With `keys` there is one tiling for all lengths, the best
    one for so many keys.
    """
    _validate(workload, gpu)
    spare = headroom if headroom is not None else comfort(workload, gpu)
    tilings = enumerate_tilings(workload, gpu)
    fits: list[Candidate] = []
    over_shared = over_registers = 0
    for tiling in tilings:
        need = footprint(workload, tiling, gpu)
        if need.shared_bytes > gpu.shared_per_block:
            over_shared += 1
        elif need.registers + spare > need.register_limit:
            over_registers += 1
        else:
            fits.append(Candidate(tiling, need, estimate(workload, tiling, gpu)))
    if not fits:
        raise NothingFits(_nearest(workload, tilings, gpu, spare))
    fits.sort(key=lambda c: (c.cost.microseconds, c.tiling))
    found = tuned.find(workload, gpu, keys) if headroom is None else None
    measured = _measured(workload, found, gpu) if found else None
    simplest = _simplest(fits)
    cheapest = _with_queries_ahead(workload, simplest, gpu)
    fits = [cheapest if c is simplest else c for c in fits]
    chosen = measured or cheapest
    reasons = _reasons(workload, gpu, chosen, fits, spare)
    if found and measured:
        reasons = _with_measurement(reasons, found, cheapest)
    told = {c.tiling for field in FIELDS if (c := _other(field, chosen, fits))} | {cheapest.tiling}
    rest = [c for c in fits if c.tiling != chosen.tiling]
    ranked = [c for n, c in enumerate(rest, 2) if n <= RANKED or c.tiling in told]
    return Decision(
        workload=workload,
        gpu=gpu,
        chosen=chosen,
        ranked=(chosen, *ranked),
        enumerated=len(tilings),
        over_shared=over_shared,
        over_registers=over_registers,
        reasons=reasons,
        measured=found.reason if found and measured else "",
        further=_further(workload, found, gpu) if found and measured and keys is None else (),
    )


def _with_queries_ahead(workload: Workload, chosen: Candidate, gpu: Gpu) -> Candidate:
    """Two buffers for Q if a producer warp can use them and they fit: it loads the next block's Q
    during this one. Measured on the H200: 1 to 9 % at 512 keys, about 1 % at 2048. In fp8 the
    registers that count them are not there (causal, 128x128: 17 spilled)."""
    twice = replace(chosen.tiling, q_stages=2)
    need = footprint(workload, twice, gpu)
    room = need.shared_bytes <= gpu.shared_per_block and not turns_tiles(workload, twice, gpu)
    held = holds_queries(workload, twice, gpu)  # then its buffer is free at once
    if not takes_wgmma(workload, gpu) or not room or held:
        return chosen
    return replace(chosen, tiling=twice, footprint=need)


def _measured(workload: Workload, choice: tuned.Choice, gpu: Gpu) -> Candidate | None:
    """A tiling that was measured needs no headroom: it is known to compile."""
    need = footprint(workload, choice.tiling, gpu)
    if need.shared_bytes > gpu.shared_per_block or need.registers > need.register_limit:
        return None
    return Candidate(choice.tiling, need, estimate(workload, choice.tiling, gpu))


def _further(workload: Workload, main: tuned.Choice, gpu: Gpu) -> tuple[tuned.Choice, ...]:
    return tuple(c for c in tuned.further(main) if _measured(workload, c, gpu))


def _validate(workload: Workload, gpu: Gpu) -> None:
    if not gpu.takes(workload.dtype):
        known = ", ".join(gpu.mma)
        raise NothingFits(
            f"{gpu.title} has no tensor instruction for {workload.dtype}; it takes {known}"
        )
    rows, columns = workload.rows_fixed, workload.cols_fixed
    if rows is not None and (rows < 16 or rows % 16):
        raise ValueError(f"a row tile is a multiple of 16 rows, not {rows}: pad the group")
    if columns is not None and (columns < 16 or columns % 16):
        raise ValueError(f"keys per step must be a multiple of 16, not {columns}")
    if workload.listed is not None and not enumerate_tilings(workload, gpu):
        raise NothingFits("no tile divides listed blocks of {} x {}".format(*workload.listed))


def _simplest(fits: list[Candidate]) -> Candidate:
    """Of those within TIE of the best: powers of two (no ragged tiles at usual lengths), fewer
    stages, then the cheapest."""
    best = fits[0].cost.microseconds

    def order(c: Candidate) -> tuple[int, int, float, Tiling]:
        ragged = sum(size & (size - 1) != 0 for size in (c.tiling.bm, c.tiling.bn))
        return ragged, c.tiling.stages, c.cost.microseconds, c.tiling

    return min((c for c in fits if c.cost.microseconds <= best * (1 + TIE)), key=order)


def _misses(workload: Workload, tiling: Tiling, gpu: Gpu, spare: int) -> list[str]:
    """The limits that a tiling exceeds on this GPU, in words."""
    need = footprint(workload, tiling, gpu)
    short = []
    if need.shared_bytes > gpu.shared_per_block:
        over = need.shared_bytes - gpu.shared_per_block
        short.append(
            f"needs {need.shared_bytes} bytes of shared memory, {over} more than the "
            f"{gpu.shared_per_block} of a block"
        )
    if need.registers + spare > need.register_limit:
        limit = need.register_limit - spare
        short.append(
            f"needs {need.registers} registers a thread, {need.registers - limit} more than {limit}"
        )
    return short


def _nearest(workload: Workload, tilings: list[Tiling], gpu: Gpu, spare: int) -> str:
    def overshoot(tiling: Tiling) -> tuple[float, Tiling]:
        need = footprint(workload, tiling, gpu)
        registers = (need.registers + spare) / need.register_limit
        return max(need.shared_bytes / gpu.shared_per_block, registers), tiling

    nearest = min(tilings, key=overshoot)
    lacks = " and ".join(_misses(workload, nearest, gpu, spare))
    dims = f"head dims {workload.qk_dim}/{workload.v_dim} in {workload.dtype}"
    return f"No tiling of {dims} fits {gpu.title}. The nearest, {nearest}, {lacks}."


# --- reasons ----------------------------------------------------------------------------------


def _reasons(
    workload: Workload, gpu: Gpu, chosen: Candidate, fits: list[Candidate], spare: int
) -> dict[str, str]:
    def against(field: str) -> str:
        return _against(field, chosen, fits) or _beyond(field, workload, gpu, chosen, spare)

    return {
        "BM": _why_bm(workload, gpu, chosen) + against("bm") + ".",
        "BN": _why_bn(gpu, chosen) + against("bn") + ".",
        "Stages": _why_stages(gpu, chosen) + against("stages") + ".",
        "Warps": _why_warps(chosen) + against("warps") + ".",
    }


def _with_measurement(
    reasons: dict[str, str], found: tuned.Choice, cheapest: Candidate
) -> dict[str, str]:
    """The reasons of a measured choice: the measurement first, then the model's."""
    t = found.tiling
    heads = {
        "BM": f"{t.bm} rows a block, {found.reason}",
        "BN": f"{t.bn} keys a step, measured with BM",
        "Stages": f"{count(t.stages, 'stage')}, measured with BM",
        "Warps": f"{count(t.warps, 'warp')}, measured with BM",
    }
    told = {name: f"{head}; by the model, {reasons[name]}" for name, head in heads.items()}
    if cheapest.tiling != t:
        told["BM"] = f"{told['BM'][:-1]}; the model alone would take {cheapest.tiling}."
    return told


def _why_bm(workload: Workload, gpu: Gpu, chosen: Candidate) -> str:
    bm, cost = chosen.tiling.bm, chosen.cost
    if workload.rows_fixed is not None:
        return f"{bm} rows are given: the heads of one group"
    return (
        f"{bm} rows share each K and V tile, so a step asks L2 for {cost.load_cycles:.0f} cycles "
        f"of data against {cost.mma_cycles:.0f} of MMA; {cost.blocks} blocks on {gpu.sms} SMs "
        f"leave a tail of {(cost.tail - 1) * 100:.0f} %"
    )


def _why_bn(gpu: Gpu, chosen: Candidate) -> str:
    bn, cost, need = chosen.tiling.bn, chosen.cost, chosen.footprint
    return (
        f"{bn} keys a step: {cost.step_cycles:.0f} cycles, limited by {cost.limit}; "
        f"{need.registers} of {need.register_limit} registers, {need.shared_bytes // 1024} of "
        f"{gpu.shared_per_block // 1024} KB shared memory, "
        f"{(cost.waste - 1) * 100:.0f} % of scores computed in vain"
    )


def _why_stages(gpu: Gpu, chosen: Candidate) -> str:
    stages, cost = chosen.tiling.stages, chosen.cost
    if not (gpu.cp_async or gpu.tma):
        return f"{count(stages, 'stage')}: {gpu.generation} has no asynchronous copy to fill more"
    lent = (stages - 0.5) * cost.occupancy * (cost.step_cycles - cost.stall_cycles)
    return (
        f"{count(stages, 'stage')}: a load has {lent:.0f} cycles to arrive, "
        f"which leaves {cost.stall_cycles:.0f} cycles of waiting a step"
    )


def _why_warps(chosen: Candidate) -> str:
    warps, cost = chosen.tiling.warps, chosen.cost
    return (
        f"{count(warps, 'warp')} of {chosen.tiling.bm // warps} rows, "
        f"{count(cost.occupancy, 'block')} per SM: "
        f"{cost.exposed * 100:.0f} % of the softmax shows beside the MMA, and shared memory is "
        f"busy {cost.shared_cycles:.0f} of {cost.step_cycles:.0f} cycles"
    )


def _against(field: str, chosen: Candidate, fits: list[Candidate]) -> str:
    """How the best tiling with another value of this parameter compares."""
    other = _other(field, chosen, fits)
    if other is None:
        return ""
    change = other.cost.microseconds / chosen.cost.microseconds - 1
    if change <= 0:
        return f"; {other.tiling} is less simple and within {TIE * 100:.0f} %, too close to tell"
    return f"; the best other, {other.tiling}, is estimated {change * 100:.1f} % slower"


def _other(field: str, chosen: Candidate, fits: list[Candidate]) -> Candidate | None:
    """The best tiling with another value of this parameter (fits is sorted by cost)."""
    mine = getattr(chosen.tiling, field)
    return next((c for c in fits if getattr(c.tiling, field) != mine), None)


def _beyond(field: str, workload: Workload, gpu: Gpu, chosen: Candidate, spare: int) -> str:
    """The limits that the tiling exceeds with twice the value, if no other value fits."""
    if field != "bn" or workload.cols_fixed is not None:
        return "; nothing else is possible"
    t = chosen.tiling
    lacks = _misses(workload, Tiling(t.bm, 2 * t.bn, t.stages, t.warps), gpu, spare)
    return f"; {2 * t.bn} {' and '.join(lacks)}" if lacks else "; nothing else fits"
