// A 5 x 5 convolution with zeros outside: a tile and its halo in shared memory, constant weights.
constexpr int kTile = 16, kRadius = 2, kWide = kTile + 2 * kRadius;
__constant__ float weights[5][5];

__global__ void convolution(const float* x, float* y, int width, int height) {
  __shared__ float tile[kWide][kWide];
  int left = blockIdx.x * kTile - kRadius, top = blockIdx.y * kTile - kRadius;
  for (int r = threadIdx.y; r < kWide; r += kTile) {
    for (int c = threadIdx.x; c < kWide; c += kTile) {
      bool inside = left + c >= 0 && left + c < width && top + r >= 0 && top + r < height;
      tile[r][c] = inside ? x[(top + r) * width + left + c] : 0;
    }
  }
  __syncthreads();
  float sum = 0;
  for (int r = 0; r < 5; ++r)
    for (int c = 0; c < 5; ++c) sum += weights[r][c] * tile[threadIdx.y + r][threadIdx.x + c];
  int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  if (row < height && column < width) y[row * width + column] = sum;
}
