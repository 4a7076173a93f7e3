// How D and an A from registers lie in a warp is as for mma.sync (matrix.cpp), 16 rows a warp, D
// repeated every 8 columns. The work is done in such blocks: 8 rows of B (columns of D) are 16
// chunks, 256 bytes, of either major.
//
// What is summed: D and the K products in that order, all in double, where each product is exact;
// the sum is rounded once, to nearest, to the type of D. It is within K 2^-53 (|D| + the sum of
// |products|), and that one rounding, of the true value. Tensor cores align products to the
// largest, cut them off (some 24 bits and a few more) and round toward zero: they lie further from
// the true value than this does, and differ from it by their own error. Integers are exact.
//
// Of e4m3 and e5m2 added up in f32 so little is kept that a kernel has to be made for it, so here
// the sum is Hopper's own, to the bit (tests/hardware): D and the products are cut off toward zero
// 13 bits below the largest exponent, where a product's is the sum of its factors', and so is the
// result below its own.

#include "wgmma.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "numbers.h"
#include "tensor_map.h"

namespace fw {
namespace {

using std::string;
using Type = WgmmaShape::Type;

constexpr int kBlock = 8;         // rows of an operand that are handled at once
constexpr int kBlockBytes = 256;  // theirs
constexpr int kMostK = 32, kMostN = 256;

// --- names --------------------------------------------------------------------------------------

bool type_of(const string& name, int& type) {
  constexpr const char* kNames[] = {"f32",  "f16", "bf16", "e4m3", "e5m2",
                                    "tf32", "s8",  "u8",   "s32"};
  for (int i = 0; i < 9; ++i) {
    if (name == kNames[i]) {
      type = i;
      return true;
    }
  }
  return false;
}

bool is_eight(int type) { return type == Type::kE4M3 || type == Type::kE5M2; }
bool is_whole(int type) { return type == Type::kS8 || type == Type::kU8; }

// What PTX combines: bf16 and tf32 go into f32 only, integers into s32, and only what has 8 bits
// mixes. Integers have fewer widths.
bool allowed(const WgmmaShape& shape) {
  if (shape.d == Type::kS32) {
    const bool width = shape.n <= 32 || shape.n % 16 == 0;
    return is_whole(shape.a) && is_whole(shape.b) && width;
  }
  if (shape.satfinite || is_whole(shape.a)) return false;
  if (shape.d != Type::kF32 && shape.d != Type::kF16) return false;
  if (is_eight(shape.a) && is_eight(shape.b)) return true;
  if (shape.a != shape.b || shape.a == Type::kF32) return false;
  return shape.a == Type::kF16 || shape.d == Type::kF32;
}

int bytes_of(int type) {
  if (is_eight(type) || is_whole(type)) return 1;
  return type == Type::kF16 || type == Type::kBF16 ? 2 : 4;
}

std::vector<string> parts_of(const string& name) {
  std::vector<string> parts;
  for (size_t from = 0; from <= name.size();) {
    const size_t dot = std::min(name.find('.', from), name.size());
    const string part = name.substr(from, dot - from);
    if (part != "sync" && part != "aligned") parts.push_back(part);
    from = dot + 1;
  }
  return parts;
}

// --- shared memory ------------------------------------------------------------------------------

// A descriptor's fields, in bytes, and for either major what the canonical layouts make of them
// (PTX ISA, "Strides" and "Matrix Descriptor Format"). A row of the swizzle has `span` chunks.
struct Operand {
  uint32_t start, leading, stride, phase;
  int bits, span;

  explicit Operand(uint64_t descriptor) {
    constexpr int kBits[] = {0, 3, 2, 1};
    start = field(descriptor, 0), leading = field(descriptor, 16), stride = field(descriptor, 32);
    bits = kBits[descriptor >> 62];
    span = 1 << bits;
    // PTX: nonzero where the pattern does not begin at its alignment. It says how to compute it,
    // not what it does; that rows are counted from there is what makes sense of it.
    phase = descriptor >> 49 & 7;
  }

  // Chunk `part` (0 or 1) along K of a row. Groups of 8 rows are `stride` apart; the second chunk
  // follows the first, or without a swizzle is `leading` away.
  uint32_t k_major(int row, int part) const {
    const uint32_t along = bits == 0 ? leading : 16;
    return at(row / 8 * stride + row % 8 * span * 16 + part * along);
  }

  // The chunk of the T rows that begin with T `group`, at k. A row of the swizzle has `span` of
  // them side by side, eight values of k one below the other. To the next rows it is `leading`, to
  // the next eight k `stride`; without a swizzle the other way round.
  uint32_t mn_major(int group, int k) const {
    const uint32_t rows = bits == 0 ? stride : leading, columns = bits == 0 ? leading : stride;
    return at(group / span * rows + group % span * 16 + k / 8 * columns + k % 8 * span * 16);
  }

 private:
  static uint32_t field(uint64_t descriptor, int shift) {
    return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4;
  }
  uint32_t at(uint32_t offset) const { return swizzled(start + offset, bits, phase); }
};

// --- numbers ------------------------------------------------------------------------------------

template <class F> void widen(const uint8_t* bytes, int count, double* out) {
  for (int i = 0; i < count; ++i) {
    F x;
    std::memcpy(&x, bytes + i * sizeof(F), sizeof(F));
    out[i] = to_float(x);
  }
}

struct Decoded {
  float e4m3[256], e5m2[256];
  Decoded() {
    for (int i = 0; i < 256; ++i) {
      e4m3[i] = to_float(E4M3{{static_cast<uint8_t>(i)}});
      e5m2[i] = to_float(E5M2{{static_cast<uint8_t>(i)}});
    }
  }
};
const Decoded kDecoded;

// `size` bytes of elements, all of them, one behind the other.
void decode(int type, const uint8_t* bytes, int size, double* out) {
  switch (type) {
    case Type::kF16: return widen<F16>(bytes, size / 2, out);
    case Type::kBF16: return widen<BF16>(bytes, size / 2, out);
    case Type::kTF32:  // the 13 lowest bits are not read
      for (int i = 0; i < size / 4; ++i) {
        uint32_t word;
        std::memcpy(&word, bytes + 4 * i, 4);
        out[i] = bits_as<float>(word & 0xffffe000u);
      }
      return;
    case Type::kS8:
      for (int i = 0; i < size; ++i) out[i] = static_cast<int8_t>(bytes[i]);
      return;
    case Type::kU8: std::copy_n(bytes, size, out); return;
    default: {
      const float* table = type == Type::kE4M3 ? kDecoded.e4m3 : kDecoded.e5m2;
      for (int i = 0; i < size; ++i) out[i] = table[bytes[i]];
    }
  }
}

// --- fragments ----------------------------------------------------------------------------------

// 16 rows of A, from chunks: K-major they lie as they are wanted.
template <int kK>
void a_from_chunks(int type, const uint8_t* bytes, bool mn_major, double (*a)[kK]) {
  if (!mn_major) return decode(type, bytes, 2 * kBlockBytes, a[0]);
  double column[kK][kBlock];
  for (int half = 0; half < 2; ++half) {
    decode(type, bytes + half * kBlockBytes, kBlockBytes, column[0]);
    for (int k = 0; k < kK; ++k) {
      for (int row = 0; row < kBlock; ++row) a[kBlock * half + row][k] = column[k][row];
    }
  }
}

template <int kK>
void a_from_registers(int type, const uint32_t* const* registers, double (*a)[kK]) {
  constexpr int kPer = kK / 8;  // elements in a register of a lane
  double value[kLanes * kPer];
  for (int r = 0; r < 4; ++r) {
    decode(type, reinterpret_cast<const uint8_t*>(registers[r]), kLanes * 4, value);
    for (int i = 0; i < kLanes * kPer; ++i) {
      const int lane = i / kPer, e = i % kPer;
      a[lane / 4 + 8 * (r % 2)][lane % 4 * kPer + e + 4 * kPer * (r / 2)] = value[i];
    }
  }
}

// 8 columns of B, as rows along n: MN-major they lie as they are wanted.
template <int kK>
void b_from_chunks(int type, const uint8_t* bytes, bool mn_major, double (*b)[kBlock]) {
  if (mn_major) return decode(type, bytes, kBlockBytes, b[0]);
  double row[kBlock][kK];
  decode(type, bytes, kBlockBytes, row[0]);
  for (int k = 0; k < kK; ++k) {
    for (int n = 0; n < kBlock; ++n) b[k][n] = row[n][k];
  }
}

double d_as_double(int type, uint32_t word) {
  if (type == Type::kF32) return bits_as<float>(word);
  return static_cast<int32_t>(word);
}

uint32_t d_from_double(const WgmmaShape& shape, double x) {
  if (shape.d == Type::kF32) return bits_as<uint32_t>(narrow<float>(x));
  if (shape.satfinite) x = std::clamp(x, double(INT32_MIN), double(INT32_MAX));
  return static_cast<uint32_t>(static_cast<int64_t>(x));  // wraps, where it still has to
}

// 16 x 8 of D: two columns a lane, the lanes one behind the other as the rows are. In f32 and s32
// registers 2 h and 2 h + 1 hold the even and the odd columns of half h, 8 rows; in f16 they are
// the halves of register h.
void load_d(int type, const uint32_t* const* d, double (*c)[kBlock]) {
  for (int half = 0; half < 2; ++half) {
    double* out = c[8 * half];
    if (type != Type::kF16) {
      const uint32_t *even = d[2 * half], *odd = d[2 * half + 1];
      for (int lane = 0; lane < kLanes; ++lane) {
        out[2 * lane] = d_as_double(type, even[lane]);
        out[2 * lane + 1] = d_as_double(type, odd[lane]);
      }
    } else {
      widen<F16>(reinterpret_cast<const uint8_t*>(d[half]), 2 * kLanes, out);
    }
  }
}

void store_d(const WgmmaShape& shape, const double (*c)[kBlock], uint32_t* const* d) {
  for (int half = 0; half < 2; ++half) {
    const double* from = c[8 * half];
    if (shape.d != Type::kF16) {
      uint32_t *even = d[2 * half], *odd = d[2 * half + 1];
      for (int lane = 0; lane < kLanes; ++lane) {
        even[lane] = d_from_double(shape, from[2 * lane]);
        odd[lane] = d_from_double(shape, from[2 * lane + 1]);
      }
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t high = narrow<F16>(from[2 * lane + 1]).bits;
        d[half][lane] = narrow<F16>(from[2 * lane]).bits | high << 16;
      }
    }
  }
}

// --- the product --------------------------------------------------------------------------------

// As wide as the host's registers, and four rows at a time, so that there are sums enough to keep
// its units busy: a compiler asked for -O2 would not do it by itself.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef double Vector __attribute__((vector_size(kVectorBytes)));
constexpr int kVectors = kBlock * 8 / kVectorBytes, kRows = 4;
static_assert(kVectors <= 4, "all of them are unrolled");

template <int kK>
void multiply_block(const double (*a)[kK], const Vector (*b)[kVectors], Vector (*c)[kVectors]) {
  for (int row = 0; row < 16; row += kRows) {
    Vector sum[kRows][kVectors];
    std::memcpy(sum, c[row], sizeof sum);
    for (int k = 0; k < kK; ++k) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sum[r][n] += a[row + r][k] * b[k][n];
      }
    }
    std::memcpy(c[row], sum, sizeof sum);
  }
}

constexpr int kKept = 13;          // bits below the largest
constexpr int kNotFinite = 4096;   // the exponent of infinity and NaN: above all others
constexpr int kOfZero = -1023;     // below them, also beside another factor

int exponent_of(double x) {
  const int exponent = static_cast<int>(bits_as<uint64_t>(x) >> 52 & 0x7ff) - 1023;
  return exponent == 1024 ? kNotFinite : exponent;
}

double power_of_two(int exponent) {
  return bits_as<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// A sum in units of the last bit that is kept of the largest term, cut off once more.
int cut_off(int sum) {
  const int size = std::abs(sum), bits = 32 - __builtin_clz(size | 1);
  const int lost = std::max(bits - (kKept + 1), 0), kept = size >> lost << lost;
  return sum < 0 ? -kept : kept;
}

template <int kK>
void multiply_bytes(const double (*a)[kK], const double (*b)[kBlock], double (*c)[kBlock]) {
  int of_a[16][kK], of_b[kK][kBlock];
  for (int i = 0; i < 16 * kK; ++i) of_a[i / kK][i % kK] = exponent_of(a[i / kK][i % kK]);
  for (int i = 0; i < kK * kBlock; ++i) {
    of_b[i / kBlock][i % kBlock] = exponent_of(b[i / kBlock][i % kBlock]);
  }
  for (int row = 0; row < 16; ++row) {
    int top[kBlock], sum[kBlock];
    double unit[kBlock];
    for (int n = 0; n < kBlock; ++n) top[n] = exponent_of(c[row][n]);
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kBlock; ++n) top[n] = std::max(top[n], of_a[row][k] + of_b[k][n]);
    }
    for (int n = 0; n < kBlock; ++n) {
      const bool plain = top[n] > kOfZero / 2 && top[n] < kNotFinite / 2;
      unit[n] = plain ? power_of_two(kKept - top[n]) : 0.0;
      sum[n] = plain ? static_cast<int>(c[row][n] * unit[n]) : 0;
    }
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kBlock; ++n) {
        const double term = a[row][k] * b[k][n];
        if (unit[n] != 0) sum[n] += static_cast<int>(term * unit[n]);
        else c[row][n] += term;  // zeros, or what is no number
      }
    }
    for (int n = 0; n < kBlock; ++n) {
      if (unit[n] != 0) c[row][n] = cut_off(sum[n]) / unit[n];
    }
  }
}

template <int kK>
void multiply(const WgmmaShape& shape, const uint32_t* const* a_registers, const uint8_t* a_bytes,
              bool a_mn_major, const uint8_t* b_bytes, bool b_mn_major, bool accumulate,
              bool negate, uint32_t* const* d) {
  alignas(64) double a[16][kK], b[kK][kBlock], c[16][kBlock];
  if (a_registers != nullptr) a_from_registers<kK>(shape.a, a_registers, a);
  else a_from_chunks<kK>(shape.a, a_bytes, a_mn_major, a);
  for (int i = 0; negate && i < 16 * kK; ++i) a[i / kK][i % kK] = -a[i / kK][i % kK];
  const int registers = shape.accumulators() / (shape.n / kBlock);  // of D in a block
  for (int block = 0; block < shape.n / kBlock; ++block, d += registers) {
    b_from_chunks<kK>(shape.b, b_bytes + block * kBlockBytes, b_mn_major, b);
    if (accumulate) load_d(shape.d, d, c);
    else std::memset(c, 0, sizeof c);
    if (is_eight(shape.a) && shape.d == Type::kF32) {
      multiply_bytes<kK>(a, b, c);
    } else {
      multiply_block<kK>(a, reinterpret_cast<Vector(*)[kVectors]>(b),
                         reinterpret_cast<Vector(*)[kVectors]>(c));
    }
    store_d(shape, c, d);
  }
}

}  // namespace

bool wgmma_shape(const string& name, WgmmaShape& shape) {
  std::vector<string> part = parts_of(name);
  shape.satfinite = part.size() == 7 && part[3] == "satfinite";
  if (shape.satfinite) part.erase(part.begin() + 3);
  if (part.size() != 6 || part[0] != "wgmma" || part[1] != "mma_async") return false;
  if (std::sscanf(part[2].c_str(), "m64n%3dk%2d", &shape.n, &shape.k) != 2) return false;
  if (part[2] != "m64n" + std::to_string(shape.n) + "k" + std::to_string(shape.k)) return false;
  if (!type_of(part[3], shape.d) || !type_of(part[4], shape.a) || !type_of(part[5], shape.b)) {
    return false;
  }
  shape.element_bytes = bytes_of(shape.a);
  const bool fits = shape.n >= 8 && shape.n <= kMostN && shape.n % 8 == 0;
  return fits && shape.k == kMostK / shape.element_bytes && allowed(shape);
}

// Every shape has 32 bytes along K, and what is MN-major 8 elements a chunk.
void wgmma_chunks(const WgmmaShape& /*shape*/, uint64_t descriptor, bool mn_major, int extent,
                  int rows_from, std::vector<uint32_t>& chunks) {
  const Operand operand(descriptor);
  const int from = std::max(rows_from, 0), to = rows_from < 0 ? extent : rows_from + 16;
  chunks.clear();
  chunks.reserve((to - from) * 2);
  for (int row = from; row < to; row += kBlock) {
    for (int i = 0; i < 16; ++i) {
      chunks.push_back(mn_major ? operand.mn_major(row / kBlock, i)
                                : operand.k_major(row + i / 2, i % 2));
    }
  }
}

void wgmma_multiply(const WgmmaShape& shape, const uint32_t* const* a_registers,
                    const uint8_t* a_bytes, bool a_mn_major, const uint8_t* b_bytes,
                    bool b_mn_major, bool accumulate, int scale_a, int scale_b,
                    uint32_t* const* d) {
  const auto run = shape.k == 8 ? multiply<8> : shape.k == 16 ? multiply<16> : multiply<32>;
  run(shape, a_registers, a_bytes, a_mn_major, b_bytes, b_mn_major, accumulate,
      scale_a * scale_b < 0, d);
}

}  // namespace fw
