#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 32;
constexpr int Warps = 4;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Softcap = 30;
constexpr int Window = 512;
constexpr int Sinks = 2;
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 65536;
using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
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
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Smax = fw::row_vector<BM, Warps>();  // in units of Softcap
  auto Ssum = fw::row_vector<BM, Warps>();  // in four parts, one in each thread of a quad
  auto LSE = fw::row_vector<BM, Warps>();
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);  // 2 stages
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 49152);  // 2 stages
  fw::Place<Warps> const at;

  //  11 | let kv_head = floor(head_idx * kv_heads / heads)
  int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

  //  12 | let First = block_idx * BM + kv_len - q_len
  int const First = block_idx * BM + kv_len - q_len;

  //  13 | let Low = floor(max(0, First - Window + 1) / BN)
  int const Low = fw::floor_div(fw::max(0, First - Window + 1), BN);

  //  14 | let SinkTiles = min(Low, ceil(Sinks / BN))
  int const SinkTiles = fw::min(Low, (Sinks + BN - 1) / BN);

  //  34 | the number of rounds: min(kv_len, First + BM) / BN - Low + SinkTiles, rounded up
  int const rounds = fw::ceil_div(fw::min(kv_len, First + BM), BN) - Low + SinkTiles;

  //  29 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);

  //  36, 37 | Copy K, Copy V of round 0
  if (rounds > 0) {
    int const i = 0 < SinkTiles ? 0 : Low;
    fw::copy_async<Threads>(K_shared.stage(0), p.K.tile(batch_idx, kv_head, i * BN),
        kv_len - i * BN);
    fw::copy_async<Threads>(V_shared.stage(0), p.V.tile(batch_idx, kv_head, i * BN),
        kv_len - i * BN);
  }
  fw::commit();

  //  30 | Compute 0 and get O_register
  cute::clear(O);

  //  31 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e30f);

  //  32 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  34 | for j = 0:min(kv_len, First + BM) / BN - Low + SinkTiles
  CUTE_NO_UNROLL
  for (int j = 0; j < rounds; ++j) {
    //  35 | let i = where(j < SinkTiles, j, j - SinkTiles + Low)
    int const i = j < SinkTiles ? j : j - SinkTiles + Low;

    // The tiles of this round are there, and nobody reads those of the round before any more.
    fw::wait<0>();
    __syncthreads();

    //  36, 37 | Copy K, Copy V of round j + 1
    if (j + 1 < rounds) {
      int const next = j + 1 < SinkTiles ? j + 1 : j + 1 - SinkTiles + Low;
      fw::copy_async<Threads>(K_shared.stage((j + 1) % 2),
          p.K.tile(batch_idx, kv_head, next * BN), kv_len - next * BN);
      fw::copy_async<Threads>(V_shared.stage((j + 1) % 2),
          p.V.tile(batch_idx, kv_head, next * BN), kv_len - next * BN);
    }
    fw::commit();

    //  38 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared.stage(j % 2)));

    //  39 | Compute Multiply S, Scale and get new S
    //  40 | Compute Softcap * tanh(S / Softcap) and get new S (the factor Softcap follows in line 42)
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::tanh(S(m, n) * (Scale / float(Softcap)));
      }
    }

    //  41 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len and (kv_idx > q_idx + kv_len - q_len - Window or kv_idx < Sinks)
    if (!(i * BN + BN - 1 <= First && i * BN > First + BM - 1 - Window)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const position = First + at.row(m);  // q_idx + kv_len - q_len
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          int const kv_idx = i * BN + at.col(n);
          bool const seen =
              kv_idx <= position && (kv_idx > position - Window || kv_idx < Sinks);
          S(m, n) = seen ? S(m, n) : -INFINITY;
        }
      }
    }

    //  42 | Compute Softmax S with Smax and Ssum and rescale O
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      float top = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        top = fw::max(top, S(m, n));
      }
      float const now = fw::max(Smax(m), fw::row_max(top));
      float const drop = fw::exp2((Smax(m) - now) * (float(Softcap) * fw::log2_e));
      float const shift = now * (float(Softcap) * fw::log2_e);
      float sum = 0.0f;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = fw::exp2(S(m, n) * (float(Softcap) * fw::log2_e) - shift);
        sum += S(m, n);
      }
      Ssum(m) = Ssum(m) * drop + sum;
      Smax(m) = now;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * drop;
      }
    }

    //  43 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto const S_operand = fw::operand<fw::fp16>(S);

    //  44 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared.stage(j % 2)));
  }

  //  46 | Compute O / where(Ssum == 0, 1, Ssum) and get new O
  //  47 | Compute Smax + log(Ssum) and get LSE
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const sum = fw::row_sum(Ssum(m));
    float const factor = fw::reciprocal(sum == 0.0f ? 1.0f : sum);
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = O(m, n) * factor;
    }
    LSE(m) = sum == 0.0f ? -INFINITY : Smax(m) * float(Softcap) + fw::log(sum);
  }

  //  48 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
  }

  //  49 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        q_len - block_idx * BM);
  }
}
