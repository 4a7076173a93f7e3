// A tensor map (CUtensorMap) and the boxes that TMA moves with it.
//
// The driver's 128 bytes are opaque, so the emulator has its own: emulate/tensor_map.py writes
// them, after the driver's checks, and a kernel can do nothing with them but pass them on. Tiled
// maps only: no im2col, no interleaving, all element strides 1, no rounding to tf32.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fw {

constexpr uint64_t kTensorMapMagic = 0x31504d5457464c46;  // "FLFWTMP1"

struct TensorMap {
  uint64_t magic;
  uint64_t base;
  uint64_t size[5];    // in elements, the innermost dimension first
  uint64_t stride[5];  // in bytes; stride[0] is that of an element
  uint32_t box[5];     // in elements
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle;  // 0 none, 1 32B, 2 64B, 3 128B: the number of bits that are mixed
  uint8_t fill;     // 0 zeros, 1 NaN
  uint8_t kind;     // 0 integer, 1 float
};
static_assert(sizeof(TensorMap) == 128, "what a kernel's parameter has room for");

// Where a 16-byte chunk goes: of its address, bits 4, 5, ... are mixed with bits 7, 8, ..., `bits`
// of them. It is the address in the shared window that counts, not the place in a tile. `phase`
// is taken from bits 7 to 9 first (the base offset of a wgmma descriptor).
inline uint32_t swizzled(uint32_t address, int bits, uint32_t phase = 0) {
  const uint32_t mask = (1u << bits) - 1;
  return address ^ (((address >> 7) - phase) & mask) << 4;
}

// What the 128 bytes say; false where they are no map of ours.
bool tensor_map(const uint8_t* bytes, TensorMap& map);

// What a transaction counts: the whole box, out of range or not.
int box_bytes(const TensorMap& map);

// The bytes of elements that are out of range, from the first byte of an element.
void fill_value(const TensorMap& map, uint8_t* out, int bytes);

// From one row of the box to the next, in shared memory. A row narrower than the swizzle has a
// span of its own.
inline uint32_t row_pitch(const TensorMap& map) {
  const uint32_t bytes = map.box[0] * map.element_bytes;
  return map.swizzle == 0 ? bytes : std::max(bytes, 16u << map.swizzle);
}

// One row of a box: `x` is the coordinate of its first element, `global` the address of the row's
// element 0, `inside` whether the other coordinates are in range. See for_pieces.
template <class F>
void for_row_pieces(const TensorMap& map, int64_t x, uint64_t global, bool inside, uint32_t shared,
                    F&& piece) {
  const int64_t width = map.element_bytes, size = static_cast<int64_t>(map.size[0]) * width;
  const int64_t bytes = map.box[0] * width, start = x * width;  // offsets in bytes from here on
  for (int64_t chunk = 0; chunk < bytes; chunk += 16) {
    const uint32_t place = swizzled(shared + static_cast<uint32_t>(chunk), map.swizzle);
    const int64_t length = 16, from = start + chunk;  // rows are whole chunks
    // The part of the chunk that lies in the row, and what is left of and right of it.
    const int64_t first = inside ? std::clamp<int64_t>(-from, 0, length) : length;
    const int64_t last = inside ? std::clamp<int64_t>(size - from, first, length) : length;
    if (first > 0) piece(place, uint64_t{0}, static_cast<int>(first), false);
    if (last > first) {
      piece(place + static_cast<uint32_t>(first), global + static_cast<uint64_t>(from + first),
            static_cast<int>(last - first), true);
    }
    if (length > last) {
      piece(place + static_cast<uint32_t>(last), uint64_t{0}, static_cast<int>(length - last),
            false);
    }
  }
}

// Every piece of the box at `coordinate` (innermost first) whose place in shared memory begins at
// `shared`: piece(shared address, global address, bytes, inside), at most 16 bytes each, whole
// elements, never across a chunk of the swizzle. Where `inside` is false the piece is out of range:
// a load fills it, a store leaves it out, and its global address is 0.
template <class F>
void for_pieces(const TensorMap& map, const int32_t* coordinate, uint32_t shared, F&& piece) {
  uint32_t index[5] = {0, 0, 0, 0, 0};  // of the row, in the box
  for (;;) {
    bool inside = true;
    uint64_t global = map.base;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = int64_t{coordinate[i]} + index[i];
      inside = inside && static_cast<uint64_t>(at) < map.size[i];  // -1 is huge
      global += static_cast<uint64_t>(at) * map.stride[i];
    }
    for_row_pieces(map, coordinate[0], global, inside, shared, piece);
    shared += row_pitch(map);
    int i = 1;
    while (i < map.rank && ++index[i] == map.box[i]) index[i++] = 0;
    if (i >= map.rank) return;
  }
}

}  // namespace fw
