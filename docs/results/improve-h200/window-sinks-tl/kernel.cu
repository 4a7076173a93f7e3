// Attention for NVIDIA H200 SXM 141 GB (sm_90a), translated by Flashwright.
// Each block stands under the line of TL that it implements: `//  12 | Copy ...`.
#include <fw/hopper.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
constexpr int Softcap = 30;
constexpr float CapScale = 0.0029462782549439476f;  // Scale / Softcap
constexpr int Window = 512;
constexpr int SinkTokens = 2;
constexpr int SinkKeys = 16;
constexpr int Threads = 32 * Warps + 128;  // a warpgroup more, which loads

struct Params {
  fw::Map K_map;  // tiles of BN x HeadDim
  fw::Map V_map;  // tiles of BN x HeadDim
  fw::Map Q_map;  // tiles of BM x HeadDim
  fw::Map KSink_map;  // tiles of SinkKeys x HeadDim
  fw::Map VSink_map;  // tiles of SinkKeys x HeadDim
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
  fw::Ring<2> K_ring(shared + 172032);
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 65536);
  fw::Ring<2> V_ring(shared + 172064);
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared + 131072);
  fw::Ring<1> Q_ring(shared + 172096);
  auto const KSink_shared = fw::shared_tile<fw::fp16, SinkKeys, HeadDim>(shared + 163840);
  fw::Ring<1> KSink_ring(shared + 172112);
  auto const VSink_shared = fw::shared_tile<fw::fp16, SinkKeys, HeadDim>(shared + 167936);
  fw::Ring<1> VSink_ring(shared + 172128);

  if (threadIdx.x == 0) {
    K_ring.init(Warps);
    V_ring.init(Warps);
    Q_ring.init(Warps);
    KSink_ring.init(Warps);
    VSink_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<24>();
    if (fw::is_loader<Warps>()) {
      for (fw::Walk<0> walk(heads, fw::ceil_div(q_len, 128), batch); walk.more(); walk.next()) {
        int const head_idx = walk.x();
        int const block_idx = walk.y();
        int const batch_idx = walk.z();

        //  14 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  15 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
        int const First = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1),
            BN);

        //  31 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        //  32 | Copy K (SinkKeys, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = 0] from global to shared and get KSink
        fw::fetch(KSink_shared, KSink_ring, p.KSink_map, batch_idx, kv_head, 0, 0);

        //  33 | Copy V (SinkKeys, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = 0] from global to shared and get VSink
        fw::fetch(VSink_shared, VSink_ring, p.VSink_map, batch_idx, kv_head, 0, 0);

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end

        //  47 | for i = First:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        CUTE_NO_UNROLL
        for (int i = First; i * BN < i_end; ++i) {
          //  48 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, i * BN, 0);

          //  49 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, i * BN, 0);
        }
      }
    }
    return;
  }
  fw::take_registers<240>();

  auto T = fw::accumulator<BM, SinkKeys, Warps>();
  auto S = fw::accumulator<BM, BN, Warps>();
  auto O = fw::accumulator<BM, HeadDim, Warps>();
  auto Smax = fw::row_vector<BM, Warps>();
  auto Ssum = fw::row_vector<BM, Warps>();
  auto LSE = fw::row_vector<BM, Warps>();
  auto drops = fw::row_vector<128, Warps>();
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();

  fw::first_turn<Warps / 4>(group);
  for (fw::Walk<0> walk(heads, fw::ceil_div(q_len, 128), batch); walk.more(); walk.next()) {
    int const head_idx = walk.x();
    int const block_idx = walk.y();
    int const batch_idx = walk.z();

    //  14 | let kv_head = floor(head_idx * kv_heads / heads)
    int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

    //  15 | let First = floor(max(0, block_idx * BM + kv_len - q_len - Window + 1) / BN)
    int const First = fw::floor_div(fw::max(0, block_idx * BM + kv_len - q_len - Window + 1), BN);

    //  34 | Compute 0 and get O_register
    cute::clear(O);

    //  35 | Compute -1e30 and get Smax
    cute::fill(Smax, -1e+30f);

    //  36 | Compute 0 and get Ssum
    cute::clear(Ssum);

    //  31 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
    Q_ring.wait();

    //  32 | Copy K (SinkKeys, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = 0] from global to shared and get KSink
    KSink_ring.wait();

    //  39 | Compute GEMM Q_shared, KSink_shared.T and get T
    fw::product<true, true>(group, T, Q_shared, KSink_shared);
    KSink_ring.release();

    //  40 | Compute Softcap * tanh(T * CapScale) and get new T
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(T); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(T); ++n) {
        T(m, n) = fw::tanh(T(m, n) * CapScale) * float(Softcap);
      }
    }

    //  41 | Compute Mask T where kv_idx < kv_len and kv_idx < SinkTokens and kv_idx <= q_idx + kv_len - q_len - Window
    if (!(SinkKeys - 1 < kv_len && SinkKeys - 1 < SinkTokens
        && SinkKeys - 1 <= block_idx * BM + kv_len - q_len - Window)) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(T); ++m) {
        int const q_idx = block_idx * BM + at.row(m);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(T); ++n) {
          int const kv_idx = at.col(n);
          T(m, n) = kv_idx < kv_len && kv_idx < SinkTokens
              && kv_idx <= q_idx + kv_len - q_len - Window ? T(m, n) : -INFINITY;
        }
      }
    }

    //  42 | Compute Softmax T with Smax and Ssum and rescale O
    CUTE_UNROLL
    for (int m = 0; m < cute::size(Smax); ++m) {
      float most = T(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(T); ++n) {
        most = fw::max(most, T(m, n));
      }
      most = fw::row_max(most);
      float const now = fw::max(Smax(m), most);
      float const drop = fw::exp2((Smax(m) - now) * fw::log2_e);
      Smax(m) = now;
      float const row_0 = now * fw::log2_e;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(T); ++n) {
        T(m, n) = fw::exp2(T(m, n) * fw::log2_e - row_0);
      }
      float sum = 0.f;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(T); ++n) {
        sum += T(m, n);
      }
      sum = fw::row_sum(sum);
      Ssum(m) = Ssum(m) * drop + sum;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * drop;
      }
    }

    //  43 | Reshape T from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto T_operand = fw::operand<fw::fp16>(T);

    //  33 | Copy V (SinkKeys, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = 0] from global to shared and get VSink
    VSink_ring.wait();

    //  44 | Compute GEMM T, VSink_shared and accumulate O_register
    fw::product<false, false>(group, O, T_operand, VSink_shared);
    VSink_ring.release();

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    if (First * BN < i_end) {
      int const i_own = fw::max(First + 1,
          group * 64 < q_len - block_idx * BM
              ? fw::ceil_div(block_idx * BM + group * 64 + 64 - 1 + kv_len - q_len + 1, BN) : 0);
      int i = First;

      //  48 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();
      fw::open_products(S);

      //  50 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
      fw::close_products();
      fw::finish_products<0>(S);
      K_ring.release();

      //  51 | Compute Softcap * tanh(S * CapScale) and get new S
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(S); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          S(m, n) = fw::tanh(S(m, n) * CapScale) * float(Softcap);
        }
      }

      //  52 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len and kv_idx > q_idx + kv_len - q_len - Window
      if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len
          && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window)) {
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          int const q_idx = block_idx * BM + at.row(m);
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            int const kv_idx = i * BN + at.col(n);
            S(m, n) = kv_idx <= q_idx + kv_len - q_len && kv_idx > q_idx + kv_len - q_len - Window
                ? S(m, n) : -INFINITY;
          }
        }
      }

      //  53 | Compute Softmax S with Smax and Ssum and rescale O
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
        float sum = 0.f;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(S); ++n) {
          sum += S(m, n);
        }
        sum = fw::row_sum(sum);
        Ssum(m) = Ssum(m) * drops(m) + sum;
      }

      //  54 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto S_operand = fw::operand<fw::fp16>(S);

      //  47 | for i = First:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
      CUTE_NO_UNROLL
      for (i = First + 1; i * BN < i_end && i < i_own
          && i * BN + BN - 1 <= block_idx * BM + kv_len - q_len
              && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window; ++i) {
        //  48 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        K_ring.wait();
        fw::take_turn<Warps / 4>(group);
        fw::open_products(S, O);

        //  50 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  49 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        V_ring.wait();

        //  55 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::pass_turn<Warps / 4>(group);
        fw::finish_products<1>(S);

        //  51 | Compute Softcap * tanh(S * CapScale) and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = fw::tanh(S(m, n) * CapScale) * float(Softcap);
          }
        }

        //  53 | Compute Softmax S with Smax and Ssum and rescale O
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
          float sum = 0.f;
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            sum += S(m, n);
          }
          sum = fw::row_sum(sum);
          Ssum(m) = Ssum(m) * drops(m) + sum;
        }

        //  54 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::fp16>(S);
      }
      CUTE_NO_UNROLL
      for (; i * BN < i_end && i < i_own; ++i) {
        //  48 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        K_ring.wait();
        fw::take_turn<Warps / 4>(group);
        fw::open_products(S, O);

        //  50 | Compute GEMM Q_shared, K_shared.T and get S
        fw::start_product<true, true>(group, S, Q_shared, K_shared.stage(K_ring.stage));
        fw::close_products();

        //  49 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        V_ring.wait();

        //  55 | Compute GEMM S, V_shared and accumulate O_register
        fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
        fw::close_products();
        fw::pass_turn<Warps / 4>(group);
        fw::finish_products<1>(S);

        //  51 | Compute Softcap * tanh(S * CapScale) and get new S
        CUTE_UNROLL
        for (int m = 0; m < cute::size<0>(S); ++m) {
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            S(m, n) = fw::tanh(S(m, n) * CapScale) * float(Softcap);
          }
        }

        //  52 | Compute Mask S where kv_idx <= q_idx + kv_len - q_len and kv_idx > q_idx + kv_len - q_len - Window
        if (!(i * BN + BN - 1 <= block_idx * BM + kv_len - q_len
            && i * BN > block_idx * BM + BM - 1 + kv_len - q_len - Window)) {
          CUTE_UNROLL
          for (int m = 0; m < cute::size<0>(S); ++m) {
            int const q_idx = block_idx * BM + at.row(m);
            CUTE_UNROLL
            for (int n = 0; n < cute::size<1>(S); ++n) {
              int const kv_idx = i * BN + at.col(n);
              S(m, n) = kv_idx <= q_idx + kv_len - q_len
                  && kv_idx > q_idx + kv_len - q_len - Window ? S(m, n) : -INFINITY;
            }
          }
        }

        //  53 | Compute Softmax S with Smax and Ssum and rescale O
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
          float sum = 0.f;
          CUTE_UNROLL
          for (int n = 0; n < cute::size<1>(S); ++n) {
            sum += S(m, n);
          }
          sum = fw::row_sum(sum);
          Ssum(m) = Ssum(m) * drops(m) + sum;
        }

        //  54 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        S_operand = fw::operand<fw::fp16>(S);
      }
      Q_ring.release();

      //  49 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();
      fw::open_products(O);

      //  55 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, S_operand, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::finish_products<0>(O);
      V_ring.release();
      CUTE_NO_UNROLL
      for (; i * BN < i_end; ++i) {
        //  48 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        K_ring.wait();
        fw::take_turn<Warps / 4>(group);
        fw::pass_turn<Warps / 4>(group);
        K_ring.release();

        //  49 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        V_ring.wait();
        V_ring.release();
      }
    } else {
      Q_ring.release();
    }

    //  57 | Compute O_register / where(Ssum == 0, 1, Ssum) and get new O_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(O); ++m) {
      float const row_0 = fw::reciprocal(Ssum(m) == 0.f ? 1.f : Ssum(m));
      CUTE_UNROLL
      for (int n = 0; n < cute::size<1>(O); ++n) {
        O(m, n) = O(m, n) * row_0;
      }
    }

    //  58 | Compute Smax + log(Ssum) and get LSE_register
    CUTE_UNROLL
    for (int m = 0; m < cute::size(LSE); ++m) {
      LSE(m) = Smax(m) + fw::log(Ssum(m));
    }

    //  59 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.O.data != nullptr) {
      fw::store_through<Warps>(shared + 173056, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
          q_len - block_idx * BM);
    }

    //  60 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
    if (p.LSE.data != nullptr) {
      fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
          q_len - block_idx * BM);
    }
  }
}
