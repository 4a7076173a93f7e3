// C = A B in tiles of 32 x 32, loaded by cp.async into two buffers in turn.
constexpr int kTile = 32, kStages = 2;

__device__ void copy_async(float* to, const float* from) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

__device__ void load(float (*to)[kTile], const float* from, int stride) {
  int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  copy_async(&to[row][column], from + row * stride + column);
}

__global__ void __launch_bounds__(256) matmul_cp_async(const float* a, const float* b, float* c, int n) {
  __shared__ alignas(16) float as[kStages][kTile][kTile], bs[kStages][kTile][kTile];
  a += blockIdx.y * kTile * n;
  b += blockIdx.x * kTile;
  int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  float sums[4] = {};
  load(as[0], a, n);
  load(bs[0], b, n);
  asm volatile("cp.async.commit_group;" ::: "memory");
  for (int k = 0; k < n; k += kTile) {
    int stage = k / kTile % 2;
    if (k + kTile < n) {
      load(as[1 - stage], a + k + kTile, n);
      load(bs[1 - stage], b + (k + kTile) * n, n);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();  // all have their parts of this tile
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < 4; ++j) sums[j] += as[stage][row][i] * bs[stage][i][column + j];
    __syncthreads();  // all are done with this tile
  }
  c += (blockIdx.y * kTile + row) * n + blockIdx.x * kTile + column;
  *reinterpret_cast<float4*>(c) = make_float4(sums[0], sums[1], sums[2], sums[3]);
}
