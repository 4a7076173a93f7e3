#include <fw/hopper.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps + 128;  // a warpgroup more, which loads
constexpr int SharedBytes = 181248;

struct Params {
  fw::Map K_map;  // tiles of BN x HeadDim
  fw::Map V_map;  // tiles of BN x HeadDim
  fw::Map Q_map;  // tiles of BM x HeadDim
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

//  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
template <class Scores>
__device__ __forceinline__ void mask_scores(Scores& S, fw::Place<Warps> const& at, int block_idx,
    int i, int q_len, int kv_len) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    int const q_idx = block_idx * BM + at.row(m);
    // the last key that the row sees, counted from the tile's first one
    int const last = fw::min(kv_len - 1, q_idx + kv_len - q_len) - i * BN;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      S(m, n) = at.col(n) <= last ? S(m, n) : -INFINITY;
    }
  }
}

//  32 | Compute Multiply S, Scale and get new S
//  34 | Compute Softmax S with Smax and Ssum and rescale O_register
// Without the rescaling of O, for which Drop has the factors. Ssum stays in four parts.
template <class Scores, class Vector>
__device__ __forceinline__ void softmax_scores(Scores& S, Vector& Smax, Vector& Ssum,
    Vector& Drop) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float top = S(m, 0);
    CUTE_UNROLL
    for (int n = 1; n < cute::size<1>(S); ++n) {
      top = fw::max(top, S(m, n));
    }
    float const now = fw::max(Smax(m), fw::row_max(top) * Scale);
    float const drop = fw::exp2((Smax(m) - now) * fw::log2_e);
    float const shift = now * fw::log2_e;
    float sum = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      float const weight = fw::exp2(S(m, n) * (Scale * fw::log2_e) - shift);
      S(m, n) = weight;
      sum += weight;
    }
    Ssum(m) = Ssum(m) * drop + sum;
    Smax(m) = now;
    Drop(m) = drop;
  }
}

// Round i from its scores to its weights, with the second product of round i - 1 under the softmax.
template <bool Masked, class Scores, class Result, class Vector, class QTile, class KTile,
    class VTile, class KRing, class VRing>
__device__ __forceinline__ void round_of_keys(int group, Scores& S, Result& O, Vector& Smax,
    Vector& Ssum, Vector& Drop, QTile const& Q_shared, KTile const& K_shared,
    VTile const& V_shared, KRing& K_ring, VRing& V_ring, fw::Place<Warps> const& at,
    int block_idx, int i, int q_len, int kv_len) {
  //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  K_ring.wait();

  //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  V_ring.wait();  // of round i - 1

  //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::bf16>(S);  // of round i - 1

  fw::take_turn<Warps / 4>(group);
  fw::open_products(S, O);

  //  31 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();

  //  36 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Warps / 4>(group);

  fw::finish_products<1>(S);

  //  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
  if constexpr (Masked) {
    mask_scores(S, at, block_idx, i, q_len, kv_len);
  }

  //  32 | Compute Multiply S, Scale and get new S
  //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
  softmax_scores(S, Smax, Ssum, Drop);
  K_ring.release(Ssum(0) + Ssum(1));

  fw::finish_products<0>(O);
  V_ring.release();
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = O(m, n) * Drop(m);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  int const batch = p.batch, heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len,
      kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);

  //  16 | Allocate K in shared (BN, HeadDim) as bf16 with stages 2
  //  17 | Allocate V in shared (BN, HeadDim) as bf16 with stages 2
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared);
  fw::Ring<1> Q_ring(shared + 163840);
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 32768);
  fw::Ring<2> K_ring(shared + 163856);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 98304);
  fw::Ring<2> V_ring(shared + 163888);

  if (threadIdx.x == 0) {
    Q_ring.init(Warps);
    K_ring.init(Warps);
    V_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<40>();
    if (fw::is_loader<Warps>()) {
      //   7 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        //   9 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  28 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = 0; i * BN < i_end; ++i) {
          //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, i * BN, 0);

          //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, i * BN, 0);
        }
      }
    }
    return;
  }

  fw::take_registers<232>();

  //  18 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();
  //  19 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();
  //  20 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();
  auto Drop = fw::row_vector<BM, Warps>();
  //  22 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Warps / 4>(group);

  //   7 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  25 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);

    //  26 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  27 | Compute 0 and get O_register
    cute::clear(O);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    // So many rounds, the first ones, have nothing to mask.
    int const free = fw::floor_div(
        fw::min(kv_len, block_idx * BM + kv_len - q_len + 1), BN);

    //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  28 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (i_end > 0) {
      // The first round, up to its weights.

      //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();

      //  31 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();

      //  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if (free < 1) {
        mask_scores(S, at, block_idx, 0, q_len, kv_len);
      }

      //  32 | Compute Multiply S, Scale and get new S
      //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
      softmax_scores(S, Smax, Ssum, Drop);  // O is 0 yet

      // The rounds without a mask, then those with one.
      int i = 1;
      CUTE_NO_UNROLL
      for (; i < free; ++i) {
        round_of_keys<false>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring,
            V_ring, at, block_idx, i, q_len, kv_len);
      }
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        round_of_keys<true>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring,
            V_ring, at, block_idx, i, q_len, kv_len);
      }
      Q_ring.release();

      // The second product of the last round.

      //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();

      //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::bf16>(S);

      //  36 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    } else {
      Q_ring.release();
    }

    //  21 | Allocate LSE in register (BM) as fp32
    auto LSE = fw::row_vector<BM, Warps>();

    //  38 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
    //  39 | Compute Smax + log(Ssum) and get LSE
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const sum = fw::row_sum(Ssum(m));
      float const inverse = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;
      LSE(m) = sum > 0.0f ? Smax(m) + fw::log(sum) : -INFINITY;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * inverse;
      }
    }

    //  40 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 164864, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  41 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
