#include <fw/attention.cuh>

constexpr int HeadDim = 192;
constexpr int VDim = 128;
constexpr int BM = 128;  // queries of a block: the grid goes by them
constexpr float Scale = 0.07216878364870323f;  // 1 / sqrt(HeadDim)
constexpr int Threads = 384;
constexpr int SharedBytes = 1024 + 49152 + 2 * 49152 + 2 * 32768 + 128;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, heads, kv_len, VDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, VDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

#include <cuda_fp16.h>
#include <stdint.h>

namespace att {

constexpr int BN = 128;               // keys of a tile
constexpr int QWgBytes = 24576;       // 64 x 192 fp16, one warpgroup
constexpr int QBytes = 49152;
constexpr int KBytes = 49152;         // one stage: 3 blocks of 128 rows x 128 bytes
constexpr int VBytes = 32768;         // one stage: 2 blocks of 128 rows x 128 bytes
constexpr int OffK = QBytes;
constexpr int OffV = OffK + 2 * KBytes;
constexpr int OffBar = OffV + 2 * VBytes;
constexpr int FullK = 0;
constexpr int FullV = 16;
constexpr int EmptyK = 32;
constexpr int EmptyV = 48;
constexpr float ScaleLog2 = Scale * 1.4426950408889634f;

// ---------------------------------------------------------------- barriers

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
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void cp_async_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void bar_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// ---------------------------------------------------------------- copies

__device__ __forceinline__ void cp16(uint32_t dst, const char* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
               : "memory");
}

__device__ __forceinline__ void cp16_zfill(uint32_t dst, const char* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}

// 128 rows of Blocks * 64 columns; this thread: rows row0, row0 + 16, ..., one 16-byte chunk of
// each block of columns. base already points at the thread's chunk of row 0.
template <int Blocks>
__device__ __forceinline__ void load_tile(const char* base, int64_t stride, uint32_t dst, int row0,
                                          int rows, bool ragged) {
  if (!ragged) {
    const char* g = base + static_cast<int64_t>(row0) * stride;
    const int64_t hop = stride * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < Blocks; ++c) cp16(dst + c * 16384 + i * 2048, g + c * 128);
      g += hop;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int row = row0 + i * 16;
      const bool ok = row < rows;
      const char* g = base + static_cast<int64_t>(ok ? row : 0) * stride;
#pragma unroll
      for (int c = 0; c < Blocks; ++c)
        cp16_zfill(dst + c * 16384 + i * 2048, g + c * 128, ok ? 16 : 0);
    }
  }
}

// ---------------------------------------------------------------- wgmma

__device__ __forceinline__ uint64_t make_desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return static_cast<uint64_t>((addr & 0x3FFFF) >> 4) | (static_cast<uint64_t>(lbo >> 4) << 16) |
         (static_cast<uint64_t>(sbo >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int N> __device__ __forceinline__ void fence_regs(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> __device__ __forceinline__ void fence_regs(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define ATT_R8(a, i)                                                                       \
  "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
      "+f"(a[i + 6]), "+f"(a[i + 7])
#define ATT_R64(a)                                                                      \
  ATT_R8(a, 0), ATT_R8(a, 8), ATT_R8(a, 16), ATT_R8(a, 24), ATT_R8(a, 32), ATT_R8(a, 40), \
      ATT_R8(a, 48), ATT_R8(a, 56)
#define ATT_D64                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, "                    \
  "%8, %9, %10, %11, %12, %13, %14, %15, "               \
  "%16, %17, %18, %19, %20, %21, %22, %23, "             \
  "%24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, "             \
  "%40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, "             \
  "%56, %57, %58, %59, %60, %61, %62, %63}"

// D (64 x 128) = A B^T (+ D): both in shared memory, both K-major.
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int scale_d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " ATT_D64
      ", %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : ATT_R64(d)
      : "l"(a), "l"(b), "r"(scale_d));
}

// D (64 x 128) += A B: A in registers, B in shared memory, N contiguous.
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint64_t b, int scale_d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " ATT_D64
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}\n"
      : ATT_R64(d)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(scale_d));
}

__device__ __forceinline__ void issue_qk(float (&S)[64], uint64_t dq, uint64_t dk) {
#pragma unroll
  for (int k = 0; k < 12; ++k) {
    wgmma_ss(S, dq + (k / 4) * (8192 >> 4) + (k % 4) * 2, dk + (k / 4) * (16384 >> 4) + (k % 4) * 2,
             k == 0 ? 0 : 1);
  }
}

__device__ __forceinline__ void issue_pv(float (&O)[64], uint32_t (&P)[32], uint64_t dv) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    wgmma_rs(O, P[4 * k], P[4 * k + 1], P[4 * k + 2], P[4 * k + 3], dv + k * (2048 >> 4), 1);
  }
}

// ---------------------------------------------------------------- softmax

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ void pack_p(uint32_t (&P)[32], float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) P[i] = pack2(S[2 * i], S[2 * i + 1]);
}

// Scores become weights; m: greatest score so far, l: this thread's part of the sum, alpha: what
// the sums so far are to be multiplied by. lim: column 8 * j + e is seen by the first row when
// 8 * j + e <= lim, by the second (8 rows below) when 8 * j + e <= lim + 8.
template <bool Masked>
__device__ __forceinline__ void softmax(float (&S)[64], float (&m)[2], float (&l)[2],
                                        float (&alpha)[2], int lim) {
  if (Masked) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + e > lim) S[4 * j + e] = neg_inf();
        if (8 * j + e > lim + 8) S[4 * j + 2 + e] = neg_inf();
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float a = fmaxf(m[r], S[2 * r]);
    float b = S[2 * r + 1];
#pragma unroll
    for (int j = 1; j < 16; ++j) {
      a = fmaxf(a, S[4 * j + 2 * r]);
      b = fmaxf(b, S[4 * j + 2 * r + 1]);
    }
    a = fmaxf(a, b);
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
    const float ms = a == neg_inf() ? 0.0f : __fmul_rn(a, ScaleLog2);
    alpha[r] = ex2(__fadd_rn(__fmul_rn(m[r], ScaleLog2), -ms));
    m[r] = a;
    float s0 = 0.0f, s1 = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float x = ex2(__fmaf_rn(S[4 * j + 2 * r], ScaleLog2, -ms));
      const float y = ex2(__fmaf_rn(S[4 * j + 2 * r + 1], ScaleLog2, -ms));
      S[4 * j + 2 * r] = x;
      S[4 * j + 2 * r + 1] = y;
      s0 += x;
      s1 += y;
    }
    l[r] = l[r] * alpha[r] + (s0 + s1);
  }
}

// One round: S of tile `it` and P V of the tile before it, then the softmax of tile `it`.
template <bool Masked>
__device__ __forceinline__ void round_of(float (&S)[64], float (&O)[64], uint32_t (&P)[32],
                                         float (&m)[2], float (&l)[2], int it, int lim,
                                         uint64_t dq, uint64_t dk, uint64_t dv, uint32_t bars,
                                         int lane) {
  const int s = it & 1;
  const int sp = s ^ 1;
  const uint32_t par = (it >> 1) & 1;
  const uint32_t parp = ((it - 1) >> 1) & 1;

  mbar_wait(bars + FullK + 8 * s, par);
  fence_async();
  fence_regs(S);
  fence_regs(O);
  fence_regs(P);
  wgmma_fence();
  issue_qk(S, dq, dk + s * (KBytes >> 4));
  wgmma_commit();

  mbar_wait(bars + FullV + 8 * sp, parp);
  fence_async();
  wgmma_fence();
  issue_pv(O, P, dv + sp * (VBytes >> 4));
  wgmma_commit();

  wgmma_wait<1>();
  fence_regs(S);
  if (lane == 0) mbar_arrive(bars + EmptyK + 8 * s);

  float alpha[2];
  softmax<Masked>(S, m, l, alpha, lim);
  fence_regs(S);

  wgmma_wait<0>();
  fence_regs(O);
  fence_regs(P);
  if (lane == 0) mbar_arrive(bars + EmptyV + 8 * sp);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    O[4 * j] *= alpha[0];
    O[4 * j + 1] *= alpha[0];
    O[4 * j + 2] *= alpha[1];
    O[4 * j + 3] *= alpha[1];
  }
  pack_p(P, S);
}

}  // namespace att

extern "C" __global__ void __launch_bounds__(Threads, 1)
    attention(__grid_constant__ Params const p) {
  using namespace att;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t smem = (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023u) & ~1023u;
  const uint32_t bars = smem + OffBar;

  const int q_len = p.q_len;
  const int kv_len = p.kv_len;

  // Which tile of queries, head and batch: groups of heads that fit in L2, long tiles first.
  int block, head, batch;
  {
    const uint32_t blocks = gridDim.x;
    const uint32_t all = gridDim.y * gridDim.z;
    const uint32_t id = blockIdx.x + blocks * (blockIdx.y + gridDim.y * blockIdx.z);
    uint32_t group = 52428u / static_cast<uint32_t>(kv_len > 0 ? kv_len : 1);
    group = group < 1u ? 1u : (group > all ? all : group);
    const uint32_t groups = (all + group - 1) / group;
    group = (all + groups - 1) / groups;
    const uint32_t g = id / (group * blocks);
    const uint32_t first = g * group;
    const uint32_t here = all - first < group ? all - first : group;
    const uint32_t r = id - first * blocks;
    block = static_cast<int>(blocks - 1 - r / here);
    const uint32_t bh = first + r % here;
    head = static_cast<int>(bh % gridDim.y);
    batch = static_cast<int>(bh / gridDim.y);
  }

  const int q0 = block * BM;
  const int off = kv_len - q_len;
  const int q_last = (q0 + BM < q_len ? q0 + BM : q_len) - 1;
  int keys = q_last + off + 1;
  keys = keys < 0 ? 0 : (keys > kv_len ? kv_len : keys);
  const int n_tiles = (keys + BN - 1) / BN;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      mbar_init(bars + FullK + 8 * s, 128);
      mbar_init(bars + FullV + 8 * s, 128);
      mbar_init(bars + EmptyK + 8 * s, 8);
      mbar_init(bars + EmptyV + 8 * s, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int wg = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);

  if (wg == 0) {
    // ------------------------------------------------------------ producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int t = threadIdx.x;
    const int c = t & 7;
    const int r = t >> 3;
    const uint32_t dst = smem + r * 128 + ((c ^ (r & 7)) << 4);
    const char* kbase = reinterpret_cast<const char*>(p.K.at(batch, head, 0));
    const char* vbase = reinterpret_cast<const char*>(p.V.at(batch, head, 0));
    const int64_t kstride = reinterpret_cast<const char*>(p.K.at(batch, head, 1)) - kbase;
    const int64_t vstride = reinterpret_cast<const char*>(p.V.at(batch, head, 1)) - vbase;
    kbase += c * 16;
    vbase += c * 16;

#pragma unroll 1
    for (int it = 0; it <= n_tiles; ++it) {
      if (it < n_tiles) {
        const int s = it & 1;
        const int n0 = (n_tiles - 1 - it) * BN;
        mbar_wait(bars + EmptyK + 8 * s, ((it >> 1) & 1) ^ 1);
        load_tile<3>(kbase, kstride, dst + OffK + s * KBytes, n0 + r, kv_len, n0 + BN > kv_len);
        cp_async_arrive(bars + FullK + 8 * s);
      }
      if (it > 0) {
        const int iv = it - 1;
        const int s = iv & 1;
        const int n0 = (n_tiles - 1 - iv) * BN;
        mbar_wait(bars + EmptyV + 8 * s, ((iv >> 1) & 1) ^ 1);
        load_tile<2>(vbase, vstride, dst + OffV + s * VBytes, n0 + r, kv_len, n0 + BN > kv_len);
        cp_async_arrive(bars + FullV + 8 * s);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    // ------------------------------------------------------------ consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int cw = wg - 1;
    const int t = threadIdx.x & 127;
    const int warp = t >> 5;
    const int lane = t & 31;
    const uint32_t sq = smem + cw * QWgBytes;
    const int row_wg = q0 + cw * 64;

    float S[64];
    float O[64];
    uint32_t P[32];
    float m[2] = {neg_inf(), neg_inf()};
    float l[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      S[i] = 0.0f;
      O[i] = 0.0f;
    }

    if (n_tiles > 0) {
      // Q of this warpgroup.
      {
        const int c = t & 7;
        const int r = t >> 3;
        const uint32_t dst = sq + r * 128 + ((c ^ (r & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_wg + r + i * 16;
          const bool ok = row < q_len;
          const char* g =
              reinterpret_cast<const char*>(p.Q.at(batch, head, ok ? row : 0)) + c * 16;
#pragma unroll
          for (int b = 0; b < 3; ++b)
            cp16_zfill(dst + b * 8192 + i * 2048, g + b * 128, ok ? 16 : 0);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async();
        bar_sync(1 + cw, 128);
      }

      const uint64_t dq = make_desc(sq, 16, 1024);
      const uint64_t dk = make_desc(smem + OffK, 16, 1024);
      const uint64_t dv = make_desc(smem + OffV, 16384, 1024);

      // Column 8 * j + e of tile n is seen when 8 * j + e <= see - n * BN.
      const int see = row_wg + warp * 16 + (lane >> 2) + off - 2 * (lane & 3);
      const int whole = row_wg + off + 1;  // keys that every row of the warpgroup sees
      const int n_full = whole > 0 ? whole / BN : 0;
      const int n_masked = n_tiles - n_full;

      // The first tile.
      mbar_wait(bars + FullK, 0);
      fence_async();
      fence_regs(S);
      wgmma_fence();
      issue_qk(S, dq, dk);
      wgmma_commit();
      wgmma_wait<0>();
      fence_regs(S);
      if (lane == 0) mbar_arrive(bars + EmptyK);
      {
        float alpha[2];
        softmax<true>(S, m, l, alpha, see - (n_tiles - 1) * BN);
      }
      pack_p(P, S);

      int it = 1;
#pragma unroll 1
      for (; it < n_masked; ++it) {
        round_of<true>(S, O, P, m, l, it, see - (n_tiles - 1 - it) * BN, dq, dk, dv, bars, lane);
      }
#pragma unroll 1
      for (; it < n_tiles; ++it) {
        round_of<false>(S, O, P, m, l, it, 0, dq, dk, dv, bars, lane);
      }

      // P V of the last tile.
      const int last = n_tiles - 1;
      mbar_wait(bars + FullV + 8 * (last & 1), (last >> 1) & 1);
      fence_async();
      fence_regs(O);
      fence_regs(P);
      wgmma_fence();
      issue_pv(O, P, dv + (last & 1) * (VBytes >> 4));
      wgmma_commit();
      wgmma_wait<0>();
      fence_regs(O);
    }

    // ------------------------------------------------------------ results
    float inv[2];
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float z = l[r];
      z += __shfl_xor_sync(0xffffffffu, z, 1);
      z += __shfl_xor_sync(0xffffffffu, z, 2);
      const bool none = m[r] == neg_inf() || z == 0.0f;
      inv[r] = none ? 0.0f : 1.0f / z;
      lse[r] = none ? neg_inf()
                    : (__fmul_rn(m[r], ScaleLog2) + log2f(z)) * 0.6931471805599453f;
    }

    const int row_warp = row_wg + warp * 16;
    const int r = lane >> 2;
    if (p.LSE.data != nullptr && (lane & 3) == 0) {
      if (row_warp + r < q_len) *p.LSE.at(batch, head, row_warp + r) = lse[0];
      if (row_warp + r + 8 < q_len) *p.LSE.at(batch, head, row_warp + r + 8) = lse[1];
    }

    if (p.O.data != nullptr) {
      // All warps of the warpgroup are done with Q: its place takes O, 16 rows a warp.
      bar_sync(1 + cw, 128);
      const uint32_t so = sq + warp * 4096;
      const uint32_t w = so + r * 256 + (lane & 3) * 4;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint32_t a = w + ((j ^ r) << 4);
        const uint32_t x = pack2(O[4 * j] * inv[0], O[4 * j + 1] * inv[0]);
        const uint32_t y = pack2(O[4 * j + 2] * inv[1], O[4 * j + 3] * inv[1]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(a + 2048), "r"(y) : "memory");
      }
      __syncwarp();
      const int ch = lane & 15;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int rr = 2 * i + (lane >> 4);
        const uint32_t a = so + rr * 256 + ((ch ^ (rr & 7)) << 4);
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(a)
                     : "memory");
        const int row = row_warp + rr;
        if (row < q_len) {
          *reinterpret_cast<uint4*>(reinterpret_cast<char*>(p.O.at(batch, head, row)) + ch * 16) =
              v;
        }
      }
    }
  }
}
