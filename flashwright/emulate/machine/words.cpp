// Instructions that other instructions make superfluous, but that compilers and headers use: sums with a carry, products of
// 24 bits, arithmetic on parts of a word (video), fp64 in other roundings than to nearest.
#include <algorithm>
#include <cfenv>

#include "numbers.h"
#include "run.h"

namespace fw {
namespace {

using std::string;

// --- carries --------------------------------------------------------------------------------------

enum class Carried { kAdd, kSub, kLow, kHigh };

// Operands: result, the numbers, the predicate that is the carry. kIn: it is added; kOut: it is written.
template <class T, Carried kWhat, bool kIn, bool kOut>
void carried(Context& c, const int32_t* o, uint32_t mask) {
  using U = std::make_unsigned_t<T>;
  constexpr bool kProduct = kWhat == Carried::kLow || kWhat == Carried::kHigh;
  constexpr int kWidth = 8 * sizeof(T);
  uint32_t before = predicate(c, o[kProduct ? 4 : 3]), after = 0;
  U out[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    U a = lanes<U>(c, o[1])[lane], b = lanes<U>(c, o[2])[lane];
    if constexpr (kProduct) {
      using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      W product = W(T(a)) * W(T(b));
      a = kWhat == Carried::kLow ? U(product) : U(product >> kWidth);
      b = lanes<U>(c, o[3])[lane];
    }
    unsigned __int128 in = kIn ? before >> lane & 1 : 0, first = a, second = b;
    unsigned __int128 whole = kWhat == Carried::kSub ? first - second - in : first + second + in;
    after |= uint32_t(whole >> kWidth & 1) << lane;
    out[lane] = U(whole);
  }
  store(c, o[0], mask, out, sizeof(U));
  if (kOut) write_predicate(c, o[kProduct ? 4 : 3], mask, after);
}

template <class T, Carried kWhat>
void add_carried(Table& table, const string& stem, const string& part, const string& type) {
  table[stem + part + ".cc." + type] = carried<T, kWhat, false, true>;
  table[stem + "c" + part + "." + type] = carried<T, kWhat, true, false>;
  table[stem + "c" + part + ".cc." + type] = carried<T, kWhat, true, true>;
}

template <class T> void add_carries(Table& table, const string& type) {
  add_carried<T, Carried::kAdd>(table, "add", "", type);
  add_carried<T, Carried::kSub>(table, "sub", "", type);
  add_carried<T, Carried::kLow>(table, "mad", ".lo", type);
  add_carried<T, Carried::kHigh>(table, "mad", ".hi", type);
}

// --- 24 bits, fields ------------------------------------------------------------------------------

template <class T> int64_t product24(T a, T b) {
  return (int64_t(T(uint32_t(a) << 8)) >> 8) * (int64_t(T(uint32_t(b) << 8)) >> 8);
}
template <class T> T mul24_lo(T a, T b) { return T(product24(a, b)); }
template <class T> T mul24_hi(T a, T b) { return T(product24(a, b) >> 16); }
template <class T> T mad24_lo(T a, T b, T c) { return T(uint32_t(mul24_lo(a, b)) + uint32_t(c)); }
template <class T> T mad24_hi(T a, T b, T c) { return T(uint32_t(mul24_hi(a, b)) + uint32_t(c)); }
int32_t mad24_sat(int32_t a, int32_t b, int32_t c) {
  int64_t sum = int64_t(mul24_hi(a, b)) + c;
  return int32_t(std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX));
}

// szext: the lowest bits of a number.
template <class T, bool kClamp> T extended(T a, uint32_t bits) {
  if (!kClamp) bits &= 31;
  if (bits == 0) return 0;
  if (bits >= 32) return a;
  return T(uint32_t(a) << (32 - bits)) >> (32 - bits);
}

// fns: the place of the n-th bit that is set, counted from a place on, up or down.
uint32_t find_nth(uint32_t mask, uint32_t base, int32_t offset) {
  int64_t at = base, left = std::abs(int64_t(offset)) - 1;
  if (offset == 0) return at < 32 && (mask >> at & 1) ? base : ~0u;
  for (; at >= 0 && at < 32; at += offset > 0 ? 1 : -1) {
    if ((mask >> at & 1) && left-- == 0) return uint32_t(at);
  }
  return ~0u;
}

template <class T> void add_fields(Table& table, const string& type) {
  put(table, type,
      {{"mul24.lo.", lanewise<mul24_lo<T>>},
       {"mul24.hi.", lanewise<mul24_hi<T>>},
       {"mad24.lo.", lanewise<mad24_lo<T>>},
       {"mad24.hi.", lanewise<mad24_hi<T>>},
       {"szext.clamp.", lanewise<extended<T, true>>},
       {"szext.wrap.", lanewise<extended<T, false>>}});
}

// --- fp64 -----------------------------------------------------------------------------------------

enum Op64 { kAdd64, kSub64, kMul64, kFma64, kDiv64, kSqrt64, kRcp64 };

// The host computes in the rounding that is set. A call of its own, so that nothing moves out of it.
__attribute__((noinline)) void compute64(Op64 op, const double* a, const double* b, const double* c, double* out) {
  asm volatile("" ::: "memory");
  for (int lane = 0; lane < kLanes; ++lane) {
    double x = a[lane], y = b[lane], z = c[lane];
    out[lane] = op == kAdd64    ? x + y
                : op == kSub64  ? x - y
                : op == kMul64  ? x * y
                : op == kFma64  ? std::fma(x, y, z)
                : op == kDiv64  ? x / y
                : op == kSqrt64 ? std::sqrt(x)
                                : 1 / x;
  }
  asm volatile("" ::: "memory");
}

template <int kRound, Op64 kOp>
void directed(Context& c, const int32_t* o, uint32_t mask) {
  const double* source[3];
  for (int n = 0; n < 3; ++n) source[n] = lanes<const double>(c, o[n + 1 < c.count ? n + 1 : 1]);
  double out[kLanes];
  std::fesetround(kRound);
  compute64(kOp, source[0], source[1], source[2], out);
  std::fesetround(FE_TONEAREST);
  for (double& x : out) x = canonical(x);
  store(c, o[0], mask, out, sizeof(double));
}

template <int kRound> void add_directed64(Table& table, const string& round) {
  put(table, round + ".f64",
      {{"add", directed<kRound, kAdd64>},
       {"sub", directed<kRound, kSub64>},
       {"mul", directed<kRound, kMul64>},
       {"fma", directed<kRound, kFma64>},
       {"div", directed<kRound, kDiv64>},
       {"sqrt", directed<kRound, kSqrt64>},
       {"rcp", directed<kRound, kRcp64>}});
}

template <int kRound, class T>
void whole_to_double(Context& c, const int32_t* o, uint32_t mask) {
  const T* a = lanes<const T>(c, o[1]);
  double out[kLanes];
  std::fesetround(kRound);
  asm volatile("" ::: "memory");
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = static_cast<double>(a[lane]);
  asm volatile("" : : "r"(out) : "memory");
  std::fesetround(FE_TONEAREST);
  store(c, o[0], mask, out, sizeof(double));
}

template <class T> void add_whole_to_double(Table& table, const string& type) {
  table["cvt.rz.f64." + type] = whole_to_double<FE_TOWARDZERO, T>;
  table["cvt.rm.f64." + type] = whole_to_double<FE_DOWNWARD, T>;
  table["cvt.rp.f64." + type] = whole_to_double<FE_UPWARD, T>;
}

// The upper word of the number in, the upper word of the result out.
double upper(double x) { return bits_as<double>(bits_as<uint64_t>(x) & ~uint64_t{0xffffffff}); }
double flush64(double x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0, x) : x; }
double rough(double x) {
  if (std::isinf(x)) return x;
  if (x != x) return bits_as<double>(uint64_t{0x7fffffff} << 32);
  return flush64(upper(bits_as<double>(bits_as<uint64_t>(x) + (uint64_t{1} << 31))));
}
double rough_rcp(double a) { return rough(1 / flush64(upper(a))); }
double rough_rsqrt(double a) { return rough(1 / std::sqrt(flush64(upper(a)))); }

// --- generic addresses ----------------------------------------------------------------------------

template <uint64_t kWhere>
void is_in(Context& c, const int32_t* o, uint32_t mask) {
  uint32_t found = 0;
  for_lanes(mask, [&](int lane) {
    uint64_t window = lanes<uint64_t>(c, o[1])[lane] / kWindow * kWindow;
    found |= uint32_t{window == kWhere} << lane;
  });
  write_predicate(c, o[0], mask, found);
}

// Constants lie among the variables of the module (encode.py).
constexpr uint64_t kModule = uint64_t{1} << 38;

template <bool kConstant>
void is_global(Context& c, const int32_t* o, uint32_t mask) {
  uint32_t found = 0;
  for_lanes(mask, [&](int lane) {
    uint64_t address = lanes<uint64_t>(c, o[1])[lane];
    bool constant = false;
    for (const Region& region : c.machine->regions) {
      bool inside = address >= region.base && address - region.base < region.size && region.base >= kModule;
      constant |= inside && (region.use == kRead || region.use == kUnset);
    }
    bool outside = address / kWindow >= 0x7c;
    found |= uint32_t{!outside && constant == kConstant} << lane;
  });
  write_predicate(c, o[0], mask, found);
}

// --- video ----------------------------------------------------------------------------------------

// Operands: the numbers of the operation, of the second one, of the parts in a word (1, 2, 4), of flags, of the parts to
// write; which parts of a and b are taken; then slots of d, a, b, c.
enum Video : int32_t { kVAdd, kVSub, kVAbsDiff, kVMin, kVMax, kVAverage, kVShl, kVShr, kVMad, kVSet };
enum Second : int32_t { kNo, kThenAdd, kThenMin, kThenMax };
constexpr int32_t kASigned = 1, kBSigned = 2, kDSigned = 4, kSaturates = 8, kWraps = 16, kComparing = 5;

int64_t part(uint32_t word, int bits, int at, bool is_signed) {
  uint64_t value = uint64_t(word) >> at & ((uint64_t{1} << bits) - 1);
  return is_signed && value >> (bits - 1) & 1 ? int64_t(value) - (int64_t{1} << bits) : int64_t(value);
}

int64_t clamped(int64_t x, int bits, bool is_signed) {
  int64_t least = is_signed ? -(int64_t{1} << (bits - 1)) : 0;
  int64_t most = (int64_t{1} << (is_signed ? bits - 1 : bits)) - 1;
  return x < least ? least : x > most ? most : x;
}

int64_t operate(int32_t op, int32_t flags, int64_t a, int64_t b, int64_t c, int bits) {
  switch (op) {
    case kVAdd: return a + b;
    case kVSub: return a - b;
    case kVAbsDiff: return a < b ? b - a : a - b;
    case kVMin: return a < b ? a : b;
    case kVMax: return a < b ? b : a;
    case kVAverage: return (a + b + (a + b >= 0)) >> 1;
    case kVShl: b = flags & kWraps ? b & 31 : b > 32 ? 32 : b; return int64_t(uint64_t(a) << b);
    case kVShr: b = flags & kWraps ? b & 31 : b > 32 ? 32 : b; return a >> b;
    case kVMad: return a * b + c;
    default: {
      const bool truth[] = {a == b, a != b, a < b, a <= b, a > b, a >= b};
      return truth[op - kVSet];
    }
  }
}

struct VideoCode {
  int32_t op, second, parts, flags, written, a_part, b_part;
  const int32_t* slots;

  explicit VideoCode(const int32_t* o)
      : op(o[0]), second(o[1]), parts(o[2]), flags(o[3]), written(o[4]), a_part(o[5]), b_part(o[6]), slots(o + 7) {}

  // The part of a or b that part `n` of the result is made of: a digit for each, of the eight parts of b:a; of a word,
  // a byte or half of it.
  int64_t taken(uint32_t a, uint32_t b, int n, int32_t which, bool is_signed) const {
    int bits = 32 / parts;
    if (parts == 1) {
      int size = which >> 4, at = which & 15;
      return part(a, 8 * size, 8 * size * at, is_signed);
    }
    int choice = which >> 4 * n & 15;
    return part(choice < parts ? a : b, bits, bits * (choice % parts), is_signed);
  }

  uint32_t result(uint32_t a, uint32_t b, uint32_t c) const {
    int bits = 32 / parts;
    bool d_signed = flags & kDSigned;
    uint32_t made = second == kThenAdd ? c : 0;
    for (int n = 0; n < parts; ++n) {
      if (parts > 1 && !(written >> n & 1)) {
        if (second != kThenAdd) made |= c & uint32_t((uint64_t{1} << bits) - 1) << bits * n;
        continue;
      }
      int64_t x = parts == 1 ? taken(a, a, n, a_part, flags & kASigned) : taken(a, b, n, a_part, flags & kASigned);
      int64_t y = parts == 1 ? taken(b, b, n, b_part, flags & kBSigned) : taken(a, b, n, b_part, flags & kBSigned);
      int64_t z = op == kVMad && d_signed ? int64_t(int32_t(c)) : int64_t(c);
      int64_t value = operate(op, flags, x, y, z, bits);
      if (flags & kSaturates) value = clamped(value, bits, d_signed);
      if (second == kThenAdd) {
        made += uint32_t(value);
      } else {
        if (second == kThenMin || second == kThenMax) {
          int64_t other = d_signed ? int64_t(int32_t(c)) : int64_t(c);
          value = d_signed ? int64_t(int32_t(value)) : int64_t(uint32_t(value));
          value = (second == kThenMin) == (value < other) ? value : other;
        }
        made |= uint32_t(uint64_t(value) & ((uint64_t{1} << bits) - 1)) << bits * n;
      }
    }
    return made;
  }
};

void video(Context& c, const int32_t* o, uint32_t mask) {
  VideoCode code(o);
  const uint32_t* source[3];
  for (int n = 0; n < 3; ++n) source[n] = lanes<const uint32_t>(c, code.slots[n + 1]);
  uint32_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = code.result(source[0][i], source[1][i], source[2][i]);
  store(c, code.slots[0], mask, out, 4);
}

// cvt.pack: two integers, saturated, below the rest of c where they are of less than 16 bits.
template <class T, class S>
uint32_t packed_pair(S a, S b, uint32_t c) {
  constexpr int kBits = std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t> ? 16 : 8;
  using Limits = std::numeric_limits<T>;
  auto one = [](S x) {
    int64_t value = std::min<int64_t>(std::max<int64_t>(x, Limits::min()), Limits::max());
    return uint32_t(value) & ((1u << kBits) - 1);
  };
  uint32_t pair = one(a) << kBits | one(b);
  return kBits == 16 ? pair : pair | c << 16;
}
template <class T> uint32_t packed_two(int32_t a, int32_t b) { return packed_pair<T, int32_t>(a, b, 0); }
template <class T> uint32_t packed_four(int32_t a, int32_t b, uint32_t c) { return packed_pair<T, int32_t>(a, b, c); }

}  // namespace

void add_words(Table& table) {
  add_carries<uint32_t>(table, "u32");
  add_carries<int32_t>(table, "s32");
  add_carries<uint32_t>(table, "b32");
  add_carries<uint64_t>(table, "u64");
  add_carries<int64_t>(table, "s64");
  add_fields<uint32_t>(table, "u32");
  add_fields<int32_t>(table, "s32");
  add_directed64<FE_TOWARDZERO>(table, ".rz");
  add_directed64<FE_DOWNWARD>(table, ".rm");
  add_directed64<FE_UPWARD>(table, ".rp");
  add_whole_to_double<int64_t>(table, "s64");
  add_whole_to_double<uint64_t>(table, "u64");
  table["mad24.hi.sat.s32"] = lanewise<mad24_sat>;
  table["fns.b32"] = lanewise<find_nth>;
  table["rcp.approx.ftz.f64"] = lanewise<rough_rcp>;
  table["rsqrt.approx.ftz.f64"] = lanewise<rough_rsqrt>;
  table["isspacep.shared"] = table["isspacep.shared::cluster"] = is_in<kSharedWindow>;
  table["isspacep.local"] = is_in<kLocalWindow>;
  table["isspacep.param"] = table["isspacep.param::entry"] = is_in<kParameterWindow>;
  table["isspacep.global"] = is_global<false>;
  table["isspacep.const"] = is_global<true>;
  table["video"] = video;
  table["cvt.pack.sat.s16.s32"] = lanewise<packed_two<int16_t>>;
  table["cvt.pack.sat.u16.s32"] = lanewise<packed_two<uint16_t>>;
  table["cvt.pack.sat.s8.s32.b32"] = lanewise<packed_four<int8_t>>;
  table["cvt.pack.sat.u8.s32.b32"] = lanewise<packed_four<uint8_t>>;
}

}  // namespace fw
