// The functions of TL on one element, and sums and maxima over a row that four threads share.
#pragma once

#include <cute/tensor.hpp>

namespace fw {

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

// 2^x in one instruction: relative error 2^-22, 0 for -inf and for results below 2^-126.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float exp(float x) { return exp2(x * log2_e); }
__device__ inline float log2(float x) { return ::log2f(x); }
__device__ inline float log(float x) { return ::logf(x); }
// For the scores of a tile: an absolute error of 2^-22 near 1, else a relative one.
__device__ inline float quick_log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float abs(float x) { return ::fabsf(x); }
__device__ inline int abs(int x) { return ::abs(x); }
__device__ inline float floor(float x) { return ::floorf(x); }
__device__ inline float ceil(float x) { return ::ceilf(x); }
__device__ inline float max(float a, float b) { return ::fmaxf(a, b); }
__device__ inline float min(float a, float b) { return ::fminf(a, b); }
__device__ inline int max(int a, int b) { return ::max(a, b); }
__device__ inline int min(int a, int b) { return ::min(a, b); }

// To 1 ulp; the exact root takes ten instructions.
__device__ inline float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp; the exact division takes ten instructions.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + 2^x) of an even number of columns: two share a reciprocal, 1 / a = b * (1 / (a * b)). Beyond 2^60 the result
// is 2^-60 instead of less, so that no product overflows.
template <class Row>
__device__ void logistic2(Row& x) {
  CUTE_UNROLL
  for (int n = 0; n < cute::size(x); n += 2) {
    float const a = 1.f + exp2(min(x[n], 60.f)), b = 1.f + exp2(min(x[n + 1], 60.f));
    float const both = reciprocal(a * b);
    x[n] = b * both;
    x[n + 1] = a * both;
  }
}

// The same, with 0 below 2^-59: a score of minus infinity weighs nothing.
template <class Row>
__device__ void sigmoid2(Row& x) {
  logistic2(x);
  CUTE_UNROLL
  for (int n = 0; n < cute::size(x); ++n) {
    x[n] = max(x[n] - 0x1p-59f, 0.f);
  }
}

__device__ inline float sigmoid(float x) { return reciprocal(1.f + exp2(-log2_e * x)); }

// tanh(x * ln_2 / 2): as with exp2, a constant that x is multiplied by can take the factor in. Absolute error below
// 3e-7 everywhere; tanh.approx has 5e-4, which shows in a softmax.
__device__ inline float tanh2(float x) { return 1.f - 2.f * reciprocal(1.f + exp2(x)); }
__device__ inline float tanh(float x) { return tanh2(2.f * log2_e * x); }

// Over the four threads that hold the columns of a row between them.
__device__ inline float row_max(float x) {
  x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A row's value for a sum that the four threads keep in parts: one of them holds it, the others 0.
__device__ inline float row_part(float x) { return threadIdx.x % 4 == 0 ? x : 0.f; }

}  // namespace fw
