// Calls of functions. A function's parameters, results and local variables lie in its frame in local memory, the frames of
// a lane one behind the other. The caller copies parameters into the next frame, and results back.
#include <algorithm>

#include "run.h"

namespace fw {
namespace {

constexpr uint64_t kFunctions = uint64_t{0x7c} << 40, kFunction = 16;  // encode.py has both

// Local memory for frames up to `end`; what is new has not been written.
void reserve(FullWarp& warp, size_t end) {
  size_t each = warp.local.size() / kLanes;
  if (end <= each) return;
  size_t more = std::max(2 * each, (end + 1023) / 1024 * 1024);
  auto widen = [&](std::vector<uint8_t>& all, uint8_t fill) {
    std::vector<uint8_t> made(more * kLanes, fill);
    for (int lane = 0; lane < kLanes; ++lane) std::copy_n(all.data() + lane * each, each, made.data() + lane * more);
    all = std::move(made);
  };
  widen(warp.local, 0xff);
  widen(warp.local_written, 0);
}

// Operands: the caller's variable, its place in the next frame, bytes.
template <bool kGive>
void copy(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  for_lanes(mask, [&](int lane) {
    uint64_t from = address_of(c, o, lane), to = address_of(c, o + 3, lane);
    if (!kGive) std::swap(from, to);
    reserve(warp, std::max(from, to) + o[6]);
    size_t start = lane * (warp.local.size() / kLanes);
    for (auto* all : {&warp.local, &warp.local_written}) {
      std::copy_n(all->begin() + start + from, o[6], all->begin() + start + to);
    }
  });
}

struct Saved {  // registers: slot and bytes of each, 0 bytes for a predicate
  int32_t count;
  const int32_t* listed;

  explicit Saved(const int32_t* o) : count(o[0]), listed(o + 1) {}

  template <class F>
  void each(F&& body) const {
    size_t at = 0;
    for (int32_t n = 0; n < count; ++n) {
      int32_t slot = listed[2 * n], bytes = listed[2 * n + 1];
      body(slot, bytes, at);
      at += bytes ? bytes * kLanes : sizeof(uint32_t);
    }
  }

  std::shared_ptr<std::vector<uint8_t>> taken(Context& c) const {
    auto all = std::make_shared<std::vector<uint8_t>>();
    each([&](int32_t slot, int32_t bytes, size_t) {
      const uint8_t* from = c.warp->registers + slot;
      all->insert(all->end(), from, from + (bytes ? bytes * kLanes : sizeof(uint32_t)));
    });
    return all;
  }

  void restore(Context& c, const std::vector<uint8_t>& all, int lane) const {
    each([&](int32_t slot, int32_t bytes, size_t at) {
      if (bytes) {
        std::memcpy(c.warp->registers + slot + lane * bytes, all.data() + at + lane * bytes, bytes);
      } else {
        uint32_t before, bit = 1u << lane, &now = predicate(c, slot);
        std::memcpy(&before, all.data() + at, sizeof before);
        now = (now & ~bit) | (before & bit);
      }
    });
  }
};

// Operands: slot of the frame, bytes of the parameters, of the frame, of all frames at most, registers to save.
void enter(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  Saved registers(o + 4);
  auto saved = registers.count ? registers.taken(c) : nullptr;
  for_lanes(mask, [&](int lane) {
    uint64_t frame = lanes<uint64_t>(c, o[0])[lane];
    if (frame + o[2] > static_cast<uint64_t>(o[3])) {
      c.machine->find(c, kOutOfBounds, lane, frame);
      c.machine->stopped = true;
      return;
    }
    reserve(warp, frame + o[2]);
    auto marks = warp.local_written.begin() + lane * (warp.local.size() / kLanes) + frame;
    std::fill(marks + o[1], marks + o[2], 0);
    warp.calls[lane].back().saved = saved;
  });
}

// Where a lane goes, or -1: the address of a function that takes what it is given.
int32_t called(Context& c, const int32_t* o, int lane) {
  const int32_t* listed = o + 5;
  if (o[1] < 0) return listed[1];
  uint64_t address = lanes<uint64_t>(c, o[1])[lane];
  for (int32_t n = 0; n < o[4]; ++n) {
    const int32_t* one = listed + 3 * n;
    if (address == kFunctions + kFunction * one[0]) return one[2] == o[3] ? one[1] : -1;
  }
  return -1;
}

}  // namespace

// Operands: slots of the frame and of the address (-1: only one function), bytes of this frame and of the arguments, then
// the functions behind their number: the number, the start, the bytes of arguments of each.
void call(Context& c, const int32_t* o, uint32_t mask, int32_t at, const Placed& place) {
  FullWarp& warp = full(c);
  uint64_t* frame = lanes<uint64_t>(c, o[0]);
  for (uint32_t rest = mask; rest != 0;) {
    int first = __builtin_ctz(rest);
    int32_t start = called(c, o, first);
    if (start < 0) {
      c.machine->find(c, kOutOfBounds, first, lanes<uint64_t>(c, o[1])[first]);
      c.machine->stopped = true;
      return;
    }
    uint32_t same = 0;
    for_lanes(rest, [&](int lane) { same |= uint32_t{called(c, o, lane) == start} << lane; });
    for_lanes(same, [&](int lane) {
      warp.calls[lane].push_back({at + 1, frame[lane], nullptr});
      frame[lane] += o[2];
    });
    place(start, same);
    rest &= ~same;
  }
}

// Operands: slot of the frame, registers that were saved.
void leave(Context& c, const int32_t* o, uint32_t mask, const Placed& place) {
  Saved registers(o + 1);
  for_lanes(mask, [&](int lane) {
    std::vector<Call>& calls = full(c).calls[lane];
    Call last = std::move(calls.back());
    calls.pop_back();
    if (last.saved) registers.restore(c, *last.saved, lane);
    lanes<uint64_t>(c, o[0])[lane] = last.frame;
    place(last.back, 1u << lane);
  });
}

void add_call(Table& table) {
  table["frame.give"] = copy<true>;
  table["frame.take"] = copy<false>;
  table["enter"] = enter;
}

}  // namespace fw
