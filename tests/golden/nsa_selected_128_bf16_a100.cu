// Attention for NVIDIA A100 SXM4 80 GB (sm_80), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int TopK = 16;
constexpr int BM = 16;
constexpr int BN = 64;
constexpr int Warps = 1;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps;
using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;

struct Params {
  fw::Global<fw::bf16, 5> Q;  // (batch, q_len, kv_heads, Group, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 5> O;  // (batch, q_len, kv_heads, Group, HeadDim)
  fw::Global<float, 4> LSE;  // (batch, q_len, kv_heads, Group)
  fw::Global<int, 4> Idx;  // (batch, kv_heads, q_len, TopK)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 4)
    attention(__grid_constant__ Params const p) {
  int const q_len = p.q_len, kv_len = p.kv_len;
  int const kv_head = blockIdx.x;
  int const q_pos = blockIdx.y;
  int const batch_idx = blockIdx.z;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared);
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 4096);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 20480);
  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 4> S_operand;
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;

  //  27 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from global to shared
  fw::copy_async<Threads>(Q_shared, p.Q.tile(batch_idx, q_pos, kv_head), 16);
  fw::commit();

  //  28 | Compute -1e30 and get Smax
  cute::fill(Smax, -1e+30f);

  //  29 | Compute 0 and get Ssum
  cute::clear(Ssum);

  //  30 | Compute 0 and get O_register
  cute::clear(O);

  //  31 | for j = 0:TopK
  CUTE_NO_UNROLL
  for (int j = 0; j < TopK; ++j) {
    //  32 | let Chosen = Idx[batch_idx, kv_head, q_pos, j]
    int const Chosen = *p.Idx.at(batch_idx, kv_head, q_pos, j);

    //  33 | if Chosen >= 0
    if (Chosen >= 0) {
      fw::wait<0>();
      __syncthreads();

      //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = Chosen] from global to shared
      fw::copy_async<Threads>(K_shared, p.K.tile(batch_idx, kv_head, Chosen * BN),
          kv_len - Chosen * BN);

      //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = Chosen] from global to shared
      fw::copy_async<Threads>(V_shared, p.V.tile(batch_idx, kv_head, Chosen * BN),
          kv_len - Chosen * BN);
      fw::commit();
      fw::wait<0>();
      __syncthreads();

      //  36 | Compute GEMM Q_shared, K_shared.T and get S
      cute::clear(S);
      fw::gemm<Mma>(S, fw::left<Warps>(Q_shared), fw::right_transposed(K_shared));

      //  37 | Compute Multiply S, Scale and get new S
      // (a constant factor: taken along by what reads the tile next)

      //  38 | Compute Mask S where kv_idx <= q_pos + kv_len - q_len
      if (!(Chosen * BN + BN - 1 <= q_pos + kv_len - q_len)) {
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            int const kv_idx = Chosen * BN + at.col(n);
            S(m, n) = kv_idx <= q_pos + kv_len - q_len ? S(m, n) : -INFINITY;
          }
        }
      }

      //  39 | Compute Softmax S with Smax and Ssum and rescale O_register
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

      //  40 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      S_operand = fw::operand<fw::bf16>(S);

      //  41 | Compute GEMM S, V_shared and accumulate O_register
      fw::gemm<Mma>(O, S_operand, fw::right(V_shared));
    }
  }

  // In the loop each of the four threads of a row has had its own part of Ssum.
  CUTE_UNROLL
  for (int m = 0; m < cute::size(Ssum); ++m) {
    Ssum(m) = fw::row_sum(Ssum(m));
  }

  //  46 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    float const row_0 = fw::reciprocal(Ssum(m));
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;
    }
  }

  //  47 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from register to global
  if (p.O.data != nullptr) {
    fw::store<Warps>(p.O.tile(batch_idx, q_pos, kv_head), O, 16);
  }

  //  48 | Compute Smax + log(Ssum) and get LSE_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size(LSE); ++m) {
    LSE(m) = Smax(m) + fw::log(Ssum(m));
  }

  //  49 | Copy LSE (BM) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, q_pos, kv_head), LSE, 16);
  }
}
