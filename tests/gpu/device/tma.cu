// A tile of a tensor, brought to shared memory by TMA and written out as its rows, one after the other.
#include <cute/arch/copy_sm90_tma.hpp>

struct Params {
  CUtensorMap map;
  fw::Global<T, Axes> src;
  fw::Global<T, 1> out;
  int at[Axes];  // where the tile begins, in the order of the axes
};

template <class... Coords>
__device__ void load(Params const& p, uint64_t* barrier, void* tile, Coords... coords) {
  constexpr int given = sizeof...(Coords);
  auto const hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (given < Axes) {
    load(p, barrier, tile, coords..., p.at[Axes - 1 - given]);  // the last axis first
  } else {
    cute::SM90_TMA_LOAD::copy(&p.map, barrier, hint, tile, coords...);
  }
}

extern "C" __global__ void __launch_bounds__(128) attention(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t barrier;
  for (int i = threadIdx.x; i < Elements * int(sizeof(T)); i += blockDim.x) shared[i] = 0x7f;  // NaN
  if (threadIdx.x == 0) cute::initialize_barrier(barrier, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    cute::set_barrier_transaction_bytes(barrier, Elements * sizeof(T));  // out of range or not
    load(p, &barrier, shared);
  }
  cute::wait_barrier(barrier, 0);
  constexpr int each = 16 / sizeof(T), mask = Swizzle < 32 ? 0 : Swizzle / 16 - 1;
  for (int i = threadIdx.x; i < Elements; i += blockDim.x) {
    int const chunk = i / each, place = chunk ^ (chunk >> 3 & mask);
    *p.out.at(i) = reinterpret_cast<T*>(shared)[place * each + i % each];
  }
}
