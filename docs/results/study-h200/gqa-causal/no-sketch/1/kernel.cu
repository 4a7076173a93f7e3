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
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

constexpr int Groups = Warps / 4;

// Lines 33 to 35 without the rescaling of O: S (unscaled products) becomes its weights. Smax is the
// greatest unscaled product so far; Ssum is kept in four parts, one in each thread of a quad.
// `first_q`: position of the tile's first query; `first_kv`: of its first key.
template <bool Masked, class Scores, class Vector>
__device__ __forceinline__ void soften(Scores& S, Vector& Smax, Vector& Ssum, Vector& Drop,
    fw::Place<Warps> const& at, int first_q, int first_kv, int q_len, int kv_len) {
  constexpr float Factor = Scale * fw::log2_e;

  //  34 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
  if constexpr (Masked) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      int const q_idx = first_q + at.row(m);
      int const bound = fw::min(kv_len, q_idx + kv_len - q_len + 1) - first_kv - at.col(0);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        S(m, n) = at.col(n) - at.col(0) < bound ? S(m, n) : -INFINITY;
      }
    }
  }

  //  35 | Compute Softmax S with Smax and Ssum and rescale O_register
  //  33 | Compute Multiply S, Scale and get new S
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float most_even = S(m, 0);
    float most_odd = S(m, 1);
    CUTE_UNROLL
    for (int n = 2; n < cute::size<1>(S); n += 2) {
      most_even = fw::max(most_even, S(m, n));
      most_odd = fw::max(most_odd, S(m, n + 1));
    }
    float const now = fw::max(Smax(m), fw::row_max(fw::max(most_even, most_odd)));
    Drop(m) = fw::exp2((Smax(m) - now) * Factor);
    Smax(m) = now;
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const top = Smax(m) * Factor;
    float sum_even = 0.0f;
    float sum_odd = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); n += 2) {
      S(m, n) = fw::exp2(S(m, n) * Factor - top);
      S(m, n + 1) = fw::exp2(S(m, n + 1) * Factor - top);
      sum_even += S(m, n);
      sum_odd += S(m, n + 1);
    }
    Ssum(m) = Ssum(m) * Drop(m) + (sum_even + sum_odd);
  }
}

// One round: the weights in S (of round i - 1) times V of round i - 1, and the scores and weights of round i.
template <bool Masked, class Scores, class Output, class Vector, class QTile, class KTile, class VTile>
__device__ __forceinline__ void step(int group, Scores& S, Output& O, Vector& Smax, Vector& Ssum,
    QTile const& Q_shared, KTile const& K_shared, fw::Ring<2>& K_ring, VTile const& V_shared,
    fw::Ring<2>& V_ring, fw::Place<Warps> const& at, int first_q, int first_kv, int q_len,
    int kv_len) {
  //  36 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::fp16>(S);

  //  31 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  V_ring.wait();

  //  30 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  K_ring.wait();

  fw::take_turn<Groups>(group);
  fw::open_products(S, O);

  //  32 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();

  //  37 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Groups>(group);

  fw::finish_products<1>(S);
  auto Drop = fw::row_vector<BM, Warps>();
  soften<Masked>(S, Smax, Ssum, Drop, at, first_q, first_kv, q_len, kv_len);
  K_ring.release(Ssum(0) + Ssum(1));

  fw::finish_products<0>(O);
  V_ring.release();

  //  35 | Compute Softmax S with Smax and Ssum and rescale O_register
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
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  fw::Ring<1> Q_ring(shared + 163840);

  //  17 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);
  fw::Ring<2> K_ring(shared + 163856);

  //  18 | Allocate V in shared (BN, HeadDim) as fp16 with stages 2
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
      //   7 | grid head_idx = 0:heads, block_idx = 0:q_len / BM, batch_idx = 0:batch
      for (fw::Walk<10> walk(fw::ceil_div(q_len, BM), heads, batch); walk.more(); walk.next()) {
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        //   9 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  10 | let q_block = ceil(q_len / BM) - 1 - block_idx
        int const q_block = walk.x();  // block_idx counts from the other end

        //  25 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = q_block] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, q_block * BM, 0);

        int const i_end = fw::min(kv_len,
            (q_block + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  29 | for i = 0:min(kv_len, (q_block + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = 0; i * BN < i_end; ++i) {
          //  30 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, i * BN, 0);

          //  31 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, i * BN, 0);
        }
      }
    }
    return;
  }
  fw::take_registers<232>();

  //  19 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();

  //  20 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();

  //  21 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();

  //  22 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();

  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  //   7 | grid head_idx = 0:heads, block_idx = 0:q_len / BM, batch_idx = 0:batch
  for (fw::Walk<10> walk(fw::ceil_div(q_len, BM), heads, batch); walk.more(); walk.next()) {
    //  10 | let q_block = ceil(q_len / BM) - 1 - block_idx
    int const q_block = walk.x();  // block_idx counts from the other end
    int const first_q = q_block * BM;

    //  26 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);

    //  27 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  28 | Compute 0 and get O_register
    cute::clear(O);

    int const i_end = fw::min(kv_len,
        first_q + BM + kv_len - q_len);  // BN times the loop's end
    // Rounds whose keys are all seen by the tile's first query, and so by all of them.
    int const full = fw::floor_div(fw::min(kv_len, first_q + kv_len - q_len + 1), BN);

    //  25 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = q_block] from global to shared
    Q_ring.wait();

    if (i_end > 0) {
      // The first round's scores and weights; there is nothing in O to rescale yet.
      //  30 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();

      //  32 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();

      //  33 | Compute Multiply S, Scale and get new S
      //  34 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      //  35 | Compute Softmax S with Smax and Ssum and rescale O_register
      {
        auto Drop = fw::row_vector<BM, Warps>();
        soften<true>(S, Smax, Ssum, Drop, at, first_q, 0, q_len, kv_len);
      }

      //  29 | for i = 0:min(kv_len, (q_block + 1) * BM + kv_len - q_len) / BN
      int i = 1;
      CUTE_NO_UNROLL
      for (; i < full; ++i) {
        step<false>(group, S, O, Smax, Ssum, Q_shared, K_shared, K_ring, V_shared, V_ring, at,
            first_q, i * BN, q_len, kv_len);
      }
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        step<true>(group, S, O, Smax, Ssum, Q_shared, K_shared, K_ring, V_shared, V_ring, at,
            first_q, i * BN, q_len, kv_len);
      }
    }
    Q_ring.release();

    if (i_end > 0) {
      // The last round's weights.
      //  36 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  31 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();

      //  37 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    }

    //  23 | Allocate LSE in register (BM) as fp32
    auto LSE = fw::row_vector<BM, Warps>();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const total = fw::row_sum(Ssum(m));
      bool const some = total > 0.0f;

      //  39 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
      float const inverse = fw::reciprocal(some ? total : 1.0f);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = some ? O(m, n) * inverse : 0.0f;
      }

      //  40 | Compute Smax + log(Ssum) and get LSE_register
      LSE(m) = some ? Smax(m) * Scale + fw::log(total) : -INFINITY;
    }

    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  41 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = q_block] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 164864, p.O.tile(batch_idx, head_idx, first_q), O,
          q_len - first_q);
    }

    //  42 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = q_block] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, first_q), LSE, q_len - first_q);
    }
  }
}
