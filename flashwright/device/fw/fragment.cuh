// Tiles in registers, spread over the threads as the MMA leaves its results: a warp has 16 rows of
// every 16 * Warps; of those, a thread has 2 rows and 2 neighbouring columns in every 8. Where rows are too few for all
// warps, `Beside` warpgroups have the same rows, and each has an equal share of the columns, one beside the other.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/tensor.hpp>
#include <fw/global.cuh>
#include <fw/shared.cuh>

namespace fw {

using cute::Int;

// An accumulator of Rows x Cols, as tile(row, column) over the rows and columns that a thread holds;
// in memory the four values of one m16n8 result stand together.
template <int Rows, int Cols, int Warps>
using Accumulator = cute::Layout<
    cute::Shape<cute::Shape<cute::_2, Int<Rows / (16 * Warps)>>, cute::Shape<cute::_2, Int<Cols / 8>>>,
    cute::Stride<cute::Stride<cute::_2, cute::_4>,
                 cute::Stride<cute::_1, Int<4 * (Rows / (16 * Warps))>>>>;

// The same of a wide tile (see Place), in the order in which wgmma leaves it: of every 16 columns the even ones are one
// m16n8 result, the odd ones the next.
template <int Rows, int Cols, int Warps>
using WideAccumulator = cute::Layout<
    cute::Shape<cute::Shape<cute::_2, Int<Rows / (16 * Warps)>>,
                cute::Shape<cute::_2, cute::_2, Int<Cols / 16>>>,
    cute::Stride<cute::Stride<cute::_2, cute::_4>,
                 cute::Stride<Int<4 * (Rows / (16 * Warps))>, cute::_1,
                              Int<8 * (Rows / (16 * Warps))>>>>;

template <int Rows, int Cols, int Warps, bool Wide = false>
__device__ auto accumulator() {
  if constexpr (Wide) {
    return cute::make_tensor<float>(WideAccumulator<Rows, Cols, Warps>{});
  } else {
    return cute::make_tensor<float>(Accumulator<Rows, Cols, Warps>{});
  }
}

// A vector with one value for each row, or each column, that a thread holds.
template <int Rows, int Warps, class T = float>
__device__ auto row_vector() {
  return cute::make_tensor<T>(cute::Layout<Int<Rows / (8 * Warps)>>{});
}

template <int Cols, class T = float>
__device__ auto col_vector() {
  return cute::make_tensor<T>(cute::Layout<Int<Cols / 4>>{});
}

// A set of the columns of a row that a thread holds: bit n for its n-th column.
template <int N>
struct Columns {
  static constexpr int Words = (N + 31) / 32;
  uint32_t word[Words];

  __device__ bool operator[](int n) const { return word[n / 32] & 1u << n % 32; }
  __device__ Columns operator~() const {
    return made([&](int w) { return ~word[w]; });
  }
  __device__ Columns operator&(Columns const& other) const {
    return made([&](int w) { return word[w] & other.word[w]; });
  }
  __device__ Columns operator|(Columns const& other) const {
    return made([&](int w) { return word[w] | other.word[w]; });
  }
  template <class F>
  __device__ static Columns made(F const& of) {
    Columns found;
    CUTE_UNROLL
    for (int w = 0; w < Words; ++w) {
      found.word[w] = of(w);
    }
    return found;
  }
};

// A whole number of the caller's own, near enough to 0 that sums with positions do not wrap.
__device__ inline int near(int x) { return ::min(::max(x, -(1 << 30)), 1 << 30); }

// Numbers for the columns of a row that a thread holds.
template <class Tile>
__device__ auto row_of(Tile const&) {
  return cute::make_tensor<float>(cute::Layout<decltype(cute::size<1>(cute::declval<Tile>()))>{});
}

// Which row and column of the tile a thread's m-th row and n-th column are. In a wide tile, the
// result of a product with 8-bit columns, a thread has 4 neighbouring columns in every 16. `Cols` are those of the whole
// tile, which need not be known where all warps have them.
template <int Warps, bool Wide = false, int Beside = 1, int Cols = 0>
struct Place {
  static_assert(Beside == 1 || Cols % (8 * Beside) == 0);
  static constexpr int Side = Wide ? 4 : 2;                        // neighbouring columns, of every 4 * Side
  int const share = Beside == 1 ? 0 : threadIdx.x / (32 * Warps);  // of the columns
  int const first_row = (threadIdx.x / 32 - share * Warps) * 16 + threadIdx.x % 32 / 4;
  int const first_col = threadIdx.x % 4 * (Wide ? 4 : 2) + share * (Cols / Beside);

  __device__ int row(int m) const { return first_row + m % 2 * 8 + m / 2 * (16 * Warps); }
  __device__ int col(int n) const { return first_col + n % Side + n / Side * (4 * Side); }

  // How far the n-th column is behind the thread's first: a constant where n is.
  __device__ static constexpr int step(int n) { return n % Side + n / Side * (4 * Side); }

  // Of a thread's columns of a tile: those before column x, all or none, those for which a condition on their number n
  // holds, and the same for one that repeats itself after `Period` columns of the tile, a power of two.
  template <class Tile>
  using ColumnsOf = Columns<decltype(cute::size<1>(cute::declval<Tile>()))::value>;

  template <class Tile>
  __device__ auto before(Tile const&, int x) const {
    int const from = ::max(x - first_col, 0);
    int const count = from / (4 * Side) * Side + ::min(from % (4 * Side), Side);
    return ColumnsOf<Tile>::made([&](int w) { return ~__funnelshift_lc(0u, ~0u, ::max(count - 32 * w, 0)); });
  }
  template <class Tile>
  __device__ auto all(Tile const&, bool condition) const {
    return ColumnsOf<Tile>::made([&](int) { return condition ? ~0u : 0u; });
  }
  template <class Tile, class F>
  __device__ auto where(Tile const&, F const& holds) const {
    constexpr int N = decltype(cute::size<1>(cute::declval<Tile>()))::value;
    return ColumnsOf<Tile>::made([&](int w) {
      return pattern<(N < 32 ? N : 32)>([&](int n) { return 32 * w + n < N && holds(32 * w + n); });
    });
  }
  template <int Period, class Tile, class F>
  __device__ auto every(Tile const&, F const& holds) const {
    constexpr int Own = Period <= 4 * Side ? Side : Period / 4;
    uint32_t found = pattern<Own>(holds);
    CUTE_UNROLL
    for (int more = Own; more < 32; more *= 2) {
      found |= found << more;
    }
    return ColumnsOf<Tile>::made([&](int) { return found; });
  }
  template <int Count, class F>
  __device__ static uint32_t pattern(F const& holds) {
    uint32_t found = 0;
    CUTE_UNROLL
    for (int n = 0; n < Count; ++n) {
      found |= uint32_t(holds(n)) << n;
    }
    return found;
  }
};

// Two numbers rounded to 16 bits, side by side in one register.
template <class T>
__device__ uint32_t pack(float low, float high) {
  if constexpr (cute::is_same_v<T, bf16>) {
    __nv_bfloat162 const both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(both);
  } else {
    static_assert(cute::is_same_v<T, fp16>);
    __half2 const both = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(both);
  }
}

// Four lanes hold, for four groups of columns, one register each: after this, lane l holds all four
// registers of group l, which lie side by side in memory.
__device__ inline void transpose_quad(uint32_t (&r)[4]) {
  bool const odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  uint32_t const give0 = odd ? r[0] : r[1], give1 = odd ? r[2] : r[3];
  uint32_t const got0 = __shfl_xor_sync(0xffffffffu, give0, 1);
  uint32_t const got1 = __shfl_xor_sync(0xffffffffu, give1, 1);
  (odd ? r[0] : r[1]) = got0;
  (odd ? r[2] : r[3]) = got1;
  uint32_t const give2 = upper ? r[0] : r[2], give3 = upper ? r[1] : r[3];
  uint32_t const got2 = __shfl_xor_sync(0xffffffffu, give2, 2);
  uint32_t const got3 = __shfl_xor_sync(0xffffffffu, give3, 2);
  (upper ? r[0] : r[2]) = got2;
  (upper ? r[1] : r[3]) = got3;
}

// Where the elements of a tile are, and those of a vector along its columns.
template <int Warps, bool Wide, int Beside, class Tile>
__device__ auto place_of(Tile const&) {
  return Place<Warps, Wide, Beside, 4 * Beside * decltype(cute::size<1>(Tile{}))::value>{};
}

template <int Warps, int Beside, class Vector>
__device__ auto place_along(Vector const&) {
  return Place<Warps, false, Beside, 4 * Beside * decltype(cute::size(Vector{}))::value>{};
}

// Whether a thread writes for all that have the same value of a vector along the rows, or the columns.
template <int Warps, int Beside = 1>
__device__ bool writes_rows() {
  return threadIdx.x % 4 == 0 && (Beside == 1 || threadIdx.x < 32 * Warps);
}

template <int Warps, int Beside = 1>
__device__ bool writes_cols() {
  return (Beside == 1 ? threadIdx.x : threadIdx.x % (32 * Warps)) < 4;
}

// Rounds an accumulator to 16 bits and stores its `valid` rows, of each the columns inside of `kept_cols` (a multiple of
// 8), 16 bytes at a time (8 where the tile is wide: its columns are neighbours already).
template <int Warps, bool Wide = false, int Beside = 1, class Dest, class Tile, class Valid, class Cols = AllColumns>
__device__ void store(Dest dst, Tile const& tile, Valid valid, Cols kept_cols = {}) {
  using T = typename Dest::value_type;
  constexpr int rows = decltype(cute::size<0>(tile))::value;
  constexpr int cols = decltype(cute::size<1>(tile))::value;
  static_assert(sizeof(T) == 2 && cols % 4 == 0);
  auto const place = place_of<Warps, Wide, Beside>(tile);
  int const before = Beside == 1 ? 0 : place.share * cols * 4;  // columns of other warpgroups
  CUTE_UNROLL
  for (int m = 0; m < rows; ++m) {
    bool const kept = inside(place.row(m), valid);
    T* const line = dst.at(place.row(m), 0);
    CUTE_UNROLL
    for (int n = 0; n < cols; n += Wide ? 4 : 8) {
      if constexpr (Wide) {
        uint2 const both = make_uint2(pack<T>(tile(m, n), tile(m, n + 1)),
                                      pack<T>(tile(m, n + 2), tile(m, n + 3)));
        if (kept && inside(place.col(n), kept_cols)) *reinterpret_cast<uint2*>(line + place.col(n)) = both;
      } else {
        uint32_t r[4];
        CUTE_UNROLL
        for (int k = 0; k < 4; ++k) {  // of the last 16 columns of a tile, two lanes have none
          r[k] = n + 2 * k < cols ? pack<T>(tile(m, n + 2 * k), tile(m, n + 2 * k + 1)) : 0;
        }
        transpose_quad(r);
        T* const to = line + before + n * 4 + threadIdx.x % 4 * 8;
        bool const there = n + 8 <= cols || threadIdx.x % 4 < 2;
        if (kept && there && inside(static_cast<int>(before + n * 4 + threadIdx.x % 4 * 8), kept_cols)) {
          *reinterpret_cast<uint4*>(to) = make_uint4(r[0], r[1], r[2], r[3]);
        }
      }
    }
  }
}

// Calls body(row of the tile, column of the tile, element) for all that a thread holds.
template <int Warps, bool Wide, int Beside, class Tile, class Body>
__device__ void each_element(Tile& tile, Body body) {
  auto const place = place_of<Warps, Wide, Beside>(tile);
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
    CUTE_UNROLL
    for (int n = 0; n < decltype(cute::size<1>(tile))::value; ++n) {
      body(place.row(m), place.col(n), tile(m, n));
    }
  }
}

// Any tile of any element type to and from global memory, element by element; outside: 0, not stored.
template <int Warps, bool Wide = false, int Beside = 1, class To, class Tile, class Rows, class Cols>
__device__ void store_elements(To dst, Tile const& tile, Rows rows, Cols cols) {
  auto const place = place_of<Warps, Wide, Beside>(tile);
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
    if (!inside(place.row(m), rows)) continue;
    auto const line = row_of(dst, place.row(m));
    CUTE_UNROLL
    for (int n = 0; n < decltype(cute::size<1>(tile))::value; ++n) {
      if (inside(place.col(n), cols)) put(line, 0, place.col(n), tile(m, n));
    }
  }
}

template <class T>
constexpr bool is_16_bit = cute::is_same_v<T, bf16> || cute::is_same_v<T, fp16>;

// Two neighbouring 16-bit elements as numbers.
template <class T>
__device__ void unpack(uint32_t both, float& low, float& high) {
  if constexpr (cute::is_same_v<T, bf16>) {
    low = __uint_as_float(both << 16);
    high = __uint_as_float(both & 0xffff0000u);
  } else {
    float2 const pair = __half22float2(reinterpret_cast<__half2 const&>(both));
    low = pair.x;
    high = pair.y;
  }
}

// Two neighbouring elements of global memory as numbers, or zeros. They are asked for where this stands: the compiler would
// move the load down to its use, and wait.
template <int Offset, class T, class U>
__device__ void load_pair(T const* from, bool inside, U& low, U& high) {
  if constexpr (is_16_bit<T>) {
    uint32_t both;
    asm volatile(
        "{\n"
        ".reg .pred inside;\n"
        "setp.ne.b32 inside, %2, 0;\n"
        "mov.b32 %0, 0;\n"
        "@inside ld.global.nc.b32 %0, [%1 + %3];\n"
        "}"
        : "=r"(both)
        : "l"(from), "r"(static_cast<int>(inside)), "n"(Offset * sizeof(T)));
    unpack<T>(both, low, high);
  } else {
    static_assert(sizeof(T) == 4);
    uint32_t one, two;
    asm volatile(
        "{\n"
        ".reg .pred inside;\n"
        "setp.ne.b32 inside, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@inside ld.global.nc.v2.b32 {%0, %1}, [%2 + %4];\n"
        "}"
        : "=r"(one), "=r"(two)
        : "l"(from), "r"(static_cast<int>(inside)), "n"(Offset * sizeof(T)));
    low = static_cast<U>(reinterpret_cast<T const&>(one));
    high = static_cast<U>(reinterpret_cast<T const&>(two));
  }
}

// The columns of a line that a thread holds, from the first of them on, of which the next `rest` of the line are inside.
template <class T, class Line>
__device__ void load_line(Line&& line, T const* from, int rest) {
  cute::for_each(cute::make_int_sequence<decltype(cute::size(line))::value / 2>{}, [&](auto pair) {
    constexpr int offset = 8 * decltype(pair)::value;
    load_pair<offset>(from, offset < rest, line(2 * pair), line(2 * pair + 1));
  });
}

// Whether the elements of lines that are so far apart can be loaded in pairs: a pair is aligned, and inside as a whole.
template <int Extent, class T>
__device__ bool in_pairs(T const* first, uint32_t step, uint32_t line, int valid) {
  bool const aligned = reinterpret_cast<uintptr_t>(first) % (2 * sizeof(T)) == 0 && line % 2 == 0;
  return step == 1 && aligned && (valid % 2 == 0 || valid >= Extent);
}

template <class Source>
constexpr bool has_pairs = false;
template <class T>
constexpr bool has_pairs<GlobalTile<T>> = is_16_bit<T> || sizeof(T) == 4;

// Calls body(row of the tile, column of the tile, element, its right neighbour) for all pairs that a thread holds.
template <int Warps, int Beside, class Tile, class Body>
__device__ void each_pair(Tile& tile, Body body) {
  auto const place = place_of<Warps, false, Beside>(tile);
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
    CUTE_UNROLL
    for (int n = 0; n < decltype(cute::size<1>(tile))::value; n += 2) {
      body(place.row(m), place.col(n), tile(m, n), tile(m, n + 1));
    }
  }
}

// Adds 4 neighbouring columns of a line at once. A thread has 2 of 8 columns: neighbours exchange theirs of two blocks of 8,
// so that even threads have 4 of the first block, and odd ones 4 of the second.
template <class Line>
__device__ void add_line(float* line, Line const& values, bool there) {
  bool const odd = threadIdx.x & 1;
  float* const to = line + (odd ? 6 : 0);
  CUTE_UNROLL
  for (int n = 0; n < decltype(cute::size(values))::value; n += 4) {
    float const low = __shfl_xor_sync(0xffffffffu, odd ? values(n) : values(n + 2), 1);
    float const high = __shfl_xor_sync(0xffffffffu, odd ? values(n + 1) : values(n + 3), 1);
    float const a = odd ? low : values(n), b = odd ? high : values(n + 1);
    float const c = odd ? values(n + 2) : low, d = odd ? values(n + 3) : high;
    if (there) asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * n), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
  }
}

// Adds a tile to global memory. Lines begin at multiples of 16 bytes, and of their columns all or an even number are inside.
template <int Warps, int Beside = 1, class Dest, class Tile, class Rows, class Cols = AllColumns>
__device__ void add_tile(Dest dst, Tile const& tile, Rows rows, Cols cols = {}) {
  constexpr int count = decltype(cute::size<1>(tile))::value;
  auto const place = place_of<Warps, false, Beside>(tile);
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
    bool const there = inside(place.row(m), rows);
    float* const line = dst.at(place.row(m), 0) + place.col(0);
#if __CUDA_ARCH__ >= 900
    if constexpr (cute::is_same_v<Cols, AllColumns> && count % 4 == 0) {
      add_line(line, tile(m, cute::_), there);
      continue;
    }
#endif
    CUTE_UNROLL
    for (int n = 0; n < count; n += 2) {
      if (there && inside(place.col(n), cols)) add_to(line + place.step(n), tile(m, n), tile(m, n + 1));
    }
  }
}

template <int Warps, bool Wide = false, int Beside = 1, class Source, class Tile, class Rows, class Cols>
__device__ void load(Tile& tile, Source src, Rows rows, Cols cols) {
  if constexpr (!Wide && has_pairs<Source> && cute::is_same_v<Cols, int>) {
    auto const place = place_of<Warps, Wide, Beside>(tile);
    if (in_pairs<4 * Beside * decltype(cute::size<1>(tile))::value>(src.data, src.col, src.row, cols)) {
      CUTE_UNROLL
      for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
        int const rest = inside(place.row(m), rows) ? cols - place.col(0) : 0;
        load_line(tile(m, cute::_), src.at(place.row(m), 0) + place.col(0), rest);
      }
      return;
    }
  }
  auto const place = place_of<Warps, Wide, Beside>(tile);
  constexpr int count = decltype(cute::size<1>(tile))::value;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size<0>(tile))::value; ++m) {
    bool const there = inside(place.row(m), rows);
    auto const line = row_of(src, place.row(m));
    if constexpr (!Wide && has_pairs<std::remove_const_t<decltype(line)>> && cute::is_same_v<Cols, int>) {
      if (in_pairs<4 * Beside * count>(line.data, line.col, 0, cols)) {
        load_line(tile(m, cute::_), line.data + place.col(0), there ? cols - place.col(0) : 0);
        continue;
      }
    }
    CUTE_UNROLL
    for (int n = 0; n < count; ++n) {
      tile(m, n) = there && inside(place.col(n), cols) ? static_cast<float>(*line.at(0, place.col(n))) : 0.f;
    }
  }
}

// Tensors in fragments: of every 16 rows and 8 columns the 128 elements lie together, as a warp holds them. On Hopper the 4
// of a thread are neighbours, so that a warp adds 512 bytes in one go; before it, 4 bytes are added at a time, and those of
// the 32 threads are neighbours. There is memory for all rows of a tile, also beyond the end.
#if __CUDA_ARCH__ >= 900
constexpr int fragment_step = 1;
#else
constexpr int fragment_step = 32;
#endif

template <int Warps, int Beside, class Tile, class Body>
__device__ void each_fragment(GlobalTile<float> at, Tile& tile, Body body) {
  constexpr int across = decltype(cute::size<1>(tile))::value / 2;
  int const warp = threadIdx.x / 32, share = Beside == 1 ? 0 : warp / Warps;
  float* first = at.at((warp - share * Warps) * 16, 0) + share * across * 128;
  first += threadIdx.x % 32 * (fragment_step == 1 ? 4 : 1);
  asm volatile("" : "+l"(first));  // the others are steps from it
  CUTE_UNROLL
  for (int block = 0; block < decltype(cute::size<0>(tile))::value / 2; ++block) {
    CUTE_UNROLL
    for (int n = 0; n < across; ++n) {
      body(first + times(block * Warps * 16, at.row) + n * 128, tile(2 * block, 2 * n), tile(2 * block, 2 * n + 1),
           tile(2 * block + 1, 2 * n), tile(2 * block + 1, 2 * n + 1));
    }
  }
}

template <int Warps, int Beside = 1, class Tile>
__device__ void add_fragments(GlobalTile<float> dst, Tile const& tile) {
#if __CUDA_ARCH__ < 900
  if (dst.data == nullptr) return;  // never: a branch keeps the products before and behind it apart, and so registers free
#endif
  each_fragment<Warps, Beside>(dst, tile, [](float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
    float const values[4] = {a, b, c, d};
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + n * fragment_step), "f"(values[n]) : "memory");
    }
#endif
  });
}

template <int Warps, int Beside = 1, class Tile>
__device__ void load_fragments(Tile& tile, GlobalTile<float> src) {
  each_fragment<Warps, Beside>(src, tile, [](float const* from, float& a, float& b, float& c, float& d) {
#if __CUDA_ARCH__ >= 900
    float4 const held = *reinterpret_cast<float4 const*>(from);
    a = held.x, b = held.y, c = held.z, d = held.w;
#else
    a = from[0], b = from[fragment_step], c = from[2 * fragment_step], d = from[3 * fragment_step];
#endif
  });
}

// A tile rounded to 16 bits, in blocks of 16 x 16. Its addresses are steps from one that a thread computes once.
template <int Warps, class Shared, class Tile>
__device__ void blocks_to_shared(Shared dst, Tile const& tile) {
  using T = typename Shared::value_type;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  uint32_t own = dst.chunk_address(warp * 16 + lane % 16, lane / 16);
#else
  uint32_t own = dst.chunk_address(warp * 16 + lane / 4, 0) + lane % 4 * 4;
#endif
  keep_in_loop(own);
  CUTE_UNROLL
  for (int block = 0; block < Shared::rows / (16 * Warps); ++block) {
    CUTE_UNROLL
    for (int step = 0; step < Shared::cols / 16; ++step) {
      uint32_t const at = own + block * 16 * Warps * Shared::row_bytes;
      uint32_t r[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const m = 2 * block + i % 2, n = 4 * step + i / 2 * 2;
        r[i] = pack<T>(tile(m, n), tile(m, n + 1));
      }
#if __CUDA_ARCH__ >= 900
      stmatrix(chunk_of<Shared>(at, 2 * step), r[0], r[1], r[2], r[3]);
#else
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t const to = chunk_of<Shared>(at, 2 * step + i / 2) + i % 2 * 8 * Shared::row_bytes;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(r[i]) : "memory");
      }
#endif
    }
  }
}

// Between registers and shared memory, by blocks or pairs of 16-bit elements or element by element.
template <int Warps, bool Wide = false, int Beside = 1, class Shared, class Tile>
__device__ void to_shared(Shared dst, Tile const& tile) {
  using T = typename Shared::value_type;
  if constexpr (!Wide && Beside == 1 && is_16_bit<T> && Shared::cols % 16 == 0) {
    return blocks_to_shared<Warps>(dst, tile);
  }
  auto to = dst.tensor();
  if constexpr (!Wide && is_16_bit<T>) {
    each_pair<Warps, Beside>(tile, [&](int row, int col, float low, float high) {
      *reinterpret_cast<uint32_t*>(&to(row, col)) = pack<T>(low, high);
    });
    return;
  }
  each_element<Warps, Wide, Beside>(tile, [&](int row, int col, auto const& x) {
    to(row, col) = static_cast<T>(x);
  });
}

template <int Warps, bool Wide = false, int Beside = 1, class Shared, class Tile>
__device__ void from_shared(Tile& tile, Shared src) {
  using T = typename Shared::value_type;
  auto from = src.tensor();
  if constexpr (!Wide && Beside == 1 && is_16_bit<T> && Shared::cols % 16 == 0) {  // blocks of 16 x 16
    uint32_t own = src.chunk_address(threadIdx.x / 32 * 16 + threadIdx.x % 16, threadIdx.x % 32 / 16);
    keep_in_loop(own);
    CUTE_UNROLL
    for (int step = 0; step < Shared::cols / 16; ++step) {
      CUTE_UNROLL
      for (int block = 0; block < Shared::rows / (16 * Warps); ++block) {
        uint32_t r[4];
        ldmatrix(r, chunk_of<Shared>(own, 2 * step) + block * 16 * Warps * Shared::row_bytes);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const m = 2 * block + i % 2, n = 4 * step + i / 2 * 2;
          unpack<T>(r[i], tile(m, n), tile(m, n + 1));
        }
      }
    }
  } else if constexpr (!Wide && is_16_bit<T>) {
    each_pair<Warps, Beside>(tile, [&](int row, int col, float& low, float& high) {
      unpack<T>(*reinterpret_cast<uint32_t const*>(&from(row, col)), low, high);
    });
  } else if constexpr (!Wide && cute::is_same_v<T, float>) {
    each_pair<Warps, Beside>(tile, [&](int row, int col, float& low, float& high) {
      float2 const both = *reinterpret_cast<float2 const*>(&from(row, col));
      low = both.x;
      high = both.y;
    });
  } else {
    each_element<Warps, Wide, Beside>(
        tile, [&](int row, int col, auto& x) { x = static_cast<float>(from(row, col)); });
  }
  __syncwarp();  // one of the warp may hand the stage back next
}

// Elementwise work from one shared tile to another: to(row, column) = f(m, n, from(row, column)), of the rows and columns
// that a thread would hold in registers, eight of them at a time.
template <int Warps, int Beside = 1, class To, class From, class F>
__device__ void restage(To to_tile, From from_tile, F f) {
  using T = typename From::value_type;
  using U = typename To::value_type;
  static_assert(is_16_bit<T> && is_16_bit<U> && From::rows % (16 * Warps) == 0 && From::cols % (16 * Beside) == 0);
  constexpr int pairs = 4, cols = From::cols / (4 * Beside);  // of a thread
  auto from = from_tile.tensor();
  auto to = to_tile.tensor();
  Place<Warps, false, Beside, From::cols> const place;
  CUTE_UNROLL
  for (int m = 0; m < From::rows / (8 * Warps); ++m) {
    CUTE_UNROLL
    for (int first = 0; first < cols; first += 2 * pairs) {
      uint32_t held[pairs];
      CUTE_UNROLL
      for (int k = 0; k < pairs && first + 2 * k < cols; ++k) {
        held[k] = *reinterpret_cast<uint32_t const*>(&from(place.row(m), place.col(first + 2 * k)));
      }
      CUTE_UNROLL
      for (int k = 0; k < pairs && first + 2 * k < cols; ++k) {
        int const n = first + 2 * k;
        float low, high;
        unpack<T>(held[k], low, high);
        *reinterpret_cast<uint32_t*>(&to(place.row(m), place.col(n))) = pack<U>(f(m, n, low), f(m, n + 1, high));
      }
    }
  }
  __syncwarp();
}

// Vectors along the rows or the columns of a tile, to and from shared memory.
template <int Warps, int Beside = 1, class To, class Vector>
__device__ void rows_to_shared(To to, Vector const& values) {
  Place<Warps, false, Beside> const place;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(values))::value; ++m) {
    if (writes_rows<Warps, Beside>()) to.data[place.row(m)] = static_cast<cute::remove_cvref_t<decltype(*to.data)>>(values(m));
  }
}

template <int Warps, int Beside = 1, class To, class Vector>
__device__ void cols_to_shared(To to, Vector const& values) {
  auto const place = place_along<Warps, Beside>(values);
  CUTE_UNROLL
  for (int n = 0; n < decltype(cute::size(values))::value; ++n) {
    if (writes_cols<Warps, Beside>()) to.data[place.col(n)] = static_cast<cute::remove_cvref_t<decltype(*to.data)>>(values(n));
  }
}

template <int Warps, int Beside = 1, class Vector, class From>
__device__ void rows_from_shared(Vector& values, From from) {
  Place<Warps, false, Beside> const place;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(values))::value; ++m) {
    values(m) = static_cast<typename Vector::value_type>(from.data[place.row(m)]);
  }
  __syncwarp();  // one of the warp may hand the stage back next
}

template <int Warps, int Beside = 1, class Vector, class From>
__device__ void cols_from_shared(Vector& values, From from) {
  auto const place = place_along<Warps, Beside>(values);
  CUTE_UNROLL
  for (int n = 0; n < decltype(cute::size(values))::value; ++n) {
    values(n) = static_cast<typename Vector::value_type>(from.data[place.col(n)]);
  }
  __syncwarp();
}

// A vector along the columns that a thread reads in shared memory, where it needs an element.
template <class T, class At>
struct ColumnsInShared {
  T const* data;
  At const at;

  __device__ auto operator()(int n) const { return static_cast<cute::conditional_t<cute::is_same_v<T, int>, int, float>>(data[at.col(n)]); }
};

template <int Cols, int Warps, int Beside = 1, class From>
__device__ auto cols_in_shared(From from) {
  return ColumnsInShared<cute::remove_cvref_t<decltype(*from.data)>, Place<Warps, false, Beside, Cols>>{from.data, {}};
}

// Vectors along the rows or the columns of a tile, of which the `valid` ones are inside.
template <int Warps, int Beside = 1, class To, class Vector, class Valid>
__device__ void store_rows(To dst, Vector const& values, Valid valid) {
  Place<Warps, false, Beside> const place;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(values))::value; ++m) {
    if (writes_rows<Warps, Beside>() && inside(place.row(m), valid)) put(dst, place.row(m), 0, values(m));
  }
}

template <int Warps, int Beside = 1, class To, class Vector, class Valid>
__device__ void store_cols(To dst, Vector const& values, Valid valid) {
  auto const place = place_along<Warps, Beside>(values);
  CUTE_UNROLL
  for (int n = 0; n < decltype(cute::size(values))::value; ++n) {
    if (writes_cols<Warps, Beside>() && inside(place.col(n), valid)) put(dst, place.col(n), 0, values(n));
  }
}

template <int Warps, int Beside = 1, class Source, class Vector, class Valid>
__device__ void load_rows(Vector& values, Source src, Valid valid) {
  using Value = typename Vector::value_type;
  Place<Warps, false, Beside> const place;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(values))::value; ++m) {
    values(m) = inside(place.row(m), valid) ? static_cast<Value>(*src.at(place.row(m), 0)) : Value(0);
  }
}

template <int Warps, int Beside = 1, class Source, class Vector, class Valid>
__device__ void load_cols(Vector& values, Source src, Valid valid) {
  using Value = typename Vector::value_type;
  constexpr int count = decltype(cute::size(values))::value;
  auto const place = place_along<Warps, Beside>(values);
  if constexpr (has_pairs<Source> && cute::is_same_v<Valid, int>) {
    if (in_pairs<4 * Beside * count>(src.data, src.row, 0, valid)) {
      return load_line(values, src.data + place.col(0), valid - place.col(0));
    }
  }
  CUTE_UNROLL
  for (int n = 0; n < count; ++n) {
    values(n) = inside(place.col(n), valid) ? static_cast<Value>(*src.at(place.col(n), 0)) : Value(0);
  }
}

}  // namespace fw
