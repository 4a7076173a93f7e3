// Attention for NVIDIA H200 SXM 141 GB (sm_90a), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
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

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  int const batch = p.batch, heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len,
      kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared);
  fw::Ring<2> K_ring(shared + 163840);
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 65536);
  fw::Ring<2> V_ring(shared + 163872);
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared + 131072);
  fw::Ring<1> Q_ring(shared + 163904);

  if (threadIdx.x == 0) {
    K_ring.init(Warps);
    V_ring.init(Warps);
    Q_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<24>();
    if (fw::is_loader<Warps>()) {
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        //  12 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  13 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
        int const First = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1),
            BN);

        //  14 | let Start = max(0, First - SinkBlocks)
        int const Start = fw::max(0, First - SinkBlocks);

        //  29 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  33 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = Start; i * BN < i_end; ++i) {
          //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head,
              (i < Start + SinkBlocks ? i - Start : i) * BN, 0);

          //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head,
              (i < Start + SinkBlocks ? i - Start : i) * BN, 0);
        }
      }
    }
    return;
  }
  fw::take_registers<240>();

  auto S = fw::accumulator<BM, BN, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  auto drops = fw::row_vector<128, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();

  fw::first_turn<Warps / 4>(group);
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    //  12 | let kv_head = floor(head_idx * kv_heads / heads)
    int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

    //  13 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
    int const First = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

    //  14 | let Start = max(0, First - SinkBlocks)
    int const Start = fw::max(0, First - SinkBlocks);

    //  30 | Compute 0 and get O_register
    cute::clear(O);

    //  31 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e+30f);

    //  32 | Compute 0 and get Ssum
    cute::clear(Ssum);

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

    //  29 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    if (Start * BN < i_end) {
      int i = Start;

      //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      K_ring.wait();
      fw::open_products(S);

      //  36 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      fw::close_products();
      fw::finish_products<0>(S);
      K_ring.release();

      //  37 | Compute Multiply S, Scale and get new S
      // (a constant factor: taken along by what reads the tile next)

      //  38 | Compute Softcap * tanh(S / Softcap) and get new S
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = fw::tanh(S(m, n) * (Scale * (1.f / float(Softcap)))) * float(Softcap);
        }
      }

      //  39 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len and (kv_idx > q_idx + kv_len - q_len - Window or kv_idx < SinkTokens)
      if (!((i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 < kv_len
          && (i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 <= block_idx * BM + kv_len
              - q_len
                  && ((i < Start + SinkBlocks ? i - Start : i) * BN > block_idx * BM + BM - 1
                      + kv_len - q_len - Window
                          || (i < Start + SinkBlocks ? i - Start : i) * BN + BN
                              - 1 < SinkTokens))) {
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          int const q_idx = block_idx * BM + at.row(m);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            int const kv_idx = (i < Start + SinkBlocks ? i - Start : i) * BN + at.col(n);
            S(m, n) = kv_idx < kv_len && kv_idx <= q_idx + kv_len - q_len
                && (kv_idx > q_idx + kv_len - q_len - Window || kv_idx < SinkTokens) ? S(m, n)
                    : -INFINITY;
          }
        }
      }

      //  40 | Compute Softmax S with Smax and Ssum and rescale O
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

      //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto S_operand = fw::operand<fw::fp16>(S);

      //  33 | for i = Start:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
      CUTE_NO_UNROLL
      for (i = Start + 1; i * BN < i_end
          && (i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 < kv_len
              && (i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 <= block_idx * BM + kv_len
                  - q_len
                      && ((i < Start + SinkBlocks ? i - Start : i) * BN > block_idx * BM + BM - 1
                          + kv_len - q_len - Window
                              || (i < Start + SinkBlocks ? i - Start : i) * BN + BN
                                  - 1 < SinkTokens); ++i) {
        //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        K_ring.wait();
        fw::take_turn<Warps / 4>(group);
        fw::open_products(S, O);

        //  36 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        V_ring.wait();

        //  42 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::pass_turn<Warps / 4>(group);
        fw::finish_products<1>(S);

        //  37 | Compute Multiply S, Scale and get new S
        // (a constant factor: taken along by what reads the tile next)

        //  38 | Compute Softcap * tanh(S / Softcap) and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = fw::tanh(S(m, n) * (Scale * (1.f / float(Softcap)))) * float(Softcap);
          }
        }

        //  40 | Compute Softmax S with Smax and Ssum and rescale O
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

        //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::fp16>(S);
      }
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        //  34 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        K_ring.wait();
        fw::take_turn<Warps / 4>(group);
        fw::open_products(S, O);

        //  36 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
        V_ring.wait();

        //  42 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::pass_turn<Warps / 4>(group);
        fw::finish_products<1>(S);

        //  37 | Compute Multiply S, Scale and get new S
        // (a constant factor: taken along by what reads the tile next)

        //  38 | Compute Softcap * tanh(S / Softcap) and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = fw::tanh(S(m, n) * (Scale * (1.f / float(Softcap)))) * float(Softcap);
          }
        }

        //  39 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len and (kv_idx > q_idx + kv_len - q_len - Window or kv_idx < SinkTokens)
        if (!((i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 < kv_len
            && (i < Start + SinkBlocks ? i - Start : i) * BN + BN - 1 <= block_idx * BM + kv_len
                - q_len
                    && ((i < Start + SinkBlocks ? i - Start : i) * BN > block_idx * BM + BM - 1
                        + kv_len - q_len - Window
                            || (i < Start + SinkBlocks ? i - Start : i) * BN + BN
                                - 1 < SinkTokens))) {
          CUTE_UNROLL
          for (int m = 0; m < cute::size<0>(S); ++m) {
            int const q_idx = block_idx * BM + at.row(m);
            CUTE_UNROLL
            for (int n = 0; n < cute::size<1>(S); ++n) {
              int const kv_idx = (i < Start + SinkBlocks ? i - Start : i) * BN + at.col(n);
              S(m, n) = kv_idx < kv_len && kv_idx <= q_idx + kv_len - q_len
                  && (kv_idx > q_idx + kv_len - q_len - Window || kv_idx < SinkTokens) ? S(m, n)
                      : -INFINITY;
            }
          }
        }

        //  40 | Compute Softmax S with Smax and Ssum and rescale O
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

        //  41 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::fp16>(S);
      }
      Q_ring.release();

      //  35 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = where(i < Start + SinkBlocks, i - Start, i)] from global to shared
      V_ring.wait();
      fw::open_products(O);

      //  42 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::finish_products<0>(O);
      V_ring.release();
    } else {
      Q_ring.release();
    }

    // In the loop each of the four threads of a row has had its own part of Ssum.
    CUTE_UNROLL
    for (int m = 0; m < cute::size(Ssum); ++m) {
      Ssum(m) = fw::row_sum(Ssum(m));
    }

    //  44 | Compute O_register / where(Ssum == 0, 1, Ssum) and get new O_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const row_0 = fw::reciprocal(Ssum(m) == 0.f ? 1.f : Ssum(m));
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * row_0;
      }
    }

    //  45 | Compute Smax + log(Ssum) and get LSE_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size(LSE); ++m) {
      LSE(m) = Smax(m) + fw::log(Ssum(m));
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
