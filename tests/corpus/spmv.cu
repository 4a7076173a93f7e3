// A sparse matrix (CSR) times a vector: a warp for each row, the results of a block stored together.
__global__ void spmv(const int* starts, const int* columns, const float* values, const float* x, float* y, int rows) {
  __shared__ float results[4];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 4 + warp;
  float sum = 0;
  if (row < rows)
    for (int i = starts[row] + lane; i < starts[row + 1]; i += 32) sum += values[i] * x[columns[i]];
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffff, sum, by);
  if (lane == 0) results[warp] = sum;
  __syncthreads();
  if (threadIdx.x < 4 && blockIdx.x * 4 + threadIdx.x < rows) y[blockIdx.x * 4 + threadIdx.x] = results[threadIdx.x];
}
