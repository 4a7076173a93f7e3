// Matrix products of tiles with wgmma: four warps multiply 64 rows at once, and go on while it is being done. The right
// operand comes from shared memory, the left one from there or from registers.
#pragma once

#include <fw/mma.cuh>
#include <fw/wgmma_atom.cuh>

namespace fw {

// What wgmma has to know of a tile in shared memory. Along the swizzle's rows (of 32, 64 or 128 bytes) it finds its way
// itself: 8 of them make an atom, and it is told how far apart the atoms are that lie below and beside each other.
// A place in the tile is a sum in the lower half, which one addition of the uniform datapath makes.
template <class Tile>
struct Descriptor {
  static constexpr uint32_t swizzle = Tile::bits == 3 ? 1 : Tile::bits == 2 ? 2 : 3;
  static constexpr uint32_t upper = swizzle << 30 | 8 * Tile::row_bytes >> 4;
  uint32_t lower;

  Descriptor() = default;

  // The first stage's is the same all along; the others' are one step from it.
  __device__ explicit Descriptor(Tile tile)
      : lower(((cute::cast_smem_ptr_to_uint(tile.first()) & 0x3ffff) >> 4 | (Tile::atom_bytes >> 4 & 0x3fff) << 16) +
              tile.number * (Tile::bytes >> 4)) {}

  __device__ uint64_t at(uint32_t bytes) const {
    return static_cast<uint64_t>(upper) << 32 | (lower + (bytes >> 4));
  }

  // Where a step of 32 bytes along k begins: k along the columns, or, in 16 bits, along the rows.
  __device__ uint64_t along_columns(int step) const {
    constexpr int steps = Tile::row_bytes / 32;  // in an atom
    return at(step / steps * Tile::atom_bytes + step % steps * 32);
  }
  __device__ uint64_t along_rows(int step) const { return at(step * 16 * Tile::row_bytes); }
};

// The number of this warpgroup, which the compiler then knows to be the same for all of its threads. Asked for once:
// it takes a shuffle.
__device__ inline int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
}

// The left operand, step by step: the rows of this warpgroup in a shared tile, or registers.
template <class Tile>
struct LeftRows {
  static constexpr bool mn_major = false;
  Descriptor<Tile> own;

  __device__ LeftRows(Tile tile, int group) : own(tile) { own.lower += group * (64 * Tile::row_bytes >> 4); }
  __device__ uint64_t operator()(int step) const { return own.along_columns(step); }
};

// The same where the tile lies as k rows: the warpgroup's are 64 columns of it, in 16 bits an atom.
template <class Tile>
struct Transposed {
  Tile tile;
};

template <class Tile>
__device__ Transposed<Tile> transposed(Tile tile) {
  return {tile};
}

template <class Tile>
struct LeftColumns {
  static_assert(Tile::width == 64);
  static constexpr bool mn_major = true;
  Descriptor<Tile> own;

  __device__ LeftColumns(Tile tile, int group) : own(tile) { own.lower += group * (Tile::atom_bytes >> 4); }
  __device__ uint64_t operator()(int step) const { return own.along_rows(step); }
};

template <class Operand>
struct LeftRegisters {
  static constexpr bool mn_major = false;
  Operand const& a;
  __device__ auto const& operator()(int step) const { return a.r[step][0]; }
};

template <class T, int Rows, int Cols>
__device__ auto left_steps(SharedTile<T, Rows, Cols> tile, int group) {
  return LeftRows<SharedTile<T, Rows, Cols>>(tile, group);
}

template <class Tile>
__device__ auto left_steps(Transposed<Tile> left, int group) {
  return LeftColumns<Tile>(left.tile, group);
}

template <int Steps>
__device__ auto left_steps(OperandA<1, Steps> const& a, int) {
  return LeftRegisters<OperandA<1, Steps>>{a};
}

// The places of many steps are not to fill registers all the time.
template <class Left>
__device__ void keep_steps_in_loop(Left& left) {
  keep_in_loop(left.own.lower);
}
template <class Operand>
__device__ void keep_steps_in_loop(LeftRegisters<Operand>&) {}

// Starts acc = A B, or acc += A B: B given as N rows of k columns (Transposed), or, in 16 bits, as k rows of N columns.
// Of k, the first `Depth` count where that is given: zeros follow in both operands. Where `Beside` warpgroups have the
// same rows, each multiplies its share of the columns.
template <bool Fresh, bool Transposed, int Depth = 0, int Beside = 1, class Acc, class A, class B>
__device__ void start_product(int group, Acc& acc, A const& a, B b) {
  using T = typename B::value_type;
  static_assert(decltype(cute::size<0>(acc))::value == 2, "a warpgroup has 64 rows");
  static_assert(Transposed || sizeof(T) == 2, "fp8 is multiplied along rows only");
  constexpr int steps = (Depth ? Depth : Transposed ? B::cols : B::rows) * sizeof(T) / 32;
  constexpr int columns = (Transposed ? B::rows : B::cols) / Beside;
  // A share of whole swizzle atoms, or else pieces that each lie in one.
  constexpr int piece = Beside == 1 || Transposed || columns % B::width == 0 ? columns : 32;
  static_assert(columns % piece == 0 && (piece == columns || sizeof(T) == 2), "a share is halves of swizzle atoms");
  auto left = left_steps(a, Beside == 1 ? group : 0);
  if constexpr (Beside > 1 && steps > 16) keep_steps_in_loop(left);
  Descriptor<B> right[columns / piece] = {Descriptor<B>(b)};
  CUTE_UNROLL
  for (int n = columns / piece - 1; n >= 0 && Beside > 1; --n) {
    int const first = group * columns + n * piece;
    int const share = Transposed ? first * B::row_bytes
                                 : first / B::width * B::atom_bytes + first % B::width * static_cast<int>(sizeof(T));
    right[n].lower = right[0].lower + (share >> 4);
    keep_in_loop(right[n].lower);
  }
  CUTE_UNROLL
  for (int step = 0; step < steps; ++step) {
    CUTE_UNROLL
    for (int n = 0; n < columns / piece; ++n) {
      uint64_t const part = Transposed ? right[n].along_columns(step) : right[n].along_rows(step);
      Wgmma<T, piece, !Transposed, decltype(left)::mn_major>::run(acc.data() + n * piece / 2, left(step), part,
                                                                 !Fresh || step > 0);
    }
  }
}

// Registers that the compiler must not move over this place.
template <class Acc>
__device__ void hold(Acc& acc) {
  CUTE_UNROLL
  for (int i = 0; i < decltype(cute::size(acc))::value; ++i) asm volatile("" : "+f"(acc.data()[i])::"memory");
}

// Behind this products may be started: what other instructions did to the accumulators is done.
template <class... Accs>
__device__ void open_products(Accs&... accs) {
  (hold(accs), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products: those started since the last one.
__device__ inline void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `Left` groups are under way; the accumulators of the others can be used.
template <int Left, class... Accs>
__device__ void finish_products(Accs&... accs) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
  (hold(accs), ...);
}

// The whole product, waited for.
template <bool Fresh, bool Transposed, int Depth = 0, int Beside = 1, class Acc, class A, class B>
__device__ void product(int group, Acc& acc, A const& a, B b) {
  open_products(acc);
  start_product<Fresh, Transposed, Depth, Beside>(group, acc, a, b);
  close_products();
  finish_products<0>(acc);
}

// All consumer warps meet. With `Publish`, what they have written to shared memory can then be read by wgmma.
template <int Warps, bool Publish = false>
__device__ void consumers_meet() {
  if constexpr (Publish) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 8, %0;" ::"n"(32 * Warps) : "memory");
}

// The same in two steps, for tiles with two stages: a warpgroup tells the others that its part of a stage can be read, and
// hears later that theirs can. Each has two barriers, so that nobody tells twice before it is heard.
template <int Warps>
__device__ void consumers_tell(int group, int stage) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  CUTE_UNROLL
  for (int n = 1; n < Warps / 4; ++n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(10 + (group + n) % (Warps / 4) * 2 + stage), "n"(32 * Warps) : "memory");
  }
}

template <int Warps>
__device__ void consumers_hear(int group, int stage) {
  asm volatile("bar.sync %0, %1;" ::"r"(10 + group * 2 + stage), "n"(32 * Warps) : "memory");
}

// Rows that `Beside` warpgroups share: values that each has found over its own columns become those of the whole rows.
// They are left in shared memory for the others, in one of two places alternately, since a warpgroup may still be reading.
template <int Warps, int Beside>
struct Exchange {
  float* const data;
  int place = 0;

  template <class Shared>
  __device__ explicit Exchange(Shared place) : data(place.data) {}

  template <class Vector, class F>
  __device__ void operator()(Vector& values, F join) {
    constexpr int count = decltype(cute::size(values))::value, rows = 8 * Warps * count;
    float* const here = data + place * Beside * rows;
    place ^= 1;
    Place<Warps, false, Beside> const at;
    CUTE_UNROLL
    for (int m = 0; m < count; ++m) {
      if (threadIdx.x % 4 == 0) here[at.share * rows + at.row(m)] = values(m);
    }
    asm volatile("bar.sync 9, %0;" ::"n"(32 * Warps * Beside) : "memory");
    CUTE_UNROLL
    for (int m = 0; m < count; ++m) {
      values(m) = here[at.row(m)];
      CUTE_UNROLL
      for (int other = 1; other < Beside; ++other) values(m) = join(values(m), here[other * rows + at.row(m)]);
    }
  }

  template <class Vector>
  __device__ void max(Vector& values) {
    CUTE_UNROLL
    for (int m = 0; m < decltype(cute::size(values))::value; ++m) values(m) = row_max(values(m));
    (*this)(values, [](float a, float b) { return fw::max(a, b); });
  }

  template <class Vector>
  __device__ void sum(Vector& values) {
    CUTE_UNROLL
    for (int m = 0; m < decltype(cute::size(values))::value; ++m) values(m) = row_sum(values(m));
    (*this)(values, [](float a, float b) { return a + b; });
  }
};

// Ping-pong scheduling of consumer warpgroups: they start their products one after the other, and while one multiplies,
// another computes its softmax. Each waits at a barrier of its own (the block's is 0) for the one before it.
template <int Groups>
__device__ void ping_pong_wait(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}

template <int Groups>
__device__ void ping_pong_signal(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % Groups) : "memory");
}

// Before the first wait: the last warpgroup lets the first one begin.
template <int Groups>
__device__ void ping_pong_start(int group) {
  if (group == Groups - 1) ping_pong_signal<Groups>(group);
}

}  // namespace fw
