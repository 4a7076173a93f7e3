// One call: its tensors held against the plan, its dimensions read off them, its parameters packed.
//
// Every complaint names the tensor, what was found and what was expected, and comes before anything runs.

#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <sstream>

#include "driver.h"
#include "plan.h"

namespace fw {

// --- words for complaints ---------------------------------------------------------------------

inline string shape_of(int axes, const int64_t* values) {
  std::ostringstream text;
  text << "(";
  for (int i = 0; i < axes; ++i) text << (i ? ", " : "") << values[i];
  text << (axes == 1 ? ",)" : ")");
  return text.str();
}

inline string shape_of(const DLTensor& tensor, const int64_t* values) { return shape_of(tensor.ndim, values); }

inline string device_of(DLDevice device) {
  string id = std::to_string(device.device_id);
  if (device.device_type == kDLCPU) return "the CPU";
  if (device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged) return "cuda:" + id;
  return "device type " + std::to_string(device.device_type) + ":" + id;
}

inline string axes_of(const TensorPlan& tensor, const Order& order) {
  string text;
  for (const auto& parts : order) {
    text += text.empty() ? "" : ", ";
    for (int64_t p : parts) text += tensor.axes[p].label;
  }
  return "(" + text + ")";
}

#define FW_REFUSE(kind, tensor) TVM_FFI_THROW(kind) << "`" << (tensor).name << "` "

// --- the call ---------------------------------------------------------------------------------

inline char* address_of(const DLTensor& tensor) {
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

inline uint64_t elements_of(const DLTensor& tensor) {
  uint64_t count = 1;
  for (int a = 0; a < tensor.ndim; ++a) count *= tensor.shape[a];
  return count;
}

struct Given {
  const DLTensor* tensor = nullptr;  // while the call is checked; what is below stays
  bool there = false;
  uint64_t elements = 0;
  int axes = 0;
  std::array<int64_t, kMaxAxes> shape{}, strides{};  // the caller's axes
  std::array<int64_t, kMaxAxes> parts{};             // the plan's strides
};

using Addresses = vector<char*>;  // of the plan's tensors; null if not given

// TMA's unit in bytes: addresses and strides are multiples of it. The vectors of tensors that have maps are
// at least as wide (encode.py sees to that), so that what fits the plan fits TMA.
constexpr uint64_t kTmaUnit = 16, kFarthest = uint64_t{1} << 40;

// A call whose tensors have been checked. Their memory may be other memory at each launch.
class Call {
  // As aligned as CUDA 13 has its maps (before, it was 64), and padded to as much.
  struct alignas(kMapBytes) Block {
    char bytes[kMapBytes];
  };

 public:
  Call(const Plan& plan, int layout, const ffi::AnyView* args) : plan_(plan), layout_(layout) {
    dims_.fill(-1);
    given_.resize(plan.tensors.size()), addresses_.resize(plan.tensors.size());
    for (int pass = 0; pass < 2; ++pass) {  // inputs say what the sizes are, outputs must fit them
      for (size_t i = 0; i < plan.tensors.size(); ++i) {
        if (plan.tensors[i].read == (pass == 0)) take(i, args[i]);
      }
    }
    take_dims(args + plan.tensors.size());
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      if (given_[i].there) check_shape(i), check_address(i, addresses_[i]);
    }
    check_heads();
    pack();
    for (Given& given : given_) given.tensor = nullptr;
  }

  int device() const { return device_.device_id; }
  void* stream() const { return TVMFFIEnvGetStream(kDLCUDA, device_.device_id); }
  const Addresses& addresses() const { return addresses_; }  // of the tensors that were checked

  // Raises what the constructor does for tensors whose memory begins at the wrong place.
  void check_addresses(const Addresses& addresses) const {
    for (size_t i = 0; i < given_.size(); ++i) {
      if (given_[i].there) check_address(i, addresses[i]);
    }
  }

  // The parameters of a launch with the tensors and the counter at these addresses, until this thread's next
  // one. In the device's context.
  template <typename Zeros>
  void* parameters(const Addresses& addresses, void* counter, Zeros&& zeros) const {
    thread_local vector<Block> made;
    made = packed_;
    for (size_t i = 0; i < given_.size(); ++i) {
      std::memcpy(reinterpret_cast<char*>(made.data()) + slots_[i], &addresses[i], sizeof(char*));
    }
    if (plan_.counter) std::memcpy(reinterpret_cast<char*>(made.data()) + counter_, &counter, sizeof counter);
    encode(addresses, made, zeros);
    return made.data();
  }

  // Blocks in x, y and z; false where there is nothing to do. Of a kernel that stays, all of them in x.
  bool grid(unsigned blocks[3]) const {
    if (plan_.stays) return in_a_row(blocks);
    constexpr int64_t most[3] = {INT_MAX, 65535, 65535};
    bool some = true;
    for (size_t i = 0; i < 3; ++i) {
      int64_t count = i < plan_.grid.size() ? plan_.grid[i].value(dims_) : 1;
      if (count > most[i]) {
        TVM_FFI_THROW(ValueError) << "this problem needs " << count << " blocks along axis " << i
                                  << " of the grid; CUDA allows " << most[i];
      }
      some = some && count > 0;
      blocks[i] = static_cast<unsigned>(count);
    }
    return some;
  }

 private:
  bool in_a_row(unsigned blocks[3]) const {
    constexpr int64_t most = 1 << 30;  // the kernel counts them
    int64_t count = 1;
    for (const Size& size : plan_.grid) {
      count *= size.value(dims_);
      if (count > most) {
        TVM_FFI_THROW(ValueError) << "this problem needs " << count << " blocks; the kernel counts to "
                                  << most;
      }
    }
    blocks[0] = static_cast<unsigned>(count), blocks[1] = blocks[2] = 1;
    return count > 0;
  }

  void take(size_t i, const ffi::AnyView& arg) {
    const TensorPlan& plan = plan_.tensors[i];
    if (arg.type_index() == ffi::TypeIndex::kTVMFFINone) {
      if (plan.read) TVM_FFI_THROW(TypeError) << "the input `" << plan.name << "` is missing";
      return;
    }
    auto pointer = arg.try_cast<DLTensor*>();
    if (!pointer) FW_REFUSE(TypeError, plan) << "must be a tensor, not " << arg.GetTypeKey();
    Given& given = given_[i];
    given.tensor = *pointer, given.there = true;
    given.elements = elements_of(*given.tensor), addresses_[i] = address_of(*given.tensor);
    check_kind(plan, *given.tensor);
    const Order& order = plan.orders[layout_];
    if (!plan.flat && given.tensor->ndim != static_cast<int>(order.size())) {
      FW_REFUSE(ValueError, plan) << "must have " << order.size() << " axes " << axes_of(plan, order)
                                  << "; its shape is " << shape_of(*given.tensor, given.tensor->shape);
    }
    read_strides(plan, given);
    if (!plan.flat) bind(i);
  }

  void check_kind(const TensorPlan& plan, const DLTensor& tensor) {
    DLDevice device = tensor.device;
    if (device.device_type != kDLCUDA && device.device_type != kDLCUDAManaged) {
      FW_REFUSE(ValueError, plan) << "must be on a CUDA device; it is on " << device_of(device);
    }
    if (device_owner_ == nullptr) {
      device_ = device, device_owner_ = plan.name.c_str();
    } else if (device.device_id != device_.device_id) {
      FW_REFUSE(ValueError, plan) << "is on " << device_of(device) << ", but `" << device_owner_
                                  << "` is on " << device_of(device_);
    }
    DLDataType type = tensor.dtype;
    if (type.code != plan.code || type.bits != plan.bits || type.lanes != 1) {
      FW_REFUSE(TypeError, plan) << "must be " << plan.dtype << "; it is "
                                 << ffi::DLDataTypeToString(type);
    }
  }

  void read_strides(const TensorPlan& plan, Given& given) {
    const DLTensor& tensor = *given.tensor;
    int64_t dense = 1;
    given.axes = std::min<int>(tensor.ndim, kMaxAxes);
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      int64_t stride = tensor.strides ? tensor.strides[i] : dense;
      if (i < given.axes) given.shape[i] = tensor.shape[i], given.strides[i] = stride;
      if (plan.flat && tensor.shape[i] > 1 && stride != dense) {
        FW_REFUSE(ValueError, plan) << "must be contiguous; its strides are "
                                    << shape_of(tensor, tensor.strides);
      }
      dense *= tensor.shape[i];
    }
  }

  // Axes whose size is a dimension say how large it is. Where a head axis is split in two, one part is a
  // number (encode.py sees to that), and the other the rest.
  void bind(size_t i) {
    const TensorPlan& plan = plan_.tensors[i];
    const DLTensor& tensor = *given_[i].tensor;
    const Order& order = plan.orders[layout_];
    for (size_t c = 0; c < order.size(); ++c) {
      int64_t rest = tensor.shape[c], whole = rest, dim = -1;
      string label;
      for (int64_t p : order[c]) {
        label += plan.axes[p].label;
        if (plan.may_be_padded(p)) {
          continue;  // another tensor has this size
        } else if (plan.axes[p].size.is_dim()) {
          dim = plan.axes[p].size.tokens[0].value;
        } else if (order[c].size() > 1) {
          int64_t part = plan.axes[p].size.value(dims_);
          if (part <= 0 || rest % part != 0) {
            FW_REFUSE(ValueError, plan) << "has " << whole << " positions on axis " << label
                                        << ", which is not a multiple of " << part;
          }
          rest /= part;
        }
      }
      if (dim < 0) continue;
      if (whole > INT_MAX) {
        FW_REFUSE(ValueError, plan) << "is too long on axis " << label << ": " << whole;
      }
      if (dim == plan_.kv_heads && order[c].size() > 1 && split_owner_ == nullptr) {
        split_heads_ = whole, split_owner_ = &plan;
      }
      if (dims_[dim] < 0) {
        dims_[dim] = rest, owner_[dim] = &plan;
      } else if (dims_[dim] != rest) {
        FW_REFUSE(ValueError, plan) << "has " << plan_.dims[dim] << " = " << rest << " (axis " << label
                                    << " of " << shape_of(tensor, tensor.shape) << "), but `"
                                    << owner_[dim]->name << "` has " << plan_.dims[dim] << " = "
                                    << dims_[dim];
      }
    }
  }

  void take_dims(const ffi::AnyView* args) {
    // Heads that are split into kv heads and groups: no axis of the plan is as long as `heads`.
    if (plan_.heads >= 0 && dims_[plan_.heads] < 0 && split_owner_ != nullptr) {
      dims_[plan_.heads] = split_heads_, owner_[plan_.heads] = split_owner_;
    }
    for (size_t d = 0; d < plan_.dims.size(); ++d) {
      if (args[d].type_index() != ffi::TypeIndex::kTVMFFINone) {
        int64_t value = args[d].cast<int64_t>();
        if (value < 0 || value > INT_MAX) {
          TVM_FFI_THROW(ValueError) << "`" << plan_.dims[d] << "` must lie between 0 and " << INT_MAX
                                    << ", not " << value;
        }
        if (dims_[d] >= 0 && dims_[d] != value) {
          TVM_FFI_THROW(ValueError) << "`" << plan_.dims[d] << "` is given as " << value << ", but `"
                                    << owner_[d]->name << "` has " << dims_[d];
        }
        dims_[d] = value;
      }
      if (dims_[d] < 0 && static_cast<int64_t>(d) == plan_.kv_heads && plan_.heads >= 0) {
        dims_[d] = dims_[plan_.heads];  // where no tensor has them, every head has its own
      }
      if (dims_[d] < 0) {
        TVM_FFI_THROW(TypeError) << "no tensor says what `" << plan_.dims[d] << "` is: give it by name, "
                                 << plan_.dims[d] << "=...";
      }
    }
  }

  void check_shape(size_t i) {
    const TensorPlan& plan = plan_.tensors[i];
    const DLTensor& tensor = *given_[i].tensor;
    const Order& order = plan.orders[layout_];
    for (size_t c = 0; c < order.size() && !plan.flat; ++c) {
      int64_t wanted = 1;
      for (int64_t p : order[c]) wanted *= plan.axes[p].size.value(dims_);
      int64_t padded = (wanted + kFragmentRows - 1) / kFragmentRows * kFragmentRows;
      bool more = plan.may_be_padded(order[c].back()) && tensor.shape[c] == padded;
      if (tensor.shape[c] != wanted && !more) {
        FW_REFUSE(ValueError, plan) << "must be " << wanted << " wide on axis "
                                    << plan.axes[order[c][0]].label << ", not " << tensor.shape[c]
                                    << "; its shape is " << shape_of(tensor, tensor.shape);
      }
      if (plan.written && given_[i].elements && wanted > 1 && given_[i].strides[c] == 0) {
        FW_REFUSE(ValueError, plan) << "is written, but its elements share memory: its strides are "
                                    << shape_of(tensor, given_[i].strides.data());
      }
    }
  }

  void check_address(size_t i, const char* address) const {
    const TensorPlan& plan = plan_.tensors[i];
    int64_t bytes = plan.vector_width * plan.bits / 8;
    if (given_[i].elements != 0 && reinterpret_cast<uintptr_t>(address) % bytes != 0) {
      FW_REFUSE(ValueError, plan) << "must begin at a multiple of " << bytes
                                  << " bytes: give it a copy (contiguous memory of its own)";
    }
  }

  void check_heads() {
    if (plan_.heads < 0 || plan_.kv_heads < 0) return;
    int64_t heads = dims_[plan_.heads], kv_heads = dims_[plan_.kv_heads];
    if (heads == 0 || (kv_heads > 0 && heads % kv_heads == 0)) return;
    TVM_FFI_THROW(ValueError) << "kv_heads = " << kv_heads << " must divide heads = " << heads;
  }

  // The parameter struct: room for the maps, for each tensor its address and strides, room for the
  // counter's address, then the dimensions as int32.
  void pack() {
    used_ = plan_.maps.size() * kMapBytes;
    size_t bytes = used_ + plan_.counter * sizeof(void*) + plan_.dims.size() * sizeof(int32_t);
    for (const TensorPlan& plan : plan_.tensors) bytes += (1 + plan.axes.size()) * sizeof(int64_t);
    packed_.resize((bytes + sizeof(Block) - 1) / sizeof(Block));
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const TensorPlan& plan = plan_.tensors[i];
      Given& given = given_[i];
      slots_.push_back(used_);
      push<void*>(nullptr);  // its address, at a launch
      if (given.there) plan.flat ? dense_strides(plan, given.parts) : split_strides(i, given.parts);
      for (size_t a = 0; a < plan.axes.size(); ++a) push<int64_t>(given.parts[a]);
    }
    counter_ = used_;
    if (plan_.counter) push<void*>(nullptr);
    for (size_t d = 0; d < plan_.dims.size(); ++d) push<int32_t>(static_cast<int32_t>(dims_[d]));
  }

  // Whether the address and all strides are multiples of TMA's unit, and the last axis is contiguous.
  using MapSizes = std::array<uint64_t, kMaxMapAxes>;
  static bool fits_tma(const TensorPlan& plan, const char* address, const MapSizes& sizes,
                       const MapSizes& strides, size_t rank) {
    bool fits = reinterpret_cast<uintptr_t>(address) % kTmaUnit == 0;
    fits = fits && (sizes[0] == 1 || strides[0] * 8 == static_cast<uint64_t>(plan.bits));
    for (size_t i = 1; i < rank; ++i) fits = fits && strides[i] % kTmaUnit == 0 && strides[i] < kFarthest;
    return fits;
  }

  static string map_of(const TensorPlan& plan, const Given& given) {
    return "encoding the tensor map of `" + plan.name + "`, whose shape is " + shape_of(given.axes, given.shape.data()) +
           " and whose strides are " + shape_of(given.axes, given.strides.data()) + ",";
  }

  void dense_strides(const TensorPlan& plan, std::array<int64_t, kMaxAxes>& strides) const {
    int64_t dense = 1;
    for (size_t a = plan.axes.size(); a-- > 0;) {
      strides[a] = dense;
      dense *= plan.axes[a].size.value(dims_);
    }
  }

  void split_strides(size_t i, std::array<int64_t, kMaxAxes>& strides) const {
    const TensorPlan& plan = plan_.tensors[i];
    const Order& order = plan.orders[layout_];
    int64_t last = static_cast<int64_t>(plan.axes.size()) - 1;
    for (size_t c = order.size(); c-- > 0;) {  // the last first: what is wrong there explains the rest
      int64_t stride = given_[i].strides[c];
      for (size_t k = order[c].size(); k-- > 0;) {
        int64_t p = order[c][k], size = plan.axes[p].size.value(dims_);
        strides[p] = fitting(plan, given_[i], p == last, size, stride);
        within(plan, given_[i], p >= last - 1 && size > 1, strides[p]);
        stride *= size;
      }
    }
  }

  // Inside a tile the kernel counts in 32 bits without a sign, some of it in bytes.
  void within(const TensorPlan& plan, const Given& given, bool in_tile, int64_t stride) const {
    if (stride >= 0 && (!in_tile || stride <= UINT32_MAX / (plan.bits / 8))) return;
    FW_REFUSE(ValueError, plan) << "has strides that the kernel cannot use: "
                                << shape_of(*given.tensor, given.strides.data());
  }

  // A stride that the kernel can use. Along an axis of one position any number will do, and frameworks
  // put any number there.
  int64_t fitting(const TensorPlan& plan, const Given& given, bool last, int64_t size,
                  int64_t stride) const {
    const DLTensor& tensor = *given.tensor;
    if (plan.vector_width <= 1) return stride;
    if (last ? stride == 1 : stride % plan.vector_width == 0) return stride;
    if (size <= 1) return last ? 1 : 0;
    for (int a = 0; a < tensor.ndim; ++a) {
      if (tensor.shape[a] == 0) return 0;  // nothing will be read
    }
    if (last) {
      FW_REFUSE(ValueError, plan) << "must be contiguous along its last axis; its strides are "
                                  << shape_of(tensor, given.strides.data());
    }
    FW_REFUSE(ValueError, plan) << "must have strides that are multiples of " << plan.vector_width
                                << " elements; they are " << shape_of(tensor, given.strides.data());
    return 0;
  }

  // The maps, which are the first in the struct. `zeros` gives the address of zeros: the driver takes no
  // map of a tensor without elements, so it gets one of a single zero.
  template <typename Zeros>
  void encode(const Addresses& addresses, vector<Block>& packed, Zeros&& zeros) const {
    for (size_t m = 0; m < plan_.maps.size(); ++m) {
      const MapPlan& map = plan_.maps[m];
      const TensorPlan& plan = plan_.tensors[map.tensor];
      const Given& given = given_[map.tensor];
      size_t axes = plan.axes.size(), rank = map_rank(plan);
      std::array<uint64_t, kMaxMapAxes> sizes{}, strides{};  // the last axis first
      std::array<uint32_t, kMaxMapAxes> every{1, 1, 1, 1, 1};
      bool empty = false;
      uint64_t view = 1;  // elements
      for (size_t i = 0; i < rank; ++i) {
        if (i < axes) {
          sizes[i] = plan.axes[axes - 1 - i].size.value(dims_);
          strides[i] = given.parts[axes - 1 - i] * plan.bits / 8;
        } else {
          sizes[i] = empty ? 0 : given.elements / view;
          strides[i] = view * plan.bits / 8;
        }
        if (sizes[i] == 1) strides[i] = kTmaUnit;  // any will do, and the given one may be any
        empty = empty || sizes[i] == 0;
        view *= sizes[i];
      }
      if (map.ranges) {
        sizes[1] = kRange, sizes[rank] = sizes[rank + 1] = kRangeAxis;
        strides[rank] = strides[1], strides[rank + 1] = kRangeStride - strides[1];
        rank += 2;
      }
      if (map.pages) {
        check_pages(plan, sizes[rank - 1], strides[rank - 1], strides[1]);
        sizes[1] = kRange, sizes[rank - 1] = sizes[rank] = kRangeAxis;
        strides[rank - 1] = strides[1], strides[rank] = kRangeStride - strides[1];
        rank += 1;
      }
      if (empty) sizes.fill(1), strides.fill(kTmaUnit);
      if (map.optional && !empty && !fits_tma(plan, addresses[map.tensor], sizes, strides, rank)) {
        continue;  // it stays 0
      }
      Result result = map_driver().cuTensorMapEncodeTiled(
          packed[m].bytes, map.type, static_cast<uint32_t>(rank), empty ? zeros() : addresses[map.tensor],
          sizes.data(), strides.data() + 1, map.box.data(), every.data(), kNoInterleave, map.swizzle,
          kPromote128, kFillZeros);
      if (result != 0) driver().check(result, map_of(plan, given).c_str());
    }
  }

  // All pages together are rows, which the kernel counts.
  static void check_pages(const TensorPlan& plan, uint64_t pages, uint64_t page, uint64_t row) {
    if (pages < 2) return;
    if (row == 0 || page % row != 0) {
      FW_REFUSE(ValueError, plan) << "must have pages that are whole rows apart: make it contiguous";
    }
    if (page / row * pages > kRangeAxis) {
      FW_REFUSE(ValueError, plan) << "is too large: its pages are " << page / row * pages
                                  << " rows apart from first to last, and the kernel counts to " << kRangeAxis;
    }
  }

  template <typename T>
  void push(T value) {
    std::memcpy(reinterpret_cast<char*>(packed_.data()) + used_, &value, sizeof(T));
    used_ += sizeof(T);
  }

  const Plan& plan_;
  int layout_;
  Dims dims_;
  std::array<const TensorPlan*, kMaxDims> owner_{};
  int64_t split_heads_ = -1;  // of a head axis that the plan has in two parts
  const TensorPlan* split_owner_ = nullptr;
  vector<Given> given_;
  Addresses addresses_;
  DLDevice device_{};
  const char* device_owner_ = nullptr;
  vector<Block> packed_;  // without addresses and maps
  vector<size_t> slots_;  // where each tensor's address goes, in bytes
  size_t used_ = 0, counter_ = 0;  // bytes; where the counter's address goes
};

}  // namespace fw
