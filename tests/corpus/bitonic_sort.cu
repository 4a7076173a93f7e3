// A block sorts its numbers by a bitonic network in shared memory.
__global__ void bitonic_sort(const int* x, int* y, int n) {
  extern __shared__ int values[];
  int t = threadIdx.x;
  values[t] = x[t];
  values[t + n / 2] = x[t + n / 2];
  for (int size = 2; size <= n; size *= 2) {
    for (int by = size / 2; by > 0; by /= 2) {
      __syncthreads();
      int low = 2 * t - (t & (by - 1)), high = low + by;
      bool falling = (low & size) != 0;
      int a = values[low], b = values[high];
      if ((a > b) != falling) values[low] = b, values[high] = a;
    }
  }
  __syncthreads();
  y[t] = values[t];
  y[t + n / 2] = values[t + n / 2];
}
