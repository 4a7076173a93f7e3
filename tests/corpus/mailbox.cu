// One warp hands numbers to another through a mailbox in shared memory: a flag, fences, no barrier.
__global__ void mailbox(const int* x, int* y, int rounds) {
  __shared__ int box[32];
  __shared__ volatile int turn;
  int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) turn = 0;
  __syncthreads();
  for (int n = 0; n < rounds; ++n) {
    if (threadIdx.x < 32) {
      while (turn != 2 * n) {}
      __threadfence_block();
      box[lane] = x[n * 32 + lane];
      __syncwarp();
      __threadfence_block();
      if (lane == 0) turn = 2 * n + 1;
    } else {
      while (turn != 2 * n + 1) {}
      __threadfence_block();
      y[n * 32 + lane] = box[31 - lane];
      __syncwarp();
      __threadfence_block();
      if (lane == 0) turn = 2 * n + 2;
    }
    __syncwarp();
  }
}
