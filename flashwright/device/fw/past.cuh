// Long sums of products of bytes. wgmma aligns all that it adds, the sum so far included, to the largest of them and
// cuts it off 13 bits below: the longer the sum, the more of each product is lost. So it is put by every few steps, in
// shared memory, and a new one is begun.
#pragma once

#include <fw/fragment.cuh>

namespace fw {

// What has been put by of an accumulator, each thread its own elements. `factors` are what the rows have been
// multiplied with since: the whole sum is factors * (what was put by) + (what is being summed up).
template <class T, int Rows, int Cols, int Warps>
struct Past {
  static constexpr int held = Rows * Cols / (32 * Warps), chunk = 16 / sizeof(T);
  static_assert(Rows == 16 * Warps && held % chunk == 0, "a thread has two rows");
  uint4* own;
  int any = 0;  // whether there is something (a bool would be a register of 16 bits)
  decltype(row_vector<Rows, Warps>()) factors = row_vector<Rows, Warps>();

  __device__ explicit Past(unsigned char* begin) : own(reinterpret_cast<uint4*>(begin) + threadIdx.x) {
    cute::fill(factors, 1.f);
  }

  // Puts the sum by and begins anew.
  template <class Acc>
  __device__ void put(Acc& acc) {
    add_to(acc);
    CUTE_UNROLL
    for (int i = 0; i < held; i += chunk) {
      uint32_t r[4];
      CUTE_UNROLL
      for (int k = 0; k < 4; ++k) r[k] = packed(acc.data() + i + k * chunk / 4);
      own[i / chunk * 32 * Warps] = make_uint4(r[0], r[1], r[2], r[3]);
    }
    cute::clear(acc);
    cute::fill(factors, 1.f);
    any = 1;
  }

  // The whole sum; nothing is left put by.
  template <class Acc>
  __device__ void take(Acc& acc) {
    add_to(acc);
    cute::fill(factors, 1.f);
    any = 0;
  }

  template <class Acc>
  __device__ void add_to(Acc& acc) const {
    static_assert(decltype(cute::size(acc))::value == held);
    if (any == 0) return;
    CUTE_UNROLL
    for (int i = 0; i < held; i += chunk) {
      uint4 const from = own[i / chunk * 32 * Warps];
      uint32_t const r[4] = {from.x, from.y, from.z, from.w};
      CUTE_UNROLL
      for (int k = 0; k < chunk; ++k) {  // in memory two elements of a row, then two of the other
        float& sum = acc.data()[i + k];
        sum = fma(unpacked(r, k), factors(k / 2 % 2), sum);
      }
      if (i / chunk % 4 == 3) __syncwarp();  // no load comes before it: they would take all registers
    }
  }

  __device__ static uint32_t packed(float const* x) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(*x);
    } else {
      return pack<T>(x[0], x[1]);
    }
  }

  __device__ static float unpacked(uint32_t const (&r)[4], int k) {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(r[k]);
    } else {
      static_assert(cute::is_same_v<T, bf16>);  // the upper half of an fp32
      return __uint_as_float(k % 2 ? r[k / 2] & 0xffff0000u : r[k / 2] << 16);
    }
  }
};

}  // namespace fw
