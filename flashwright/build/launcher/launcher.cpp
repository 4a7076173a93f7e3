// Launches a kernel by its launch plan, on the stream of the caller's framework.
//
// One fixed program for all kernels, compiled once on the caller's machine with its C++ compiler.

#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include "call.h"
#include "driver.h"

namespace fw {

// Zeros in a device's memory. A module's memory can be had while a stream is captured, without a stream.
constexpr char kZeros[] =
    ".version 8.0\n.target sm_90\n.address_size 64\n.visible .global .align 16 .b8 zeros[16];\n";

// CUmemPoolProps: memory of a device, for this process alone.
struct PoolProps {
  int type = 1, handles = 0;  // CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE
  int where = 1, device;      // CU_MEM_LOCATION_TYPE_DEVICE
  void* security = nullptr;
  size_t most = 0;
  char reserved[56] = {};
};
static_assert(sizeof(PoolProps) == 88);

// The pools that launches have memory of their own from, one for each device. They keep what is given back.
inline void* pool_of(int device) {
  static std::mutex mutex;
  static std::array<void*, kMaxDevices> pools{};
  std::lock_guard<std::mutex> lock(mutex);
  void*& found = pools[device];
  if (found == nullptr) {
    constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    uint64_t all = UINT64_MAX;
    PoolProps props;
    props.device = device;
    DuringCapture allowed;
    driver().check(pool_driver().cuMemPoolCreate(&found, &props), "cuMemPoolCreate");
    driver().check(pool_driver().cuMemPoolSetAttribute(found, kReleaseThreshold, &all),
                   "cuMemPoolSetAttribute");
  }
  return found;
}

// A counter of one launch: in the order of the stream it is had, set to 0 and given back, so that launches on several
// streams, and those in graphs, each have their own.
class Counter {
 public:
  Counter(int device, Stream stream) : stream_(stream) {
    const PoolDriver& cuda = pool_driver();
    driver().check(cuda.cuMemAllocFromPoolAsync(&address, sizeof(int32_t), pool_of(device), stream),
                   "getting memory for the kernel's counter");
    driver().check(cuda.cuMemsetD32Async(address, 0, 1, stream), "clearing the kernel's counter");
  }
  ~Counter() { pool_driver().cuMemFreeAsync(address, stream_); }
  Counter(const Counter&) = delete;

  void* address = nullptr;

 private:
  Stream stream_;
};

// The code in one device's primary context. It is never unloaded: a captured graph may still hold it.
struct Loaded {
  Context context;
  Kernel kernel;
  int sms;
};

// What a launch is for, in its first argument; the first bit is the layout.
constexpr int64_t kCheckOnly = 2, kBind = 4;

class Launcher : public std::enable_shared_from_this<Launcher> {
 public:
  Launcher(ffi::Bytes cubin, ffi::Bytes ptx, Plan plan)
      : cubin_(std::move(cubin)), ptx_(std::move(ptx)), plan_(std::move(plan)) {}

  // Arguments: layout (0 or 1; +2 to check only, +4 to bind), the tensors, the dimensions; None where not
  // given. The result of binding is the launch as a function of the tensors' addresses.
  void operator()(const ffi::AnyView* args, int32_t count, ffi::Any* result) {
    size_t wanted = 1 + plan_.tensors.size() + plan_.dims.size();
    if (static_cast<size_t>(count) != wanted) {
      TVM_FFI_THROW(TypeError) << "expected " << wanted << " arguments, not " << count;
    }
    int64_t mode = args[0].cast<int64_t>();
    if (mode & kBind) {
      *result = bound(std::make_shared<const Call>(plan_, mode & 1, args + 1));
      return;
    }
    Call call(plan_, mode & 1, args + 1);
    launch(call, call.addresses(), mode & kCheckOnly);
  }

 private:
  ffi::Function bound(std::shared_ptr<const Call> call) {
    unsigned blocks[3];
    call->grid(blocks);  // too many are told of now
    auto run = [self = shared_from_this(), call](const ffi::AnyView* args, int32_t count, ffi::Any*) {
      thread_local Addresses addresses;
      addresses.clear();
      for (int32_t i = 0; i < count; ++i) addresses.push_back(static_cast<char*>(args[i].cast<void*>()));
      call->check_addresses(addresses);
      self->launch(*call, addresses);
    };
    return ffi::Function::FromPacked(run);
  }

  void launch(const Call& call, const Addresses& addresses, bool check_only = false) {
    unsigned blocks[3];
    if (!call.grid(blocks) || check_only) return;
    const Loaded& code = on(call.device());
    if (plan_.stays) blocks[0] = std::min(blocks[0], static_cast<unsigned>(code.sms));
    InContext here(code.context);
    std::optional<Counter> counter;
    void* count = plan_.counter ? counter.emplace(call.device(), call.stream()).address : nullptr;
    void* parameters[] = {call.parameters(addresses, count, [&] { return zeros(call.device()); })};
    Result result = driver().cuLaunchKernel(
        code.kernel, blocks[0], blocks[1], blocks[2], static_cast<unsigned>(plan_.threads), 1, 1,
        static_cast<unsigned>(plan_.shared), call.stream(), parameters, nullptr);
    driver().check(result, "launching the kernel");
  }

  const Loaded& on(int device) {
    if (device < 0 || device >= static_cast<int>(kMaxDevices)) {
      TVM_FFI_THROW(ValueError) << "cuda:" << device << " is out of range";
    }
    Loaded* found = loaded_[device].load(std::memory_order_acquire);
    if (found == nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      found = loaded_[device].load(std::memory_order_acquire);
      if (found == nullptr) {
        found = new Loaded(load(device));
        loaded_[device].store(found, std::memory_order_release);
      }
    }
    return *found;
  }

  Loaded load(int ordinal) const {
    const Driver& cuda = driver();
    Device device;
    Loaded code{};
    cuda.check(cuda.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    int optin = 0, threads = 0;
    cuda.check(cuda.cuDeviceGetAttribute(&code.sms, kSms, device), "cuDeviceGetAttribute");
    cuda.check(cuda.cuDeviceGetAttribute(&optin, kMaxSharedOptin, device), "cuDeviceGetAttribute");
    if (plan_.shared > optin) {
      TVM_FFI_THROW(RuntimeError) << "this kernel needs " << plan_.shared
                                  << " bytes of shared memory per block; cuda:" << ordinal << " has "
                                  << optin;
    }
    DuringCapture allowed;
    cuda.check(cuda.cuDevicePrimaryCtxRetain(&code.context, device), "cuDevicePrimaryCtxRetain");
    InContext here(code.context);
    Module module = load_module(device);
    cuda.check(cuda.cuModuleGetFunction(&code.kernel, module, plan_.entry.c_str()),
               ("finding the kernel " + plan_.entry).c_str());
    cuda.check(cuda.cuFuncGetAttribute(&threads, kMaxThreads, code.kernel), "cuFuncGetAttribute");
    if (plan_.threads > threads) {
      TVM_FFI_THROW(RuntimeError) << "this kernel needs " << plan_.threads
                                  << " threads per block, but its registers allow " << threads
                                  << " on cuda:" << ordinal;
    }
    cuda.check(cuda.cuFuncSetAttribute(code.kernel, kMaxDynamicShared, static_cast<int>(plan_.shared)),
               "setting the shared memory of the kernel");
    return code;
  }

  // In the device's context.
  void* zeros(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    void*& found = zeros_[device];
    if (found == nullptr) {
      DuringCapture allowed;
      Module module = nullptr;
      driver().check(driver().cuModuleLoadDataEx(&module, kZeros, 0, nullptr, nullptr),
                     "loading zeros, for the map of a tensor without elements,");
      driver().check(map_driver().cuModuleGetGlobal(&found, nullptr, module, "zeros"),
                     "cuModuleGetGlobal");
    }
    return found;
  }

  // The cubin where the driver takes it for this device, else the PTX, compiled by the driver.
  Module load_module(Device device) const {
    const Driver& cuda = driver();
    Module module = nullptr;
    int major = 0, minor = 0;
    cuda.cuDeviceGetAttribute(&major, kMajor, device);
    cuda.cuDeviceGetAttribute(&minor, kMinor, device);
    if (cubin_.size() > 0 && may_run(cubin_arch(), 10 * major + minor)) {
      Result result = cuda.cuModuleLoadDataEx(&module, cubin_.data(), 0, nullptr, nullptr);
      if (result != kNoBinaryForGpu) {
        cuda.check(result, "loading kernel.cubin");
        return module;
      }
    }
    if (ptx_.size() == 0) {
      TVM_FFI_THROW(RuntimeError) << "this kernel is compiled for " << plan_.arch
                                  << ", which a GPU of sm_" << major << minor
                                  << " cannot run; build it with its PTX (flashwright build --ptx)";
    }
    vector<char> log(8192, '\0');
    int options[] = {kErrorLog, kLogSize};
    void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
    Result result = cuda.cuModuleLoadDataEx(&module, ptx_.data(), 2, options, values);
    if (result != 0 && log[0] != '\0') {
      TVM_FFI_THROW(RuntimeError) << "the driver cannot compile kernel.ptx for sm_" << major << minor
                                  << ": " << log.data();
    }
    cuda.check(result, "compiling kernel.ptx");
    return module;
  }

  // The architecture in the cubin's ELF header, 0 where it cannot be told. Asking the driver with a
  // cubin of another architecture works too, but shows as an error in compute-sanitizer.
  int cubin_arch() const {
    constexpr size_t kAbiVersion = 8, kFlags = 48;
    const char* data = cubin_.data();
    if (cubin_.size() < kFlags + 4 || std::memcmp(data, "\177ELF", 4) != 0) return 0;
    uint32_t flags = 0;
    std::memcpy(&flags, data + kFlags, sizeof flags);
    return data[kAbiVersion] >= 8 ? flags >> 8 & 0xff : flags & 0xff;  // CUDA 13 moved it
  }

  static bool may_run(int arch, int device) {
    return arch == 0 || (arch / 10 == device / 10 && arch <= device);
  }

  ffi::Bytes cubin_, ptx_;
  Plan plan_;
  std::mutex mutex_;
  std::array<std::atomic<Loaded*>, kMaxDevices> loaded_{};
  std::array<void*, kMaxDevices> zeros_{};
};

ffi::Function make(ffi::Bytes cubin, ffi::Bytes ptx, ffi::Array<int64_t> numbers,
                   ffi::Array<ffi::String> words) {
  driver();
  Plan plan = Reader(numbers, words).plan();
  if (!plan.maps.empty()) map_driver();  // an old driver is told of now, not at the first call
  if (plan.counter) pool_driver();
  auto launcher = std::make_shared<Launcher>(cubin, ptx, std::move(plan));
  return ffi::Function::FromPacked(
      [launcher](const ffi::AnyView* args, int32_t count, ffi::Any* result) {
        (*launcher)(args, count, result);
      });
}

// Where a dimension is read off: an axis of an argument, whose size is a multiple of it.
struct DimSource {
  int64_t argument, axis, divisor;

  int64_t value(const ffi::AnyView* args) const {
    return args[argument].cast<DLTensor*>()->shape[axis] / divisor;
  }
};

// The launch as a function of tensors alone: tensor i of the plan is the argument at tensors[i]. Three numbers for
// each dimension are a DimSource. None where the first of them is negative.
ffi::Function of_tensors(ffi::Function launch, ffi::Array<int64_t> tensors, ffi::Array<int64_t> dims) {
  vector<int64_t> order(tensors.begin(), tensors.end());
  vector<DimSource> sources;
  for (size_t i = 0; i < dims.size(); i += 3) sources.push_back({dims[i], dims[i + 1], dims[i + 2]});
  auto run = [launch, order, sources](const ffi::AnyView* args, int32_t count, ffi::Any* result) {
    vector<ffi::AnyView> all{ffi::AnyView(int64_t{0})};  // the first layout
    for (int64_t place : order) {
      if (place >= count) TVM_FFI_THROW(TypeError) << "tensor " << place << " is missing";
      all.push_back(place >= 0 ? args[place] : ffi::AnyView(nullptr));
    }
    for (const DimSource& dim : sources) {
      all.push_back(dim.argument >= 0 ? ffi::AnyView(dim.value(args)) : ffi::AnyView(nullptr));
    }
    launch.CallPacked(all.data(), static_cast<int32_t>(all.size()), result);
  };
  return ffi::Function::FromPacked(run);
}

// A bound launch as a function of tensors, whose memory is used and nothing else. Two numbers for each tensor of the
// plan: which argument it begins in, and how many bytes from there. None where the first is negative.
ffi::Function at_places(ffi::Function launch, ffi::Array<int64_t> numbers) {
  struct Place {
    int64_t argument, offset;
  };
  vector<Place> places;
  for (size_t i = 0; i < numbers.size(); i += 2) places.push_back({numbers[i], numbers[i + 1]});
  auto run = [launch, places](const ffi::AnyView* args, int32_t count, ffi::Any* result) {
    thread_local vector<ffi::AnyView> addresses;
    addresses.clear();
    for (const Place& place : places) {
      if (place.argument >= count) TVM_FFI_THROW(TypeError) << "tensor " << place.argument << " is missing";
      void* address = nullptr;
      if (place.argument >= 0) address = address_of(*args[place.argument].cast<DLTensor*>()) + place.offset;
      addresses.push_back(ffi::AnyView(address));
    }
    launch.CallPacked(addresses.data(), static_cast<int32_t>(addresses.size()), result);
  };
  return ffi::Function::FromPacked(run);
}

// A function of tensors whose result is the same bytes for the same devices, types, shapes and strides.
ffi::Function form() {
  auto run = [](const ffi::AnyView* args, int32_t count, ffi::Any* result) {
    thread_local vector<int64_t> found;
    found.clear();
    for (int32_t i = 0; i < count; ++i) {
      const DLTensor& tensor = *args[i].cast<DLTensor*>();
      int64_t type = tensor.dtype.code << 24 | tensor.dtype.bits << 16 | tensor.dtype.lanes;
      found.insert(found.end(), {tensor.device.device_type, tensor.device.device_id, type, tensor.ndim,
                                 tensor.strides != nullptr});
      found.insert(found.end(), tensor.shape, tensor.shape + tensor.ndim);
      if (tensor.strides) found.insert(found.end(), tensor.strides, tensor.strides + tensor.ndim);
    }
    *result = ffi::Bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int64_t));
  };
  return ffi::Function::FromPacked(run);
}

// Functions of the same arguments as one, which calls them in their order.
ffi::Function in_order(ffi::Array<ffi::Function> functions) {
  return ffi::Function::FromPacked([functions](const ffi::AnyView* args, int32_t count, ffi::Any* result) {
    for (const ffi::Function& function : functions) function.CallPacked(args, count, result);
  });
}

// Waits for the stream that launches on this device go to.
void synchronize(int64_t device) {
  driver().check(driver().cuStreamSynchronize(TVMFFIEnvGetStream(kDLCUDA, static_cast<int>(device))),
                 "the kernel");
}

}  // namespace fw

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make, fw::make);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(of_tensors, fw::of_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(at_places, fw::at_places);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(form, fw::form);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(in_order, fw::in_order);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(synchronize, fw::synchronize);
