// Attention for NVIDIA T4 16 GB (sm_75), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/attention.cuh>

constexpr int HeadDim = 64;
constexpr int BM = 128;
constexpr int BN = 64;
constexpr int Warps = 4;
constexpr float Scale = 0.125f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
using Mma = cute::SM75_16x8x8_F32F16F16F32_TN;

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
  int const block_idx = blockIdx.x;
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  fw::Staged<Threads, decltype(Q_shared)> Q_shared_staged;
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 16384);
  fw::Staged<Threads, decltype(K_shared)> K_shared_staged;
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 24576);
  fw::Staged<Threads, decltype(V_shared)> V_shared_staged;
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<2, 4> S_operand;
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;

  //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  Q_shared_staged.load(p.Q.tile(batch_idx, head_idx, block_idx * BM), q_len - block_idx * BM);

  //  25 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e+30f);

  //  26 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  27 | Compute 0 and get O_register
  cute::clear(O);

  //  28 | let First = 0
  int const First = 0;

  //  29 | let Last = kv_len / BN
  int const Last_BN = kv_len;  // BN * Last

  //  30 | if First < Last
  if (First * BN < Last_BN) {
    //  31 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = First] from global to shared
    K_shared_staged.load(p.K.tile(batch_idx, head_idx, First * BN), kv_len - First * BN);
  }
  Q_shared_staged.store(Q_shared);
  __syncthreads();

  //  33 | for i = First:Last
  CUTE_NO_UNROLL
  for (int i = First; i * BN < Last_BN; ++i) {
    //  34 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    V_shared_staged.load(p.V.tile(batch_idx, head_idx, i * BN), kv_len - i * BN);
    __syncthreads();
    K_shared_staged.store(K_shared);
    V_shared_staged.store(V_shared);
    __syncthreads();

    //  35 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));

    //  36 | if i < Last - 1
    if (i * BN < Last_BN - BN) {
      //  37 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i + 1] from global to shared
      K_shared_staged.load(p.K.tile(batch_idx, head_idx, (i + 1) * BN), kv_len - (i + 1) * BN);
    }

    //  39 | Compute Multiply S, Scale and get new S
    // (a constant factor: taken along by what reads the tile next)

    //  40 | Compute Mask S where kv_idx < kv_len
    if (!(i * BN + BN - 1 < kv_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          int const kv_idx = i * BN + at.col(n);
          S(m, n) = kv_idx < kv_len ? S(m, n) : -INFINITY;
        }
      }
    }

    //  41 | Compute Softmax S with Smax and Ssum and rescale O_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size(Smax); ++m) {
      float most = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        most = fw::max(most, S(m, n));
      }
      most = fw::row_max(most);
      float const now = fw::max(Smax(m), most * Scale);
      float const drop = fw::exp2((Smax(m) - now) * fw::log2_e);
      Smax(m) = now;
      float const row_0 = now * fw::log2_e;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::exp2(S(m, n) * (Scale * fw::log2_e) - row_0);
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

    //  42 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S_operand = fw::operand<fw::fp16>(S);

    //  43 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
  }

  // In the loop each of the four threads of a row has had its own part of Ssum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(Ssum); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  47 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(Ssum(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;
    }
  }

  //  48 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  49 | Compute Smax + log(Ssum) and get LSE_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size(LSE); ++m) {
    LSE(m) = Smax(m) + fw::log(Ssum(m));
  }

  //  50 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
