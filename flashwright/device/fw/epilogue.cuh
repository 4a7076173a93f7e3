// The epilogue: results go through shared memory, where each warp puts its 16 rows in order, so that whole lines are
// written. (Without room for that, `store` has the threads exchange what they hold: many more instructions.)
#pragma once

#include <fw/fragment.cuh>
#include <fw/shared.cuh>

namespace fw {

constexpr int epilogue_bytes = 16 * 128;  // of shared memory for a warp: its rows, 64 columns at a time

// 16 bytes from shared to global memory.
__device__ inline void copy_line(uint32_t from, void* to, bool inside) {
  uint32_t a, b, c, d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
  if (inside) asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Rounds an accumulator of 16 rows for each warp to 16 bits and stores its `valid` rows, of each the columns inside of
// `kept`, which is a multiple of 8.
template <int Warps, int Beside = 1, class Dest, class Tile, class Valid, class Cols = AllColumns>
__device__ void store_epilogue(unsigned char* staging, Dest dst, Tile const& tile, Valid valid, Cols kept = {}) {
  using T = typename Dest::value_type;
  constexpr int cols = 4 * decltype(cute::size<1>(tile))::value;
  static_assert(sizeof(T) == 2 && decltype(cute::size<0>(tile))::value == 2 && cols % 16 == 0);
  using Part = SharedTile<T, 16, cols % 32 ? 16 : cols % 64 ? 32 : 64>;
  constexpr int chunks = Part::cols / 8, rows = 32 / chunks;  // of 8 columns; rows that a warp writes at once
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part const part{reinterpret_cast<T*>(staging + warp * epilogue_bytes)};
  int const share = Beside == 1 ? 0 : warp / Warps;
  int const first = (warp - share * Warps) * 16 + lane / chunks, begin = share * cols + lane % chunks * 8;
  T* line[16 / rows] = {dst.at(first, 0) + begin};
  CUTE_UNROLL
  for (int n = 1; n < 16 / rows; ++n) {
    if constexpr (cute::is_same_v<Dest, GlobalTile<T>>) {
      line[n] = line[n - 1] + times(rows, dst.row);
    } else {
      line[n] = dst.at(first + n * rows, 0) + begin;
    }
  }
  CUTE_UNROLL
  for (int col = 0; col < cols; col += Part::cols) {
    __syncwarp();
    CUTE_UNROLL
    for (int k = 0; k < Part::cols; k += 16) {
      int const n = (col + k) / 4;
      stmatrix(part.chunk_address(lane % 16, k / 8 + lane / 16), pack<T>(tile(0, n), tile(0, n + 1)),
               pack<T>(tile(1, n), tile(1, n + 1)), pack<T>(tile(0, n + 2), tile(0, n + 3)),
               pack<T>(tile(1, n + 2), tile(1, n + 3)));
    }
    __syncwarp();
    CUTE_UNROLL
    for (int n = 0; n < 16 / rows; ++n) {
      uint32_t const from = part.chunk_address(lane / chunks + n * rows, lane % chunks);
      bool const there = inside(first + n * rows, valid) && inside(col + begin, kept);
      copy_line(from, line[n] + col, there);
    }
  }
}

}  // namespace fw
