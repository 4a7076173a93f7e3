#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;  // queries of a block: the grid goes by them
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 384;
constexpr int SharedBytes = 7 * 32768 + 256;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

namespace mha {

constexpr int BN = 128;            // keys of a tile
constexpr int Stages = 3;          // tiles of K and of V in shared memory
constexpr int TileBytes = 32768;   // 128 rows x 128 columns of fp16
constexpr int HalfBytes = 16384;   // 128 rows x 64 columns
constexpr float ScaleLog2 = 0.08838834764831843f * 1.4426950408889634f;
constexpr float Ln2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float((int)0xff800000u); }

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_half(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// ---- barriers

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
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
  asm volatile("{\n.reg .b64 st;\nmbarrier.arrive.shared::cta.b64 st, [%0];\n}\n" ::"r"(bar)
               : "memory");
}

__device__ __forceinline__ void cp_async_mbar_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- copies

__device__ __forceinline__ void cp_async16(uint32_t dst, void const* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
               : "memory");
}

__device__ __forceinline__ void cp_async16_zfill(uint32_t dst, void const* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Rows first_row + 8 * i (i < Rows8) of one 16-byte column. src: this column in row 0.
// Rows from limit on become 0. dst: where the first of the rows goes (rows are 128 bytes apart).
template <int Rows8>
__device__ __forceinline__ void load_rows(uint32_t dst, char const* src, int64_t stride_bytes,
                                          int first_row, int limit, bool whole) {
  char const* g = src + int64_t(first_row) * stride_bytes;
  int64_t const inc = stride_bytes * 8;
  if (whole) {
#pragma unroll
    for (int i = 0; i < Rows8; ++i) {
      cp_async16(dst + i * 1024, g);
      g += inc;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Rows8; ++i) {
      bool const ok = first_row + 8 * i < limit;
      cp_async16_zfill(dst + i * 1024, ok ? g : src, ok ? 16 : 0);
      g += inc;
    }
  }
}

// ---- wgmma

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void reg_fence(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void reg_fence(uint32_t (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define MHA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MHA_F16(d, i) MHA_F4(d, i), MHA_F4(d, i + 4), MHA_F4(d, i + 8), MHA_F4(d, i + 12)
#define MHA_F64(d) MHA_F16(d, 0), MHA_F16(d, 16), MHA_F16(d, 32), MHA_F16(d, 48)
#define MHA_REGS64                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, "                                \
  "%8, %9, %10, %11, %12, %13, %14, %15, "                           \
  "%16, %17, %18, %19, %20, %21, %22, %23, "                         \
  "%24, %25, %26, %27, %28, %29, %30, %31, "                         \
  "%32, %33, %34, %35, %36, %37, %38, %39, "                         \
  "%40, %41, %42, %43, %44, %45, %46, %47, "                         \
  "%48, %49, %50, %51, %52, %53, %54, %55, "                         \
  "%56, %57, %58, %59, %60, %61, %62, %63}"

// d (64 x 128) = A (shared, K-major) * B (shared, K-major) [+ d]
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " MHA_REGS64
      ", %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : MHA_F64(d)
      : "l"(a), "l"(b), "r"(add));
}

// d (64 x 128) += A (registers) * B (shared, MN-major)
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint64_t b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " MHA_REGS64
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}\n"
      : MHA_F64(d)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// Descriptor of an operand with 128-byte swizzle; offsets in bytes.
__device__ __forceinline__ uint64_t make_desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return uint64_t((addr & 0x3FFFFu) >> 4) | (uint64_t(lbo >> 4) << 16) |
         (uint64_t(sbo >> 4) << 32) | (uint64_t(1) << 62);
}

__device__ __forceinline__ void gemm_qk(float (&s)[64], uint64_t dq, uint64_t dk) {
#pragma unroll
  for (int ks = 0; ks < 8; ++ks) {
    uint64_t const off = uint64_t((ks & 3) * 2 + (ks >> 2) * (HalfBytes / 16));
    wgmma_ss(s, dq + off, dk + off, ks != 0 ? 1 : 0);
  }
}

__device__ __forceinline__ void gemm_pv(float (&o)[64], uint32_t (&pr)[32], uint64_t dv) {
#pragma unroll
  for (int ks = 0; ks < 8; ++ks) {
    wgmma_rs(o, pr[4 * ks], pr[4 * ks + 1], pr[4 * ks + 2], pr[4 * ks + 3],
             dv + uint64_t(ks * 128), 1);
  }
}

// ---- softmax

// s becomes exp(s - max); mc (the greatest scaled score so far, in units of log 2), sum (this
// thread's part) are brought up to date; scale is what earlier sums are multiplied with.
// rel0, rel1: the last visible key of the two rows, counted from this thread's first column.
template <bool Mask>
__device__ __forceinline__ void softmax(float (&s)[64], float (&mc)[2], float (&sum)[2],
                                        float (&scale)[2], int rel0, int rel1) {
  if constexpr (Mask) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (8 * i > rel0) s[4 * i] = neg_inf();
      if (8 * i + 1 > rel0) s[4 * i + 1] = neg_inf();
      if (8 * i > rel1) s[4 * i + 2] = neg_inf();
      if (8 * i + 1 > rel1) s[4 * i + 3] = neg_inf();
    }
  }
  float ref[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float ma = s[2 * r];
    float mb = s[2 * r + 1];
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      ma = fmaxf(ma, s[4 * i + 2 * r]);
      mb = fmaxf(mb, s[4 * i + 2 * r + 1]);
    }
    float m = fmaxf(ma, mb);
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    float const next = fmaxf(mc[r], m * ScaleLog2);
    ref[r] = next;
    if constexpr (Mask) {
      if (next == neg_inf()) ref[r] = 0.0f;
    }
    scale[r] = ex2(mc[r] - ref[r]);
    mc[r] = next;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    s[4 * i] = ex2(fmaf(s[4 * i], ScaleLog2, -ref[0]));
    s[4 * i + 1] = ex2(fmaf(s[4 * i + 1], ScaleLog2, -ref[0]));
    s[4 * i + 2] = ex2(fmaf(s[4 * i + 2], ScaleLog2, -ref[1]));
    s[4 * i + 3] = ex2(fmaf(s[4 * i + 3], ScaleLog2, -ref[1]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sa = s[2 * r];
    float sb = s[2 * r + 1];
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      sa += s[4 * i + 2 * r];
      sb += s[4 * i + 2 * r + 1];
    }
    sum[r] = fmaf(sum[r], scale[r], sa + sb);
  }
}

__device__ __forceinline__ void to_half(float (&s)[64], uint32_t (&pr)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) pr[i] = pack_half(s[2 * i], s[2 * i + 1]);
}

// Addresses of the barriers: K full, V full, K empty, V empty, Stages of each.
__device__ __forceinline__ uint32_t bar_k_full(uint32_t bars, int st) { return bars + 8 * st; }
__device__ __forceinline__ uint32_t bar_v_full(uint32_t bars, int st) {
  return bars + 8 * (Stages + st);
}
__device__ __forceinline__ uint32_t bar_k_empty(uint32_t bars, int st) {
  return bars + 8 * (2 * Stages + st);
}
__device__ __forceinline__ uint32_t bar_v_empty(uint32_t bars, int st) {
  return bars + 8 * (3 * Stages + st);
}

// One round: S of the next tile and P V of the current one.
template <bool Mask>
__device__ __forceinline__ void step(float (&s)[64], float (&o)[64], uint32_t (&pr)[32],
                                     float (&mc)[2], float (&sum)[2], int& st, uint32_t& ph,
                                     uint32_t bars, uint64_t dq, uint64_t dk, uint64_t dv, int wg,
                                     int lane, bool last, int rel0, int rel1) {
  int const nst = st + 1 == Stages ? 0 : st + 1;
  uint32_t const nph = nst == 0 ? ph ^ 1u : ph;
  float scale[2];

  mbar_wait(bar_k_full(bars, nst), nph);
  mbar_wait(bar_v_full(bars, st), ph);
  fence_async();
  named_sync(1 + wg, 256);  // our turn at the tensor cores

  reg_fence(s);
  reg_fence(o);
  reg_fence(pr);
  wgmma_fence();
  gemm_qk(s, dq, dk + uint64_t(nst * (TileBytes / 16)));
  wgmma_commit();
  gemm_pv(o, pr, dv + uint64_t(st * (TileBytes / 16)));
  wgmma_commit();

  if (!(wg == 1 && last)) named_arrive(1 + (wg ^ 1), 256);  // the other's turn

  wgmma_wait<1>();
  reg_fence(s);
  if (lane == 0) mbar_arrive(bar_k_empty(bars, nst));

  softmax<Mask>(s, mc, sum, scale, rel0, rel1);

  wgmma_wait<0>();
  reg_fence(o);
  reg_fence(pr);
  if (lane == 0) mbar_arrive(bar_v_empty(bars, st));

  to_half(s, pr);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    o[4 * i] *= scale[0];
    o[4 * i + 1] *= scale[0];
    o[4 * i + 2] *= scale[1];
    o[4 * i + 3] *= scale[1];
  }
  st = nst;
  ph = nph;
}

}  // namespace mha

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  using namespace mha;
  extern __shared__ __align__(1024) unsigned char shared[];

  uint32_t const sbase = (uint32_t)__cvta_generic_to_shared(shared);
  uint32_t const sQ = sbase;
  uint32_t const sK = sbase + TileBytes;
  uint32_t const sV = sbase + TileBytes * (1 + Stages);
  uint32_t const bars = sbase + TileBytes * (1 + 2 * Stages);

  int const tid = (int)threadIdx.x;
  int const group = __shfl_sync(0xffffffffu, tid >> 7, 0);
  int const gt = tid & 127;  // thread of the warpgroup

  // Which tile of queries, head and batch: the longest first, over as many heads as L2 holds.
  int m0, head, bat;
  {
    uint32_t const nblk = gridDim.x;
    uint32_t const total = gridDim.y * gridDim.z;
    uint32_t const lin = blockIdx.x + nblk * (blockIdx.y + gridDim.y * blockIdx.z);
    uint32_t sec = 65536u / (uint32_t)(p.kv_len > 0 ? p.kv_len : 1);
    sec = sec < 1u ? 1u : sec;
    sec = sec > total ? total : sec;
    uint32_t const per = sec * nblk;
    uint32_t const si = lin / per;
    uint32_t const r = lin - si * per;
    uint32_t const rest = total - si * sec;
    uint32_t const cnt = rest < sec ? rest : sec;
    uint32_t const rb = r / cnt;
    uint32_t const bh = si * sec + (r - rb * cnt);
    uint32_t const hb = bh / gridDim.y;
    m0 = (int)(nblk - 1u - rb) * BM;
    head = (int)(bh - hb * gridDim.y);
    bat = (int)hb;
  }

  int const q_len = p.q_len;
  int const kv_len = p.kv_len;
  int const off = kv_len - q_len;
  int const last_q = m0 + BM - 1 < q_len - 1 ? m0 + BM - 1 : q_len - 1;
  int const n_end = last_q + off + 1 < kv_len ? last_q + off + 1 : kv_len;  // keys anyone sees
  int const nt = n_end <= 0 ? 0 : (n_end + BN - 1) / BN;

  if (tid == 0) {
    for (int i = 0; i < Stages; ++i) {
      mbar_init(bar_k_full(bars, i), 128);
      mbar_init(bar_v_full(bars, i), 128);
      mbar_init(bar_k_empty(bars, i), 8);
      mbar_init(bar_v_empty(bars, i), 8);
    }
  }
  __syncthreads();

  // A thread's place when it copies: 16-byte column and first row; the swizzle is the same for
  // all its rows, which are 8 apart.
  int const chunk = gt & 15;
  int const r0 = gt >> 4;
  uint32_t const copy_off =
      (uint32_t)((chunk >> 3) * HalfBytes + r0 * 128 + (((chunk & 7) ^ r0) << 4));

  if (group == 0) {
    // ---------------- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (nt > 0) {
      char const* const kp = reinterpret_cast<char const*>(p.K.at(bat, head, 0, 0)) + chunk * 16;
      char const* const vp = reinterpret_cast<char const*>(p.V.at(bat, head, 0, 0)) + chunk * 16;
      int64_t const ks =
          int64_t(p.K.at(bat, head, 1, 0) - p.K.at(bat, head, 0, 0)) * int64_t(sizeof(fw::fp16));
      int64_t const vs =
          int64_t(p.V.at(bat, head, 1, 0) - p.V.at(bat, head, 0, 0)) * int64_t(sizeof(fw::fp16));

      int kst = 0;            // stage of the next K tile
      uint32_t kph = 1;       // parity that says its place is free (at first it is)
      int vst = 0;
      uint32_t vph = 1;
      // Order: K0, K1, V0, K2, V1, ...
#pragma unroll 1
      for (int it = -1; it < nt; ++it) {
        if (it + 1 < nt) {
          int const row = (nt - 1 - (it + 1)) * BN;
          mbar_wait(bar_k_empty(bars, kst), kph);
          load_rows<16>(sK + (uint32_t)(kst * TileBytes) + copy_off, kp, ks, row + r0, n_end,
                        row + BN <= n_end);
          cp_async_mbar_arrive(bar_k_full(bars, kst));
          if (++kst == Stages) {
            kst = 0;
            kph ^= 1u;
          }
        }
        if (it >= 0) {
          int const row = (nt - 1 - it) * BN;
          mbar_wait(bar_v_empty(bars, vst), vph);
          load_rows<16>(sV + (uint32_t)(vst * TileBytes) + copy_off, vp, vs, row + r0, n_end,
                        row + BN <= n_end);
          cp_async_mbar_arrive(bar_v_full(bars, vst));
          if (++vst == Stages) {
            vst = 0;
            vph ^= 1u;
          }
        }
      }
      cp_async_wait_all();
    }
  } else {
    // ---------------- consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int const wg = group - 1;
    int const warp = gt >> 5;
    int const lane = gt & 31;
    int const row_a = m0 + wg * 64 + warp * 16 + (lane >> 2);  // and row_a + 8
    int const row_b = row_a + 8;

    float o[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    float mc[2] = {neg_inf(), neg_inf()};
    float sum[2] = {0.0f, 0.0f};

    if (nt > 0) {
      // Q: 64 rows for each warpgroup
      {
        char const* const qp =
            reinterpret_cast<char const*>(p.Q.at(bat, head, 0, 0)) + chunk * 16;
        int64_t const qs = int64_t(p.Q.at(bat, head, 1, 0) - p.Q.at(bat, head, 0, 0)) *
                           int64_t(sizeof(fw::fp16));
        int const row = m0 + wg * 64;
        load_rows<8>(sQ + (uint32_t)(wg * 64 * 128) + copy_off, qp, qs, row + r0, q_len,
                     row + 64 <= q_len);
        cp_async_wait_all();
        fence_async();
        named_sync(3 + wg, 128);
      }

      uint64_t const dq = make_desc(sQ + (uint32_t)(wg * 64 * 128), 16, 1024);
      uint64_t const dk = make_desc(sK, 16, 1024);
      uint64_t const dv = make_desc(sV, HalfBytes, 1024);

      // The last key a row sees, less this thread's first column.
      int const col = 2 * (lane & 3);
      int const lim_a = (row_a + off < kv_len - 1 ? row_a + off : kv_len - 1) - col;
      int const lim_b = (row_b + off < kv_len - 1 ? row_b + off : kv_len - 1) - col;
      int const wg_first = m0 + wg * 64 + off;
      int const wg_lim = wg_first < kv_len - 1 ? wg_first : kv_len - 1;

      float s[64];
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0.0f;
      uint32_t pr[32];
      int st = 0;
      uint32_t ph = 0;

      // The first warpgroup begins.
      if (wg == 1 && nt > 1) named_arrive(1, 256);

      // First S
      mbar_wait(bar_k_full(bars, 0), 0);
      fence_async();
      reg_fence(s);
      wgmma_fence();
      gemm_qk(s, dq, dk);
      wgmma_commit();
      wgmma_wait<0>();
      reg_fence(s);
      if (lane == 0) mbar_arrive(bar_k_empty(bars, 0));
      {
        float scale[2];
        int const n0 = (nt - 1) * BN;
        softmax<true>(s, mc, sum, scale, lim_a - n0, lim_b - n0);
        to_half(s, pr);
      }

      int it = 0;
#pragma unroll 1
      for (; it < nt - 1 && (nt - 2 - it) * BN + BN - 1 > wg_lim; ++it) {
        int const n0 = (nt - 2 - it) * BN;
        step<true>(s, o, pr, mc, sum, st, ph, bars, dq, dk, dv, wg, lane, it == nt - 2,
                   lim_a - n0, lim_b - n0);
      }
#pragma unroll 1
      for (; it < nt - 1; ++it) {
        step<false>(s, o, pr, mc, sum, st, ph, bars, dq, dk, dv, wg, lane, it == nt - 2, 0, 0);
      }

      // Last P V
      mbar_wait(bar_v_full(bars, st), ph);
      fence_async();
      reg_fence(o);
      reg_fence(pr);
      wgmma_fence();
      gemm_pv(o, pr, dv + uint64_t(st * (TileBytes / 16)));
      wgmma_commit();
      wgmma_wait<0>();
      reg_fence(o);
    }

    // ---------------- outputs
    float inv[2];
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float t = sum[r];
      t += __shfl_xor_sync(0xffffffffu, t, 1);
      t += __shfl_xor_sync(0xffffffffu, t, 2);
      bool const none = t == 0.0f;
      inv[r] = none ? 0.0f : 1.0f / t;
      lse[r] = none ? neg_inf() : mc[r] * Ln2 + logf(t);
    }

    if (p.LSE.data != nullptr && (lane & 3) == 0) {
      if (row_a < q_len) *p.LSE.at(bat, head, row_a) = lse[0];
      if (row_b < q_len) *p.LSE.at(bat, head, row_b) = lse[1];
    }

    if (p.O.data != nullptr) {
      // Through the shared memory of this warpgroup's Q, each warp its own 16 rows.
      named_sync(3 + wg, 128);  // nobody reads Q any more
      unsigned char* const stage = shared + wg * 64 * 128;
      int const la = warp * 16 + (lane >> 2);
      int const sw = la & 7;  // the same for la + 8
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        unsigned char* const d =
            stage + (i >> 3) * HalfBytes + la * 128 + (((i & 7) ^ sw) << 4) + (lane & 3) * 4;
        *reinterpret_cast<uint32_t*>(d) = pack_half(o[4 * i] * inv[0], o[4 * i + 1] * inv[0]);
        *reinterpret_cast<uint32_t*>(d + 8 * 128) =
            pack_half(o[4 * i + 2] * inv[1], o[4 * i + 3] * inv[1]);
      }
      __syncwarp();
      int const c = lane & 15;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const lr = warp * 16 + (lane >> 4) + 2 * i;
        int const row = m0 + wg * 64 + lr;
        uint4 const v = *reinterpret_cast<uint4 const*>(stage + (c >> 3) * HalfBytes + lr * 128 +
                                                        (((c & 7) ^ (lr & 7)) << 4));
        if (row < q_len) *reinterpret_cast<uint4*>(p.O.at(bat, head, row, c * 8)) = v;
      }
    }
  }
}
