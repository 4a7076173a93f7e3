// Attention for NVIDIA A100 SXM4 80 GB (sm_80), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/attention.cuh>

constexpr int HeadDim = 64;
constexpr int BM = 64;
constexpr int BN = 64;
constexpr int Warps = 4;
constexpr float Scale = 0.125f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<int, 2> Start;  // (batch, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 3)
    attention(__grid_constant__ Params const p) {
  int const heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = blockIdx.x;
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 4> S_operand;
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared);
  auto Start = fw::row_vector<BM, Warps, int>();
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 8192);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 16384);
  fw::Place<Warps> const at;

  //  10 | let kv_head = floor(head_idx * kv_heads / heads)
  int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

  //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);
  fw::commit();

  //  23 | Copy Start (BM) in coordinate [B = batch_idx, L = block_idx] from global to register
  fw::load_rows<Warps>(Start, p.Start.line(batch_idx, block_idx * BM), q_len - block_idx * BM);

  //  24 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e+30f);

  //  25 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  26 | Compute 0 and get O_register
  cute::clear(O);

  int const i_first = fw::floor_div(*p.Start.at(batch_idx, block_idx * BM), BN);
  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

  //  27 | for i = floor(Start[batch_idx, block_idx * BM] / BN):min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  CUTE_NO_UNROLL
  for (int i = i_first; i * BN < i_end; ++i) {
    fw::wait<0>();
    __syncthreads();

    //  28 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, kv_head, i * BN), kv_len - i * BN);

    //  29 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, kv_head, i * BN), kv_len - i * BN);
    fw::commit();
    fw::wait<0>();
    __syncthreads();

    //  30 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));

    //  31 | Compute Multiply S, Scale and get new S
    // (a constant factor: taken along by what reads the tile next)

    //  33 | Compute Mask S where kv_idx >= Start and kv_idx <= q_idx + kv_len - q_len
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
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      auto const visible = ~at.before(S, fw::near(Start(m)) - i * BN);
      if (!(i * BN >= Start(m))) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = visible[n] ? S(m, n) : -INFINITY;
        }
      }
    }

    //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
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

    //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S_operand = fw::operand<fw::bf16>(S);

    //  36 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
  }

  // In the loop each of the four threads of a row has had its own part of Ssum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(Ssum); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  38 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(Ssum(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;
    }
  }

  //  39 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
}
