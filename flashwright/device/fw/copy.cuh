// Tiles between global and shared memory, by all threads of the block together, or by those of some of its warps:
// `thread` is then a thread's number among them.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <fw/global.cuh>
#include <fw/shared.cuh>

namespace fw {

// Which 16-byte chunks of a tile a thread moves: neighbouring threads move neighbouring chunks of a
// swizzle atom's row, so that global reads are whole lines and shared writes meet no conflict.
template <int Threads, class Tile>
struct Chunks {
  static constexpr int across = Tile::width / Tile::chunk;  // threads side by side in a row
  static constexpr int down = Threads / across;             // rows in one go
  static constexpr int goes = (Tile::rows + down - 1) / down;
  static constexpr int atoms = Tile::cols / Tile::width;
  static constexpr int count = goes * atoms;

  int row, chunk;

  __device__ explicit Chunks(int thread) : row(thread / across), chunk(thread % across) {}
  __device__ Chunks() : Chunks(threadIdx.x) {}

  // Whether a chunk lies in some columns, by its number: known when it is compiled.
  template <int Column, int Width>
  __device__ static constexpr bool among(int number) {
    int const col = number % atoms * Tile::width;
    return col >= Column && col - Column < Width;
  }

  // How many goes are written out where each thread only starts copies: of wide tiles one, since the
  // addresses of more fill the registers of helper warps.
  static constexpr int at_once = atoms > 4 ? 1 : goes;

  // Calls body(number, row, column, address in shared memory) for each chunk.
  template <int Unroll = goes, class Body>
  __device__ void each(Tile tile, Body body) const {
    uint32_t const first = tile.chunk_address(row, chunk);
#pragma unroll Unroll
    for (int go = 0; go < goes; ++go) {
      if (Tile::rows % down != 0 && row + go * down >= Tile::rows) continue;
      CUTE_UNROLL
      for (int atom = 0; atom < atoms; ++atom) {
        // The swizzle repeats every 8 rows: only a block of few threads must look it up again.
        uint32_t const line = down % 8 == 0 ? first + go * down * Tile::row_bytes
                                            : tile.chunk_address(row + go * down, chunk);
        body(go * atoms + atom, row + go * down, chunk * Tile::chunk + atom * Tile::width,
             line + atom * Tile::atom_bytes);
      }
    }
  }
};

// How much of a chunk is copied; the rest becomes 0.
__device__ inline int chunk_bytes(int row, int count) { return count > row ? 16 : 0; }
__device__ inline int chunk_bytes(int row, Inside bounds) { return inside(row, bounds) ? 16 : 0; }

template <class Valid>
__device__ int chunk_bytes(int row, Valid valid, int, AllColumns) {
  return chunk_bytes(row, valid);
}

template <class Valid, class Cols>
__device__ int chunk_bytes(int row, Valid valid, int col, Cols cols) {
  return inside(col, cols) ? chunk_bytes(row, valid) : 0;
}

// Starts the copy of a tile; rows outside of the `valid` ones are filled with zeros, and so are columns outside of `cols`,
// which are whole chunks of 16 bytes. cp.async, sm_80 and later.
template <int Threads, class Tile, class Source, class Valid, class Cols = AllColumns>
__device__ void copy_async(Tile dst, Source src, Valid valid, Cols cols = {}, int thread = threadIdx.x) {
  using Way = Chunks<Threads, Tile>;
  Way(thread).template each<Way::at_once>(dst, [&](int, int row, int col, uint32_t to) {
    auto const* from = src.at(row, 0) + col;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(chunk_bytes(row, valid, col, cols)));
  });
}

// The same for some columns, which are whole atoms, where several tiles lie side by side.
template <int Threads, int Column, int Width, class Tile, class Source, class Valid, class Cols = AllColumns>
__device__ void copy_columns_async(Tile dst, Source src, Valid valid, Cols cols = {}, int thread = threadIdx.x) {
  using Way = Chunks<Threads, Tile>;
  Way(thread).template each<Way::at_once>(dst, [&](int n, int row, int col, uint32_t to) {
    if (!Way::template among<Column, Width>(n)) return;
    auto const* from = src.at(row, 0) + (col - Column);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(chunk_bytes(row, valid, col - Column, cols)));
  });
}

// Ends a group of copies: those started since the last commit.
__device__ inline void commit() { cute::cp_async_fence(); }

// Waits until at most `Left` groups of this thread are still on their way.
template <int Left>
__device__ void wait() {
  cute::cp_async_wait<Left>();
}

// A tile on its way through registers, where there is no cp.async: `load` starts it, `store` puts it
// into shared memory, so that the loads run under whatever stands between the two.
template <int Threads, class Tile>
struct Staged {
  using Way = Chunks<Threads, Tile>;
  uint4 held[Way::count];

  template <int Column = 0, int Width = 1 << 30, class Source, class Valid, class Cols = AllColumns>
  __device__ void load(Source src, Valid valid, Cols cols = {}) {
    Way{}.each(Tile{}, [&](int n, int row, int col, uint32_t) {
      if (!Way::template among<Column, Width>(n)) return;
      held[n] = make_uint4(0, 0, 0, 0);
      if (inside(row, valid) && inside(col - Column, cols)) {
        held[n] = *reinterpret_cast<uint4 const*>(src.at(row, 0) + (col - Column));
      }
    });
  }

  __device__ void store(Tile dst) const {
    Way{}.each(dst, [&](int n, int, int, uint32_t to) {
      uint4 const x = held[n];
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y),
                   "r"(x.z), "r"(x.w)
                   : "memory");
    });
  }
};

// A tile from shared memory to its `valid` rows in global memory.
template <int Threads, class Dest, class Tile, class Valid>
__device__ void copy_out(Dest dst, Tile src, Valid valid) {
  Chunks<Threads, Tile>{}.each(src, [&](int, int row, int col, uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    if (inside(row, valid)) *reinterpret_cast<uint4*>(dst.at(row, 0) + col) = x;
  });
}

// An element in another type.
template <class To, class From>
__device__ To converted(From x) {
  if constexpr (cute::is_same_v<To, From>) {
    return x;
  } else {
    return static_cast<To>(static_cast<float>(x));
  }
}

// Element by element, for tiles that may end within a row or get another type; rows and columns outside become 0.
template <int Threads, class Tile, class Source, class Rows, class Cols>
__device__ void copy_elements(Tile dst, Source src, Rows rows, Cols cols, int thread = threadIdx.x) {
  using T = typename Source::value_type;
  constexpr int across = (Tile::cols + 31) / 32, at_once = across < 4 ? across : 4;  // asked for before the first is needed
  auto to = dst.tensor();
  CUTE_NO_UNROLL
  for (int row = thread / 32; row < Tile::rows; row += Threads / 32) {
    bool const there = inside(row, rows);
    CUTE_NO_UNROLL
    for (int first = thread % 32; first < Tile::cols; first += 32 * at_once) {
      T held[at_once];
      CUTE_UNROLL
      for (int n = 0; n < at_once; ++n) {
        int const col = first + 32 * n;
        held[n] = there && col < Tile::cols && inside(col, cols) ? *src.at(row, col) : T(0);
      }
      CUTE_UNROLL
      for (int n = 0; n < at_once; ++n) {
        int const col = first + 32 * n;
        if (col < Tile::cols) to(row, col) = converted<typename Tile::value_type>(held[n]);
      }
    }
  }
}

// A vector; what lies outside becomes 0.
template <int Threads, class To, int Size, class Source, class Valid>
__device__ void copy_vector(SharedVector<To, Size> dst, Source src, Valid valid) {
  using T = typename Source::value_type;
  for (int i = threadIdx.x; i < Size; i += Threads) dst.data[i] = converted<To>(inside(i, valid) ? *src.at(i, 0) : T(0));
}

}  // namespace fw
