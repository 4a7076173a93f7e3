// How often each byte occurs: a histogram of each block by shared atomics, added to the one of all.
__global__ void histogram(const unsigned char* data, unsigned int* counts, int n) {
  __shared__ unsigned int own[256];
  for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) own[bin] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&own[data[i]], 1);
  __syncthreads();
  for (int bin = threadIdx.x; bin < 256; bin += blockDim.x)
    atomicAdd(&counts[bin], own[bin]);
}
