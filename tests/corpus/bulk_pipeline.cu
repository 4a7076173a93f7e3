// A ring of stages that TMA fills: a producer warp copies, consumer warps add up. mbarriers say full and empty.
#include <cstdint>
constexpr int kStages = 3, kSize = 256, kConsumers = 64;

__device__ uint32_t shared(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
__device__ void init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared(bar)), "r"(count) : "memory");
}
__device__ void expect(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared(bar)), "r"(bytes) : "memory");
}
__device__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared(bar)) : "memory");
}
__device__ void wait(uint64_t* bar, int phase) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
               ::"r"(shared(bar)), "r"(phase) : "memory");
}
__device__ void copy(float* to, const float* from, int bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(bar)) : "memory");
}

__global__ void bulk_pipeline(const float* x, float* y, int tiles) {
  __shared__ alignas(128) float stages[kStages][kSize];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(&full[s], 1);
      init(&empty[s], kConsumers);
    }
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x != kConsumers) return;
    for (int n = 0; n < tiles; ++n) {
      int s = n % kStages;
      wait(&empty[s], (n / kStages & 1) ^ 1);
      expect(&full[s], sizeof(stages[s]));
      copy(stages[s], x + n * kSize, sizeof(stages[s]), &full[s]);
    }
    return;
  }
  float sums[kSize / kConsumers] = {};
  for (int n = 0; n < tiles; ++n) {
    int s = n % kStages;
    wait(&full[s], n / kStages & 1);
    for (int i = 0; i < kSize / kConsumers; ++i) sums[i] += stages[s][i * kConsumers + threadIdx.x];
    arrive(&empty[s]);
  }
  for (int i = 0; i < kSize / kConsumers; ++i) y[i * kConsumers + threadIdx.x] = sums[i];
}
