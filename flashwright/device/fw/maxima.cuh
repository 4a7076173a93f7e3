// Maxima of rows as integers: Hopper has the largest of three of them in one instruction (VIMNMX3), of floats only that
// of two. Bits of floats compare like integers as long as one of the two is not negative.
#pragma once

#include <cute/tensor.hpp>

namespace fw {

// Of the columns that a thread holds of row m: the largest, if that is not negative, else any of them.
template <class Tile>
__device__ float most_as_integers(Tile const& tile, int m) {
  constexpr int cols = decltype(cute::size<1>(tile))::value;
  auto const bits = [&](int n) { return __float_as_int(tile(m, n)); };
  int most = bits(0);
  CUTE_UNROLL
  for (int n = 1; n + 1 < cols; n += 2) most = __vimax3_s32(most, bits(n), bits(n + 1));
  if constexpr (cols % 2 == 0) most = ::max(most, bits(cols - 1));
  return __int_as_float(most);
}

// Whether none of a warp's rows has a negative value: the same for all of its lanes, and an int, as votes are.
template <class Vector>
__device__ int none_negative(Vector const& rows) {
  bool all = true;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(rows))::value; ++m) all = all && rows(m) >= 0.f;
  return __all_sync(0xffffffffu, all);
}

// Whether all of a warp's rows have a 1: what they multiply stays as it is.
template <class Vector>
__device__ int all_ones(Vector const& rows) {
  bool all = true;
  CUTE_UNROLL
  for (int m = 0; m < decltype(cute::size(rows))::value; ++m) all = all && rows(m) == 1.f;
  return __all_sync(0xffffffffu, all);
}

}  // namespace fw
