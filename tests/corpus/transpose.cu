// A matrix turned, through a padded tile in shared memory.
constexpr int kTile = 32, kRows = 8;

__global__ void transpose(const float* x, float* y, int width, int height) {
  __shared__ float tile[kTile][kTile + 1];
  int column = blockIdx.x * kTile + threadIdx.x, row = blockIdx.y * kTile + threadIdx.y;
  for (int i = 0; i < kTile; i += kRows)
    if (column < width && row + i < height) tile[threadIdx.y + i][threadIdx.x] = x[(row + i) * width + column];
  __syncthreads();
  column = blockIdx.y * kTile + threadIdx.x;
  row = blockIdx.x * kTile + threadIdx.y;
  for (int i = 0; i < kTile; i += kRows)
    if (column < height && row + i < width) y[(row + i) * height + column] = tile[threadIdx.x][threadIdx.y + i];
}
