// Functions that are not emulated: each says its name. The linker takes these only where there is no other definition.
#include <dlfcn.h>

#include "host.h"

#define NAME(name) \
  extern "C" __attribute__((weak, visibility("default"))) int name() { return fwh::refuse(#name); }
#include "names.inc"
#undef NAME

namespace fwh {

void* function(const std::string& name) {
  static void* self = [] {
    Dl_info about{};
    dladdr(reinterpret_cast<void*>(&refuse), &about);
    return dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  if (void* found = dlsym(self, name.c_str())) return found;
  return nullptr;
}

}  // namespace fwh
