#include <fw/attention.cuh>

constexpr int HeadDim = 32;
constexpr int BM = 64;
constexpr int BN = 32;
constexpr int Warps = 4;
constexpr float Scale = 0.17677669529663687f;  // 1 / sqrt(HeadDim)
constexpr int Window = 100;
constexpr int Threads = 32 * Warps;
constexpr int SharedBytes = 12288;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 1> Slopes;  // (heads)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 4)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const block_idx = gridDim.x - 1 - blockIdx.x;  // the longest first
  int const head_idx = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 4096);
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 2> S_operand;
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared + 8192);
  fw::Place<Warps> const at;

  //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, head_idx, block_idx * BM),
      q_len - block_idx * BM);
  fw::commit();

  //  23 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e+30f);

  //  24 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  25 | Compute 0 and get O_register
  cute::clear(O);

  int const i_first = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);
  int const i_end = fw::min(kv_len,
      (block_idx + 1) * BM + kv_len - q_len + Window - 1);  // BN times the loop's end
  float const Slopes_here = i_first * BN < i_end ? float(*p.Slopes.at(head_idx)) : 0.f;
  if (i_first * BN < i_end) {
    //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    fw::copy_async<Threads>(K_shared.stage(0), p.K.tile(batch_idx, head_idx, i_first * BN),
        kv_len - i_first * BN);

    //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    fw::copy_async<Threads>(V_shared.stage(0), p.V.tile(batch_idx, head_idx, i_first * BN),
        kv_len - i_first * BN);
  }
  fw::commit();
  fw::wait<1>();
  __syncthreads();

  //  26 | for i = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN):min(kv_len, (block_idx + 1) * BM + kv_len - q_len + Window - 1) / BN
  CUTE_NO_UNROLL
  for (int i = i_first; i * BN < i_end; ++i) {
    fw::wait<0>();
    __syncthreads();

    //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    if ((i + 1) * BN < i_end) {
      fw::copy_async<Threads>(K_shared.stage((i - i_first + 1) % 2),
          p.K.tile(batch_idx, head_idx, (i + 1) * BN), kv_len - (i + 1) * BN);
    }

    //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
    if ((i + 1) * BN < i_end) {
      fw::copy_async<Threads>(V_shared.stage((i - i_first + 1) % 2),
          p.V.tile(batch_idx, head_idx, (i + 1) * BN), kv_len - (i + 1) * BN);
    }
    fw::commit();

    //  29 | Compute GEMM Q_shared, K_shared.T and get S
    cute::clear(S);
    fw::gemm<Mma>(S, fw::left<Warps>(Q_shared),
        fw::right_transposed(K_shared.stage((i - i_first) % 2)));

    //  30 | Compute Multiply S, Scale and get new S
    // (a constant factor: taken along by what reads the tile next)

    //  31 | Compute S + Slopes[head_idx] * (kv_idx - q_idx - (kv_len - q_len)) and get new S
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      int const q_idx = block_idx * BM + at.row(m);
      float const row_0 = Slopes_here * float(i * BN + at.first_col - q_idx - (kv_len - q_len));
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = S(m, n) * Scale + (row_0 + Slopes_here * at.step(n));
      }
    }

    //  32 | Compute Mask S where kv_idx < kv_len and kv_idx > q_idx + kv_len - q_len - Window and kv_idx < q_idx + kv_len - q_len + Window
    if (!(i * BN + BN - 1 < kv_len && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window
        && i * BN + BN - 1 < block_idx * BM + kv_len - q_len + Window)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        auto const visible = at.before(S, kv_len - i * BN)
            & ~at.before(S, q_idx + kv_len - q_len - Window + 1 - i * BN)
                & at.before(S, q_idx + kv_len + Window - q_len - i * BN);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = visible[n] ? S(m, n) : -INFINITY;
        }
      }
    }

    //  33 | Compute Softmax S with Smax and Ssum and rescale O_register
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

    //  34 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    S_operand = fw::operand<fw::bf16>(S);

    //  35 | Compute GEMM S, V_shared and accumulate O_register
    fw::gemm<Mma>(O, S_operand, fw::right(V_shared.stage((i - i_first) % 2)));
  }

  // In the loop each of the four threads of a row has had its own part of Ssum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(Ssum); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  37 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(Ssum(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;
    }
  }

  //  38 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  fw::store<Warps>(p.O.tile(batch_idx, head_idx, block_idx * BM), O, q_len - block_idx * BM);
}
