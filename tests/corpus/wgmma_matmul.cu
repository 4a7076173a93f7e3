// C = A B^T of bf16 on Hopper's tensor cores: 64 x 8 x 16 by one warpgroup, both operands in shared memory.
#include <cstdint>
constexpr int kM = 64, kN = 8;

// A descriptor without swizzling: matrices of 8 rows of 16 bytes, 128 bytes apart along K, 256 along M and N.
__device__ uint64_t describe(const void* at) {
  uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(at));
  return (address & 0x3ffff) >> 4 | uint64_t{128 >> 4} << 16 | uint64_t{256 >> 4} << 32;
}

__device__ void store(uint16_t* to, const uint16_t* from, int rows, int k, int first) {
  for (int i = threadIdx.x; i < rows * 16; i += 128) {
    int row = i / 16, column = i % 16;
    to[row / 8 * 128 + column / 8 * 64 + row % 8 * 8 + column % 8] = from[row * k + first + column];
  }
}

__global__ void __launch_bounds__(128) wgmma_matmul(const uint16_t* a, const uint16_t* b, float* c, int k) {
  __shared__ alignas(128) uint16_t as[kM * 16], bs[kN * 16];
  float d[4] = {};
  for (int first = 0; first < k; first += 16) {
    store(as, a, kM, k, first);
    store(bs, b, kN, k, first);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(describe(as)), "l"(describe(bs)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // all four warps are done with the tile
  }
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  c[row * kN + column] = d[0];
  c[row * kN + column + 1] = d[1];
  c[(row + 8) * kN + column] = d[2];
  c[(row + 8) * kN + column + 1] = d[3];
}
