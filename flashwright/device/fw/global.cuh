// Tensors in global memory as the launcher passes them, and tiles in them.
#pragma once

#include <cstdint>
#include <utility>

#include <cute/numeric/numeric_types.hpp>

namespace fw {

using bf16 = cute::bfloat16_t;
using fp16 = cute::half_t;
using e4m3 = cute::float_e4m3_t;
using e5m2 = cute::float_e5m2_t;

// Coordinates and the steps within a tile are not negative and fit into 32 bits (the launcher sees to
// the strides), so that a place takes one multiplication.
__device__ inline uint64_t times(uint32_t count, uint32_t step) {
  return static_cast<uint64_t>(count) * step;
}

// Where a tile begins, and how far its rows and columns are apart, in elements.
template <class T>
struct GlobalTile {
  using value_type = T;
  T* data;
  uint32_t row;
  uint32_t col;

  __device__ T* at(int r, int c) const { return data + times(r, row) + times(c, col); }

  // A row, and what follows it.
  __device__ GlobalTile from_row(int r) const { return {data + times(r, row), row, col}; }

  // So many rows and columns further, or back, where that is before the start of the tensor.
  __device__ GlobalTile moved(int rows, int cols) const {
    return {data + rows * static_cast<int64_t>(row) + cols * static_cast<int64_t>(col), row, col};
  }
};

// A tile whose rows lie in pages of `Size` rows: those of a sequence from position `first` on. `page(n)` is its n-th page.
// Of rows outside, from `rows` on or before the first position, only the nearest one's page is asked for.
template <int Size, class Page>
struct PagedTile {
  using value_type = typename decltype(std::declval<Page>()(0))::value_type;
  int first, rows;
  Page page;

  // A row: no other one is at a place that is known from it.
  __device__ GlobalTile<value_type> from_row(int r) const {
    uint32_t const place = ::max(first + ::min(r, rows - 1), 0);
    return page(static_cast<int>(place / Size)).from_row(static_cast<int>(place % Size));
  }

  __device__ value_type* at(int r, int c) const { return from_row(r).at(0, c); }
};

template <int Size, class Page>
__device__ PagedTile<Size, Page> paged(int first, int rows, Page page) {
  return {first, rows, page};
}

// Adds to a number in global memory, to which other threads may add at the same time: in which order, is open.
__device__ inline void add_to(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// The same for two neighbours; the first is aligned to 8 bytes.
__device__ inline void add_to(float* to, float low, float high) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(low), "f"(high) : "memory");
#else
  add_to(to, low);
  add_to(to + 1, high);
#endif
}

// A tile that is added to by what is stored to it.
template <class Tile>
struct AddedTile {
  Tile tile;
};

template <class Tile>
__device__ AddedTile<Tile> added(Tile tile) {
  return {tile};
}

// One row of a tile.
template <class Tile>
__device__ auto row_of(Tile tile, int r) {
  return tile.from_row(r);
}

template <class Tile>
__device__ auto row_of(AddedTile<Tile> tile, int r) {
  return added(tile.tile.from_row(r));
}

// An element of a tile gets a value, or has it added.
template <class Dest, class U>
__device__ void put(Dest dst, int row, int col, U x) {
  *dst.at(row, col) = static_cast<typename Dest::value_type>(x);
}

template <class Tile, class U>
__device__ void put(AddedTile<Tile> dst, int row, int col, U x) {
  add_to(dst.tile.at(row, col), static_cast<float>(x));
}

// The rows or columns of a tile that lie in the tensor: from one on, up to another, where it may begin before the start.
// Where it cannot, their number is enough.
struct Inside {
  int first, end;
};

// Where all columns do: nothing is compared.
struct AllColumns {};

__device__ constexpr bool inside(int, AllColumns) { return true; }
__device__ inline bool inside(int place, int count) { return place < count; }
__device__ inline bool inside(int place, Inside bounds) { return place >= bounds.first && place < bounds.end; }

// Memory layout shared with the launcher: the pointer, then one stride for each axis.
template <class T, int Axes>
struct Global {
  T* data;
  uint64_t stride[Axes];

  // The element at the coordinates; axes left out at the end count as 0.
  template <class... Coords>
  __device__ T* at(Coords... coords) const {
    static_assert(sizeof...(Coords) <= Axes);
    T* found = data;
    int axis = 0;
    ((found += static_cast<uint32_t>(coords) * stride[axis++]), ...);
    return found;
  }

  // The same axes, beginning elsewhere in memory.
  __device__ Global from(int64_t offset) const {
    Global moved = *this;
    moved.data += offset;
    return moved;
  }

  // How many bytes the elements along an axis are apart.
  template <int Axis>
  __device__ auto step() const {
    if constexpr (Axis + 2 >= Axes) {
      return static_cast<uint32_t>(stride[Axis]) * static_cast<uint32_t>(sizeof(T));  // the launcher sees to it
    } else {
      return stride[Axis] * sizeof(T);
    }
  }

  // A tile of rows and columns (the last two axes) that begins at the coordinates.
  template <class... Coords>
  __device__ GlobalTile<T> tile(Coords... coords) const {
    return {at(coords...), static_cast<uint32_t>(stride[Axes >= 2 ? Axes - 2 : 0]),
            static_cast<uint32_t>(stride[Axes - 1])};
  }

  // A tile of the last axis alone.
  template <class... Coords>
  __device__ GlobalTile<T> line(Coords... coords) const {
    return {at(coords...), static_cast<uint32_t>(stride[Axes - 1]), 0};
  }
};

// Whole division that rounds down or up, whatever the sign; the divisor is positive.
__device__ constexpr int floor_div(int a, int b) { return a / b - (a % b < 0); }
__device__ constexpr int ceil_div(int a, int b) { return a / b + (a % b > 0); }

// What a division that rounds down leaves: it has the sign of the divisor.
__device__ constexpr int floor_mod(int a, int b) {
  int const rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// By a power of two: a shift, and what it leaves a mask. nvcc takes eight instructions.
template <int B>
__device__ constexpr int floor_div(int a) {
  static_assert(B > 0 && (B & (B - 1)) == 0);
  return a >> (31 - __builtin_clz(B));
}
template <int B>
__device__ constexpr int floor_mod(int a) {
  static_assert(B > 0 && (B & (B - 1)) == 0);
  return a & (B - 1);
}
__device__ inline float floor_mod(float a, float b) {
  float const rest = ::fmodf(a, b);
  return rest != 0.f && (rest < 0.f) != (b < 0.f) ? rest + b : rest;
}

// An index that was computed in fp32, rounded down; far from the ends of an int, so that sums with it do not wrap.
__device__ inline int whole(float x) {
  return __float2int_rd(::fminf(::fmaxf(x, -1073741824.f), 1073741824.f));
}

// The element that lies so many steps (of so many bytes) along some axes from another one, as it is computed with; places
// are not negative. A plain load: the compiler makes one of those that neighbouring elements share, which it does not do
// with __ldg.
template <class T, class Step>
__device__ auto gather(T const* line, int places, Step step) {
  uint64_t const bytes = static_cast<uint64_t>(static_cast<uint32_t>(places)) * step;
  T const found = *reinterpret_cast<T const*>(reinterpret_cast<char const*>(line) + bytes);
  if constexpr (cute::is_same_v<T, int>) {
    return found;
  } else {
    return static_cast<float>(found);
  }
}

template <class T, class Step, class... More>
__device__ auto gather(T const* line, int places, Step step, More... more) {
  uint64_t const bytes = static_cast<uint64_t>(static_cast<uint32_t>(places)) * step;
  return gather(reinterpret_cast<T const*>(reinterpret_cast<char const*>(line) + bytes), more...);
}

// Adds a number to the element that lies so many steps along some axes from another one. Zeros, as masked elements are,
// are not added.
__device__ inline void add_by_index(float x, float* to) {
  if (x != 0.f) add_to(to, x);
}

template <class Step, class... More>
__device__ void add_by_index(float x, float* line, int places, Step step, More... more) {
  uint64_t const bytes = static_cast<uint64_t>(static_cast<uint32_t>(places)) * step;
  add_by_index(x, reinterpret_cast<float*>(reinterpret_cast<char*>(line) + bytes), more...);
}

}  // namespace fw
