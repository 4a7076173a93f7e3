__device__ int counter = 3;
__constant__ float added;

__device__ float twice(float x) { return 2 * x; }

void set_constant() {
  float value = 0.5f;
  cudaMemcpyToSymbol(added, &value, sizeof value);
}
