#include <fw/hopper.cuh>

constexpr int HeadDim = 192;
constexpr int VDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
constexpr float Scale = 0.07216878364870323f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps + 128;  // a warpgroup more, which loads
constexpr int SharedBytes = 230400;

struct Params {
  fw::Map K_map;  // tiles of BN x HeadDim
  fw::Map V_map;  // tiles of BN x VDim
  fw::Map Q_map;  // tiles of BM x HeadDim
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, VDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, VDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

constexpr int Groups = Warps / 4;  // warpgroups that multiply
constexpr float Factor = Scale * fw::log2_e;  // of a score, in the exponent of 2

//  32 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
template <class Tile>
CUTE_DEVICE void mask_scores(Tile& S, fw::Place<Warps> const& at, int block_idx, int i, int q_len,
    int kv_len) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    int const q_idx = block_idx * BM + at.row(m);
    // the last column of this tile that the row sees
    int const last = fw::min(kv_len - 1, q_idx + kv_len - q_len) - i * BN;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      S(m, n) = at.col(n) <= last ? S(m, n) : -INFINITY;
    }
  }
}

//  31 | Compute Multiply S, Scale and get new S
//  33 | Compute Softmax S with Smax and Ssum and rescale O_register
// Smax is the maximum of the scores before the scaling; Ssum stays in four parts; O is multiplied with Drop later.
template <class Tile, class Vector>
CUTE_DEVICE void weigh(Tile& S, Vector& Smax, Vector& Ssum, Vector& Drop) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float top = S(m, 0);
    float other = S(m, 1);
    CUTE_UNROLL
    for (int n = 2; n < cute::size<1>(S); n += 2) {
      top = fw::max(top, S(m, n));
      other = fw::max(other, S(m, n + 1));
    }
    float const now = fw::max(Smax(m), fw::row_max(fw::max(top, other)));
    Drop(m) = fw::exp2((Smax(m) - now) * Factor);
    Smax(m) = now;
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const base = Smax(m) * Factor;
    float sum = 0.0f;
    float other = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); n += 2) {
      S(m, n) = fw::exp2(S(m, n) * Factor - base);
      S(m, n + 1) = fw::exp2(S(m, n + 1) * Factor - base);
      sum += S(m, n);
      other += S(m, n + 1);
    }
    Ssum(m) = Ssum(m) * Drop(m) + (sum + other);
  }
}

// Round i, from 1 on: S holds the weights of round i - 1 before, and those of round i behind it.
template <bool Masked, class ScoreTile, class ResultTile, class Vector, class QTile, class KTile,
    class VTile, class KRing, class VRing, class PinRing>
CUTE_DEVICE void one_round(ScoreTile& S, ResultTile& O, Vector& Smax, Vector& Ssum, Vector& Drop,
    QTile const& Q_shared, KTile const& K_shared, VTile const& V_shared, KRing& K_ring,
    VRing& V_ring, PinRing& Pin_ring, fw::Place<Warps> const& at, int group, int block_idx, int i,
    int q_len, int kv_len) {
  //  34 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::fp16>(S);

  //  28 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  K_ring.wait();

  //  29 | Copy V (BN, VDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
  V_ring.wait();

  fw::take_turn<Groups>(group);
  fw::open_products(S, O);

  //  30 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();

  //  35 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Groups>(group);

  fw::finish_products<1>(S);
  K_ring.release();

  //  32 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
  if constexpr (Masked) {
    mask_scores(S, at, block_idx, i, q_len, kv_len);
  }

  //  33 | Compute Softmax S with Smax and Ssum and rescale O_register
  weigh(S, Smax, Ssum, Drop);
  Pin_ring.release(Ssum(0) + Ssum(1));  // the wait below stays behind the softmax

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
  fw::Ring<1> Q_ring(shared + 212992);
  //  15 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 49152);
  fw::Ring<2> K_ring(shared + 213008);
  //  16 | Allocate V in shared (BN, VDim) as fp16 with stages 2
  auto const V_shared = fw::shared_tile<fw::fp16, BN, VDim>(shared + 147456);
  fw::Ring<2> V_ring(shared + 213040);
  // Nobody loads or waits here: it only keeps instructions in order.
  fw::Ring<1> Pin_ring(shared + 213072);

  if (threadIdx.x == 0) {
    Q_ring.init(Warps);
    K_ring.init(Warps);
    V_ring.init(Warps);
    Pin_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<40>();
    if (fw::is_loader<Warps>()) {
      //   8 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  28 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
        if (i_end > 0) {
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, head_idx, 0, 0);
        }

        //  23 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        //  27 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = 0; i * BN < i_end; ++i) {
          //  28 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          // (that of the next round, which is used before this round's V)
          if ((i + 1) * BN < i_end) {
            fw::fetch(K_shared, K_ring, p.K_map, batch_idx, head_idx, (i + 1) * BN, 0);
          }

          //  29 | Copy V (BN, VDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, head_idx, i * BN, 0);
        }
      }
    }
    return;
  }

  fw::take_registers<232>();

  //  17 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();
  //  18 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();
  //  19 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();
  auto Drop = fw::row_vector<BM, Warps>();
  //  20 | Allocate O in register (BM, VDim) as fp32
  auto O = fw::accumulator<BM, VDim, Warps>();
  //  21 | Allocate LSE in register (BM) as fp32
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  //   8 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  24 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);

    //  25 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  26 | Compute 0 and get O_register
    cute::clear(O);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    int const rounds = i_end > 0 ? fw::ceil_div(i_end, BN) : 0;
    // the first rounds, in which the mask changes nothing (may be negative: none)
    int const full = fw::min(rounds, fw::floor_div(block_idx * BM + kv_len - q_len + 1, BN));

    //  23 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  27 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (rounds > 0) {
      //  28 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      K_ring.wait();

      //  30 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();

      //  32 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if (full < 1) {
        mask_scores(S, at, block_idx, 0, q_len, kv_len);
      }

      //  33 | Compute Softmax S with Smax and Ssum and rescale O_register
      weigh(S, Smax, Ssum, Drop);  // O is 0: nothing to rescale

      int i = 1;
      CUTE_NO_UNROLL
      for (; i < full; ++i) {
        one_round<false>(S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring, V_ring,
            Pin_ring, at, group, block_idx, i, q_len, kv_len);
      }
      CUTE_NO_UNROLL
      for (; i < rounds; ++i) {
        one_round<true>(S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared, K_ring, V_ring,
            Pin_ring, at, group, block_idx, i, q_len, kv_len);
      }
    }
    Q_ring.release();

    if (rounds > 0) {
      //  34 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  29 | Copy V (BN, VDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      V_ring.wait();

      //  35 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    }

    //  37 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
    //  38 | Compute where(Ssum > 0, Smax + log(Ssum), -inf) and get LSE_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const sum = fw::row_sum(Ssum(m));
      float const inverse = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;
      LSE(m) = sum > 0.0f ? Smax(m) * Scale + fw::log(sum) : -INFINITY;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * inverse;
      }
    }

    //  39 | Copy O (BM, VDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 214016, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  40 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
