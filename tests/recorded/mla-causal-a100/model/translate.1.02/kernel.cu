#include <fw/attention.cuh>

constexpr int HeadDim = 192;
constexpr int VDim = 128;
constexpr int BM = 128;
constexpr int BN = 48;
constexpr int Warps = 4;
constexpr float Scale = 0.07216878364870323f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 79872;
using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, VDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, VDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = gridDim.x - 1 - blockIdx.x;  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);

  //  15 | Allocate K in shared (BN, HeadDim) as fp16
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 49152);

  //  16 | Allocate V in shared (BN, VDim) as fp16
  auto const V_shared = fw::shared_tile<fw::fp16, BN, VDim>(shared + 67584);

  //  17 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();

  //  18 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();

  //  19 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();  // in four parts, one in each thread of a quad

  //  20 | Allocate O in register (BM, VDim) as fp32
  auto O = fw::accumulator<BM, VDim, Warps>();
  fw::Place<Warps> const at;

  //  23 | let Keys = min(kv_len, (block_idx + 1) * BM + kv_len - q_len)
  int const Keys = fw::min(kv_len, (block_idx + 1) * BM + kv_len - q_len);

  //  25 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);

  //  26 | if Keys > 0
  if (Keys > 0) {
    //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = 0] from global to shared
    fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, head_idx, 0), kv_len);
  }
  fw::commit();

  //  29 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e30f);

  //  30 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  31 | Compute 0 and get O_register
  cute::clear(O);

  //  32 | for i = 0:Keys / BN
  CUTE_NO_UNROLL
  for (int i = 0; i * BN < Keys; ++i) {
    // K of this round (and Q) is there; everyone is done with V of the round before.
    fw::wait<0>();
    __syncthreads();

    //  33 | Copy V (BN, VDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, head_idx, i * BN), kv_len - i * BN);
    fw::commit();

    //  34 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm_rolled<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));

    // V of this round is there; everyone is done with K.
    fw::wait<0>();
    __syncthreads();

    //  35 | if (i + 1) * BN < Keys
    if ((i + 1) * BN < Keys) {
      //  36 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i + 1] from global to shared
      fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, head_idx, (i + 1) * BN),
          kv_len - (i + 1) * BN);
    }
    fw::commit();

    //  38 | Compute Multiply S, Scale and get new S
    // Taken along in the softmax below: Scale is positive, so mask and maximum may come first.

    //  39 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 < kv_len && i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        int const last = fw::min(kv_len - 1, q_idx + kv_len - q_len);  // the last key it sees
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          int const kv_idx = i * BN + at.col(n);
          S(m, n) = kv_idx <= last ? S(m, n) : -INFINITY;
        }
      }
    }

    //  40 | Compute Softmax S with Smax and Ssum and rescale O_register
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
      Ssum(m) = Ssum(m) * drop + sum;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) *= drop;
      }
    }

    //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto const S_operand = fw::operand<fw::fp16>(S);

    //  42 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
  }

  //  21 | Allocate LSE in register (BM) as fp32
  auto LSE = fw::row_vector<BM, Warps>();

  //  44 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  //  45 | Compute where(Ssum > 0, Smax + log(Ssum), -inf) and get LSE
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const sum = fw::row_sum(Ssum(m));
    float const factor = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) *= factor;
    }
    LSE(m) = sum > 0.0f ? Smax(m) + fw::log(sum) : -INFINITY;
  }

  //  46 | Copy O (BM, VDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  47 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
