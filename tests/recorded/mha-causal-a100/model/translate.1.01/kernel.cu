#include <fw/attention.cuh>

constexpr int HeadDim = 64;
constexpr int BM = 128;
constexpr int BN = 64;
constexpr int Warps = 4;
constexpr float Scale = 0.125f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 49152;
using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = int(gridDim.x) - 1 - int(blockIdx.x);  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];

  //  14 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  //  15 | Allocate V in shared (BN, HeadDim) as fp16 with stages 2
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 16384);
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);

  //  16 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();
  //  17 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();
  //  18 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();
  //  19 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  //  20 | Allocate LSE in register (BM) as fp32
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;

  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

  //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);

  //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  // (those of round 0)
  if (0 < i_end) {
    fw::copy_async<Threads>(K_shared.stage(0), p.K.tile(batch_idx, head_idx, 0), kv_len);
    fw::copy_async<Threads>(V_shared.stage(0), p.V.tile(batch_idx, head_idx, 0), kv_len);
  }
  fw::commit();

  //  23 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e30f);

  //  24 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  25 | Compute 0 and get O_register
  cute::clear(O);

  //  26 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  CUTE_NO_UNROLL
  for (int i = 0; i * BN < i_end; ++i) {
    // K and V of this round have come, and nobody reads those of the round before any more.
    fw::wait<0>();
    __syncthreads();

    auto const K_now = K_shared.stage(i & 1);
    auto const V_now = V_shared.stage(i & 1);

    //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    // (those of round i + 1)
    if ((i + 1) * BN < i_end) {
      fw::copy_async<Threads>(K_shared.stage((i + 1) & 1),
          p.K.tile(batch_idx, head_idx, (i + 1) * BN), kv_len - (i + 1) * BN);
      fw::copy_async<Threads>(V_shared.stage((i + 1) & 1),
          p.V.tile(batch_idx, head_idx, (i + 1) * BN), kv_len - (i + 1) * BN);
    }
    fw::commit();

    //  29 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_now));

    //  30 | Compute Multiply S, Scale and get new S
    // (in the softmax below)

    //  31 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 < kv_len && i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        // the last column of this tile that the row sees
        int const last = fw::min(kv_len - 1, q_idx + kv_len - q_len) - i * BN;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = at.col(n) <= last ? S(m, n) : -INFINITY;
        }
      }
    }

    //  32 | Compute Softmax S with Smax and Ssum and rescale O_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      float top = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        top = fw::max(top, S(m, n));
      }
      top = fw::row_max(top);
      float const now = fw::max(Smax(m), top * Scale);
      float const drop = fw::exp2((Smax(m) - now) * fw::log2_e);
      float const shift = now * fw::log2_e;
      Smax(m) = now;
      float sum = 0.0f;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::exp2(S(m, n) * (Scale * fw::log2_e) - shift);
        sum += S(m, n);
      }
      Ssum(m) = Ssum(m) * drop + sum;  // this thread's part
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) *= drop;
      }
    }

    //  33 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto const S_operand = fw::operand<fw::fp16>(S);

    //  34 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_now));
  }
  fw::wait<0>();

  // The four parts of each row's sum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  36 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const factor = Ssum(m) > 0.0f ? fw::reciprocal(Ssum(m)) : 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) *= factor;
    }
  }

  //  37 | Compute where(Ssum > 0, Smax + log(Ssum), -inf) and get LSE_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    LSE(m) = Ssum(m) > 0.0f ? Smax(m) + fw::log(Ssum(m)) : -INFINITY;
  }

  //  38 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  39 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
