#include <cstdio>

extern __device__ float twice(float x);
extern __device__ int counter;
extern __constant__ float added;
void set_constant();

__global__ void go(float* y) {
  y[threadIdx.x] = twice(y[threadIdx.x]) + added;
  if (threadIdx.x == 0) ++counter;
}

int main() {
  float host[32], *y;
  int counted;
  for (int i = 0; i < 32; ++i) host[i] = i;
  set_constant();
  cudaMalloc(&y, sizeof host);
  cudaMemcpy(y, host, sizeof host, cudaMemcpyHostToDevice);
  go<<<1, 32>>>(y);
  cudaMemcpy(host, y, sizeof host, cudaMemcpyDeviceToHost);
  cudaMemcpyFromSymbol(&counted, counter, sizeof counted);
  std::printf("%g %g, counter %d\n", host[0], host[31], counted);
}
