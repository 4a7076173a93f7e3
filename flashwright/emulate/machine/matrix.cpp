// mma.sync and movmatrix.
//
// How a matrix lies in a warp (PTX ISA, "matrix fragments"): with g = lane / 4, t = lane % 4 and E
// elements to a 32-bit register (2 of 16 bits, 4 of 8, 1 of tf32),
//   A, 16 x K: register r, element e is row g + 8 (r % 2), column t E + e + 4 E (r / 2)
//   B, K x 8:  register r, element e is row t E + e + 4 E r, column g
//   C, 16 x 8: element i is row g + 8 (i / 2), column 2 t + i % 2; where it is f16, two a register
//
// What is summed: C and the K products in that order, all in double, where each product is exact;
// the sum is rounded once, to nearest, to the type of D. It is within K 2^-53 (|C| + the sum of
// |products|), and that one rounding, of the true value. Tensor cores align products to the
// largest, cut them off (f16, bf16: some 24 bits and a few more; e4m3, e5m2 on Ada: 13 bits; Hopper
// has no such mma.sync of its own, ptxas makes it of f16),
// add four to 32 at a time and round toward zero: they lie further from the true value than this
// does, and differ from it by their own error. Integers are exact.

#include "numbers.h"

namespace fw {
namespace {

using std::string;

// --- elements -----------------------------------------------------------------------------------

struct TF32 {  // an f32 register, of which the 13 lowest bits are not read
  uint32_t bits;
};

template <class T> double element(T x) { return to_float(x); }
double element(TF32 x) { return bits_as<float>(x.bits & 0xffffe000u); }
int32_t element(int8_t x) { return x; }
int32_t element(uint8_t x) { return x; }

// Formats of 8 bits are looked up.
template <class F> struct Decoded {
  double value[256];
  Decoded() {
    for (int i = 0; i < 256; ++i) value[i] = to_float(F{{static_cast<uint8_t>(i)}});
  }
};
const Decoded<E4M3> kE4M3;
const Decoded<E5M2> kE5M2;
double element(E4M3 x) { return kE4M3.value[x.bits]; }
double element(E5M2 x) { return kE5M2.value[x.bits]; }

template <class T> using Value = decltype(element(T{}));

// --- fragments ----------------------------------------------------------------------------------

// A as rows, B as rows: the innermost loop runs along the 8 columns of B and C.
template <class T, int kK>
__attribute__((noinline)) void gather_a(Context& context, const int32_t* operand,
                                        Value<T> (*a)[kK]) {
  constexpr int kPer = 4 / sizeof(T), kRegisters = kK / (2 * kPer);
  for (int r = 0; r < kRegisters; ++r) {
    const T* source = lanes<const T>(context, operand[r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int e = 0; e < kPer; ++e) {
        a[lane / 4 + 8 * (r % 2)][lane % 4 * kPer + e + 4 * kPer * (r / 2)] =
            element(source[lane * kPer + e]);
      }
    }
  }
}

template <class T, int kK>
__attribute__((noinline)) void gather_b(Context& context, const int32_t* operand,
                                        Value<T> (*b)[8]) {
  constexpr int kPer = 4 / sizeof(T), kRegisters = kK / (4 * kPer);
  for (int r = 0; r < kRegisters; ++r) {
    const T* source = lanes<const T>(context, operand[r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int e = 0; e < kPer; ++e) {
        b[lane % 4 * kPer + e + 4 * kPer * r][lane / 4] = element(source[lane * kPer + e]);
      }
    }
  }
}

// C and D: where a lane's element i lies in a 16 x 8 matrix. A register holds 4 / sizeof(C).
constexpr int place(int lane, int i) { return (lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2; }

template <class C, class V>
__attribute__((noinline)) void gather_c(Context& context, const int32_t* operand, V* c) {
  constexpr int kPer = 4 / sizeof(C);
  for (int i = 0; i < 4; ++i) {
    const C* source = lanes<const C>(context, operand[i / kPer]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const C x = source[lane * kPer + i % kPer];
      if constexpr (std::is_integral_v<C>) c[place(lane, i)] = x;
      else c[place(lane, i)] = wide(x);
    }
  }
}

template <class C, bool kSatfinite, class V> C rounded(V x) {
  if constexpr (std::is_integral_v<C>) {
    if (kSatfinite) x = x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x;
    return static_cast<C>(x);  // wraps, where it still has to
  } else {
    return narrow<C>(x);
  }
}

template <class C, bool kSatfinite, class V>
__attribute__((noinline)) void scatter(Context& context, const int32_t* operand, uint32_t mask,
                                       const V* d) {
  constexpr int kPer = 4 / sizeof(C);
  for (int r = 0; r < 4 / kPer; ++r) {
    C out[kLanes * kPer];
    for (int i = 0; i < kLanes * kPer; ++i) {
      out[i] = rounded<C, kSatfinite>(d[place(i / kPer, r * kPer + i % kPer)]);
    }
    store(context, operand[r], mask, out, 4);
  }
}

// --- mma ----------------------------------------------------------------------------------------

template <int kK, class V, class S>
__attribute__((noinline)) void multiply(const V (*a)[kK], const V (*b)[8], S* c) {
  for (int row = 0; row < 16; ++row) {
    S sum[8];
    for (int n = 0; n < 8; ++n) sum[n] = c[row * 8 + n];
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < 8; ++n) sum[n] += a[row][k] * b[k][n];
    }
    for (int n = 0; n < 8; ++n) c[row * 8 + n] = sum[n];
  }
}

// mma d..., a..., b..., c...
template <class A, class B, int kK, class C, bool kSatfinite = false>
void mma(Context& context, const int32_t* operand, uint32_t mask) {
  constexpr int kPer = 4 / sizeof(A), kD = sizeof(C), kA = kK / (2 * kPer), kB = kK / (4 * kPer);
  using V = Value<A>;
  using S = std::conditional_t<std::is_integral_v<C>, int64_t, double>;
  alignas(64) V a[16][kK], b[kK][8];
  alignas(64) S c[16 * 8];
  gather_a<A, kK>(context, operand + kD, a);
  gather_b<B, kK>(context, operand + kD + kA, b);
  gather_c<C>(context, operand + kD + kA + kB, c);
  multiply<kK>(a, b, c);
  scatter<C, kSatfinite>(context, operand, mask, c);
}

// movmatrix: rows of 8 x 8 numbers of 16 bits become columns. Lane 4 r + t has row r, columns 2 t
// and 2 t + 1.
void transpose(Context& context, const int32_t* operand, uint32_t mask) {
  const uint16_t* source = lanes<const uint16_t>(context, operand[1]);
  uint16_t out[64];
  for (int i = 0; i < 64; ++i) out[i] = source[i % 8 * 8 + i / 8];
  store(context, operand[0], mask, out, 4);
}

void add_mma(Table& table, int k, const string& c, const string& ab, Handler handler) {
  const string of = c.substr(c.rfind('.') + 1);  // without satfinite
  table["mma.sync.m16n8k" + std::to_string(k) + ".row.col." + c + "." + ab + "." + of] = handler;
}

template <class A, class B> void add_eight(Table& table, const char* ab) {
  if constexpr (std::is_integral_v<A>) {
    add_mma(table, 16, "s32", ab, mma<A, B, 16, int32_t>);
    add_mma(table, 32, "s32", ab, mma<A, B, 32, int32_t>);
    add_mma(table, 16, "satfinite.s32", ab, mma<A, B, 16, int32_t, true>);
    add_mma(table, 32, "satfinite.s32", ab, mma<A, B, 32, int32_t, true>);
  } else {
    add_mma(table, 16, "f32", ab, mma<A, B, 16, float>);
    add_mma(table, 32, "f32", ab, mma<A, B, 32, float>);
    add_mma(table, 16, "f16", ab, mma<A, B, 16, F16>);
    add_mma(table, 32, "f16", ab, mma<A, B, 32, F16>);
  }
}

}  // namespace

void add_matrix(Table& table) {
  add_mma(table, 8, "f32", "f16.f16", mma<F16, F16, 8, float>);
  add_mma(table, 8, "f16", "f16.f16", mma<F16, F16, 8, F16>);
  add_mma(table, 8, "f32", "bf16.bf16", mma<BF16, BF16, 8, float>);
  add_mma(table, 16, "f32", "f16.f16", mma<F16, F16, 16, float>);
  add_mma(table, 16, "f16", "f16.f16", mma<F16, F16, 16, F16>);
  add_mma(table, 16, "f32", "bf16.bf16", mma<BF16, BF16, 16, float>);
  add_mma(table, 4, "f32", "tf32.tf32", mma<TF32, TF32, 4, float>);
  add_mma(table, 8, "f32", "tf32.tf32", mma<TF32, TF32, 8, float>);
  add_eight<E4M3, E4M3>(table, "e4m3.e4m3");
  add_eight<E4M3, E5M2>(table, "e4m3.e5m2");
  add_eight<E5M2, E4M3>(table, "e5m2.e4m3");
  add_eight<E5M2, E5M2>(table, "e5m2.e5m2");
  add_eight<int8_t, int8_t>(table, "s8.s8");
  add_eight<int8_t, uint8_t>(table, "s8.u8");
  add_eight<uint8_t, int8_t>(table, "u8.s8");
  add_eight<uint8_t, uint8_t>(table, "u8.u8");
  table["movmatrix.sync.m8n8.trans.b16"] = transpose;
}

}  // namespace fw
