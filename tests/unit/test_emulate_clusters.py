"""Thread block clusters: distributed shared memory, remote mbarriers, multicast."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.emulate import GAP
from flashwright.emulate.own import EmulatedKernel, LaunchReport
from flashwright.emulate.tensor_map import encode_tensor_map
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers
from tests.unit.ptx_kernels import SCHEDULES

pytestmark = needs_compilers
SOURCE = """
#include <cooperative_groups.h>
#include <cuda/ptx>
namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;
using Bar = unsigned long long;
#define KERNEL extern "C" __global__ void
#define SYNC(n) if constexpr (kBug != n) cluster.sync();

// Each block adds up its part; the first one of the cluster adds up what the others have.
template <int kBug>
__device__ void sum(const float* x, float* out) {
  cg::cluster_group cluster = cg::this_cluster();
  __shared__ float part;
  float value = x[blockIdx.x * 32 + threadIdx.x];
  for (int k = 16; k > 0; k /= 2) value += __shfl_xor_sync(~0u, value, k);
  if (threadIdx.x == 0) part = value;
  SYNC(1)
  if (cluster.thread_rank() == 0) {
    value = 0;
    for (int b = 0; b < cluster.num_blocks(); ++b) value += *cluster.map_shared_rank(&part, b);
    out[blockIdx.x / cluster.num_blocks()] = value;
  }
  SYNC(2)
}
KERNEL sums(const float* x, float* out) { sum<0>(x, out); }
KERNEL sums_early(const float* x, float* out) { sum<1>(x, out); }
KERNEL sums_gone(const float* x, float* out) { sum<2>(x, out); }

// The bins of a histogram lie in all blocks of the cluster.
template <int kBug>
__device__ void histogram(const unsigned char* x, int* out, int n) {
  cg::cluster_group cluster = cg::this_cluster();
  extern __shared__ int table[];
  int each = 256 / cluster.num_blocks();
  for (int i = threadIdx.x; i < each; i += 64) table[i] = 0;
  SYNC(1)
  for (int i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) {
    atomicAdd(cluster.map_shared_rank(table, x[i] / each) + x[i] % each, 1);
  }
  SYNC(2)
  for (int i = threadIdx.x; i < each; i += 64) {
    if (table[i]) atomicAdd(out + cluster.block_rank() * each + i, table[i]);
  }
}
KERNEL bins(const unsigned char* x, int* out, int n) { histogram<0>(x, out, n); }
KERNEL bins_unset(const unsigned char* x, int* out, int n) { histogram<1>(x, out, n); }
KERNEL bins_unfinished(const unsigned char* x, int* out, int n) { histogram<2>(x, out, n); }

__device__ void wait(Bar* bar, int parity) {
  while (!ptx::mbarrier_try_wait_parity((uint64_t*)bar, parity)) {}
}
template <int kBug>
__device__ void init(Bar* bar, int count) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init((uint64_t*)bar, count);
    if (kBug != 3) ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
}

// Each block sends numbers to its neighbour: by st.async, then from shared memory, then it adds.
template <int kBug>
__device__ void send(int* out) {
  cg::cluster_group cluster = cg::this_cluster();
  __shared__ alignas(16) int box[64], own[32], total;
  __shared__ Bar bar;
  init<0>(&bar, 1);
  if (threadIdx.x == 0) total = 5;
  own[threadIdx.x] = 100 * cluster.block_rank() + threadIdx.x;
  ptx::fence_proxy_async();
  SYNC(1)
  int to = (cluster.block_rank() + 1) % cluster.num_blocks();
  int* far = cluster.map_shared_rank(box, to);
  auto far_bar = (uint64_t*)cluster.map_shared_rank(&bar, to);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(
        ptx::sem_release, ptx::scope_cluster, ptx::space_shared, (uint64_t*)&bar, 384);
  }
  ptx::st_async(far + threadIdx.x, own[threadIdx.x] + 1, far_bar);
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_shared, far + 32, own, 128, far_bar);
  }
  ptx::red_async(ptx::op_add, cluster.map_shared_rank(&total, to), (int)threadIdx.x, far_bar);
  if (kBug != 2) wait(&bar, 0);
  for (int i = threadIdx.x; i < 64; i += 32) out[blockIdx.x * 64 + i] = box[i];
  out[64 * gridDim.x + blockIdx.x] = total;
  SYNC(4)
}
KERNEL sends(int* out) { send<0>(out); }
KERNEL sends_early(int* out) { send<1>(out); }
KERNEL sends_unwaited(int* out) { send<2>(out); }
KERNEL sends_gone(int* out) { send<4>(out); }

// A value goes round: a block waits until its neighbour has arrived at its barrier.
template <int kBug>
__device__ void pass(int* out) {
  cg::cluster_group cluster = cg::this_cluster();
  __shared__ int value;
  __shared__ Bar bar;
  init<kBug>(&bar, 1);
  ptx::barrier_cluster_arrive(ptx::sem_relaxed);
  ptx::barrier_cluster_wait();
  int rank = cluster.block_rank();
  if (threadIdx.x == 0) {
    if (rank > 0) wait(&bar, 0);
    else value = 0;
    if (rank + 1 < cluster.num_blocks()) {
      int* next = cluster.map_shared_rank(&value, rank + 1);
      *next = value + 1;
      auto at = (uint64_t*)cluster.map_shared_rank(&bar, rank + 1);
      ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, at);
      if (kBug == 5) *next = 0;
    }
    out[blockIdx.x] = value;
  }
  cluster.sync();
}
KERNEL passes(int* out) { pass<0>(out); }
KERNEL passes_unfenced(int* out) { pass<3>(out); }
KERNEL passes_late(int* out) { pass<5>(out); }

// One block loads a tile for those in the mask.
struct alignas(64) Map { char data[128]; };
template <int kBug>
__device__ void spread(const Map* map, const int* x, int* out, int mask) {
  cg::cluster_group cluster = cg::this_cluster();
  __shared__ alignas(128) int tile[128];
  __shared__ Bar bar;
  init<0>(&bar, 1);
  SYNC(1)
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(
        ptx::sem_release, ptx::scope_cluster, ptx::space_shared, (uint64_t*)&bar, 512);
    if (cluster.block_rank() == 0) {
      int const at[2] = {0, 4};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile, map, at,
                                (uint64_t*)&bar, (uint16_t)mask);
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile + 64, x, 256,
                         (uint64_t*)&bar, (uint16_t)mask);
    }
  }
  wait(&bar, 0);
  for (int i = threadIdx.x; i < 128; i += 32) out[blockIdx.x * 128 + i] = tile[i];
  SYNC(2)
}
KERNEL spreads(const __grid_constant__ Map map, const int* x, int* out, int mask) {
  spread<0>(&map, x, out, mask);
}
KERNEL spreads_early(const __grid_constant__ Map map, const int* x, int* out, int mask) {
  spread<1>(&map, x, out, mask);
}
KERNEL places(unsigned* out) {
  unsigned found[12];
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(found[0]));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(found[1]));
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(found[2]));
  asm("mov.u32 %0, %%clusterid.y;" : "=r"(found[3]));
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(found[4]));
  asm("mov.u32 %0, %%nclusterid.y;" : "=r"(found[5]));
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(found[6]));
  asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(found[7]));
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(found[8]));
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(found[9]));
  for (int i = 0; i < 10; ++i) out[10 * (gridDim.x * blockIdx.y + blockIdx.x) + i] = found[i];
}
KERNEL __cluster_dims__(2, 1, 1) pairs(unsigned* out) {
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(out[blockIdx.x]));
}
KERNEL relaxed(int* out) {
  __shared__ int value;
  value = 7;
  ptx::barrier_cluster_arrive(ptx::sem_relaxed);
  ptx::barrier_cluster_wait();
  cg::cluster_group cluster = cg::this_cluster();
  out[blockIdx.x] = *cluster.map_shared_rank(&value, 1 - cluster.block_rank());
  cluster.sync();
}
"""


@pytest.fixture(scope="module")
def module() -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE, "sums", arch="sm_90a")


def line_of(text: str) -> int:
    before, found, _ = SOURCE.partition(text)
    assert found
    return before.count("\n") + 1


def found(done: LaunchReport) -> set[tuple[str, int]]:
    """The kinds of the findings, and their lines of CUDA."""
    lines = [(f.kind, f.instruction.source_lines) for f in done.findings]
    own = [(kind, [s.line for s in all if s.file.endswith("kernel.cu")]) for kind, all in lines]
    return {(kind, first) for kind, (first, *_) in own}


def lines_of(done: LaunchReport) -> set[tuple[str, str]]:
    listed = SOURCE.splitlines()
    return {(kind, listed[line - 1].strip()) for kind, line in found(done)}


X = np.random.default_rng(0).integers(-9, 9, 8 * 32).astype(np.float32)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "random:1"])
def test_a_sum_over_distributed_shared_memory(module: EmulatedKernel, schedule: str) -> None:
    for cluster in (1, 2, 8):
        out = np.zeros(8 // cluster, np.float32)
        done = module.other("sums")(8, 32, X, out, cluster=cluster, schedule=schedule)
        assert done.ok, done
        np.testing.assert_array_equal(out, X.reshape(8 // cluster, -1).sum(1))


REMOTE = (
    "for (int b = 0; b < cluster.num_blocks(); ++b) value += *cluster.map_shared_rank(&part, b);"
)


@pytest.mark.parametrize("order", ["in-order", "reversed"])
def test_a_missing_barrier_before_a_remote_access(module: EmulatedKernel, order: str) -> None:
    done = module.other("sums_early")(8, 32, X, np.zeros(2, np.float32), cluster=4, order=order)
    assert ("race", REMOTE) in lines_of(done)
    assert {f.kind for f in done.findings} <= {"race", "unwritten"}
    assert "of its cluster, which may not have begun: there is no barrier.cluster" in str(done)


def test_a_block_that_exits_while_others_read_its_shared_memory(module: EmulatedKernel) -> None:
    done = module.other("sums_gone")(8, 32, X, np.zeros(2, np.float32), cluster=4)
    assert lines_of(done) == {("race", REMOTE)}
    assert re.search(r"rank [123] of its cluster, which may have exited at kernel.cu:", str(done))


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_a_histogram_in_distributed_shared_memory(module: EmulatedKernel, cluster: int) -> None:
    x = np.random.default_rng(1).integers(0, 256, 3000).astype(np.uint8)
    wanted = np.bincount(x, minlength=256)

    def run(entry: str) -> LaunchReport:
        out.fill(0)
        return module.other(entry)(4, 64, x, out, len(x), shared=1024 // cluster, cluster=cluster)

    out = np.zeros(256, np.int32)
    assert run("bins").ok
    np.testing.assert_array_equal(out, wanted)
    for entry, line in (
        ("bins_unset", "atomicAdd(cluster.map_shared_rank(table, x[i] / each) + x[i] % each, 1);"),
        (
            "bins_unfinished",
            "if (table[i]) atomicAdd(out + cluster.block_rank() * each + i, table[i]);",
        ),
    ):
        assert any(kind == "race" for kind, _ in lines_of(run(entry))), entry
        assert line in {text for _, text in lines_of(run(entry))}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_are_sent_to_another_block(module: EmulatedKernel, schedule: str) -> None:
    data = np.zeros(4 * 65, np.int32)
    out = data[:256].reshape(4, 2, 32)

    def run(entry: str) -> LaunchReport:
        return module.other(entry)(4, 32, data, cluster=4, schedule=schedule)

    done = run("sends")
    assert done.ok, done
    sent = 100 * np.arange(4)[:, None] + np.arange(32)
    np.testing.assert_array_equal(out[:, 0], np.roll(sent + 1, 1, 0))
    np.testing.assert_array_equal(out[:, 1], np.roll(sent, 1, 0))
    assert data[256:].tolist() == [5 + sum(range(32))] * 4
    early = {kind for kind, _ in found(run("sends_early"))}
    assert "race" in early or "barrier" in early
    read = "for (int i = threadIdx.x; i < 64; i += 32) out[blockIdx.x * 64 + i] = box[i];"
    unwaited = run("sends_unwaited")
    assert any(kind in ("race", "unwritten") and text == read for kind, text in lines_of(unwaited))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_remote_arrival_hands_on_what_was_written(module: EmulatedKernel, schedule: str) -> None:
    out = np.zeros(8, np.int32)
    done = module.other("passes")(8, 64, out, cluster=4, schedule=schedule)
    assert done.ok, done
    assert out.tolist() == [0, 1, 2, 3] * 2
    late = module.other("passes_late")(8, 64, out, cluster=4, schedule=schedule)
    assert "race" in {f.kind for f in late.findings}
    unfenced = module.other("passes_unfenced")(8, 64, out, cluster=4, schedule=schedule)
    assert {f.kind for f in unfenced.findings} == {"race"}
    arrive = "ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, at);"
    assert ("race", arrive) in lines_of(unfenced)


def spread(module: EmulatedKernel, mask: int, entry: str = "spreads", **how: Any) -> LaunchReport:
    x = np.arange(8 * 16, dtype=np.int32)
    out = np.zeros((4, 128), np.int32)
    tensor = encode_tensor_map(GAP, [16, 8], [64], [16, 4], 4, "none")
    done = module.other(entry)(4, 32, tensor, x, out, mask, cluster=4, **how)
    if done.ok:
        np.testing.assert_array_equal(out, [[*x[64:128], *x[:64]]] * 4)
    return done


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tile_is_loaded_for_several_blocks(module: EmulatedKernel, schedule: str) -> None:
    done = spread(module, 0b1111, schedule=schedule)
    assert done.ok, done
    few = spread(module, 0b1011, schedule=schedule)
    assert {f.kind for f in few.findings} == {"deadlock"}
    assert [f.detail for f in few.findings if f.block == 2] == [(0, 512)]
    many = spread(module, 0b11111, schedule=schedule)
    assert {f.kind for f in many.findings} == {"barrier"}
    early = {f.kind for f in spread(module, 0b1111, "spreads_early", schedule=schedule).findings}
    assert early & {"race", "barrier"}


def test_a_relaxed_barrier_orders_no_accesses(module: EmulatedKernel) -> None:
    done = module.other("relaxed")(2, 1, np.zeros(2, np.int32), cluster=2)
    assert {f.kind for f in done.findings} == {"race"}
    line = "out[blockIdx.x] = *cluster.map_shared_rank(&value, 1 - cluster.block_rank());"
    assert lines_of(done) == {("race", line)}


def test_blocks_know_their_places_in_the_cluster(module: EmulatedKernel) -> None:
    out = np.zeros((4, 6, 10), np.uint32)
    assert module.other("places")((6, 4), 1, out, cluster=(3, 2)).ok
    for (y, x), found in zip(np.ndindex(4, 6), out.reshape(24, 10), strict=True):
        own = [y % 2 * 3 + x % 3, 6, x // 3, y // 2, 2, 2, x % 3, y % 2, 3, 2]
        assert found.tolist() == own
    ranks = np.zeros(6, np.uint32)
    assert module.other("pairs")(6, 1, ranks).ok
    assert ranks.tolist() == [0, 1] * 3


def test_clusters_that_no_gpu_launches_are_refused(module: EmulatedKernel) -> None:
    out = np.zeros(60, np.uint32)
    places, pairs = module.other("places"), module.other("pairs")
    for kernel, grid, cluster, words in (
        (places, 6, 4, "a grid of 6, 1, 1 blocks is not a whole number of clusters of 4, 1, 1"),
        (places, 34, 17, "a cluster of 17, 1, 1 blocks is not one of 1 to 16"),
        (pairs, 6, 3, "the cluster is 3, 1, 1, and __cluster_dims__ demands 2, 1, 1"),
    ):
        with pytest.raises(Failed, match=f"FW831: .* cannot be launched: {words}"):
            kernel(grid, 1, out, cluster=cluster)
