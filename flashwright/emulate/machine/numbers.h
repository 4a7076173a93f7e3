// The number formats of PTX on any host, and the shape of an instruction that works lane by lane.
//
// Everything narrower than double is widened to double, where products of two such numbers are
// exact, and rounded once on its way back. Where a sum or a quotient does not fit, it is *rounded
// to odd*: what was lost leaves its trace in the last bit, so the second rounding goes where a
// single one would have gone. The results do not depend on whether the host's compiler fuses a
// multiplication with an addition.
#pragma once

#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>

#include "machine.h"

namespace fw {

template <class To, class From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// --- formats ------------------------------------------------------------------------------------

enum class Round { kNearest, kZero, kDown, kUp };  // .rn .rz .rm .rp

// Of each format: its fields, its largest number, and what overflow and NaN become (the hardware
// writes one NaN, whatever came in). E4M3 has no infinity.
template <class Bits_, int kExponent_, int kMantissa_, uint32_t kMax_, uint32_t kInfinity_,
          uint32_t kNan_>
struct Format {
  using Bits = Bits_;
  static constexpr int kExponent = kExponent_, kMantissa = kMantissa_;
  static constexpr uint32_t kMax = kMax_, kInfinity = kInfinity_, kNan = kNan_;
  Bits bits;
};
struct F16 : Format<uint16_t, 5, 10, 0x7bff, 0x7c00, 0x7fff> {};
struct BF16 : Format<uint16_t, 8, 7, 0x7f7f, 0x7f80, 0x7fff> {};
struct E4M3 : Format<uint8_t, 4, 3, 0x7e, 0x7f, 0x7f> {};
struct E5M2 : Format<uint8_t, 5, 2, 0x7b, 0x7c, 0x7f> {};
struct F32 : Format<uint32_t, 8, 23, 0x7f7fffff, 0x7f800000, 0x7fffffff> {};
struct T32 : Format<uint32_t, 8, 10, 0x3fbff, 0x3fc00, 0x3ffff> {};  // tf32 without its low zeros

template <class F> constexpr bool is_small = std::is_same_v<F, F16> || std::is_same_v<F, BF16>;

// Of any double the nearest F, or the next one in the direction asked for. Not inline: it is in
// every f16 instruction, and would be most of the library.
template <class F>
__attribute__((noinline)) F encode(double x, Round round = Round::kNearest,
                                   bool satfinite = false) {
  constexpr int kLeast = 2 - (1 << (F::kExponent - 1));  // exponent of the smallest normal number
  const uint64_t word = bits_as<uint64_t>(x), fraction = word & ((1ull << 52) - 1);
  const int exponent = static_cast<int>(word >> 52 & 0x7ff) - 1023;
  const bool negative = word >> 63;
  uint64_t magnitude = 0;
  if (exponent == 1024) {
    if (fraction != 0) return F{{static_cast<typename F::Bits>(F::kNan)}};
    magnitude = satfinite ? F::kMax : F::kInfinity;
  } else if (word << 1 != 0) {
    int shift = 52 - F::kMantissa + (exponent < kLeast ? kLeast - exponent : 0);
    if (shift > 63) shift = 63;
    const uint64_t all = fraction | 1ull << 52, half = 1ull << (shift - 1);
    const uint64_t kept = all >> shift, rest = all & ((half << 1) - 1);
    bool more = false;
    switch (round) {
      case Round::kNearest: more = rest > half || (rest == half && (kept & 1)); break;
      case Round::kDown: more = negative && rest != 0; break;
      case Round::kUp: more = !negative && rest != 0; break;
      case Round::kZero: break;
    }
    if (exponent > kLeast) magnitude = static_cast<uint64_t>(exponent - kLeast) << F::kMantissa;
    magnitude += kept + more;  // a carry goes into the exponent, as it should
    if (magnitude > F::kMax) {
      const bool inward = round == Round::kZero || round == (negative ? Round::kUp : Round::kDown);
      magnitude = inward || satfinite ? F::kMax : F::kInfinity;
    }
  }
  const uint64_t sign = static_cast<uint64_t>(negative) << (F::kExponent + F::kMantissa);
  return F{{static_cast<typename F::Bits>(sign | magnitude)}};
}

// Exact; without a host's subnormal numbers or a branch.
template <class F> inline float to_float(F x) {
  constexpr int kBits = F::kExponent + F::kMantissa, kShift = 23 - F::kMantissa;
  constexpr uint32_t kBias = (128u - (1u << (F::kExponent - 1))) << 23, kTiny = kBias + (1u << 23);
  const uint32_t sign = (static_cast<uint32_t>(x.bits) >> kBits) << 31;
  const uint32_t magnitude = x.bits & ((1u << kBits) - 1), word = magnitude << kShift;
  if constexpr (F::kExponent == 8) return bits_as<float>(sign | word);
  const float subnormal = bits_as<float>(word + kTiny) - bits_as<float>(kTiny);
  uint32_t result = magnitude >> F::kMantissa ? word + kBias : bits_as<uint32_t>(subnormal);
  result = magnitude >= F::kInfinity ? 0x7f800000u : result;
  result = magnitude > F::kInfinity || magnitude == F::kNan ? F32::kNan : result;
  return bits_as<float>(sign | result);
}

inline float canonical(float x) { return x == x ? x : bits_as<float>(F32::kNan); }
// What CUDA's own headers call NaN. The hardware keeps the payload of a NaN operand; this does not.
inline double canonical(double x) { return x == x ? x : bits_as<double>(0xfff8000000000000ull); }

// .ftz: a subnormal number becomes the zero of its sign.
inline float flush(float x) {
  const uint32_t word = bits_as<uint32_t>(x);
  return bits_as<float>(word & 0x7f800000u ? word : word & 0x80000000u);
}
template <class F> inline F flush(F x) {  // F16, BF16; of double there is none
  if constexpr (!std::is_same_v<F, double>) {
    if ((x.bits & F::kInfinity) == 0) x.bits &= 0x8000;
  }
  return x;
}

// The type to compare in: float, or double for itself.
inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
template <class F> __attribute__((noinline)) float wide(F x) { return to_float(x); }

template <class F>
inline F narrow(double x, Round round = Round::kNearest, bool satfinite = false) {
  if constexpr (std::is_same_v<F, double>) {
    return canonical(x);
  } else if constexpr (std::is_same_v<F, float>) {
    if (round == Round::kNearest && !satfinite) return canonical(static_cast<float>(x));
    return bits_as<float>(encode<F32>(x, round, satfinite).bits);
  } else {
    return encode<F>(x, round, satfinite);
  }
}

// What .ftz makes a zero of: what is smaller than the smallest normal number even when it has been
// rounded to the format's bits, as if exponents went on below. `x` is exact, or rounded to odd.
// An H200 was seen to do so in fma and cvt. No product that was recorded comes so near: there it is
// assumed, since the hardware multiplies and adds in one unit.
template <class F> inline bool tiny(double x, Round round) {
  constexpr bool kHalf = std::is_same_v<F, F16>;
  constexpr double kLeast = kHalf ? 0x1p-14 : 0x1p-126, kUp = kHalf ? 0x1p8 : 0x1p64;
  return std::fabs(x) < kLeast && std::fabs(wide(narrow<F>(x * kUp, round))) < kLeast * kUp;
}

// --- rounding to odd ----------------------------------------------------------------------------

// `nearest` lacks `error`: of the two neighbours of the true value, the odd one. An error that is
// NaN comes from operands that are infinite.
inline double odd(double nearest, double error) {
  uint64_t word = bits_as<uint64_t>(nearest);
  if (!(std::fabs(error) > 0) || !std::isfinite(nearest) || (word & 1)) return nearest;
  word += (error > 0) == (nearest > 0) ? 1 : -1;
  return bits_as<double>(word);
}

__attribute__((noinline)) inline double sum_odd(double a, double b) {
  const double sum = a + b, part = sum - a;
  return odd(sum, (a - (sum - part)) + (b - part));
}
__attribute__((noinline)) inline double quotient_odd(double a, double b) {
  const double ratio = a / b, rest = std::fma(-ratio, b, a);
  return odd(ratio, b < 0 ? -rest : rest);
}
__attribute__((noinline)) inline double root_odd(double a) {
  const double root = std::sqrt(a);
  return odd(root, std::fma(-root, root, a));
}
inline double integer_odd(uint64_t a) {
  if (a >> 53 == 0) return static_cast<double>(a);
  return static_cast<double>(a >> 11 | ((a & 0x7ff) != 0)) * 2048.0;
}

// --- lane by lane -------------------------------------------------------------------------------

// A negative slot: as a destination PTX's sink `_`; as a source predicate, ~slot, its complement
// (`!p`).
inline uint32_t source_predicate(Context& context, int32_t slot) {
  return slot < 0 ? ~predicate(context, ~slot) : predicate(context, slot);
}
inline void write_predicate(Context& context, int32_t slot, uint32_t mask, uint32_t value) {
  if (slot < 0) return;
  uint32_t& target = predicate(context, slot);
  target = (target & ~mask) | (value & mask);
}

// Results of all lanes into the register, those in the mask. `size`: bytes a lane.
__attribute__((noinline)) inline void store(Context& context, int32_t slot, uint32_t mask,
                                            const void* results, size_t size) {
  if (slot < 0) return;
  uint8_t* target = context.warp->registers + slot;
  if (mask == kAll) {
    std::memcpy(target, results, kLanes * size);
  } else {
    const auto* from = static_cast<const uint8_t*>(results);
    for_lanes(mask, [&](int lane) { std::memcpy(target + lane * size, from + lane * size, size); });
  }
}

// The handler of d = f(a, b, ...), f a function of one lane. All lanes are computed, which is
// quicker than asking, and harmless; and before one is written, since d may be an operand too.
// kPer: numbers a register, 2 for s16x2 and its like.
template <auto f, int kPer, class = decltype(f)> struct Lanewise;
template <auto f, int kPer, class D, class... S> struct Lanewise<f, kPer, D (*)(S...)> {
  static void run(Context& context, const int32_t* operand, uint32_t mask) {
    loop(context, operand, mask, std::index_sequence_for<S...>{});
  }
  template <size_t... kIndex>
  static void loop(Context& context, const int32_t* operand, uint32_t mask,
                   std::index_sequence<kIndex...>) {
    const uint8_t* base = context.warp->registers;
    D out[kLanes * kPer];
    for (int i = 0; i < kLanes * kPer; ++i) {
      out[i] = f(reinterpret_cast<const S*>(base + operand[kIndex + 1])[i]...);
    }
    store(context, operand[0], mask, out, sizeof(D) * kPer);
  }
};
template <auto f, int kPer = 1> constexpr Handler lanewise = Lanewise<f, kPer>::run;

struct Row {
  const char* name;
  Handler handler;
};
__attribute__((noinline)) inline void put(Table& table, const std::string& type,
                                          std::initializer_list<Row> rows) {
  for (const Row& row : rows) table[row.name + type] = row.handler;
}

}  // namespace fw
