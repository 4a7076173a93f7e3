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
enum Type : int32_t { kB32, kB64, kU32, kU64, kS32, kS64, kF32, kF64, kF16x2, kBF16x2, kB16, kF16, kBF16 };

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
uint16_t added(uint16_t old, uint16_t b) {
  F x{{old}}, y{{b}};
  return encode<F>(static_cast<double>(to_float(x)) + to_float(y)).bits;
}

template <class F>
uint32_t added_pairs(uint32_t old, uint32_t b) {
  uint32_t upper = added<F>(old >> 16, b >> 16);
  return upper << 16 | added<F>(old, b);
}

template <class T>
void apply(Context& c, const int32_t* o, int32_t slot, int lane, uint8_t* at, bool flushes = false) {
  T old;
  std::memcpy(&old, at, sizeof old);
  T b = lanes<T>(c, slot)[lane];
  T third = o[4] >= 0 ? lanes<T>(c, o[4])[lane] : T{};
  T now;
  if constexpr (std::is_same_v<T, uint16_t>) {
    now = o[2] == kF16 ? added<F16>(old, b) : o[2] == kBF16 ? added<BF16>(old, b) : combined<T>(o[1], old, b, third);
  } else if constexpr (std::is_same_v<T, uint32_t>) {
    now = o[2] == kF16x2    ? added_pairs<F16>(old, b)
          : o[2] == kBF16x2 ? added_pairs<BF16>(old, b)
                            : combined<T>(o[1], old, b, third);
  } else if constexpr (std::is_same_v<T, float>) {  // sums in global memory have no subnormal numbers
    now = flushes ? flush(flush(old) + flush(b)) : combined<T>(o[1], old, b, third);
  } else {
    now = combined<T>(o[1], old, b, third);
  }
  if (std::memcmp(at, &now, sizeof now) != 0) ++c.machine->changes;
  std::memcpy(at, &now, sizeof now);
  if (o[3] >= 0) lanes<T>(c, o[3])[lane] = old;
}

// The bytes in shared memory; what is changed and not replaced has to be there.
uint8_t* changed(Context& c, int lane, uint64_t address, int bytes, bool replaced) {
  uint64_t own = address;
  if (Block* home = home_of(c, own); home != nullptr && own + bytes <= home->written.size()) {
    const uint8_t* marks = home->written.data() + own;
    bool there = std::count(marks, marks + bytes, 0) == 0;
    if (!there && !replaced) c.machine->find(c, kUnwritten, lane, address);
  }
  return c.machine->shared(c, lane, address, bytes, true, kStrong);
}

void apply_any(Context& c, const int32_t* o, int32_t slot, int lane, uint8_t* at, bool shared) {
  switch (o[2]) {
    case kB64: case kU64: return apply<uint64_t>(c, o, slot, lane, at);
    case kS64: return apply<int64_t>(c, o, slot, lane, at);
    case kS32: return apply<int32_t>(c, o, slot, lane, at);
    case kF32: return apply<float>(c, o, slot, lane, at, !shared && o[1] == kAdd);
    case kB16: case kF16: case kBF16: return apply<uint16_t>(c, o, slot, lane, at);
    case kF64: return apply<double>(c, o, slot, lane, at);
    default: apply<uint32_t>(c, o, slot, lane, at);
  }
}

// A reduction in a block's shared memory, of which an mbarrier there is told. Operands: those of atomic, mbarrier. The
// sum is there at once: whoever does not wait for it may see it or not.
void reduce_async(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  int bytes = o[2] == kB64 || o[2] == kU64 || o[2] == kS64 ? 8 : 4;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t to = address_of(c, o + 5, lane) % kWindow, address = address_of(c, o + 10, lane) % kWindow;
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    uint32_t number = ++barrier->issued;
    Accessor who{&warp.clock, barrier->agent, number, warp.agent, lane, false, warp.met, kStrong};
    if (to % bytes != 0) {
      c.machine->find(c, kMisaligned, lane, to);
    } else if (c.machine->shared_async(c, who, to, bytes, true)) {
      Block* home = home_of(c, to);
      apply_any(c, o, o[9], lane, home->shared.data() + to, true);
    }
    barrier->outstanding.insert(number);
    c.machine->load(*c.block, [c, lane, address, number, bytes]() mutable { land_bytes(c, lane, address, number, bytes); });
  }
  c.machine->counts[c.instruction].bytes += int64_t{bytes} * __builtin_popcount(mask);
}

// Operands: whether in shared memory (2: generic), with 4 if it acquires, 8 if it releases and 16 times its scope, operation, type, slot of the result or -1, slot of the second operand
// or -1, address, then the slots of the first one, behind their number: several are neighbours in memory.
void atomic(Context& c, const int32_t* o, uint32_t mask) {
  int space = o[0] & 3, scope = o[0] >> 4;
  bool wide = o[2] == kB64 || o[2] == kU64 || o[2] == kS64 || o[2] == kF64;
  int each = wide ? 8 : o[2] >= kB16 ? 2 : 4, count = o[8], bytes = each * count;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, o + 5, lane);
    bool shared = space == 1 || (space == 2 && address / kWindow * kWindow == kSharedWindow);
    uint8_t* at = nullptr;
    if (!shared) {
      if (o[1] != kExchange) c.machine->check_filled(c, lane, address, bytes);
      at = c.machine->global(c, lane, address, bytes, true, 0, scope);
    } else {
      at = changed(c, lane, address % kWindow, bytes, o[1] == kExchange);
    }
    if (at == nullptr) continue;
    if (c.machine->hands_on) {
      uint64_t flag = shared ? kSharedWindow + shared_by_all(c, address) : address;
      if (o[3] >= 0) read_flag(c, flag, scope, (o[0] & 4) != 0);
      write_flag(c, flag, scope, (o[0] & 8) != 0, true);
    }
    int64_t changes = c.machine->changes;
    for (int n = 0; n < count; ++n, at += each) apply_any(c, o, o[9 + n], lane, at, shared);
    if (o[3] >= 0) poll(c, address, changes != c.machine->changes);
  }
  c.machine->counts[c.instruction].bytes += int64_t{bytes} * __builtin_popcount(mask);
}

}  // namespace

void add_atomic(Table& table) {
  table["atom"] = table["red"] = atomic;
  table["red.async"] = reduce_async;
}

}  // namespace fw
