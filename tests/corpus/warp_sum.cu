// The sum of an array: shuffles in a warp, shared memory in a block; the last block adds the sums of all.
__device__ unsigned int finished;

__device__ float over_warp(float value) {
  for (int by = 16; by > 0; by /= 2) value += __shfl_down_sync(0xffffffff, value, by);
  return value;
}

__global__ void warp_sum(const float* x, float* sums, float* y, int n) {
  __shared__ float parts[32];
  __shared__ bool last;
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  sum = over_warp(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0;
    sum = over_warp(sum);
  }
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(&finished, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  __threadfence();
  float total = 0;
  for (int i = 0; i < gridDim.x; ++i) total += sums[i];
  *y = total;
}
