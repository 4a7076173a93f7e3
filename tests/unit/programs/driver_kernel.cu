extern "C" __device__ int level = 4;

extern "C" __global__ void add(float* x, float value, int n) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) x[i] += value;
}
