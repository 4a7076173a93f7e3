// Hopper's way of loading: one thread, the producer, asks TMA for whole tiles. mbarriers tell the consumer warpgroups
// when a tile has come, and the producer when they are done with it.
#pragma once

#include <utility>

#include <fw/shared.cuh>

namespace fw {

// What TMA has to know of a tensor in global memory: the driver's CUtensorMap, filled in by the launcher.
struct alignas(64) Map {
  uint64_t opaque[16];

  // Whether there is one: where TMA cannot load what the caller has given, the launcher leaves zeros.
  __device__ bool given() const {
    uint64_t any = 0;
    CUTE_UNROLL
    for (int n = 0; n < 16; ++n) any |= opaque[n];
    return any != 0;
  }
};

// Where a range of rows ends on the axis of rows of a map for ranges: a tile with n rows left begins n before it.
constexpr int range_end = 1 << 30;

__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra COME;\n"
      "bra AGAIN;\n"
      "COME:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The stages of a shared tile, a circular buffer: for each stage a barrier that says that it is full, and one that says
// that it is empty. Producer and consumers each count for themselves.
template <int Stages>
struct Ring {
  static constexpr int bytes = 2 * Stages * 8;
  uint32_t full;
  int stage = 0;
  uint32_t phase = 0;
  bool held = false;  // where only the branch that was taken says whether a stage is held

  __device__ explicit Ring(unsigned char* begin) : full(cute::cast_smem_ptr_to_uint(begin)) {}

  // By one thread, before the ring is used: every consumer warp says that it is done, each producer warp (one, where TMA
  // loads) that its part is there. (One arrival for four warps would do where they multiply together, but not where they
  // let a tile pass: one might not have seen yet that it came.)
  __device__ void init(int consumers, int producers = 1) const {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(full + 8 * s, producers);
      mbarrier_init(empty(s), consumers);
    }
  }

  __device__ uint32_t empty(int s) const { return full + 8 * (Stages + s); }

  __device__ void next() {
    if constexpr (Stages == 2) {  // the same, without asking
      phase ^= stage;
      stage ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // The producer: until the stage is free; then so many bytes are on their way to it.
  __device__ uint32_t acquire(int expected) const {
    mbarrier_wait(empty(stage), phase ^ 1);
    mbarrier_expect(full + 8 * stage, expected);
    return full + 8 * stage;
  }

  // A consumer: until the stage has been filled; and when its warp is done with it.
  __device__ void wait() const { mbarrier_wait(full + 8 * stage, phase); }

  // The stage behind the one that is held, and a consumer's wait for it: then it holds both.
  __device__ int ahead() const { return stage + 1 == Stages ? 0 : stage + 1; }
  __device__ void wait_ahead() const { mbarrier_wait(full + 8 * ahead(), phase ^ (stage + 1 == Stages)); }

  __device__ void release() {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage));
    next();
  }

  // A tile gets its next value here, or a block is done: the stage that is held is handed back.
  __device__ void refill() {
    drain();
    held = true;
  }

  __device__ void drain() {
    if (held) {
      wait();  // it may be that no statement has waited for it yet
      release();
    }
    held = false;
  }

  // The same as `release`, not before a value is known. It keeps ptxas from moving the wait for a product, which comes next, above
  // the work that gives the value: nothing would be left to do meanwhile. (What is added to the address is 0, as these
  // grids have one axis, but the compiler does not know that.)
  __device__ void release(float known) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage) + (__float_as_int(known) & blockIdx.y));
    next();
  }
};

// Where shared memory begins, found out once: what a shuffle gave is kept, while the address itself would be asked for
// again in each iteration of a loop, with an instruction that takes its time.
__device__ inline unsigned char* pinned(unsigned char* shared) {
  uint32_t const address = __shfl_sync(0xffffffffu, cute::cast_smem_ptr_to_uint(shared), 0);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// All threads, once all rings are initialised.
__device__ inline void rings_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}

// setmaxnreg: the producer warpgroup deallocates registers, and consumer warpgroups allocate them.
template <int Count>
__device__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// Whether this thread is the producer, which asks for the tiles: one of the last warpgroup, which does nothing else. It is
// elected, so that ptxas knows that it is alone: else each request to TMA gets a loop over the threads of the warp.
template <int Warps>
__device__ bool is_producer() {
  return threadIdx.x / 32 == Warps && cute::elect_one_sync();
}

template <class... Coords>
__device__ cute::array<int, sizeof...(Coords)> coordinates(Coords... coords) {
  return {{coords...}};
}

// Where TMA finds a tile whose rows lie in pages of `Size` rows: in boxes of `Rows` rows, each in one page. `first` is the
// position of the tile in its sequence, which has so many `rows` from there on. `page(n)` reads a table: it gives the number
// of the n-th page, and the coordinates on other axes. From one page to the next there are `step` rows.
template <int Size, int Rows, class Page>
struct PageBoxes {
  static constexpr int several = 4;  // boxes whose pages are asked for together, so that none waits for another
  using Place = decltype(std::declval<Page>()(0));
  using Places = cute::array<Place, several>;
  int first, rows, step;
  Page page;
  Places held;  // of the first boxes: known before a stage is free, so that nothing waits for the table then

  // Of several boxes from the n-th on. Those behind the last row have the page of that row: nothing is read there.
  __device__ Places places(int n) const {
    uint32_t const from = first, last = static_cast<uint32_t>(::max(first + rows - 1, 0)) / Size;
    Places found;
    CUTE_UNROLL
    for (int k = 0; k < several; ++k) {
      uint32_t const idx = Rows == Size ? from / Size + n + k : (from + (n + k) * Rows) / Size;
      found[k] = page(static_cast<int>(::min(idx, last)));
    }
    return found;
  }
};

template <int Size, int Rows, class Page>
__device__ PageBoxes<Size, Rows, Page> page_boxes(int first, int rows, int step, Page page) {
  PageBoxes<Size, Rows, Page> boxes{first, rows, step, page, {}};
  boxes.held = boxes.places(0);
  return boxes;
}

// Some columns of a box start on their way to a stage that was acquired, from a row of its tile on; the first element of
// them is at the coordinates (one for each axis). They are as wide as a swizzle atom; what lies outside of the tensor
// becomes 0.
template <int Column, int Width, class Tile, int Stages, class... Coords>
__device__ void fetch_box(Tile tile, Ring<Stages> const& ring, Map const& map, int row, Coords... coords) {
  static_assert(sizeof...(Coords) >= 2 && sizeof...(Coords) <= 5);
  int at[] = {coords...};
  constexpr int rank = sizeof...(Coords);
  Tile const to = tile.stage(ring.stage);
  uint32_t const barrier = ring.full + 8 * ring.stage;
  CUTE_UNROLL
  for (int col = Column; col < Column + Width; col += Tile::width) {
    uint32_t const dst = cute::cast_smem_ptr_to_uint(to.data) + col * Tile::rows * sizeof(*to.data) + row * Tile::row_bytes;
    int const x = at[rank - 1] + (col - Column);
    if constexpr (rank == 2) {
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
              "r"(dst), "l"(&map), "r"(barrier), "r"(x), "r"(at[0])
          : "memory");
    } else if constexpr (rank == 3) {
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
              "r"(dst), "l"(&map), "r"(barrier), "r"(x), "r"(at[1]), "r"(at[0])
          : "memory");
    } else if constexpr (rank == 4) {
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
              "r"(dst), "l"(&map), "r"(barrier), "r"(x), "r"(at[2]), "r"(at[1]), "r"(at[0])
          : "memory");
    } else {
      asm volatile(
          "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::
              "r"(dst), "l"(&map), "r"(barrier), "r"(x), "r"(at[3]), "r"(at[2]), "r"(at[1]), "r"(at[0])
          : "memory");
    }
  }
}

// Some columns of a tile, in one box.
template <int Column, int Width, class Tile, int Stages, class... Coords>
__device__ void fetch_columns(Tile tile, Ring<Stages> const& ring, Map const& map, Coords... coords) {
  fetch_box<Column, Width>(tile, ring, map, 0, coords...);
}

// The same of the box of pages that begins at a row of the tile, from column `x` of the tensor on: with n rows left, it
// begins n before the end of a range, and what is behind them becomes 0.
template <int Column, int Width, class Tile, int Stages, int Size, int Rows, class Page>
__device__ void fetch_page(Tile tile, Ring<Stages> const& ring, Map const& map, PageBoxes<Size, Rows, Page> const& boxes,
                           decltype(std::declval<Page>()(0)) place, int row, int x) {
  constexpr int axes = sizeof(place) / sizeof(int);
  static_assert(axes <= 2);
  int const left = ::max(::min(boxes.rows - row, Rows), 0);
  int const begin = Rows == Size ? 0 : static_cast<int>(static_cast<uint32_t>(boxes.first + row) % Size);
  int const end = place[0] * boxes.step + begin + left;
  if constexpr (axes == 1) {
    fetch_box<Column, Width>(tile, ring, map, row, range_end, end, range_end - left, x);
  } else {
    fetch_box<Column, Width>(tile, ring, map, row, range_end, end, place[1], range_end - left, x);
  }
}

// The same of all boxes of a tile. While several start, the pages of the next ones are asked for; behind the last box these
// are the next tile's. (The loop over them stays rolled: the producer has few registers.)
template <int Column, int Width, class Tile, int Stages, int Size, int Rows, class Page>
__device__ void fetch_columns(Tile tile, Ring<Stages> const& ring, Map const& map,
                              PageBoxes<Size, Rows, Page> const& boxes, int x) {
  static_assert(Tile::rows % Rows == 0 && Rows % 8 == 0 && Size % Rows == 0);
  constexpr int all = Tile::rows / Rows, several = cute::min(all, PageBoxes<Size, Rows, Page>::several);
  auto next = boxes.held;
  uint32_t count = all;
  for (uint32_t n = 0; n < count; n += several) {
    // CUTE_NO_UNROLL is forgotten where the loop over columns is unrolled to nothing.
    asm volatile(".pragma \"nounroll\";" : "+r"(count));
    auto const places = next;
    next = boxes.places(n + several);
    CUTE_UNROLL
    for (int k = 0; k < several; ++k) {
      if (all % several != 0 && n + k >= count) break;
      fetch_page<Column, Width>(tile, ring, map, boxes, places[k], (n + k) * Rows, x);
    }
  }
}

// The next stage is filled with a tile whose first element is at the coordinates.
template <class Tile, int Stages, class... Coords>
__device__ void fetch(Tile tile, Ring<Stages>& ring, Map const& map, Coords... coords) {
  ring.acquire(Tile::bytes);
  fetch_columns<0, Tile::cols>(tile, ring, map, coords...);
  ring.next();
}

}  // namespace fw
