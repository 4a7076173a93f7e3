// What stands in for the CUDA runtime and the driver: a program that was built by nvcc calls it, and its kernels run in
// the emulator. The emulator is another process (emulate/program.py), which shares the device's memory with this one.
//
// Every call does its work before it returns. Streams, events and graphs keep the order of the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// A function of CUDA: all of them return an error's number but for a few.
#define API extern "C" __attribute__((visibility("default"))) int

namespace fwh {

// --- errors ---------------------------------------------------------------------------------------

// The runtime's numbers; the driver's are the same.
enum Error : int {
  kSuccess = 0, kInvalidValue = 1, kMemory = 2, kInitialization = 3, kInvalidConfiguration = 9, kInvalidPitch = 12,
  kInvalidSymbol = 13, kInvalidMemcpyDirection = 21, kInvalidDeviceFunction = 98, kNoDevice = 100, kInvalidDevice = 101,
  kInvalidKernelImage = 200, kNoKernelImage = 209, kInvalidHandle = 400, kIllegalState = 401, kNotFound = 500,
  kIllegalAddress = 700, kNotSupported = 801, kCaptureUnsupported = 900, kCaptureInvalid = 901, kCaptureUnmatched = 903,
  kCaptureImplicit = 906,
};

const char* error_name(int error);    // null for an unknown one
const char* error_string(int error);  // null for an unknown one
// Keeps the error for cudaGetLastError.
int done(int error);
// The same, and tells it: what the program does wrong.
int fail(int error, const std::string& text);
// Tells a function, or a way to call it, that is not there.
int refuse(const std::string& name);

extern std::recursive_mutex lock;
extern thread_local int last_error;

// --- the emulator ---------------------------------------------------------------------------------

enum Request : uint32_t { kHello = 1, kDevice, kModule, kKernel, kSymbol, kLaunch, kNote, kTensorMap };
enum Note : uint32_t { kRefused = 1, kMisuse };

class Message {
 public:
  Message& number(uint64_t value) { return raw(&value, sizeof value); }
  Message& text(const std::string& value) { return bytes(value.data(), value.size()); }
  Message& bytes(const void* data, size_t size) {
    number(size);
    return raw(data, size);
  }
  const std::string& content() const { return content_; }

 private:
  Message& raw(const void* data, size_t size) {
    content_.append(static_cast<const char*>(data), size);
    return *this;
  }
  std::string content_;
};

class Answer {
 public:
  int error = kInitialization;
  std::string content;
  uint64_t number() {
    uint64_t value = 0;
    if (at_ + sizeof value <= content.size()) std::memcpy(&value, content.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    size_t size = number();
    if (at_ > content.size() || size > content.size() - at_) return {};
    at_ += size;
    return content.substr(at_ - size, size);
  }

 private:
  size_t at_ = 0;
};

bool is_forked();
// Connects at the first call.
Answer ask(Request request, const Message& message);

// --- memory ---------------------------------------------------------------------------------------

// Addresses of device memory, alike in the program and in its kernels. Only what is managed or pinned can be accessed
// by the program there; the library accesses all of it elsewhere (`shadow`), and so does the emulator.
constexpr uint64_t kArena = uint64_t{1} << 40, kArenaSize = uint64_t{1} << 40;
constexpr uint64_t kModules = kArena + (kArenaSize - (kArenaSize >> 4));  // from here on, variables of modules

enum Kind : uint64_t { kDeviceMemory, kManaged, kPinned };

struct Allocation {
  uint64_t base, size;
  Kind kind;
  uint64_t number;  // in the order of the program
};

// Makes the arena; the emulator is given its file. False if this process cannot have it.
bool open_arena(int& file);
inline bool in_arena(const void* p) { return reinterpret_cast<uint64_t>(p) - kArena < kArenaSize; }
int allocate(void** out, size_t size, Kind kind);
// Lets the program access a variable of a module.
void expose(void* p, size_t size);
int release(void* p, const char* function, bool host);
const Allocation* find(const void* p);  // the living one that an address is in, or null
const std::map<uint64_t, Allocation>& living();
const std::vector<Allocation>& freed();
uint64_t allocated();

// A rectangle: rows of `width` bytes that are `pitch` bytes apart, `height` in a slice, `depth` slices.
struct Extent {
  size_t width = 0, height = 1, depth = 1;
};
struct Place {
  const void* at;
  size_t pitch = 0, slice = 0;
};
int copy(const char* function, Place to, Place from, Extent extent, int direction);
int fill(const char* function, Place to, Extent elements, uint32_t value, int bytes);

// --- programs -------------------------------------------------------------------------------------

struct Module;

struct Kernel {
  Module* module = nullptr;
  std::string name;
  bool known = false;  // whether the emulator was asked for what follows
  std::vector<std::pair<uint64_t, uint64_t>> parameters;  // offset and size of each
  uint64_t shared = 0, local = 0, constant = 0, threads = 0, version = 0;
  uint64_t cluster = 0;  // whether it names its clusters' size
  int dynamic = -1;      // the limit that the program has set; -1: none
  int nonportable = 0;
};

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

struct Launch {
  Kernel* kernel = nullptr;
  Dim grid, block, cluster{0, 0, 0};
  size_t shared = 0;
  bool cooperative = false;
  std::string parameters;
};

Kernel* kernel_of(const void* handle);      // of a host function or a handle, or null
int ask_kernel(Kernel& kernel);             // fills in what the emulator knows
int pack(Launch& launch, void** arguments, void** extra);
int start(const Launch& launch);
Module* load_image(const void* image);
Kernel* get_kernel(Module& module, const char* name);
int symbol(Module& module, const char* name, void** address, size_t* size);
int symbol_of(const void* host, void** address, size_t* size);
void unload(Module* module);
int module_id(const Module& module);
size_t kernel_count(Module& module);

// --- order ----------------------------------------------------------------------------------------

using Work = std::function<int()>;

// Does it, or adds it to the graph that the stream's work is captured in.
int submit(void* stream, Work work);
// The same for a call that waits for all streams: it cannot be captured.
int submit_now(Work work);
int synchronize_stream(void* stream);
int synchronize();
bool capturing();
// What ended a kernel: the calls that wait for it return it from then on.
void break_off(int error);

// --- the device -----------------------------------------------------------------------------------

struct Device {
  std::string name;
  uint64_t capability = 0, sms = 0, memory = 0, shared = 0, shared_optin = 0, shared_sm = 0, shared_reserved = 0;
  uint64_t threads_sm = 0, blocks_sm = 0, registers_sm = 0, l2 = 0, clock_khz = 0, bus = 0;
};

const Device& device();
int attribute(int which, int* value);
// Writes a cudaDeviceProp. CUDA 12 has fields that CUDA 13 has not; `old` says which layout it is.
void properties(void* out, bool old);
// Blocks of the kernel that an SM holds, by threads and shared memory.
int occupancy(Kernel& kernel, int threads, size_t shared);
// The function of a name in this library, or null.
void* function(const std::string& name);

struct Attribute {  // CUlaunchAttribute and cudaLaunchAttribute
  int id, pad;
  union {
    uint32_t size[3];
    int number;
    char room[64];
  };
};
constexpr int kCooperative = 2, kCluster = 4;

}  // namespace fwh

// Calls of several threads come one after another.
#define LOCKED_ALWAYS std::lock_guard<std::recursive_mutex> guard(fwh::lock)
// The same at the beginning of a function of CUDA, which fails in a process that was forked after the first such call.
#define LOCKED  \
  LOCKED_ALWAYS; \
  if (fwh::is_forked()) return fwh::done(fwh::kInitialization)

// Another name of a function that is defined above: streams are alike here.
#define ALSO(other, name) __asm__(".globl " #other "\n.type " #other ", %function\n.set " #other ", " #name)
