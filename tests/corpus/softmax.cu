// Softmax of rows: one block a row, two reductions through shared memory.
__device__ float over_warp(float value, bool largest) {
  for (int by = 16; by > 0; by /= 2) {
    float other = __shfl_xor_sync(0xffffffff, value, by);
    value = largest ? fmaxf(value, other) : value + other;
  }
  return value;
}

__device__ float over_block(float value, bool largest, float* parts) {
  value = over_warp(value, largest);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int w = 1; w < blockDim.x / 32; ++w) value = largest ? fmaxf(value, parts[w]) : value + parts[w];
  __syncthreads();
  return value;
}

__global__ void softmax(const float* x, float* y, int columns) {
  __shared__ float parts[4];
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  float largest = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = fmaxf(largest, x[i]);
  largest = over_block(largest, true, parts);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(x[i] - largest);
  sum = over_block(sum, false, parts);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) y[i] = expf(x[i] - largest) / sum;
}
