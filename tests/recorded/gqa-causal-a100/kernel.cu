#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 64;
constexpr int Warps = 4;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 81920;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  int const heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len, kv_len = p.kv_len;
  int const head_idx = blockIdx.x;
  int const tile_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];

  //   9 | let block_idx = ceil(q_len / BM) - 1 - tile_idx
  int const block_idx = fw::ceil_div(q_len, BM) - 1 - tile_idx;

  //  10 | let kv_head = floor(head_idx * kv_heads / heads)
  int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared);

  //  17 | Allocate K in shared (BN, HeadDim) as bf16 with stages 2
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 32768);

  //  18 | Allocate V in shared (BN, HeadDim) as bf16
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 65536);

  //  19 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();

  //  20 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();

  //  21 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();  // in four parts, one in each thread of a quad

  //  22 | Allocate LSE in register (BM) as fp32
  auto LSE = fw::row_vector<BM, Warps>();

  //  23 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();

  fw::Place<Warps> const at;

  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

  //  25 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);

  //  30 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  // (that of round 0)
  if (0 < i_end) {
    fw::copy_async<Threads>(K_shared.stage(0), p.K.tile(batch_idx, kv_head, 0), kv_len);
  }
  fw::commit();

  //  26 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e30f);

  //  27 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  28 | Compute 0 and get O_register
  cute::clear(O);

  //  29 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  CUTE_NO_UNROLL
  for (int i = 0; i * BN < i_end; ++i) {
    // K of this round is here (and Q); nobody reads K and V of the last round any more.
    fw::wait<0>();
    __syncthreads();

    //  31 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, kv_head, i * BN), kv_len - i * BN);
    fw::commit();

    //  30 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    // (that of round i + 1)
    if ((i + 1) * BN < i_end) {
      fw::copy_async<Threads>(K_shared.stage((i + 1) & 1),
          p.K.tile(batch_idx, kv_head, (i + 1) * BN), kv_len - (i + 1) * BN);
    }
    fw::commit();

    //  32 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm_rolled<Mma>(S, fw::left<Warps>(Q_shared),
        fw::right_transposed(K_shared.stage(i & 1)));

    //  33 | Compute Multiply S, Scale and get new S
    // (taken along in the softmax: Scale is positive, and -inf stays -inf)

    //  34 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
    if (!(i * BN + BN - 1 < kv_len && i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        int const limit = fw::min(kv_len, q_idx + kv_len - q_len + 1);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          int const kv_idx = i * BN + at.col(n);
          S(m, n) = kv_idx < limit ? S(m, n) : -INFINITY;
        }
      }
    }

    //  35 | Compute Softmax S with Smax and Ssum and rescale O_register
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
      float sum = 0.0f;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::exp2(S(m, n) * (Scale * fw::log2_e) - shift);
        sum += S(m, n);
      }
      Ssum(m) = Ssum(m) * drop + sum;
      Smax(m) = now;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) *= drop;
      }
    }

    //  36 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto const P = fw::operand<fw::bf16>(S);

    // V of this round is here; K of the next one may still be on its way.
    fw::wait<1>();
    __syncthreads();

    //  37 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, P, fw::right(V_shared));
  }

  //  39 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  //  40 | Compute Smax + log(Ssum) and get LSE_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const sum = fw::row_sum(Ssum(m));
    float const inverse = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;
    LSE(m) = sum > 0.0f ? Smax(m) + fw::log(sum) : -INFINITY;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = sum > 0.0f ? O(m, n) * inverse : 0.0f;
    }
  }

  //  41 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  42 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
