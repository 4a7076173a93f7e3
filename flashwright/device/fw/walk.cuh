// A kernel that stays: as many thread blocks as the GPU runs at once, which share out the blocks of the program's grid.
// The loads for the next one are under way while the last one is being written.
#pragma once

namespace fw {

// The blocks of the grid that a thread block takes, one after the other. Blocks that read the same keys are taken at
// the same time, by different thread blocks, so that these are read from the L2.
//
// Rounds > 0: the further along x a block lies, the longer it takes. The grid is then cut along y and z into sections
// of about so many rounds. In a section the longest come first, and every other round goes the other way, so that
// nobody gets the longer one each time; the next section begins with those who had fewer.
template <int Rounds>
struct Walk {
  int const width, columns, height;  // of the grid: along x, along y and z, along y
  int tile = blockIdx.x;             // without sections: its number; else: its number in the section
  int round = 0, place = blockIdx.x;
  int first = 0, many;  // columns of the section

  __device__ Walk(int width, int height = 1, int depth = 1)
      : width(width), columns(height * depth), height(height) {
    int const whole = Rounds * gridDim.x / (width > 0 ? width : 1);
    many = min(columns, whole > 0 ? whole : 1);
    if (Rounds > 0 && tile >= many * width) turn_page();
  }

  __device__ bool more() const { return Rounds > 0 ? first < columns : tile < width * columns; }

  __device__ void next() {
    if constexpr (Rounds == 0) {
      tile += gridDim.x;
    } else {
      ++round;
      tile = round * gridDim.x + (round % 2 ? gridDim.x - 1 - place : place);
      if (tile >= many * width) turn_page();
    }
  }

  // To the first section in which there is something for this thread block.
  __device__ void turn_page() {
    do {
      place = (place - many * width) % static_cast<int>(gridDim.x);
      if (place < 0) place += gridDim.x;
      first += many;
      many = min(many, columns - first);
      round = 0;
      tile = place;
    } while (first < columns && tile >= many * width);
  }

  __device__ int x() const { return Rounds > 0 ? width - 1 - tile / many : tile % width; }
  __device__ int y() const { return column() % height; }
  __device__ int z() const { return column() / height; }
  __device__ int column() const { return Rounds > 0 ? first + tile % many : tile / width; }
};

}  // namespace fw
