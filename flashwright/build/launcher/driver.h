// The few functions of the CUDA driver that a launch needs, declared here and found in libcuda.so.1, so that
// no CUDA toolkit is needed to compile this.

#pragma once

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstddef>
#include <cstdint>

namespace fw {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Context = void*;
using Module = void*;
using Kernel = void*;
using Stream = void*;

constexpr Result kNoBinaryForGpu = 209;      // CUDA_ERROR_NO_BINARY_FOR_GPU
constexpr int kMaxSharedOptin = 97;          // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kSms = 16;                     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMajor = 75, kMinor = 76;      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kMaxThreads = 0;               // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
constexpr int kMaxDynamicShared = 8;         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kErrorLog = 5, kLogSize = 6;   // CU_JIT_ERROR_LOG_BUFFER, its size in bytes
constexpr int kRelaxed = 2;                  // CU_STREAM_CAPTURE_MODE_RELAXED

// CU_TENSOR_MAP_INTERLEAVE_NONE, _L2_PROMOTION_L2_128B, and _FLOAT_OOB_FILL_NONE, which is zeros.
constexpr int kNoInterleave = 0, kPromote128 = 2, kFillZeros = 0;

template <typename Function>
void find(Function& function, const char* name, const char* needed = "") {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) TVM_FFI_THROW(RuntimeError) << "there is no CUDA driver: " << dlerror();
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) TVM_FFI_THROW(RuntimeError) << "the CUDA driver has no " << name << needed;
}

struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDeviceGet)(Device*, int);
  Result (*cuDeviceGetAttribute)(int*, int, Device);
  Result (*cuDevicePrimaryCtxRetain)(Context*, Device);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxPushCurrent)(Context);
  Result (*cuCtxPopCurrent)(Context*);
  Result (*cuModuleLoadDataEx)(Module*, const void*, unsigned, int*, void**);
  Result (*cuModuleGetFunction)(Kernel*, Module, const char*);
  Result (*cuFuncGetAttribute)(int*, int, Kernel);
  Result (*cuFuncSetAttribute)(Kernel, int, int);
  Result (*cuLaunchKernel)(Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           Stream, void**, void**);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuThreadExchangeStreamCaptureMode)(int*);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);

  Driver() {
    find(cuInit, "cuInit");
    find(cuDeviceGet, "cuDeviceGet");
    find(cuDeviceGetAttribute, "cuDeviceGetAttribute");
    find(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(cuCtxGetCurrent, "cuCtxGetCurrent");
    find(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    find(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    find(cuModuleLoadDataEx, "cuModuleLoadDataEx");
    find(cuModuleGetFunction, "cuModuleGetFunction");
    find(cuFuncGetAttribute, "cuFuncGetAttribute");
    find(cuFuncSetAttribute, "cuFuncSetAttribute");
    find(cuLaunchKernel, "cuLaunchKernel");
    find(cuStreamSynchronize, "cuStreamSynchronize");
    find(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    find(cuGetErrorName, "cuGetErrorName");
    find(cuGetErrorString, "cuGetErrorString");
    check(cuInit(0), "cuInit");
  }

  void check(Result result, const char* what) const {
    if (result == 0) return;
    const char *name = "unknown", *text = "";
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    TVM_FFI_THROW(RuntimeError) << what << " failed: " << name << " (" << text << ")";
  }
};

inline const Driver& driver() {
  static const Driver instance;
  return instance;
}

// What tensor maps need besides. Older drivers lack it, and most kernels do without.
struct MapDriver {
  Result (*cuTensorMapEncodeTiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                   const uint32_t*, const uint32_t*, int, int, int, int);
  Result (*cuModuleGetGlobal)(void**, size_t*, Module, const char*);

  MapDriver() {
    find(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",
         ", which this kernel needs: it takes a driver of CUDA 12.0 or newer");
    find(cuModuleGetGlobal, "cuModuleGetGlobal_v2");
  }
};

inline const MapDriver& map_driver() {
  static const MapDriver instance;
  return instance;
}

// What the memory of a launch's own needs besides.
struct PoolDriver {
  Result (*cuMemPoolCreate)(void**, const void*);
  Result (*cuMemPoolSetAttribute)(void*, int, void*);
  Result (*cuMemAllocFromPoolAsync)(void**, size_t, void*, Stream);
  Result (*cuMemsetD32Async)(void*, unsigned, size_t, Stream);
  Result (*cuMemFreeAsync)(void*, Stream);

  PoolDriver() {
    constexpr char needed[] = ", which this kernel needs: it takes a driver of CUDA 12.0 or newer";
    find(cuMemPoolCreate, "cuMemPoolCreate", needed);
    find(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", needed);
    find(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", needed);
    find(cuMemsetD32Async, "cuMemsetD32Async", needed);
    find(cuMemFreeAsync, "cuMemFreeAsync", needed);
  }
};

inline const PoolDriver& pool_driver() {
  static const PoolDriver instance;
  return instance;
}

// A thread may have no current context yet, or another device's.
class InContext {
 public:
  explicit InContext(Context context) {
    Context current = nullptr;
    driver().check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == context) return;
    driver().check(driver().cuCtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~InContext() {
    Context popped;
    if (pushed_) driver().cuCtxPopCurrent(&popped);
  }

 private:
  bool pushed_ = false;
};

// Loading code is not allowed while a stream is being captured, unless the thread says it knows.
class DuringCapture {
 public:
  DuringCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~DuringCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kRelaxed;
};

}  // namespace fw
