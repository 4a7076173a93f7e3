// One step of a radix sort, by one bit: the zeros of a block first, then the ones, in their order.
__global__ void radix_step(const unsigned int* keys, unsigned int* sorted, int bit) {
  __shared__ int zeros[32];
  __shared__ unsigned int placed[256];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  unsigned int key = keys[blockIdx.x * blockDim.x + threadIdx.x];
  bool one = key >> bit & 1;
  unsigned int votes = __ballot_sync(0xffffffff, !one);
  int before = __popc(votes & ((1u << lane) - 1));
  if (lane == 0) zeros[warp] = __popc(votes);
  __syncthreads();
  int all = 0, earlier = 0;
  for (int w = 0; w < warps; ++w) {
    if (w == warp) earlier = all;
    all += zeros[w];
  }
  int rank = earlier + before;
  int place = one ? all + (threadIdx.x - rank) : rank;
  placed[place] = key;
  __syncthreads();
  sorted[blockIdx.x * blockDim.x + threadIdx.x] = placed[threadIdx.x];
}
