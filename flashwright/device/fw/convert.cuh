// Tiles of 8-bit elements in shared memory as tiles of 16-bit elements, which an MMA multiplies with other 16-bit ones.
#pragma once

#include <fw/fragment.cuh>

namespace fw {

// A whole number from -128 to 127. A float becomes the nearest one, of two the even one; what is no number becomes 0.
__device__ inline int8_t nearest(float x) { return static_cast<int8_t>(::min(::max(__float2int_rn(x), -128), 127)); }

struct int8 {
  int8_t number;

  int8() = default;
  __device__ explicit int8(float x) : number(nearest(x)) {}
  __device__ operator float() const { return number; }
};

// Four whole numbers as two pairs of 16 bits. As the last bits of a mantissa they count ones.
template <class To>
__device__ void convert_whole(uint32_t four, uint32_t (&pair)[2]) {
  constexpr bool brain = cute::is_same_v<To, bf16>;
  uint32_t const bytes = brain ? four : four ^ 0x80808080u;  // in fp16 128 is added
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const both = __byte_perm(bytes, brain ? 0x43434343u : 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    if constexpr (brain) {  // seven bits and 128, less 128, or 256 where the sign is set
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(pair[i])
          : "r"(both & 0xff80ff80u), "r"(0xbf80bf80u), "r"(both & 0xff7fff7fu));
    } else {  // eight bits and 1024, less 1152
      asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair[i]) : "r"(both), "r"(0x64806480u));
    }
  }
}

// Four 8-bit floats as pairs of fp16, which has all of them.
#if __CUDA_ARCH__ >= 890
template <class From>
__device__ void to_halves(uint32_t four, uint32_t (&pair)[2]) {
  if constexpr (cute::is_same_v<From, e4m3>) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pair[0]), "=r"(pair[1])
        : "r"(four));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, low;\ncvt.rn.f16x2.e5m2x2 %1, high;\n}"
        : "=r"(pair[0]), "=r"(pair[1])
        : "r"(four));
  }
}
#endif

// Four 8-bit floats as two pairs of 16 bits.
template <class To, class From>
__device__ void convert_floats(uint32_t four, uint32_t (&pair)[2]) {
#if __CUDA_ARCH__ >= 890
  to_halves<From>(four, pair);
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    if constexpr (cute::is_same_v<To, bf16>) {
      float low, high;
      unpack<fp16>(pair[i], low, high);
      pair[i] = pack<bf16>(low, high);
    }
  }
#else
  constexpr int mantissa = cute::is_same_v<From, e4m3> ? 3 : 2;  // bits
  constexpr int down = 8 - ((cute::is_same_v<To, bf16> ? 7 : 10) - mantissa);  // from the upper byte of 16 bits
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const upper = __byte_perm(four, 0, i == 0 ? 0x1404 : 0x3424);
    pair[i] = (upper & 0x80008000u) | ((upper & 0x7f007f00u) >> down);
    if constexpr (cute::is_same_v<To, bf16>) {  // the exponent counts from elsewhere: it is 2^120 or 2^112 too small
      constexpr uint32_t factor = mantissa == 3 ? 0x7b807b80u : 0x77807780u;
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair[i]) : "r"(factor), "r"(0x80008000u));
    } else if constexpr (mantissa == 3) {
      asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair[i]) : "r"(0x5c005c00u));
    }
  }
  // What is no number has all bits set in e4m3; in e5m2 the exponent's.
  constexpr uint32_t least = mantissa == 3 ? 0x7f : 0x7c;
  uint32_t const special = ((four & 0x7f7f7f7fu) + 0x01010101u * (0x80 - least)) & 0x80808080u;
  if (special != 0 && (mantissa == 3 || cute::is_same_v<To, bf16>)) {
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      uint32_t const byte = four >> 8 * n & 0xff, infinity = cute::is_same_v<To, bf16> ? 0x7f80 : 0x7c00;
      if ((byte & 0x7f) < least) continue;
      uint32_t const found = infinity | (byte & 0x80) << 8 | (mantissa == 3 || (byte & 3) != 0 ? 0x40 : 0);
      pair[n / 2] = n % 2 == 0 ? (pair[n / 2] & 0xffff0000u) | found : (pair[n / 2] & 0xffffu) | found << 16;
    }
  }
#endif
}

// Four 8-bit numbers as two pairs of 16 bits.
template <class To, class From>
__device__ void convert_four(uint32_t four, uint32_t (&pair)[2]) {
  if constexpr (cute::is_same_v<From, int8>) {
    convert_whole<To>(four, pair);
  } else {
    convert_floats<To, From>(four, pair);
  }
}

// Which 16-byte chunk of 8-bit elements each thread of a warp takes, in `down` rows of a column of atoms. It becomes two
// chunks. If their atoms are half as wide, eight threads that work at once take the left chunks of one row and
// the right ones of the next: what they read, and what they write, lies in different banks.
template <class To, class From>
struct ChunkPairs {
  static constexpr bool halves = From::width == 2 * To::width;
  static_assert(halves || From::width == To::width);
  static constexpr int down = 32 / From::chunks;
  int row, chunk;

  __device__ explicit ChunkPairs(int lane) {
    if constexpr (halves) {
      int const next = lane / 4 % 2;
      row = lane / 16 * 2 + next;
      chunk = lane % 4 + (lane / 8 % 2 ^ next) * 4;
    } else {
      row = lane / From::chunks;
      chunk = lane % From::chunks;
    }
  }
};

// The part of a warp in `Rounds` rounds, of which each goes through `Rows` rows. All loads are on their way before the
// first store: few warps have to hide how long they take.
template <int Rounds, int Rows, class To, class From>
__device__ void convert_rounds(uint32_t in, uint32_t out) {
  constexpr int flip = Rows % 8 == 0 ? 0 : 64;  // with rows that are 4 apart, one bit of the swizzle differs
  uint32_t x[Rounds][4];
  CUTE_UNROLL
  for (int i = 0; i < Rounds; ++i) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                 : "r"((in ^ i % 2 * flip) + i * Rows * From::row_bytes)
                 : "memory");
  }
  CUTE_UNROLL
  for (int i = 0; i < Rounds; ++i) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t low[2], high[2];
      convert_four<typename To::value_type, typename From::value_type>(x[i][2 * half], low);
      convert_four<typename To::value_type, typename From::value_type>(x[i][2 * half + 1], high);
      uint32_t const at = (out ^ i % 2 * flip ^ half * 16) + i * Rows * To::row_bytes;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(low[0]), "r"(low[1]), "r"(high[0]),
                   "r"(high[1])
                   : "memory");
    }
  }
}

// A tile in another type, by `Threads` threads.
template <int Threads, class To, class From>
__device__ void convert_tile(To to, From from, int thread) {
  using Way = ChunkPairs<To, From>;
  static_assert(is_16_bit<typename To::value_type> && To::rows == From::rows && To::cols == From::cols);
  static_assert(From::cols % 16 == 0 && From::rows % Way::down == 0);
  // All warps together go through it in rounds, each in a few rows of a column of atoms: none has two rounds more.
  constexpr int rows = Threads / 32 * Way::down, rounds = From::rows / rows;  // those with work for all warps
  constexpr int at_once = rounds % 5 == 0 ? 5 : rounds % 4 == 0 ? 4 : rounds % 3 == 0 ? 3 : rounds % 2 == 0 ? 2 : 1;
  Way const own(thread % 32);
  int const first = thread / 32 * Way::down + own.row;
  uint32_t const source = from.chunk_address(first, own.chunk);
  int const pair = 2 * (own.chunk % (To::chunks / 2));
  uint32_t target = to.chunk_address(first, pair);
  if constexpr (Way::halves) target += own.chunk / (To::chunks / 2) * To::atom_bytes;
  CUTE_NO_UNROLL
  for (int atom = 0; atom < From::cols / From::width; ++atom) {
    uint32_t in = source + atom * From::atom_bytes;
    uint32_t out = target + atom * (From::width / To::width) * To::atom_bytes;
    CUTE_NO_UNROLL
    for (int done = 0; done < rounds; done += at_once) {
      convert_rounds<at_once, rows, To, From>(in, out);
      constexpr int flip = at_once * rows % 8 == 0 ? 0 : 64;
      in = (in ^ flip) + at_once * rows * From::row_bytes;
      out = (out ^ flip) + at_once * rows * To::row_bytes;
    }
    if (From::rows % rows != 0 && first + rounds * rows < From::rows) convert_rounds<1, rows, To, From>(in, out);
  }
  __syncwarp();  // one of the warp may hand the stage back next
}

}  // namespace fw
