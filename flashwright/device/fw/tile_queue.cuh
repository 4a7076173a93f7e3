// Tiles of which data say how long they take: thread blocks take the next one when they are done. The producer takes
// them, and hands them to the other warps through a queue in shared memory.
#pragma once

#include <fw/global.cuh>
#include <fw/ring.cuh>

namespace fw {

// The tiles of sequences that lie behind each other, and no others: `starts` has where each begins, and where the last
// one ends; a tile has so many rows. They are numbered; asked for by rising numbers, every sequence is passed once.
//
// Order::rising: the further along a sequence a tile lies, the longer it takes (causal attention); falling: the shorter.
// The longest tiles of all heads then come first. A sequence with many heads and many tiles is taken in groups of heads,
// so that tiles that read the same keys run together.
enum class Order { even, rising, falling };

template <int Rows, Order order>
struct SequenceTiles {
  Global<int, 1> const& starts;
  int const height, depth;  // heads, sequences
  int tile = 0, sequence = 0, before = 0;
  int width = 0;  // tiles of the sequence for one head
  int many = 1;   // heads of a group

  __device__ SequenceTiles(Global<int, 1> const& starts, int height, int depth)
      : starts(starts), height(height), depth(depth) {
    if (depth > 0) measure();
  }

  __device__ bool more() const { return sequence < depth; }

  __device__ void measure() {
    width = (*starts.at(sequence + 1) - *starts.at(sequence) + Rows - 1) / Rows;
    int const filling = 16 * static_cast<int>(gridDim.x) / max(width, 1);  // of 16 waves
    if (order != Order::even) many = max(1, min(height, max(32, filling)));
  }

  // To the sequence that has the tile.
  __device__ void find(int number) {
    tile = number;
    while (sequence < depth && tile - before >= width * height) {
      before += width * height;
      if (++sequence < depth) measure();
    }
  }

  // The tile's number in its group, where that begins, and its heads.
  __device__ int place() const { return (tile - before) % (many * width); }
  __device__ int first() const { return (tile - before) / (many * width) * many; }
  __device__ int heads() const { return min(many, height - first()); }

  __device__ int x() const {
    int const found = order == Order::even ? place() : place() / heads();
    return order == Order::falling ? found : width - 1 - found;
  }
  __device__ int y() const { return first() + (order == Order::even ? 0 : place() % heads()); }
  __device__ int z() const { return sequence; }
};

// The tiles of the whole grid, where data say how long those along x take, and those along y and z take as long. The
// longest come first, in groups of columns, so that those that read the same keys run together. Each thread block sorts
// them at its beginning, with all its threads; where there are more than `most` of them, they stay as they lie.
struct SortedTiles {
  static constexpr int most = 512, bytes = 4 * most, waves = 4;
  uint32_t const* const order;
  int const width, height, columns;
  int const many;  // columns of a group
  int tile = 0;

  __device__ SortedTiles(uint32_t const* order, int width, int height = 1, int depth = 1)
      : order(order),
        width(width),
        height(height),
        columns(height * depth),
        many(width > most ? 1 : max(1, waves * static_cast<int>(gridDim.x) / max(width, 1))) {}

  // `work(x)`: how long the tiles there take. Each comes behind those that take longer.
  template <int Threads, class Work>
  __device__ static void sort(uint32_t* order, int width, Work const& work) {
    if (width > most) return;
    constexpr int own = (most + Threads - 1) / Threads;
    int const padded = (width + 3) / 4 * 4;
    uint32_t keys[own];
    int behind[own];
    for (int n = 0; n < own; ++n) {
      int const x = threadIdx.x + n * Threads;
      keys[n] = x < width ? static_cast<uint32_t>(min(max(work(x), 0), (1 << 22) - 1)) * most + (most - 1 - x) : 0;
      if (x < padded) order[x] = keys[n];
      behind[n] = 0;
    }
    __syncthreads();
    for (int i = 0; i < padded; i += 4) {
      uint4 const four = *reinterpret_cast<uint4 const*>(order + i);
      for (int n = 0; n < own; ++n) {
        behind[n] += (four.x > keys[n]) + (four.y > keys[n]) + (four.z > keys[n]) + (four.w > keys[n]);
      }
    }
    __syncthreads();
    for (int n = 0; n < own; ++n) {
      int const x = threadIdx.x + n * Threads;
      if (x < width) order[behind[n]] = x;
    }
    __syncthreads();
  }

  __device__ bool more() const { return tile < width * columns; }
  __device__ void find(int number) { tile = number; }

  __device__ int first() const { return tile / (many * width) * many; }
  __device__ int place() const { return tile % (many * width); }
  __device__ int heads() const { return min(many, columns - first()); }
  __device__ int column() const { return first() + place() % heads(); }

  __device__ int x() const { return width > most ? place() : order[place() / heads()]; }
  __device__ int y() const { return column() % height; }
  __device__ int z() const { return column() / height; }
};

// How the producer tells the other warps which tiles are theirs: a ring of places in shared memory.
struct TileQueue {
  static constexpr int stages = 2, bytes = Ring<stages>::bytes + 16 * stages;
  Ring<stages> ring;
  uint32_t const places;

  __device__ explicit TileQueue(unsigned char* begin)
      : ring(begin), places(cute::cast_smem_ptr_to_uint(begin + Ring<stages>::bytes)) {}

  __device__ void init(int consumers) const { ring.init(consumers); }

  __device__ void put(int x, int y, int z) {
    mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(places + 16 * ring.stage), "r"(x), "r"(y), "r"(z),
                 "r"(0)
                 : "memory");
    mbarrier_arrive(ring.full + 8 * ring.stage);
    ring.next();
  }

  __device__ void get(int& x, int& y, int& z) {
    [[maybe_unused]] int unused;
    ring.wait();
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(unused)
                 : "r"(places + 16 * ring.stage)
                 : "memory");
    __syncwarp();
    ring.release();
  }
};

// The producer's way through them: its thread block takes the next one as soon as it has asked for all that the last one
// reads. How long tiles take is for data to say, so that no order shared out beforehand is fair. `taken` counts the tiles
// beyond the first ones; it is read a tile ahead, since the answer takes its time.
template <class Tiles>
struct TilesToTake {
  Tiles tiles;
  TileQueue queue;
  int* const taken;
  int upcoming;

  __device__ TilesToTake(Tiles tiles, TileQueue queue, int* taken)
      : tiles(tiles), queue(queue), taken(taken), upcoming(atomicAdd(taken, 1)) {
    take(blockIdx.x);
  }

  __device__ bool more() const { return tiles.more(); }

  __device__ void next() {
    int const number = gridDim.x + upcoming;
    upcoming = atomicAdd(taken, 1);
    take(number);
  }

  __device__ void take(int number) {
    tiles.find(number);
    more() ? queue.put(x(), y(), z()) : queue.put(0, 0, -1);
  }

  __device__ int x() const { return tiles.x(); }
  __device__ int y() const { return tiles.y(); }
  __device__ int z() const { return tiles.z(); }
};

// The other warps' way through them: as the producer has put them into the queue.
struct TakenTiles {
  TileQueue queue;
  int place_x, place_y, place_z;

  __device__ explicit TakenTiles(TileQueue queue) : queue(queue) { next(); }

  __device__ bool more() const { return place_z >= 0; }
  __device__ void next() { queue.get(place_x, place_y, place_z); }
  __device__ int x() const { return place_x; }
  __device__ int y() const { return place_y; }
  __device__ int z() const { return place_z; }
};

}  // namespace fw
