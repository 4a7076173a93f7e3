#include <fw/hopper.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
constexpr int Stages = 2;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Softcap = 30;
constexpr int Window = 512;
constexpr int SinkTokens = 2;
constexpr int SinkBlocks = 1;
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

constexpr int Groups = Warps / 4;                    // warpgroups that multiply
constexpr int Columns = BN / 4;                      // of a tile of scores, held by a thread
constexpr int SinkColumns = 2 * ((SinkTokens + 7) / 8);  // of those, the ones that may be sinks

// A capped score is Softcap * tanh(s / Softcap) = Softcap * (2 g - 1), g = 1 / (1 + 2^(Slope * dot)).
constexpr float Slope = -2.0f * Scale / float(Softcap) * fw::log2_e;
// The difference of two capped scores, as an exponent of 2, is Sharp times the difference of their g.
constexpr float Sharp = 2.0f * float(Softcap) * fw::log2_e;

// From dot products to weights: scale, softcap, mask and one step of the softmax. Columns outside of
// From .. To are those that no row of this warpgroup sees: their weights are 0. Smax is in units of g.
template <int From, int To, bool Masked, class Scores, class Rows>
__device__ __forceinline__ void weigh(Scores& S, Rows& Smax, Rows& Ssum, Rows& drop,
    fw::Place<Warps> const& at, int first_position, int first_key) {
  //  38 | Compute S * Scale and get new S
  //  39 | Compute Softcap * tanh(S / Softcap) and get new S
  //  40 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len and (kv_idx > q_idx + kv_len - q_len - Window or kv_idx < SinkTokens)
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    int const position = first_position + at.row(m);  // q_idx + kv_len - q_len
    CUTE_UNROLL
    for (int n = From; n < To; ++n) {
      float g = fw::reciprocal(1.0f + fw::exp2(S(m, n) * Slope));
      if constexpr (Masked) {
        int const kv_idx = first_key + at.col(n);
        bool const seen = (kv_idx <= position) &
            ((kv_idx > position - Window) | (kv_idx < SinkTokens));
        g = seen ? g : -INFINITY;
      }
      S(m, n) = g;
    }
  }

  //  41 | Compute Softmax S with Smax and Ssum and rescale O
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float top;
    if constexpr (From == 0 && To == Columns) {
      top = fw::most_as_integers(S, m);  // g is not negative; -inf is less as an integer, too
    } else {
      top = S(m, From);
      CUTE_UNROLL
      for (int n = From + 1; n < To; ++n) {
        top = fw::max(top, S(m, n));
      }
    }
    float const now = fw::max(Smax(m), fw::row_max(top));
    drop(m) = fw::exp2((Smax(m) - now) * Sharp);
    Smax(m) = now;
    float const shift = now * Sharp;
    float sum = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < Columns; ++n) {
      if (n >= From && n < To) {
        float const weight = fw::exp2(S(m, n) * Sharp - shift);
        S(m, n) = weight;
        sum += weight;
      } else {
        S(m, n) = 0.0f;
      }
    }
    Ssum(m) = Ssum(m) * drop(m) + sum;  // this thread's part of the row
  }
}

// One round: the weights in S go with the V of the round before, the new scores come from the next K.
template <int From, int To, bool Masked, class QTile, class KTile, class VTile, class Scores,
    class Output, class Rows>
__device__ __forceinline__ void step(int group, QTile const& Q_shared, KTile const& K_shared,
    VTile const& V_shared, fw::Ring<Stages>& K_ring, fw::Ring<Stages>& V_ring, Scores& S, Output& O,
    Rows& Smax, Rows& Ssum, fw::Place<Warps> const& at, int first_position, int first_key) {
  //  42 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::fp16>(S);

  //  35 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
  K_ring.wait();

  //  36 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
  V_ring.wait();

  fw::take_turn<Groups>(group);
  fw::open_products(S, O);

  //  37 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();

  //  43 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Groups>(group);

  fw::finish_products<1>(S);
  auto drop = fw::row_vector<BM, Warps>();
  weigh<From, To, Masked>(S, Smax, Ssum, drop, at, first_position, first_key);
  K_ring.release(Ssum(0) + Ssum(1));

  fw::finish_products<0>(O);
  V_ring.release();

  //  41 | Compute Softmax S with Smax and Ssum and rescale O
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) = O(m, n) * drop(m);
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

  //  22 | Allocate K in shared (BN, HeadDim) as fp16 with stages Stages
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);
  fw::Ring<Stages> K_ring(shared + 163856);

  //  23 | Allocate V in shared (BN, HeadDim) as fp16 with stages Stages
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 98304);
  fw::Ring<Stages> V_ring(shared + 163888);

  if (threadIdx.x == 0) {
    Q_ring.init(Warps);
    K_ring.init(Warps);
    V_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<40>();
    if (fw::is_loader<Warps>()) {
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        //  13 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  14 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
        int const First =
            fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

        //  15 | let Start = max(0, First - SinkBlocks)
        int const Start = fw::max(0, First - SinkBlocks);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
        bool const rounds = Start * BN < i_end;

        // The first round's tile of K may come before Q: its buffer is free earlier.
        //  35 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        if (rounds) {
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, 0, 0);
        }

        //  30 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        //  36 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        if (rounds) {
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, 0, 0);
        }

        //  34 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = Start + 1; i * BN < i_end; ++i) {
          int const first_key = (i < Start + SinkBlocks ? i - Start : i) * BN;

          //  35 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, first_key, 0);

          //  36 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, first_key, 0);
        }
      }
    }
    return;
  }

  fw::take_registers<232>();

  auto S = fw::accumulator<BM, BN, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  14 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
    int const First =
        fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

    //  15 | let Start = max(0, First - SinkBlocks)
    int const Start = fw::max(0, First - SinkBlocks);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    bool const rounds = Start * BN < i_end;

    // Positions of the tile's first row, and of the first and last row of this warpgroup.
    int const first_position = block_idx * BM + kv_len - q_len;
    int const low = first_position + group * 64;
    int const high = low + 63;

    //  31 | Compute 0 and get O_register
    cute::clear(O);

    //  32 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);

    //  33 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  30 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  34 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (rounds) {
      // The first round, i = Start: block 0.
      //  35 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      K_ring.wait();

      //  37 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();

      // O is still 0: nothing to rescale.
      auto drop = fw::row_vector<BM, Warps>();
      if (First > 0) {
        // All windows begin behind this block: only the sinks are seen.
        weigh<0, SinkColumns, true>(S, Smax, Ssum, drop, at, first_position, 0);
      } else {
        weigh<0, Columns, true>(S, Smax, Ssum, drop, at, first_position, 0);
      }

      CUTE_NO_UNROLL
      for (int i = Start + 1; i * BN < i_end; ++i) {
        int const first_key = (i < Start + SinkBlocks ? i - Start : i) * BN;
        if (first_key + BN - 1 <= low && first_key > high - Window) {
          // All rows of this warpgroup see all keys.
          step<0, Columns, false>(group, Q_shared, K_shared, V_shared, K_ring, V_ring, S, O, Smax,
              Ssum, at, first_position, first_key);
        } else if (first_key + BN / 2 > high) {
          // None sees a key of the second half.
          step<0, Columns / 2, true>(group, Q_shared, K_shared, V_shared, K_ring, V_ring, S, O,
              Smax, Ssum, at, first_position, first_key);
        } else if (first_key + BN / 2 - 1 <= low - Window && first_key >= SinkTokens) {
          // None sees a key of the first half.
          step<Columns / 2, Columns, true>(group, Q_shared, K_shared, V_shared, K_ring, V_ring, S,
              O, Smax, Ssum, at, first_position, first_key);
        } else {
          step<0, Columns, true>(group, Q_shared, K_shared, V_shared, K_ring, V_ring, S, O, Smax,
              Ssum, at, first_position, first_key);
        }
      }
    }
    Q_ring.release();

    if (rounds) {
      // The last round's weights.
      //  42 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  36 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      V_ring.wait();

      //  43 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    }

    //  45 | Compute O / where(Ssum == 0, 1, Ssum) and get new O_register
    //  46 | Compute Smax + log(Ssum) and get LSE_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const total = fw::row_sum(Ssum(m));
      float const factor = total == 0.0f ? 1.0f : fw::reciprocal(total);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * factor;
      }
      LSE(m) = total == 0.0f
          ? -INFINITY
          : float(Softcap) * (2.0f * Smax(m) - 1.0f) + fw::log(total);
    }

    //  47 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 164864, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  48 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
