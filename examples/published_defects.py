"""Small kernels with the defects of published ones (docs/emulator-corpus.md), and the findings.

python examples/published_defects.py            # all of them
python examples/published_defects.py stages     # one
"""

from __future__ import annotations

import sys

import numpy as np

import flashwright.emulate

DEFECTS = {
    "reused": """
// Thread 0 stores the sum where other threads may still read the largest number.
__global__ void reused(float* x) {
  __shared__ float parts[2];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x[threadIdx.x];
  __syncthreads();
  float largest = fmaxf(parts[0], parts[1]);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest + 1;
  __syncthreads();
  x[threadIdx.x] = parts[0] + parts[1];
}""",
    "stages": """
// Five tiles are on their way in four buffers: the fifth overwrites the one that is read.
__global__ void stages(float* x) {
  constexpr int kStages = 4;
  __shared__ float tiles[kStages][64];
  for (int tile = 0, next = 0; tile < 8; ++tile) {
    for (; next <= tile + kStages; ++next) {
      if (next < 8) {
        auto to = (unsigned)__cvta_generic_to_shared(&tiles[next % kStages][threadIdx.x]);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                     ::"r"(to), "l"(x + next * 64 + threadIdx.x) : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
    asm volatile("cp.async.wait_group 4;" ::: "memory");
    __syncthreads();
    float read = tiles[tile % kStages][63 - threadIdx.x];
    __syncthreads();
    x[threadIdx.x + 512] += read;
  }
}""",
    "index": """
// The rows of the second array are found with the length of the first one's.
__global__ void index(float* a, const float* b, int rows_a) {
  if (threadIdx.x < rows_a) a[threadIdx.x] += b[threadIdx.x];
}""",
    "store": """
// A bulk store reads through the asynchronous proxy: the stores before it need a fence.
__global__ void store(float* x) {
  __shared__ alignas(128) float tile[64];
  tile[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    auto from = (unsigned)__cvta_generic_to_shared(tile);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                 ::"l"(x), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}""",
    "overwritten": """
// Only one thread has a bulk store to wait for; the others overwrite the tile that it still reads.
__global__ void overwritten(float* x) {
  __shared__ alignas(128) float tile[64];
  for (int round = 0; round < 2; ++round) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    tile[threadIdx.x] = round;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      auto from = (unsigned)__cvta_generic_to_shared(tile);
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                   ::"l"(x + 64 * round), "r"(from) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}""",
    "zeroed": """
// The first warp sets the sums of all warps to zero, perhaps after another one has stored its own.
__global__ void zeroed(float* x) {
  __shared__ float sums[32];
  if (threadIdx.x < 32) sums[threadIdx.x] = 0;
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = sums[threadIdx.x % 32];
}""",
    "initialised": """
// Sixteen threads, one of each row of the block, initialise the same mbarrier.
#include <cuda/barrier>
__global__ void initialised(float* x) {
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  if (threadIdx.x % 16 == 0) init(&bar, blockDim.x);
  __syncthreads();
  bar.arrive_and_wait();
  x[threadIdx.x] = 1;
}""",
    "mask": """
// The mask of a warp is 0xffffffff, not 0xff.
__global__ void mask(int* x) {
  int sum;
  asm volatile("redux.sync.add.s32 %0, %1, 0xff;" : "=r"(sum) : "r"(x[threadIdx.x]));
  x[threadIdx.x] = sum;
}""",
    "lockstep": """
// The lanes of a warp are not in lockstep: volatile does not order them, __syncwarp does.
__global__ void lockstep(float* x) {
  __shared__ volatile float sums[64];
  sums[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32)
    for (int by = 32; by > 0; by /= 2) sums[threadIdx.x] += sums[threadIdx.x + by];
  if (threadIdx.x == 0) x[0] = sums[0];
}""",
}


def findings(name: str) -> str:
    """What the emulator says of a kernel with 64 threads."""
    kernel = flashwright.emulate.kernel(DEFECTS[name], name, arch="sm_90a")
    x = np.zeros(1024, np.int32 if name == "mask" else np.float32)
    more = [np.ones(48, np.float32), 64] if name == "index" else []
    return str(kernel(1, 64, x, *more))


if __name__ == "__main__":
    for name in sys.argv[1:] or DEFECTS:
        print(f"--- {name}\n{findings(name)}\n")
