// Helper warps: the warps behind the producer, which loads by TMA: three, or more where they convert tiles. They fill
// rings with what TMA cannot load, and with tiles that are changed on their way: fp8 tiles, of which wgmma wants k along
// the rows of both operands, while V lies the other way and is transposed.
#pragma once

#include <fw/convert.cuh>
#include <fw/copy.cuh>
#include <fw/fragment.cuh>
#include <fw/mma.cuh>
#include <fw/ring.cuh>

namespace fw {

constexpr int helpers = 3;  // warps; a kernel may have more

// Whether this thread is in one of the helper warps.
template <int Warps>
__device__ bool is_helper() {
  return threadIdx.x >= 32 * (Warps + 1);
}

// The number of this thread, asked for anew: threads of the producer warpgroup have few registers, and what is computed
// of it is not worth one in between.
__device__ inline uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The number of a helper warp.
template <int Warps>
__device__ uint32_t helper_again() {
  return thread_again() / 32 - (Warps + 1);
}

// The next stage of a ring is filled by the threads of all helpers: `fill(stage of the tile, number of the thread)`. What
// they store, wgmma reads through another proxy: each thread fences its own.
template <int Warps, class Tile, int Stages, class Fill>
__device__ void fill_stage(Tile tile, Ring<Stages>& ring, Fill fill) {
  mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
  fill(tile.stage(ring.stage), static_cast<int>(threadIdx.x) - 32 * (Warps + 1));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full + 8 * ring.stage);
  ring.next();
}

// The same for a vector; what lies outside becomes 0. It is fetched before its stage is free, so that only the stores
// wait for that.
template <int Warps, int Helpers = helpers, class To, int Size, int Stages, class Source, class Valid>
__device__ void fill_vector_stage(SharedVector<To, Size> vector, Ring<Stages>& ring, Source from, Valid valid) {
  using T = typename Source::value_type;
  constexpr int Threads = 32 * Helpers, Each = (Size + Threads - 1) / Threads;
  int const first = threadIdx.x - 32 * (Warps + 1);
  To held[Each];
  CUTE_UNROLL
  for (int n = 0; n < Each; ++n) {
    int const i = first + n * Threads;
    held[n] = converted<To>(i < Size && inside(i, valid) ? *from.at(i, 0) : T(0));
  }
  fill_stage<Warps>(vector, ring, [&](SharedVector<To, Size> to, int) {
    CUTE_UNROLL
    for (int n = 0; n < Each; ++n) {
      if (first + n * Threads < Size) to.data[first + n * Threads] = held[n];
    }
  });
}

// A vector in global memory as the helpers use it: each element is fetched where it is needed.
template <class Source, class Valid>
struct Line {
  using Value = cute::conditional_t<cute::is_same_v<typename Source::value_type, int>, int, float>;
  Source from;
  Valid valid;

  __device__ Value operator()(int n) const {
    return inside(n, valid) ? static_cast<Value>(*from.at(n, 0)) : Value(0);
  }
};

template <class Source, class Valid>
Line(Source, Valid) -> Line<Source, Valid>;

// Along the columns a thread needs 8 elements, the same for all rows; along the rows one for each row.
template <class L>
struct AlongColumns {
  struct Held {
    typename L::Value value[8];
    __device__ Held const& row(int) const { return *this; }
    __device__ auto operator()(int n) const { return value[n]; }
  };
  L line;

  __device__ Held columns(int first) const {
    Held held;
    CUTE_UNROLL
    for (int n = 0; n < 8; ++n) held.value[n] = line(first + n);
    return held;
  }
};

template <class L>
struct AlongRows {
  struct Held {
    typename L::Value value;
    __device__ auto operator()(int) const { return value; }
  };
  L line;

  __device__ AlongRows const& columns(int) const { return *this; }
  __device__ Held row(int m) const { return {line(m)}; }
};

template <class L>
__device__ AlongColumns<L> along_cols(L line) {
  return {line};
}

template <class L>
__device__ AlongRows<L> along_rows(L line) {
  return {line};
}

// 8 columns of a tile, n = 0 to 7, in blocks of 8 rows: a block is two steps of a warp where the rows of an atom are 128 bytes long (the
// swizzle then differs in one bit), and one or half of one where they are shorter.
template <int Warps, int Helpers, class To, class From, class F, class... Held>
__device__ void restage_columns(To to, From from, int atom, F f, Held const&... held) {
  using T = typename From::value_type;
  using U = typename To::value_type;
  static_assert(is_16_bit<T> && is_16_bit<U> && To::rows == From::rows && To::cols == From::cols);
  constexpr int down = 32 / From::chunks, rows = down < 8 ? 8 : down, at_once = rows / down;
  uint32_t const lane = thread_again() % 32, warp = helper_again<Warps>();
  uint32_t const shift = cute::cast_smem_ptr_to_uint(to.data) - cute::cast_smem_ptr_to_uint(from.data);
  int row = warp * rows + lane / From::chunks;
  uint32_t at = from.chunk_address(row, lane % From::chunks) + atom * From::atom_bytes;
  CUTE_NO_UNROLL
  for (; row < From::rows; row += Helpers * rows, at += Helpers * rows * From::row_bytes) {
    uint32_t x[at_once][4];
    CUTE_UNROLL
    for (int i = 0; i < at_once; ++i) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                   : "r"((at ^ i * 64) + i * down * From::row_bytes)
                   : "memory");
    }
    CUTE_UNROLL
    for (int i = 0; i < at_once; ++i) {
      CUTE_UNROLL
      for (int k = 0; k < 4; ++k) {
        int const m = row + i * down, n = 2 * k;
        float low, high;
        unpack<T>(x[i][k], low, high);
        x[i][k] = pack<U>(f(m, n, low, held.row(m)...), f(m, n + 1, high, held.row(m)...));
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"((at ^ i * 64) + i * down * From::row_bytes + shift),
                   "r"(x[i][0]), "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3])
                   : "memory");
    }
  }
}

// Elementwise work from one shared tile to the next stage of another: to(m, n) = f(m, n, from(m, n), vectors...). (Of
// the 8 columns that a thread has, n is one.)
template <int Warps, int Helpers = helpers, class To, int Stages, class From, class F, class... Vectors>
__device__ void restage_stage(To to, Ring<Stages>& ring, From from, F f, Vectors const&... vectors) {
  fill_stage<Warps>(to, ring, [&](To stage, int) {
    CUTE_NO_UNROLL
    for (int atom = 0; atom < From::cols / From::width; ++atom) {
      int const first = atom * From::width + thread_again() % From::chunks * From::chunk;
      restage_columns<Warps, Helpers>(stage, from, atom, f, vectors.columns(first)...);
    }
  });
}

// A tile in another type, in the next stage of another.
template <int Warps, int Helpers = helpers, class To, int Stages, class From>
__device__ void convert_stage(To to, Ring<Stages>& ring, From from) {
  fill_stage<Warps>(to, ring, [&](To stage, int thread) { convert_tile<32 * Helpers>(stage, from, thread); });
}

// 32 rows and 16 columns of an fp8 tile, transposed. ldmatrix transposes units of 16 bits, so that a thread gets two columns at
// once, which the byte permutes take apart: even columns become one block of 8 rows, odd ones the next (the product is
// a wide one), and k comes in the order 2q, 2q + 1, 8 + 2q, 9 + 2q, which is that of what a thread holds of P.
__device__ inline void transpose_fp8(uint32_t (&r)[4]) {
  uint32_t const k[4] = {r[0], r[1], r[2], r[3]};
  r[0] = __byte_perm(k[0], k[1], 0x6420);
  r[1] = __byte_perm(k[2], k[3], 0x6420);
  r[2] = __byte_perm(k[0], k[1], 0x7531);
  r[3] = __byte_perm(k[2], k[3], 0x7531);
}

// All of a tile, by the helper warps. Each of them has its own columns, and fetches some blocks before it puts them
// down: the compiler does not know that the two places do not overlap.
template <int Warps, int Helpers, int AtOnce, class From, class To>
__device__ void transpose_tile(From from, To to) {
  static_assert(From::rows == To::cols && From::cols == To::rows && From::rows % 32 == 0 && From::cols % 16 == 0);
  constexpr int steps = From::rows / 32;
  uint32_t const lane = thread_again() % 32;
  uint32_t const source = from.chunk_address(lane, 0);
  uint32_t const target = to.chunk_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  CUTE_NO_UNROLL
  for (uint32_t block = helper_again<Warps>(); block < From::cols / 16; block += Helpers) {
    uint32_t const out = target + block * 16 * To::row_bytes;
    uint32_t const in = chunk_of<From>(source, block);
    CUTE_UNROLL
    for (int step = 0; step < steps; step += AtOnce) {
      uint32_t r[AtOnce][4];
      CUTE_UNROLL
      for (int i = 0; i < AtOnce && step + i < steps; ++i) {
        ldmatrix_transposed(r[i], in + (step + i) * 32 * From::row_bytes);
      }
      CUTE_UNROLL
      for (int i = 0; i < AtOnce && step + i < steps; ++i) {
        transpose_fp8(r[i]);
        stmatrix(chunk_of<To>(out, 2 * (step + i)), r[i][0], r[i][1], r[i][2], r[i][3]);
      }
    }
  }
}

// A tile that has landed goes, transposed, into the next stage of the ring that consumers read. What the warps stored there, wgmma reads
// through another proxy: each thread fences its own.
template <int Warps, int Helpers = helpers, class From, int Landed, class To, int Stages>
__device__ void transpose(From from, Ring<Landed>& landed, To to, Ring<Stages>& ring) {
  if constexpr (Landed == Stages) {  // they go together: two registers less
    ring.stage = landed.stage;
    ring.phase = landed.phase;
  }
  landed.wait();
  mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
  transpose_tile<Warps, Helpers, (Warps > 8 ? 1 : 4)>(from.stage(landed.stage), to.stage(ring.stage));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    mbarrier_arrive(landed.empty(landed.stage));
    mbarrier_arrive(ring.full + 8 * ring.stage);
  }
  landed.next();
  ring.next();
}

}  // namespace fw
