// Matrix products of tiles with mma.sync: operands from shared memory (ldmatrix) or registers.
#pragma once

#include <cute/arch/mma_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm89.hpp>
#include <fw/fragment.cuh>
#include <fw/shared.cuh>

namespace fw {

// The same, transposed.
__device__ inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// One step of 32 bytes along k: 16 rows of A in four registers, 8 columns of B in two.
template <class Atom>
__device__ void mma(float& d0, float& d1, float& d2, float& d3, uint32_t const (&a)[4], uint32_t b0,
                    uint32_t b1) {
  if constexpr (cute::is_same_v<Atom, cute::SM75_16x8x8_F32F16F16F32_TN>) {  // half a step each
    Atom::fma(d0, d1, d2, d3, a[0], a[1], b0, d0, d1, d2, d3);
    Atom::fma(d0, d1, d2, d3, a[2], a[3], b1, d0, d1, d2, d3);
  } else {
    Atom::fma(d0, d1, d2, d3, a[0], a[1], a[2], a[3], b0, b1, d0, d1, d2, d3);
  }
}

// Operand A as a thread holds it: r[k step][block of 16 rows].
template <int RowBlocks, int Steps>
struct OperandA {
  static constexpr bool in_order = false;  // as its maker left it
  static constexpr int row_blocks = RowBlocks;
  static constexpr int steps = Steps;
  uint32_t r[Steps][RowBlocks][4];

  __device__ void fetch(int step, int block, uint32_t (&out)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = r[step][block][i];
  }
};

// Rows of A in shared memory, k along the columns; the same for each of `Beside` warpgroups.
template <class Tile, int Warps, int Beside = 1>
struct RowsOfA {
  static constexpr bool in_order = true;  // of k
  static constexpr int row_blocks = Tile::rows / (16 * Warps);
  static constexpr int steps = Tile::cols / (2 * Tile::chunk);
  uint32_t own;

  __device__ explicit RowsOfA(Tile tile)
      : own(tile.chunk_address((Beside == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % Warps) * 16 + threadIdx.x % 16,
                               threadIdx.x % 32 / 16)) {
    keep_in_loop(own);
  }

  __device__ void fetch(int step, int block, uint32_t (&r)[4]) const {
    ldmatrix(r, chunk_of<Tile>(own, 2 * step) + block * 16 * Warps * Tile::row_bytes);
  }
};

// A given as k rows of M columns, in 16 bits: transposed on the way.
template <class Tile, int Warps>
struct ColumnsOfA {
  static constexpr bool in_order = true;
  static constexpr int row_blocks = Tile::cols / (16 * Warps);
  static constexpr int steps = Tile::rows / 16;
  uint32_t own;

  __device__ explicit ColumnsOfA(Tile tile)
      : own(tile.chunk_address(threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, threadIdx.x % 16 / 8)) {
    keep_in_loop(own);
  }

  __device__ void fetch(int step, int block, uint32_t (&r)[4]) const {
    uint32_t const first = chunk_of<Tile>(own, 2 * (block * Warps + threadIdx.x / 32));
    ldmatrix_transposed(r, first + step * 16 * Tile::row_bytes);
  }
};

// B given as N rows of k columns (K in Q K^T): 16 rows at a time, no transpose needed.
template <class Tile>
struct RowsOfB {
  static constexpr bool wide = false;
  static constexpr int pairs = Tile::rows / 16;
  static constexpr int steps = Tile::cols / (2 * Tile::chunk);
  uint32_t own;

  __device__ explicit RowsOfB(Tile tile)
      : own(tile.chunk_address(threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8,
                               threadIdx.x % 16 / 8)) {
    keep_in_loop(own);
  }

  __device__ void fetch(int step, int pair, uint32_t (&r)[4]) const {
    ldmatrix(r, chunk_of<Tile>(own, 2 * step) + pair * 16 * Tile::row_bytes);
  }
};

// B given as k rows of N columns (V in P V): 16 columns at a time, transposed on the way.
template <class Tile>
struct ColumnsOfB {
  static constexpr bool wide = false;
  static constexpr int pairs = Tile::cols / 16;
  static constexpr int steps = Tile::rows / 16;
  uint32_t own;

  __device__ explicit ColumnsOfB(Tile tile)
      : own(tile.chunk_address(threadIdx.x % 16, threadIdx.x % 32 / 16)) {
    keep_in_loop(own);
  }

  __device__ void fetch(int step, int pair, uint32_t (&r)[4]) const {
    ldmatrix_transposed(r, chunk_of<Tile>(own, 2 * pair) + step * 16 * Tile::row_bytes);
  }
};

// The same in fp8. ldmatrix transposes units of 16 bits, so a thread gets two columns at once: the
// even ones make one block of 8 columns, the odd ones the other (the accumulator is wide), and k comes
// in the order 2q, 2q + 1, 8 + 2q, 9 + 2q, which is the order of what a thread holds of P.
template <class Tile>
struct Fp8ColumnsOfB {
  static constexpr bool wide = true;
  static constexpr int pairs = Tile::cols / 16;
  static constexpr int steps = Tile::rows / 32;
  uint32_t own;

  __device__ explicit Fp8ColumnsOfB(Tile tile) : own(tile.chunk_address(threadIdx.x % 32, 0)) {
    keep_in_loop(own);
  }

  __device__ void fetch(int step, int pair, uint32_t (&r)[4]) const {
    uint32_t k[4];
    ldmatrix_transposed(k, chunk_of<Tile>(own, pair) + step * 32 * Tile::row_bytes);
    r[0] = __byte_perm(k[0], k[1], 0x6420);
    r[1] = __byte_perm(k[2], k[3], 0x6420);
    r[2] = __byte_perm(k[0], k[1], 0x7531);
    r[3] = __byte_perm(k[2], k[3], 0x7531);
  }
};

// The operands of a product, as the program names them.
template <int Warps, class Tile>
__device__ auto left(Tile tile) {
  return RowsOfA<Tile, Warps>(tile);
}

template <int Warps, class Tile>
__device__ auto left_transposed(Tile tile) {
  return ColumnsOfA<Tile, Warps>(tile);
}

template <class Tile>
__device__ auto right_transposed(Tile tile) {
  return RowsOfB<Tile>(tile);
}

template <class Tile>
__device__ auto right(Tile tile) {
  if constexpr (sizeof(typename Tile::value_type) == 1) {
    return Fp8ColumnsOfB<Tile>(tile);
  } else {
    return ColumnsOfB<Tile>(tile);
  }
}

// acc += A B for one step along k. InOrder: the warp meets before each fetch of B, which ptxas then leaves in its place.
template <class Atom, bool InOrder = false, class A, class B, class Acc>
__device__ void gemm_step(Acc& acc, A const& a, B const& b, int step) {
  static_assert(!(A::in_order && B::wide), "k comes in another order in the two operands");
  uint32_t left[A::row_blocks][4];
  CUTE_UNROLL
  for (int m = 0; m < A::row_blocks; ++m) a.fetch(step, m, left[m]);
  CUTE_UNROLL
  for (int pair = 0; pair < B::pairs; ++pair) {
    uint32_t right[4];
    if constexpr (InOrder) __syncwarp();
    b.fetch(step, pair, right);
    CUTE_UNROLL
    for (int m = 0; m < A::row_blocks; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < 2; ++n) {
        int const row = 2 * m;
        int const col = 4 * pair + (B::wide ? n : 2 * n), next = col + (B::wide ? 2 : 1);
        mma<Atom>(acc(row, col), acc(row, next), acc(row + 1, col), acc(row + 1, next), left[m],
                  right[2 * n], right[2 * n + 1]);
      }
    }
  }
}

// acc += A B. The compiler fetches operands as far ahead as registers allow.
template <class Atom, class A, class B, class Acc>
__device__ void gemm(Acc& acc, A const& a, B const& b) {
  static_assert(decltype(cute::size<1>(acc))::value == 4 * B::pairs && A::steps == B::steps);
  CUTE_UNROLL
  for (int step = 0; step < A::steps; ++step) gemm_step<Atom>(acc, a, b, step);
}

// The same with operands of one step at a time: for kernels that would spill otherwise.
template <class Atom, class A, class B, class Acc>
__device__ void gemm_rolled(Acc& acc, A const& a, B const& b) {
  static_assert(decltype(cute::size<1>(acc))::value == 4 * B::pairs && A::steps == B::steps);
  CUTE_NO_UNROLL
  for (int step = 0; step < A::steps; ++step) gemm_step<Atom>(acc, a, b, step);
}

// The same where A is in registers, which a loop cannot count: operands of two blocks of columns at a time.
template <class Atom, class A, class B, class Acc>
__device__ void gemm_in_order(Acc& acc, A const& a, B const& b) {
  static_assert(decltype(cute::size<1>(acc))::value == 4 * B::pairs && A::steps == B::steps);
  CUTE_UNROLL
  for (int step = 0; step < A::steps; ++step) gemm_step<Atom, true>(acc, a, b, step);
}

// A tile in shared memory as an operand in registers, fetched once.
template <int Warps, int Beside = 1, class Tile>
__device__ auto load_operand(Tile tile) {
  using Rows = RowsOfA<Tile, Warps, Beside>;
  Rows const rows(tile);
  OperandA<Rows::row_blocks, Rows::steps> a;
  CUTE_UNROLL
  for (int step = 0; step < Rows::steps; ++step) {
    CUTE_UNROLL
    for (int m = 0; m < Rows::row_blocks; ++m) rows.fetch(step, m, a.r[step][m]);
  }
  return a;
}

// Four numbers rounded to 8 bits in one register.
template <class T>
__device__ uint32_t pack4(float a, float b, float c, float d) {
  uint16_t low, high;
  if constexpr (cute::is_same_v<T, e4m3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  }
  return low | static_cast<uint32_t>(high) << 16;
}

// Reshape: a result is an operand already, once its columns are rounded, two or four to a register.
template <class T, class Acc>
__device__ auto operand(Acc const& acc) {
  constexpr int columns = 32 / sizeof(T);  // of the tile in one k step; a thread has a quarter
  constexpr int blocks = decltype(cute::size<0>(acc))::value / 2;
  constexpr int steps = decltype(cute::size<1>(acc))::value * 4 / columns;
  OperandA<blocks, steps> a;
  CUTE_UNROLL
  for (int step = 0; step < steps; ++step) {
    CUTE_UNROLL
    for (int m = 0; m < blocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {  // rows 0 and 8 of the first half of the columns, then the other
        int const row = 2 * m + i % 2, col = step * columns / 4 + i / 2 * columns / 8;
        if constexpr (sizeof(T) == 1) {
          a.r[step][m][i] =
              pack4<T>(acc(row, col), acc(row, col + 1), acc(row, col + 2), acc(row, col + 3));
        } else {
          a.r[step][m][i] = pack<T>(acc(row, col), acc(row, col + 1));
        }
      }
    }
  }
  return a;
}

}  // namespace fw
