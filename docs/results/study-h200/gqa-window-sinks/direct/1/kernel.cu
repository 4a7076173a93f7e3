#include <fw/attention.cuh>

constexpr int HeadDim = 128;
constexpr int BM = 128;  // queries of a block: the grid goes by them
constexpr float Scale = 0.08838834764831843f;  // 1 / sqrt(HeadDim)
constexpr int Window = 512;
constexpr int SinkTokens = 2;
constexpr int Softcap = 30;
constexpr int Threads = 256;
constexpr int SharedBytes = 98304;

struct Params {
  fw::Global<fw::fp16, 4> Q;  // (batch, heads, q_len, HeadDim)
  fw::Global<fw::fp16, 4> K;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> V;  // (batch, kv_heads, kv_len, HeadDim)
  fw::Global<fw::fp16, 4> O;  // (batch, heads, q_len, HeadDim)
  fw::Global<float, 3> LSE;  // (batch, heads, q_len)
  int batch, heads, kv_heads, q_len, kv_len;
};

namespace att {

constexpr int BN = 64;  // keys of a tile

// Shared memory, in bytes.
constexpr int QHalf = 128 * 128;       // 128 rows of 64 elements
constexpr int KVHalf = BN * 128;       // 64 rows of 64 elements
constexpr int StageBytes = 2 * KVHalf;  // one tile of K or V
constexpr int KOffset = 2 * QHalf;
constexpr int VOffset = KOffset + 2 * StageBytes;
static_assert(VOffset + 2 * StageBytes == SharedBytes, "shared memory");

// Softcap in units of log2: t = Softcap * log2(e) * tanh(a * Scale / Softcap).
constexpr double Log2E = 1.4426950408889634;
constexpr double Alpha = double(Scale) / double(Softcap);
constexpr double D0 = double(Scale) * Log2E;
constexpr float C0 = float(D0);
constexpr float C1 = float(-D0 * Alpha * Alpha / 3.0);
constexpr float C2 = float(D0 * Alpha * Alpha * Alpha * Alpha * 0.13046);
constexpr float FastBound = float(8.0 / double(Scale));  // |s| <= 8
constexpr float CapLog2 = float(double(Softcap) * Log2E);
constexpr float TanhArg = float(2.0 * Alpha * Log2E);
constexpr float Ln2 = 0.69314718055994531f;
constexpr float Grow = 4.0f;      // rescale when a maximum grew by more than this
constexpr float MStart = -1.0e4f;  // below any capped score

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Factor w with cap(a) = a * w, for |a| <= FastBound (and -inf stays -inf).
__device__ __forceinline__ float cap_factor(float a) {
  float u = a * a;
  return fmaf(fmaf(u, C2, C1), u, C0);
}

// Any a; -inf stays -inf.
__device__ __forceinline__ float cap_slow(float a) {
  float e = ex2(a * TanhArg);
  float r = rcp(e + 1.0f);
  float t = fmaf(-2.0f * CapLog2, r, CapLog2);
  return a == neg_inf() ? neg_inf() : t;
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
               :: "r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_group 0;\n" ::: "memory");
}
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_wait0() {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
}

template <int N> __device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}
template <int N> __device__ __forceinline__ void hold(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i]) :: "memory");
}

// D (64 x 64) = A (64 x 16, shared, K-major) * B (64 x 16, shared, K-major)
__device__ __forceinline__ void wgmma_qk_first(float (&d)[32], uint64_t da, uint64_t db) {
  asm volatile(
      "{\n"
      ".reg .pred pq;\n"
      "setp.ne.b32 pq, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, pq, 1, 1, 0, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]),
        "=f"(d[7]), "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]),
        "=f"(d[14]), "=f"(d[15]), "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]),
        "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]), "=f"(d[25]),
        "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
      : "l"(da), "l"(db), "r"(0)
      : "memory");
}

// D += A * B, the same shapes
__device__ __forceinline__ void wgmma_qk(float (&d)[32], uint64_t da, uint64_t db) {
  asm volatile(
      "{\n"
      ".reg .pred pq;\n"
      "setp.ne.b32 pq, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, pq, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(da), "l"(db), "r"(1)
      : "memory");
}

// D (64 x 128) += A (64 x 16, registers) * B (16 x 128, shared, MN-major)
__device__ __forceinline__ void wgmma_pv(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint64_t db) {
  asm volatile(
      "{\n"
      ".reg .pred pq;\n"
      "setp.ne.b32 pq, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, pq, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),
        "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),
        "+f"(d[62]), "+f"(d[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(1)
      : "memory");
}

// Descriptor of a tile in shared memory with the 128-byte swizzle; 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t make_desc(uint32_t addr, uint32_t leading_bytes) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) |
         (uint64_t(leading_bytes >> 4) << 16) | uint64_t((addr & 0x3FFFFu) >> 4);
}

// This thread's share of a tile of K and V: 4 pieces of 16 bytes of each.
// vrow: virtual index of the thread's first row.
__device__ __forceinline__ void load_tile(const char* kptr, const char* vptr, uint32_t ks,
                                          uint32_t vs, uint32_t dst_k, uint32_t dst_v, int vrow,
                                          int shift, int kend) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int v = vrow + i * 16;
    int key = v + shift;
    if (i == 0 && v < SinkTokens) key = v;
    int bytes = key < kend ? 16 : 0;
    key = key < kend ? key : kend - 1;
    cp_async16(dst_k + i * 2048, kptr + uint64_t(uint32_t(key)) * uint64_t(ks), bytes);
    cp_async16(dst_v + i * 2048, vptr + uint64_t(uint32_t(key)) * uint64_t(vs), bytes);
  }
}

}  // namespace att

extern "C" __global__ void __launch_bounds__(Threads, 2)
    attention(__grid_constant__ Params const p) {
  using namespace att;
  extern __shared__ __align__(1024) unsigned char shared[];

  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp_all = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int wg = warp_all >> 2;
  const int warp = warp_all & 3;

  // ---- which heads and queries
  int lg = 0;  // log2 of the heads packed into a block
  if (p.heads % p.kv_heads == 0) {
    const int group = p.heads / p.kv_heads;
    lg = (group % 4 == 0) ? 2 : ((group % 2 == 0) ? 1 : 0);
  }
  const int lgq = 7 - lg;      // log2 of the queries of a block
  const int QB = 1 << lgq;
  const int G = 1 << lg;
  const int sub = int(blockIdx.y) & (G - 1);
  const int head0 = int(blockIdx.y) - sub;
  const int bz = int(blockIdx.z);
  const int kvh = int((int64_t(head0) * p.kv_heads) / p.heads);
  const int qblock = (G - 1 - sub) * int(gridDim.x) + (int(gridDim.x) - 1 - int(blockIdx.x));
  const int q0 = qblock * QB;
  if (q0 >= p.q_len) return;

  // ---- which keys: virtual index v is key v for v < 2, else key v + shift
  const int pmin = q0 + p.kv_len - p.q_len;
  const int qlast = (q0 + QB < p.q_len ? q0 + QB : p.q_len) - 1;
  const int kend = qlast + p.kv_len - p.q_len + 1;  // <= kv_len
  int shift = pmin - (Window - 1) - SinkTokens;
  shift = shift > 0 ? shift : 0;
  const int tiles = kend > 0 ? (kend - shift + BN - 1) / BN : 0;

  const uint32_t sbase = uint32_t(__cvta_generic_to_shared(shared));

  float o[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] = 0.0f;
  float m0 = MStart, m1 = MStart;
  float l0 = 0.0f, l1 = 0.0f;

  // rows of this thread: wrow + lane / 4, and 8 more
  const int wrow = wg * 64 + warp * 16;
  const int g = lane >> 2;
  const int c = lane & 3;

  if (tiles > 0) {
    // ---- what this thread copies
    const int ch = tid & 15;
    const int r16 = tid >> 4;
    const uint32_t swz = uint32_t(r16 * 128 + (((ch & 7) ^ (r16 & 7)) << 4));
    const char* kptr = reinterpret_cast<const char*>(
        p.K.data + uint64_t(bz) * p.K.stride[0] + uint64_t(kvh) * p.K.stride[1] + uint64_t(ch * 8));
    const char* vptr = reinterpret_cast<const char*>(
        p.V.data + uint64_t(bz) * p.V.stride[0] + uint64_t(kvh) * p.V.stride[1] + uint64_t(ch * 8));
    const uint32_t ks = uint32_t(p.K.stride[2] * 2);
    const uint32_t vs = uint32_t(p.V.stride[2] * 2);
    const uint32_t dst_k = sbase + KOffset + uint32_t(ch >> 3) * KVHalf + swz;
    const uint32_t dst_v = sbase + VOffset + uint32_t(ch >> 3) * KVHalf + swz;

    // ---- Q and the first tile
    {
      const fw::fp16* qptr = p.Q.data + uint64_t(bz) * p.Q.stride[0] + uint64_t(ch * 8);
      const uint32_t dst_q = sbase + uint32_t(ch >> 3) * QHalf + swz;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = r16 + i * 16;
        const int head = head0 + (r >> lgq);
        int q = q0 + (r & (QB - 1));
        const int bytes = q < p.q_len ? 16 : 0;
        q = q < p.q_len ? q : p.q_len - 1;
        cp_async16(dst_q + i * 2048,
                   qptr + uint64_t(head) * p.Q.stride[1] + uint64_t(q) * p.Q.stride[2], bytes);
      }
    }
    load_tile(kptr, vptr, ks, vs, dst_k, dst_v, r16, shift, kend);
    cp_async_commit();

    const uint64_t qdesc = make_desc(sbase + uint32_t(wg) * 8192u, 16);
    const uint64_t kdesc = make_desc(sbase + KOffset, 16);
    const uint64_t vdesc = make_desc(sbase + VOffset, KVHalf);

    // bounds of v: of the first row of this warp, in which no row masks a key
    const int hi_w = pmin + (wrow & (QB - 1)) - shift;
    const int lo_w = hi_w + 15 - (Window - 1);

#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
      const int v0 = j * BN;
      const int stage = j & 1;

      cp_async_wait_all();
      fence_async_proxy();
      __syncthreads();  // tile j is there; the other buffer is free

      // ---- S = Q K^T
      float s[32];
      {
        const uint64_t kd = kdesc + uint64_t(stage * (StageBytes >> 4));
        wgmma_fence();
        wgmma_qk_first(s, qdesc, kd);
#pragma unroll
        for (int k = 1; k < 8; ++k) {
          wgmma_qk(s, qdesc + uint64_t((k & 3) * 2 + (k >> 2) * (QHalf >> 4)),
                   kd + uint64_t((k & 3) * 2 + (k >> 2) * (KVHalf >> 4)));
        }
        wgmma_commit();
      }

      // ---- the next tile, while the products run
      if (j + 1 < tiles) {
        const uint32_t off = uint32_t(stage ^ 1) * StageBytes;
        load_tile(kptr, vptr, ks, vs, dst_k + off, dst_v + off, v0 + BN + r16, shift, kend);
      }
      cp_async_commit();

      wgmma_wait0();
      hold(s);

      // ---- greatest magnitude, mask, greatest score
      float am0 = 0.0f, am1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        am0 = fmaxf(am0, fabsf(s[4 * i + 0]));
        am1 = fmaxf(am1, fabsf(s[4 * i + 2]));
        am0 = fmaxf(am0, fabsf(s[4 * i + 1]));
        am1 = fmaxf(am1, fabsf(s[4 * i + 3]));
      }
      const bool slow = __any_sync(0xffffffffu, fmaxf(am0, am1) > FastBound);

      const int vfirst = v0 > SinkTokens ? v0 : SinkTokens;
      if (v0 + BN - 1 > hi_w || vfirst < lo_w) {
        const int hi0 = hi_w + g - v0 - 2 * c;  // column <= hi0
        const int lo0 = hi0 - (Window - 1);     // column >= lo0, or a sink
        const int hi1 = hi0 + 8;
        const int lo1 = lo0 + 8;
        const int sink = SinkTokens - v0 - 2 * c;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int col = 8 * i + e;
            const bool is_sink = (i == 0) && (col < sink);
            const bool ok0 = col <= hi0 && (col >= lo0 || is_sink);
            const bool ok1 = col <= hi1 && (col >= lo1 || is_sink);
            s[4 * i + e] = ok0 ? s[4 * i + e] : neg_inf();
            s[4 * i + 2 + e] = ok1 ? s[4 * i + 2 + e] : neg_inf();
          }
        }
      }

      float mx0 = neg_inf(), mx1 = neg_inf();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        mx0 = fmaxf(mx0, s[4 * i + 0]);
        mx1 = fmaxf(mx1, s[4 * i + 2]);
        mx0 = fmaxf(mx0, s[4 * i + 1]);
        mx1 = fmaxf(mx1, s[4 * i + 3]);
      }
      mx0 = fmaxf(mx0, __shfl_xor_sync(0xffffffffu, mx0, 1));
      mx1 = fmaxf(mx1, __shfl_xor_sync(0xffffffffu, mx1, 1));
      mx0 = fmaxf(mx0, __shfl_xor_sync(0xffffffffu, mx0, 2));
      mx1 = fmaxf(mx1, __shfl_xor_sync(0xffffffffu, mx1, 2));

      float t0, t1;
      if (!slow) {
        t0 = mx0 * cap_factor(mx0);
        t1 = mx1 * cap_factor(mx1);
      } else {
        t0 = cap_slow(mx0);
        t1 = cap_slow(mx1);
      }

      // ---- a new reference, and O and the sums rescaled
      if (__any_sync(0xffffffffu, (t0 > m0 + Grow) || (t1 > m1 + Grow))) {
        const float n0 = fmaxf(m0, t0);
        const float n1 = fmaxf(m1, t1);
        const float f0 = ex2(m0 - n0);
        const float f1 = ex2(m1 - n1);
        m0 = n0;
        m1 = n1;
        l0 *= f0;
        l1 *= f1;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          o[4 * i + 0] *= f0;
          o[4 * i + 1] *= f0;
          o[4 * i + 2] *= f1;
          o[4 * i + 3] *= f1;
        }
      }

      // ---- P = exp2(cap(S) - m)
      if (!slow) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float a = s[4 * i + e];
            const float b = s[4 * i + 2 + e];
            s[4 * i + e] = ex2(fmaf(a, cap_factor(a), -m0));
            s[4 * i + 2 + e] = ex2(fmaf(b, cap_factor(b), -m1));
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[4 * i + e] = ex2(cap_slow(s[4 * i + e]) - m0);
            s[4 * i + 2 + e] = ex2(cap_slow(s[4 * i + 2 + e]) - m1);
          }
        }
      }

      uint32_t pr[16];
      {
        float a0 = 0.0f, a1 = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          a0 += s[4 * i + 0];
          a1 += s[4 * i + 2];
          a0 += s[4 * i + 1];
          a1 += s[4 * i + 3];
          pr[2 * i + 0] = pack(s[4 * i + 0], s[4 * i + 1]);
          pr[2 * i + 1] = pack(s[4 * i + 2], s[4 * i + 3]);
        }
        l0 += a0;
        l1 += a1;
      }

      // ---- O += P V
      hold(pr);
      hold(o);
      {
        const uint64_t vd = vdesc + uint64_t(stage * (StageBytes >> 4));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma_pv(o, pr[4 * k + 0], pr[4 * k + 1], pr[4 * k + 2], pr[4 * k + 3],
                   vd + uint64_t(k * (2048 >> 4)));
        }
        wgmma_commit();
        wgmma_wait0();
      }
      hold(o);
    }
    cp_async_wait_all();
  }

  // ---- the end: sums of the rows
  l0 += __shfl_xor_sync(0xffffffffu, l0, 1);
  l1 += __shfl_xor_sync(0xffffffffu, l1, 1);
  l0 += __shfl_xor_sync(0xffffffffu, l0, 2);
  l1 += __shfl_xor_sync(0xffffffffu, l1, 2);

  if (p.LSE.data != nullptr && c == 0) {
    const int ra = wrow + g;
    const int head = head0 + (ra >> lgq);
    const int qa = q0 + (ra & (QB - 1));
    const int qb = qa + 8;
    float* lse = p.LSE.data + uint64_t(bz) * p.LSE.stride[0] + uint64_t(head) * p.LSE.stride[1];
    if (qa < p.q_len)
      lse[uint64_t(qa) * p.LSE.stride[2]] = l0 > 0.0f ? fmaf(m0, Ln2, logf(l0)) : neg_inf();
    if (qb < p.q_len)
      lse[uint64_t(qb) * p.LSE.stride[2]] = l1 > 0.0f ? fmaf(m1, Ln2, logf(l1)) : neg_inf();
  }

  if (p.O.data != nullptr) {
    const float i0 = l0 > 0.0f ? 1.0f / l0 : 0.0f;
    const float i1 = l1 > 0.0f ? 1.0f / l1 : 0.0f;

    // All of this warpgroup has read its Q: its place takes O.
    asm volatile("bar.sync %0, 128;\n" :: "r"(wg + 1) : "memory");

    const int ra = wrow + g;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int off = (i >> 3) * QHalf + ra * 128 + (((i & 7) ^ (ra & 7)) << 4) + c * 4;
      *reinterpret_cast<uint32_t*>(shared + off) = pack(o[4 * i + 0] * i0, o[4 * i + 1] * i0);
      *reinterpret_cast<uint32_t*>(shared + off + 8 * 128) =
          pack(o[4 * i + 2] * i1, o[4 * i + 3] * i1);
    }
    __syncwarp();

    const int ch = lane & 15;
#pragma unroll
    for (int it = 0; it < 8; ++it) {
      const int r = wrow + it * 2 + (lane >> 4);
      const int off = (ch >> 3) * QHalf + r * 128 + (((ch & 7) ^ (r & 7)) << 4);
      const uint4 x = *reinterpret_cast<const uint4*>(shared + off);
      const int head = head0 + (r >> lgq);
      const int q = q0 + (r & (QB - 1));
      if (q < p.q_len) {
        fw::fp16* dst = p.O.data + uint64_t(bz) * p.O.stride[0] + uint64_t(head) * p.O.stride[1] +
                        uint64_t(q) * p.O.stride[2] + uint64_t(ch * 8);
        *reinterpret_cast<uint4*>(dst) = x;
      }
    }
  }
}
