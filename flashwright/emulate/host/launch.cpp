// A launch: its parameters as the kernel finds them, and what memory there is.
#include <algorithm>

#include "host.h"

namespace fwh {
namespace {

constexpr size_t kUsualShared = 48 << 10;  // bytes of a block, without cudaFuncSetAttribute
constexpr uintptr_t kEnd = 0, kBuffer = 1, kSize = 2;  // of the driver's `extra`
constexpr int kFirstOfKernels = 700, kLastOfKernels = 719;  // errors that a kernel ends with, after its launch
constexpr size_t kMostFreed = 4096;  // freed allocations that a finding can still name

int wrong(const Launch& launch, int error, const std::string& why) {
  return fail(error, launch.kernel->name + " is launched with " + why);
}

std::string in_words(const Dim& dim) {
  return std::to_string(dim.x) + ", " + std::to_string(dim.y) + ", " + std::to_string(dim.z);
}

// What the driver refuses, and what it does not know of a kernel in the emulator: the attribute for more shared memory.
int check(const Launch& launch) {
  const Kernel& kernel = *launch.kernel;
  const Dim &grid = launch.grid, &block = launch.block;
  uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return wrong(launch, kInvalidConfiguration, "a grid of " + in_words(grid));
  if (threads == 0) return wrong(launch, kInvalidConfiguration, "a block of " + in_words(block));
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return wrong(launch, kInvalidConfiguration, "a grid of " + in_words(grid) + ", which no GPU takes");
  }
  if (threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
    return wrong(launch, kInvalidConfiguration, "a block of " + in_words(block) + ", which no GPU takes");
  }
  if (kernel.threads && threads > kernel.threads) {
    std::string bound = "__launch_bounds__ allows " + std::to_string(kernel.threads);
    return wrong(launch, kInvalidConfiguration, std::to_string(threads) + " threads, and " + bound);
  }
  size_t most = kernel.dynamic >= 0 ? std::max<size_t>(kernel.dynamic, kUsualShared - std::min<size_t>(kernel.shared, kUsualShared))
                                    : kUsualShared - std::min<size_t>(kernel.shared, kUsualShared);
  if (launch.shared > most) {
    std::string limit = std::to_string(most) + " without cudaFuncSetAttribute(..., MaxDynamicSharedMemorySize, ...)";
    if (kernel.dynamic >= 0) limit = std::to_string(most) + " by its cudaFuncSetAttribute";
    std::string text = std::to_string(launch.shared) + " bytes of dynamic shared memory, and may have " + limit;
    return wrong(launch, kInvalidValue, text);
  }
  return kSuccess;
}

void add_allocation(Message& message, const Allocation& one) {
  message.number(one.base).number(one.size).number(one.kind).number(one.number);
}

}  // namespace

int pack(Launch& launch, void** arguments, void** extra) {
  Kernel& kernel = *launch.kernel;
  int error = ask_kernel(kernel);
  if (error != kSuccess) return error;
  size_t size = 0;
  for (auto [offset, bytes] : kernel.parameters) size = std::max<size_t>(size, offset + bytes);
  launch.parameters.assign(size, '\0');
  if (arguments != nullptr) {
    for (size_t n = 0; n < kernel.parameters.size(); ++n) {
      auto [offset, bytes] = kernel.parameters[n];
      std::memcpy(launch.parameters.data() + offset, arguments[n], bytes);
    }
  } else if (extra != nullptr) {
    const void* buffer = nullptr;
    size_t given = 0;
    for (void** at = extra; reinterpret_cast<uintptr_t>(*at) != kEnd; at += 2) {
      if (reinterpret_cast<uintptr_t>(*at) == kBuffer) buffer = at[1];
      if (reinterpret_cast<uintptr_t>(*at) == kSize) given = *static_cast<size_t*>(at[1]);
    }
    if (buffer == nullptr) return wrong(launch, kInvalidValue, "no buffer of parameters");
    std::memcpy(launch.parameters.data(), buffer, std::min(given, size));
  } else if (!kernel.parameters.empty()) {
    return wrong(launch, kInvalidValue, "no parameters");
  }
  return kSuccess;
}

int start(const Launch& launch) {
  int error = check(launch);
  if (error != kSuccess) return error;
  Message message;
  // The module has a number: pack has asked for the kernel.
  message.number(module_id(*launch.kernel->module)).text(launch.kernel->name);
  for (const Dim& dim : {launch.grid, launch.block, launch.cluster}) message.number(dim.x).number(dim.y).number(dim.z);
  message.number(launch.shared).number(launch.cooperative).text(launch.parameters);
  message.number(living().size());
  for (const auto& [base, one] : living()) add_allocation(message, one);
  size_t many = std::min(freed().size(), kMostFreed);
  message.number(many);
  for (size_t n = freed().size() - many; n < freed().size(); ++n) add_allocation(message, freed()[n]);
  error = ask(kLaunch, message).error;
  if (error < kFirstOfKernels || error > kLastOfKernels) return done(error);
  break_off(error);
  return done(kSuccess);
}

}  // namespace fwh
