// A program may have the runtime in its own file (nvcc -cudart static, the default). Before it starts, each function of
// the runtime in it becomes a jump to the one here. The file's symbols say where they are.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <set>

#include "host.h"

namespace fwh {
namespace {

#if defined(__x86_64__)
struct __attribute__((packed)) Jump {  // jmp *0(%rip), then the address
  uint8_t code[6] = {0xff, 0x25, 0, 0, 0, 0};
  void* to;
};
#elif defined(__aarch64__)
struct Jump {  // ldr x16, 8; br x16, then the address
  uint32_t code[2] = {0x58000050, 0xd61f0200};
  void* to;
};
#endif

// A file in memory.
class File {
 public:
  explicit File(const char* name) {
    int file = open(name, O_RDONLY | O_CLOEXEC);
    struct stat about{};
    if (file >= 0 && fstat(file, &about) == 0 && about.st_size > static_cast<off_t>(sizeof(ElfW(Ehdr)))) {
      size_ = about.st_size;
      void* all = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      if (all != MAP_FAILED) data_ = static_cast<const char*>(all);
    }
    if (file >= 0) close(file);
  }
  ~File() {
    if (data_ != nullptr) munmap(const_cast<char*>(data_), size_);
  }
  // `count` elements at an offset, or null.
  template <class T>
  const T* at(uint64_t offset, uint64_t count = 1) const {
    bool inside = data_ != nullptr && offset <= size_ && count <= (size_ - offset) / sizeof(T);
    return inside ? reinterpret_cast<const T*>(data_ + offset) : nullptr;
  }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

// Calls f(name, symbol) for each function that the file has.
template <class F>
void each_function(const File& file, F&& f) {
  auto head = file.at<ElfW(Ehdr)>(0);
  if (head == nullptr || std::memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) return;
  auto sections = file.at<ElfW(Shdr)>(head->e_shoff, head->e_shnum);
  for (int n = 0; sections != nullptr && n < head->e_shnum; ++n) {
    const ElfW(Shdr)& table = sections[n];
    if (table.sh_type != SHT_SYMTAB || table.sh_link >= head->e_shnum) continue;
    const ElfW(Shdr)& names = sections[table.sh_link];
    auto symbols = file.at<ElfW(Sym)>(table.sh_offset, table.sh_size / sizeof(ElfW(Sym)));
    auto text = file.at<char>(names.sh_offset, names.sh_size);
    for (size_t s = 0; symbols != nullptr && text != nullptr && s < table.sh_size / sizeof(ElfW(Sym)); ++s) {
      const ElfW(Sym)& one = symbols[s];
      if (ELF64_ST_TYPE(one.st_info) == STT_FUNC && one.st_value != 0 && one.st_name < names.sh_size) f(text + one.st_name, one);
    }
  }
}

bool is_runtime(const char* name) { return std::strncmp(name, "cuda", 4) == 0 || std::strncmp(name, "__cuda", 6) == 0; }

bool write_jump(uintptr_t at, void* to) {
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t first = at / page * page, size = (at + sizeof(Jump) - first + page - 1) / page * page;
  auto start = reinterpret_cast<void*>(first);
  if (mprotect(start, size, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return false;
  Jump jump;
  jump.to = to;
  std::memcpy(reinterpret_cast<void*>(at), &jump, sizeof jump);
  __builtin___clear_cache(reinterpret_cast<char*>(at), reinterpret_cast<char*>(at + sizeof jump));
  return mprotect(start, size, PROT_READ | PROT_EXEC) == 0;
}

// Whether the file has a runtime of its own, which now is the one here.
bool patch(const File& file, uintptr_t base) {
  bool has_runtime = false;
  each_function(file, [&](const char* name, const ElfW(Sym)&) {
    has_runtime |= std::strcmp(name, "__cudaRegisterFatBinary") == 0;
  });
  if (!has_runtime) return false;
  each_function(file, [&](const char* name, const ElfW(Sym)& one) {
    if (!is_runtime(name) || one.st_size < sizeof(Jump)) return;
    if (void* to = function(name)) write_jump(base + one.st_value, to);
  });
  return true;
}

std::set<uintptr_t>& seen() {
  static std::set<uintptr_t> all;
  return all;
}

// Where this library is.
uintptr_t own_base() {
  Dl_info about{};
  dladdr(reinterpret_cast<void*>(&own_base), &about);
  return reinterpret_cast<uintptr_t>(about.dli_fbase);
}

int visit(dl_phdr_info* about, size_t, void* started) {
  static const uintptr_t own = own_base();
  if (about->dlpi_addr == own) return 0;
  if (!seen().insert(about->dlpi_addr).second) return 0;
  const char* name = about->dlpi_name != nullptr && *about->dlpi_name ? about->dlpi_name : "/proc/self/exe";
  File file(name);
  if (!patch(file, about->dlpi_addr) || started == nullptr) return 0;
  // The file has registered its kernels with its own runtime already: once more, with this one.
  each_function(file, [&](const char* name, const ElfW(Sym)& one) {
    if (std::strncmp(name, "_ZL24__sti____cudaRegisterAllv", 30) == 0 || std::strncmp(name, "__sti____cudaRegisterAll", 24) == 0) {
      reinterpret_cast<void (*)()>(about->dlpi_addr + one.st_value)();
    }
  });
  return 0;
}

// Before the program's own initialisers.
__attribute__((constructor)) void begin() { dl_iterate_phdr(visit, nullptr); }

}  // namespace
}  // namespace fwh

// A library that is loaded later may have a runtime too.
extern "C" __attribute__((visibility("default"))) void* dlopen(const char* name, int flags) {
  using Open = void* (*)(const char*, int);
  static auto next = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"));
  void* found = next(name, flags);
  if (found != nullptr && (flags & RTLD_NOLOAD) == 0) {
    LOCKED_ALWAYS;
    int started = 1;
    dl_iterate_phdr(fwh::visit, &started);
  }
  return found;
}
