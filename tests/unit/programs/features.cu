// What programs use of CUDA: each line that it prints is the same on a GPU.
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                            \
  do {                                                                         \
    cudaError_t error = (call);                                                \
    if (error != cudaSuccess) {                                                \
      std::printf("%s: %s\n", #call, cudaGetErrorString(error));               \
      std::exit(3);                                                            \
    }                                                                          \
  } while (0)

constexpr int kCount = 14000;
__constant__ float factor[2];
__device__ int counter = 5;
__managed__ int managed_value = 7;

__global__ void saxpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}

__global__ void scale(float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] *= factor[1];
  if (i == 0) atomicAdd(&counter, 1);
}

__global__ void reverse(float* y, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = y[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[n - 1 - i];
}

__global__ void bump(int* p) {
  *p += 1;
  managed_value += 10;
}

int main(int count, char**) {
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  std::printf("%d arguments, compute capability %d.%d\n", count, prop.major, prop.minor);
  const int blocks = (kCount + 255) / 256, bytes = kCount * 4;
  std::vector<float> x(kCount), y(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = i, y[i] = 1;
  auto wrong = [&](auto expected) {
    int found = 0;
    for (int i = 0; i < kCount; ++i) found += y[i] != expected(i);
    return found;
  };

  // Streams and events.
  float *dx, *dy, elapsed;
  CHECK(cudaMalloc(&dx, bytes));
  CHECK(cudaMalloc(&dy, bytes));
  cudaStream_t a, b;
  cudaEvent_t first, second;
  CHECK(cudaStreamCreate(&a));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CHECK(cudaEventCreate(&first));
  CHECK(cudaEventCreate(&second));
  CHECK(cudaMemcpyAsync(dx, x.data(), bytes, cudaMemcpyHostToDevice, a));
  CHECK(cudaMemcpyAsync(dy, y.data(), bytes, cudaMemcpyHostToDevice, b));
  CHECK(cudaEventRecord(first, b));
  CHECK(cudaStreamWaitEvent(a, first));
  saxpy<<<blocks, 256, 0, a>>>(2.f, dx, dy, kCount);
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(second, a));
  CHECK(cudaEventSynchronize(second));
  CHECK(cudaEventElapsedTime(&elapsed, first, second));
  CHECK(cudaMemcpy(y.data(), dy, bytes, cudaMemcpyDeviceToHost));
  std::printf("saxpy %d wrong\n", wrong([](int i) { return 1 + 2.f * i; }));
  std::printf("elapsed %d\n", elapsed > 0);

  // Variables, and more shared memory than a kernel may have without asking.
  float factors[2] = {1, 3};
  CHECK(cudaMemcpyToSymbol(factor, factors, sizeof factors));
  scale<<<blocks, 256>>>(dy, kCount);
  CHECK(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  reverse<<<1, 256, bytes>>>(dy, kCount);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(y.data(), dy, bytes, cudaMemcpyDefault));
  int counted;
  CHECK(cudaMemcpyFromSymbol(&counted, counter, sizeof counted));
  int reversed = wrong([](int i) { return 3 * (1 + 2.f * (kCount - 1 - i)); });
  std::printf("constant, dynamic shared memory: %d wrong, counter %d\n", reversed, counted);

  // Memory that host and device share.
  int* shared;
  CHECK(cudaMallocManaged(&shared, sizeof *shared));
  *shared = 41;
  bump<<<1, 1>>>(shared);
  CHECK(cudaDeviceSynchronize());
  std::printf("managed %d %d\n", *shared, managed_value);

  // A graph of two streams.
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaMemset(dy, 0, bytes));
  CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  saxpy<<<blocks, 256, 0, a>>>(1.f, dx, dy, kCount);
  CHECK(cudaEventRecord(first, a));
  CHECK(cudaStreamWaitEvent(b, first));
  saxpy<<<blocks, 256, 0, b>>>(1.f, dx, dy, kCount);
  CHECK(cudaEventRecord(second, b));
  CHECK(cudaStreamWaitEvent(a, second));
  CHECK(cudaStreamEndCapture(a, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(executable, a));
  CHECK(cudaStreamSynchronize(a));
  CHECK(cudaMemcpy(y.data(), dy, bytes, cudaMemcpyDeviceToHost));
  std::printf("graph %d wrong\n", wrong([](int i) { return 6.f * i; }));

  // Rows that are further apart than they are wide.
  size_t pitch;
  char* rows;
  CHECK(cudaMallocPitch(&rows, &pitch, 100, 7));
  CHECK(cudaMemset2D(rows, pitch, 1, 100, 7));
  std::vector<char> dense(700);
  CHECK(cudaMemcpy2D(dense.data(), 100, rows, pitch, 100, 7, cudaMemcpyDeviceToHost));
  int sum = 0;
  for (char one : dense) sum += one;
  std::printf("pitched %d\n", sum);

  int called = 0;
  CHECK(cudaLaunchHostFunc(a, [](void* data) { ++*static_cast<int*>(data); }, &called));
  CHECK(cudaStreamSynchronize(a));
  std::printf("host function %d\n", called);
  int resident;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, saxpy, 256, 0));
  std::printf("occupancy %d\n", resident >= 4);

  float* pinned;
  CHECK(cudaMallocHost(&pinned, bytes));
  pinned[kCount - 1] = 2;
  saxpy<<<1, 1>>>(1.f, pinned + kCount - 1, dy, 1);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFreeHost(pinned));
  for (void* one : {(void*)dx, (void*)dy, (void*)shared, (void*)rows}) CHECK(cudaFree(one));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(a));
  CHECK(cudaEventDestroy(first));
  std::printf("freed %d\n", 1);
}
