#include <fw/hopper.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int Warps = 8;
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 32 * Warps + 128;  // a warpgroup more, which loads
constexpr int SharedBytes = 214016;

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

constexpr int Groups = Warps / 4;  // warpgroups that multiply
constexpr float ScaleLog2 = Scale * 1.4426950408889634f;  // from scores to exponents of 2

template <bool Value>
struct Flag {
  static constexpr bool value = Value;
};

//  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
template <class Tile>
__device__ __forceinline__ void mask(Tile& S, fw::Place<Warps> const& at, int block_idx, int i,
    int q_len, int kv_len) {
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

//  32 | Compute Multiply S, Scale and get new S
//  34 | Compute Softmax S with Smax and Ssum and rescale O_register
// All but the rescaling of O, for which `drop` is left. Smax counts in exponents of 2; Ssum is in four parts.
// `quick`: no row of this warp has a negative Smax.
template <class Tile, class Vector>
__device__ __forceinline__ void weigh(Tile& S, Vector& Smax, Vector& Ssum, Vector& drop,
    int quick) {
  auto most = fw::row_vector<BM, Warps>();
  if (quick) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      most(m) = fw::most_as_integers(S, m);
    }
  } else {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<0>(S); ++m) {
      float x = S(m, 0);
      CUTE_UNROLL
      for (int n = 1; n < cute::size<1>(S); ++n) {
        x = fw::max(x, S(m, n));
      }
      most(m) = x;
    }
  }
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(S); ++m) {
    float const now = fw::max(Smax(m), fw::row_max(most(m)) * ScaleLog2);
    drop(m) = fw::exp2(Smax(m) - now);
    Smax(m) = now;
    float even = 0.0f, odd = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(S); n += 2) {
      S(m, n) = fw::exp2(S(m, n) * ScaleLog2 - now);
      S(m, n + 1) = fw::exp2(S(m, n + 1) * ScaleLog2 - now);
      even += S(m, n);
      odd += S(m, n + 1);
    }
    Ssum(m) = Ssum(m) * drop(m) + (even + odd);
  }
}

// What the rows of a tile come to: the factor of O, and LSE.
template <class Vector>
__device__ __forceinline__ void settle(Vector& Smax, Vector& Ssum, Vector& factor, Vector& LSE) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(Ssum); ++m) {
    float const sum = fw::row_sum(Ssum(m));

    //  38 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
    factor(m) = sum > 0.0f ? fw::reciprocal(sum) : 0.0f;

    //  39 | Compute Smax + log(Ssum) and get LSE_register
    LSE(m) = sum > 0.0f ? Smax(m) * fw::ln_2 + fw::log(sum) : -INFINITY;
  }
}

// Scales O and writes the results of a tile.
template <class Tile, class Vector>
__device__ __forceinline__ void put(Params const& p, unsigned char* room, Tile& O, Vector& factor,
    Vector& LSE, int batch_idx, int head_idx, int block_idx) {
  //  38 | Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
  CUTE_UNROLL
  for (int m = 0; m < cute::size<0>(O); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<1>(O); ++n) {
      O(m, n) *= factor(m);
    }
  }

  //  40 | Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.O.data != nullptr) {
    fw::store_through<Warps>(room, p.O.tile(batch_idx, head_idx, block_idx * BM), O,
        p.q_len - block_idx * BM);
  }

  //  41 | Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
  if (p.LSE.data != nullptr) {
    fw::store_rows<Warps>(p.LSE.line(batch_idx, head_idx, block_idx * BM), LSE,
        p.q_len - block_idx * BM);
  }
}

// The results of a tile of queries of which none sees a key, by all warps that compute.
__device__ __forceinline__ void put_nothing(Params const& p, int batch_idx, int head_idx,
    int block_idx) {
  constexpr int Chunks16 = HeadDim / 8;  // of 16 bytes in a row
  int const valid = fw::min(BM, p.q_len - block_idx * BM);
  if (p.O.data != nullptr) {
    auto const tile = p.O.tile(batch_idx, head_idx, block_idx * BM);
    CUTE_NO_UNROLL
    for (int n = threadIdx.x; n < valid * Chunks16; n += 32 * Warps) {
      *reinterpret_cast<uint4*>(tile.at(n / Chunks16, n % Chunks16 * 8)) = make_uint4(0, 0, 0, 0);
    }
  }
  if (p.LSE.data != nullptr) {
    CUTE_NO_UNROLL
    for (int n = threadIdx.x; n < valid; n += 32 * Warps) {
      *p.LSE.at(batch_idx, head_idx, block_idx * BM + n) = -INFINITY;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  int const batch = p.batch, heads = p.heads, kv_heads = p.kv_heads, q_len = p.q_len,
      kv_len = p.kv_len;
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const shared = fw::pinned(memory);
  // Q has two stages: that of the next tile comes while this one is still being read.
  auto const Q_shared = fw::shared_tile<fw::fp16, BM, HeadDim>(shared);
  fw::Ring<2> Q_ring(shared + 196608);
  //  14 | Allocate K in shared (BN, HeadDim) as fp16 with stages 2
  auto const K_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 65536);
  fw::Ring<2> K_ring(shared + 196640);
  //  15 | Allocate V in shared (BN, HeadDim) as fp16 with stages 2
  auto const V_shared = fw::shared_tile<fw::fp16, BN, HeadDim>(shared + 131072);
  fw::Ring<2> V_ring(shared + 196672);
  unsigned char* const room = shared + 197632;  // for O on its way out

  if (threadIdx.x == 0) {
    Q_ring.init(Warps);
    K_ring.init(Warps);
    V_ring.init(Warps);
  }
  fw::rings_ready();

  if (threadIdx.x >= 32 * Warps) {
    fw::give_registers<40>();
    if (fw::is_loader<Warps>()) {
      // The last V of a tile of queries is asked for behind the first K of the next one: they are used in that order.
      int V_batch = 0, V_head = 0, V_row = -1;

      //   7 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
      for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
        int const block_idx = walk.x();
        int const head_idx = walk.y();
        int const batch_idx = walk.z();

        int const i_end = fw::min(kv_len,
            (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
        if (i_end <= 0) {
          continue;  // no query of this tile sees a key: nothing is loaded
        }

        //  22 | let kv_head = floor(head_idx * kv_heads / heads)
        int const kv_head = fw::floor_div(head_idx * kv_heads, heads);

        //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
        fw::fetch(Q_shared, Q_ring, p.Q_map, batch_idx, head_idx, block_idx * BM, 0);

        //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, 0, 0);

        //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
        if (V_row >= 0) {
          fw::fetch(V_shared, V_ring, p.V_map, V_batch, V_head, V_row, 0);
        }

        //  28 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
        int i = 1;
        CUTE_NO_UNROLL
        for (; i * BN < i_end; ++i) {
          //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(K_shared, K_ring, p.K_map, batch_idx, kv_head, i * BN, 0);

          //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
          fw::fetch(V_shared, V_ring, p.V_map, batch_idx, kv_head, (i - 1) * BN, 0);
        }
        V_batch = batch_idx;
        V_head = kv_head;
        V_row = (i - 1) * BN;
      }
      if (V_row >= 0) {
        fw::fetch(V_shared, V_ring, p.V_map, V_batch, V_head, V_row, 0);
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
  fw::Place<Warps> const at;
  int const group = fw::warpgroup();
  fw::first_turn<Groups>(group);

  // The tile of queries before this one, if there was one: S holds its last weights, which have still to be multiplied
  // with V, and O, Smax and Ssum are its.
  int old_block = -1, old_head = 0, old_batch = 0;

  //   7 | grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
  for (fw::Walk<2> walk(fw::ceil_div(q_len, 128), heads, batch); walk.more(); walk.next()) {
    int const block_idx = walk.x();
    int const head_idx = walk.y();
    int const batch_idx = walk.z();

    int const i_end = fw::min(kv_len,
        (block_idx + 1) * BM + kv_len - q_len);  // BN times the loop's end
    if (i_end <= 0) {
      put_nothing(p, batch_idx, head_idx, block_idx);
      continue;
    }
    // So many steps at the beginning need no mask.
    int const full = fw::max(0, fw::floor_div(block_idx * BM + kv_len - q_len + 1, BN));

    // One step but the first: S holds the weights of the step before, which have still to be multiplied with V.
    auto const step = [&](int i, auto masked) {
      //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();

      //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();

      fw::take_turn<Groups>(group);
      fw::open_products(S, O);

      //  31 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared.stage(Q_ring.stage),
          K_shared.stage(K_ring.stage));
      fw::close_products();

      //  36 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::pass_turn<Groups>(group);

      int const quick = fw::none_negative(Smax);
      fw::finish_products<1>(S);

      //  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if constexpr (decltype(masked)::value) {
        mask(S, at, block_idx, i, q_len, kv_len);
      }

      //  32 | Compute Multiply S, Scale and get new S
      //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
      auto drop = fw::row_vector<BM, Warps>();
      weigh(S, Smax, Ssum, drop, quick);
      K_ring.release(Ssum(0) + Ssum(1));

      fw::finish_products<0>(O);
      V_ring.release();
      CUTE_UNROLL
      for (int m = 0; m < cute::size<0>(O); ++m) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(O); ++n) {
          O(m, n) *= drop(m);
        }
      }
    };

    // The first step of a tile that follows another: its scores are multiplied together with the last weights of the
    // other one, which is written afterwards, while the other warpgroup multiplies.
    auto const cross = [&](auto masked) {
      //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      auto const P = fw::operand<fw::fp16>(S);

      //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
      Q_ring.wait();

      //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();

      //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      V_ring.wait();

      fw::take_turn<Groups>(group);
      fw::open_products(S, O);

      //  31 | Compute GEMM Q_shared, K_shared.T and get S
      fw::start_product<true, true>(group, S, Q_shared.stage(Q_ring.stage),
          K_shared.stage(K_ring.stage));
      fw::close_products();

      //  36 | Compute GEMM S, V_shared and accumulate O_register
      fw::start_product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
      fw::close_products();
      fw::pass_turn<Groups>(group);

      //  19 | Allocate LSE in register (BM) as fp32
      auto LSE = fw::row_vector<BM, Warps>();
      auto factor = fw::row_vector<BM, Warps>();
      settle(Smax, Ssum, factor, LSE);

      //  25 | Compute -1e30 and get Smax
      cute::fill(Smax, -1e30f);

      //  26 | Compute 0 and get Ssum
      cute::clear(Ssum);

      fw::finish_products<1>(S);

      //  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if constexpr (decltype(masked)::value) {
        mask(S, at, block_idx, 0, q_len, kv_len);
      }

      //  32 | Compute Multiply S, Scale and get new S
      //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
      auto drop = fw::row_vector<BM, Warps>();
      weigh(S, Smax, Ssum, drop, 0);  // O of this tile is 0 still: nothing to rescale
      K_ring.release(Ssum(0) + Ssum(1));

      fw::finish_products<0>(O);
      V_ring.release();
      put(p, room, O, factor, LSE, old_batch, old_head, old_block);

      //  27 | Compute 0 and get O_register
      cute::clear(O);
    };

    //  28 | for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
    if (old_block < 0) {
      // The first tile of all.
      //  25 | Compute -1e30 and get Smax
      cute::fill(Smax, -1e30f);

      //  26 | Compute 0 and get Ssum
      cute::clear(Ssum);

      //  27 | Compute 0 and get O_register
      cute::clear(O);

      //  24 | Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
      Q_ring.wait();

      //  29 | Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
      K_ring.wait();

      //  31 | Compute GEMM Q_shared, K_shared.T and get S
      fw::product<true, true>(group, S, Q_shared.stage(Q_ring.stage),
          K_shared.stage(K_ring.stage));
      K_ring.release();

      //  33 | Compute Mask S where kv_idx < kv_len and kv_idx <= q_idx + kv_len - q_len
      if (full < 1) {
        mask(S, at, block_idx, 0, q_len, kv_len);
      }

      //  32 | Compute Multiply S, Scale and get new S
      //  34 | Compute Softmax S with Smax and Ssum and rescale O_register
      auto drop = fw::row_vector<BM, Warps>();
      weigh(S, Smax, Ssum, drop, 0);  // O is 0 still: nothing to rescale
    } else if (full < 1) {
      cross(Flag<true>{});
    } else {
      cross(Flag<false>{});
    }

    int i = 1;
    CUTE_NO_UNROLL
    for (; i < full; ++i) {
      step(i, Flag<false>{});
    }
    CUTE_NO_UNROLL
    for (; i * BN < i_end; ++i) {
      step(i, Flag<true>{});
    }
    Q_ring.release();

    old_block = block_idx;
    old_head = head_idx;
    old_batch = batch_idx;
  }

  // The last tile of all.
  if (old_block >= 0) {
    //  35 | Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    auto const P = fw::operand<fw::fp16>(S);

    //  30 | Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
    V_ring.wait();

    //  36 | Compute GEMM S, V_shared and accumulate O_register
    fw::product<false, false>(group, O, P, V_shared.stage(V_ring.stage));
    V_ring.release();

    //  19 | Allocate LSE in register (BM) as fp32
    auto LSE = fw::row_vector<BM, Warps>();
    auto factor = fw::row_vector<BM, Warps>();
    settle(Smax, Ssum, factor, LSE);
    put(p, room, O, factor, LSE, old_batch, old_head, old_block);
  }
}
