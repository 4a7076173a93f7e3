// Blocks one after the other; in a block the warps in turn, each until it has to wait.
#include "run.h"

#include <algorithm>

namespace fw {
namespace {

constexpr int64_t kPatience = int64_t{1} << 24;  // instructions of one warp: whoever needs more does not end

// Put lanes at a place, together with those that are there already.
void place(FullWarp& warp, int32_t at, uint32_t mask, bool parked = false) {
  if (mask == 0) return;
  auto& all = warp.fragments;
  auto found = std::lower_bound(all.begin(), all.end(), at,
                                [](const Fragment& f, int32_t value) { return f.at < value; });
  if (found != all.end() && found->at == at) {
    found->mask |= mask;
    found->parked = false;
  } else {
    all.insert(found, {at, mask, parked});
  }
}

struct Runner {
  Machine& machine;
  Block& block;

  // --- a warp -------------------------------------------------------------------------------------

  // The lanes that are furthest behind go on, until they meet others, jump or wait.
  void run(FullWarp& warp, int64_t steps) {
    Context context{&machine, &block, &warp, 0, 0};
    while (!machine.stopped && steps > 0) {
      auto first = std::find_if(warp.fragments.begin(), warp.fragments.end(), [](auto& f) { return !f.parked; });
      if (warp.fragments.empty()) {
        warp.state = State::kDone;
        ++block.events;
        return;
      }
      if (first == warp.fragments.end()) {
        warp.state = State::kMbarrier;
        return;
      }
      Fragment now = *first;
      auto rest = warp.fragments.erase(first);
      int32_t next = rest == warp.fragments.end() ? INT32_MAX : rest->at;
      while (now.at != next && steps > 0) {
        const Code& code = machine.code[now.at];
        const int32_t* operands = machine.operands.data() + code.first;
        uint32_t mask = now.mask;
        if (code.guard >= 0) {
          uint32_t holds = predicate(context, code.guard);
          mask &= code.negated ? ~holds : holds;
        }
        context.instruction = now.at;
        context.count = code.count;
        --steps;
        if (mask != 0) step(context, code, mask);
        if (code.control == kNormal) {
          if (mask != 0) code.run(context, operands, mask);
          ++now.at;
          if (machine.stopped) return;
        } else if (control(context, code, operands, mask, now)) {
          return;
        } else {
          now.mask = 0;
          break;
        }
      }
      place(warp, now.at, now.mask);
    }
  }

  // What is the same for every instruction.
  void step(Context& c, const Code& code, uint32_t mask) {
    Counts& counts = machine.counts[c.instruction];
    ++counts.executed;
    counts.lanes += __builtin_popcount(mask);
    FullWarp& warp = full(c);
    if (++warp.steps == kPatience) {
      machine.find(c, kDeadlock, -1, 0, -1, -1);
      machine.stopped = true;
    }
    if (machine.shapes.empty()) return;
    const int32_t* slot = machine.touched.data() + code.touched;
    for (int n = 0; n < code.wrote + code.read; ++n) {
      if (warp.busy[slot[n] / 8] != 0) {
        machine.find(c, kRegister, -1, slot[n], warp.busy[slot[n] / 8] - 1);
        break;
      }
    }
    for (int n = 0; n < code.wrote; ++n) warp.wrote[slot[n] / 8] = {c.instruction, warp.fences};
  }

  // Jumps and waits. Whether the warp has to wait.
  bool control(Context& c, const Code& code, const int32_t* o, uint32_t mask, Fragment& now) {
    FullWarp& warp = full(c);
    if (code.control == kBranch || code.control == kExit) {
      if (code.control == kBranch) place(warp, o[0], mask);
      place(warp, now.at + 1, now.mask & ~mask);
      return false;
    }
    bool waits = mask != 0 && wait(c, code, o, mask);
    bool again = waits && (code.control == kMbarrierWait || code.control == kProductWait);
    place(warp, again ? now.at : now.at + 1, now.mask, waits && code.control == kMbarrierWait);
    if (waits) ++machine.counts[c.instruction].waits;
    return waits;
  }

  bool wait(Context& c, const Code& code, const int32_t* o, uint32_t mask) {
    switch (code.control) {
      case kMbarrierWait: return wait_mbarrier(c, o, mask);
      case kClusterWait: return wait_cluster(c);
      case kProductWait: return wait_products(c, o[0]);
      case kClusterArrive: return arrive(c, 16, everybody(), false);
      default: break;
    }
    // The number and the count are constants, or, below 0, the complement of a slot.
    int lane = __builtin_ctz(mask);
    auto value = [&](int32_t x) { return x >= 0 ? x : static_cast<int32_t>(lanes<uint32_t>(c, ~x)[lane]); };
    int number = value(o[0]) & 15, wanted = value(o[1]);
    uint32_t live = mask;
    for (const Fragment& other : full(c).fragments) live |= other.mask;
    if (live != mask) machine.find(c, kDivergent, -1, live & ~mask);
    return arrive(c, number, wanted ? wanted : everybody(), code.control == kBarrierSync);
  }

  int everybody() const { return static_cast<int>(block.warps.size()) * kLanes; }

  // --- barriers -----------------------------------------------------------------------------------

  bool arrive(Context& c, int number, int wanted, bool waits) {
    FullWarp& warp = full(c);
    Barrier& barrier = block.barriers[number];
    barrier.wanted = wanted;
    barrier.arrived += kLanes;
    barrier.clock.join(warp.clock);
    warp.cluster = barrier.generation;
    ++block.events;
    if (barrier.arrived < barrier.wanted) {
      meet(warp);  // what it does from here on, those who wait do not know
      if (waits) {
        warp.state = State::kBarrier;
        warp.barrier = number;
      }
      return waits;
    }
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.done = barrier.clock;
    barrier.clock = {};
    for (FullWarp& other : block.warps) {
      bool here = other.state == State::kBarrier || other.state == State::kCluster;
      if (here && other.barrier == static_cast<uint64_t>(number)) {
        other.state = State::kReady;
        pass(other, barrier.done);
      }
    }
    if (waits) pass(warp, barrier.done);
    else meet(warp);
    return false;
  }

  // Behind a barrier a warp knows what all who came there knew, and its own time moves on.
  static void pass(FullWarp& warp, const Clock& known) {
    warp.clock.join(known);
    meet(warp);
  }

  bool wait_cluster(Context& c) {
    FullWarp& warp = full(c);
    Barrier& barrier = block.barriers[16];
    if (barrier.generation != warp.cluster) {
      pass(warp, barrier.done);
      return false;
    }
    warp.state = State::kCluster;
    warp.barrier = 16;
    return true;
  }

  // Operands: slot of the predicate, address, slot of the parity or token, whether it is a token.
  bool wait_mbarrier(Context& c, const int32_t* o, uint32_t mask) {
    FullWarp& warp = full(c);
    int lane = __builtin_ctz(mask);
    uint64_t address = address_of(c, o + 1, lane) % kWindow;
    Mbarrier* barrier = mbarrier(c, lane, address);
    bool done = true;
    if (barrier != nullptr) {
      done = o[5] ? barrier->phase > lanes<uint64_t>(c, o[4])[lane]
                  : (barrier->phase & 1) != (lanes<uint32_t>(c, o[4])[lane] & 1);
    }
    if (!done && !warp.give_up) {
      warp.state = State::kMbarrier;
      warp.barrier = address;
      return true;
    }
    warp.give_up = false;
    uint32_t& result = predicate(c, o[0]);
    result = done ? result | mask : result & ~mask;
    if (done && barrier != nullptr) warp.clock.join(barrier->done);
    return false;
  }

  // wgmma is one operation of four warps: it is not done before all of them have asked for it, and then it is
  // done for all of them.
  bool wait_products(Context& c, int32_t kept) {
    FullWarp& warp = full(c);
    int64_t wanted = int64_t{warp.products.open} - 1 - kept;
    size_t first = warp.number / 4 * 4, end = std::min(first + 4, block.warps.size());
    for (size_t w = first; w < end; ++w) {
      if (block.warps[w].products.open - 1 < wanted && block.warps[w].state != State::kDone) {
        warp.state = State::kProduct;
        return true;
      }
    }
    for (size_t w = first; w < end; ++w) perform(block.warps[w].products, wanted);
    finish(block, warp, warp.products, kept);
    return false;
  }

  // The work of all groups up to a number; whose they are still has to wait for them.
  static void perform(Queue& queue, int64_t number) {
    int64_t at = int64_t{queue.open} - static_cast<int64_t>(queue.closed.size());
    for (Group& group : queue.closed) {
      if (at++ > number) return;
      group.perform();
    }
  }

  // --- a block ------------------------------------------------------------------------------------

  void all() {
    block.start();
    int64_t stuck = -1;
    int tries = 0;
    while (!machine.stopped) {
      if (turn()) continue;
      if (std::all_of(block.warps.begin(), block.warps.end(), [](auto& w) { return w.state == State::kDone; })) break;
      if (land()) continue;
      if (block.events != stuck) stuck = block.events, tries = 0;
      if (++tries > 4 || !(tries == 1 ? split() : give_up())) {
        tell_deadlock();
        break;
      }
    }
    while (land()) {}
    for (FullWarp& warp : block.warps) {
      for (Queue* queue : {&warp.copies, &warp.products, &warp.stores}) {
        close(*queue);
        finish(block, warp, *queue, 0);
      }
    }
  }

  // Every warp that can goes on; whether any could.
  bool turn() {
    bool going = false;
    int count = static_cast<int>(block.warps.size());
    for (int n = 0; n < count; ++n) {
      int pick = machine.schedule == kLazy ? count - 1 - n : n;
      int64_t steps = INT64_MAX;
      if (machine.schedule == kRandom) {
        pick = static_cast<int>(machine.random() % count);
        steps = 1 + static_cast<int64_t>(machine.random() % 400);
        if (machine.chance(3)) land();
      }
      FullWarp& warp = block.warps[pick];
      if (warp.state != State::kReady) continue;
      run(warp, steps);
      going = true;
    }
    if (going || machine.schedule != kRandom) return going;
    return std::any_of(block.warps.begin(), block.warps.end(), [](auto& w) { return w.state == State::kReady; });
  }

  // One of the loads that are on their way arrives.
  bool land() {
    if (block.loads.empty()) return false;
    size_t pick = machine.schedule == kRandom ? machine.random() % block.loads.size() : 0;
    Load load = std::move(block.loads[pick]);
    block.loads.erase(block.loads.begin() + pick);
    load.land();
    return true;
  }

  // Where a part of a warp waits, the others of it may have to go on first.
  bool split() {
    bool some = false;
    for (FullWarp& warp : block.warps) {
      bool others = std::any_of(warp.fragments.begin(), warp.fragments.end(), [](auto& f) { return !f.parked; });
      if (warp.state == State::kMbarrier && others) {
        warp.state = State::kReady;
        some = true;
      }
    }
    return some || give_up();
  }

  // A try to wait may come back in vain: perhaps the warp only asked.
  bool give_up() {
    bool some = false;
    for (FullWarp& warp : block.warps) {
      if (warp.state != State::kMbarrier) continue;
      warp.state = State::kReady;
      warp.give_up = some = true;
      for (Fragment& fragment : warp.fragments) fragment.parked = false;
    }
    return some;
  }

  void tell_deadlock() {
    for (FullWarp& warp : block.warps) {
      if (warp.state == State::kDone || warp.fragments.empty()) continue;
      bool again = warp.state == State::kMbarrier || warp.state == State::kProduct;
      auto parked = std::find_if(warp.fragments.begin(), warp.fragments.end(), [](auto& f) { return f.parked; });
      int32_t at = (again && parked != warp.fragments.end() ? parked : warp.fragments.begin())->at - (again ? 0 : 1);
      Context c{&machine, &block, &warp, at, 0};
      int64_t arrivals = 0, bytes = 0;
      auto found = block.mbarriers.find(static_cast<uint32_t>(warp.barrier));
      if (warp.state == State::kMbarrier && found != block.mbarriers.end()) {
        arrivals = found->second.pending;
        bytes = found->second.bytes;
      } else if (!again) {
        const Barrier& barrier = block.barriers[warp.barrier];
        arrivals = barrier.wanted - barrier.arrived;
      }
      machine.find(c, kDeadlock, -1, warp.barrier, -1, arrivals, bytes);
    }
  }
};

}  // namespace

void run_block(Machine& machine, Block& block) { Runner{machine, block}.all(); }

}  // namespace fw
