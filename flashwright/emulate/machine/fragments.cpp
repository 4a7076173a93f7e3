// wmma, and the shapes and types of mma.sync that matrix.cpp has not: fp64, four bits, one bit.
//
// How a fragment of wmma lies in a warp PTX leaves open. Here it lies as in mma.sync: a matrix is cut into tiles, in A of 8
// x 4E, in B of 4E x 8 (E elements to a register), in C of 8 x 8; with g = lane / 4, t = lane % 4 a lane has in each tile
// of A row g, columns t E to t E + E - 1, of B the same with rows and columns exchanged, of C row g, columns 2 t and 2 t + 1.
// The tiles of a column come behind each other, then those of the next column. Where there are more registers than that,
// the matrix comes again.
//
// Products are summed in double and rounded once, as in matrix.cpp; fp64 by fma in the order of k.
#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "run.h"

namespace fw {
namespace {

// In the order of encode.py's ELEMENTS.
enum Element : int32_t { kF16, kBF16, kTF32, kF32, kF64, kS8, kU8, kS4, kU4, kB1, kS32 };
constexpr int kBits[] = {16, 16, 32, 32, 64, 8, 8, 4, 4, 1, 32};
enum Part : int32_t { kA, kB, kC };

struct WarpMatrix {  // of a matrix of rows x columns
  Part part;
  Element element;
  int rows, columns, count;  // of registers
  const int32_t* slots;

  int bits() const { return kBits[element]; }
  int width() const { return element == kF64 ? 8 : 4; }  // of a register
  int each() const { return part == kC ? 2 : 8 * width() / bits(); }  // elements of a lane in a tile
  int tall() const { return part == kB ? 4 * each() : 8; }
  int broad() const { return part == kA ? 4 * each() : 8; }
  int tiles() const { return rows / tall() * (columns / broad()); }

  void place(int tile, int lane, int e, int& row, int& column) const {
    int down = rows / tall(), g = lane / 4, along = lane % 4 * each() + e;
    row = tile % down * tall() + (part == kB ? along : g);
    column = tile / down * broad() + (part == kB ? g : along);
  }

  // Where an element lies: the register, and its first bit.
  void find(int tile, int e, int copy, int& which, int& bit) const {
    int number = (copy * tiles() + tile) * each() + e, many = 8 * width() / bits();
    which = number / many;
    bit = number % many * bits();
  }

  int copies() const { return count * (8 * width() / bits()) / (tiles() * each()); }

  uint64_t raw(Context& c, int lane, int which, int bit) const {
    uint64_t word = 0;
    std::memcpy(&word, c.warp->registers + slots[which] + lane * width(), width());
    return word >> bit & (bits() == 64 ? ~uint64_t{0} : (uint64_t{1} << bits()) - 1);
  }

  void set(Context& c, int lane, int which, int bit, uint64_t value) const {
    uint8_t* at = c.warp->registers + slots[which] + lane * width();
    uint64_t word = 0, field = bits() == 64 ? ~uint64_t{0} : (uint64_t{1} << bits()) - 1;
    std::memcpy(&word, at, width());
    word = (word & ~(field << bit)) | (value & field) << bit;
    std::memcpy(at, &word, width());
  }

  // body(lane, row, column, register, bit) for every element; of all copies, or of the first.
  template <class F>
  void each_element(bool all, F&& body) const {
    for (int copy = 0; copy < (all ? copies() : 1); ++copy) {
      for (int tile = 0; tile < tiles(); ++tile) {
        for (int lane = 0; lane < kLanes; ++lane) {
          for (int e = 0; e < each(); ++e) {
            int row, column, which, bit;
            place(tile, lane, e, row, column);
            find(tile, e, copy, which, bit);
            body(lane, row, column, which, bit);
          }
        }
      }
    }
  }
};

double number_of(Element element, uint64_t raw) {
  switch (element) {
    case kF16: return to_float(F16{{static_cast<uint16_t>(raw)}});
    case kBF16: return to_float(BF16{{static_cast<uint16_t>(raw)}});
    case kTF32: return bits_as<float>(static_cast<uint32_t>(raw) & 0xffffe000u);
    case kF32: return bits_as<float>(static_cast<uint32_t>(raw));
    case kF64: return bits_as<double>(raw);
    case kS8: return static_cast<int8_t>(raw);
    case kS4: return static_cast<int8_t>(raw << 4) >> 4;
    case kS32: return static_cast<int32_t>(raw);
    default: return static_cast<double>(raw);
  }
}

uint64_t raw_of(Element element, double x, bool saturates) {
  switch (element) {
    case kF16: return narrow<F16>(x).bits;
    case kF32: return bits_as<uint32_t>(narrow<float>(x));
    case kF64: return bits_as<uint64_t>(canonical(x));
    default: break;
  }
  if (saturates) x = x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x;
  return static_cast<uint32_t>(static_cast<int64_t>(x));  // wraps, where it still has to
}

bool whole(Context& c, uint32_t mask) {
  if (mask == kAll) return true;
  c.machine->find(c, kDivergent, -1, mask);
  return false;
}

// --- loads and stores -----------------------------------------------------------------------------

enum Where : int32_t { kInGlobal, kInShared, kInGeneric };

uint8_t* bytes_at(Context& c, int32_t space, int lane, uint64_t address, int bytes, bool write) {
  if (space == kInGeneric) return generic(c, lane, address, bytes, write);
  if (space == kInShared) return c.machine->shared(c, lane, address % kWindow, bytes, write);
  return c.machine->global(c, lane, address, bytes, write);
}

// Operands: part, element, rows, columns, whether rows lie behind each other, space, address, slot of the stride in
// elements, number of registers, their slots.
struct Moving {
  WarpMatrix fragment;
  bool row_major;
  int32_t space;
  const int32_t *address, *stride;

  explicit Moving(const int32_t* o)
      : fragment{static_cast<Part>(o[0]), static_cast<Element>(o[1]), o[2], o[3], o[10], o + 11},
        row_major(o[4]),
        space(o[5]),
        address(o + 6),
        stride(o + 9) {}

  // The bits from the beginning of the matrix to an element.
  uint64_t offset(Context& c, int lane, int row, int column) const {
    uint64_t by = lanes<uint32_t>(c, *stride)[lane];
    return (row_major ? row * by + column : column * by + row) * fragment.bits();
  }
};

// A matrix begins at a multiple of its fragment's size, as PTX has it: 32 bytes for 16 elements of two bytes. Its rows lie
// multiples of 16 bytes apart, or of that size.
bool is_aligned(Context& c, const Moving& moving) {
  const WarpMatrix& f = moving.fragment;
  uint64_t size = f.count * f.width(), row = std::min<uint64_t>(size, 16);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint64_t address = address_of(c, moving.address, lane), stride = lanes<uint32_t>(c, *moving.stride)[lane];
    if (address % size == 0 && stride * f.bits() / 8 % row == 0) continue;
    c.machine->find(c, kMisaligned, lane, address, -1, static_cast<int64_t>(size), static_cast<int64_t>(stride));
    return false;
  }
  return true;
}

void load_fragment(Context& c, const int32_t* o, uint32_t mask) {
  Moving moving(o);
  const WarpMatrix& f = moving.fragment;
  if (!whole(c, mask) || !is_aligned(c, moving)) return;
  f.each_element(true, [&](int lane, int row, int column, int which, int bit) {
    uint64_t from = moving.offset(c, lane, row, column), value = 0;
    int bytes = f.bits() < 8 ? 1 : f.bits() / 8;
    const uint8_t* data =
        bytes_at(c, moving.space, lane, address_of(c, moving.address, lane) + from / 8, bytes, false);
    if (data != nullptr) std::memcpy(&value, data, bytes);
    f.set(c, lane, which, bit, value >> from % 8);
  });
  c.machine->counts[c.instruction].bytes += int64_t{f.rows} * f.columns * f.bits() / 8;
}

void store_fragment(Context& c, const int32_t* o, uint32_t mask) {
  Moving moving(o);
  const WarpMatrix& f = moving.fragment;
  if (!whole(c, mask) || !is_aligned(c, moving)) return;
  f.each_element(false, [&](int lane, int row, int column, int which, int bit) {
    uint64_t to = moving.offset(c, lane, row, column), value = f.raw(c, lane, which, bit);
    int bytes = f.bits() / 8;
    uint8_t* data = bytes_at(c, moving.space, lane, address_of(c, moving.address, lane) + to / 8, bytes, true);
    if (data != nullptr) std::memcpy(data, &value, bytes);
  });
  c.machine->counts[c.instruction].bytes += int64_t{f.rows} * f.columns * f.bits() / 8;
}

// --- products -------------------------------------------------------------------------------------

enum Combining : int32_t { kTimes, kXorPopc, kAndPopc };

// Operands: m, n, k, elements of D, A, B, C, whether it saturates, how bits are combined, numbers of registers of D, A, B,
// C, then their slots.
void product(Context& c, const int32_t* o, uint32_t mask) {
  if (!whole(c, mask)) return;
  int m = o[0], n = o[1], k = o[2];
  auto element = [&](int which) { return static_cast<Element>(o[3 + which]); };
  const int32_t* slots = o + 13;
  WarpMatrix d{kC, element(0), m, n, o[9], slots};
  WarpMatrix a{kA, element(1), m, k, o[10], slots + o[9]};
  WarpMatrix b{kB, element(2), k, n, o[11], slots + o[9] + o[10]};
  WarpMatrix before{kC, element(3), m, n, o[12], slots + o[9] + o[10] + o[11]};
  std::vector<double> left(m * k), right(k * n), sum(m * n);
  auto read = [&](const WarpMatrix& f, std::vector<double>& to) {
    f.each_element(false, [&](int lane, int row, int column, int which, int bit) {
      to[row * f.columns + column] = number_of(f.element, f.raw(c, lane, which, bit));
    });
  };
  read(a, left), read(b, right), read(before, sum);
  bool wide = element(0) == kF64;
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      double& total = sum[row * n + column];
      for (int i = 0; i < k; ++i) {
        double x = left[row * k + i], y = right[i * n + column];
        if (wide) total = std::fma(x, y, total);
        else if (o[8] == kXorPopc) total += x != y;
        else total += x * y;  // of bits their conjunction
      }
    }
  }
  d.each_element(false, [&](int lane, int row, int column, int which, int bit) {
    d.set(c, lane, which, bit, raw_of(d.element, sum[row * n + column], o[7]));
  });
}

}  // namespace

void add_fragments(Table& table) {
  table["wmma.load"] = load_fragment;
  table["wmma.store"] = store_fragment;
  table["product"] = product;
}

}  // namespace fw
