"""Blocks of a grid that wait for each other: cooperative launches, flags, tickets."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel, LaunchReport
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers

pytestmark = needs_compilers
ORDERS = ["in-order", "reversed", "random:5", "all"]
HEAD = """#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#define GLUED(name, variant) name##_##variant
#define NAMED(name, variant) GLUED(name, variant)
#define KERNEL(name) extern "C" __global__ void NAMED(name, VARIANT)
"""
SOURCE = """
__device__ float block_sum(float value) {
  __shared__ float part[4];
  for (int k = 16; k > 0; k /= 2) value += __shfl_xor_sync(~0u, value, k);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return part[0] + part[1] + part[2] + part[3];
}

KERNEL(by_grid)(const float* x, float* part, float* out, int n) {
  cg::grid_group grid = cg::this_grid();
  float value = 0;
  for (int i = grid.thread_rank(); i < n; i += grid.size()) value += x[i];
  value = block_sum(value);
  if (threadIdx.x == 0) part[blockIdx.x] = value;
  GRID_SYNC
  if (grid.thread_rank() != 0) return;
  value = 0;
  for (int b = 0; b < gridDim.x; ++b) value += part[b];
  out[0] = value;
}

KERNEL(by_last)(const float* x, float* part, float* out, unsigned* count) {
  __shared__ bool last;
  float value = block_sum(x[blockIdx.x * 128 + threadIdx.x]);
  if (threadIdx.x == 0) {
    part[blockIdx.x] = value;
    RELEASE
    last = atomicAdd(count, 1) == gridDim.x - 1;
    ACQUIRE
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  value = 0;
  for (int b = 0; b < gridDim.x; ++b) value += part[b];
  out[0] = value;
}

// Each block waits for the sum of the one before it.
template <bool kTicket>
__device__ void look_back(const int* x, int* out, int* sums, volatile int* ready, int* tickets) {
  __shared__ int tile, before, part[128];
  if (threadIdx.x == 0) tile = kTicket ? atomicAdd(tickets, 1) : blockIdx.x;
  __syncthreads();
  int own = x[tile * 128 + threadIdx.x];
  part[threadIdx.x] = own;
  for (int k = 1; k < 128; k *= 2) {
    __syncthreads();
    int left = threadIdx.x >= k ? part[threadIdx.x - k] : 0;
    __syncthreads();
    part[threadIdx.x] += left;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (tile > 0) {
      while (ready[tile - 1] == 0) {}
      ACQUIRE
    }
    before = tile > 0 ? sums[tile - 1] : 0;
    sums[tile] = before + part[127];
    RELEASE
    ready[tile] = 1;
  }
  __syncthreads();
  out[tile * 128 + threadIdx.x] = before + part[threadIdx.x];
}
KERNEL(scan)(const int* x, int* out, int* sums, int* ready, int* tickets) {
  look_back<false>(x, out, sums, ready, tickets);
}
KERNEL(scan_by_ticket)(const int* x, int* out, int* sums, int* ready, int* tickets) {
  look_back<true>(x, out, sums, ready, tickets);
}

// The first block adds up what the others have left over.
KERNEL(fix_up)(const float* x, float* part, float* out, int* flags) {
  float value = block_sum(x[blockIdx.x * 128 + threadIdx.x]);
  if (threadIdx.x != 0) return;
  if (blockIdx.x > 0) {
    part[blockIdx.x] = value;
    RELEASE
    atomicExch(flags + blockIdx.x, 1);
    return;
  }
  for (int b = 1; b < gridDim.x; ++b) {
    while (atomicAdd(flags + b, 0) == 0) {}
    ACQUIRE
    value += part[b];
  }
  out[0] = value;
}

KERNEL(neighbours)(float* x) {
  int i = blockIdx.x * 64 + threadIdx.x;
  float left = x[i];
  x[i + 1] = left;
}
KERNEL(unordered_warps)(float* x) {
  x[64 * blockIdx.x + threadIdx.x] = 1;
  x[64 * blockIdx.x + (threadIdx.x + 32) % 64] += 1;
}
KERNEL(counted)(int* total, int* mine) {
  atomicAdd_block(total, 1);
  atomicAdd_block(mine + blockIdx.x, 1);
}
KERNEL(apart)(const float* x, float* y, int n, int trapped) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  if (blockIdx.x % 7 != 6) __syncthreads();
  int i = blockIdx.x * 64 + 63 - threadIdx.x;
  if (blockIdx.x == trapped) __trap();
  if (i < n) y[i] = tile[63 - threadIdx.x];
}
"""
VARIANTS = {
    "good": ("__threadfence();", "grid.sync();"),
    "cta": ("__threadfence_block();", "grid.sync();"),
    "none": ("", ""),
}
"""Of each, the fence and the synchronisation of the grid."""


def variant(name: str) -> str:
    """All kernels with the fences of a variant, named for it."""
    fence, sync = VARIANTS[name]
    text = SOURCE.replace("RELEASE", fence).replace("ACQUIRE", fence).replace("GRID_SYNC", sync)
    return f"#define VARIANT {name}\nnamespace {name} {{{text}}}\n#undef VARIANT\n"


@functools.cache
def module() -> EmulatedKernel:
    source = HEAD + "".join(variant(name) for name in VARIANTS)
    return flashwright.emulate.kernel(source, "scan_good")


def made(entry: str, name: str = "good") -> EmulatedKernel:
    return module().other(f"{entry}_{name}")


def line_of(text: str, name: str = "good") -> int:
    """The line of a statement in a variant."""
    before, found, _ = module().text.partition(f"namespace {name} {{")[2].partition(text)
    assert found
    return module().text.partition(f"namespace {name} {{")[0].count("\n") + before.count("\n") + 1


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).integers(-50, 50, 12 * 128).astype(np.float32)


def summed(kernel: EmulatedKernel, x: np.ndarray, **how: Any) -> tuple[LaunchReport, float]:
    """A sum by one of the kernels above, over twelve blocks."""
    part, out = np.zeros(12, np.float32), np.zeros(1, np.float32)
    cooperative = kernel.entry.startswith("by_grid")
    last = len(x) if cooperative else np.zeros(12, np.int32)
    args = (x, part, out, last)
    return kernel(12, 128, *args, **({"cooperative": cooperative} | how)), float(out[0])


@pytest.mark.parametrize("races", ["shared", "global"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", ["by_grid", "by_last", "fix_up"])
def test_blocks_that_wait_for_each_other_come_to_an_end(
    entry: str, order: str, races: str, x: np.ndarray
) -> None:
    done, got = summed(made(entry), x, order=order, races=races)
    assert done.ok, done
    assert got == x.sum()


def scanned(entry: str, name: str = "good", **how: Any) -> tuple[LaunchReport, bool]:
    x = np.arange(9 * 128, dtype=np.int32) % 7
    out, tickets = np.zeros_like(x), np.zeros(1, np.int32)
    sums, ready = np.zeros((2, 9), np.int32)
    done = made(entry, name)(9, 128, x, out, sums, ready, tickets, **how)
    return done, bool((out == np.cumsum(x)).all())


@pytest.mark.parametrize("races", ["shared", "global"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", ["scan", "scan_by_ticket"])
def test_a_scan_that_looks_back_is_right_in_each_order(entry: str, order: str, races: str) -> None:
    done, right = scanned(entry, order=order, races=races)
    assert done.ok, done
    assert right


@pytest.mark.parametrize(
    ("entry", "order", "ends"),
    [
        ("scan", "in-order", True),
        ("scan", "reversed", False),
        ("scan_by_ticket", "reversed", True),
        ("scan_by_ticket", "random:1", True),
    ],
)
def test_a_block_that_waits_for_one_that_cannot_begin_is_found(
    entry: str, order: str, ends: bool
) -> None:
    """What a kernel assumes of the order of blocks shows when few of them are resident."""
    done, right = scanned(entry, order=order, resident=1)
    assert right == done.ok == ends, done
    if not ends:
        assert {f.kind for f in done.findings} == {"deadlock"}
        place = line_of("while (ready")
        assert f"deadlock at kernel.cu:{place}, " in str(done)
        assert "waits for ever for a change of byte 28 of `argument 3`; 8 " in str(done)


def test_a_wait_for_a_later_block_needs_it_to_be_resident(x: np.ndarray) -> None:
    assert summed(made("fix_up"), x, resident=2)[0].ok, "the others end one after the other"
    done, _ = summed(made("fix_up"), x, resident=1)
    assert [(f.kind, f.block) for f in done.findings] == [("deadlock", 0)]


def test_a_grid_is_synchronised_in_cooperative_launches_only(x: np.ndarray) -> None:
    done, _ = summed(made("by_grid"), x, cooperative=False)
    assert {f.kind for f in done.findings} == {"trap"}
    assert f"trap at kernel.cu:{line_of('grid.sync')}, " in str(done)
    with pytest.raises(Failed, match="7000 blocks of 128 threads cannot be resident at a time"):
        made("by_grid")(7000, 128, x, x, x, 1, cooperative=True)


def test_an_order_has_a_name() -> None:
    with pytest.raises(ValueError, match="no order 'backwards'"):
        scanned("scan", order="backwards")


# --- races in global memory -------------------------------------------------------------------


READS = {"by_grid": "value += part[b]", "by_last": "value += part[b]", "fix_up": "value += part[b]"}
WRITES = {"by_grid": "part[blockIdx.x] = value", "by_last": "part[blockIdx.x] = value"}
WRITES["fix_up"] = WRITES["by_last"]


def of_kernel(entry: str, text: str, name: str) -> int:
    """The line of a statement in a kernel of a variant."""
    start = line_of(f"KERNEL({entry})", name)
    lines = module().text.splitlines()[start:]
    return start + 1 + next(n for n, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("order", ["in-order", "reversed", "all"])
@pytest.mark.parametrize(
    ("entry", "name"),
    [("by_grid", "none"), *((e, n) for e in ("by_last", "fix_up") for n in ("cta", "none"))],
)
def test_a_missing_or_too_narrow_fence_is_a_race(
    entry: str, name: str, order: str, x: np.ndarray
) -> None:
    kernel = made(entry, name)
    done, _ = summed(kernel, x, order=order, races="global", cooperative=True)
    assert {f.kind for f in done.findings} == {"race"}
    places = [of_kernel(entry, text[entry], name) for text in (READS, WRITES)]
    assert any(f"race at kernel.cu:{place}, " in str(done) for place in places), done
    assert "with nothing that orders it and, in another block, the access at" in str(done)
    assert summed(kernel, x, order=order, cooperative=True)[0].ok, "it is not asked"


@pytest.mark.parametrize("name", ["cta", "none"])
def test_a_scan_without_a_fence_of_the_gpu_is_a_race(name: str) -> None:
    done, _ = scanned("scan", name, races="global")
    assert {f.kind for f in done.findings} == {"race"}
    assert f"race at kernel.cu:{line_of('before = tile > 0', name)}, " in str(done)


def test_plain_accesses_of_blocks_and_warps(x: np.ndarray) -> None:
    done = made("neighbours")(2, 64, x, races="global")
    assert {f.kind for f in done.findings} == {"race"}
    done = made("unordered_warps")(2, 64, x, races="global")
    assert {f.kind for f in done.findings} == {"race"}
    place = line_of("(threadIdx.x + 32) % 64] += 1")
    assert f"race at kernel.cu:{place}, " in str(done)
    with pytest.raises(ValueError, match="no races 'all': there are none, shared, global"):
        made("neighbours")(2, 64, x, races="all")


def test_an_atomic_operation_of_a_block_is_none_for_others() -> None:
    total, mine = np.zeros(1, np.int32), np.zeros(4, np.int32)
    done = made("counted")(4, 64, total, mine, races="global")
    assert {f.kind for f in done.findings} == {"race"}
    assert f"race at kernel.cu:{line_of('atomicAdd_block(total')}, " in str(done)
    assert "in a scope too small for it or for the access at" in str(done)
    assert f"kernel.cu:{line_of('atomicAdd_block(mine')}" not in str(done)
    assert total[0] == 256


# --- several threads of the host --------------------------------------------------------------


@pytest.mark.parametrize("trapped", [-1, 20])
def test_several_threads_find_and_count_what_one_does(trapped: int) -> None:
    x = np.arange(50 * 64, dtype=np.float32)
    one, several = (
        (made("apart")(50, 64, x, y, len(x) + 1000, trapped, threads=threads), y)
        for threads, y in (
            (1, np.zeros(len(x) - 96, np.float32)),
            (4, np.zeros(len(x) - 96, np.float32)),
        )
    )
    assert {f.kind for f in one[0].findings} >= {"race"} | ({"trap"} if trapped >= 0 else set())
    assert [(f.block, f.kind, f.instruction) for f in several[0].findings] == [
        (f.block, f.kind, f.instruction) for f in one[0].findings
    ]
    if trapped < 0:
        assert "out_of_bounds" in {f.kind for f in one[0].findings}
        np.testing.assert_array_equal(one[0].counts, several[0].counts)
        np.testing.assert_array_equal(one[1], several[1])


def test_races_are_not_looked_for_where_it_is_not_asked() -> None:
    x = np.arange(64 * 64, dtype=np.float32)
    done = made("apart")(64, 64, x, np.zeros_like(x), len(x), -1, races="none")
    assert {f.kind for f in done.findings} == {"unwritten"}, "of a warp that came too early"


WORDS = """
extern "C" __global__ void words(float* y, int apart) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    if (apart & 1) y[0] = 1;
    else *(float4*)y = make_float4(1, 2, 3, 4);
  }
  if (blockIdx.x == 1 && apart & 2) y[1] = 2;
  if (blockIdx.x == 1 && apart & 4) atomicAdd(y + 2, 1.f);
  if (blockIdx.x == 2 && apart & 8) y[4] = y[0];
  if (blockIdx.x == 2 && apart & 16) y[4] = y[3];
  if (blockIdx.x == 2 && apart & 32) atomicAdd(y + 2, 1.f);
}
"""


@pytest.mark.parametrize(
    ("apart", "races"),
    [
        (1 | 2 | 4 | 16 | 32, False),  # each block has words of its own, or adds to one
        (0, False),
        (2, True),
        (4, True),
        (8, True),
        (16, True),
        (1 | 2 | 8, True),  # what another block writes beside it hides nothing
        (1 | 4 | 8, True),
    ],
)
def test_blocks_race_for_words_not_for_their_neighbours(apart: int, races: bool) -> None:
    y = np.zeros(8, np.float32)
    done = flashwright.emulate.kernel(WORDS, "words")(3, 32, y, apart, races="global")
    assert {one.kind for one in done.findings} == ({"race"} if races else set())
