// A bug for each name that it is called with.
#include <cstdio>
#include <cstring>

__constant__ float unset_constant;

__global__ void sum(const float* x, float* out) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32) tile[threadIdx.x] += tile[threadIdx.x + 32];
  if (threadIdx.x == 32) tile[40] = 0;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = tile[0];
}

__global__ void past(float* x) {
  x[threadIdx.x] = 1;
}

__global__ void first(float* x) {
  x[0] = 2;
}

__global__ void copy(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x];
}

__global__ void use_constant(float* x) {
  x[1] = unset_constant;
}

__global__ void stop() {
  if (threadIdx.x == 3) __trap();
}

int bug(const char* asked) {
  auto is = [&](const char* name) { return std::strcmp(asked, name) == 0; };
  if (is("status")) return 7;
  float *x, *out, *other, host[500];
  cudaMalloc(&x, 1024);
  cudaMalloc(&out, 1024);
  cudaMalloc(&other, 1024);
  if (is("race")) {
    cudaMemset(x, 0, 1024);
    for (int i = 0; i < 2; ++i) sum<<<1, 64>>>(x, out);  // found once
  }
  if (is("past")) past<<<1, 257>>>(x);
  if (is("freed")) {
    cudaFree(x);
    first<<<1, 1>>>(x);
  }
  if (is("unset")) {
    cudaMemset(x, 0, 1020);
    copy<<<1, 256>>>(x, out);
  }
  if (is("copied")) {  // a copy of what is not set is not set
    cudaMemset(x, 0, 1020);
    cudaMemcpy(other, x, 1024, cudaMemcpyDeviceToDevice);
    copy<<<1, 256>>>(other, out);
  }
  if (is("constant")) use_constant<<<1, 1>>>(x);
  if (is("copy")) cudaMemcpy(host, x, 2000, cudaMemcpyDeviceToHost);
  if (is("direction")) cudaMemcpy(x, host, 4, cudaMemcpyDeviceToHost);
  if (is("twice")) {
    cudaFree(x);
    cudaFree(x);
  }
  if (is("threads")) first<<<1, 2048>>>(x);
  if (is("shared")) first<<<1, 1, 50000>>>(x);
  if (is("deref")) return x[0] > 0;
  if (is("trap")) {
    stop<<<1, 32>>>();
    const char* launched = cudaGetErrorName(cudaGetLastError());
    const char* waited = cudaGetErrorName(cudaDeviceSynchronize());
    std::printf("%s, %s, %s\n", launched, waited, cudaGetErrorName(cudaDeviceSynchronize()));
  }
  if (is("refused")) {
    cudaArray_t array;
    cudaChannelFormatDesc format{};
    cudaMallocArray(&array, &format, 10, 10);
    std::printf("%s\n", cudaGetErrorName(cudaMallocArray(&array, &format, 10, 10)));
  }
  return 0;
}

int main(int, char** arguments) {
  int status = 0;
  while (*++arguments != nullptr) status |= bug(*arguments);
  return status;
}
