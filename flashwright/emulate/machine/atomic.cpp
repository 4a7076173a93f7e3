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
  if (std::memcmp(at, &now, sizeof now) != 0) ++c.machine->changes;
  std::memcpy(at, &now, sizeof now);
  if (result >= 0) std::memcpy(c.warp->registers + result + lane * sizeof old, &old, sizeof old);
}

// The bytes in shared memory; what is changed and not replaced has to be there.
uint8_t* shared_place(Context& c, int lane, uint64_t address, int bytes, bool replaced) {
  uint64_t own = address;
  if (Block* home = home_of(c, own); home != nullptr && own + bytes <= home->written.size()) {
    const uint8_t* marks = home->written.data() + own;
    bool there = std::count(marks, marks + bytes, 0) == 0;
    if (!there && !replaced) c.machine->tell_unwritten(c, lane, *home, own, address, bytes);
  }
  return c.machine->shared(c, lane, address, bytes, true, kStrong);
}

void apply_any(Context& c, const int32_t* o, int32_t slot, int32_t result, int lane, uint8_t* at, bool shared) {
  switch (o[2]) {
    case kB64: case kU64: return apply<uint64_t>(c, o, slot, result, lane, at);
    case kS64: return apply<int64_t>(c, o, slot, result, lane, at);
    case kS32: return apply<int32_t>(c, o, slot, result, lane, at);
    case kF32: return apply<float>(c, o, slot, result, lane, at, !shared && o[1] == kAdd);
    case kB16: case kF16: case kBF16: return apply<uint16_t>(c, o, slot, result, lane, at);
    case kF64: return apply<double>(c, o, slot, result, lane, at);
    case kB128: return apply<Widest>(c, o, slot, result, lane, at);
    default: apply<uint32_t>(c, o, slot, result, lane, at);
  }
}

// A reduction in a block's shared memory, of which an mbarrier there is told. Operands: those of atomic for one number,
// mbarrier. The sum is there at once: whoever does not wait for it may see it or not.
void reduce_async(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  int bytes = o[2] == kB64 || o[2] == kU64 || o[2] == kS64 ? 8 : 4;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t to = address_of(c, o + 4, lane) % kWindow, address = address_of(c, o + 10, lane) % kWindow;
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    uint32_t number = ++barrier->issued;
    Accessor who{&warp.clock, barrier->agent, number, warp.agent, lane, false, warp.met, kStrong};
    if (to % bytes != 0) {
      c.machine->find(c, kMisaligned, lane, to);
    } else if (c.machine->shared_async(c, who, to, bytes, true)) {
      Block* home = home_of(c, to);
      apply_any(c, o, o[8], -1, lane, home->shared.data() + to, true);
    }
    barrier->outstanding.insert(number);
    c.machine->load(*c.block, [c, lane, address, number, bytes]() mutable { land_bytes(c, lane, address, number, bytes); });
  }
  c.machine->counts[c.instruction].bytes += int64_t{bytes} * __builtin_popcount(mask);
}

// Operands: whether in shared memory (2: generic), with 4 if it acquires, 8 if it releases and 16 times its scope, operation,
// type, slot of the second operand or -1, address, how many numbers, which are neighbours in memory; their slots, those of
// the results or -1.
void atomic(Context& c, const int32_t* o, uint32_t mask) {
  int space = o[0] & 3, scope = o[0] >> 4;
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
      at = c.machine->global(c, lane, address, bytes, true, 0, scope);
    } else {
      at = shared_place(c, lane, address % kWindow, bytes, o[1] == kExchange);
    }
    if (at == nullptr) continue;
    if (c.machine->hands_on) {
      uint64_t flag = shared ? kSharedWindow + shared_by_all(c, address) : address;
      if (results[0] >= 0) read_flag(c, flag, scope, (o[0] & 4) != 0);
      write_flag(c, flag, scope, lane, (o[0] & 8) != 0, true);
    }
    int64_t changes = c.machine->changes;
    for (int n = 0; n < count; ++n, at += each) apply_any(c, o, slots[n], results[n], lane, at, shared);
    if (results[0] >= 0) poll(c, address, changes != c.machine->changes);
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

void add_atomic(Table& table) {
  table["atom"] = table["red"] = atomic;
  table["red.async"] = reduce_async;
}

}  // namespace fw
