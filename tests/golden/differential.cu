// Attention for NVIDIA A100 SXM4 80 GB (sm_80), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/attention.cuh>

constexpr int Half = 64;  // HeadDim / 2
constexpr int BM = 64;
constexpr int BN = 32;
constexpr int Warps = 4;
constexpr float Scale = 0.125f;  // 1 / sqrt(Half)
constexpr int Threads = 32 * Warps;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, heads, kv_len, Half)
  fw::Global<float, 1> Lambda;  // (heads)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, Half)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = gridDim.x - 1 - blockIdx.x;  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto S1 = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 2> S1_operand;
  auto S2 = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 2> S2_operand;
  auto O1 = fw::accumulator<BM, Half, Warps>();
  auto O2 = fw::accumulator<BM, Half, Warps>();
  auto M1 = fw::row_vector<BM, Warps>();
  auto M2 = fw::row_vector<BM, Warps>();
  auto L1 = fw::row_vector<BM, Warps>();
  auto L2 = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, Half, Warps>();
  auto const Q1_shared = fw::shared_tile<fw::bf16, BM, Half>(shared);
  auto const Q2_shared = fw::shared_tile<fw::bf16, BM, Half>(shared + 8192);
  auto const K1_shared = fw::shared_tile<fw::bf16, BN, Half>(shared + 16384);
  auto const K2_shared = fw::shared_tile<fw::bf16, BN, Half>(shared + 20480);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, Half>(shared + 24576);
  fw::Place<Warps> const at;

  //  27 | Copy Q (BM, Half) in coordinate [B = batch_idx, H = head_idx, L = block_idx, D = 0] from global to shared and get Q1
  fw::copy_async<Threads>(Q1_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);

  //  28 | Copy Q (BM, Half) in coordinate [B = batch_idx, H = head_idx, L = block_idx, D = 1] from global to shared and get Q2
  fw::copy_async<Threads>(Q2_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM, Half),
      q_len - block_idx * BM);
  fw::commit();

  //  29 | Compute -1e30 and get M1
  cute::fill(M1, -1e+30f);

  //  30 | Compute -1e30 and get M2
  cute::fill(M2, -1e+30f);

  //  31 | Compute 0 and get L1
  cute::clear(L1);

  //  32 | Compute 0 and get L2
  cute::clear(L2);

  //  33 | Compute 0 and get O1
  cute::clear(O1);

  //  34 | Compute 0 and get O2
  cute::clear(O2);

  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

  //  35 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  CUTE_NO_UNROLL
  for (int i = 0; i * BN < i_end; ++i) {
    fw::wait<0>();
    __syncthreads();

    //  36 | Copy K (BN, Half) in coordinate [B = batch_idx, H = head_idx, L = i, D = 0] from global to shared and get K1
    fw::copy_async<Threads>(K1_shared, p.K.tile(batch_idx, head_idx, i * BN), kv_len - i * BN);

    //  37 | Copy K (BN, Half) in coordinate [B = batch_idx, H = head_idx, L = i, D = 1] from global to shared and get K2
    fw::copy_async<Threads>(K2_shared, p.K.tile(batch_idx, head_idx, i * BN, Half),
        kv_len - i * BN);

    //  38 | Copy V (BN, Half) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, head_idx, i * BN), kv_len - i * BN);
    fw::commit();
    fw::wait<0>();
    __syncthreads();

    //  39 | Compute GEMM Q1_shared, K1_shared.T and get S1
    cute::clear(S1);
    fw::gemm<Mma>(S1, fw::left<Warps>(Q1_shared), fw::right_transposed(K1_shared));

    //  40 | Compute GEMM Q2_shared, K2_shared.T and get S2
    cute::clear(S2);
    fw::gemm<Mma>(S2, fw::left<Warps>(Q2_shared), fw::right_transposed(K2_shared));

    //  41 | Compute Multiply S1, Scale and get new S1
    // (a constant factor: taken along by what reads the tile next)

    //  42 | Compute Multiply S2, Scale and get new S2
    // (a constant factor: taken along by what reads the tile next)

    //  43 | Compute Mask S1 where kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S1); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        auto const visible = at.before(S1, q_idx + kv_len - q_len + 1 - i * BN);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S1); ++n) {
          S1(m, n) = visible[n] ? S1(m, n) : -INFINITY;
        }
      }
    }

    //  44 | Compute Mask S2 where kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S2); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        auto const visible = at.before(S2, q_idx + kv_len - q_len + 1 - i * BN);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S2); ++n) {
          S2(m, n) = visible[n] ? S2(m, n) : -INFINITY;
        }
      }
    }

    //  45 | Compute Softmax S1 with M1 and L1 and rescale O1
    CUTE_UNROLL
    for (int m = 0; m < cute::size(M1); ++m) {
      float most = S1(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S1); ++n) {
        most = fw::max(most, S1(m, n));
      }
      most = fw::row_max(most);
      float const now = fw::max(M1(m), most * Scale);
      float const drop = fw::exp2((M1(m) - now) * fw::log2_e);
      M1(m) = now;
      float const row_0 = now * fw::log2_e;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S1); ++n) {
        S1(m, n) = fw::exp2(S1(m, n) * (Scale * fw::log2_e) - row_0);
      }
      float sum = L1(m) * drop;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S1); ++n) {
        sum += S1(m, n);
      }
      L1(m) = sum;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O1); ++n) {
        O1(m, n) = O1(m, n) * drop;
      }
    }

    //  46 | Compute Softmax S2 with M2 and L2 and rescale O2
    CUTE_UNROLL
    for (int m = 0; m < cute::size(M2); ++m) {
      float most = S2(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S2); ++n) {
        most = fw::max(most, S2(m, n));
      }
      most = fw::row_max(most);
      float const now = fw::max(M2(m), most * Scale);
      float const drop = fw::exp2((M2(m) - now) * fw::log2_e);
      M2(m) = now;
      float const row_0 = now * fw::log2_e;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S2); ++n) {
        S2(m, n) = fw::exp2(S2(m, n) * (Scale * fw::log2_e) - row_0);
      }
      float sum = L2(m) * drop;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S2); ++n) {
        sum += S2(m, n);
      }
      L2(m) = sum;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O2); ++n) {
        O2(m, n) = O2(m, n) * drop;
      }
    }

    //  47 | Reshape S1 from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S1_operand = fw::operand<fw::bf16>(S1);

    //  48 | Reshape S2 from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S2_operand = fw::operand<fw::bf16>(S2);

    //  49 | Compute GEMM S1, V_shared and accumulate O1
    fw::gemm<Mma>(O1, S1_operand, fw::right(V_shared));

    //  50 | Compute GEMM S2, V_shared and accumulate O2
    fw::gemm<Mma>(O2, S2_operand, fw::right(V_shared));
  }

  // In the loop each of the four threads of a row has had its own part of L1.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(L1); ++m) {
    L1(m) = fw::row_sum(L1(m));
  }

  // In the loop each of the four threads of a row has had its own part of L2.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(L2); ++m) {
    L2(m) = fw::row_sum(L2(m));
  }

  //  52 | Compute where(L1 > 0, O1 / L1 - Lambda[head_idx] * O2 / L2, 0) and get O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(L1(m));
    float const row_1 = fw::reciprocal(L2(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = L1(m) > 0.f ? O1(m, n) * row_0 - float(*p.Lambda.at(head_idx)) * O2(m, n) * row_1
          : 0.f;
    }
  }

  //  53 | Copy O (BM, Half) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
}
