// One instruction on a register file, for the tests: nothing here needs memory, barriers or a
// schedule.

#include <algorithm>
#include <cfenv>

#include "run.h"

namespace {

const fw::Table& table() {
  static const fw::Table all = [] {
    fw::Table table;
    fw::add_arithmetic(table);
    fw::add_convert(table);
    fw::add_exchange(table);
    fw::add_matrix(table);
    return table;
  }();
  return all;
}

// Whoever was loaded before may have left this thread rounding otherwise, or flushing subnormal
// numbers.
class PlainFloats {
 public:
  PlainFloats() { std::fegetenv(&before_), std::fesetenv(FE_DFL_ENV); }
  ~PlainFloats() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace

// A finding needs a machine, and no test here has one.
void fw::Machine::find(const Context&, FindingKind, int, uint64_t, int, int64_t, int64_t) {
  std::abort();
}

#define FW_EXPORT extern "C" __attribute__((visibility("default")))

// Executes the instruction for the lanes in `mask`: 0, or 1 where no such name is known.
FW_EXPORT int fw_single(const char* name, uint8_t* registers, const int32_t* operands, int count,
                        uint32_t mask) {
  const auto found = table().find(name);
  if (found == table().end()) return 1;
  PlainFloats plain;
  fw::FullWarp warp;
  warp.registers = registers;
  warp.file.resize(1 << 16);  // as many as tests have
  fw::Context context{nullptr, nullptr, &warp, 0, count};
  found->second(context, operands, mask);
  return 0;
}

// All names, a line each, as much of them as fits; the size that holds them all.
FW_EXPORT int fw_names(char* out, int size) {
  std::string names;
  for (const auto& [name, handler] : table()) names += name + "\n";
  if (size > 0) {
    const size_t length = std::min<size_t>(names.size(), size - 1);
    std::memcpy(out, names.data(), length);
    out[length] = '\0';
  }
  return static_cast<int>(names.size()) + 1;
}
