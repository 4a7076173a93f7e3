"""What a GPU offers: memory sizes, registers, matrix instructions, copies and ceilings.

Sources, named in short beside each fact:

- guide: CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications) and
  "Arithmetic Instructions" (throughput) tables;
- PTX: the PTX ISA manual, sections mma, wgmma, cp.async, cp.async.bulk;
- paper: NVIDIA's architecture whitepaper (Turing, Ampere GA100 and GA102, Ada, Hopper, RTX
  Blackwell);
- sheet: NVIDIA's data sheet of the product;
- tuning: NVIDIA's "Blackwell Tuning Guide".

Tensor figures are dense (never 2:4 sparse) and with FP32 accumulation. GeForce cards multiply FP16
with FP32 accumulation at half rate, and their figures are those; the others do not (Turing paper:
Quadro RTX 6000/8000 130.5 TFLOPS with either accumulator; GA102 and Ada papers: RTX A6000 and RTX
6000 Ada likewise; L40S sheet: 362 dense).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TERA = 1e12

Shape = tuple[int, int, int]

# Every generation moves tiles along these ways; TMA alone also stores shared memory straight to
# global memory (PTX: cp.async.bulk.tensor, sm_90).
_BASE_COPIES = frozenset(
    {
        ("global", "shared"),
        ("global", "register"),
        ("shared", "register"),
        ("register", "shared"),
        ("register", "global"),
    }
)

# setmaxnreg takes 24 to 256 in steps of 8 (PTX); the producer warpgroup gives back all it can.
_PRODUCER_REGISTERS = 24
_PRODUCER_WARPS = 4
# No instruction can name more than 255 registers (guide: maximum 32-bit registers per thread).
MOST_REGISTERS = 255
# Columns of 16 bits in half of a row of the widest swizzle: warpgroups share columns by so many.
HALF_SWIZZLE = 32
# A warp is given registers in units of 256, so 8 for each of its 32 threads (CUDA occupancy
# calculator, register allocation unit size, all of 7.5 to 12.0).
REGISTER_UNIT = 8


class UnknownGpu(ValueError):
    """A GPU that Flashwright has no facts about."""


@dataclass(frozen=True)
class Gpu:
    """The facts about one GPU that decide what a kernel may use and how fast it can be."""

    name: str
    title: str
    arch: str
    generation: str
    sms: int
    clock_ghz: float
    shared_per_block: int
    shared_per_sm: int
    shared_reserved: int
    threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    l2_bandwidth: float
    bandwidth: float
    memory_bytes: int
    tensor_flops: Mapping[str, float] = field(hash=False)
    fp32_flops: float
    mma: Mapping[str, tuple[Shape, ...]] = field(hash=False)
    wgmma: bool = False
    cp_async: bool = False
    tma: bool = False
    reshape_in_place: bool = True
    register_overhead: int = 32
    registers_per_sm: int = 65536  # guide: 64 K 32-bit registers per SM on all of 7.5 to 12.0
    exp_per_clock_per_sm: int = 16  # guide, throughput of exp2f: 16 on all of 7.5 to 12.0

    @property
    def capability(self) -> int:
        """The compute capability as a number: 80 for sm_80, 90 for sm_90a, 120 for sm_120."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))

    @property
    def copies(self) -> frozenset[tuple[str, str]]:
        """The (from, to) pairs of memory spaces that one Copy may name."""
        return _BASE_COPIES | {("shared", "global")} if self.tma else _BASE_COPIES

    def takes(self, dtype: str) -> bool:
        """Whether the tensor cores multiply tiles of this dtype."""
        return dtype in self.mma

    def flops_per_clock(self, dtype: str) -> float:
        """Dense tensor operations of one SM in one clock."""
        return self.tensor_flops[dtype] / (self.sms * self.clock_ghz * 1e9)

    def register_limit(self, warps: int) -> int:
        """Registers a thread may have when `warps` warps compute in one block.

        On Hopper a producer warpgroup stands beside them and keeps 24 registers a thread; the
        rest is dealt out by setmaxnreg: 255, 240 and 160 for 4, 8 and 12 compute warps.
        """
        if warps < 1:
            raise ValueError(f"a block needs at least one warp, not {warps}")
        lanes = self.registers_per_sm // 32
        if self.wgmma:
            lanes -= _PRODUCER_WARPS * _PRODUCER_REGISTERS
        per_thread = lanes // warps // REGISTER_UNIT * REGISTER_UNIT
        return min(MOST_REGISTERS, per_thread)

    def registers(self, tile_bytes: int, warps: int) -> int:
        """Registers a thread needs when tiles of `tile_bytes` are spread over `warps` warps.

        Beside the tiles a thread holds addresses, loop and mask indices, pipeline state and, with
        mma.sync, fragments of the operands (two k-slices of A and B: about 16): 32 in all. wgmma
        reads its operands from shared memory and a producer does the addressing: 24. Shipped
        kernels bear that out: FlashAttention-3 runs d64 192x128 with P in registers (134 for
        tiles) under a limit of 160, and FlashAttention-2 d128 128x64 (204) under 255.
        """
        return -(-tile_bytes // (128 * warps)) + self.register_overhead

    def beside(self, rows: int, warps: int) -> int:
        """Warpgroups that have the same rows of a register tile, and each a share of its columns:
        all of them where there are too few rows for every warp, else 1 (each has its own rows).
        """
        split = self.wgmma and warps in (8, 12) and rows % 64 == 0 and rows % (16 * warps) != 0
        return warps // 4 if split else 1

    def blocks_by_registers(self, registers: int, warps: int) -> int:
        """Blocks of so many warps that an SM's registers hold.

        Registers are given out by the warp, rounded up, from the quarter of the SM it runs on.
        """
        rounded = -(-min(registers, MOST_REGISTERS) // REGISTER_UNIT) * REGISTER_UNIT
        in_quarter = self.registers_per_sm // 4 // (32 * rounded)
        return 4 * in_quarter // warps


# mma.sync shapes (PTX). Turing multiplies fp16 only, 8 deep; bf16 and depth 16 come with sm_80;
# e4m3 and e5m2, 32 deep, with sm_89.
_MMA_SM75: dict[str, tuple[Shape, ...]] = {"fp16": ((16, 8, 8),)}
_MMA_SM80: dict[str, tuple[Shape, ...]] = {
    "fp16": ((16, 8, 8), (16, 8, 16)),
    "bf16": ((16, 8, 8), (16, 8, 16)),
}
_MMA_SM89: dict[str, tuple[Shape, ...]] = _MMA_SM80 | {
    "e4m3": ((16, 8, 32),),
    "e5m2": ((16, 8, 32),),
}


def _with_wgmma() -> dict[str, tuple[Shape, ...]]:
    """sm_90a: mma.sync as before, and wgmma m64nNkK, N = 8 to 256 in steps of 8 (PTX)."""
    depth = {"fp16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32}
    return {
        dtype: shapes + tuple((64, n, depth[dtype]) for n in range(8, 257, 8))
        for dtype, shapes in _MMA_SM89.items()
    }


T4 = Gpu(
    name="t4",
    title="NVIDIA T4 16 GB",
    arch="sm_75",  # guide
    generation="Turing",
    sms=40,  # sheet: 2560 CUDA cores, 64 per SM (Turing paper)
    clock_ghz=1.59,  # product brief: boost 1590 MHz; 40 * 1024 * 1.59e9 = 65 TFLOPS
    shared_per_block=64 * KIB,  # guide, 7.5
    shared_per_sm=64 * KIB,  # guide, 7.5
    shared_reserved=0,  # guide: only 8.0 and later keep 1 KB of each block
    threads_per_sm=1024,  # guide, 7.5
    max_blocks_per_sm=16,  # guide, 7.5
    l2_bytes=4 * MIB,  # Turing paper, TU104: 4096 KB
    # Not published; measured: Jia et al., "Dissecting the NVidia Turing T4 GPU", 2019.
    l2_bandwidth=1.27 * TERA,
    bandwidth=0.320 * TERA,  # product brief: 256 bit at 5001 MHz, 320 GB/s
    memory_bytes=16 * GIB,  # sheet (ECC takes its part of it)
    tensor_flops={"fp16": 65 * TERA},  # sheet: 65 TFLOPS mixed precision (FP16/FP32)
    fp32_flops=8.1 * TERA,  # sheet
    mma=_MMA_SM75,
)

RTX8000 = Gpu(
    name="rtx8000",
    title="NVIDIA Quadro RTX 8000 48 GB",
    arch="sm_75",  # guide
    generation="Turing",
    sms=72,  # Turing paper, TU102 of the Quadro RTX 6000 and 8000
    clock_ghz=1.77,  # Turing paper: boost 1770 MHz; 72 * 1024 * 1.77e9 = 130.5 TFLOPS
    shared_per_block=64 * KIB,  # guide, 7.5
    shared_per_sm=64 * KIB,  # guide, 7.5
    shared_reserved=0,  # guide, as the T4
    threads_per_sm=1024,  # guide, 7.5
    max_blocks_per_sm=16,  # guide, 7.5
    l2_bytes=6 * MIB,  # Turing paper: 6144 KB
    # Not published and no measurement known: the T4's, by memory controllers (12/8) and clock.
    l2_bandwidth=2.1 * TERA,
    bandwidth=0.672 * TERA,  # Turing paper: 672 GB/s
    memory_bytes=48 * GIB,  # sheet
    tensor_flops={"fp16": 130.5 * TERA},  # Turing paper, FP16 with FP32 accumulate
    fp32_flops=16.3 * TERA,  # Turing paper
    mma=_MMA_SM75,
)

A100 = Gpu(
    name="a100",
    title="NVIDIA A100 SXM4 80 GB",
    arch="sm_80",  # guide
    generation="Ampere",
    sms=108,  # Ampere paper
    clock_ghz=1.41,  # Ampere paper: boost 1410 MHz; 108 * 2048 * 1.41e9 = 312 TFLOPS
    shared_per_block=163 * KIB,  # guide, 8.0
    shared_per_sm=164 * KIB,  # guide, 8.0
    shared_reserved=1 * KIB,  # guide, 8.0: the system keeps 1 KB of each block
    threads_per_sm=2048,  # guide, 8.0
    max_blocks_per_sm=32,  # guide, 8.0
    l2_bytes=40 * MIB,  # Ampere paper: 40960 KB
    l2_bandwidth=5120 * 1.41e9,  # Ampere paper: 5120 bytes a clock
    bandwidth=2.039 * TERA,  # sheet, 80 GB SXM: 2039 GB/s
    memory_bytes=80 * GIB,  # sheet
    tensor_flops={"fp16": 312 * TERA, "bf16": 312 * TERA},  # Ampere paper, FP32 accumulate
    fp32_flops=19.5 * TERA,  # Ampere paper
    mma=_MMA_SM80,
    cp_async=True,  # PTX: cp.async needs sm_80
)

A6000 = Gpu(
    name="a6000",
    title="NVIDIA RTX A6000 48 GB",
    arch="sm_86",  # guide
    generation="Ampere",
    sms=84,  # GA102 paper
    clock_ghz=1.80,  # GA102 paper: boost 1800 MHz; 84 * 1024 * 1.80e9 = 154.8 TFLOPS
    shared_per_block=99 * KIB,  # guide, 8.6
    shared_per_sm=100 * KIB,  # guide, 8.6
    shared_reserved=1 * KIB,  # guide, 8.6
    threads_per_sm=1536,  # guide, 8.6
    max_blocks_per_sm=16,  # guide, 8.6
    l2_bytes=6 * MIB,  # GA102 paper: 6144 KB
    # Not published: assumed, 2048 bytes a clock, as its 12 memory controllers beside the A100's 30.
    l2_bandwidth=2048 * 1.80e9,
    bandwidth=0.768 * TERA,  # sheet
    memory_bytes=48 * GIB,  # sheet
    tensor_flops={"fp16": 154.8 * TERA, "bf16": 154.8 * TERA},  # GA102 paper, FP32 accumulate
    fp32_flops=38.7 * TERA,  # GA102 paper
    mma=_MMA_SM80,
    cp_async=True,  # PTX
)

A10 = replace(
    A6000,
    name="a10",
    title="NVIDIA A10 24 GB",
    sms=72,  # sheet: 9216 CUDA cores, 128 per SM (GA102 paper)
    clock_ghz=1.695,  # product brief: boost 1695 MHz; 72 * 1024 * 1.695e9 = 125 TFLOPS
    l2_bandwidth=2048 * 1.695e9,  # as the A6000
    bandwidth=0.600 * TERA,  # sheet
    memory_bytes=24 * GIB,  # sheet
    tensor_flops={"fp16": 125 * TERA, "bf16": 125 * TERA},  # sheet, dense
    fp32_flops=31.2 * TERA,  # sheet
)

RTX3090 = replace(
    A6000,
    name="rtx3090",
    title="NVIDIA GeForce RTX 3090 24 GB",
    sms=82,  # GA102 paper
    clock_ghz=1.695,  # GA102 paper: boost 1695 MHz; 82 * 512 * 1.695e9 = 71 TFLOPS
    l2_bandwidth=2048 * 1.695e9,  # as the A6000
    bandwidth=0.936 * TERA,  # GA102 paper
    memory_bytes=24 * GIB,  # GA102 paper
    tensor_flops={"fp16": 71 * TERA, "bf16": 71 * TERA},  # GA102 paper, FP32 accumulate
    fp32_flops=35.6 * TERA,  # GA102 paper
)

L40S = Gpu(
    name="l40s",
    title="NVIDIA L40S 48 GB",
    arch="sm_89",  # guide
    generation="Ada",
    sms=142,  # sheet: 18176 CUDA cores, 128 per SM (Ada paper)
    clock_ghz=2.52,  # product brief: boost 2520 MHz
    shared_per_block=99 * KIB,  # guide, 8.9
    shared_per_sm=100 * KIB,  # guide, 8.9
    shared_reserved=1 * KIB,  # guide, 8.9
    threads_per_sm=1536,  # guide, 8.9
    max_blocks_per_sm=24,  # guide, 8.9
    l2_bytes=96 * MIB,  # Ada paper, AD102 of the L40 and RTX 6000 Ada: 98304 KB
    # Not published: assumed, 14 bytes a clock and SM, below the T4's 20 for its many SMs.
    l2_bandwidth=5.0 * TERA,
    bandwidth=0.864 * TERA,  # sheet
    memory_bytes=48 * GIB,  # sheet
    tensor_flops={  # sheet, dense: 362.05 and 733
        "fp16": 362.05 * TERA,
        "bf16": 362.05 * TERA,
        "e4m3": 733 * TERA,
        "e5m2": 733 * TERA,
    },
    fp32_flops=91.6 * TERA,  # sheet
    mma=_MMA_SM89,
    cp_async=True,  # PTX
)

L4 = replace(
    L40S,
    name="l4",
    title="NVIDIA L4 24 GB",
    sms=58,  # product brief: 7424 CUDA cores, 128 per SM (Ada paper)
    clock_ghz=2.04,  # product brief: boost 2040 MHz; 58 * 1024 * 2.04e9 = 121 TFLOPS
    l2_bytes=48 * MIB,  # Ada paper, AD104: 49152 KB
    l2_bandwidth=14 * 58 * 2.04e9,  # as the L40S
    bandwidth=0.300 * TERA,  # sheet
    memory_bytes=24 * GIB,  # sheet
    tensor_flops={  # sheet: 242 and 485 with sparsity
        "fp16": 121 * TERA,
        "bf16": 121 * TERA,
        "e4m3": 242.5 * TERA,
        "e5m2": 242.5 * TERA,
    },
    fp32_flops=30.3 * TERA,  # sheet
)

RTX4090 = replace(
    L40S,
    name="rtx4090",
    title="NVIDIA GeForce RTX 4090 24 GB",
    sms=128,  # Ada paper
    clock_ghz=2.52,  # Ada paper: boost 2520 MHz; 128 * 512 * 2.52e9 = 165.2 TFLOPS
    l2_bytes=72 * MIB,  # Ada paper: 73728 KB
    l2_bandwidth=14 * 128 * 2.52e9,  # as the L40S
    bandwidth=1.008 * TERA,  # Ada paper
    memory_bytes=24 * GIB,  # Ada paper
    tensor_flops={  # Ada paper, dense, FP32 accumulate
        "fp16": 165.2 * TERA,
        "bf16": 165.2 * TERA,
        "e4m3": 330.3 * TERA,
        "e5m2": 330.3 * TERA,
    },
    fp32_flops=82.6 * TERA,  # Ada paper
)

H100 = Gpu(
    name="h100",
    title="NVIDIA H100 SXM5 80 GB",
    arch="sm_90a",  # guide; the "a" for wgmma and setmaxnreg (PTX)
    generation="Hopper",
    sms=132,  # Hopper paper, SXM5
    # Hopper paper: 1830 MHz boost for tensor work (132 * 4096 * 1.83e9 = 989.4 TFLOPS), 1980 MHz
    # for the rest. Under load the power limit holds both lower; ratios are what matter here.
    clock_ghz=1.83,
    shared_per_block=227 * KIB,  # guide, 9.0
    shared_per_sm=228 * KIB,  # guide, 9.0
    shared_reserved=1 * KIB,  # guide, 9.0
    threads_per_sm=2048,  # guide, 9.0
    max_blocks_per_sm=32,  # guide, 9.0
    l2_bytes=50 * MIB,  # Hopper paper: 50 MB
    # Not published: assumed to be the A100's 5120 bytes a clock. It is at least 5.3 TB/s, which
    # FlashAttention-3 draws at d128 and 680 TFLOPS with 128 rows a block (128 flops a byte).
    l2_bandwidth=5120 * 1.83e9,
    bandwidth=3.35 * TERA,  # sheet, SXM
    memory_bytes=80 * GIB,  # sheet
    tensor_flops={  # Hopper paper, dense
        "fp16": 989.4 * TERA,
        "bf16": 989.4 * TERA,
        "e4m3": 1978.9 * TERA,
        "e5m2": 1978.9 * TERA,
    },
    fp32_flops=66.9 * TERA,  # Hopper paper
    mma=_with_wgmma(),
    wgmma=True,  # PTX: sm_90a
    cp_async=True,  # PTX
    tma=True,  # PTX: cp.async.bulk.tensor needs sm_90
    # QK of the next step is in flight while P of this one feeds PV, so P cannot lie in S's place.
    reshape_in_place=False,
    register_overhead=24,  # see Gpu.registers
)

H200 = replace(
    H100,
    name="h200",
    title="NVIDIA H200 SXM 141 GB",
    bandwidth=4.8 * TERA,  # sheet
    memory_bytes=141 * GIB,  # sheet; every compute figure of the sheet is the H100 SXM's
)

H100_PCIE = replace(
    H100,
    name="h100-pcie",
    title="NVIDIA H100 PCIe 80 GB",
    sms=114,  # Hopper paper, PCIe
    # Hopper paper: 756 TFLOPS are 114 * 4096 * 1.62e9; 1755 MHz boost for the rest.
    clock_ghz=1.62,
    l2_bandwidth=5120 * 1.62e9,  # as the H100 SXM
    bandwidth=2.0 * TERA,  # sheet
    tensor_flops={  # Hopper paper, dense
        "fp16": 756 * TERA,
        "bf16": 756 * TERA,
        "e4m3": 1513 * TERA,
        "e5m2": 1513 * TERA,
    },
    fp32_flops=51.2 * TERA,  # Hopper paper
)

GH200 = replace(
    H100,
    name="gh200",
    title="NVIDIA GH200 96 GB",
    bandwidth=4.0 * TERA,  # sheet, the one with HBM3
    memory_bytes=96 * GIB,  # sheet; every compute figure of the sheet is the H100 SXM's
)

# NVIDIA publishes no sheet of the H20. The figures are those that its sellers name.
H20 = replace(
    H100,
    name="h20",
    title="NVIDIA H20 96 GB",
    sms=78,  # sellers, and what the driver reports
    clock_ghz=1.83,  # the H100's; 78 * 1024 * 1.83e9 = 146 TFLOPS: a quarter of its rate an SM
    l2_bytes=60 * MIB,  # sellers
    bandwidth=4.0 * TERA,  # sellers
    memory_bytes=96 * GIB,  # sellers
    tensor_flops={  # sellers, dense
        "fp16": 148 * TERA,
        "bf16": 148 * TERA,
        "e4m3": 296 * TERA,
        "e5m2": 296 * TERA,
    },
    fp32_flops=39.5 * TERA,  # 78 * 256 * 1.98 GHz, the H100's boost; sellers say 44
)

# Blackwell's own matrix instructions (tcgen05) are not used: its kernels multiply with mma.sync and
# copy with cp.async, which plain sm_100 and sm_120 have. The peaks are those of the whole chip, for
# the judge holds anybody's kernel against them; mma.sync does not reach them on a B200.
B200 = Gpu(
    name="b200",
    title="NVIDIA B200 SXM 180 GB",
    arch="sm_100",  # guide
    generation="Blackwell",
    sms=148,  # what the driver reports; 18944 CUDA cores
    clock_ghz=1.86,  # 148 * 8192 * 1.86e9 = 2.25 PFLOPS
    shared_per_block=227 * KIB,  # tuning, 10.0
    shared_per_sm=228 * KIB,  # tuning, 10.0
    shared_reserved=1 * KIB,  # tuning, 10.0
    threads_per_sm=2048,  # tuning, 10.0: 64 warps
    max_blocks_per_sm=32,  # tuning, 10.0
    l2_bytes=126 * MIB,  # tuning
    # Not published: assumed to be the A100's 5120 bytes a clock on each of its two dies.
    l2_bandwidth=2 * 5120 * 1.86e9,
    bandwidth=8.0 * TERA,  # DGX B200 sheet: 64 TB/s for eight
    memory_bytes=180 * GIB,  # DGX B200 sheet: 1440 GB for eight
    tensor_flops={  # HGX B200 sheet: 36 and 72 PFLOPS with sparsity for eight
        "fp16": 2250 * TERA,
        "bf16": 2250 * TERA,
        "e4m3": 4500 * TERA,
        "e5m2": 4500 * TERA,
    },
    fp32_flops=75 * TERA,  # HGX B200 sheet: 600 TFLOPS for eight
    mma=_MMA_SM89,  # PTX: mma.sync of sm_89 and later
    cp_async=True,  # PTX
)

RTX5090 = Gpu(
    name="rtx5090",
    title="NVIDIA GeForce RTX 5090 32 GB",
    arch="sm_120",  # guide
    generation="Blackwell",
    sms=170,  # RTX Blackwell paper
    clock_ghz=2.407,  # RTX Blackwell paper: boost 2407 MHz; 170 * 512 * 2.407e9 = 209.5 TFLOPS
    shared_per_block=99 * KIB,  # tuning, 12.0
    shared_per_sm=100 * KIB,  # guide, 12.0
    shared_reserved=1 * KIB,  # tuning, 12.0
    threads_per_sm=1536,  # tuning, 12.0: 48 warps
    max_blocks_per_sm=24,  # guide, 12.0
    l2_bytes=96 * MIB,  # RTX Blackwell paper: 98304 KB
    l2_bandwidth=14 * 170 * 2.407e9,  # not published: as the L40S, 14 bytes a clock and SM
    bandwidth=1.792 * TERA,  # RTX Blackwell paper
    memory_bytes=32 * GIB,  # RTX Blackwell paper
    tensor_flops={  # RTX Blackwell paper, dense, FP32 accumulate
        "fp16": 209.5 * TERA,
        "bf16": 209.5 * TERA,
        "e4m3": 419 * TERA,
        "e5m2": 419 * TERA,
    },
    fp32_flops=104.8 * TERA,  # RTX Blackwell paper
    mma=_MMA_SM89,  # PTX
    cp_async=True,  # PTX
)

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        *(T4, RTX8000, A100, A10, A6000, RTX3090, L4, L40S, RTX4090),
        *(H100, H100_PCIE, H20, H200, GH200, B200, RTX5090),
    )
}

# What drivers and shops put around the name without changing which card of the table is meant.
# "40GB" is not here: that is another card, with less bandwidth.
_DECORATION = re.compile(
    r"^(?:nvidia|quadro|tesla|geforce|rtx(?=a\d))+"
    r"|(?:sxm[2-5]?|(?:16|24|32|48|80|96|141|180|480)gb|hbm3e?|gpu)+$"
)
_BY_BARE_NAME = {re.sub(r"[^a-z0-9]", "", name): gpu for name, gpu in GPUS.items()}

# Cards that are not in the table, by their bare names, and the one of it that has the same
# architecture.
_RELATIVES = (
    (r"(rtx)?20[678]0(ti|super)?|titanrtx|rtx[3-6]000|t[46]00|t1000", "rtx8000"),
    (r"a100(pcie|sxm4)?(40gb)?|a800\w*|a30", "a100"),
    (r"(rtx)?30[5-9]0(ti)?|a40|a[245][05]00|a16|a2", "a6000"),
    (r"(rtx)?40[5-9]0(ti|super|d)*|l40|l20|l2|rtx[456]000ada(generation)?", "l40s"),
    (r"(h100|h800)\w*", "h100"),
    (r"h200\w*", "h200"),
    (r"gb200\w*", "b200"),
    (r"(rtx)?50[5-9]0(ti|d)*|rtxpro\w+", "rtx5090"),
)


def find(name: str) -> Gpu:
    """The GPU of that name: "H200", "rtx 8000", "NVIDIA A100-SXM4-80GB" all work."""
    bare = _DECORATION.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
    for known in (bare, f"rtx{bare}"):
        if known in _BY_BARE_NAME:
            return _BY_BARE_NAME[known]
    raise UnknownGpu(_unknown(name, bare))


def of_card(name: str, capability: int) -> Gpu:
    """The GPU of a card that is here: by its name, else one whose kernels it runs (the same
    architecture, or an older one whose PTX its driver compiles)."""
    try:
        return find(name)
    except UnknownGpu:
        older = [g for g in GPUS.values() if g.capability <= capability and not g.wgmma]
        same = [g for g in GPUS.values() if g.capability == capability]
        if not older:
            raise
        return same[0] if same else max(older, key=lambda g: g.capability)


def _unknown(name: str, bare: str) -> str:
    known = ", ".join(f"{gpu.name} ({gpu.title})" for gpu in GPUS.values())
    return f"No facts about the GPU {name!r}.{_guess(bare)} Known: {known}."


def _guess(bare: str) -> str:
    """What may be meant. A card of another architecture, whose name looks alike, is no guess: a
    kernel for it does not run."""
    kin = [relative for pattern, relative in _RELATIVES if re.fullmatch(pattern, bare)]
    if kin:
        return f" {kin[0]} has the same architecture ({GPUS[kin[0]].arch})."
    begun = [gpu.name for key, gpu in _BY_BARE_NAME.items() if bare and key.startswith(bare)]
    longer = [gpu.name for key, gpu in _BY_BARE_NAME.items() if re.match(rf"{key}(?!\d)", bare)]
    near = begun or longer[-1:]
    return f" Did you mean {' or '.join(near)}?" if near else ""
