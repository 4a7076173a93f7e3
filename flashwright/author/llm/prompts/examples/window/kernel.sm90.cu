#include <fw/hopper.cuh>

constexpr int HeadDim = 32;
constexpr int BM = 128;
constexpr int BN = 32;
constexpr int Warps = 8;
constexpr float Scale = 0.17677669529663687f;  // 1 / sqrt(HeadDim)
constexpr int Window = 100;
constexpr int Threads = 32 * Warps + 128;  // and the producer warpgroup
constexpr int SharedBytes = 33792;

struct Params {
  fw::Map K_map;  // tiles of BN x HeadDim
  fw::Map V_map;  // tiles of BN x HeadDim
  fw::Map Q_map;  // tiles of BM x HeadDim
  fw::Global<fw::bf16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::bf16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> V;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::bf16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 1> Slopes;  // (heads)
  int batch, heads, kv_heads, q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  int const batch = p.batch, heads = p.heads, q_len = p.q_len, kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);
  auto const K_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared);
  fw::Ring<2> K_ring(shared + 16384);
  auto const V_shared = fw::shared_tile<fw::bf16, BN, HeadDim>(shared + 4096);
  fw::Ring<2> V_ring(shared + 16416);
  auto const Q_shared = fw::shared_tile<fw::bf16, BM, HeadDim>(shared + 8192);
  fw::Ring<1> Q_ring(shared + 16448);

  if (threadIdx.x == 0) {
    K_ring.init(Warps);
    V_ring.init(Warps);
    Q_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::dealloc_registers<24>();
    if (fw::is_producer<Warps>()) {
      for (fw::TileScheduler<10> tile(fw::ceil_div(q_len, 128), heads, batch); tile.more();
          tile.next()) {
        int const block_idx = tile.x();
        int const head_idx = tile.y();
        int const batch_idx = tile.z();

        //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        int const i_first = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1),
            BN);
        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len + Window - 1);  // BN times the loop's end

        //  26 | for i = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN):min(kv_len, (block_idx + 1) * BM + kv_len - q_len + Window - 1) / BN
        CUTE_NO_UNROLL
        for (int i = i_first; i * BN < i_end; ++i) {
          //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, head_idx, i * BN, 0);

          //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, head_idx, i * BN, 0);
        }
      }
    }
    return;
  }
  fw::alloc_registers<240>();

  auto S = fw::accumulator<BM, BN, Warps>();
  fw::OperandA<1, 2> S_operand;
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto drops = fw::row_vector<128, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();

  fw::ping_pong_start<Warps / 4>(group);
  for (fw::TileScheduler<10> tile(fw::ceil_div(q_len, 128), heads, batch); tile.more();
      tile.next()) {
    int const block_idx = tile.x();
    int const head_idx = tile.y();
    int const batch_idx = tile.z();

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

    //  22 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    if (i_first * BN < i_end) {
      int i = i_first;
      int const i_exit = fw::max(i_first + 1,
          group * 64 < q_len - block_idx * BM
              ? fw::ceil_div(block_idx * BM + group * 64 + 64 - 1 + kv_len - q_len + Window, BN)
                  : 0);

      //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      K_ring.wait();
      fw::open_products(S);

      //  29 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      fw::close_products();

      //  30 | Compute Multiply S, Scale and get new S
      // (a constant factor: taken along by what reads the tile next)
      fw::finish_products<0>(S);
      K_ring.release();

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
        drops(m) = fw::exp2((Smax(m) - now) * fw::log2_e);
        Smax(m) = now;
      }
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        float const row_0 = Smax(m) * fw::log2_e;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = fw::exp2(S(m, n) * fw::log2_e - row_0);
        }
        float sum = Ssum(m) * drops(m);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          sum += S(m, n);
        }
        Ssum(m) = sum;
      }

      //  34 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      S_operand = fw::operand<fw::bf16>(S);

      //  26 | for i = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN):min(kv_len, (block_idx + 1) * BM + kv_len - q_len + Window - 1) / BN
      CUTE_NO_UNROLL
      for (i = i_first + 1; i * BN < i_end && i < i_exit; ++i) {
        //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
        K_ring.wait();
        fw::ping_pong_wait<Warps / 4>(group);
        fw::open_products(S, O);

        //  29 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
        V_ring.wait();

        //  35 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::ping_pong_signal<Warps / 4>(group);

        //  30 | Compute Multiply S, Scale and get new S
        // (a constant factor: taken along by what reads the tile next)
        fw::finish_products<1>(S);

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
        if (!(i * BN + BN - 1 < kv_len
            && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window
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
          drops(m) = fw::exp2((Smax(m) - now) * fw::log2_e);
          Smax(m) = now;
        }
        K_ring.release(Smax(0));
        fw::finish_products<0>(O);
        V_ring.release();

        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(O); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(O); ++n) {
            O(m, n) = O(m, n) * drops(m);
          }
        }
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          float const row_0 = Smax(m) * fw::log2_e;
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = fw::exp2(S(m, n) * fw::log2_e - row_0);
          }
          float sum = Ssum(m) * drops(m);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            sum += S(m, n);
          }
          Ssum(m) = sum;
        }

        //  34 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::bf16>(S);
      }
      Q_ring.release();

      //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
      V_ring.wait();
      fw::open_products(O);

      //  35 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::finish_products<0>(O);
      V_ring.release();
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        //  27 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
        K_ring.wait();
        fw::ping_pong_wait<Warps / 4>(group);
        fw::ping_pong_signal<Warps / 4>(group);
        K_ring.release();

        //  28 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared
        V_ring.wait();
        V_ring.release();
      }
    } else {
      Q_ring.release();
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
    fw::store_epilogue<Warps>(shared + 17408, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
        q_len - block_idx * BM);
  }
}
