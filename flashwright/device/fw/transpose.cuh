// Tiles of 8 bits that are turned on their way. wgmma multiplies bytes only where k lies along the rows of both
// operands, and V lies the other way. TMA puts such a tile down as it is; three warps, beside the thread that asks for
// tiles, turn it into the ring that the warpgroups read.
#pragma once

#include <fw/mma.cuh>
#include <fw/ring.cuh>

namespace fw {

constexpr int turners = 3;  // warps

// Whether this thread turns tiles: all warps of the last warpgroup but the first.
template <int Warps>
__device__ bool is_turner() {
  return threadIdx.x >= 32 * (Warps + 4 - turners);
}

// 32 rows and 16 columns of a tile, turned. ldmatrix transposes units of 16 bits, so that a thread gets two columns at
// once, which the byte permutes take apart: even columns become one block of 8 rows, odd ones the next (the product is
// a wide one), and k comes in the order 2q, 2q + 1, 8 + 2q, 9 + 2q, which is that of what a thread holds of P.
__device__ inline void turn(uint32_t (&r)[4]) {
  uint32_t const k[4] = {r[0], r[1], r[2], r[3]};
  r[0] = __byte_perm(k[0], k[1], 0x6420);
  r[1] = __byte_perm(k[2], k[3], 0x6420);
  r[2] = __byte_perm(k[0], k[1], 0x7531);
  r[3] = __byte_perm(k[2], k[3], 0x7531);
}

// The number of this thread, asked for anew: a thread that loads has few registers, and what is computed of it is not
// worth one in between.
__device__ inline uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// All of a tile, by the warps that turn. Each of them has its own columns, and fetches some blocks before it puts them
// down: nobody can tell the compiler that the two places do not overlap.
template <int AtOnce, class From, class To>
__device__ void turn_tile(From from, To to) {
  static_assert(From::rows == To::cols && From::cols == To::rows && From::rows % 32 == 0 && From::cols % 16 == 0);
  constexpr int steps = From::rows / 32;
  uint32_t const thread = thread_again(), lane = thread % 32;
  uint32_t const source = from.chunk_address(lane, 0);
  uint32_t const target = to.chunk_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  CUTE_NO_UNROLL
  for (uint32_t block = thread % 128 / 32 - (4 - turners); block < From::cols / 16; block += turners) {
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
        turn(r[i]);
        stmatrix(chunk_of<To>(out, 2 * (step + i)), r[i][0], r[i][1], r[i][2], r[i][3]);
      }
    }
  }
}

// A tile that has landed goes into the next stage of the ring that is read. What the warps stored there, wgmma reads
// through another proxy: each thread fences its own.
template <int Warps, class From, int Landed, class To, int Stages>
__device__ void transpose(From from, Ring<Landed>& landed, To to, Ring<Stages>& ring) {
  if constexpr (Landed == Stages) {  // they go together: two registers less
    ring.stage = landed.stage;
    ring.phase = landed.phase;
  }
  landed.wait();
  mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
  turn_tile<(Warps > 8 ? 1 : 4)>(from.stage(landed.stage), to.stage(ring.stage));
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
