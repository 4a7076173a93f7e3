#include <fw/attention.cuh>

constexpr int HeadDim = 64;
constexpr int BM = 64;
constexpr int BN = 64;
constexpr int Warps = 4;
constexpr float Scale = 0.125f;  // 1 / sqrt(HeadDim)
constexpr int Bias = -4;  // -4
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 24576;
using Mma = cute::SM75_16x8x8_F32F16F16F32_TN;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = gridDim.x - 1 - blockIdx.x;  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 4> S_operand;
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  fw::Staged<Threads, decltype(Q_shared)> Q_shared_staged;
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 8192);
  fw::Staged<Threads, decltype(K_shared)> K_shared_staged;
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 16384);
  fw::Staged<Threads, decltype(V_shared)> V_shared_staged;
  fw::Place<Warps> const at;

  //   9 | let kv_head = floor(head_idx * kv_heads / heads)
  int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

  //  18 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  Q_shared_staged.load(p.Q.tile(batch_idx, head_idx, block_idx * BM), q_len - block_idx * BM);

  //  19 | Compute 0 and get O_register
  cute::clear(O);

  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
  Q_shared_staged.store(Q_shared);
  __syncthreads();

  //  20 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  CUTE_NO_UNROLL
  for (int i = 0; i * BN < i_end; ++i) {
    //  21 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    K_shared_staged.load(p.K.tile(batch_idx, kv_head, i * BN), kv_len - i * BN);

    //  22 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    V_shared_staged.load(p.V.tile(batch_idx, kv_head, i * BN), kv_len - i * BN);
    __syncthreads();
    K_shared_staged.store(K_shared);
    V_shared_staged.store(V_shared);
    __syncthreads();

    //  23 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));

    //  24 | Compute S * Scale + Bias and get new S
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = S(m, n) * Scale + float(Bias);
      }
    }

    //  25 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        auto const visible = at.before(S, q_idx + kv_len - q_len + 1 - i * BN);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = visible[n] ? S(m, n) : -INFINITY;
        }
      }
    }

    //  26 | Compute sigmoid(S) and get new S
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      auto logistic = fw::row_of(S);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        logistic[n] = S(m, n) * -fw::log2_e;
      }
      fw::sigmoid2(logistic);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = logistic[n];
      }
    }

    //  27 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S_operand = fw::operand<fw::fp16>(S);

    //  28 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
  }

  //  30 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
}
