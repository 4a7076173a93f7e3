// Comparisons, predicates, and what the lanes of a warp tell each other.
//
// A lane that is asked for its register though it does not execute the shuffle, or is not in the mask, gives what is in
// there: the result is undefined (undefined.cpp). Votes, matches and reductions go without lanes that have exited.

#include "numbers.h"
#include "run.h"

namespace fw {
namespace {

using std::string;

// --- comparisons --------------------------------------------------------------------------------

// Every comparison is a choice among four outcomes, of which each pair of numbers has one.
enum Outcome { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8 };

struct Comparison {
  const char *name, *alias;  // the latter for unsigned integers
  int outcomes;
};
constexpr Comparison kComparisons[] = {
    {"eq", "", kEqual},
    {"ne", "", kLess | kGreater},
    {"lt", "lo", kLess},
    {"le", "ls", kLess | kEqual},
    {"gt", "hi", kGreater},
    {"ge", "hs", kGreater | kEqual},
    {"equ", "", kEqual | kUnordered},  // from here floats alone
    {"neu", "", kLess | kGreater | kUnordered},
    {"ltu", "", kLess | kUnordered},
    {"leu", "", kLess | kEqual | kUnordered},
    {"gtu", "", kGreater | kUnordered},
    {"geu", "", kGreater | kEqual | kUnordered},
    {"num", "", kLess | kEqual | kGreater},
    {"nan", "", kUnordered},
};

// The lanes of each outcome. Operands lie `stride` numbers apart: 2 for the halves of f16x2.
struct Outcomes {
  uint32_t less = 0, equal = 0, greater = 0;

  uint32_t of(int chosen) const {
    return (chosen & kLess ? less : 0) | (chosen & kEqual ? equal : 0) |
           (chosen & kGreater ? greater : 0) |
           (chosen & kUnordered ? ~(less | equal | greater) : 0);
  }
};
using Compare = Outcomes (*)(const uint8_t* a, const uint8_t* b, int stride);

template <class T, bool kFtz>
Outcomes compare(const uint8_t* first, const uint8_t* second, int stride) {
  const T *a = reinterpret_cast<const T*>(first), *b = reinterpret_cast<const T*>(second);
  Outcomes result;
  for (int i = 0; i < kLanes; ++i) {
    auto value = [](T x) {
      if constexpr (kFtz) x = flush(x);
      if constexpr (std::is_arithmetic_v<T>) return x;
      else return to_float(x);
    };
    const auto x = value(a[i * stride]), y = value(b[i * stride]);
    result.less |= uint32_t(x < y) << i;
    result.equal |= uint32_t(x == y) << i;
    result.greater |= uint32_t(x > y) << i;
  }
  return result;
}

// setp, also combined with a predicate; set.
enum Form { kPlain, kAnd, kOr, kXor, kSet, kSetFloat, kForms };
constexpr const char* kFormNames[] = {"", ".and", ".or", ".xor"};

uint32_t combined(Form form, uint32_t truth, uint32_t other) {
  switch (form) {
    case kAnd: return truth & other;
    case kOr: return truth | other;
    case kXor: return truth ^ other;
    default: return truth;
  }
}

// setp p[|q], a, b[, c]: q is the opposite of p; of two numbers a register (`per`), that of the
// upper ones.
void setp(Context& context, const int32_t* operand, uint32_t mask, Compare compare, int outcomes,
          Form form, int per) {
  const bool two = context.count == (form == kPlain ? 4 : 5);
  const int32_t *source = operand + (two ? 2 : 1), p = operand[0], q = two ? operand[1] : -1;
  const uint8_t *a = context.warp->registers + source[0], *b = context.warp->registers + source[1];
  const uint32_t other = form == kPlain ? 0 : source_predicate(context, source[2]);
  const uint32_t first = compare(a, b, per).of(outcomes);
  const uint32_t second = per == 2 ? compare(a + 2, b + 2, per).of(outcomes) : ~first;
  write_predicate(context, p, mask, combined(form, first, other));
  write_predicate(context, q, mask, combined(form, second, other));
}

void set(Context& context, const int32_t* operand, uint32_t mask, Compare compare, int outcomes,
         Form form) {
  const uint8_t* base = context.warp->registers;
  const uint32_t truth = compare(base + operand[1], base + operand[2], 1).of(outcomes);
  uint32_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = truth >> i & 1 ? (form == kSet ? ~0u : 0x3f800000) : 0;
  store(context, operand[0], mask, out, sizeof *out);
}

template <class T, bool kFtz, int kPer, int kIndex, Form kForm>
void compare_handler(Context& context, const int32_t* operand, uint32_t mask) {
  constexpr int kOutcomes = kComparisons[kIndex].outcomes;
  constexpr Compare kCompare = compare<T, kFtz>;
  if constexpr (kForm < kSet) setp(context, operand, mask, kCompare, kOutcomes, kForm, kPer);
  else set(context, operand, mask, kCompare, kOutcomes, kForm);
}

void add_comparison(Table& table, int index, Form form, const string& type, bool ftz,
                    Handler handler) {
  const auto& [name, alias, outcomes] = kComparisons[index];
  const string flush = ftz ? ".ftz." : ".";
  for (const string& each : {string(name), string(type[0] == 'u' ? alias : "")}) {
    if (each.empty()) continue;
    if (form < kSet) table["setp." + each + kFormNames[form] + flush + type] = handler;
    if (form == kSet) table["set." + each + flush + "u32." + type] = handler;
    if (form == kSet) table["set." + each + flush + "s32." + type] = handler;
    if (form == kSetFloat) table["set." + each + flush + "f32." + type] = handler;
  }
}

template <class T>  // `set` is here for 32 bits only
constexpr int kHas = std::is_arithmetic_v<T> && sizeof(T) == 4 ? kForms : kSet;

template <class T, bool kFtz, int kPer, int... kCode>
void add_all(Table& table, const string& type, std::integer_sequence<int, kCode...>) {
  static constexpr Handler kHandlers[] = {
      compare_handler<T, kFtz, kPer, kCode / kHas<T>, Form(kCode % kHas<T>)>...};
  const bool bits = type[0] == 'b' && type[1] != 'f';  // they are equal, or not
  for (int i = 0; i < (bits ? 2 * kHas<T> : int(sizeof...(kCode))); ++i) {
    add_comparison(table, i / kHas<T>, Form(i % kHas<T>), type, kFtz, kHandlers[i]);
  }
}

template <class T, bool kFtz = false, int kPer = 1>
void add_comparisons(Table& table, const string& type) {
  constexpr int kCount = std::is_integral_v<T> ? 6 : 14;
  add_all<T, kFtz, kPer>(table, type, std::make_integer_sequence<int, kCount * kHas<T>>{});
}

// set of 16 bits, or of two such numbers a register: 1, or all ones.
template <class T, bool kFtz, int kPer, int kIndex, int kBytes, uint32_t kTrue>
void set_small(Context& context, const int32_t* operand, uint32_t mask) {
  const uint8_t* base = context.warp->registers;
  const uint8_t *a = base + operand[1], *b = base + operand[2];
  constexpr int kOutcomes = kComparisons[kIndex].outcomes;
  const uint32_t lower = compare<T, kFtz>(a, b, kPer).of(kOutcomes);
  const uint32_t upper = kPer == 2 ? compare<T, kFtz>(a + 2, b + 2, kPer).of(kOutcomes) : 0;
  uint8_t out[kLanes * kBytes];
  for (int i = 0; i < kLanes; ++i) {
    uint32_t value = lower >> i & 1 ? kTrue : 0;
    if (kPer == 2) value |= (upper >> i & 1 ? kTrue : 0) << 16;
    std::memcpy(out + i * kBytes, &value, kBytes);
  }
  store(context, operand[0], mask, out, kBytes);
}

template <class T, bool kFtz, int kPer, uint32_t kOne, int kIndex>
void add_set_small(Table& table, const string& type) {
  const string stem = string("set.") + kComparisons[kIndex].name + (kFtz ? ".ftz." : ".");
  if constexpr (kPer == 2) {
    table[stem + type + "." + type] = set_small<T, kFtz, 2, kIndex, 4, kOne>;
    for (const char* to : {"u32.", "s32."}) {
      table[stem + to + type] = set_small<T, kFtz, 2, kIndex, 4, 0xffff>;
    }
  } else {
    table[stem + type + "." + type] = set_small<T, kFtz, 1, kIndex, 2, kOne>;
    for (const char* to : {"u16.", "s16."}) {
      table[stem + to + type] = set_small<T, kFtz, 1, kIndex, 2, 0xffff>;
    }
    for (const char* to : {"u32.", "s32."}) {
      table[stem + to + type] = set_small<T, kFtz, 1, kIndex, 4, ~0u>;
    }
  }
}

template <class T, bool kFtz, uint32_t kOne, int... kIndex>
void add_sets_small(Table& table, const string& type, std::integer_sequence<int, kIndex...>) {
  (add_set_small<T, kFtz, 1, kOne, kIndex>(table, type), ...);
  (add_set_small<T, kFtz, 2, kOne, kIndex>(table, type + "x2"), ...);
}

// --- predicates ---------------------------------------------------------------------------------

template <Form kForm> void logic(Context& context, const int32_t* operand, uint32_t mask) {
  const uint32_t a = source_predicate(context, operand[1]);
  const uint32_t b = kForm == kPlain ? 0 : source_predicate(context, operand[2]);
  write_predicate(context, operand[0], mask, combined(kForm, a, b));
}

void not_pred(Context& context, const int32_t* operand, uint32_t mask) {
  write_predicate(context, operand[0], mask, ~source_predicate(context, operand[1]));
}

// --- between lanes ------------------------------------------------------------------------------

enum class Shuffle { kUp, kDown, kButterfly, kIndex };

// shfl d[|p], a, b, c, members: c holds the segment's mask in bits 8 to 12 and its last (or first)
// lane.
template <Shuffle kShuffle> void shfl(Context& context, const int32_t* operand, uint32_t mask) {
  const bool two = context.count == 6;
  const int32_t* source = operand + (two ? 2 : 1);
  const uint32_t *a = lanes<uint32_t>(context, source[0]), *b = lanes<uint32_t>(context, source[1]);
  const uint32_t* c = lanes<uint32_t>(context, source[2]);
  const uint32_t* members = lanes<uint32_t>(context, source[3]);
  FullWarp& warp = full(context);
  uint32_t out[kLanes], inside = 0;
  Undefined undefined[kLanes];
  uint32_t bad = 0;  // the lanes that get something undefined
  for (int lane = 0; lane < kLanes; ++lane) {
    const int step = b[lane] & 31, segment = c[lane] >> 8 & 31;
    const int first = lane & segment, bound = first | (static_cast<int>(c[lane] & 31) & ~segment);
    int from = 0;
    switch (kShuffle) {
      case Shuffle::kUp: from = lane - step; break;
      case Shuffle::kDown: from = lane + step; break;
      case Shuffle::kButterfly: from = lane ^ step; break;
      case Shuffle::kIndex: from = first | (step & ~segment); break;
    }
    const bool valid = kShuffle == Shuffle::kUp ? from >= bound : from <= bound;
    inside |= static_cast<uint32_t>(valid) << lane;
    if (!valid) from = lane;
    out[lane] = a[from];
    if ((mask >> lane & 1) == 0) continue;
    if ((mask & members[lane]) >> from & 1) {
      if (!is_undefined(warp, source[0], from, undefined[lane])) continue;
    } else {
      undefined[lane] = {0, context.instruction, static_cast<int8_t>(lane), static_cast<int8_t>(from)};
    }
    bad |= 1u << lane;
  }
  store(context, operand[0], mask, out, sizeof *out);
  if (bad != 0 || !warp.undefined.empty()) set_undefined(warp, operand[0], mask, {});
  for (uint32_t rest = bad; rest != 0; rest &= rest - 1) {
    undefined[__builtin_ctz(rest)].lanes = rest & -rest;
    set_undefined(warp, operand[0], rest & -rest, undefined[__builtin_ctz(rest)]);
  }
  if (two) write_predicate(context, operand[1], mask, inside);
}

// vote d, a, members; ballot gives the lanes, the others a predicate.
enum class Vote { kAll, kAny, kUniform, kBallot };

template <Vote kVote> void vote(Context& context, const int32_t* operand, uint32_t mask) {
  const uint32_t votes = source_predicate(context, operand[1]);
  const uint32_t* members = lanes<uint32_t>(context, operand[2]);
  uint32_t out[kLanes], result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t here = members[lane] & mask, yes = votes & here;
    const bool all = yes == here, any = yes != 0;
    const bool passed = kVote == Vote::kAll ? all : kVote == Vote::kAny ? any : all || !any;
    out[lane] = yes;
    result |= static_cast<uint32_t>(passed) << lane;
  }
  if (kVote == Vote::kBallot) store(context, operand[0], mask, out, sizeof *out);
  else write_predicate(context, operand[0], mask, result);
}

// match d[|p], a, members: who of them has the same value; for .all, all of them or nobody.
template <class T, bool kEvery>
void match(Context& context, const int32_t* operand, uint32_t mask) {
  const bool two = context.count == 4;
  const T* a = lanes<const T>(context, operand[two ? 2 : 1]);
  const uint32_t* members = lanes<uint32_t>(context, operand[two ? 3 : 2]);
  uint32_t out[kLanes], every = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t here = members[lane] & mask;
    uint32_t same = 0;
    for (int i = 0; i < kLanes; ++i) same |= static_cast<uint32_t>(a[i] == a[lane]) << i;
    same &= here;
    every |= static_cast<uint32_t>(same == here) << lane;
    out[lane] = kEvery && same != here ? 0 : same;
  }
  store(context, operand[0], mask, out, sizeof *out);
  if (two) write_predicate(context, operand[1], mask, every);
}

template <class T> T add(T a, T b) { return a + b; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T bit_and(T a, T b) { return a & b; }
template <class T> T bit_or(T a, T b) { return a | b; }
template <class T> T bit_xor(T a, T b) { return a ^ b; }

template <class T, auto f> void redux(Context& context, const int32_t* operand, uint32_t mask) {
  const T* a = lanes<const T>(context, operand[1]);
  const uint32_t* members = lanes<uint32_t>(context, operand[2]);
  T out[kLanes] = {};
  for_lanes(mask, [&](int lane) {
    uint32_t rest = members[lane] & mask;
    if (rest == 0) return;
    T result = a[__builtin_ctz(rest)];
    while ((rest &= rest - 1) != 0) result = f(result, a[__builtin_ctz(rest)]);
    out[lane] = result;
  });
  store(context, operand[0], mask, out, sizeof *out);
}

// elect d|p, members: PTX does not say whom; here the lowest.
void elect(Context& context, const int32_t* operand, uint32_t mask) {
  const uint32_t* members = lanes<uint32_t>(context, operand[2]);
  uint32_t out[kLanes], leaders = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t present = members[lane] & mask;
    out[lane] = present == 0 ? lane : __builtin_ctz(present);
    leaders |= static_cast<uint32_t>(static_cast<int>(out[lane]) == lane) << lane;
  }
  store(context, operand[0], mask, out, sizeof *out);
  write_predicate(context, operand[1], mask, leaders);
}

void activemask(Context& context, const int32_t* operand, uint32_t mask) {
  uint32_t out[kLanes];
  for (uint32_t& lane : out) lane = mask;
  store(context, operand[0], mask, out, sizeof *out);
}

}  // namespace

void add_exchange(Table& table) {
  const auto each = std::make_integer_sequence<int, 14>{};
  add_sets_small<F16, false, 0x3c00>(table, "f16", each);
  add_sets_small<F16, true, 0x3c00>(table, "f16", each);
  add_sets_small<BF16, false, 0x3f80>(table, "bf16", each);
  add_comparisons<uint16_t>(table, "b16");
  add_comparisons<uint32_t>(table, "b32");
  add_comparisons<uint64_t>(table, "b64");
  add_comparisons<uint16_t>(table, "u16");
  add_comparisons<uint32_t>(table, "u32");
  add_comparisons<uint64_t>(table, "u64");
  add_comparisons<int16_t>(table, "s16");
  add_comparisons<int32_t>(table, "s32");
  add_comparisons<int64_t>(table, "s64");
  add_comparisons<float>(table, "f32");
  add_comparisons<float, true>(table, "f32");
  add_comparisons<double>(table, "f64");
  add_comparisons<F16>(table, "f16");
  add_comparisons<F16, true>(table, "f16");
  add_comparisons<BF16>(table, "bf16");
  add_comparisons<F16, false, 2>(table, "f16x2");
  add_comparisons<F16, true, 2>(table, "f16x2");
  add_comparisons<BF16, false, 2>(table, "bf16x2");
  put(table, "",
      {
          {"mov.pred", logic<kPlain>},
          {"not.pred", not_pred},
          {"and.pred", logic<kAnd>},
          {"or.pred", logic<kOr>},
          {"xor.pred", logic<kXor>},
          {"shfl.sync.up.b32", shfl<Shuffle::kUp>},
          {"shfl.sync.down.b32", shfl<Shuffle::kDown>},
          {"shfl.sync.bfly.b32", shfl<Shuffle::kButterfly>},
          {"shfl.sync.idx.b32", shfl<Shuffle::kIndex>},
          {"vote.sync.all.pred", vote<Vote::kAll>},
          {"vote.sync.any.pred", vote<Vote::kAny>},
          {"vote.sync.uni.pred", vote<Vote::kUniform>},
          {"vote.sync.pred", vote<Vote::kUniform>},  // the same, for whoever leaves out every .uni
          {"vote.sync.ballot.b32", vote<Vote::kBallot>},
          {"match.any.sync.b32", match<uint32_t, false>},
          {"match.any.sync.b64", match<uint64_t, false>},
          {"match.all.sync.b32", match<uint32_t, true>},
          {"match.all.sync.b64", match<uint64_t, true>},
          {"redux.sync.add.u32", redux<uint32_t, add<uint32_t>>},
          {"redux.sync.add.s32", redux<uint32_t, add<uint32_t>>},
          {"redux.sync.min.u32", redux<uint32_t, min<uint32_t>>},
          {"redux.sync.min.s32", redux<int32_t, min<int32_t>>},
          {"redux.sync.max.u32", redux<uint32_t, max<uint32_t>>},
          {"redux.sync.max.s32", redux<int32_t, max<int32_t>>},
          {"redux.sync.and.b32", redux<uint32_t, bit_and<uint32_t>>},
          {"redux.sync.or.b32", redux<uint32_t, bit_or<uint32_t>>},
          {"redux.sync.xor.b32", redux<uint32_t, bit_xor<uint32_t>>},
          {"elect.sync", elect},
          {"activemask.b32", activemask},
      });
}

}  // namespace fw
