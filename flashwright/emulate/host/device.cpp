// The device that the program finds: the GPU that the emulator was asked for, or one that takes all its kernels.
#include <algorithm>

#include "host.h"

namespace fwh {
namespace {

constexpr int kMostThreads = 1024, kMostGrid = 0x7fffffff, kMostGridYZ = 65535, kMostZ = 64, kWarp = 32;
constexpr int kConstant = 64 << 10;

// Writes the fields of a struct in their order, each at its alignment.
class Fields {
 public:
  explicit Fields(void* at) : at_(static_cast<char*>(at)) {}
  Fields& whole(int64_t value, int count = 1) {
    for (int n = 0; n < count; ++n) put(static_cast<int32_t>(value));
    return *this;
  }
  Fields& three(int x, int y, int z) { return whole(x).whole(y).whole(z); }
  Fields& size(uint64_t value) {
    used_ = (used_ + 7) / 8 * 8;
    put(value);
    return *this;
  }
  Fields& skip(size_t bytes) {
    used_ += bytes;
    return *this;
  }

 private:
  template <class T>
  void put(T value) {
    std::memcpy(at_ + used_, &value, sizeof value);
    used_ += sizeof value;
  }
  char* at_;
  size_t used_ = 0;
};

int known(int which) {
  int value = 0;
  attribute(which, &value);
  return value;
}

}  // namespace

// Attributes of textures and of what is not there are 0.
int attribute(int which, int* value) {
  const Device& gpu = device();
  if (value == nullptr) return fail(kInvalidValue, "an attribute has no place for its value");
  auto is = [&](uint64_t found) {
    *value = static_cast<int>(std::min<uint64_t>(found, kMostGrid));
    return done(kSuccess);
  };
  switch (which) {
    case 1: case 2: case 3: return is(kMostThreads);
    case 4: return is(kMostZ);
    case 5: case 11: return is(kMostGrid);
    case 6: case 7: return is(kMostGridYZ);
    case 8: return is(gpu.shared);
    case 9: return is(kConstant);
    case 10: return is(kWarp);
    case 12: case 82: return is(gpu.registers_sm);
    case 13: return is(gpu.clock_khz);
    case 14: case 30: return is(512);
    case 51: return is(32);
    case 15: case 18: case 31: case 41: case 78: case 79: case 80: case 83: case 90: case 95: case 99: case 115: return is(1);
    case 16: return is(gpu.sms);
    case 36: return is(gpu.clock_khz);
    case 37: return is(gpu.bus);
    case 38: return is(gpu.l2);
    case 39: return is(gpu.threads_sm);
    case 40: return is(2);
    case 75: return is(gpu.capability / 10);
    case 76: return is(gpu.capability % 10);
    case 81: return is(gpu.shared_sm);
    case 87: return is(2);
    case 97: return is(gpu.shared_optin);
    case 106: return is(gpu.blocks_sm);
    case 108: case 109: return is(0);
    case 111: return is(gpu.shared_reserved);
    case 120: case 127: return is(gpu.capability >= 90);
    default: return which > 0 && which < 160 ? is(0) : fail(kInvalidValue, "a device attribute that does not exist");
  }
}

int occupancy(Kernel& kernel, int threads, size_t shared) {
  const Device& gpu = device();
  if (threads <= 0) return 0;
  uint64_t rounded = (static_cast<uint64_t>(threads) + kWarp - 1) / kWarp * kWarp;
  uint64_t bytes = kernel.shared + shared + gpu.shared_reserved;
  uint64_t blocks = std::min(gpu.blocks_sm, gpu.threads_sm / rounded);
  if (kernel.shared + shared > gpu.shared_optin || (kernel.threads && rounded > kernel.threads)) return 0;
  return static_cast<int>(bytes ? std::min(blocks, gpu.shared_sm / bytes) : blocks);
}

void properties(void* out, bool old) {
  const Device& gpu = device();
  size_t size = old ? 1032 : 1008;
  std::memset(out, 0, size);
  std::memcpy(out, gpu.name.c_str(), std::min<size_t>(gpu.name.size(), 255));
  Fields to(out);
  to.skip(256 + 16 + 8).whole(0).size(gpu.memory).size(gpu.shared).whole(gpu.registers_sm).whole(kWarp).size(kMostGrid);
  to.whole(kMostThreads).three(kMostThreads, kMostThreads, kMostZ).three(kMostGrid, kMostGridYZ, kMostGridYZ);
  if (old) to.whole(gpu.clock_khz);
  to.size(kConstant).whole(gpu.capability / 10).whole(gpu.capability % 10).size(512).size(32);
  if (old) to.whole(1);             // deviceOverlap
  to.whole(gpu.sms);
  if (old) to.whole(0);             // kernelExecTimeoutEnabled
  to.whole(0).whole(1);             // integrated, canMapHostMemory
  if (old) to.whole(0);             // computeMode
  to.whole(0, old ? 3 : 2);         // one-dimensional textures
  to.whole(0, 2 + 2 + 3 + 2 + 3 + 3 + 1 + 2 + 3 + 2);  // other textures
  to.whole(0, 1 + 2 + 3 + 2 + 3 + 1 + 2).size(512);    // surfaces
  to.whole(1).whole(0).three(1, 0, 0).whole(0).whole(2).whole(1);  // concurrentKernels ... unifiedAddressing
  if (old) to.whole(gpu.clock_khz);
  to.whole(gpu.bus).whole(gpu.l2).whole(0).whole(gpu.threads_sm).three(1, 1, 1).size(gpu.shared_sm).whole(gpu.registers_sm);
  to.whole(1).whole(0).whole(0).whole(0);  // managedMemory ... hostNativeAtomicSupported
  if (old) to.whole(2);             // singleToDoublePrecisionPerfRatio
  to.whole(0).whole(0).whole(1).whole(0).whole(1);  // pageableMemoryAccess ... cooperativeLaunch
  if (old) to.whole(0);             // cooperativeMultiDeviceLaunch
  to.size(gpu.shared_optin).whole(0).whole(0).whole(gpu.blocks_sm).whole(0).size(gpu.shared_reserved);
  to.whole(1).whole(0).whole(0).whole(0).whole(1).whole(0).whole(0).whole(0).whole(0).whole(0).whole(0);
  to.whole(known(120));
}

}  // namespace fwh
