// C = A B^T of fp16 on tensor cores: ldmatrix and mma.sync, a tile of 16 x 8 for each warp.
#include <cuda_fp16.h>
constexpr int kWide = 64 + 8;  // a row of 64 in shared memory, padded

__global__ void mma_matmul(const half* a, const half* b, float* c, int k) {
  __shared__ alignas(16) half as[16][kWide], bs[32][kWide];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sums[4] = {};
  for (int first = 0; first < k; first += 64) {
    for (int i = threadIdx.x; i < 48 * 8; i += blockDim.x) {
      int row = i / 8, column = i % 8 * 8;
      half* to = row < 16 ? &as[row][column] : &bs[row - 16][column];
      const half* from = row < 16 ? a + row * k : b + (row - 16) * k;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + first + column);
    }
    __syncthreads();
    for (int i = 0; i < 64; i += 16) {
      unsigned int x[4], y[2];
      auto from = static_cast<unsigned int>(__cvta_generic_to_shared(&as[lane % 16][i + lane / 16 * 8]));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
      from = static_cast<unsigned int>(__cvta_generic_to_shared(&bs[warp * 8 + lane % 8][i + lane / 8 % 2 * 8]));
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(y[0]), "=r"(y[1]) : "r"(from) : "memory");
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                   "{%0, %1, %2, %3};"
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }
    __syncthreads();
  }
  float* to = c + lane / 4 * 32 + warp * 8 + lane % 4 * 2;
  *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
  *reinterpret_cast<float2*>(to + 8 * 32) = make_float2(sums[2], sums[3]);
}
