// Arithmetic, bits and moves; floating point is in floats.h.
//
// Division of an integer by zero is unspecified in PTX; here it gives all ones, as does its
// remainder.
//
// A `mov` that packs or unpacks has a name of its own, since slots do not tell d,{a,b} from
// {a,b},d: mov.pack.b32 d,lo,hi and mov.unpack.b32 lo,hi,a; for b64 two halves or four quarters,
// lowest first.

#include "floats.h"

namespace fw {
namespace {

using std::string;

// --- integers -----------------------------------------------------------------------------------

template <class T, class S, class U>
using Like = std::conditional_t<std::is_signed_v<T>, S, U>;
template <class T>
using Wider = std::conditional_t<sizeof(T) == 2, Like<T, int32_t, uint32_t>,
                                 std::conditional_t<sizeof(T) == 4, Like<T, int64_t, uint64_t>,
                                                    Like<T, __int128, unsigned __int128>>>;

// The functions of one lane. Everything that may wrap is computed without signs.
template <class T> struct Integer {
  using U = std::make_unsigned_t<T>;
  using W = Wider<T>;
  static constexpr uint32_t kWidth = 8 * sizeof(T);
  static constexpr bool kSigned = std::is_signed_v<T>;

  static T add(T a, T b) { return U(a) + U(b); }
  static T sub(T a, T b) { return U(a) - U(b); }
  static T mul_lo(T a, T b) { return W(a) * W(b); }
  static T mul_hi(T a, T b) { return W(a) * W(b) >> kWidth; }
  static W mul_wide(T a, T b) { return W(a) * W(b); }
  static T mad_lo(T a, T b, T c) { return U(W(a) * W(b)) + U(c); }
  static T mad_hi(T a, T b, T c) { return U(mul_hi(a, b)) + U(c); }
  static W mad_wide(T a, T b, W c) {
    return std::make_unsigned_t<W>(W(a) * W(b)) + std::make_unsigned_t<W>(c);
  }
  static T div(T a, T b) { return b == 0 ? T(-1) : kSigned && b == T(-1) ? neg(a) : T(a / b); }
  static T rem(T a, T b) { return b == 0 ? T(-1) : kSigned && b == T(-1) ? T(0) : T(a % b); }
  static T min(T a, T b) { return a < b ? a : b; }
  static T max(T a, T b) { return a < b ? b : a; }
  static T min_relu(T a, T b) { return max(min(a, b), 0); }
  static T max_relu(T a, T b) { return max(max(a, b), 0); }
  static T neg(T a) { return U(0) - U(a); }
  static T abs(T a) { return a < 0 ? neg(a) : a; }
  static T sad(T a, T b, T c) { return U(c) + (a < b ? U(b) - U(a) : U(a) - U(b)); }
  static T add_sat(T a, T b) { return saturated(W(a) + W(b)); }
  static T sub_sat(T a, T b) { return saturated(W(a) - W(b)); }
  static T mad_hi_sat(T a, T b, T c) { return saturated(W(mul_hi(a, b)) + W(c)); }
  static T saturated(W a) {
    using Limits = std::numeric_limits<T>;
    return a < Limits::min() ? Limits::min() : a > Limits::max() ? Limits::max() : T(a);
  }

  static T bit_and(T a, T b) { return a & b; }
  static T bit_or(T a, T b) { return a | b; }
  static T bit_xor(T a, T b) { return a ^ b; }
  static T bit_not(T a) { return ~a; }
  static T cnot(T a) { return a == 0; }
  static T shl(T a, uint32_t n) { return n >= kWidth ? 0 : U(a) << n; }
  static T shr(T a, uint32_t n) { return n >= kWidth ? (a < 0 ? T(-1) : T(0)) : T(a >> n); }
  static uint32_t popc(T a) { return __builtin_popcountll(a); }
  static uint32_t clz(T a) { return a == 0 ? kWidth : __builtin_clzll(U(a)) - (64 - kWidth); }
  static T brev(T a) {
    T result = 0;
    for (uint32_t i = 0; i < kWidth; ++i) result = result << 1 | (a >> i & 1);
    return result;
  }
  static uint32_t bfind(T a) { return kWidth - 1 - clz(a < 0 ? ~a : a); }
  static uint32_t bfind_shift(T a) { return (a < 0 ? ~a : a) == 0 ? ~0u : clz(a < 0 ? ~a : a); }
  // A signed field that goes beyond the top repeats its sign.
  static T bfe(T a, uint32_t position, uint32_t length) {
    position &= 0xff, length &= 0xff;
    if (length == 0) return 0;
    if (position >= kWidth) return a < 0 ? T(-1) : T(0);
    const T moved = a >> position;
    if (position + length >= kWidth) return moved;
    return T(U(moved) << (kWidth - length)) >> (kWidth - length);
  }
  static T bfi(T a, T b, uint32_t position, uint32_t length) {
    position &= 0xff, length &= 0xff;
    if (position >= kWidth) return b;
    const U field = (length >= kWidth ? ~U(0) : (U(1) << length) - 1) << position;
    return (b & ~field) | (U(a) << position & field);
  }
};

template <class T> void add_integer(Table& table, const string& type) {
  using I = Integer<T>;
  put(table, type,
      {
          {"add.", lanewise<I::add>},
          {"sub.", lanewise<I::sub>},
          {"mul.lo.", lanewise<I::mul_lo>},
          {"mul.hi.", lanewise<I::mul_hi>},
          {"mad.lo.", lanewise<I::mad_lo>},
          {"mad.hi.", lanewise<I::mad_hi>},
          {"div.", lanewise<I::div>},
          {"rem.", lanewise<I::rem>},
          {"min.", lanewise<I::min>},
          {"max.", lanewise<I::max>},
          {"sad.", lanewise<I::sad>},
          {"shr.", lanewise<I::shr>},
      });
  if constexpr (sizeof(T) < 8) {
    put(table, type, {{"mul.wide.", lanewise<I::mul_wide>}, {"mad.wide.", lanewise<I::mad_wide>}});
  }
  if constexpr (sizeof(T) > 2) {
    put(table, type,
        {{"bfe.", lanewise<I::bfe>},
         {"bfind.", lanewise<I::bfind>},
         {"bfind.shiftamt.", lanewise<I::bfind_shift>}});
  } else {
    put(table, type + "x2",
        {{"add.", lanewise<I::add, 2>},
         {"min.", lanewise<I::min, 2>},
         {"max.", lanewise<I::max, 2>}});
  }
  if constexpr (I::kSigned) {
    put(table, type, {{"neg.", lanewise<I::neg>}, {"abs.", lanewise<I::abs>}});
  }
}

template <class U> void add_bits(Table& table, const string& type) {
  using I = Integer<U>;
  put(table, type,
      {
          {"and.", lanewise<I::bit_and>},
          {"or.", lanewise<I::bit_or>},
          {"xor.", lanewise<I::bit_xor>},
          {"not.", lanewise<I::bit_not>},
          {"cnot.", lanewise<I::cnot>},
          {"shl.", lanewise<I::shl>},
          {"shr.", lanewise<I::shr>},
      });
  if constexpr (sizeof(U) > 2) {
    put(table, type,
        {{"popc.", lanewise<I::popc>},
         {"clz.", lanewise<I::clz>},
         {"brev.", lanewise<I::brev>},
         {"bfi.", lanewise<I::bfi>}});
  }
}

// --- words --------------------------------------------------------------------------------------

// prmt: which four of the eight bytes of b:a, a nibble each; its top bit spreads the byte's sign.
uint32_t prmt(uint32_t a, uint32_t b, uint32_t control) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = control >> 4 * i & 15, byte = bytes >> 8 * (choice & 7) & 0xff;
    result |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return result;
}

// Its modes: the control word for each of the four values of c.
template <uint32_t k0, uint32_t k1, uint32_t k2, uint32_t k3>
uint32_t prmt_mode(uint32_t a, uint32_t b, uint32_t c) {
  constexpr uint32_t kControl[] = {k0, k1, k2, k3};
  return prmt(a, b, kControl[c & 3]);
}

template <bool kLeft, bool kWrap> uint32_t funnel(uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t both = uint64_t(b) << 32 | a;
  const uint32_t n = kWrap ? c & 31 : c < 32 ? c : 32;
  return kLeft ? both << n >> 32 : both >> n;
}

uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t truth) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t row = (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    result |= truth >> i & 1 ? row : 0;
  }
  return result;
}

// So many ones from a bit on. Clamped, they end at the top; else place and number wrap around.
template <bool kClamp> uint32_t ones(uint32_t from, uint32_t count) {
  if (!kClamp) from &= 31, count &= 31;
  if (from > 31) return 0;
  return (count > 31 ? ~0u : (1u << count) - 1) << from;
}

// dp4a: four products of bytes, added to a word. dp2a: two of 16 bits and the lower or upper bytes.
template <class A, class B> uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += uint32_t(int32_t(A(a >> i)) * int32_t(B(b >> i)));
  return c;
}
template <class A, class B, int kFirst> uint32_t dp2a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 2; ++i) {
    c += uint32_t(int32_t(A(a >> 16 * i)) * int32_t(B(b >> (kFirst + 8 * i))));
  }
  return c;
}

template <class A, class Half, class B> void add_dots(Table& table, const string& types) {
  put(table, types,
      {{"dp4a.", lanewise<dp4a<A, B>>},
       {"dp2a.lo.", lanewise<dp2a<Half, B, 0>>},
       {"dp2a.hi.", lanewise<dp2a<Half, B, 16>>}});
}

void add_plain_words(Table& table) {
  add_dots<int8_t, int16_t, int8_t>(table, "s32.s32");
  add_dots<int8_t, int16_t, uint8_t>(table, "s32.u32");
  add_dots<uint8_t, uint16_t, int8_t>(table, "u32.s32");
  add_dots<uint8_t, uint16_t, uint8_t>(table, "u32.u32");
  put(table, "",
      {
          {"bmsk.clamp.b32", lanewise<ones<true>>},
          {"bmsk.wrap.b32", lanewise<ones<false>>},
          {"prmt.b32", lanewise<prmt>},
          {"lop3.b32", lanewise<lop3>},
          {"prmt.b32.f4e", lanewise<prmt_mode<0x3210, 0x4321, 0x5432, 0x6543>>},
          {"prmt.b32.b4e", lanewise<prmt_mode<0x5670, 0x6701, 0x7012, 0x0123>>},
          {"prmt.b32.rc8", lanewise<prmt_mode<0x0000, 0x1111, 0x2222, 0x3333>>},
          {"prmt.b32.ecl", lanewise<prmt_mode<0x3210, 0x3211, 0x3222, 0x3333>>},
          {"prmt.b32.ecr", lanewise<prmt_mode<0x0000, 0x1110, 0x2210, 0x3210>>},
          {"prmt.b32.rc16", lanewise<prmt_mode<0x1010, 0x3232, 0x1010, 0x3232>>},
          {"shf.l.wrap.b32", lanewise<funnel<true, true>>},
          {"shf.l.clamp.b32", lanewise<funnel<true, false>>},
          {"shf.r.wrap.b32", lanewise<funnel<false, true>>},
          {"shf.r.clamp.b32", lanewise<funnel<false, false>>},
          {"add.sat.s32", lanewise<Integer<int32_t>::add_sat>},
          {"sub.sat.s32", lanewise<Integer<int32_t>::sub_sat>},
          {"mad.hi.sat.s32", lanewise<Integer<int32_t>::mad_hi_sat>},
          {"min.relu.s32", lanewise<Integer<int32_t>::min_relu>},
          {"max.relu.s32", lanewise<Integer<int32_t>::max_relu>},
          {"min.s16x2.relu", lanewise<Integer<int16_t>::min_relu, 2>},
          {"max.s16x2.relu", lanewise<Integer<int16_t>::max_relu, 2>},
          {"min.relu.s16x2", lanewise<Integer<int16_t>::min_relu, 2>},
          {"max.relu.s16x2", lanewise<Integer<int16_t>::max_relu, 2>},
      });
}

// --- moves --------------------------------------------------------------------------------------

template <class U> U mov(U a) { return a; }
template <class U> U slct_s32(U a, U b, int32_t c) { return c >= 0 ? a : b; }
template <class U> U slct_f32(U a, U b, float c) { return c >= 0 ? a : b; }
template <class U> U slct_ftz(U a, U b, float c) { return flush(c) >= 0 ? a : b; }
uint32_t copysign_f32(uint32_t a, uint32_t b) { return (a & 1u << 31) | (b & ~(1u << 31)); }
uint64_t copysign_f64(uint64_t a, uint64_t b) { return (a & 1ull << 63) | (b & ~(1ull << 63)); }

template <class U> void selp(Context& context, const int32_t* operand, uint32_t mask) {
  const U *a = lanes<const U>(context, operand[1]), *b = lanes<const U>(context, operand[2]);
  const uint32_t choice = source_predicate(context, operand[3]);
  U out[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = choice >> lane & 1 ? a[lane] : b[lane];
  store(context, operand[0], mask, out, sizeof(U));
}

template <int kBytes> void pack(Context& context, const int32_t* operand, uint32_t mask) {
  const int parts = context.count - 1, size = kBytes / parts;
  uint8_t out[kLanes * kBytes];
  for (int part = 0; part < parts; ++part) {
    const uint8_t* source = context.warp->registers + operand[part + 1];
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(out + lane * kBytes + part * size, source + lane * size, size);
    }
  }
  store(context, operand[0], mask, out, kBytes);
}

template <int kBytes> void unpack(Context& context, const int32_t* operand, uint32_t mask) {
  const int parts = context.count - 1, size = kBytes / parts;
  uint8_t whole[kLanes * kBytes], out[kLanes * kBytes];
  std::memcpy(whole, context.warp->registers + operand[parts], sizeof whole);
  for (int part = 0; part < parts; ++part) {
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(out + lane * size, whole + lane * kBytes + part * size, size);
    }
    store(context, operand[part], mask, out, size);
  }
}

template <class U> void add_moves(Table& table, std::initializer_list<const char*> types) {
  for (const char* type : types) {
    put(table, type, {{"mov.", lanewise<mov<U>>}, {"selp.", selp<U>}});
    put(table, string(type) + ".s32", {{"slct.", lanewise<slct_s32<U>>}});
    put(table, string(type) + ".f32",
        {{"slct.", lanewise<slct_f32<U>>}, {"slct.ftz.", lanewise<slct_ftz<U>>}});
  }
}

}  // namespace

void add_arithmetic(Table& table) {
  add_integer<uint16_t>(table, "u16");
  add_integer<int16_t>(table, "s16");
  add_integer<uint32_t>(table, "u32");
  add_integer<int32_t>(table, "s32");
  add_integer<uint64_t>(table, "u64");
  add_integer<int64_t>(table, "s64");
  add_bits<uint16_t>(table, "b16");
  add_bits<uint32_t>(table, "b32");
  add_bits<uint64_t>(table, "b64");
  add_plain_words(table);
  add_floats(table);
  put(table, "",
      {{"copysign.f32", lanewise<copysign_f32>},
       {"copysign.f64", lanewise<copysign_f64>},
       {"mov.pack.b32", pack<4>},
       {"mov.pack.b64", pack<8>},
       {"mov.unpack.b32", unpack<4>},
       {"mov.unpack.b64", unpack<8>},
       {"mov.pack.b128", pack<16>},
       {"mov.unpack.b128", unpack<16>}});
  add_moves<uint16_t>(table, {"b16", "u16", "s16"});
  add_moves<uint32_t>(table, {"b32", "u32", "s32", "f32"});
  add_moves<uint64_t>(table, {"b64", "u64", "s64", "f64"});
  for (const char* space :
       {"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"}) {
    put(table, string(space) + ".u64",
        {{"cvta.", lanewise<mov<uint64_t>>}, {"cvta.to.", lanewise<mov<uint64_t>>}});
  }
}

}  // namespace fw
