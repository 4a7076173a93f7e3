// The tile scheduler of persistent kernels: as many thread blocks as the GPU runs at once take the tiles of the
// program's grid, one after the other. The loads for the next tile are under way while the last one is being written.
#pragma once

#include <fw/global.cuh>

namespace fw {

// The tiles that a thread block takes. Rasterization is L2-aware: tiles that read the same keys are taken at the same
// time, by different thread blocks, so that these are read from the L2.
//
// Waves > 0: the further along x a tile lies, the longer it takes, or, where `Falling`, the shorter. The grid is then cut along y and z into groups of
// columns, each about so many waves of thread blocks. In a group the longest tiles come first, and every other wave goes
// the other way, so that no thread block gets the longer tile each time; the next group begins with the thread blocks
// that had fewer tiles.
//
// Waves < 0: data decide how long a tile takes, or some are shorter. Each wave goes on with the next thread block, so that
// none gets the tile of the same place in every row of tiles.
template <int Waves, bool Falling = false>
struct TileScheduler {
  int const width, columns, height;  // of the grid: along x, along y and z, along y
  int tile = blockIdx.x;             // without groups: its number; else: its number in the group
  int wave = 0, slot = blockIdx.x;
  int first = 0, many;  // columns of the group

  __device__ TileScheduler(int width, int height = 1, int depth = 1)
      : width(width), columns(height * depth), height(height) {
    int const whole = Waves > 0 ? Waves * gridDim.x / (width > 0 ? width : 1) : 0;
    many = min(columns, whole > 0 ? whole : 1);
    if (Waves > 0 && tile >= many * width) next_group();
  }

  __device__ bool more() const { return Waves > 0 ? first < columns : tile < width * columns; }

  __device__ void next() {
    if constexpr (Waves == 0) {
      tile += gridDim.x;
    } else if constexpr (Waves < 0) {
      slot = slot + 1 < gridDim.x ? slot + 1 : 0;
      tile = ++wave * gridDim.x + slot;
    } else {
      ++wave;
      tile = wave * gridDim.x + (wave % 2 ? gridDim.x - 1 - slot : slot);
      if (tile >= many * width) next_group();
    }
  }

  // To the first group in which there is a tile for this thread block.
  __device__ void next_group() {
    do {
      slot = (slot - many * width) % static_cast<int>(gridDim.x);
      if (slot < 0) slot += gridDim.x;
      first += many;
      many = min(many, columns - first);
      wave = 0;
      tile = slot;
    } while (first < columns && tile >= many * width);
  }

  __device__ int x() const {
    if constexpr (Waves <= 0) return tile % width;
    return Falling ? tile / many : width - 1 - tile / many;
  }
  __device__ int y() const { return column() % height; }
  __device__ int z() const { return column() / height; }
  __device__ int column() const { return Waves > 0 ? first + tile % many : tile / width; }
};

}  // namespace fw
