#include "tensor_map.h"

#include <cstring>

namespace fw {

bool tensor_map(const uint8_t* bytes, TensorMap& map) {
  std::memcpy(&map, bytes, sizeof map);
  return map.magic == kTensorMapMagic && map.rank >= 1 && map.rank <= 5;
}

int box_bytes(const TensorMap& map) {
  int bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= static_cast<int>(map.box[i]);
  return bytes;
}

// The NaN is a special one, that fma.oob knows again: 7ff7 in each 16 bits, whatever the type.
void fill_value(const TensorMap& map, uint8_t* out, int bytes) {
  for (int i = 0; i < bytes; ++i) out[i] = map.fill == 0 ? 0 : i % 2 == 0 ? 0xf7 : 0x7f;
}

}  // namespace fw
