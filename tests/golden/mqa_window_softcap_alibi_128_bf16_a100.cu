// Attention for NVIDIA A100 SXM4 80 GB (sm_80), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 32;
constexpr int Warps = 4;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Window = 1024;
constexpr int Softcap = 30;
constexpr int Threads = 32 * Warps;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  fw::Global<float, 1> Slopes;  // (heads)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = gridDim.x - 1 - blockIdx.x;  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared);
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 32768);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 40960);
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<2, 2> S_operand;
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;

  //  27 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);
  fw::commit();

  //  28 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e+30f);

  //  29 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  30 | Compute 0 and get O_register
  cute::clear(O);

  //  31 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
  int const First = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

  //  32 | let Last = min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  int const Last_BN = fw::min(kv_len, (block_idx + 1) * BM + kv_len - q_len);  // BN * Last

  //  33 | if First < Last
  if (First * BN < Last_BN) {
    //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = 0, L = First] from global to shared
    fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, 0, First * BN), kv_len - First * BN);
  }

  float const Slopes_here = First * BN < Last_BN ? float(*p.Slopes.at(head_idx)) : 0.f;
  fw::commit();

  //  36 | for i = First:Last
  CUTE_NO_UNROLL
  for (int i = First; i * BN < Last_BN; ++i) {
    fw::wait<0>();
    __syncthreads();

    //  37 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = 0, L = i] from global to shared
    fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, 0, i * BN), kv_len - i * BN);
    fw::commit();

    //  38 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));
    fw::wait<0>();
    __syncthreads();

    //  39 | if i < Last - 1
    if (i * BN < Last_BN - BN) {
      //  40 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = 0, L = i + 1] from global to shared
      fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, 0, (i + 1) * BN),
          kv_len - (i + 1) * BN);
    }
    fw::commit();

    //  42 | Compute Multiply S, Scale and get new S
    // (a constant factor: taken along by what reads the tile next)

    //  43 | Compute Softcap * tanh(S / Softcap) and get new S
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      auto logistic = fw::row_of(S);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        logistic[n] = S(m, n) * (Scale * (1.f / float(Softcap)) * (2.f * fw::log2_e));
      }
      fw::logistic2(logistic);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = 1.f - 2.f * logistic[n];
      }
    }

    // (a constant factor: taken along by what reads the tile next)

    //  44 | Compute S + Slopes[head_idx] * (kv_idx - q_idx - (kv_len - q_len)) and get new S
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      int const q_idx = block_idx * BM + at.row(m);
      float const row_0 = Slopes_here * float(i * BN + at.first_col - q_idx - (kv_len - q_len));
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = S(m, n) * float(Softcap) + (row_0 + Slopes_here * at.step(n));
      }
    }

    //  45 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len and kv_idx > q_idx + kv_len - q_len - Window
    if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len
        && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        auto const visible = at.before(S, q_idx + kv_len - q_len + 1 - i * BN)
            & ~at.before(S, q_idx + kv_len - q_len - Window + 1 - i * BN);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = visible[n] ? S(m, n) : -INFINITY;
        }
      }
    }

    //  46 | Compute Softmax S with Smax and Ssum and rescale O_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size(Smax); ++m) {
      float most = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        most = fw::max(most, S(m, n));
      }
      most = fw::row_max(most);
      float const now = fw::max(Smax(m), most);
      float const drop = fw::exp2((Smax(m) - now) * fw::log2_e);
      Smax(m) = now;
      float const row_0 = now * fw::log2_e;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::exp2(S(m, n) * fw::log2_e - row_0);
      }
      float sum = Ssum(m) * drop;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        sum += S(m, n);
      }
      Ssum(m) = sum;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * drop;
      }
    }

    //  47 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S_operand = fw::operand<fw::bf16>(S);

    //  48 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
  }

  // In the loop each of the four threads of a row has had its own part of Ssum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(Ssum); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  52 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(Ssum(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;
    }
  }

  //  53 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  54 | Compute Smax + log(Ssum) and get LSE_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size(LSE); ++m) {
    LSE(m) = Smax(m) + fw::log(Ssum(m));
  }

  //  55 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
