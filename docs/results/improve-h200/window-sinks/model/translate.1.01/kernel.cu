#include <fw/hopper.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
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

// A tile lies at the window's edge or at the diagonal, never at both; the sinks are in tile 0 alone.
static_assert(Window >= BM + BN && SinkTokens <= BN && SinkBlocks == 1, "parts of the loop");

// Softcap * tanh(x / Softcap) = 2 * Softcap * g - Softcap, with g = 1 / (1 + exp(-2 * x / Softcap)).
constexpr float Steep = -2.0f * Scale / float(Softcap) * fw::log2_e;  // from a product to the exponent, base 2
constexpr float Span = 2.0f * float(Softcap) * fw::log2_e;            // from g to the score, base 2
constexpr float Middle = float(Softcap) * fw::log2_e;                 // is taken off it at the end

constexpr int Groups = Warps / 4;

// What a mask may hide in a tile.
enum class Hides { Anything, Before, Nothing, Behind };

// From products to weights. Smax is the greatest g so far, times Span; Ssum is kept in four parts.
// ahead: position of the block's first query, less that of the tile's first key; last: last key, less the same.
template <Hides Kind, class Scores, class Rows>
CUTE_DEVICE void weigh(Scores& S, Rows& Smax, Rows& Ssum, Rows& Drop, fw::Place<Warps> const& at,
    int ahead, int last) {
  //  37 | Compute Multiply S, Scale and get new S
  //  38 | Compute Softcap * tanh(S / Softcap) and get new S
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); n += 4) {
      float const a = 1.0f + fw::exp2(fw::min(S(m, n) * Steep, 30.0f));
      float const b = 1.0f + fw::exp2(fw::min(S(m, n + 1) * Steep, 30.0f));
      float const c = 1.0f + fw::exp2(fw::min(S(m, n + 2) * Steep, 30.0f));
      float const d = 1.0f + fw::exp2(fw::min(S(m, n + 3) * Steep, 30.0f));
      float const ab = a * b;
      float const cd = c * d;
      float const inverse = fw::reciprocal(ab * cd);
      float const of_ab = inverse * cd;  // 1 / (a * b)
      float const of_cd = inverse * ab;  // 1 / (c * d)
      S(m, n) = of_ab * b;
      S(m, n + 1) = of_ab * a;
      S(m, n + 2) = of_cd * d;
      S(m, n + 3) = of_cd * c;
    }
  }

  //  39 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len and (kv_idx > q_idx + kv_len - q_len - Window or kv_idx < SinkTokens)
  if constexpr (Kind != Hides::Nothing) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      // Columns counted from this thread's first one.
      int const to = fw::min(ahead + at.row(m), last) - at.first_col;  // the last that is seen
      int const below = ahead + at.row(m) - Window - at.first_col;     // the last before the window
      int const sinks = SinkTokens - at.first_col;                     // the first that is no sink (tile 0)
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(S); ++n) {
        int const col = at.col(n) - at.first_col;
        if constexpr (Kind == Hides::Anything) {
          S(m, n) = (col <= to && (col > below || col < sinks)) ? S(m, n) : -INFINITY;
        } else if constexpr (Kind == Hides::Before) {
          S(m, n) = col > below ? S(m, n) : -INFINITY;
        } else {
          S(m, n) = col <= to ? S(m, n) : -INFINITY;
        }
      }
    }
  }

  //  40 | Compute Softmax S with Smax and Ssum and rescale O
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    // What is not hidden is not negative.
    float const most = fw::row_max(fw::most_as_integers(S, m));
    float const now = fw::max(Smax(m), most * Span);
    Drop(m) = fw::exp2(Smax(m) - now);
    Smax(m) = now;
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const now = Smax(m);
    float sum = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); ++n) {
      S(m, n) = fw::exp2(S(m, n) * Span - now);
      sum += S(m, n);
    }
    Ssum(m) = Ssum(m) * Drop(m) + sum;
  }
}

// The scores of this round together with the second product of the round before.
template <Hides Kind, class Scores, class Result, class Rows, class QTile, class KTile, class VTile>
CUTE_DEVICE void next_round(int group, Scores& S, Result& O, Rows& Smax, Rows& Ssum, Rows& Drop,
    QTile const& Q_shared, KTile const& K_shared, VTile const& V_shared, fw::Ring<2>& K_ring,
    fw::Ring<2>& V_ring, fw::Place<Warps> const& at, int ahead, int last) {
  //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  auto const P = fw::operand<fw::fp16>(S);

  //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
  K_ring.wait();
  //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
  V_ring.wait();  // of the round before

  fw::take_turn<Groups>(group);
  fw::open_products(S, O);
  //  36 | Compute GEMM Q_shared, K_shared.T and get S
  fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
  fw::close_products();
  //  42 | Compute GEMM S, V_shared and accumulate O_register
  fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
  fw::close_products();
  fw::pass_turn<Groups>(group);

  fw::finish_products<1>(S);
  weigh<Kind>(S, Smax, Ssum, Drop, at, ahead, last);
  K_ring.release(Ssum(0) + Ssum(1));

  fw::finish_products<0>(O);
  V_ring.release();

  //  40 | Compute Softmax S with Smax and Ssum and rescale O
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
  //  21 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 32768);
  fw::Ring<2> K_ring(shared + 163856);
  //  22 | Allocate V in shared (BN, HeadDim) as fp16 with stages 2
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
      //  11 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        //  12 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  13 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
        int const First = fw::floor_div(
            fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

        //  14 | let Start = max(0, First - SinkBlocks)
        int const Start = fw::max(0, First - SinkBlocks);

        //  29 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  33 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = Start; i * BN < i_end; ++i) {
          int const tile = i < Start + SinkBlocks ? i - Start : i;

          //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, tile * BN, 0);

          //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, tile * BN, 0);
        }
      }
    }
    return;
  }

  fw::take_registers<232>();

  //  23 | Allocate S in register (BM, BN) as fp32
  auto S = fw::accumulator<BM, BN, Warps>();
  //  24 | Allocate O in register (BM, HeadDim) as fp32
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  //  25 | Allocate Smax in register (BM) as fp32
  auto Smax = fw::row_vector<BM, Warps>();
  //  26 | Allocate Ssum in register (BM) as fp32
  auto Ssum = fw::row_vector<BM, Warps>();
  auto Drop = fw::row_vector<BM, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  //  11 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  13 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
    int const First = fw::floor_div(
        fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

    //  14 | let Start = max(0, First - SinkBlocks)
    int const Start = fw::max(0, First - SinkBlocks);

    //  30 | Compute 0 and get O_register
    cute::clear(O);
    //  31 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e30f);
    //  32 | Compute 0 and get Ssum
    cute::clear(Ssum);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    int const position = block_idx * BM + kv_len - q_len;  // of the block's first query

    //  29 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  33 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (Start * BN < i_end) {
      // The first round: tile 0.
      //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      K_ring.wait();

      //  36 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      K_ring.release();
      weigh<Hides::Anything>(S, Smax, Ssum, Drop, at, position, kv_len - 1);  // O is 0 yet

      int i = Start + 1;

      // Tiles with keys that lie before the window of the block's last query.
      CUTE_NO_UNROLL
      for (; i * BN <= position + BM - 1 - Window; ++i) {
        next_round<Hides::Before>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared,
            K_ring, V_ring, at, position - i * BN, kv_len - 1 - i * BN);
      }

      // Tiles that all queries of the block see whole.
      CUTE_NO_UNROLL
      for (; i * BN + BN - 1 <= position; ++i) {
        next_round<Hides::Nothing>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared,
            K_ring, V_ring, at, position - i * BN, kv_len - 1 - i * BN);
      }

      // Tiles with keys that lie behind the block's first query.
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        next_round<Hides::Behind>(group, S, O, Smax, Ssum, Drop, Q_shared, K_shared, V_shared,
            K_ring, V_ring, at, position - i * BN, kv_len - 1 - i * BN);
      }
      Q_ring.release();

      //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      V_ring.wait();

      //  42 | Compute GEMM S, V_shared and accumulate O_register
      fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      V_ring.release();
    } else {
      Q_ring.release();
    }

    //  27 | Allocate LSE in register (BM) as fp32
    auto LSE = fw::row_vector<BM, Warps>();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const sum = fw::row_sum(Ssum(m));

      //  44 | Compute O_register / where(Ssum == 0, 1, Ssum) and get new O_register
      float const factor = fw::reciprocal(sum == 0.0f ? 1.0f : sum);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * factor;
      }

      //  45 | Compute Smax + log(Ssum) and get LSE_register
      LSE(m) = sum == 0.0f ? -INFINITY : (Smax(m) - Middle + fw::log2(sum)) * fw::ln_2;
    }

    //  46 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 164864, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  47 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
