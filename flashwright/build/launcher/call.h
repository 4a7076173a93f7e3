// One call: its tensors held against the plan, its dimensions read off them, its parameters packed.
//
// Every complaint names the tensor, what was found and what was expected, and comes before anything runs.

#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <climits>
#include <cstring>
#include <sstream>

#include "plan.h"

namespace fw {

// --- words for complaints ---------------------------------------------------------------------

inline string shape_of(const DLTensor& tensor, const int64_t* values) {
  std::ostringstream text;
  text << "(";
  for (int i = 0; i < tensor.ndim; ++i) text << (i ? ", " : "") << values[i];
  text << (tensor.ndim == 1 ? ",)" : ")");
  return text.str();
}

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

struct Given {
  const DLTensor* tensor = nullptr;
  std::array<int64_t, kMaxAxes> strides{};  // the caller's axes

  char* address() const { return static_cast<char*>(tensor->data) + tensor->byte_offset; }
};

class Call {
 public:
  Call(const Plan& plan, int layout, const ffi::AnyView* args) : plan_(plan), layout_(layout) {
    dims_.fill(-1);
    given_.resize(plan.tensors.size());
    for (int pass = 0; pass < 2; ++pass) {  // inputs say what the sizes are, outputs must fit them
      for (size_t i = 0; i < plan.tensors.size(); ++i) {
        if (plan.tensors[i].read == (pass == 0)) take(i, args[i]);
      }
    }
    take_dims(args + plan.tensors.size());
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      if (given_[i].tensor != nullptr) check_shape(i);
    }
    check_heads();
    pack();
  }

  int device() const { return device_.device_id; }
  void* stream() const { return TVMFFIEnvGetStream(kDLCUDA, device_.device_id); }
  void* parameters() { return packed_.data(); }

  // Blocks in x, y and z; false where there is nothing to do.
  bool grid(unsigned blocks[3]) const {
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
  void take(size_t i, const ffi::AnyView& arg) {
    const TensorPlan& plan = plan_.tensors[i];
    if (arg.type_index() == ffi::TypeIndex::kTVMFFINone) {
      if (plan.read) TVM_FFI_THROW(TypeError) << "the input `" << plan.name << "` is missing";
      return;
    }
    auto pointer = arg.try_cast<DLTensor*>();
    if (!pointer) FW_REFUSE(TypeError, plan) << "must be a tensor, not " << arg.GetTypeKey();
    Given& given = given_[i];
    given.tensor = *pointer;
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
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      int64_t stride = tensor.strides ? tensor.strides[i] : dense;
      if (i < static_cast<int>(kMaxAxes)) given.strides[i] = stride;
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
        if (plan.axes[p].size.is_dim()) {
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
      if (rest > INT_MAX) {
        FW_REFUSE(ValueError, plan) << "is too long on axis " << label << ": " << rest;
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
    bool empty = false;
    for (int a = 0; a < tensor.ndim; ++a) empty = empty || tensor.shape[a] == 0;
    const Order& order = plan.orders[layout_];
    for (size_t c = 0; c < order.size() && !plan.flat; ++c) {
      int64_t wanted = 1;
      for (int64_t p : order[c]) wanted *= plan.axes[p].size.value(dims_);
      if (tensor.shape[c] != wanted) {
        FW_REFUSE(ValueError, plan) << "must be " << wanted << " wide on axis "
                                    << plan.axes[order[c][0]].label << ", not " << tensor.shape[c]
                                    << "; its shape is " << shape_of(tensor, tensor.shape);
      }
      if (plan.written && !empty && wanted > 1 && given_[i].strides[c] == 0) {
        FW_REFUSE(ValueError, plan) << "is written, but its elements share memory: its strides are "
                                    << shape_of(tensor, given_[i].strides.data());
      }
    }
    int64_t bytes = plan.vector_width * plan.bits / 8;
    if (!empty && reinterpret_cast<uintptr_t>(given_[i].address()) % bytes != 0) {
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

  // The parameter struct: for each tensor its address and strides, then the dimensions as int32.
  void pack() {
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const TensorPlan& plan = plan_.tensors[i];
      bool there = given_[i].tensor != nullptr;
      push<void*>(there ? given_[i].address() : nullptr);
      std::array<int64_t, kMaxAxes> strides{};
      if (there) plan.flat ? dense_strides(plan, strides) : split_strides(i, strides);
      for (size_t a = 0; a < plan.axes.size(); ++a) push<int64_t>(strides[a]);
    }
    for (size_t d = 0; d < plan_.dims.size(); ++d) push<int32_t>(static_cast<int32_t>(dims_[d]));
    packed_.resize((packed_.size() + 7) / 8 * 8);
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

  // Inside a tile the kernel counts in 32 bits without a sign.
  void within(const TensorPlan& plan, const Given& given, bool in_tile, int64_t stride) const {
    if (stride >= 0 && (!in_tile || stride <= UINT32_MAX)) return;
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

  template <typename T>
  void push(T value) {
    size_t at = packed_.size();
    packed_.resize(at + sizeof(T));
    std::memcpy(packed_.data() + at, &value, sizeof(T));
  }

  const Plan& plan_;
  int layout_;
  Dims dims_;
  std::array<const TensorPlan*, kMaxDims> owner_{};
  vector<Given> given_;
  DLDevice device_{};
  const char* device_owner_ = nullptr;
  vector<char> packed_;
};

}  // namespace fw
