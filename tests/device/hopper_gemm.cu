// C = A B^T in bf16 as CUTLASS's headers have it for Hopper: a producer warp with TMA, two warpgroups with wgmma,
// a pipeline of mbarriers between them, and TMA again for the result. Not Flashwright's: it is what the emulator
// must be able to run.
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

using namespace cute;
using T = cutlass::bfloat16_t;
constexpr int BM = 128, BN = 128, BK = 64, Stages = 3;

template <int Rows>
using Tiles = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, Shape<Int<Rows>, Int<BK>, Int<Stages>>{}));
using Mma = decltype(make_tiled_mma(SM90_64x128x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>{},
                                    Layout<Shape<_2, _1, _1>>{}));
using Pipeline = cutlass::PipelineTmaAsync<Stages>;

struct Shared {
  alignas(1024) array_aligned<T, cosize_v<Tiles<BM>>> A;
  alignas(1024) array_aligned<T, cosize_v<Tiles<BN>>> B;
  alignas(1024) array_aligned<T, BM * BN> C;
  typename Pipeline::SharedStorage pipeline;
};

extern "C" __global__ void __launch_bounds__(384)
    gemm(__grid_constant__ const CUtensorMap a, __grid_constant__ const CUtensorMap b,
         __grid_constant__ const CUtensorMap c, int K) {
  extern __shared__ __align__(1024) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  int const group = threadIdx.x / 128;

  typename Pipeline::Params how;
  how.transaction_bytes = (BM + BN) * BK * 2;
  how.role = group == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  how.is_leader = threadIdx.x % 128 == 0;
  how.num_consumers = 256;
  Pipeline pipeline(shared.pipeline, how, Shape<_1, _1, _1>{});
  __syncthreads();

  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x < 32 && elect_one_sync()) {
      auto at = cutlass::make_producer_start_state<Pipeline>();
      for (int k = 0; k < K; k += BK, ++at) {
        pipeline.producer_acquire(at);
        auto barrier = pipeline.producer_get_barrier(at);
        auto const hint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);
        SM90_TMA_LOAD_2D::copy(&a, barrier, hint, shared.A.data() + at.index() * BM * BK, k, blockIdx.x * BM);
        SM90_TMA_LOAD_2D::copy(&b, barrier, hint, shared.B.data() + at.index() * BN * BK, k, blockIdx.y * BN);
      }
    }
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<232>();
  Mma mma;
  auto thread = mma.get_thread_slice(threadIdx.x - 128);
  Tensor A = thread.partition_fragment_A(make_tensor(make_smem_ptr(shared.A.data()), Tiles<BM>{}));
  Tensor B = thread.partition_fragment_B(make_tensor(make_smem_ptr(shared.B.data()), Tiles<BN>{}));
  Tensor sum = partition_fragment_C(mma, Shape<Int<BM>, Int<BN>>{});
  clear(sum);
  cutlass::PipelineState<Stages> at, done;
  for (int k = 0; k < K; k += BK, ++at) {
    pipeline.consumer_wait(at);
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int n = 0; n < size<2>(A); ++n) {
      gemm(mma, A(_, _, n, at.index()), B(_, _, n, at.index()), sum);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    warpgroup_fence_operand(sum);
    if (k > 0) {
      pipeline.consumer_release(done);
      ++done;
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sum);

  Tensor C = make_tensor(make_smem_ptr(shared.C.data()), Shape<Int<BM>, Int<BN>>{}, Stride<Int<BN>, _1>{});
  Tensor own = thread.partition_C(C);
  CUTE_UNROLL
  for (int n = 0; n < size(sum); ++n) own(n) = T(sum(n));
  tma_store_fence();
  cutlass::arch::NamedBarrier::sync(256, 1);
  if (threadIdx.x == 128) {
    SM90_TMA_STORE_2D::copy(&c, shared.C.data(), blockIdx.y * BN, blockIdx.x * BM);
    tma_store_arrive();
    tma_store_wait<0>();
  }
}
