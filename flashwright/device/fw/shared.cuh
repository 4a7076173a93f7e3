// Tiles in shared memory: rows of 16-byte chunks, swizzled so that eight rows of one column of
// chunks lie in eight different groups of banks. ldmatrix and 16-byte copies then never conflict.
#pragma once

#include <cute/tensor.hpp>

namespace fw {

// The widest power of two (32, 64 or 128 bytes) that a row is a multiple of.
constexpr int swizzle_bytes(int row_bytes) {
  return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
}

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

template <class T, int Rows, int Cols>
struct SharedTile {
  static_assert(Cols * sizeof(T) % 32 == 0, "a row is a multiple of 32 bytes");
  using value_type = T;
  static constexpr int rows = Rows;
  static constexpr int cols = Cols;
  static constexpr int chunk = 16 / sizeof(T);                        // elements copied at once
  static constexpr int width = swizzle_bytes(Cols * sizeof(T)) / sizeof(T);  // of a swizzle atom
  static constexpr int bits = log2_of(width / chunk);

  // Atoms of 8 rows; those of one column of atoms follow each other.
  using Atom = decltype(cute::composition(
      cute::Swizzle<bits, log2_of(chunk), 3>{},
      cute::Layout<cute::Shape<cute::_8, cute::Int<width>>, cute::Stride<cute::Int<width>, cute::_1>>{}));
  using Layout = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<Rows>, cute::Int<Cols>>{}));

  static constexpr int row_bytes = width * sizeof(T);  // of a row within its atom
  static constexpr int bytes = Rows * Cols * sizeof(T);

  T* data;         // aligned to 1024 bytes: the swizzle is one of addresses
  int number = 0;  // of the stage

  // One more stage of the same buffer, and the first of them.
  __device__ SharedTile stage(int n) const { return {data + n * Rows * Cols, n}; }
  __device__ T* first() const { return data - number * Rows * Cols; }

  // Plain CuTe, for code that looks at elements.
  __device__ auto tensor() const { return cute::make_tensor(cute::make_smem_ptr(data), Layout{}); }

  // The address of a chunk in the first column of atoms. A thread computes this once: from there,
  // `row_bytes` leads down by a row (in steps of 8), `atom_bytes` to the next column of atoms, and
  // an exclusive or with 16 * n to the chunk whose number differs in the bits of n.
  __device__ uint32_t chunk_address(int row, int in_atom) const {
    int const flip = (row % 8) >> (3 - bits);  // what Swizzle<bits, log2(chunk), 3> does
    return cute::cast_smem_ptr_to_uint(data) + row * row_bytes + ((in_atom ^ flip) * 16);
  }
  static constexpr int atom_bytes = Rows * row_bytes;
  static constexpr int chunks = width / chunk;  // in a row of an atom
};

// The tile that begins at an address, with room for further stages behind it.
template <class T, int Rows, int Cols>
__device__ SharedTile<T, Rows, Cols> shared_tile(unsigned char* begin) {
  return {reinterpret_cast<T*>(begin)};
}

// Four 8x8 matrices of 16-bit units from shared memory, one register of each to every thread; the
// thread names the row `lane % 8` of matrix `lane / 8`.
__device__ inline void ldmatrix(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Makes the compiler forget what it knows of an address, so that it computes the few steps from there
// where they are used instead of holding all of them in registers throughout a loop.
__device__ inline void keep_in_loop(uint32_t& address) { asm volatile("" : "+r"(address)); }

// Chunk `number` of the row that a thread's address points at, whose own chunk is 0 or 1.
template <class Tile>
__device__ uint32_t chunk_of(uint32_t address, int number) {
  return (address ^ (number % Tile::chunks * 16)) + number / Tile::chunks * Tile::atom_bytes;
}

// A vector in shared memory, with room for further stages behind it.
template <class T, int Size>
struct SharedVector {
  static constexpr int bytes = Size * sizeof(T);
  T* data;

  __device__ SharedVector stage(int n) const { return {data + n * Size}; }
};

template <class T, int Size>
__device__ SharedVector<T, Size> shared_vector(unsigned char* begin) {
  return {reinterpret_cast<T*>(begin)};
}

// Four 8x8 matrices of 16-bit units to shared memory; the thread names the row `lane % 8` of matrix `lane / 8`.
__device__ inline void stmatrix(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace fw
