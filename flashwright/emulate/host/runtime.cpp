// The functions of the CUDA runtime.
#include "order.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

using namespace fwh;

namespace {

using Callback = void (*)(void*);
using StreamCallback = void (*)(void*, int, void*);

constexpr int kVersion = 13000;
constexpr size_t kPitch = 512;

struct PitchedPointer {
  void* at;
  size_t pitch, xsize, ysize;
};

struct Extent3 {
  size_t width, height, depth;
};

struct Position {
  size_t x, y, z;
};

struct Copy3 {  // cudaMemcpy3DParms
  void* source_array;
  Position source_position;
  PitchedPointer source;
  void* target_array;
  Position target_position;
  PitchedPointer target;
  Extent3 extent;
  int direction;
};

struct Config {  // cudaLaunchConfig_t
  Dim grid, block;
  size_t shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};

struct KernelNode {  // cudaKernelNodeParams
  const void* function;
  Dim grid, block;
  unsigned shared;
  void** parameters;
  void** extra;
};

struct FillNode {  // cudaMemsetParams
  void* to;
  size_t pitch;
  unsigned value, bytes;
  size_t width, height;
};

struct FunctionAttributes {
  size_t shared, constant, local;
  int threads, registers, ptx, binary, cached, dynamic, carveout, must_cluster, cluster[3], policy, nonportable, reserved[16];
};

struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

Work copying(const char* name, Place to, Place from, Extent extent, int direction) {
  return [=] { return copy(name, to, from, extent, direction); };
}

Work filling(const char* name, Place to, Extent elements, uint32_t value, int bytes = 1) {
  return [=] { return fill(name, to, elements, value, bytes); };
}

int prepare(Launch& launch, const void* function, Dim grid, Dim block, size_t shared, void** arguments, void** extra = nullptr) {
  launch.kernel = kernel_of(function);
  if (launch.kernel == nullptr) return fail(kInvalidDeviceFunction, "a launch of a function that is no kernel of the program");
  launch.grid = grid;
  launch.block = block;
  launch.shared = shared;
  return pack(launch, arguments, extra);
}

int launch_in(void* stream, Launch launch) {
  return submit(stream, [launch = std::move(launch)] { return start(launch); });
}

int launch_plain(const void* function, Dim grid, Dim block, void** arguments, size_t shared, void* stream, bool together) {
  Launch launch;
  int error = prepare(launch, function, grid, block, shared, arguments);
  if (error != kSuccess) return error;
  launch.cooperative = together;
  return launch_in(stream, std::move(launch));
}

Kernel* known_kernel(const void* function, int& error) {
  Kernel* kernel = kernel_of(function);
  error = kernel == nullptr ? fail(kInvalidDeviceFunction, "a function that is no kernel of the program") : ask_kernel(*kernel);
  return error == kSuccess ? kernel : nullptr;
}

int symbol_place(const void* symbol, size_t count, size_t offset, void** at) {
  size_t size = 0;
  int error = symbol_of(symbol, at, &size);
  if (error != kSuccess) return error;
  if (offset > size || count > size - offset) {
    std::string range = std::to_string(count) + " bytes from byte " + std::to_string(offset);
    return fail(kInvalidValue, "a copy of " + range + " of a variable of " + std::to_string(size) + " bytes");
  }
  *at = static_cast<char*>(*at) + offset;
  return kSuccess;
}



int copy_3d(const Copy3* one, Work& work) {
  if (one->source_array != nullptr || one->target_array != nullptr) return refuse("cudaMemcpy3D of arrays");
  auto place = [](const PitchedPointer& p, const Position& from) {
    size_t slice = p.pitch * p.ysize;
    return Place{static_cast<char*>(p.at) + from.z * slice + from.y * p.pitch + from.x, p.pitch, slice};
  };
  Extent extent{one->extent.width, one->extent.height, one->extent.depth};
  work = copying("cudaMemcpy3D", place(one->target, one->target_position), place(one->source, one->source_position), extent,
                 one->direction);
  return kSuccess;
}

}  // namespace

// --- the device -----------------------------------------------------------------------------------

API cudaGetDeviceCount(int* count) {
  LOCKED;
  *count = 1;
  return done(device().name.empty() ? kNoDevice : kSuccess);
}
API cudaGetDevice(int* number) {
  LOCKED;
  *number = 0;
  return done(kSuccess);
}
API cudaSetDevice(int number) {
  LOCKED;
  return done(number == 0 ? kSuccess : kInvalidDevice);
}
API cudaInitDevice(int number, unsigned, unsigned) { return cudaSetDevice(number); }
API cudaChooseDevice(int* number, const void*) { return cudaGetDevice(number); }
API cudaSetDeviceFlags(unsigned) { return done(kSuccess); }
API cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return done(kSuccess);
}
API cudaGetDeviceProperties(void* out, int number) {
  LOCKED;
  if (number != 0) return done(kInvalidDevice);
  properties(out, false);
  return done(kSuccess);
}
API cudaGetDeviceProperties_v2(void* out, int number) {  // by programs of CUDA 12
  LOCKED;
  if (number != 0) return done(kInvalidDevice);
  properties(out, true);
  return done(kSuccess);
}
API cudaDeviceGetAttribute(int* value, int which, int number) {
  LOCKED;
  return number != 0 ? done(kInvalidDevice) : attribute(which, value);
}
API cudaDeviceGetLimit(size_t* value, int which) {
  LOCKED;
  const size_t usual[] = {1024, 1 << 20, 8 << 20};  // stack, printf, malloc
  *value = which >= 0 && which < 3 ? usual[which] : 0;
  return done(kSuccess);
}
API cudaDeviceSetLimit(int, size_t) { return done(kSuccess); }
API cudaDeviceGetPCIBusId(char* out, int size, int) {
  std::strncpy(out, "0000:00:00.0", size);
  return done(kSuccess);
}
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return done(kSuccess);
}
API cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return done(kSuccess);
}
API cudaDeviceGetCacheConfig(int* config) {
  *config = 0;
  return done(kSuccess);
}
API cudaDeviceSetCacheConfig(int) { return done(kSuccess); }
API cudaDeviceGetSharedMemConfig(int* config) {
  *config = 1;
  return done(kSuccess);
}
API cudaDeviceSetSharedMemConfig(int) { return done(kSuccess); }
API cudaDeviceSynchronize() {
  LOCKED;
  return synchronize();
}
API cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
API cudaDeviceReset() {
  LOCKED;
  return done(kSuccess);
}
API cudaCtxResetPersistingL2Cache() { return done(kSuccess); }
API cudaProfilerStart() { return done(kSuccess); }
API cudaProfilerStop() { return done(kSuccess); }
API cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return done(kSuccess);
}
API cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return done(kSuccess);
}

// --- errors ---------------------------------------------------------------------------------------

API cudaGetLastError() { return std::exchange(last_error, kSuccess); }
API cudaPeekAtLastError() { return last_error; }

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(int error) {
  const char* found = error_string(error);
  return found ? found : "unrecognized error code";
}
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(int error) {
  const char* found = error_name(error);
  return found ? found : "unrecognized error code";
}

// --- memory ---------------------------------------------------------------------------------------

API cudaMalloc(void** out, size_t size) {
  LOCKED;
  return allocate(out, size, kDeviceMemory);
}
API cudaMallocManaged(void** out, size_t size, unsigned) {
  LOCKED;
  return allocate(out, size, kManaged);
}
API cudaMallocHost(void** out, size_t size, unsigned) {
  LOCKED;
  return allocate(out, size, kPinned);
}
API cudaHostAlloc(void** out, size_t size, unsigned) {
  LOCKED;
  return allocate(out, size, kPinned);
}
API cudaMallocAsync(void** out, size_t size, void* stream) {
  LOCKED;
  Stream* in = stream_of(stream);
  if (in == nullptr) return kInvalidHandle;
  if (in->captured != nullptr) return refuse("cudaMallocAsync while its stream is captured");
  return allocate(out, size, kDeviceMemory);
}
API cudaMallocFromPoolAsync(void** out, size_t size, void*, void* stream) { return cudaMallocAsync(out, size, stream); }
API cudaMallocPitch(void** out, size_t* pitch, size_t width, size_t height) {
  LOCKED;
  *pitch = (width + kPitch - 1) / kPitch * kPitch;
  return allocate(out, *pitch * height, kDeviceMemory);
}
API cudaMalloc3D(PitchedPointer* out, Extent3 extent) {
  LOCKED;
  size_t pitch = (extent.width + kPitch - 1) / kPitch * kPitch;
  *out = {nullptr, pitch, extent.width, extent.height};
  return allocate(&out->at, pitch * extent.height * extent.depth, kDeviceMemory);
}
API cudaFree(void* p) {
  LOCKED;
  return release(p, "cudaFree", false);
}
API cudaFreeHost(void* p) {
  LOCKED;
  return release(p, "cudaFreeHost", true);
}
API cudaFreeAsync(void* p, void* stream) {
  LOCKED;
  return submit(stream, [=] { return release(p, "cudaFreeAsync", false); });
}
// The host's own memory is as it is: kernels cannot access it here.
API cudaHostRegister(void*, size_t, unsigned) { return done(kSuccess); }
API cudaHostUnregister(void*) { return done(kSuccess); }
API cudaHostGetDevicePointer(void** out, void* p, unsigned) {
  LOCKED;
  if (!in_arena(p)) return refuse("cudaHostGetDevicePointer of memory that cudaHostRegister was given");
  *out = p;
  return done(kSuccess);
}
API cudaHostGetFlags(unsigned* flags, void*) {
  *flags = 0;
  return done(kSuccess);
}
API cudaMemGetInfo(size_t* available, size_t* total) {
  LOCKED;
  *total = device().memory;
  *available = *total - allocated();
  return done(kSuccess);
}
API cudaPointerGetAttributes(PointerAttributes* out, const void* p) {
  LOCKED;
  const int types[] = {2, 3, 1};  // of Kind
  const Allocation* one = find(p);
  bool is_device = in_arena(p);
  *out = {};
  out->type = one ? types[one->kind] : is_device ? 2 : 0;
  out->device = is_device ? 0 : -2;
  out->device_pointer = is_device ? const_cast<void*>(p) : nullptr;
  out->host_pointer = !is_device || (one && one->kind != kDeviceMemory) ? const_cast<void*>(p) : nullptr;
  return done(kSuccess);
}
API cudaMemAdvise(const void*, size_t, int) { return done(kSuccess); }
API cudaMemPrefetchAsync(const void*, size_t) { return done(kSuccess); }
API cudaStreamAttachMemAsync(void*, void*, size_t, unsigned) { return done(kSuccess); }
API cudaDeviceGetDefaultMemPool(void** pool, int) {
  *pool = &last_error;  // any address: there is one pool
  return done(kSuccess);
}
API cudaDeviceGetMemPool(void** pool, int number) { return cudaDeviceGetDefaultMemPool(pool, number); }
API cudaDeviceSetMemPool(int, void*) { return done(kSuccess); }
API cudaMemPoolCreate(void** pool, const void*) { return cudaDeviceGetDefaultMemPool(pool, 0); }
API cudaMemPoolDestroy(void*) { return done(kSuccess); }
API cudaMemPoolSetAttribute(void*, int, void*) { return done(kSuccess); }
API cudaMemPoolSetAccess(void*, const void*, size_t) { return done(kSuccess); }
API cudaMemPoolTrimTo(void*, size_t) { return done(kSuccess); }

API cudaMemcpy(void* to, const void* from, size_t size, int direction) {
  LOCKED;
  return submit_now(copying("cudaMemcpy", {to}, {from}, {size}, direction));
}
ALSO(cudaMemcpy_ptds, cudaMemcpy);
API cudaMemcpyAsync(void* to, const void* from, size_t size, int direction, void* stream) {
  LOCKED;
  return submit(stream, copying("cudaMemcpyAsync", {to}, {from}, {size}, direction));
}
ALSO(cudaMemcpyAsync_ptsz, cudaMemcpyAsync);
API cudaMemcpyPeer(void* to, int, const void* from, int, size_t size) { return cudaMemcpy(to, from, size, 4); }
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, 4, stream);
}
API cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int direction) {
  LOCKED;
  return submit_now(copying("cudaMemcpy2D", {to, to_pitch}, {from, from_pitch}, {width, height}, direction));
}
ALSO(cudaMemcpy2D_ptds, cudaMemcpy2D);
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int direction, void* stream) {
  LOCKED;
  return submit(stream, copying("cudaMemcpy2DAsync", {to, to_pitch}, {from, from_pitch}, {width, height}, direction));
}
ALSO(cudaMemcpy2DAsync_ptsz, cudaMemcpy2DAsync);
API cudaMemcpy3D(const Copy3* one) {
  LOCKED;
  Work work;
  int error = copy_3d(one, work);
  return error != kSuccess ? error : submit_now(work);
}
ALSO(cudaMemcpy3D_ptds, cudaMemcpy3D);
API cudaMemcpy3DAsync(const Copy3* one, void* stream) {
  LOCKED;
  Work work;
  int error = copy_3d(one, work);
  return error != kSuccess ? error : submit(stream, work);
}
ALSO(cudaMemcpy3DAsync_ptsz, cudaMemcpy3DAsync);
API cudaMemcpyToSymbol(const void* symbol, const void* from, size_t count, size_t offset, int direction) {
  LOCKED;
  void* to = nullptr;
  int error = symbol_place(symbol, count, offset, &to);
  return error != kSuccess ? error : submit_now(copying("cudaMemcpyToSymbol", {to}, {from}, {count}, direction));
}
ALSO(cudaMemcpyToSymbol_ptds, cudaMemcpyToSymbol);
API cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t count, size_t offset, int direction, void* stream) {
  LOCKED;
  void* to = nullptr;
  int error = symbol_place(symbol, count, offset, &to);
  return error != kSuccess ? error : submit(stream, copying("cudaMemcpyToSymbolAsync", {to}, {from}, {count}, direction));
}
ALSO(cudaMemcpyToSymbolAsync_ptsz, cudaMemcpyToSymbolAsync);
API cudaMemcpyFromSymbol(void* to, const void* symbol, size_t count, size_t offset, int direction) {
  LOCKED;
  void* from = nullptr;
  int error = symbol_place(symbol, count, offset, &from);
  return error != kSuccess ? error : submit_now(copying("cudaMemcpyFromSymbol", {to}, {from}, {count}, direction));
}
ALSO(cudaMemcpyFromSymbol_ptds, cudaMemcpyFromSymbol);
API cudaMemcpyFromSymbolAsync(void* to, const void* symbol, size_t count, size_t offset, int direction, void* stream) {
  LOCKED;
  void* from = nullptr;
  int error = symbol_place(symbol, count, offset, &from);
  return error != kSuccess ? error : submit(stream, copying("cudaMemcpyFromSymbolAsync", {to}, {from}, {count}, direction));
}
ALSO(cudaMemcpyFromSymbolAsync_ptsz, cudaMemcpyFromSymbolAsync);
API cudaGetSymbolAddress(void** out, const void* symbol) {
  LOCKED;
  return symbol_of(symbol, out, nullptr);
}
API cudaGetSymbolSize(size_t* size, const void* symbol) {
  LOCKED;
  void* at;
  return symbol_of(symbol, &at, size);
}

API cudaMemset(void* to, int value, size_t size) {
  LOCKED;
  return submit_now(filling("cudaMemset", {to}, {size}, value));
}
ALSO(cudaMemset_ptds, cudaMemset);
API cudaMemsetAsync(void* to, int value, size_t size, void* stream) {
  LOCKED;
  return submit(stream, filling("cudaMemsetAsync", {to}, {size}, value));
}
ALSO(cudaMemsetAsync_ptsz, cudaMemsetAsync);
API cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  LOCKED;
  return submit_now(filling("cudaMemset2D", {to, pitch}, {width, height}, value));
}
ALSO(cudaMemset2D_ptds, cudaMemset2D);
API cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, void* stream) {
  LOCKED;
  return submit(stream, filling("cudaMemset2DAsync", {to, pitch}, {width, height}, value));
}
ALSO(cudaMemset2DAsync_ptsz, cudaMemset2DAsync);
API cudaMemset3D(PitchedPointer to, int value, Extent3 extent) {
  LOCKED;
  Place place{to.at, to.pitch, to.pitch * to.ysize};
  return submit_now(filling("cudaMemset3D", place, {extent.width, extent.height, extent.depth}, value));
}
ALSO(cudaMemset3D_ptds, cudaMemset3D);

// --- kernels --------------------------------------------------------------------------------------

namespace {

struct Pushed {
  Dim grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Pushed> pushed;

}  // namespace

extern "C" __attribute__((visibility("default"))) unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared,
                                                                                       void* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
API __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared, void** stream) {
  if (pushed.empty()) return done(kInvalidConfiguration);
  Pushed top = pushed.back();
  pushed.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *stream = top.stream;
  return kSuccess;
}
API __cudaGetKernel(void** kernel, const void* function) {
  LOCKED;
  *kernel = kernel_of(function);
  return *kernel != nullptr ? kSuccess : kInvalidDeviceFunction;
}
API cudaLaunchKernel(const void* function, Dim grid, Dim block, void** arguments, size_t shared, void* stream) {
  LOCKED;
  return launch_plain(function, grid, block, arguments, shared, stream, false);
}
ALSO(cudaLaunchKernel_ptsz, cudaLaunchKernel);
ALSO(__cudaLaunchKernel, cudaLaunchKernel);
ALSO(__cudaLaunchKernel_ptsz, cudaLaunchKernel);
API cudaLaunchCooperativeKernel(const void* function, Dim grid, Dim block, void** arguments, size_t shared, void* stream) {
  LOCKED;
  return launch_plain(function, grid, block, arguments, shared, stream, true);
}
ALSO(cudaLaunchCooperativeKernel_ptsz, cudaLaunchCooperativeKernel);
API cudaLaunchKernelExC(const Config* config, const void* function, void** arguments) {
  LOCKED;
  Launch launch;
  int error = prepare(launch, function, config->grid, config->block, config->shared, arguments);
  if (error != kSuccess) return error;
  for (unsigned n = 0; n < config->count; ++n) {
    const Attribute& one = config->attributes[n];
    if (one.id == kCooperative) launch.cooperative = one.number != 0;
    if (one.id == kCluster) launch.cluster = {one.size[0], one.size[1], one.size[2]};
  }
  return launch_in(config->stream, std::move(launch));
}
ALSO(cudaLaunchKernelExC_ptsz, cudaLaunchKernelExC);
API cudaGetKernel(void** kernel, const void* function) { return __cudaGetKernel(kernel, function); }
API cudaGetFuncBySymbol(void** kernel, const void* function) { return __cudaGetKernel(kernel, function); }
API cudaFuncGetAttributes(FunctionAttributes* out, const void* function) {
  LOCKED;
  int error;
  Kernel* kernel = known_kernel(function, error);
  if (kernel == nullptr) return error;
  *out = {};
  out->shared = kernel->shared;
  out->constant = kernel->constant;
  out->local = kernel->local;
  out->threads = kernel->threads ? static_cast<int>(kernel->threads) : 1024;
  out->registers = 32;  // ptxas would know
  out->ptx = out->binary = static_cast<int>(kernel->version);
  out->dynamic = kernel->dynamic >= 0 ? kernel->dynamic : static_cast<int>((48 << 10) - std::min<uint64_t>(kernel->shared, 48 << 10));
  out->carveout = -1;
  out->nonportable = kernel->nonportable;
  return done(kSuccess);
}
API cudaFuncSetAttribute(const void* function, int which, int value) {
  LOCKED;
  int error;
  Kernel* kernel = known_kernel(function, error);
  if (kernel == nullptr) return error;
  if (which == 14) kernel->nonportable = value;
  if (which != 8) return done(kSuccess);
  if (value < 0 || kernel->shared + value > device().shared_optin) {
    std::string most = std::to_string(device().shared_optin - std::min<uint64_t>(kernel->shared, device().shared_optin));
    std::string text = kernel->name + " asks for " + std::to_string(value) + " bytes of dynamic shared memory";
    return fail(kInvalidValue, text + ", and " + device().name + " has " + most + " for it");
  }
  kernel->dynamic = value;
  return done(kSuccess);
}
API cudaFuncSetCacheConfig(const void*, int) { return done(kSuccess); }
API cudaFuncSetSharedMemConfig(const void*, int) { return done(kSuccess); }
API cudaFuncGetName(const char** name, const void* function) {
  LOCKED;
  Kernel* kernel = kernel_of(function);
  if (kernel == nullptr) return done(kInvalidDeviceFunction);
  *name = kernel->name.c_str();
  return done(kSuccess);
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads, size_t shared,
                                                           unsigned) {
  LOCKED;
  int error;
  Kernel* kernel = known_kernel(function, error);
  if (kernel != nullptr) *blocks = occupancy(*kernel, threads, shared);
  return error;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
API cudaOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, const void* function, int blocks, int) {
  LOCKED;
  int error;
  Kernel* kernel = known_kernel(function, error);
  if (kernel == nullptr) return error;
  size_t each = device().shared_sm / std::max(blocks, 1), taken = kernel->shared + device().shared_reserved;
  *bytes = std::min<size_t>(each > taken ? each - taken : 0, device().shared_optin - kernel->shared);
  return done(kSuccess);
}
API cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const Config* config) {
  LOCKED;
  int error, size = 1;
  Kernel* kernel = known_kernel(function, error);
  if (kernel == nullptr) return error;
  for (unsigned n = 0; n < config->count; ++n) {
    const Attribute& one = config->attributes[n];
    if (one.id == kCluster) size = static_cast<int>(one.size[0] * one.size[1] * one.size[2]);
  }
  const Dim& block = config->block;
  int blocks = occupancy(*kernel, static_cast<int>(block.x * block.y * block.z), config->shared);
  *clusters = static_cast<int>(device().sms) / std::max(size, 1) * std::min(blocks, 1);
  return done(kSuccess);
}
API cudaOccupancyMaxPotentialClusterSize(int* size, const void*, const Config*) {
  LOCKED;
  *size = device().capability >= 90 ? 8 : 1;
  return done(kSuccess);
}
API cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long, int* status) {
  LOCKED;
  *out = function(name);
  if (status != nullptr) *status = *out == nullptr;
  return done(kSuccess);
}
ALSO(cudaGetDriverEntryPoint_ptsz, cudaGetDriverEntryPoint);
API cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long flags, int* status) {
  return cudaGetDriverEntryPoint(name, out, flags, status);
}
ALSO(cudaGetDriverEntryPointByVersion_ptsz, cudaGetDriverEntryPointByVersion);

// --- streams and events ---------------------------------------------------------------------------

API cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  LOCKED;
  Stream* made = streams.make();
  made->flags = flags;
  made->priority = priority;
  *out = made;
  return done(kSuccess);
}
API cudaStreamCreate(void** out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaStreamCreateWithFlags(void** out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaStreamDestroy(void* stream) {
  LOCKED;
  return streams.end(stream) ? done(kSuccess) : fail(kInvalidHandle, "a stream that does not exist is destroyed");
}
API cudaStreamSynchronize(void* stream) {
  LOCKED;
  return synchronize_stream(stream);
}
ALSO(cudaStreamSynchronize_ptsz, cudaStreamSynchronize);
API cudaStreamQuery(void* stream) { return cudaStreamSynchronize(stream); }
ALSO(cudaStreamQuery_ptsz, cudaStreamQuery);
API cudaStreamGetFlags(void* stream, unsigned* flags) {
  LOCKED;
  Stream* found = stream_of(stream);
  if (found != nullptr) *flags = found->flags;
  return found != nullptr ? done(kSuccess) : kInvalidHandle;
}
ALSO(cudaStreamGetFlags_ptsz, cudaStreamGetFlags);
API cudaStreamGetPriority(void* stream, int* priority) {
  LOCKED;
  Stream* found = stream_of(stream);
  if (found != nullptr) *priority = found->priority;
  return found != nullptr ? done(kSuccess) : kInvalidHandle;
}
ALSO(cudaStreamGetPriority_ptsz, cudaStreamGetPriority);
API cudaStreamGetDevice(void*, int* number) { return cudaGetDevice(number); }
API cudaStreamSetAttribute(void*, int, const void*) { return done(kSuccess); }
ALSO(cudaStreamSetAttribute_ptsz, cudaStreamSetAttribute);
API cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  LOCKED;
  return wait_for(stream, event);
}
ALSO(cudaStreamWaitEvent_ptsz, cudaStreamWaitEvent);
API cudaLaunchHostFunc(void* stream, Callback called, void* data) {
  LOCKED;
  return submit(stream, [=] {
    called(data);
    return done(kSuccess);
  });
}
ALSO(cudaLaunchHostFunc_ptsz, cudaLaunchHostFunc);
API cudaStreamAddCallback(void* stream, StreamCallback called, void* data, unsigned) {
  LOCKED;
  return submit(stream, [=] {
    called(stream, kSuccess, data);
    return done(kSuccess);
  });
}
ALSO(cudaStreamAddCallback_ptsz, cudaStreamAddCallback);
API cudaEventCreateWithFlags(void** out, unsigned flags) {
  LOCKED;
  Event* made = events.make();
  made->flags = flags;
  *out = made;
  return done(kSuccess);
}
API cudaEventCreate(void** out) { return cudaEventCreateWithFlags(out, 0); }
API cudaEventDestroy(void* event) {
  LOCKED;
  return events.end(event) ? done(kSuccess) : fail(kInvalidHandle, "an event that does not exist is destroyed");
}
API cudaEventRecord(void* event, void* stream) {
  LOCKED;
  return record(event, stream);
}
ALSO(cudaEventRecord_ptsz, cudaEventRecord);
API cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
ALSO(cudaEventRecordWithFlags_ptsz, cudaEventRecordWithFlags);
API cudaEventSynchronize(void* event) {
  LOCKED;
  return events.has(event) ? synchronize() : fail(kInvalidHandle, "an event that does not exist is waited for");
}
API cudaEventQuery(void* event) {
  LOCKED;
  return events.has(event) ? done(kSuccess) : fail(kInvalidHandle, "an event that does not exist is asked for");
}
API cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
  LOCKED;
  return elapsed(milliseconds, from, to);
}
ALSO(cudaEventElapsedTime_v2, cudaEventElapsedTime);

// --- graphs ---------------------------------------------------------------------------------------

API cudaStreamBeginCapture(void* stream, int) {
  LOCKED;
  return begin_capture(stream);
}
ALSO(cudaStreamBeginCapture_ptsz, cudaStreamBeginCapture);
API cudaStreamEndCapture(void* stream, void** graph) {
  LOCKED;
  return end_capture(stream, graph);
}
ALSO(cudaStreamEndCapture_ptsz, cudaStreamEndCapture);
API cudaStreamIsCapturing(void* stream, int* status) {
  LOCKED;
  Stream* found = stream_of(stream);
  if (found != nullptr) *status = found->captured != nullptr;
  return found != nullptr ? done(kSuccess) : kInvalidHandle;
}
ALSO(cudaStreamIsCapturing_ptsz, cudaStreamIsCapturing);
API cudaThreadExchangeStreamCaptureMode(int*) { return done(kSuccess); }
API cudaGraphCreate(void** graph, unsigned) {
  LOCKED;
  *graph = graphs.make();
  return done(kSuccess);
}
API cudaGraphClone(void** clone, void* graph) {
  LOCKED;
  Graph* found = graphs.get(graph);
  if (found == nullptr) return fail(kInvalidHandle, "a graph that does not exist is cloned");
  Graph* made = graphs.make();
  *made = *found;
  *clone = made;
  return done(kSuccess);
}
API cudaGraphDestroy(void* graph) {
  LOCKED;
  return graphs.end(graph) ? done(kSuccess) : fail(kInvalidHandle, "a graph that does not exist is destroyed");
}
API cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  LOCKED;
  Graph* found = graphs.get(graph);
  if (found == nullptr) return fail(kInvalidHandle, "a graph that does not exist is instantiated");
  Graph* made = executables.make();
  *made = *found;
  *executable = made;
  return done(kSuccess);
}
ALSO(cudaGraphInstantiate, cudaGraphInstantiateWithFlags);
API cudaGraphExecUpdate(void* executable, void* graph, void* result) {
  LOCKED;
  Graph *old = executables.get(executable), *found = graphs.get(graph);
  if (old == nullptr || found == nullptr) return fail(kInvalidHandle, "a graph that does not exist is updated");
  *old = *found;
  if (result != nullptr) std::memset(result, 0, 24);
  return done(kSuccess);
}
API cudaGraphUpload(void*, void*) { return done(kSuccess); }
ALSO(cudaGraphUpload_ptsz, cudaGraphUpload);
API cudaGraphLaunch(void* executable, void* stream) {
  LOCKED;
  return run_graph(executable, stream);
}
ALSO(cudaGraphLaunch_ptsz, cudaGraphLaunch);
API cudaGraphExecDestroy(void* executable) {
  LOCKED;
  return executables.end(executable) ? done(kSuccess) : fail(kInvalidHandle, "a graph that does not exist is destroyed");
}
API cudaGraphGetNodes(void* graph, void** nodes, size_t* count) {
  LOCKED;
  Graph* found = graphs.get(graph);
  if (found == nullptr) return fail(kInvalidHandle, "the nodes of a graph that does not exist");
  size_t most = nodes == nullptr ? 0 : std::min(*count, found->work.size());
  for (size_t n = 0; n < most; ++n) nodes[n] = new Node{found, n};
  *count = found->work.size();
  return done(kSuccess);
}
// Nodes are added after those that they depend on, and are executed in that order.
API cudaGraphAddEmptyNode(void** node, void* graph, const void*, size_t) {
  LOCKED;
  return add_node(node, graph, [] { return kSuccess; });
}
API cudaGraphAddKernelNode(void** node, void* graph, const void*, size_t, const KernelNode* one) {
  LOCKED;
  Launch launch;
  int error = prepare(launch, one->function, one->grid, one->block, one->shared, one->parameters, one->extra);
  return error != kSuccess ? error : add_node(node, graph, [launch] { return start(launch); });
}
API cudaGraphExecKernelNodeSetParams(void* executable, void* node, const KernelNode* one) {
  LOCKED;
  Graph* found = executables.get(executable);
  size_t number = node == nullptr ? SIZE_MAX : static_cast<Node*>(node)->number;
  if (found == nullptr || number >= found->work.size()) return fail(kInvalidHandle, "a node of a graph that does not exist");
  Launch launch;
  int error = prepare(launch, one->function, one->grid, one->block, one->shared, one->parameters, one->extra);
  if (error == kSuccess) found->work[number] = [launch] { return start(launch); };
  return error;
}
API cudaGraphAddMemcpyNode1D(void** node, void* graph, const void*, size_t, void* to, const void* from, size_t size,
                             int direction) {
  LOCKED;
  return add_node(node, graph, copying("a memcpy node", {to}, {from}, {size}, direction));
}
API cudaGraphAddMemcpyNode(void** node, void* graph, const void*, size_t, const Copy3* one) {
  LOCKED;
  Work work;
  int error = copy_3d(one, work);
  return error != kSuccess ? error : add_node(node, graph, work);
}
API cudaGraphAddMemsetNode(void** node, void* graph, const void*, size_t, const FillNode* one) {
  LOCKED;
  Extent extent{one->width, one->height};
  return add_node(node, graph, filling("a memset node", {one->to, one->pitch}, extent, one->value, static_cast<int>(one->bytes)));
}
API cudaGraphAddHostNode(void** node, void* graph, const void*, size_t, const std::pair<Callback, void*>* one) {
  LOCKED;
  return add_node(node, graph, [called = one->first, data = one->second] {
    called(data);
    return kSuccess;
  });
}
