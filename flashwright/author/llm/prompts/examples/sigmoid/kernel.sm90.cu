#include <fw/hopper.cuh>

constexpr int HeadDim = 64;
constexpr int BM = 128;
constexpr int BN = 64;
constexpr int Warps = 8;
constexpr float Scale = 0.125f;  // 1 / sqrt(HeadDim)
constexpr int Bias = -4;  // -4
constexpr int Threads = 32 * Warps + 128;  // and the producer warpgroup
constexpr int SharedBytes = 66560;

struct Params {
  fw::Map K_map;  // tiles of BN x HeadDim
  fw::Map V_map;  // tiles of BN x HeadDim
  fw::Map Q_map;  // tiles of BM x HeadDim
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  int const batch = p.batch, heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len,
      kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared);
  fw::Ring<2> K_ring(shared + 49152);
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 16384);
  fw::Ring<2> V_ring(shared + 49184);
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared + 32768);
  fw::Ring<1> Q_ring(shared + 49216);

  if (threadIdx.x == 0) {
    K_ring.init(Warps);
    V_ring.init(Warps);
    Q_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::dealloc_registers<24>();
    if (fw::is_producer<Warps>()) {
      for (fw::TileScheduler<4> tile(fw::ceil_div(q_len, 128), heads, batch); tile.more();
          tile.next()) {
        int const block_idx = tile.x();
        int const head_idx = tile.y();
        int const batch_idx = tile.z();

        //   9 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  20 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  22 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = 0; i * BN < i_end; ++i) {
          //  23 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, i * BN, 0);

          //  24 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, i * BN, 0);
        }
      }
    }
    return;
  }
  fw::alloc_registers<240>();

  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 4> S_operand;
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();

  fw::ping_pong_start<Warps / 4>(group);
  for (fw::TileScheduler<4> tile(fw::ceil_div(q_len, 128), heads, batch); tile.more();
      tile.next()) {
    int const block_idx = tile.x();
    int const head_idx = tile.y();
    int const batch_idx = tile.z();

    //   9 | let kv_head = floor(head_idx * kv_heads / heads)
    int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

    //  21 | Compute 0 and get O_register
    cute::clear(O);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

    //  20 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    if (0 < i_end) {
      int i = 0;

      //  23 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();
      fw::open_products(S);

      //  25 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      fw::close_products();
      fw::finish_products<0>(S);
      K_ring.release();

      //  26 | Compute S * Scale + Bias and get new S
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = S(m, n) * Scale + float(Bias);
        }
      }

      //  27 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len
      if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          int const q_idx = block_idx * BM + at.row(m);
          auto const visible = at.before(S, q_idx + kv_len - q_len + 1 - i * BN);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = visible[n] ? S(m, n) : -INFINITY;
          }
        }
      }

      //  28 | Compute sigmoid(S) and get new S
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        auto logistic = fw::row_of(S);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          logistic[n] = S(m, n) * -fw::log2_e;
        }
        fw::sigmoid2(logistic);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = logistic[n];
        }
      }

      //  29 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      S_operand = fw::operand<fw::fp16>(S);

      //  22 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
      CUTE_NO_UNROLL
      for (i = 1; i * BN < i_end; ++i) {
        //  23 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        K_ring.wait();
        fw::ping_pong_wait<Warps / 4>(group);
        fw::open_products(S, O);

        //  25 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  24 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        V_ring.wait();

        //  30 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::ping_pong_signal<Warps / 4>(group);
        fw::finish_products<1>(S);

        //  26 | Compute S * Scale + Bias and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = S(m, n) * Scale + float(Bias);
          }
        }

        //  27 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len
        if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len)) {
          CUTE_UNROLL
          for (int m = 0; m < cute::size<0>(S); ++m) {
            int const q_idx = block_idx * BM + at.row(m);
            auto const visible = at.before(S, q_idx + kv_len - q_len + 1 - i * BN);
            CUTE_UNROLL
            for (int n = 0; n < cute::size<1>(S); ++n) {
              S(m, n) = visible[n] ? S(m, n) : -INFINITY;
            }
          }
        }

        //  28 | Compute sigmoid(S) and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          auto logistic = fw::row_of(S);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            logistic[n] = S(m, n) * -fw::log2_e;
          }
          fw::sigmoid2(logistic);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = logistic[n];
          }
        }
        K_ring.release();
        fw::finish_products<0>(O);
        V_ring.release();

        //  29 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::fp16>(S);
      }
      Q_ring.release();

      //  24 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();
      fw::open_products(O);

      //  30 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::finish_products<0>(O);
      V_ring.release();
    } else {
      Q_ring.release();
    }

    //  32 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    fw::store_epilogue<Warps>(shared + 50176, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
        q_len - block_idx * BM);
  }
}
