// Floating-point arithmetic.
//
// Approximate instructions are computed in double and rounded to nearest, so they lie nearer the
// true value than the hardware's, whose error PTX bounds by: rcp, sqrt 1 ulp; rsqrt 2^-22.9 of the
// value; ex2 2 ulp; lg2 2^-22 (absolute where 0.5 < a < 2); sin, cos 2^-20.5 (absolute, |a| < 2
// pi); tanh 2^-11; div.approx and div.full 2 ulp; ex2 and tanh of f16 2^-9.9 and 2^-10.9, of bf16
// 2^-7 and 2^-8.
#pragma once

#include "numbers.h"

namespace fw {
namespace {

using std::string;

// --- f32 and f64 as the host has them -----------------------------------------------------------

// Functions of one lane that the host rounds by itself.
template <class F, bool kFtz = false, bool kSat = false> struct Float {
  static F add(F a, F b) { return out(in(a) + in(b)); }  // which is exact where it is small
  static F sub(F a, F b) { return out(in(a) - in(b)); }
  static F mul(F a, F b) {
    a = in(a), b = in(b);
    return out(a * b, [=] { return double(a) * double(b); });
  }
  static F fma(F a, F b, F c) {
    a = in(a), b = in(b), c = in(c);
    return out(std::fma(a, b, c), [=] { return sum_odd(double(a) * double(b), double(c)); });
  }
  static F div(F a, F b) {
    a = in(a), b = in(b);
    return out(a / b, [=] { return quotient_odd(a, b); });
  }
  static F rcp(F a) { return div(1, a); }
  static F sqrt(F a) { return out(std::sqrt(in(a))); }
  static F neg(F a) { return out(-in(a)); }
  static F abs(F a) { return out(std::fabs(in(a))); }
  // The reciprocal that div.approx multiplies with is 0 where b is above 2^126.
  static F div_approx(F a, F b) {
    const bool huge = std::fabs(b) > F(0x1p126) && std::isfinite(b);
    return huge ? mul(a, std::copysign(F(0), b)) : div(a, b);
  }
  // Of a number and a NaN the number. Of two zeros -0 is the smaller.
  static F min(F a, F b) { return choose<false>(in(a), in(b)); }
  static F max(F a, F b) { return choose<true>(in(a), in(b)); }
  template <bool kLarger> static F choose(F a, F b) {
    const bool first = a == b ? std::signbit(a) != kLarger : (a < b) != kLarger;
    return canonical(b != b || (first && a == a) ? a : b);
  }
  template <double (*f)(double)> static F approx(F a) { return out(static_cast<F>(f(in(a)))); }

 private:
  static F in(F x) { return kFtz ? flush(x) : x; }
  static F out(F x) {
    if constexpr (kSat) x = x > 0 ? (x < 1 ? x : F(1)) : F(0);  // 0 for NaN
    return in(canonical(x));
  }
  // Whether the smallest normal number was rounded up to, only the value itself can tell.
  template <class Value> static F out(F x, Value value) {
    const bool perhaps = kFtz && std::fabs(x) == std::numeric_limits<F>::min();
    return out(perhaps && tiny<F>(value(), Round::kNearest) ? std::copysign(F(0), x) : x);
  }
};

double reciprocal(double x) { return 1 / x; }
double reciprocal_root(double x) { return 1 / std::sqrt(x); }

template <class F, bool kFtz, bool kSat> void add_basic(Table& table, const string& type) {
  using M = Float<F, kFtz, kSat>;
  const string tail = string(kFtz ? ".ftz" : "") + (kSat ? ".sat." : ".") + type;
  const auto basic = {Row{"add", lanewise<M::add>}, Row{"sub", lanewise<M::sub>},
                      Row{"mul", lanewise<M::mul>}};
  put(table, tail, basic);  // .rn goes without saying
  put(table, ".rn" + tail, basic);
  put(table, ".rn" + tail, {{"fma", lanewise<M::fma>}});
}

template <class F, bool kFtz> void add_native(Table& table, const string& type) {
  using M = Float<F, kFtz>;
  const string tail = (kFtz ? ".ftz." : ".") + type;
  add_basic<F, kFtz, false>(table, type);
  put(table, ".rn" + tail,
      {{"div", lanewise<M::div>}, {"rcp", lanewise<M::rcp>}, {"sqrt", lanewise<M::sqrt>}});
  put(table, tail,
      {{"neg", lanewise<M::neg>},
       {"abs", lanewise<M::abs>},
       {"min", lanewise<M::min>},
       {"max", lanewise<M::max>},
       {"rsqrt.approx", lanewise<M::template approx<reciprocal_root>>}});
  if constexpr (std::is_same_v<F, float>) {
    add_basic<F, kFtz, true>(table, type);
    put(table, tail,
        {
            {"div.full", lanewise<M::div>},
            {"div.approx", lanewise<M::div_approx>},
            {"rcp.approx", lanewise<M::template approx<reciprocal>>},
            {"sqrt.approx", lanewise<M::template approx<std::sqrt>>},
            {"ex2.approx", lanewise<M::template approx<std::exp2>>},
            {"lg2.approx", lanewise<M::template approx<std::log2>>},
            {"sin.approx", lanewise<M::template approx<std::sin>>},
            {"cos.approx", lanewise<M::template approx<std::cos>>},
        });
    if (!kFtz) put(table, tail, {{"tanh.approx", lanewise<M::template approx<std::tanh>>}});
  }
}

// testp p, a.
template <class F> bool finite(F a) { return std::isfinite(a); }
template <class F> bool infinite(F a) { return std::isinf(a); }
template <class F> bool number(F a) { return a == a; }
template <class F> bool not_a_number(F a) { return a != a; }
template <class F> bool normal(F a) { return std::isnormal(a) || a == 0; }
template <class F> bool subnormal(F a) { return std::fpclassify(a) == FP_SUBNORMAL; }

template <class F, auto holds> void testp(Context& context, const int32_t* operand, uint32_t mask) {
  const F* a = lanes<const F>(context, operand[1]);
  uint32_t truth = 0;
  for (int i = 0; i < kLanes; ++i) truth |= uint32_t(holds(a[i])) << i;
  write_predicate(context, operand[0], mask, truth);
}

template <class F> void add_tests(Table& table, const string& type) {
  put(table, type,
      {{"testp.finite.", testp<F, finite<F>>},
       {"testp.infinite.", testp<F, infinite<F>>},
       {"testp.number.", testp<F, number<F>>},
       {"testp.notanumber.", testp<F, not_a_number<F>>},
       {"testp.normal.", testp<F, normal<F>>},
       {"testp.subnormal.", testp<F, subnormal<F>>}});
}

// --- f16, bf16, and f32 rounded otherwise -------------------------------------------------------

// These go through double. What they are is known at run time only: a template for each would take
// the compiler longer than all the rest.
enum Op { kAdd, kSub, kMul, kFma, kDiv, kRcp, kSqrt, kNeg, kAbs, kMin, kMax, kEx2, kTanh, kOps };
constexpr const char* kOpNames[] = {"add", "sub", "mul", "fma", "div",        "rcp",        "sqrt",
                                    "neg", "abs", "min", "max", "ex2.approx", "tanh.approx"};
enum Type { kSingle, kHalf, kBrain };
constexpr int kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kXorSign = 16;

struct Soft {
  Op op;
  Type type;
  Round round;
  int modifiers;

  bool has(int modifier) const { return modifiers & modifier; }
};

double soft_choose(double a, double b, const Soft& soft) {
  const bool negative = std::signbit(a) != std::signbit(b), larger = soft.op == kMax;
  if (soft.has(kXorSign)) a = std::fabs(a), b = std::fabs(b);
  const bool first = a == b ? std::signbit(a) != larger : (a < b) != larger;
  double result = first ? a : b;
  if (a != a || b != b) result = (a != a) == soft.has(kNan) ? a : b;
  return soft.has(kXorSign) && negative ? -result : result;
}

// A sum that is exactly zero, from unlike signs, is negative where rounding goes down.
double soft_sum(double a, double b, const Soft& soft) {
  const double sum = sum_odd(a, b);
  return soft.round == Round::kDown && sum == 0 && std::signbit(a) != std::signbit(b) ? -0.0 : sum;
}

double compute(double a, double b, double c, const Soft& soft) {
  switch (soft.op) {
    case kAdd: return soft_sum(a, b, soft);
    case kSub: return soft_sum(a, -b, soft);
    case kMul: return a * b;
    case kFma: return soft_sum(a * b, c, soft);
    case kDiv: return quotient_odd(a, b);
    case kRcp: return quotient_odd(1, a);
    case kSqrt: return root_odd(a);
    case kNeg: return -a;
    case kAbs: return std::fabs(a);
    case kEx2: return std::exp2(a);
    case kTanh: return std::tanh(a);
    default: return soft_choose(a, b, soft);
  }
}

template <class F> F compute_in(F a, F b, F c, const Soft& soft) {
  if (soft.has(kFtz)) a = flush(a), b = flush(b), c = flush(c);
  double x = compute(wide(a), wide(b), wide(c), soft);
  if (soft.has(kSat)) x = x > 0 ? (x < 1 ? x : 1.0) : 0.0;  // 0 for NaN
  if (soft.has(kRelu) && x <= 0) x = 0.0;
  if (soft.has(kFtz) && tiny<F>(x, soft.round)) x = std::copysign(0.0, x);
  const F result = narrow<F>(x, soft.round);
  return soft.has(kFtz) ? flush(result) : result;
}

template <class F>
void compute_lanes(Context& context, const int32_t* operand, uint32_t mask, const Soft& soft,
                   int per) {
  const F* source[3];
  for (int i = 0; i < 3; ++i) {
    source[i] = lanes<const F>(context, operand[i + 1 < context.count ? i + 1 : 1]);
  }
  F out[kLanes * 2];
  for (int i = 0; i < kLanes * per; ++i) {
    out[i] = compute_in<F>(source[0][i], source[1][i], source[2][i], soft);
  }
  store(context, operand[0], mask, out, sizeof(F) * per);
}

template <Type kType, int kPer, Round kRound, int kModifiers, Op kOp>
void soft_handler(Context& context, const int32_t* operand, uint32_t mask) {
  using Small = std::conditional_t<kType == kHalf, F16, BF16>;
  using F = std::conditional_t<kType == kSingle, float, Small>;
  compute_lanes<F>(context, operand, mask, Soft{kOp, kType, kRound, kModifiers}, kPer);
}

void add_soft(Table& table, const Soft& soft, int per, Handler handler) {
  constexpr const char* kTypes[] = {"f32", "f16", "bf16"};
  const string round = soft.op <= kSqrt ? string(".r") + "nzmp"[int(soft.round)] : "";
  string tail = soft.has(kFtz) ? ".ftz" : "";
  for (auto [modifier, name] :
       {std::pair(kSat, ".sat"), {kRelu, ".relu"}, {kNan, ".NaN"}, {kXorSign, ".xorsign.abs"}}) {
    if (soft.has(modifier)) tail += name;
  }
  tail += string(".") + kTypes[soft.type] + (per == 2 ? "x2" : "");
  table[kOpNames[soft.op] + round + tail] = handler;
  if (soft.op <= kMul && soft.round == Round::kNearest) table[kOpNames[soft.op] + tail] = handler;
}

template <Type kType, int kPer, int kModifiers, Round kRound, Op... kOp>
void add_softs(Table& table) {
  (add_soft(table, Soft{kOp, kType, kRound, kModifiers}, kPer,
            soft_handler<kType, kPer, kRound, kModifiers, kOp>),
   ...);
}

template <Type kType, int kPer, int kFlush> void add_choices(Table& table) {
  add_softs<kType, kPer, kFlush | kNan, Round::kNearest, kMin, kMax>(table);
  add_softs<kType, kPer, kFlush | kXorSign, Round::kNearest, kMin, kMax>(table);
  add_softs<kType, kPer, kFlush | kNan | kXorSign, Round::kNearest, kMin, kMax>(table);
}

template <Type kType, int kPer, int kFlush> void add_small(Table& table) {
  constexpr Round kN = Round::kNearest;
  add_softs<kType, kPer, kFlush, kN, kAdd, kSub, kMul, kFma, kNeg, kAbs, kMin, kMax>(table);
  add_softs<kType, kPer, kFlush | kRelu, kN, kFma>(table);
  add_choices<kType, kPer, kFlush>(table);
  if (kType == kHalf) add_softs<kType, kPer, kFlush | kSat, kN, kAdd, kSub, kMul, kFma>(table);
  if (kFlush == 0) add_softs<kType, kPer, 0, kN, kTanh>(table);
  if (kFlush == 0) add_softs<kType, kPer, kType == kBrain ? kFtz : 0, kN, kEx2>(table);
}

template <int kFlush> void add_directed(Table& table) {
  add_softs<kSingle, 1, kFlush, Round::kZero, kAdd, kSub, kMul, kFma, kDiv, kRcp, kSqrt>(table);
  add_softs<kSingle, 1, kFlush, Round::kDown, kAdd, kSub, kMul, kFma, kDiv, kRcp, kSqrt>(table);
  add_softs<kSingle, 1, kFlush, Round::kUp, kAdd, kSub, kMul, kFma, kDiv, kRcp, kSqrt>(table);
  add_softs<kSingle, 1, kFlush | kSat, Round::kZero, kAdd, kSub, kMul, kFma>(table);
  add_softs<kSingle, 1, kFlush | kSat, Round::kDown, kAdd, kSub, kMul, kFma>(table);
  add_softs<kSingle, 1, kFlush | kSat, Round::kUp, kAdd, kSub, kMul, kFma>(table);
  add_choices<kSingle, 1, kFlush>(table);
}

void add_floats(Table& table) {
  add_native<float, false>(table, "f32");
  add_native<float, true>(table, "f32");
  add_native<double, false>(table, "f64");
  add_tests<float>(table, "f32");
  add_tests<double>(table, "f64");
  add_directed<0>(table);
  add_directed<kFtz>(table);
  add_small<kHalf, 1, 0>(table);
  add_small<kHalf, 1, kFtz>(table);
  add_small<kHalf, 2, 0>(table);
  add_small<kHalf, 2, kFtz>(table);
  add_small<kBrain, 1, 0>(table);
  add_small<kBrain, 2, 0>(table);
}

}  // namespace
}  // namespace fw
