// Device memory: addresses that are never used twice, so that what is out of bounds or freed is found. Beside each byte
// another one says whether it was written.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "host.h"

namespace fwh {
namespace {

constexpr uint64_t kGap = 1 << 16;  // between allocations: an access past the end of one hits no other
constexpr uint64_t kPage = 1 << 16;  // the largest page of a system that we know
int memory = -1;
uint8_t *shadow = nullptr, *marks = nullptr;
uint64_t next = kArena + kGap, numbers = 0, total = 0;
std::map<uint64_t, Allocation> alive;
std::vector<Allocation> gone;

uint64_t up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

std::string in_words(const Allocation& one) {
  return "allocation " + std::to_string(one.number) + " of " + std::to_string(one.size) + " bytes";
}

// A host access to device memory is a segmentation fault, as with a GPU. This says why.
void fault(int number, siginfo_t* about, void*) {
  char text[160];
  if (in_arena(about->si_addr)) {
    int size = std::snprintf(text, sizeof text,
                             "flashwright: the program's host code accesses device memory at %p\n", about->si_addr);
    if (write(2, text, size) < 0) _exit(2);
  }
  signal(number, SIG_DFL);  // the access is repeated, and ends the process
}

void watch_faults() {
  struct sigaction before, mine{};
  if (sigaction(SIGSEGV, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) return;  // the program has its own
  mine.sa_sigaction = fault;
  mine.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &mine, nullptr);
}

bool is_variable(uint64_t address) { return address >= kModules && address < kArena + kArenaSize; }

// Where the library finds device memory; the program's own memory is where it is.
uint8_t* reach(const void* p) {
  auto address = reinterpret_cast<uint64_t>(p);
  return in_arena(p) ? shadow + (address - kArena) : reinterpret_cast<uint8_t*>(address);
}

uint8_t* marks_of(const void* p) { return marks + (reinterpret_cast<uint64_t>(p) - kArena); }

uint64_t span(Place place, Extent extent) {
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0) return 0;
  return (extent.depth - 1) * place.slice + (extent.height - 1) * place.pitch + extent.width;
}

// Whether all of a range is in one allocation; what is wrong has been told.
bool is_whole(const char* function, const void* p, uint64_t size, const char* verb) {
  if (!in_arena(p) || size == 0) return true;
  auto address = reinterpret_cast<uint64_t>(p);
  if (is_variable(address)) return true;
  const Allocation* one = find(p);
  if (one != nullptr && address + size <= one->base + one->size) return true;
  std::string text = std::string(function) + " " + verb + " " + std::to_string(size) + " bytes";
  if (one != nullptr) {
    text += " from byte " + std::to_string(address - one->base) + " of " + in_words(*one);
  } else {
    auto freed = std::find_if(gone.rbegin(), gone.rend(), [&](const Allocation& other) {
      return address - other.base < std::max<uint64_t>(other.size, 1);
    });
    text += freed != gone.rend() ? " of " + in_words(*freed) + ", which was freed" : " where nothing is allocated";
  }
  fail(kInvalidValue, text);
  return false;
}

// Whether the direction that a copy names is that of its pointers.
bool is_direction(const void* to, const void* from, int direction) {
  const Allocation *target = find(to), *source = find(from);
  bool only_device[2] = {in_arena(to) && (target == nullptr || target->kind == kDeviceMemory),
                         in_arena(from) && (source == nullptr || source->kind == kDeviceMemory)};
  bool host[2] = {!in_arena(to), !in_arena(from)};
  switch (direction) {
    case 0: return !only_device[0] && !only_device[1];
    case 1: return !host[0] && !only_device[1];
    case 2: return !only_device[0] && !host[1];
    case 3: return !host[0] && !host[1];
    default: return direction == 4;
  }
}

void copy_row(uint8_t* to, const uint8_t* from, size_t size) { std::memmove(to, from, size); }

void mark_row(const void* to, const void* from, size_t size) {
  if (!in_arena(to)) return;
  const Allocation* source = in_arena(from) ? find(from) : nullptr;
  // What was not written stays so when it is copied.
  if (source != nullptr && source->kind == kDeviceMemory) std::memmove(marks_of(to), marks_of(from), size);
  else std::memset(marks_of(to), 1, size);
}

const char* offset(const void* p, size_t by) { return static_cast<const char*>(p) + by; }

}  // namespace

bool open_arena(int& file) {
  file = memory = static_cast<int>(syscall(SYS_memfd_create, "device memory", 1u /* close on exec */));
  if (file < 0 || ftruncate(file, 2 * kArenaSize) != 0) return false;
  void* wanted = reinterpret_cast<void*>(kArena);
  int hidden = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(wanted, kArenaSize, PROT_NONE, hidden, -1, 0) != wanted) return false;
  void* all = mmap(nullptr, 2 * kArenaSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (all == MAP_FAILED) return false;
  memory = dup(file);
  shadow = static_cast<uint8_t*>(all);
  marks = shadow + kArenaSize;
  watch_faults();
  return true;
}

int allocate(void** out, size_t size, Kind kind) {
  if (out == nullptr) return fail(kInvalidValue, "an allocation has no place for its address");
  *out = nullptr;
  if (size == 0) return done(kSuccess);
  const Device& gpu = device();
  if (size > gpu.memory - std::min(total, gpu.memory) || size > kModules - kGap - next) {
    std::string text = "an allocation of " + std::to_string(size) + " bytes";
    return fail(kMemory, text + ": the device has " + std::to_string(gpu.memory) + ", and " + std::to_string(total) +
                             " are in use");
  }
  uint64_t room = up(size, kPage);
  void* at = reinterpret_cast<void*>(next);
  if (kind != kDeviceMemory) {
    int shared = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    auto made = mmap(at, room, PROT_READ | PROT_WRITE, shared, memory, static_cast<off_t>(next - kArena));
    if (made != at) return fail(kMemory, "memory that host and device share cannot be mapped");
  }
  alive[next] = {next, size, kind, ++numbers};
  total += size;
  next += up(room + kGap, kPage);
  *out = at;
  return done(kSuccess);
}

void expose(void* p, size_t size) {
  uint64_t first = reinterpret_cast<uint64_t>(p) / kPage * kPage;
  uint64_t end = up(reinterpret_cast<uint64_t>(p) + size, kPage);
  int shared = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  auto at = reinterpret_cast<void*>(first);
  auto offset = static_cast<off_t>(first - kArena);
  if (mmap(at, end - first, PROT_READ | PROT_WRITE, shared, memory, offset) != at) {
    fail(kMemory, "a managed variable cannot be mapped");
  }
}

int release(void* p, const char* function, bool host) {
  if (p == nullptr) return done(kSuccess);
  auto found = alive.find(reinterpret_cast<uint64_t>(p));
  if (found == alive.end() || (found->second.kind == kPinned) != host) {
    auto was = std::find_if(gone.begin(), gone.end(),
                            [&](const Allocation& one) { return one.base == reinterpret_cast<uint64_t>(p); });
    std::string what = was != gone.end() ? in_words(*was) + " a second time" : "an address that it did not allocate";
    return fail(kInvalidValue, std::string(function) + " frees " + what);
  }
  Allocation one = found->second;
  alive.erase(found);
  gone.push_back(one);
  total -= one.size;
  uint64_t room = up(one.size, kPage), at = one.base - kArena;
  if (one.kind != kDeviceMemory) {
    int hidden = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(p, room, PROT_NONE, hidden, -1, 0);
  }
  madvise(shadow + at, room, MADV_REMOVE);
  madvise(marks + at, room, MADV_REMOVE);
  return done(kSuccess);
}

const Allocation* find(const void* p) {
  auto address = reinterpret_cast<uint64_t>(p);
  auto after = alive.upper_bound(address);
  if (after == alive.begin()) return nullptr;
  const Allocation& one = std::prev(after)->second;
  return address - one.base < one.size ? &one : nullptr;
}

const std::map<uint64_t, Allocation>& living() { return alive; }
const std::vector<Allocation>& freed() { return gone; }
uint64_t allocated() { return total; }

int copy(const char* function, Place to, Place from, Extent extent, int direction) {
  uint64_t written = span(to, extent), read = span(from, extent);
  if (written == 0) return done(kSuccess);
  if (to.at == nullptr || from.at == nullptr) return fail(kInvalidValue, std::string(function) + " copies by a null pointer");
  if ((extent.height > 1 || extent.depth > 1) && (extent.width > to.pitch || extent.width > from.pitch)) {
    return fail(kInvalidPitch, std::string(function) + " copies rows that are wider than the pitch");
  }
  if (!is_direction(to.at, from.at, direction)) {
    return fail(kInvalidValue, std::string(function) + " names a direction that its pointers do not have");
  }
  if (!is_whole(function, to.at, written, "writes") || !is_whole(function, from.at, read, "reads")) return last_error;
  for (size_t slice = 0; slice < extent.depth; ++slice) {
    for (size_t row = 0; row < extent.height; ++row) {
      const char* target = offset(to.at, slice * to.slice + row * to.pitch);
      const char* source = offset(from.at, slice * from.slice + row * from.pitch);
      copy_row(reach(target), reach(source), extent.width);
      mark_row(target, source, extent.width);
    }
  }
  return done(kSuccess);
}

int fill(const char* function, Place to, Extent elements, uint32_t value, int bytes) {
  Extent extent{elements.width * bytes, elements.height, elements.depth};
  uint64_t written = span(to, extent);
  if (written == 0) return done(kSuccess);
  if (to.at == nullptr) return fail(kInvalidValue, std::string(function) + " writes by a null pointer");
  if (!in_arena(to.at)) return fail(kInvalidValue, std::string(function) + " writes memory of the host");
  if ((extent.height > 1 || extent.depth > 1) && extent.width > to.pitch) {
    return fail(kInvalidPitch, std::string(function) + " writes rows that are wider than the pitch");
  }
  if (!is_whole(function, to.at, written, "writes")) return last_error;
  for (size_t slice = 0; slice < extent.depth; ++slice) {
    for (size_t row = 0; row < extent.height; ++row) {
      const char* target = offset(to.at, slice * to.slice + row * to.pitch);
      uint8_t* at = reach(target);
      if (bytes == 1) std::memset(at, static_cast<int>(value), extent.width);
      for (size_t n = 0; bytes > 1 && n < elements.width; ++n) std::memcpy(at + n * bytes, &value, bytes);
      std::memset(marks_of(target), 1, extent.width);
    }
  }
  return done(kSuccess);
}

}  // namespace fwh
