// Earlier names of what the other headers have, so that kernels on record, which have them, still compile. New kernels
// use the names of today.
#pragma once

#include <fw/epilogue.cuh>
#include <fw/mma.cuh>
#include <fw/ring.cuh>
#include <fw/tile_scheduler.cuh>
#include <fw/wgmma.cuh>

namespace fw {

template <int Waves>
using Walk = TileScheduler<Waves>;

constexpr int out_bytes = epilogue_bytes;

template <int Warps, int Beside = 1, class T, class Tile, class Valid, class Cols = AllColumns>
__device__ __forceinline__ void store_through(unsigned char* staging, GlobalTile<T> dst, Tile const& tile, Valid valid,
                                              Cols kept = {}) {
  store_epilogue<Warps, Beside>(staging, dst, tile, valid, kept);
}

template <int Count>
__device__ __forceinline__ void give_registers() {
  dealloc_registers<Count>();
}

template <int Count>
__device__ __forceinline__ void take_registers() {
  alloc_registers<Count>();
}

template <int Warps>  // chosen by number and not elected, so that these kernels compile to what was measured
__device__ __forceinline__ bool is_loader() {
  return threadIdx.x == 32 * Warps;
}

template <int Groups>
__device__ __forceinline__ void take_turn(int group) {
  ping_pong_wait<Groups>(group);
}

template <int Groups>
__device__ __forceinline__ void pass_turn(int group) {
  ping_pong_signal<Groups>(group);
}

template <int Groups>
__device__ __forceinline__ void first_turn(int group) {
  ping_pong_start<Groups>(group);
}

}  // namespace fw
