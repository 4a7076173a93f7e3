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
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

constexpr int Groups = Warps / 4;  // warpgroups that multiply
constexpr float ScaleLog2 = Scale * fw::log2_e;  // scores in units of log2

//  31 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
// first: the position of the tile's first query, last: the last key, both counted from the block's first key.
template <class Tile>
__device__ __forceinline__ void mask_scores(Tile& S, fw::Place<Warps> const& at, int first, int last) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    int const limit = fw::min(last, first + at.row(m)) - at.first_col;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      // at.col(n) is at.first_col + n / 2 * 8 + n % 2
      S(m, n) = (n / 2 * 8 + n % 2) <= limit ? S(m, n) : -INFINITY;
    }
  }
}

//  30 | Compute Multiply S, Scale and get new S
//  32 | Compute Softmax S with Smax and Ssum and rescale O_register
// All but the rescaling of O, for which Drop is left. Smax is in units of log2; Ssum is in four parts, one in each
// thread of a quad.
template <class Tile, class Vector>
__device__ __forceinline__ void softmax_step(Tile& S, Vector& Smax, Vector& Ssum, Vector& Drop) {
  if (fw::none_negative(Smax)) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      Drop(m) = fw::most_as_integers(S, m);
    }
  } else {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      float most = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        most = fw::max(most, S(m, n));
      }
      Drop(m) = most;
    }
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const now = fw::max(Smax(m), fw::row_max(Drop(m)) * ScaleLog2);
    Drop(m) = fw::exp2(Smax(m) - now);
    Smax(m) = now;
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const now = Smax(m);
    float sum = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      float const weight = fw::exp2(S(m, n) * ScaleLog2 - now);
      S(m, n) = weight;
      sum += weight;
    }
    Ssum(m) = Ssum(m) * Drop(m) + sum;
  }
}

// One round: the scores of a block, and the second product of the block before, whose weights are in S.
template <bool Masked, class STile, class OTile, class Vector, class QTile, class KTile, class VTile>
__device__ __forceinline__ void round_of(int group, STile& S, OTile& O, Vector& Smax, Vector& Ssum, Vector& Drop,
    QTile const& Q_shared, KTile const& K_shared, VTile const& V_shared, fw::Ring<2>& K_ring, fw::Ring<2>& V_ring,
    fw::Place<Warps> const& at, int first, int last) {
  //  33 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::fp16>(S);

  //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  K_ring.wait();

  fw::take_turn<Groups>(group);
  fw::open_products(S, O);

  //  29 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();

  //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  V_ring.wait();

  //  34 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Groups>(group);

  fw::finish_products<1>(S);

  //  31 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
  if constexpr (Masked) {
    mask_scores(S, at, first, last);
  }

  //  32 | Compute Softmax S with Smax and Ssum and rescale O_register
  softmax_step(S, Smax, Ssum, Drop);
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
  int const batch = p.batch, heads = p.heads, q_len = p.q_len, kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  fw::Ring<1> Q_ring(shared + 163840);
  //  14 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);
  fw::Ring<2> K_ring(shared + 163856);
  //  15 | Allocate V in shared (BN, HeadDim) as fp16 with stages 2
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 98304);
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

        //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        //  26 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
        if (i_end > 0) {
          // In the order of use: K one block ahead of V.
          //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, head_idx, 0, 0);
          int i = 1;
          CUTE_NO_UNROLL
          for (; i * BN < i_end; ++i) {
            //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
            fw::fetch(K_shared, K_ring, p.K_map, batch_idx, head_idx, i * BN, 0);

            //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
            fw::fetch(V_shared, V_ring, p.V_map, batch_idx, head_idx, (i - 1) * BN, 0);
          }
          //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, head_idx, (i - 1) * BN, 0);
        }
      }
    }
    return;
  }

  fw::take_registers<232>();

  //  16 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();
  //  17 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();
  //  18 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();
  //  20 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Drop = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  //   7 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  23 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);

    //  24 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  25 | Compute 0 and get O_register
    cute::clear(O);

    int const first = block_idx * BM + kv_len - q_len;  // the position of the tile's first query
    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    int const full = fw::floor_div(first + 1, BN);  // blocks before this one are seen by all rows

    //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  26 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (i_end > 0) {
      // The first block: its scores alone.
      //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      K_ring.wait();

      //  29 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();

      //  31 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if (full < 1) {
        mask_scores(S, at, first, kv_len - 1);
      }

      //  32 | Compute Softmax S with Smax and Ssum and rescale O_register
      softmax_step(S, Smax, Ssum, Drop);  // O is 0: nothing to rescale

      int i = 1;
      // Blocks in which the mask changes nothing.
      CUTE_NO_UNROLL
      for (; i < full; ++i) {
        round_of<false>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring, V_ring, at, 0, 0);
      }
      // The others.
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        round_of<true>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring, V_ring, at,
            first - i * BN, kv_len - 1 - i * BN);
      }
      Q_ring.release();

      // The last block: its second product.
      //  33 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      V_ring.wait();

      //  34 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    } else {
      Q_ring.release();
    }

    //  19 | Allocate LSE in register (BM) as fp32
    auto LSE = fw::row_vector<BM, Warps>();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const sum = fw::row_sum(Ssum(m));

      //  36 | Compute where(Ssum > 0, Smax + log(Ssum), -inf) and get LSE_register
      LSE(m) = sum > 0.0f ? Smax(m) * fw::ln_2 + fw::log(sum) : -INFINITY;

      //  37 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
      float const inverse = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * inverse;
      }
    }

    //  38 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 164864, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  39 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
