// The launch plan (lower/launch_plan.py) as the launcher holds it. encode.py writes what Reader reads.

#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fw {

namespace ffi = tvm::ffi;
using std::size_t;
using std::string;
using std::vector;

enum Operator { kNumber, kDim, kAdd, kSubtract, kMultiply, kCeilDiv, kFloorDiv, kMod, kMin, kMax };

struct Token {
  Operator kind;
  int64_t value;
};

inline int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) TVM_FFI_THROW(ValueError) << "a size of this kernel is divided by a dimension that is 0";
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
}

inline int64_t apply(Operator kind, int64_t a, int64_t b) {
  switch (kind) {
    case kAdd: return a + b;
    case kSubtract: return a - b;
    case kMultiply: return a * b;
    case kCeilDiv: return -floor_div(-a, b);
    case kFloorDiv: return floor_div(a, b);
    case kMod: return a - b * floor_div(a, b);
    case kMin: return a < b ? a : b;
    default: return a < b ? b : a;
  }
}

constexpr size_t kDepth = 16;  // encode.py refuses plans with deeper sizes, more axes or more dimensions
constexpr size_t kMaxAxes = 8;
constexpr size_t kMaxDims = 32;
constexpr size_t kMaxDevices = 64;

using Dims = std::array<int64_t, kMaxDims>;  // -1: not known yet

struct Size {
  vector<Token> tokens;

  bool is_dim() const { return tokens.size() == 1 && tokens[0].kind == kDim; }

  int64_t value(const Dims& dims) const {
    int64_t stack[kDepth];
    size_t top = 0;
    for (const Token& token : tokens) {
      if (token.kind == kNumber) {
        stack[top++] = token.value;
      } else if (token.kind == kDim) {
        stack[top++] = dims[token.value];
      } else {
        --top;
        stack[top - 1] = apply(token.kind, stack[top - 1], stack[top]);
      }
    }
    return stack[0];
  }
};

struct Axis {
  string label;
  Size size;
};

// For each axis of the caller's tensor, the plan's axes that it is made of, outermost first.
using Order = vector<vector<int64_t>>;

constexpr int64_t kFragmentRows = 128;  // FRAGMENT_ROWS of launch_plan.py

struct TensorPlan {
  string name, dtype;
  int64_t code, bits, vector_width;
  bool read, written, flat, fragments;
  vector<Axis> axes;
  std::array<Order, 2> orders;  // layout bhsd, layout bshd

  // Whether a caller may give more than the rows that count: those of whole tiles of fragments.
  bool may_be_padded(int64_t axis) const {
    return fragments && axis == static_cast<int64_t>(axes.size()) - 2;
  }
};

constexpr size_t kMapBytes = 128;  // sizeof(CUtensorMap)
constexpr size_t kMaxMapAxes = 5;

// A flat tensor's map has one axis more: the views that lie back to back in its memory.
inline size_t map_rank(const TensorPlan& tensor) { return tensor.axes.size() + tensor.flat; }

// A map for ranges (launch_plan.py, PlanMap) has two more: their strides are those of a row, and what is missing to
// 2^34 bytes. One for pages has one more: the pages' own axis counts rows.
constexpr uint64_t kRange = uint64_t{1} << 30, kRangeAxis = (uint64_t{1} << 31) - (1 << 16);
constexpr uint64_t kRangeStride = uint64_t{1} << 34;

struct MapPlan {
  size_t tensor;                            // which of the plan's
  int type, swizzle;                        // CUtensorMapDataType, CUtensorMapSwizzle
  bool optional;                            // zeros where TMA cannot load what the caller gives
  bool ranges;                              // ends where ranges of rows do
  bool pages;                               // the same of rows in the pages of the first axis
  std::array<uint32_t, kMaxMapAxes> box{};  // the last axis first, as the driver wants it
};

struct Plan {
  string entry, arch;
  int64_t threads, shared, stays, counter, heads, kv_heads;  // the last two: which dims these are, or -1
  vector<string> dims;
  vector<TensorPlan> tensors;
  vector<Size> grid;
  vector<MapPlan> maps;
};

class Reader {
 public:
  Reader(const ffi::Array<int64_t>& numbers, const ffi::Array<ffi::String>& words)
      : numbers_(numbers), words_(words) {}

  Plan plan() {
    Plan plan{word(), word(), number(), number(), number(),
              number(), number(), number(), {}, {}, {}, {}};
    for (int64_t n = number(); n > 0; --n) plan.dims.push_back(word());
    for (int64_t n = number(); n > 0; --n) plan.tensors.push_back(tensor());
    for (int64_t n = number(); n > 0; --n) plan.grid.push_back(size());
    for (int64_t n = number(); n > 0; --n) plan.maps.push_back(map(plan.tensors));
    return plan;
  }

 private:
  TensorPlan tensor() {
    TensorPlan tensor;
    tensor.name = word(), tensor.dtype = word();
    tensor.code = number(), tensor.bits = number(), tensor.vector_width = number();
    tensor.read = number(), tensor.written = number(), tensor.flat = number();
    tensor.fragments = number();
    for (int64_t n = number(); n > 0; --n) {
      string label = word();
      tensor.axes.push_back({label, size()});
    }
    for (Order& order : tensor.orders) {
      for (int64_t n = number(); n > 0; --n) {
        order.emplace_back();
        for (int64_t m = number(); m > 0; --m) order.back().push_back(number());
      }
    }
    return tensor;
  }
  MapPlan map(const vector<TensorPlan>& tensors) {
    MapPlan map;
    map.tensor = static_cast<size_t>(number());
    map.type = static_cast<int>(number()), map.swizzle = static_cast<int>(number());
    map.optional = number() != 0, map.ranges = number() != 0, map.pages = number() != 0;
    for (size_t a = map_rank(tensors[map.tensor]) + 2 * map.ranges + map.pages; a-- > 0;) {
      map.box[a] = static_cast<uint32_t>(number());
    }
    return map;
  }
  Size size() {
    Size size;
    for (int64_t n = number(); n > 0; --n) {
      auto kind = static_cast<Operator>(number());
      size.tokens.push_back({kind, number()});
    }
    return size;
  }
  int64_t number() { return numbers_[at_++]; }
  string word() { return words_[word_at_++]; }

  const ffi::Array<int64_t>& numbers_;
  const ffi::Array<ffi::String>& words_;
  int64_t at_ = 0, word_at_ = 0;
};

}  // namespace fw
