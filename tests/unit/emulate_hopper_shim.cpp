// wgmma.h and tensor_map.h for ctypes.

#include <cstring>

#include "tensor_map.h"
#include "wgmma.h"

extern "C" {

// n, k, element_bytes, d, a, b, accumulators; 0 where there is no such instruction.
int shape_of(const char* name, int* out) {
  fw::WgmmaShape shape;
  if (!fw::wgmma_shape(name, shape)) return 0;
  const int values[] = {shape.n, shape.k, shape.element_bytes, shape.d, shape.a, shape.b};
  std::memcpy(out, values, sizeof values);
  out[6] = shape.accumulators();
  return 1;
}

int chunks_of(const char* name, uint64_t descriptor, int mn_major, int extent, int rows_from,
              uint32_t* out) {
  fw::WgmmaShape shape;
  fw::wgmma_shape(name, shape);
  std::vector<uint32_t> chunks = {1, 2, 3};  // whatever was there has to go
  fw::wgmma_chunks(shape, descriptor, mn_major != 0, extent, rows_from, chunks);
  std::memcpy(out, chunks.data(), chunks.size() * sizeof out[0]);
  return static_cast<int>(chunks.size());
}

void multiply(const char* name, const uint32_t* a_registers, const uint8_t* a_bytes, int a_mn_major,
              const uint8_t* b_bytes, int b_mn_major, int accumulate, int scale_a, int scale_b,
              uint32_t* d) {
  fw::WgmmaShape shape;
  fw::wgmma_shape(name, shape);
  const uint32_t* a[4];
  for (int i = 0; a_registers != nullptr && i < 4; ++i) a[i] = a_registers + 32 * i;
  std::vector<uint32_t*> registers;
  for (int i = 0; i < shape.accumulators(); ++i) registers.push_back(d + 32 * i);
  fw::wgmma_multiply(shape, a_registers != nullptr ? a : nullptr, a_bytes, a_mn_major != 0, b_bytes,
                     b_mn_major != 0, accumulate != 0, scale_a, scale_b, registers.data());
}

// Rows of shared address, global address, bytes, inside; -1 where it is no map.
int pieces_of(const uint8_t* bytes, const int32_t* coordinate, uint32_t shared, uint64_t* out) {
  fw::TensorMap map;
  if (!fw::tensor_map(bytes, map)) return -1;
  int count = 0;
  fw::for_pieces(map, coordinate, shared,
                 [&](uint32_t to, uint64_t from, int size, bool inside) {
                   const uint64_t row[] = {to, from, static_cast<uint64_t>(size), inside};
                   std::memcpy(out + 4 * count++, row, sizeof row);
                 });
  return count;
}

int bytes_of_box(const uint8_t* bytes) {
  fw::TensorMap map;
  return fw::tensor_map(bytes, map) ? fw::box_bytes(map) : -1;
}

void fill_of(const uint8_t* bytes, uint8_t* out, int count) {
  fw::TensorMap map;
  if (fw::tensor_map(bytes, map)) fw::fill_value(map, out, count);
}
}
