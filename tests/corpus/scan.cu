// Inclusive sums of a block's numbers: in each warp by shuffles, then over the warps.
__global__ void scan(const int* x, int* y, int* totals) {
  __shared__ int ends[32];
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x[i];
  for (int by = 1; by < 32; by *= 2) {
    int before = __shfl_up_sync(0xffffffff, sum, by);
    if (lane >= by) sum += before;
  }
  if (lane == 31) ends[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int end = lane < blockDim.x / 32 ? ends[lane] : 0;
    for (int by = 1; by < 32; by *= 2) {
      int before = __shfl_up_sync(0xffffffff, end, by);
      if (lane >= by) end += before;
    }
    ends[lane] = end;
  }
  __syncthreads();
  y[i] = warp > 0 ? sum + ends[warp - 1] : sum;
  if (threadIdx.x == blockDim.x - 1) totals[blockIdx.x] = y[i];
}
