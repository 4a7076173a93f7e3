// The k largest of a row and their places, one after another: each thread has some, the warps vote.
constexpr int kEach = 4;
struct Best { float value; int place; };

__global__ void top_k(const float* x, float* values, int* places, int columns, int k) {
  __shared__ Best bests[8];
  __shared__ int taken;
  float own[kEach];
  x += blockIdx.x * columns;
  for (int i = 0; i < kEach; ++i) {
    int at = i * blockDim.x + threadIdx.x;
    own[i] = at < columns ? x[at] : -INFINITY;
  }
  for (int n = 0; n < k; ++n) {
    Best best{-INFINITY, 1 << 30};
    for (int i = 0; i < kEach; ++i)
      if (own[i] > best.value) best = {own[i], static_cast<int>(i * blockDim.x + threadIdx.x)};
    for (int by = 16; by > 0; by /= 2) {
      float value = __shfl_xor_sync(0xffffffff, best.value, by);
      int place = __shfl_xor_sync(0xffffffff, best.place, by);
      if (value > best.value || (value == best.value && place < best.place)) best = {value, place};
    }
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < blockDim.x / 32; ++w)
        if (bests[w].value > best.value) best = bests[w];
      values[blockIdx.x * k + n] = best.value;
      places[blockIdx.x * k + n] = best.place;
      taken = best.place;
    }
    __syncthreads();
    for (int i = 0; i < kEach; ++i)
      if (i * blockDim.x + threadIdx.x == taken) own[i] = -INFINITY;
  }
}
