#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;  // queries of a block: the grid goes by them
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 384;
constexpr int SharedBytes = 7 * 32768 + 1024;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

namespace att {

constexpr int BN = 128;            // keys of a tile
constexpr int Stages = 3;          // tiles of K, and of V, in shared memory
constexpr int TileBytes = 32768;   // 128 rows of 128 fp16
constexpr int HalfBytes = 16384;   // 128 rows of 64 fp16: a column of swizzle atoms
constexpr float ScaleLog2 = 0.08838834764831843f * 1.4426950408889634f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

// ---- barriers ------------------------------------------------------------------------------

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred P1;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\n"
      "bra LAB_WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_arrive_cp_async(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async;\n" ::: "memory");
}

// ---- copies --------------------------------------------------------------------------------

__device__ __forceinline__ void cp_async16(uint32_t dst, void const* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------

__device__ __forceinline__ void wg_arrive() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wg_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int N>
__device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

__device__ __forceinline__ void fence_regs(float (&r)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

__device__ __forceinline__ void fence_regs(uint32_t (&r)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// 128-byte swizzle; lbo and sbo in bytes.
__device__ __forceinline__ uint64_t make_desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return static_cast<uint64_t>((addr >> 4) & 0x3FFF) | (static_cast<uint64_t>(lbo >> 4) << 16) |
         (static_cast<uint64_t>(sbo >> 4) << 32) | (static_cast<uint64_t>(1) << 62);
}

#define ATT_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATT_D16(d, i) ATT_D4(d, i), ATT_D4(d, i + 4), ATT_D4(d, i + 8), ATT_D4(d, i + 12)
#define ATT_D64(d) ATT_D16(d, 0), ATT_D16(d, 16), ATT_D16(d, 32), ATT_D16(d, 48)
#define ATT_REGS                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, "                                 \
  "%8, %9, %10, %11, %12, %13, %14, %15, "                            \
  "%16, %17, %18, %19, %20, %21, %22, %23, "                          \
  "%24, %25, %26, %27, %28, %29, %30, %31, "                          \
  "%32, %33, %34, %35, %36, %37, %38, %39, "                          \
  "%40, %41, %42, %43, %44, %45, %46, %47, "                          \
  "%48, %49, %50, %51, %52, %53, %54, %55, "                          \
  "%56, %57, %58, %59, %60, %61, %62, %63}"

// d (64 x 128) = or += A (64 x 16, shared, K-major) * B (16 x 128, shared, K-major)
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int scale_d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " ATT_REGS
      ", %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : ATT_D64(d)
      : "l"(a), "l"(b), "r"(scale_d));
}

// d (64 x 128) += A (64 x 16, registers) * B (16 x 128, shared, MN-major)
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " ATT_REGS
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}\n"
      : ATT_D64(d)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(1));
}

__device__ __forceinline__ void issue_qk(float (&s)[64], uint64_t dq, uint64_t dk) {
#pragma unroll
  for (int kk = 0; kk < HeadDim / 16; ++kk) {
    uint64_t const off = static_cast<uint64_t>((kk / 4) * (HalfBytes / 16) + (kk % 4) * 2);
    wgmma_ss(s, dq + off, dk + off, kk != 0 ? 1 : 0);
  }
}

__device__ __forceinline__ void issue_pv(float (&o)[64], uint32_t (&pr)[32], uint64_t dv) {
#pragma unroll
  for (int kk = 0; kk < BN / 16; ++kk) {
    wgmma_rs(o, pr[4 * kk], pr[4 * kk + 1], pr[4 * kk + 2], pr[4 * kk + 3],
             dv + static_cast<uint64_t>(kk * 128));
  }
}

// ---- softmax -------------------------------------------------------------------------------

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
  uint32_t r;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// s: scores of a tile, becomes exp(s - max). lim: the last visible column of the row, less the
// thread's first column. m: row maxima (unscaled), l: this thread's part of the row sums.
template <bool Mask>
__device__ __forceinline__ void softmax_tile(float (&s)[64], float (&m)[2], float (&l)[2],
                                             float (&alpha)[2], int lim0, int lim1) {
  if constexpr (Mask) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      s[4 * j + 0] = (8 * j <= lim0) ? s[4 * j + 0] : neg_inf();
      s[4 * j + 1] = (8 * j + 1 <= lim0) ? s[4 * j + 1] : neg_inf();
      s[4 * j + 2] = (8 * j <= lim1) ? s[4 * j + 2] : neg_inf();
      s[4 * j + 3] = (8 * j + 1 <= lim1) ? s[4 * j + 3] : neg_inf();
    }
  }
  float a0 = s[0], b0 = s[1], a1 = s[2], b1 = s[3];
#pragma unroll
  for (int j = 1; j < 16; ++j) {
    a0 = fmaxf(a0, s[4 * j + 0]);
    b0 = fmaxf(b0, s[4 * j + 1]);
    a1 = fmaxf(a1, s[4 * j + 2]);
    b1 = fmaxf(b1, s[4 * j + 3]);
  }
  float x0 = fmaxf(fmaxf(a0, b0), m[0]);
  float x1 = fmaxf(fmaxf(a1, b1), m[1]);
  x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 1));
  x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 1));
  x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 2));
  x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 2));

  float r0 = x0, r1 = x1;
  if constexpr (Mask) {
    r0 = (x0 == neg_inf()) ? 0.0f : x0;
    r1 = (x1 == neg_inf()) ? 0.0f : x1;
  }
  float const ms0 = r0 * ScaleLog2;
  float const ms1 = r1 * ScaleLog2;
  alpha[0] = ex2(fmaf(m[0], ScaleLog2, -ms0));
  alpha[1] = ex2(fmaf(m[1], ScaleLog2, -ms1));
  m[0] = x0;
  m[1] = x1;

  float u0 = 0.0f, v0 = 0.0f, u1 = 0.0f, v1 = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    s[4 * j + 0] = ex2(fmaf(s[4 * j + 0], ScaleLog2, -ms0));
    s[4 * j + 1] = ex2(fmaf(s[4 * j + 1], ScaleLog2, -ms0));
    s[4 * j + 2] = ex2(fmaf(s[4 * j + 2], ScaleLog2, -ms1));
    s[4 * j + 3] = ex2(fmaf(s[4 * j + 3], ScaleLog2, -ms1));
    u0 += s[4 * j + 0];
    v0 += s[4 * j + 1];
    u1 += s[4 * j + 2];
    v1 += s[4 * j + 3];
  }
  l[0] = fmaf(l[0], alpha[0], u0 + v0);
  l[1] = fmaf(l[1], alpha[1], u1 + v1);
}

__device__ __forceinline__ void pack_p(uint32_t (&pr)[32], float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) pr[i] = pack_half2(s[2 * i], s[2 * i + 1]);
}

// ---- pipeline ------------------------------------------------------------------------------

struct Pipe {
  uint32_t stage;
  uint32_t phase;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ uint32_t full_k(uint32_t bars, uint32_t i) { return bars + i * 8; }
__device__ __forceinline__ uint32_t full_v(uint32_t bars, uint32_t i) { return bars + 64 + i * 8; }
__device__ __forceinline__ uint32_t empty_k(uint32_t bars, uint32_t i) { return bars + 128 + i * 8; }
__device__ __forceinline__ uint32_t empty_v(uint32_t bars, uint32_t i) { return bars + 192 + i * 8; }

// A producer thread's part of a tile: 16 bytes of every 8th row. head: the first byte of the
// head's K or V (always readable); src: this thread's bytes of the tile's first group of rows;
// rem: rows left from this thread's first row to the end.
__device__ __forceinline__ void load_tile(uint32_t dst, char const* head, char const* src,
                                          uint64_t step, int rem) {
  if (rem > 120) {
#pragma unroll 8
    for (int i = 0; i < 16; ++i) {
      cp_async16(dst + i * 1024, src, 16u);
      src += step;
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      bool const in = i * 8 < rem;
      cp_async16(dst + i * 1024, in ? src : head, in ? 16u : 0u);
      src += step;
    }
  }
}

// S of a new tile and P V of the tile before it.
template <bool Mask>
__device__ __forceinline__ void round_step(float (&o)[64], uint32_t (&pr)[32], float (&m)[2],
                                           float (&l)[2], uint64_t dq, uint64_t dk, uint64_t dv,
                                           uint32_t bars, Pipe& kp, Pipe& vp, int w,
                                           bool pass_turn, bool leader, int lim0, int lim1) {
  mbar_wait(full_k(bars, kp.stage), kp.phase);
  mbar_wait(full_v(bars, vp.stage), vp.phase);
  fence_async();
  bar_sync(1 + w, 256);  // this warpgroup's turn

  float s[64];
  float alpha[2];
  fence_regs(o);
  fence_regs(pr);
  wg_arrive();
  issue_qk(s, dq, dk + static_cast<uint64_t>(kp.stage * (TileBytes / 16)));
  wg_commit();
  wg_arrive();
  issue_pv(o, pr, dv + static_cast<uint64_t>(vp.stage * (TileBytes / 16)));
  wg_commit();
  if (pass_turn) bar_arrive(1 + (w ^ 1), 256);

  wg_wait<1>();
  fence_regs(s);
  if (leader) mbar_arrive(empty_k(bars, kp.stage));
  softmax_tile<Mask>(s, m, l, alpha, lim0, lim1);

  wg_wait<0>();
  fence_regs(o);
  fence_regs(pr);
  if (leader) mbar_arrive(empty_v(bars, vp.stage));
  pack_p(pr, s);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    o[4 * j + 0] *= alpha[0];
    o[4 * j + 1] *= alpha[0];
    o[4 * j + 2] *= alpha[1];
    o[4 * j + 3] *= alpha[1];
  }
  kp.advance();
  vp.advance();
}

}  // namespace att

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  uint32_t const smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t const sQ = smem;
  uint32_t const sK = smem + att::TileBytes;
  uint32_t const sV = smem + (1 + att::Stages) * att::TileBytes;
  uint32_t const bars = smem + (1 + 2 * att::Stages) * att::TileBytes;

  int const q_len = p.q_len;
  int const kv_len = p.kv_len;

  // Which tile of queries: the longest first over a section of heads whose K and V fit in L2.
  int m_block, head_idx, batch_idx;
  {
    unsigned const gx = gridDim.x;
    unsigned const heads = gridDim.y;
    unsigned const all = heads * gridDim.z;
    unsigned const lin = blockIdx.x + gx * (blockIdx.y + heads * blockIdx.z);
    unsigned const kv_heads = static_cast<unsigned>(p.kv_heads);
    unsigned group = heads / kv_heads;
    if (group < 1) group = 1;
    // K and V of a head have kv_len * 512 bytes; a section has about 16 MB.
    unsigned kv_in_section = 32768u / static_cast<unsigned>(kv_len > 0 ? kv_len : 1);
    if (kv_in_section < 1) kv_in_section = 1;
    unsigned section = kv_in_section * group;
    if (section > all) section = all;
    unsigned const per = section * gx;
    unsigned const sec = lin / per;
    unsigned const rest = lin - sec * per;
    unsigned const left = all - sec * section;
    unsigned const count = left < section ? left : section;
    unsigned const mb = rest / count;
    unsigned const hb = sec * section + (rest - mb * count);
    m_block = static_cast<int>(gx - 1 - mb);
    batch_idx = static_cast<int>(hb / heads);
    head_idx = static_cast<int>(hb - static_cast<unsigned>(batch_idx) * heads);
  }
  int const kv_head =
      static_cast<int>(static_cast<int64_t>(head_idx) * p.kv_heads / p.heads);

  int const m0 = m_block * BM;
  int const shift = kv_len - q_len;  // position of query 0
  int const last_q = (m0 + BM < q_len ? m0 + BM : q_len) - 1;
  int const keys = last_q + shift + 1;  // keys that the block's last query sees
  int const n_blocks = keys > 0 ? (keys + att::BN - 1) / att::BN : 0;

  int const wg = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  int const t = threadIdx.x & 127;

  if (threadIdx.x == 0) {
    for (int i = 0; i < att::Stages; ++i) {
      att::mbar_init(att::full_k(bars, i), 128);
      att::mbar_init(att::full_v(bars, i), 128);
      att::mbar_init(att::empty_k(bars, i), 8);
      att::mbar_init(att::empty_v(bars, i), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    att::fence_async();
  }
  __syncthreads();

  if (wg == 0) {
    // ---- producer ----
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
    if (n_blocks > 0) {
      int const r = t >> 4;
      int const c = t & 15;
      uint32_t const dst =
          static_cast<uint32_t>((c >> 3) * att::HalfBytes + r * 128 + (((c & 7) ^ r) << 4));
      char const* const k_head = reinterpret_cast<char const*>(
          p.K.data + static_cast<uint64_t>(batch_idx) * p.K.stride[0] +
          static_cast<uint64_t>(kv_head) * p.K.stride[1]);
      char const* const v_head = reinterpret_cast<char const*>(
          p.V.data + static_cast<uint64_t>(batch_idx) * p.V.stride[0] +
          static_cast<uint64_t>(kv_head) * p.V.stride[1]);
      uint64_t const k_row = p.K.stride[2] * 2;  // bytes
      uint64_t const v_row = p.V.stride[2] * 2;
      uint32_t k_stage = 0, k_phase = 1, v_stage = 0, v_phase = 1;

      // K of the last tile, then K of a tile and V of the tile after it, then V of tile 0.
      for (int n = n_blocks - 1; n >= -1; --n) {
        if (n >= 0) {
          att::mbar_wait(att::empty_k(bars, k_stage), k_phase);
          int const row = n * att::BN + r;
          att::load_tile(sK + k_stage * att::TileBytes + dst, k_head,
                         k_head + static_cast<uint64_t>(row) * k_row + c * 16, k_row * 8,
                         kv_len - row);
          att::mbar_arrive_cp_async(att::full_k(bars, k_stage));
          if (++k_stage == att::Stages) {
            k_stage = 0;
            k_phase ^= 1;
          }
        }
        if (n < n_blocks - 1) {
          att::mbar_wait(att::empty_v(bars, v_stage), v_phase);
          int const row = (n + 1) * att::BN + r;
          att::load_tile(sV + v_stage * att::TileBytes + dst, v_head,
                         v_head + static_cast<uint64_t>(row) * v_row + c * 16, v_row * 8,
                         kv_len - row);
          att::mbar_arrive_cp_async(att::full_v(bars, v_stage));
          if (++v_stage == att::Stages) {
            v_stage = 0;
            v_phase ^= 1;
          }
        }
      }
      att::cp_async_wait_all();
    }
  } else {
    // ---- consumers ----
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
    int const w = wg - 1;
    int const lane = t & 31;
    int const warp = t >> 5;
    bool const leader = lane == 0;

    // This warpgroup's 64 rows of Q.
    {
      int const r = t >> 4;
      int const c = t & 15;
      char const* const q_head = reinterpret_cast<char const*>(
          p.Q.data + static_cast<uint64_t>(batch_idx) * p.Q.stride[0] +
          static_cast<uint64_t>(head_idx) * p.Q.stride[1]);
      uint64_t const q_row = p.Q.stride[2] * 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const row = w * 64 + r + 8 * i;
        bool const in = m0 + row < q_len;
        char const* const src =
            in ? q_head + static_cast<uint64_t>(m0 + row) * q_row + c * 16 : q_head;
        att::cp_async16(
            sQ + static_cast<uint32_t>((c >> 3) * att::HalfBytes + row * 128 + (((c & 7) ^ r) << 4)),
            src, in ? 16u : 0u);
      }
      att::cp_async_wait_all();
      att::fence_async();
      att::bar_sync(3 + w, 128);
    }

    float o[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    float m[2] = {att::neg_inf(), att::neg_inf()};
    float l[2] = {0.0f, 0.0f};

    int const g = lane >> 2;
    int const row0 = m0 + w * 64 + warp * 16 + g;  // and row0 + 8

    if (n_blocks > 0) {
      uint32_t pr[32];
      uint64_t const dq = att::make_desc(sQ + w * 8192, 16, 1024);
      uint64_t const dk = att::make_desc(sK, 16, 1024);
      uint64_t const dv = att::make_desc(sV, att::HalfBytes, 1024);
      att::Pipe kp{0, 0};
      att::Pipe vp{0, 0};

      // lim: last visible column less the thread's first one, for tile 0.
      int const lim = row0 + shift - 2 * (lane & 3);
      int const first_pos = m0 + w * 64 + shift;  // least position of the warpgroup

      // The first turn is warpgroup 0's.
      if (w == 1 && n_blocks > 1) att::bar_arrive(1, 256);

      int n = n_blocks - 1;
      {
        float s[64];
        float alpha[2];
        att::mbar_wait(att::full_k(bars, kp.stage), kp.phase);
        att::fence_async();
        att::wg_arrive();
        att::issue_qk(s, dq, dk);
        att::wg_commit();
        att::wg_wait<0>();
        att::fence_regs(s);
        if (leader) att::mbar_arrive(att::empty_k(bars, kp.stage));
        att::softmax_tile<true>(s, m, l, alpha, lim - n * att::BN, lim + 8 - n * att::BN);
        att::pack_p(pr, s);
        kp.advance();
      }
      --n;
      for (; n >= 0 && n * att::BN + att::BN - 1 > first_pos; --n) {
        att::round_step<true>(o, pr, m, l, dq, dk, dv, bars, kp, vp, w, w == 0 || n > 0, leader,
                              lim - n * att::BN, lim + 8 - n * att::BN);
      }
      for (; n >= 0; --n) {
        att::round_step<false>(o, pr, m, l, dq, dk, dv, bars, kp, vp, w, w == 0 || n > 0, leader,
                               0, 0);
      }

      att::mbar_wait(att::full_v(bars, vp.stage), vp.phase);
      att::fence_async();
      att::fence_regs(o);
      att::fence_regs(pr);
      att::wg_arrive();
      att::issue_pv(o, pr, dv + static_cast<uint64_t>(vp.stage * (att::TileBytes / 16)));
      att::wg_commit();
      att::wg_wait<0>();
      att::fence_regs(o);
      att::fence_regs(pr);
    }

    // ---- the end: divide, store ----
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
    }
    bool const none0 = m[0] == att::neg_inf();
    bool const none1 = m[1] == att::neg_inf();

    if (p.LSE.data != nullptr && (lane & 3) == 0) {
      float* const lse = p.LSE.data + static_cast<uint64_t>(batch_idx) * p.LSE.stride[0] +
                         static_cast<uint64_t>(head_idx) * p.LSE.stride[1];
      if (row0 < q_len) {
        lse[static_cast<uint64_t>(row0) * p.LSE.stride[2]] =
            none0 ? att::neg_inf() : fmaf(m[0], Scale, logf(l[0]));
      }
      if (row0 + 8 < q_len) {
        lse[static_cast<uint64_t>(row0 + 8) * p.LSE.stride[2]] =
            none1 ? att::neg_inf() : fmaf(m[1], Scale, logf(l[1]));
      }
    }

    if (p.O.data != nullptr) {
      float const inv0 = none0 ? 0.0f : 1.0f / l[0];
      float const inv1 = none1 ? 0.0f : 1.0f / l[1];
      // Through this warp's 16 rows of Q's place; the warpgroup has no more use for Q.
      att::bar_sync(3 + w, 128);
      uint32_t const base = sQ + static_cast<uint32_t>(w * 8192 + warp * 2048);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        uint32_t const addr =
            base + static_cast<uint32_t>((j >> 3) * att::HalfBytes + g * 128 +
                                         (((j & 7) ^ g) << 4) + (lane & 3) * 4);
        uint32_t const x0 = att::pack_half2(o[4 * j + 0] * inv0, o[4 * j + 1] * inv0);
        uint32_t const x1 = att::pack_half2(o[4 * j + 2] * inv1, o[4 * j + 3] * inv1);
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(addr), "r"(x0) : "memory");
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(addr + 1024), "r"(x1) : "memory");
      }
      __syncwarp();
      char* const o_head = reinterpret_cast<char*>(
          p.O.data + static_cast<uint64_t>(batch_idx) * p.O.stride[0] +
          static_cast<uint64_t>(head_idx) * p.O.stride[1]);
      uint64_t const o_row = p.O.stride[2] * 2;
      int const c = lane & 15;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const rr = i * 2 + (lane >> 4);
        uint32_t const addr =
            base + static_cast<uint32_t>((c >> 3) * att::HalfBytes + rr * 128 +
                                         (((c & 7) ^ (rr & 7)) << 4));
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(addr)
                     : "memory");
        int const q = m0 + w * 64 + warp * 16 + rr;
        if (q < q_len) {
          *reinterpret_cast<uint4*>(o_head + static_cast<uint64_t>(q) * o_row + c * 16) = v;
        }
      }
    }
  }
}
