// Functions that kernels call and no file of PTX has: printf, assert, malloc, free.
#include <algorithm>
#include <cstdio>

#include "run.h"

namespace fw {

// --- the heap -------------------------------------------------------------------------------------

namespace {

constexpr uint64_t kTableBytes = uint64_t{1} << 20, kApart = 32;  // bytes between two allocations at least

struct Kept {  // an allocation, as launches leave it to later ones
  uint64_t address, size;
  int64_t freed;
};

}  // namespace

void Heap::open(const Region& region) {
  base = region.base;
  size = (region.size - kTableBytes) / 2;
  data = region.data;
  room = (kTableBytes - 16) / sizeof(Kept);
  uint64_t count;
  const uint8_t* table = data + 2 * size;
  std::memcpy(&count, table, 8);
  std::memcpy(&next, table + 8, 8);
  for (uint64_t n = 0; n < std::min(count, room); ++n) {
    Kept one;
    std::memcpy(&one, table + 16 + n * sizeof one, sizeof one);
    all[one.address] = {one.size, one.freed ? -2 : -1};
  }
}

void Heap::close() {
  if (data == nullptr) return;
  uint8_t* table = data + 2 * size;
  uint64_t count = all.size();
  std::memcpy(table, &count, 8);
  std::memcpy(table + 8, &next, 8);
  for (auto& [address, one] : all) {
    Kept kept{address, one.size, one.freed != -1};
    std::memcpy(table + 16, &kept, sizeof kept);
    table += sizeof kept;
  }
}

std::map<uint64_t, Heap::Allocation>::iterator Heap::around(uint64_t address) {
  auto found = all.upper_bound(address);
  return found == all.begin() ? all.end() : std::prev(found);
}

uint64_t Heap::allocate(uint64_t bytes) {
  if (bytes > size) return 0;
  uint64_t wanted = (bytes + kApart + 15) / 16 * 16;
  for (int tries = 0; tries < 2; ++tries) {
    if (next + wanted <= size && all.size() < room) {
      uint64_t address = base + next;
      std::fill_n(data + size + next, wanted, 0);
      std::fill_n(data + next, wanted, 0xff);
      all[address] = {bytes, -1};
      next += wanted;
      return address;
    }
    // From the beginning again, where what was freed makes room: behind the last that is in use.
    uint64_t end = 0;
    for (auto one = all.begin(); one != all.end();) {
      if (one->second.freed != -1) {
        one = all.erase(one);
      } else {
        end = one->first - base + (one->second.size + kApart + 15) / 16 * 16;
        ++one;
      }
    }
    next = end;
  }
  // Between two that are in use.
  uint64_t at = 0;
  for (auto& [address, one] : all) {
    if (all.size() < room && address - base >= at + wanted) {
      std::fill_n(data + size + at, wanted, 0);
      all[base + at] = {bytes, -1};
      return base + at;
    }
    at = address - base + (one.size + kApart + 15) / 16 * 16;
  }
  return 0;
}

uint8_t* Machine::allocated(Context& context, int lane, uint64_t address, int bytes, bool write) {
  auto found = heap.around(address);
  if (found == heap.all.end()) {
    find(context, kOutOfBounds, lane, address);
    return nullptr;
  }
  const Heap::Allocation& one = found->second;
  int64_t offset = address - found->first;
  if (one.freed != -1 || offset + bytes > static_cast<int64_t>(one.size)) {
    find(context, kOutOfBounds, lane, address, one.freed, offset, one.size);
    return nullptr;
  }
  uint8_t* marks = heap.data + heap.size + (address - heap.base);
  if (write) std::fill_n(marks, bytes, 1);
  else if (std::count(marks, marks + bytes, 0)) find(context, kUnwritten, lane, address, -1, offset, one.size);
  return heap.data + (address - heap.base);
}

namespace {

// The value of a variable of a call in a lane's local memory. Operand: its address.
template <class T>
T given(Context& c, const int32_t* o, int lane) {
  T value{};
  const uint8_t* from = local(c, lane, address_of(c, o, lane), sizeof value, false);
  if (from != nullptr) std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void give(Context& c, const int32_t* o, int lane, T value) {
  uint8_t* to = local(c, lane, address_of(c, o, lane), sizeof value, true);
  if (to != nullptr) std::memcpy(to, &value, sizeof value);
}

// Operands: addresses of the size and of the result.
void allocate(Context& c, const int32_t* o, uint32_t mask) {
  for_lanes(mask, [&](int lane) { give(c, o + 3, lane, c.machine->heap.allocate(given<uint64_t>(c, o, lane))); });
}

// Operand: address of the pointer.
void release(Context& c, const int32_t* o, uint32_t mask) {
  Heap& heap = c.machine->heap;
  for_lanes(mask, [&](int lane) {
    auto address = given<uint64_t>(c, o, lane);
    if (address == 0) return;
    auto found = heap.all.find(address);
    if (found == heap.all.end()) {
      c.machine->find(c, kOutOfBounds, lane, address);
    } else if (found->second.freed != -1) {
      c.machine->find(c, kOutOfBounds, lane, address, found->second.freed, 0, found->second.size);
    } else {
      found->second.freed = c.instruction;
    }
  });
}

// --- printf ---------------------------------------------------------------------------------------

constexpr int kWidest = 4096;         // characters of a number or a string
constexpr size_t kLongest = 1 << 16;  // of a string

std::string text(Context& c, int lane, uint64_t address) {
  std::string all;
  while (all.size() < kLongest) {
    const uint8_t* next = generic(c, lane, address + all.size(), 1, false);
    if (next == nullptr || *next == 0) break;
    all += static_cast<char>(*next);
  }
  return all;
}

// What printf prints for one lane: the format, and its arguments, which lie behind each other, each aligned to its size.
struct Printer {
  Context& c;
  int lane;
  uint64_t arguments;
  std::string format;
  std::string out;
  size_t at = 0;
  int count = 0;  // of arguments

  template <class T>
  T next() {
    arguments = (arguments + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    T value{};
    const uint8_t* from = generic(c, lane, arguments, sizeof value, false);
    if (from != nullptr) std::memcpy(&value, from, sizeof value);
    arguments += sizeof value;
    ++count;
    return value;
  }

  char sign() const { return at < format.size() ? format[at] : '\0'; }

  int number() {
    if (sign() == '*') return ++at, next<int32_t>();
    int value = 0;
    while (sign() >= '0' && sign() <= '9') value = std::min(10 * value + (format[at++] - '0'), kWidest);
    return value;
  }

  template <class T>
  void put(const std::string& how, int precision, T value) {
    char part[2 * kWidest];
    int length = precision >= 0 ? std::snprintf(part, sizeof part, how.c_str(), precision, value)
                                : std::snprintf(part, sizeof part, how.c_str(), value);
    out.append(part, std::clamp<int>(length, 0, sizeof part - 1));
  }

  void conversion() {
    size_t start = at++;
    std::string how = "%", size;
    while (sign() != '\0' && std::strchr("-+ #0", sign())) how += format[at++];
    if (int width = std::clamp(number(), -kWidest, kWidest)) how += std::to_string(width);
    int precision = -1;
    if (sign() == '.') ++at, precision = std::clamp(number(), 0, kWidest), how += ".*";
    while (sign() != '\0' && std::strchr("hlzjtLq", sign())) size += format[at++];
    char kind = sign();
    ++at;
    bool wide = !size.empty() && size[0] != 'h';
    if (kind == '%') {
      out += '%';
    } else if (kind != '\0' && std::strchr("di", kind)) {
      int64_t value = wide ? next<int64_t>() : next<int32_t>();
      value = size == "h" ? int16_t(value) : size == "hh" ? int8_t(value) : value;
      put(how + "ll" + kind, precision, static_cast<long long>(value));
    } else if (kind != '\0' && std::strchr("ouxX", kind)) {
      uint64_t value = wide ? next<uint64_t>() : next<uint32_t>();
      value = size == "h" ? uint16_t(value) : size == "hh" ? uint8_t(value) : value;
      put(how + "ll" + kind, precision, static_cast<unsigned long long>(value));
    } else if (kind != '\0' && std::strchr("eEfFgGaA", kind)) {
      put(how + kind, precision, next<double>());
    } else if (kind == 'c') {
      put(how + kind, -1, next<int32_t>());
    } else if (kind == 'p') {
      put(how + kind, -1, reinterpret_cast<void*>(next<uint64_t>()));
    } else if (kind == 's') {
      put(how + kind, precision, text(c, lane, next<uint64_t>()).c_str());
    } else {
      out += format.substr(start, at - start);  // nothing that CUDA knows
    }
  }

  void all() {
    while (at < format.size()) {
      if (format[at] == '%') conversion();
      else out += format[at++];
    }
  }
};

// Operands: addresses of the pointers to the format and to the arguments, and of the result.
void print(Context& c, const int32_t* o, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    Printer printer{c, lane, given<uint64_t>(c, o + 3, lane), text(c, lane, given<uint64_t>(c, o, lane)), {}};
    printer.all();
    c.machine->printed += printer.out;
    give<int32_t>(c, o + 6, lane, printer.count);
  });
}

// Operands: addresses of the pointers to the expression and to the file, of the line, and others.
void fail(Context& c, const int32_t* o, uint32_t mask) {
  int lane = __builtin_ctz(mask);
  c.machine->find(c, kTrap, lane, given<uint64_t>(c, o, lane));
  c.machine->stopped = true;
}

}  // namespace

void add_builtin(Table& table) {
  table["malloc"] = allocate;
  table["free"] = release;
  table["vprintf"] = print;
  table["__assertfail"] = fail;
}

}  // namespace fw
