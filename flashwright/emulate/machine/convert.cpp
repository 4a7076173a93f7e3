// Conversions.
//
// cvt may use registers wider than its types (PTX: "operand size exceeding instruction-type size").
// It then has two operands more, the bytes a lane of d and of a. Without them a register is as wide
// as its type, and two bytes where the type has one.

#include "numbers.h"

namespace fw {
namespace {

using std::string;

// --- cvt ----------------------------------------------------------------------------------------

enum Kind { kU8, kS8, kU16, kS16, kU32, kS32, kU64, kS64, kF16, kBF16, kF32, kF64, kKinds };
constexpr const char* kNames[] = {"u8",  "s8",  "u16", "s16",  "u32", "s32",
                                  "u64", "s64", "f16", "bf16", "f32", "f64"};
constexpr int kBits[] = {8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64};
constexpr bool is_float(Kind kind) { return kind >= kF16; }
constexpr bool is_signed(Kind kind) { return !is_float(kind) && kind % 2 == 1; }

struct Cvt {
  Kind to, from;
  Round round;
  bool whole, ftz, sat;  // .rni and its like; .ftz; .sat
};

// Registers are read and written as 64 bits. Integers have their sign in all of them.
inline __int128 read_integer(uint64_t raw, Kind kind) {
  const int unused = 64 - kBits[kind];
  if (is_signed(kind)) return static_cast<int64_t>(raw << unused) >> unused;
  return raw << unused >> unused;
}

inline double read_float(uint64_t raw, const Cvt& cvt) {
  switch (cvt.from) {
    case kF16: return to_float(F16{{static_cast<uint16_t>(raw)}});
    case kBF16: return to_float(BF16{{static_cast<uint16_t>(raw)}});
    case kF64: return bits_as<double>(raw);
    default: break;
  }
  const float value = bits_as<float>(static_cast<uint32_t>(raw));
  return cvt.ftz ? flush(value) : value;
}

inline uint64_t write_float(double x, const Cvt& cvt) {
  if (cvt.sat) x = x > 0 ? (x < 1 ? x : 1.0) : 0.0;  // 0 for NaN
  switch (cvt.to) {
    case kF16: return encode<F16>(x, cvt.round).bits;
    case kBF16: return encode<BF16>(x, cvt.round).bits;
    case kF64: return bits_as<uint64_t>(x);
    default: break;
  }
  if (cvt.ftz && tiny<float>(x, cvt.round)) x = std::copysign(0.0, x);
  const float value = narrow<float>(x, cvt.round);
  return bits_as<uint32_t>(cvt.ftz ? flush(value) : value);
}

inline double whole(double x, Round round) {
  switch (round) {
    case Round::kDown: return std::floor(x);
    case Round::kUp: return std::ceil(x);
    case Round::kZero: return std::trunc(x);
    default: return std::nearbyint(x);
  }
}

inline uint64_t to_integer(double x, const Cvt& cvt) {  // always saturates
  const bool sign = is_signed(cvt.to);
  const int bits = kBits[cvt.to];
  const uint64_t top = 1ull << (bits - 1), low = sign ? 0 - top : 0, high = low + top - 1 + top;
  if (x != x) return bits == 64 || cvt.from == kF64 ? (sign ? 0 - top : top) : 0;  // NaN
  x = whole(x, cvt.round);
  if (x >= std::ldexp(1.0, sign ? bits - 1 : bits)) return high;
  if (x <= (sign ? -std::ldexp(1.0, bits - 1) : 0.0)) return low;
  return sign ? static_cast<uint64_t>(static_cast<int64_t>(x)) : static_cast<uint64_t>(x);
}

inline uint64_t from_integer(__int128 a, const Cvt& cvt) {
  if (is_float(cvt.to)) {
    const uint64_t magnitude = static_cast<uint64_t>(a < 0 ? -a : a);
    const double x = cvt.to == kF64 ? static_cast<double>(magnitude) : integer_odd(magnitude);
    return write_float(a < 0 ? -x : x, cvt);
  }
  if (cvt.sat) {
    const __int128 top = static_cast<__int128>(1) << (kBits[cvt.to] - is_signed(cvt.to));
    const __int128 low = is_signed(cvt.to) ? -top : 0;
    a = a < low ? low : a >= top ? top - 1 : a;
  }
  return static_cast<uint64_t>(read_integer(static_cast<uint64_t>(a), cvt.to));
}

inline uint64_t convert(uint64_t raw, const Cvt& cvt) {
  if (!is_float(cvt.from)) return from_integer(read_integer(raw, cvt.from), cvt);
  if (cvt.from == kBF16 && cvt.to == kF32 && !cvt.sat) return (raw & 0xffff) << 16;  // of a NaN too
  const double x = read_float(raw, cvt);
  if (!is_float(cvt.to)) return to_integer(x, cvt);
  return write_float(cvt.whole ? whole(x, cvt.round) : x, cvt);
}

// A variant: which rounding, and the modifiers.
constexpr int kN = 0, kZ = 1, kD = 2, kU = 3, kWhole = 4, kFtz = 8, kSat = 16;
static_assert(int(Round::kNearest) == kN && int(Round::kZero) == kZ && int(Round::kDown) == kD &&
              int(Round::kUp) == kU);

void convert_lanes(Context& context, const int32_t* operand, uint32_t mask, Kind to, Kind from,
                   int variant) {
  const bool whole = variant & kWhole, ftz = variant & kFtz, sat = variant & kSat;
  const Cvt cvt{to, from, Round(variant & 3), whole, ftz, sat};
  const bool said = context.count == 4;
  const size_t to_bytes = said ? operand[2] : kBits[to] == 8 ? 2 : kBits[to] / 8;
  const size_t from_bytes = said ? operand[3] : kBits[from] == 8 ? 2 : kBits[from] / 8;
  const uint8_t* source = context.warp->registers + operand[1];
  uint8_t out[kLanes * 8];
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t raw = 0;
    std::memcpy(&raw, source + lane * from_bytes, from_bytes);  // hosts are little-endian
    raw = convert(raw, cvt);
    std::memcpy(out + lane * to_bytes, &raw, to_bytes);
  }
  store(context, operand[0], mask, out, to_bytes);
}

template <Kind kTo, Kind kFrom, int kVariant>
void convert_handler(Context& context, const int32_t* operand, uint32_t mask) {
  convert_lanes(context, operand, mask, kTo, kFrom, kVariant);
}

void add_conversion(Table& table, Kind to, Kind from, int variant, Handler handler) {
  const bool silent = (variant & (3 | kWhole)) == 0 && is_float(from) == is_float(to) &&
                      (!is_float(to) || to == from || kBits[to] > kBits[from]);
  string name =
      silent ? "cvt" : string("cvt.r") + "nzmp"[variant & 3] + (variant & kWhole ? "i" : "");
  name += variant & kFtz ? ".ftz" : "";
  const string tail = string(".") + kNames[to] + "." + kNames[from];
  table[name + (variant & kSat ? ".sat" : "") + tail] = handler;
  if (!is_float(to) && is_float(from) && from != kBF16) {  // which always saturates
    table[name + ".sat" + tail] = handler;
  }
}

template <Kind kTo, Kind kFrom, int... kVariant>
void add_variants(Table& table, std::integer_sequence<int, kVariant...>) {
  static constexpr std::pair<int, Handler> kHandlers[] = {
      {kVariant, convert_handler<kTo, kFrom, kVariant>}...};
  for (const auto& [variant, handler] : kHandlers) {
    add_conversion(table, kTo, kFrom, variant, handler);
  }
}

template <int... kVariant> using List = std::integer_sequence<int, kVariant...>;

// Whether .sat can do something: PTX has it only there.
constexpr bool may_saturate(Kind to, Kind from) {
  if (is_float(to)) return to != kBF16 && from != kBF16;
  return kBits[to] < kBits[from] ||
         (is_signed(from) ? !is_signed(to) : is_signed(to) && kBits[to] == kBits[from]);
}

template <Kind kTo, Kind kFrom> void add_pair(Table& table) {
  constexpr bool kBoth = is_float(kFrom) == is_float(kTo);
  constexpr bool kToWhole = is_float(kFrom) && (!is_float(kTo) || kTo == kFrom);
  constexpr bool kWiden = kBoth && (kTo == kFrom || kBits[kTo] > kBits[kFrom]);
  constexpr bool kSaturate = kBoth && may_saturate(kTo, kFrom);
  constexpr int kF = kTo == kF32 || kFrom == kF32 ? kFtz : 0;  // only f32 has .ftz
  if ((kTo == kBF16 && kBits[kFrom] == 8) || (kFrom == kBF16 && kBits[kTo] == 8)) return;
  if constexpr (kBoth) add_variants<kTo, kFrom>(table, List<kN>{});
  if constexpr (kSaturate) add_variants<kTo, kFrom>(table, List<kSat>{});
  if constexpr (kBoth && is_float(kTo) && kF) add_variants<kTo, kFrom>(table, List<kF>{});
  if constexpr (kSaturate && is_float(kTo) && kF) {
    add_variants<kTo, kFrom>(table, List<kF | kSat>{});
  }
  if constexpr (kToWhole) {
    constexpr int kW = kWhole, kWF = kWhole | kF;
    add_variants<kTo, kFrom>(table, List<kW | kN, kW | kZ, kW | kD, kW | kU>{});
    if (kF) add_variants<kTo, kFrom>(table, List<kWF | kN, kWF | kZ, kWF | kD, kWF | kU>{});
  }
  if constexpr (is_float(kTo) && !kWiden) {
    add_variants<kTo, kFrom>(table, List<kN>{});
    if (kTo != kF64) add_variants<kTo, kFrom>(table, List<kZ, kD, kU>{});
    if (kF && is_float(kFrom)) add_variants<kTo, kFrom>(table, List<kF | kZ>{});
  }
}

template <int... kIndex> void add_pairs(Table& table, std::integer_sequence<int, kIndex...>) {
  (add_pair<Kind(kIndex / kKinds), Kind(kIndex % kKinds)>(table), ...);
}

// --- with .relu and .satfinite; two numbers in a register ----------------------------------------

enum Target { kHalf, kBrain, kTensor, kHalves, kBrains, kE4M3s, kE5M2s, kTargets };
constexpr const char* kTargetNames[] = {".f16",    ".bf16",   ".tf32",  ".f16x2",
                                        ".bf16x2", ".e4m3x2", ".e5m2x2"};
constexpr int kTargetBytes[] = {2, 2, 4, 4, 4, 2, 2};
constexpr int kA = 4, kSatfinite = 8, kRelu = 16;  // a variant: kN, kZ or kA, and modifiers

// cvt.rna.tf32, as Hopper does it: bits are added and cut off, those of NaN only cut off. With
// .satfinite what has an infinity's exponent is one less: NaN too, which may make a number of it.
uint32_t round_away(float a, bool satfinite) {
  constexpr uint32_t kLast = 1u << 13;
  uint32_t word = bits_as<uint32_t>(a);
  if (std::isfinite(a)) word += kLast / 2;
  word &= 0 - kLast;
  const bool top = (word & F32::kInfinity) == F32::kInfinity;
  return satfinite && top ? word - kLast : word;
}

uint32_t reduce(float a, Target target, int variant) {
  const Round round = Round(variant & 3);
  const bool satfinite = variant & kSatfinite;
  const double x = variant & kRelu && a <= 0 ? 0.0f : a;
  switch (target) {
    case kHalf:
    case kHalves: return encode<F16>(x, round, satfinite).bits;
    case kBrain:
    case kBrains: return encode<BF16>(x, round, satfinite).bits;
    case kE4M3s: return encode<E4M3>(x, round, satfinite).bits;
    case kE5M2s: return encode<E5M2>(x, round, satfinite).bits;
    default: break;
  }
  if (variant & kA) return round_away(a, satfinite);
  return encode<T32>(x, round, satfinite).bits << 13;
}

// cvt d, a; or d, a, b with a in the upper half of d; or both from the halves of an f16x2.
void reduce_lanes(Context& context, const int32_t* operand, uint32_t mask, Target target,
                  int variant, bool f16x2) {
  const int bytes = kTargetBytes[target];
  uint8_t out[kLanes * 4];
  for (int i = 0; i < kLanes; ++i) {
    float low = 0, high = 0;
    if (f16x2) {
      const F16* a = lanes<const F16>(context, operand[1]);
      low = to_float(a[2 * i]), high = to_float(a[2 * i + 1]);
    } else {
      low = lanes<const float>(context, operand[target < kHalves ? 1 : 2])[i];
      high = lanes<const float>(context, operand[1])[i];
    }
    uint32_t word = reduce(low, target, variant);
    if (target >= kHalves) word |= reduce(high, target, variant) << 4 * bytes;
    std::memcpy(out + i * bytes, &word, bytes);
  }
  store(context, operand[0], mask, out, bytes);
}

template <Target kTarget, int kVariant, bool kF16x2 = false>
void reduce_handler(Context& context, const int32_t* operand, uint32_t mask) {
  reduce_lanes(context, operand, mask, kTarget, kVariant, kF16x2);
}

// Which modifier comes first is not the same for all.
void add_reduction(Table& table, Target target, int variant, const char* from, Handler handler) {
  const string round = variant & kA ? "cvt.rna" : variant & kZ ? "cvt.rz" : "cvt.rn";
  const string satfinite = variant & kSatfinite ? ".satfinite" : "";
  const string relu = variant & kRelu ? ".relu" : "";
  const bool relu_first = target != kTensor && target != kE4M3s && target != kE5M2s;
  const string modifiers = relu_first ? relu + satfinite : satfinite + relu;
  table[round + modifiers + kTargetNames[target] + from] = handler;
}

template <Target kTarget, int... kVariant> void add_reductions(Table& table) {
  (add_reduction(table, kTarget, kVariant, ".f32", reduce_handler<kTarget, kVariant>), ...);
}

// e4m3x2 or e5m2x2 to f16x2, exactly.
template <class F, int kVariant> uint32_t expand(uint16_t a) {
  const F low{{static_cast<uint8_t>(a)}}, high{{static_cast<uint8_t>(a >> 8)}};
  return reduce(to_float(low), kHalves, kVariant) | reduce(to_float(high), kHalves, kVariant) << 16;
}

void add_all_reductions(Table& table) {
  constexpr int kS = kSatfinite, kR = kRelu;  // f16 and bf16 without either are above
  add_reductions<kHalf, kS, kR, kS | kR, kZ | kS, kZ | kR, kZ | kS | kR>(table);
  add_reductions<kBrain, kS, kR, kS | kR, kZ | kS, kZ | kR, kZ | kS | kR>(table);
  add_reductions<kHalves, kN, kS, kR, kS | kR, kZ, kZ | kS, kZ | kR, kZ | kS | kR>(table);
  add_reductions<kBrains, kN, kS, kR, kS | kR, kZ, kZ | kS, kZ | kR, kZ | kS | kR>(table);
  add_reductions<kTensor, kN, kS, kR, kS | kR, kZ, kZ | kS, kZ | kR, kZ | kS | kR>(table);
  add_reductions<kTensor, kA, kA | kS>(table);
  add_reductions<kE4M3s, kS, kS | kR>(table);
  add_reductions<kE5M2s, kS, kS | kR>(table);
  add_reduction(table, kE4M3s, kS, ".f16x2", reduce_handler<kE4M3s, kS, true>);
  add_reduction(table, kE4M3s, kS | kR, ".f16x2", reduce_handler<kE4M3s, kS | kR, true>);
  add_reduction(table, kE5M2s, kS, ".f16x2", reduce_handler<kE5M2s, kS, true>);
  add_reduction(table, kE5M2s, kS | kR, ".f16x2", reduce_handler<kE5M2s, kS | kR, true>);
  add_reduction(table, kHalves, 0, ".e4m3x2", lanewise<expand<E4M3, 0>>);
  add_reduction(table, kHalves, kR, ".e4m3x2", lanewise<expand<E4M3, kR>>);
  add_reduction(table, kHalves, 0, ".e5m2x2", lanewise<expand<E5M2, 0>>);
  add_reduction(table, kHalves, kR, ".e5m2x2", lanewise<expand<E5M2, kR>>);
}

}  // namespace

void add_convert(Table& table) {
  add_pairs(table, std::make_integer_sequence<int, kKinds * kKinds>{});
  add_all_reductions(table);
}

}  // namespace fw
