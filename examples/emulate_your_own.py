"""A CUDA kernel of your own, run on the CPU: no GPU, its rules checked while it runs.

    python examples/emulate_your_own.py

The kernel is a softmax over rows, one block of threads for each row, with a tree of partial results
in shared memory. It is run twice: as it is, and without one __syncthreads. Needs nvcc (`pip install
'flashwright[nvcc]'`) and a C++ compiler. Exit code 0: as expected; 2: something is missing here.
"""

import sys

import numpy as np

import flashwright.emulate
from flashwright.lang.diagnostic import Failed

SOURCE = """
__device__ float combined(float* part, float mine, bool largest) {
  part[threadIdx.x] = mine;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      float other = part[threadIdx.x + half];
      part[threadIdx.x] = largest ? fmaxf(part[threadIdx.x], other) : part[threadIdx.x] + other;
    }
    __syncthreads();  // all of this round, before the next
  }
  float all = part[0];
  __syncthreads();  // everybody has it: the memory may be used again
  return all;
}

extern "C" __global__ void softmax(const float* x, float* y, int columns) {
  extern __shared__ float part[];
  const float* row = x + blockIdx.x * columns;
  float top = -INFINITY, sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) top = fmaxf(top, row[i]);
  top = combined(part, top, true);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(row[i] - top);
  sum = combined(part, sum, false);
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    y[blockIdx.x * columns + i] = expf(row[i] - top) / sum;
}
"""
ROWS, COLUMNS, THREADS = 6, 300, 128


def run(source: str) -> bool:
    """Launch it on a small problem, compare with NumPy, and print what was found."""
    softmax = flashwright.emulate.kernel(source)
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    y = np.full_like(x, np.nan)
    done = softmax(ROWS, THREADS, x, y, COLUMNS, shared=4 * THREADS)
    exact = np.exp(x.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    print(f"largest error {np.abs(y - exact).max():.1e}")
    print(done)
    return done.ok


try:
    print("As it is:")
    right = run(SOURCE)
    print("\nWithout the barrier in the loop:")
    wrong = run(SOURCE.replace("__syncthreads();  // all of this round, before the next", ""))
except Failed as failed:
    print(failed, file=sys.stderr)
    sys.exit(2)
sys.exit(0 if right and not wrong else 1)
