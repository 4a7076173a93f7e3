// The program's device code: what nvcc's initialisers register, and what the driver's functions load. The emulator takes
// its PTX when a kernel or a variable is first used.
#include <set>

#include "host.h"

namespace fwh {

struct Module {
  int id = -1;  // the emulator's number, or -1: not sent yet
  std::vector<std::string> images;
  std::map<std::string, Kernel*> kernels;
  std::map<std::string, void**> managed;  // host variables that wait for an address
};

namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1, kFatbinMagic = 0xba55ed50;

struct Wrapper {
  uint32_t magic, version;
  const void* data;
  const void* const* linked;  // version 2: the fat binaries of the files that were linked, then null
};

struct FatbinHead {
  uint32_t magic;
  uint16_t version, head;
  uint64_t size;
};

struct Symbol {
  Module* module;
  std::string name;
};

std::set<Module*>& modules() {
  static std::set<Module*> all;
  return all;
}
std::map<const void*, Kernel*>& functions() {
  static std::map<const void*, Kernel*> all;
  return all;
}
std::map<const void*, Symbol>& symbols() {
  static std::map<const void*, Symbol> all;
  return all;
}
std::set<const void*>& handles() {
  static std::set<const void*> all;
  return all;
}

void add_fatbin(Module& module, const void* data) {
  FatbinHead head;
  std::memcpy(&head, data, sizeof head);
  if (head.magic != kFatbinMagic) return;
  module.images.emplace_back(static_cast<const char*>(data), head.head + head.size);
}

void add_image(Module& module, const void* image) {
  uint32_t magic;
  std::memcpy(&magic, image, sizeof magic);
  if (magic == kWrapperMagic) {
    auto wrapper = static_cast<const Wrapper*>(image);
    add_fatbin(module, wrapper->data);
    if (wrapper->version == 2 && wrapper->linked != nullptr) {
      for (auto one = wrapper->linked; *one != nullptr; ++one) add_fatbin(module, *one);
    }
  } else if (magic == kFatbinMagic) {
    add_fatbin(module, image);
  } else if (std::memcmp(image, "\x7f" "ELF", 4) == 0) {
    module.images.emplace_back(static_cast<const char*>(image), 64);  // enough to say what it is
  } else {
    module.images.emplace_back(static_cast<const char*>(image));  // the text of PTX
  }
}

int send(Module& module) {
  if (module.id >= 0) return kSuccess;
  Message message;
  message.number(module.images.size());
  for (const std::string& image : module.images) message.text(image);
  Answer answer = ask(kModule, message);
  if (answer.error == kSuccess) module.id = static_cast<int>(answer.number());
  return answer.error;
}

// All that is registered: which GPU there is depends on it.
void send_all() {
  for (Module* module : modules()) send(*module);
}

void place_managed(Module& module) {
  auto waiting = std::move(module.managed);
  module.managed.clear();
  for (auto& [name, variable] : waiting) {
    void* address = nullptr;
    size_t size = 0;
    if (symbol(module, name.c_str(), &address, &size) == kSuccess) {
      expose(address, size);
      *variable = address;
    }
  }
}

}  // namespace

const Device& device() {
  static Device gpu;
  if (gpu.name.empty()) {
    send_all();
    Answer answer = ask(kDevice, Message());
    gpu.name = answer.text();
    for (uint64_t* value : {&gpu.capability, &gpu.sms, &gpu.memory, &gpu.shared, &gpu.shared_optin, &gpu.shared_sm,
                            &gpu.shared_reserved, &gpu.threads_sm, &gpu.blocks_sm, &gpu.registers_sm, &gpu.l2,
                            &gpu.clock_khz, &gpu.bus}) {
      *value = answer.number();
    }
  }
  return gpu;
}

Module* load_image(const void* image) {
  auto module = new Module;
  add_image(*module, image);
  modules().insert(module);
  return module;
}

void unload(Module* module) { modules().erase(module); }  // its memory stays: kernels may still be named

int module_id(const Module& module) { return module.id; }

Kernel* get_kernel(Module& module, const char* name) {
  Kernel*& kernel = module.kernels[name];
  if (kernel == nullptr) {
    kernel = new Kernel;
    kernel->module = &module;
    kernel->name = name;
    handles().insert(kernel);
  }
  return kernel;
}

size_t kernel_count(Module& module) { return module.kernels.size(); }

Kernel* kernel_of(const void* handle) {
  if (handles().count(handle)) return static_cast<Kernel*>(const_cast<void*>(handle));
  auto found = functions().find(handle);
  return found == functions().end() ? nullptr : found->second;
}

int ask_kernel(Kernel& kernel) {
  if (kernel.known) return kSuccess;
  device();
  int error = send(*kernel.module);
  if (error != kSuccess) return done(error);
  Answer answer = ask(kKernel, Message().number(kernel.module->id).text(kernel.name));
  if (answer.error != kSuccess) return done(answer.error);
  for (uint64_t* value : {&kernel.shared, &kernel.local, &kernel.constant, &kernel.threads, &kernel.version, &kernel.cluster}) {
    *value = answer.number();
  }
  kernel.parameters.resize(answer.number());
  for (auto& [offset, size] : kernel.parameters) {
    offset = answer.number();
    size = answer.number();
  }
  kernel.known = true;
  place_managed(*kernel.module);
  return kSuccess;
}

int symbol(Module& module, const char* name, void** address, size_t* size) {
  device();
  int error = send(module);
  if (error != kSuccess) return done(error);
  Answer answer = ask(kSymbol, Message().number(module.id).text(name));
  if (answer.error != kSuccess) return done(answer.error);
  if (address != nullptr) *address = reinterpret_cast<void*>(answer.number());
  if (size != nullptr) *size = answer.number();
  return done(kSuccess);
}

int symbol_of(const void* host, void** address, size_t* size) {
  auto found = symbols().find(host);
  if (found == symbols().end()) return fail(kInvalidSymbol, "a symbol that is no variable of the device");
  return symbol(*found->second.module, found->second.name.c_str(), address, size);
}

}  // namespace fwh

using namespace fwh;

// --- what nvcc's initialisers call ----------------------------------------------------------------

extern "C" {

__attribute__((visibility("default"))) void** __cudaRegisterFatBinary(void* image) {
  LOCKED_ALWAYS;
  return reinterpret_cast<void**>(load_image(image));
}

__attribute__((visibility("default"))) void __cudaRegisterFatBinaryEnd(void**) {}

// The program is about to end. What its other destructors call may still need the module.
__attribute__((visibility("default"))) void __cudaUnregisterFatBinary(void**) {}

__attribute__((visibility("default"))) void __cudaRegisterFunction(void** module, const char* host, char*, const char* name,
                                                                   int, void*, void*, void*, void*, int*) {
  LOCKED_ALWAYS;
  functions()[host] = get_kernel(*reinterpret_cast<Module*>(module), name);
}

__attribute__((visibility("default"))) void __cudaRegisterVar(void** module, char* host, char*, const char* name, int, size_t,
                                                              int, int) {
  LOCKED_ALWAYS;
  symbols()[host] = {reinterpret_cast<Module*>(module), name};
}

__attribute__((visibility("default"))) void __cudaRegisterManagedVar(void** module, void** host, char*, const char* name, int,
                                                                     size_t, int, int) {
  LOCKED_ALWAYS;
  symbols()[host] = {reinterpret_cast<Module*>(module), name};
  reinterpret_cast<Module*>(module)->managed[name] = host;
}

__attribute__((visibility("default"))) void __cudaRegisterHostVar(void**, const char*, char*, size_t) {
  refuse("__cudaRegisterHostVar");
}

// Before the host first uses a managed variable.
__attribute__((visibility("default"))) char __cudaInitModule(void** module) {
  LOCKED_ALWAYS;
  place_managed(*reinterpret_cast<Module*>(module));
  return 1;
}

}  // extern "C"
