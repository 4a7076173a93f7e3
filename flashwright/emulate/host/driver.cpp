// The functions of the CUDA driver. Where the runtime has the same function, it is called.
#include "order.h"

#include <cstdio>
#include <cstdlib>

using namespace fwh;

// Of runtime.cpp.
extern "C" {
int cudaMemcpy(void*, const void*, size_t, int);
int cudaMemcpyAsync(void*, const void*, size_t, int, void*);
int cudaMallocPitch(void**, size_t*, size_t, size_t);
int cudaMallocAsync(void**, size_t, void*);
int cudaFreeAsync(void*, void*);
int cudaMemGetInfo(size_t*, size_t*);
int cudaDeviceSynchronize();
int cudaFuncGetAttributes(void*, const void*);
int cudaFuncSetAttribute(const void*, int, int);
}

namespace {

using Address = void*;  // CUdeviceptr is a number of the same size

int context = 0;     // there is one; only its address matters
int contexts = 1;    // on the stack of this program
constexpr int kInvalidContext = 201;

struct Config {  // CUlaunchConfig
  Dim grid, block;
  unsigned shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};

int launch_in(Launch launch, void* kernel, void* stream, void** arguments, void** extra) {
  launch.kernel = kernel_of(kernel);
  if (launch.kernel == nullptr) return fail(kInvalidHandle, "cuLaunchKernel of a function that does not exist");
  int error = pack(launch, arguments, extra);
  return error != kSuccess ? error : submit(stream, [launch] { return start(launch); });
}

int read_file(const char* name, std::string& content) {
  FILE* file = std::fopen(name, "rb");
  if (file == nullptr) return fail(301, std::string("cuModuleLoad cannot read ") + name);
  char room[1 << 16];
  while (size_t got = std::fread(room, 1, sizeof room, file)) content.append(room, got);
  std::fclose(file);
  content.push_back('\0');
  return kSuccess;
}

}  // namespace

// --- the device and its context -------------------------------------------------------------------

API cuInit(unsigned) { return kSuccess; }
API cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
API cuDeviceGetCount(int* count) {
  LOCKED;
  *count = device().name.empty() ? 0 : 1;
  return kSuccess;
}
API cuDeviceGet(int* out, int number) {
  *out = 0;
  return number == 0 ? kSuccess : kInvalidDevice;
}
API cuDeviceGetName(char* out, int size, int) {
  LOCKED;
  std::snprintf(out, size, "%s", device().name.c_str());
  return kSuccess;
}
API cuDeviceGetUuid(void* out, int) {
  std::memset(out, 0, 16);
  return kSuccess;
}
ALSO(cuDeviceGetUuid_v2, cuDeviceGetUuid);
API cuDeviceTotalMem(size_t* size, int) {
  LOCKED;
  *size = device().memory;
  return kSuccess;
}
ALSO(cuDeviceTotalMem_v2, cuDeviceTotalMem);
API cuDeviceGetAttribute(int* value, int which, int) {
  LOCKED;
  return attribute(which, value);
}
API cuDeviceComputeCapability(int* major, int* minor, int) {
  LOCKED;
  *major = static_cast<int>(device().capability / 10);
  *minor = static_cast<int>(device().capability % 10);
  return kSuccess;
}
API cuDevicePrimaryCtxRetain(void** out, int) {
  *out = &context;
  return kSuccess;
}
API cuDevicePrimaryCtxRelease(int) { return kSuccess; }
ALSO(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease);
API cuDevicePrimaryCtxReset(int) { return kSuccess; }
ALSO(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset);
API cuDevicePrimaryCtxSetFlags(int, unsigned) { return kSuccess; }
ALSO(cuDevicePrimaryCtxSetFlags_v2, cuDevicePrimaryCtxSetFlags);
API cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
API cuCtxCreate(void** out) {  // its further arguments differ between versions, and change nothing here
  *out = &context;
  ++contexts;
  return kSuccess;
}
ALSO(cuCtxCreate_v2, cuCtxCreate);
ALSO(cuCtxCreate_v3, cuCtxCreate);
ALSO(cuCtxCreate_v4, cuCtxCreate);
API cuCtxDestroy(void*) { return kSuccess; }
ALSO(cuCtxDestroy_v2, cuCtxDestroy);
API cuCtxSetCurrent(void*) { return kSuccess; }
API cuCtxGetCurrent(void** out) {
  *out = &context;
  return kSuccess;
}
API cuCtxPushCurrent(void*) {
  ++contexts;
  return kSuccess;
}
ALSO(cuCtxPushCurrent_v2, cuCtxPushCurrent);
API cuCtxPopCurrent(void** out) {
  if (out != nullptr) *out = &context;
  return contexts-- > 0 ? kSuccess : kInvalidContext;
}
ALSO(cuCtxPopCurrent_v2, cuCtxPopCurrent);
API cuCtxGetDevice(int* number) {
  *number = 0;
  return kSuccess;
}
API cuCtxGetFlags(unsigned* flags) {
  *flags = 0;
  return kSuccess;
}
API cuCtxSetLimit(int, size_t) { return kSuccess; }
API cuCtxSetCacheConfig(int) { return kSuccess; }
API cuCtxSynchronize() { return cudaDeviceSynchronize(); }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}
API cuGetErrorName(int error, const char** out) {
  *out = error_name(error);  // by the runtime's name
  return *out != nullptr ? kSuccess : kInvalidValue;
}
API cuGetErrorString(int error, const char** out) {
  *out = error_string(error);
  return *out != nullptr ? kSuccess : kInvalidValue;
}
API cuGetProcAddress(const char* name, void** out, int, uint64_t) {
  LOCKED;
  *out = function(name);
  return *out != nullptr ? kSuccess : kNotFound;
}
API cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
  int error = cuGetProcAddress(name, out, version, flags);
  if (status != nullptr) *status = error == kSuccess ? 0 : 1;
  return error;
}

// The runtime calls the driver by tables that are not documented. It is replaced where its symbols can be found.
API cuGetExportTable(const void**, const void*) {
  return refuse("a CUDA runtime within a stripped file (keep its symbols, or build it with nvcc -cudart shared)");
}

// --- modules and kernels --------------------------------------------------------------------------

API cuModuleLoadData(void** out, const void* image) {
  LOCKED;
  *out = load_image(image);
  return kSuccess;
}
API cuModuleLoadDataEx(void** out, const void* image, unsigned, void*, void**) { return cuModuleLoadData(out, image); }
API cuModuleLoadFatBinary(void** out, const void* image) { return cuModuleLoadData(out, image); }
API cuModuleLoad(void** out, const char* name) {
  LOCKED;
  std::string content;
  int error = read_file(name, content);
  return error != kSuccess ? error : cuModuleLoadData(out, content.data());
}
API cuModuleUnload(void* module) {
  LOCKED;
  unload(static_cast<Module*>(module));
  return kSuccess;
}
API cuModuleGetFunction(void** out, void* module, const char* name) {
  LOCKED;
  Kernel* kernel = get_kernel(*static_cast<Module*>(module), name);
  *out = kernel;
  return ask_kernel(*kernel);
}
API cuModuleGetGlobal(Address* out, size_t* size, void* module, const char* name) {
  LOCKED;
  void* at;
  return symbol(*static_cast<Module*>(module), name, out != nullptr ? out : &at, size);
}
ALSO(cuModuleGetGlobal_v2, cuModuleGetGlobal);
API cuModuleGetLoadingMode(int* mode) {
  *mode = 2;  // lazy
  return kSuccess;
}
API cuLibraryLoadData(void** out, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  return cuModuleLoadData(out, image);
}
API cuLibraryUnload(void* library) { return cuModuleUnload(library); }
API cuLibraryGetKernel(void** out, void* library, const char* name) { return cuModuleGetFunction(out, library, name); }
API cuLibraryGetGlobal(Address* out, size_t* size, void* library, const char* name) {
  return cuModuleGetGlobal(out, size, library, name);
}
API cuLibraryGetModule(void** out, void* library) {
  *out = library;
  return kSuccess;
}
API cuKernelGetFunction(void** out, void* kernel) {
  *out = kernel;
  return kSuccess;
}
API cuKernelSetAttribute(int which, int value, void* kernel, int) { return cudaFuncSetAttribute(kernel, which, value); }
API cuFuncSetAttribute(void* kernel, int which, int value) { return cudaFuncSetAttribute(kernel, which, value); }
API cuFuncSetCacheConfig(void*, int) { return kSuccess; }
API cuFuncSetSharedMemConfig(void*, int) { return kSuccess; }
API cuFuncGetAttribute(int* value, int which, void* kernel) {
  LOCKED;
  struct {
    size_t sizes[3];
    int rest[30];
  } all;
  int error = cudaFuncGetAttributes(&all, kernel);
  if (error != kSuccess) return error;
  if (which < 0 || which > 15) return kInvalidValue;
  // The order of the driver: threads, three sizes, then as the runtime has them.
  *value = which == 0 ? all.rest[0] : which < 4 ? static_cast<int>(all.sizes[which - 1]) : all.rest[which - 3];
  return kSuccess;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared) {
  LOCKED;
  Kernel* kernel = kernel_of(function);
  if (kernel == nullptr) return kInvalidHandle;
  *blocks = occupancy(*kernel, threads, shared);
  return kSuccess;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* function, int threads, size_t shared, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
API cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** arguments, void** extra) {
  LOCKED;
  Launch launch;
  launch.grid = {gx, gy, gz};
  launch.block = {bx, by, bz};
  launch.shared = shared;
  return launch_in(std::move(launch), kernel, stream, arguments, extra);
}
ALSO(cuLaunchKernel_ptsz, cuLaunchKernel);
API cuLaunchCooperativeKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, void* stream, void** arguments) {
  LOCKED;
  Launch launch;
  launch.grid = {gx, gy, gz};
  launch.block = {bx, by, bz};
  launch.shared = shared;
  launch.cooperative = true;
  return launch_in(std::move(launch), kernel, stream, arguments, nullptr);
}
ALSO(cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel);
API cuLaunchKernelEx(const Config* config, void* kernel, void** arguments, void** extra) {
  LOCKED;
  Launch launch;
  launch.grid = config->grid;
  launch.block = config->block;
  launch.shared = config->shared;
  for (unsigned n = 0; n < config->count; ++n) {
    const Attribute& one = config->attributes[n];
    if (one.id == kCooperative) launch.cooperative = one.number != 0;
    if (one.id == kCluster) launch.cluster = {one.size[0], one.size[1], one.size[2]};
  }
  return launch_in(std::move(launch), kernel, config->stream, arguments, extra);
}
ALSO(cuLaunchKernelEx_ptsz, cuLaunchKernelEx);
API cuTensorMapEncodeTiled(void* out, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  LOCKED;
  Message message;
  message.number(type).number(rank).number(reinterpret_cast<uint64_t>(address));
  for (uint32_t n = 0; n < rank && n < 5; ++n) {
    message.number(sizes[n]).number(n + 1 < rank ? strides[n] : 0).number(box[n]).number(steps[n]);
  }
  (void)promotion;  // of the L2, which there is not
  Answer answer = ask(kTensorMap, message.number(interleave).number(swizzle).number(fill));
  std::string made = answer.text();
  if (answer.error == kSuccess) std::memcpy(out, made.data(), made.size());
  return done(answer.error);
}

// --- memory ---------------------------------------------------------------------------------------

API cuMemAlloc(Address* out, size_t size) {
  LOCKED;
  return size == 0 ? fail(kInvalidValue, "cuMemAlloc of 0 bytes") : allocate(out, size, kDeviceMemory);
}
ALSO(cuMemAlloc_v2, cuMemAlloc);
API cuMemAllocPitch(Address* out, size_t* pitch, size_t width, size_t height, unsigned) {
  return cudaMallocPitch(out, pitch, width, height);
}
ALSO(cuMemAllocPitch_v2, cuMemAllocPitch);
API cuMemAllocManaged(Address* out, size_t size, unsigned) {
  LOCKED;
  return allocate(out, size, kManaged);
}
API cuMemAllocHost(void** out, size_t size) {
  LOCKED;
  return allocate(out, size, kPinned);
}
ALSO(cuMemAllocHost_v2, cuMemAllocHost);
API cuMemHostAlloc(void** out, size_t size, unsigned) { return cuMemAllocHost(out, size); }
API cuMemAllocAsync(Address* out, size_t size, void* stream) { return cudaMallocAsync(out, size, stream); }
API cuMemFree(Address p) {
  LOCKED;
  return release(p, "cuMemFree", false);
}
ALSO(cuMemFree_v2, cuMemFree);
API cuMemFreeHost(void* p) {
  LOCKED;
  return release(p, "cuMemFreeHost", true);
}
API cuMemFreeAsync(Address p, void* stream) { return cudaFreeAsync(p, stream); }
API cuMemGetInfo(size_t* available, size_t* total) { return cudaMemGetInfo(available, total); }
ALSO(cuMemGetInfo_v2, cuMemGetInfo);
API cuMemGetAddressRange(Address* base, size_t* size, Address p) {
  LOCKED;
  const Allocation* one = find(p);
  if (one == nullptr) return kNotFound;
  if (base != nullptr) *base = reinterpret_cast<void*>(one->base);
  if (size != nullptr) *size = one->size;
  return kSuccess;
}
ALSO(cuMemGetAddressRange_v2, cuMemGetAddressRange);
API cuMemHostRegister(void*, size_t, unsigned) { return kSuccess; }
ALSO(cuMemHostRegister_v2, cuMemHostRegister);
API cuMemHostUnregister(void*) { return kSuccess; }
API cuPointerGetAttribute(void* out, int which, Address p) {
  LOCKED;
  const Allocation* one = find(p);
  if (one == nullptr) return kInvalidValue;
  switch (which) {
    case 2: *static_cast<unsigned*>(out) = one->kind == kPinned ? 1 : 2; return kSuccess;
    case 3: case 4: *static_cast<void**>(out) = p; return kSuccess;
    case 8: *static_cast<unsigned*>(out) = one->kind == kManaged; return kSuccess;
    case 9: *static_cast<int*>(out) = 0; return kSuccess;
    case 11: *static_cast<uint64_t*>(out) = one->base; return kSuccess;
    case 12: *static_cast<uint64_t*>(out) = one->size; return kSuccess;
    default: return refuse("cuPointerGetAttribute of attribute " + std::to_string(which));
  }
}

API cuMemcpy(Address to, Address from, size_t size) { return cudaMemcpy(to, from, size, 4); }
ALSO(cuMemcpy_ptds, cuMemcpy);
API cuMemcpyAsync(Address to, Address from, size_t size, void* stream) { return cudaMemcpyAsync(to, from, size, 4, stream); }
ALSO(cuMemcpyAsync_ptsz, cuMemcpyAsync);
API cuMemcpyHtoD(Address to, const void* from, size_t size) { return cudaMemcpy(to, from, size, 1); }
ALSO(cuMemcpyHtoD_v2, cuMemcpyHtoD);
ALSO(cuMemcpyHtoD_v2_ptds, cuMemcpyHtoD);
API cuMemcpyDtoH(void* to, Address from, size_t size) { return cudaMemcpy(to, from, size, 2); }
ALSO(cuMemcpyDtoH_v2, cuMemcpyDtoH);
ALSO(cuMemcpyDtoH_v2_ptds, cuMemcpyDtoH);
API cuMemcpyDtoD(Address to, Address from, size_t size) { return cudaMemcpy(to, from, size, 3); }
ALSO(cuMemcpyDtoD_v2, cuMemcpyDtoD);
ALSO(cuMemcpyDtoD_v2_ptds, cuMemcpyDtoD);
API cuMemcpyHtoDAsync(Address to, const void* from, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, 1, stream);
}
ALSO(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync);
ALSO(cuMemcpyHtoDAsync_v2_ptsz, cuMemcpyHtoDAsync);
API cuMemcpyDtoHAsync(void* to, Address from, size_t size, void* stream) { return cudaMemcpyAsync(to, from, size, 2, stream); }
ALSO(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync);
ALSO(cuMemcpyDtoHAsync_v2_ptsz, cuMemcpyDtoHAsync);
API cuMemcpyDtoDAsync(Address to, Address from, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, 3, stream);
}
ALSO(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync);
ALSO(cuMemcpyDtoDAsync_v2_ptsz, cuMemcpyDtoDAsync);

namespace {

Work filling(Address to, size_t count, uint32_t value, int bytes) {
  return [=] { return fill("cuMemset", {to}, {count}, value, bytes); };
}

}  // namespace

API cuMemsetD8(Address to, unsigned char value, size_t count) {
  LOCKED;
  return submit_now(filling(to, count, value, 1));
}
ALSO(cuMemsetD8_v2, cuMemsetD8);
API cuMemsetD16(Address to, unsigned short value, size_t count) {
  LOCKED;
  return submit_now(filling(to, count, value, 2));
}
ALSO(cuMemsetD16_v2, cuMemsetD16);
API cuMemsetD32(Address to, unsigned value, size_t count) {
  LOCKED;
  return submit_now(filling(to, count, value, 4));
}
ALSO(cuMemsetD32_v2, cuMemsetD32);
API cuMemsetD8Async(Address to, unsigned char value, size_t count, void* stream) {
  LOCKED;
  return submit(stream, filling(to, count, value, 1));
}
API cuMemsetD16Async(Address to, unsigned short value, size_t count, void* stream) {
  LOCKED;
  return submit(stream, filling(to, count, value, 2));
}
API cuMemsetD32Async(Address to, unsigned value, size_t count, void* stream) {
  LOCKED;
  return submit(stream, filling(to, count, value, 4));
}

// --- streams, events, graphs: those of the runtime ------------------------------------------------

extern "C" {
int cudaStreamCreateWithPriority(void**, unsigned, int);
int cudaStreamDestroy(void*);
int cudaStreamSynchronize(void*);
int cudaStreamWaitEvent(void*, void*, unsigned);
int cudaStreamBeginCapture(void*, int);
int cudaStreamEndCapture(void*, void**);
int cudaStreamIsCapturing(void*, int*);
int cudaLaunchHostFunc(void*, void (*)(void*), void*);
int cudaEventCreateWithFlags(void**, unsigned);
int cudaEventDestroy(void*);
int cudaEventRecord(void*, void*);
int cudaEventSynchronize(void*);
int cudaEventQuery(void*);
int cudaEventElapsedTime(float*, void*, void*);
int cudaGraphCreate(void**, unsigned);
int cudaGraphDestroy(void*);
int cudaGraphInstantiateWithFlags(void**, void*, unsigned long long);
int cudaGraphLaunch(void*, void*);
int cudaGraphExecDestroy(void*);
int cudaGraphGetNodes(void*, void**, size_t*);
}

API cuStreamCreate(void** out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  return cudaStreamCreateWithPriority(out, flags, priority);
}
API cuStreamDestroy(void* stream) { return cudaStreamDestroy(stream); }
ALSO(cuStreamDestroy_v2, cuStreamDestroy);
API cuStreamSynchronize(void* stream) { return cudaStreamSynchronize(stream); }
API cuStreamQuery(void* stream) { return cudaStreamSynchronize(stream); }
API cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return cudaStreamWaitEvent(stream, event, flags); }
API cuStreamBeginCapture(void* stream, int mode) { return cudaStreamBeginCapture(stream, mode); }
ALSO(cuStreamBeginCapture_v2, cuStreamBeginCapture);
API cuStreamEndCapture(void* stream, void** graph) { return cudaStreamEndCapture(stream, graph); }
API cuStreamIsCapturing(void* stream, int* status) { return cudaStreamIsCapturing(stream, status); }
API cuLaunchHostFunc(void* stream, void (*called)(void*), void* data) { return cudaLaunchHostFunc(stream, called, data); }
API cuEventCreate(void** out, unsigned flags) { return cudaEventCreateWithFlags(out, flags); }
API cuEventDestroy(void* event) { return cudaEventDestroy(event); }
ALSO(cuEventDestroy_v2, cuEventDestroy);
API cuEventRecord(void* event, void* stream) { return cudaEventRecord(event, stream); }
API cuEventSynchronize(void* event) { return cudaEventSynchronize(event); }
API cuEventQuery(void* event) { return cudaEventQuery(event); }
API cuEventElapsedTime(float* milliseconds, void* from, void* to) { return cudaEventElapsedTime(milliseconds, from, to); }
ALSO(cuEventElapsedTime_v2, cuEventElapsedTime);
API cuGraphCreate(void** graph, unsigned flags) { return cudaGraphCreate(graph, flags); }
API cuGraphDestroy(void* graph) { return cudaGraphDestroy(graph); }
API cuGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
ALSO(cuGraphInstantiateWithFlags, cuGraphInstantiate);
API cuGraphLaunch(void* executable, void* stream) { return cudaGraphLaunch(executable, stream); }
API cuGraphExecDestroy(void* executable) { return cudaGraphExecDestroy(executable); }
API cuGraphGetNodes(void* graph, void** nodes, size_t* count) { return cudaGraphGetNodes(graph, nodes, count); }
API cuProfilerStart() { return kSuccess; }
API cuProfilerStop() { return kSuccess; }
