// atom and red: one lane after the other, in the order of their numbers.
//
// Among themselves they have no races. Beside plain accesses those in shared memory and reductions in global memory may
// (race.cpp).
#include <algorithm>

#include "numbers.h"
#include "run.h"

namespace fw {
namespace {

// In the order of encode.py's OPERATIONS and TYPES.
enum Operation : int32_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompare, kIncrement, kDecrement };
enum Type : int32_t {
  kB32, kB64, kU32, kU64, kS32, kS64, kF32, kF64, kF16x2, kBF16x2, kB16, kF16, kBF16, kB128,
};
using Widest = unsigned __int128;

template <class T>
T combined(int32_t operation, T old, T b, T c) {
  using U = std::conditional_t<std::is_integral_v<T>, T, uint64_t>;
  auto bits = [&](auto f) {
    if constexpr (std::is_integral_v<T>) return f(static_cast<U>(old), static_cast<U>(b));
    else return old;
  };
  switch (operation) {
    case kAdd: return old + b;
    case kMin: return std::min(old, b);
    case kMax: return std::max(old, b);
    case kAnd: return bits([](U x, U y) { return x & y; });
    case kOr: return bits([](U x, U y) { return x | y; });
    case kXor: return bits([](U x, U y) { return x ^ y; });
    case kExchange: return b;
    case kCompare: return old == b ? c : old;
    case kIncrement: return old >= b ? T{0} : old + T{1};
    default: return old == T{0} || old > b ? b : old - T{1};
  }
}

template <class F>
uint16_t combined_small(int32_t operation, uint16_t old, uint16_t b) {
  double x = to_float(F{{old}}), y = to_float(F{{b}});
  if (operation == kAdd) return encode<F>(x + y).bits;
  if (x != x || y != y) return x != x ? b : old;  // of a number and a NaN the number
  return (x == y ? std::signbit(x) != (operation == kMax) : (x < y) != (operation == kMax)) ? old : b;
}

template <class F>
uint32_t combined_pairs(int32_t operation, uint32_t old, uint32_t b) {
  uint32_t upper = combined_small<F>(operation, old >> 16, b >> 16);
  return upper << 16 | combined_small<F>(operation, static_cast<uint16_t>(old), static_cast<uint16_t>(b));
}

template <class T>
T changed(int32_t operation, int32_t type, T old, T b, T third, bool flushes) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (type == kF16) return combined_small<F16>(operation, old, b);
    if (type == kBF16) return combined_small<BF16>(operation, old, b);
  } else if constexpr (std::is_same_v<T, uint32_t>) {
    if (type == kF16x2) return combined_pairs<F16>(operation, old, b);
    if (type == kBF16x2) return combined_pairs<BF16>(operation, old, b);
  } else if constexpr (std::is_same_v<T, float>) {  // sums in global memory have no subnormal numbers
    if (flushes) return flush(flush(old) + flush(b));
  } else if constexpr (std::is_same_v<T, Widest>) {
    return operation == kCompare ? (old == b ? third : old) : b;
  }
  if constexpr (!std::is_same_v<T, Widest>) return combined<T>(operation, old, b, third);
}

template <class T>
T value_of(Context& c, int32_t slot, int lane) {
  T value{};
  if (slot >= 0) std::memcpy(&value, c.warp->registers + slot + lane * sizeof value, sizeof value);
  return value;
}

// Operands of one number: its slot, that of the result or -1.
template <class T>
void apply(Context& c, const int32_t* o, int32_t slot, int32_t result, int lane, uint8_t* at, bool flushes = false) {
  T old;
  std::memcpy(&old, at, sizeof old);
  T now = changed<T>(o[1], o[2], old, value_of<T>(c, slot, lane), value_of<T>(c, o[3], lane), flushes);
  std::memcpy(at, &now, sizeof now);
  if (result >= 0) std::memcpy(c.warp->registers + result + lane * sizeof old, &old, sizeof old);
}

// The bytes in shared memory; what is changed and not replaced has to be there.
uint8_t* shared_place(Context& c, int lane, uint64_t address, int bytes, bool replaced) {
  std::vector<uint8_t>& written = c.block->written;
  bool there = address + bytes > written.size() || std::count(&written[address], &written[address] + bytes, 0) == 0;
  if (!there && !replaced) c.machine->find(c, kUnwritten, lane, address);
  return c.machine->shared(c, lane, address, bytes, true, kStrong);
}

// Operands: whether in shared memory (2: generic), with 4 if it acquires and 8 if it releases, operation, type, slot of the
// second operand or -1, address, how many numbers, which are neighbours in memory; their slots, those of the results or -1.
void atomic(Context& c, const int32_t* o, uint32_t mask) {
  int space = o[0] & 3;
  bool wide = o[2] == kB64 || o[2] == kU64 || o[2] == kS64 || o[2] == kF64;
  int each = o[2] == kB128 ? 16 : wide ? 8 : o[2] >= kB16 ? 2 : 4, count = o[7], bytes = each * count;
  const int32_t *slots = o + 8, *results = slots + count;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, o + 4, lane);
    bool shared = space == 1 || (space == 2 && address / kWindow * kWindow == kSharedWindow);
    uint8_t* at = nullptr;
    if (!shared) {
      if (o[1] != kExchange) c.machine->check_filled(c, lane, address, bytes);
      at = c.machine->global(c, lane, address, bytes, true, 0, true);
    } else {
      at = shared_place(c, lane, address % kWindow, bytes, o[1] == kExchange);
    }
    if (at == nullptr) continue;
    if (c.machine->hands_on) {
      FullWarp& warp = full(c);
      uint64_t flag = shared ? kSharedWindow + address % kWindow : address;
      if (results[0] >= 0) c.block->read_flag(warp, flag, (o[0] & 4) != 0);
      c.block->write_flag(warp, flag, (o[0] & 8) != 0, true);
    }
    for (int n = 0; n < count; ++n, at += each) {
      int32_t slot = slots[n], result = results[n];
      switch (o[2]) {
        case kB64: case kU64: apply<uint64_t>(c, o, slot, result, lane, at); break;
        case kS64: apply<int64_t>(c, o, slot, result, lane, at); break;
        case kS32: apply<int32_t>(c, o, slot, result, lane, at); break;
        case kF32: apply<float>(c, o, slot, result, lane, at, !shared && o[1] == kAdd); break;
        case kB16: case kF16: case kBF16: apply<uint16_t>(c, o, slot, result, lane, at); break;
        case kF64: apply<double>(c, o, slot, result, lane, at); break;
        case kB128: apply<Widest>(c, o, slot, result, lane, at); break;
        default: apply<uint32_t>(c, o, slot, result, lane, at);
      }
    }
  }
  c.machine->counts[c.instruction].bytes += int64_t{bytes} * __builtin_popcount(mask);
}

template <class T>
void reduce_all(int32_t operation, int32_t type, uint8_t* to, const uint8_t* from, int bytes) {
  for (size_t at = 0; at < static_cast<size_t>(bytes); at += sizeof(T)) {
    T old, more;
    std::memcpy(&old, to + at, sizeof old);
    std::memcpy(&more, from + at, sizeof more);
    old = changed<T>(operation, type, old, more, T{}, false);
    std::memcpy(to + at, &old, sizeof old);
  }
}

}  // namespace

void reduce(int32_t operation, int32_t type, uint8_t* to, const uint8_t* from, int bytes) {
  switch (type) {
    case kB64: case kU64: return reduce_all<uint64_t>(operation, type, to, from, bytes);
    case kS64: return reduce_all<int64_t>(operation, type, to, from, bytes);
    case kS32: return reduce_all<int32_t>(operation, type, to, from, bytes);
    case kF32: return reduce_all<float>(operation, type, to, from, bytes);
    case kF64: return reduce_all<double>(operation, type, to, from, bytes);
    case kB16: case kF16: case kBF16: return reduce_all<uint16_t>(operation, type, to, from, bytes);
    default: return reduce_all<uint32_t>(operation, type, to, from, bytes);
  }
}

void add_atomic(Table& table) { table["atom"] = table["red"] = atomic; }

}  // namespace fw
