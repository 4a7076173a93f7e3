// A cluster of blocks: in each block the warps in turn, each until it has to wait.
#include "run.h"

#include <algorithm>

namespace fw {
namespace {

constexpr int64_t kPatience = int64_t{1} << 24;  // instructions of one warp: whoever needs more does not end
constexpr int64_t kTurn = int64_t{1} << 18;      // of one warp, before others go on
enum Reduction : int32_t { kNone, kNumber, kEvery, kAny };  // in the order of encode.py's REDUCTIONS
constexpr int64_t kFineTurn = 64;                // the same where the order is random
constexpr int kPolls = 32;                       // atomic loads of one warp, before others go on

// Put lanes at a place, together with those that are there already.
void place(FullWarp& warp, Fragment one) {
  if (one.mask == 0) return;
  auto& all = warp.fragments;
  auto found = std::lower_bound(all.begin(), all.end(), one, [](const Fragment& f, const Fragment& value) {
    return f.depth != value.depth ? f.depth > value.depth : f.at < value.at;
  });
  if (found != all.end() && found->at == one.at && found->depth == one.depth) {
    found->mask |= one.mask;
    found->parked = found->held = false;
  } else {
    all.insert(found, one);
  }
}

uint32_t lanes_of(const FullWarp& warp) {
  uint32_t all = 0;
  for (const Fragment& one : warp.fragments) all |= one.mask;
  return all;
}

// Other lanes have their turn than those that have polled.
void rotate(FullWarp& warp, uint32_t polled) {
  uint32_t others = lanes_of(warp) & ~polled;
  if (others == 0) return;
  int last = warp.leader >= 0 ? warp.leader : __builtin_ctz(polled);
  uint32_t above = others & ~((2u << last) - 1);
  warp.leader = __builtin_ctz(above != 0 ? above : others);
}

struct Runner {
  Machine& machine;
  Block& block;
  bool polling = true;  // whether each warp that went on has only polled

  // --- a warp -------------------------------------------------------------------------------------

  // The lanes that are furthest behind go on, until they meet others, jump or wait.
  void run(FullWarp& warp, int64_t steps) {
    Context context{&machine, &block, &warp, 0, 0};
    warp.polled = false;
    warp.idle = true;
    while (!machine.stopped && steps > 0) {
      if (warp.fragments.empty()) return leave(warp, context.instruction);
      auto picked = pick(context);
      if (picked == warp.fragments.end()) {
        warp.state = State::kMbarrier;
        return;
      }
      Fragment now = *picked;
      bool alone = std::exchange(now.held, false);  // nobody will come any more
      auto rest = warp.fragments.erase(picked);
      bool meets = rest != warp.fragments.end() && rest->depth == now.depth;
      int32_t next = meets ? rest->at : INT32_MAX;
      while (now.at != next && steps > 0) {
        const Code& code = machine.code[now.at];
        const int32_t* operands = machine.operands.data() + code.first;
        uint32_t mask = executing(context, code, now.mask);
        context.instruction = now.at;
        context.count = code.count;
        if (code.meets != kAlone && !alone && missing(context, code, mask, now.mask) != 0) {
          now.held = true;
          break;
        }
        alone = false;
        --steps;
        if (mask != 0) step(context, code, mask);
        if (mask != 0 && code.meets == kWithMembers) check_members(context, code, mask, now.mask);
        if (code.control == kNormal) {
          if (mask != 0 && !warp.undefined.empty()) pass_undefined(context, code, operands, mask);
          if (mask != 0) code.run(context, operands, mask);
          ++now.at;
          if (machine.stopped) return;
        } else if (control(context, code, operands, mask, now)) {
          return;
        } else {
          if (warp.polls >= kPolls || steps <= 0) return pass_turn(warp, now.mask);
          now.mask = 0;
          break;
        }
      }
      place(warp, now);
    }
    if (machine.fine) warp.polled = std::exchange(warp.polls, 0) > 0;
  }

  static uint32_t executing(Context& c, const Code& code, uint32_t mask) {
    if (code.guard < 0) return mask;
    uint32_t holds = predicate(c, code.guard);
    return mask & (code.negated ? ~holds : holds);
  }

  // Lanes elsewhere in the warp that have to execute an instruction together with those in `mask`.
  uint32_t missing(Context& c, const Code& code, uint32_t mask, uint32_t here) const {
    FullWarp& warp = full(c);
    if (mask == 0 || warp.fragments.empty()) return 0;
    uint32_t others = lanes_of(warp) & ~here;
    if (code.meets == kWithWarp) return others;
    int32_t members = machine.operands[code.first + code.count - 1];
    return others & lanes<uint32_t>(c, members)[__builtin_ctz(mask)];
  }

  // Lanes are among those that they name, and these execute the instruction, unless they have exited.
  void check_members(Context& c, const Code& code, uint32_t mask, uint32_t here) {
    const uint32_t* named = lanes<uint32_t>(c, machine.operands[code.first + code.count - 1]);
    uint32_t outside = 0, absent = 0;
    for (int lane = 0; lane < kLanes; ++lane) outside |= (~named[lane] >> lane & 1) << lane;
    outside &= mask;
    if (outside != 0) {
      int lane = __builtin_ctz(outside);
      machine.find(c, kDivergent, lane, named[lane]);
      return;
    }
    if (mask == kAll) return;
    uint32_t others = (here | lanes_of(full(c))) & ~mask;
    for_lanes(mask, [&](int lane) { absent |= named[lane] & others; });
    if (absent != 0) machine.find(c, kDivergent, -1, absent);
  }

  // The lanes that go on. Where all of them wait to meet others: those for which nobody is missing any more, else, unless
  // others wait at an mbarrier, the first ones alone.
  std::vector<Fragment>::iterator pick(Context& c) {
    FullWarp& warp = full(c);
    auto& all = warp.fragments;
    auto goes = [](const Fragment& f) { return !f.parked && !f.held; };
    if (all.size() == 1) warp.leader = -1;
    if (warp.leader >= 0) {
      auto first = std::find_if(all.begin(), all.end(),
                                [&](auto& f) { return goes(f) && (f.mask >> warp.leader & 1) != 0; });
      if (first != all.end()) return first;
    }
    auto first = std::find_if(all.begin(), all.end(), goes);
    if (first != all.end()) return first;
    for (auto one = all.begin(); one != all.end(); ++one) {
      const Code& code = machine.code[one->at];
      if (one->held && missing(c, code, executing(c, code, one->mask), one->mask) == 0) {
        one->held = false;
        return one;
      }
    }
    bool parked = std::any_of(all.begin(), all.end(), [](auto& f) { return f.parked; });
    return parked ? all.end() : all.begin();
  }

  static void pass_turn(FullWarp& warp, uint32_t mask) {
    warp.polled = warp.polls >= kPolls;
    warp.polls = 0;
    rotate(warp, mask);
  }

  // Barriers without a count wait for the threads that are still there.
  void leave(FullWarp& warp, int32_t instruction) {
    warp.state = State::kDone;
    block.event();
    for (int number = 0; number <= kClusterBarrier; ++number) {
      const Barrier& barrier = at(number);
      if (barrier.arrived > 0 && barrier.arrived >= wanted(number)) complete(number);
    }
    if (!is_done(block)) return;
    block.exit = instruction;
    check_exit(machine, block);
  }

  static bool is_done(const Block& block) {
    return std::all_of(block.warps.begin(), block.warps.end(), [](auto& w) { return w.state == State::kDone; });
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
    auto put = [&](int32_t at, uint32_t lanes, int32_t deeper = 0) {
      place(warp, {at, lanes, false, false, now.depth + deeper});
    };
    if (code.control == kBranch || code.control == kExit || code.control >= kCall) {
      if (code.control == kBranch) put(o[0], mask);
      if (code.control == kBranchIf) {  // for lanes whose slot has the number
        uint32_t taken = 0;
        for_lanes(mask, [&](int lane) {
          taken |= uint32_t{lanes<uint32_t>(c, o[1])[lane] == static_cast<uint32_t>(o[2])} << lane;
        });
        put(o[0], mask = taken);
      }
      if (code.control == kCall) fw::call(c, o, mask, now.at, [&](int32_t at, uint32_t some) { put(at, some, 1); });
      if (code.control == kLeave) fw::leave(c, o, mask, [&](int32_t at, uint32_t some) { put(at, some, -1); });
      put(now.at + 1, now.mask & ~mask);
      return false;
    }
    bool waits = mask != 0 && wait(c, code, o, mask);
    bool again = waits && (code.control == kMbarrierWait || code.control == kProductWait);
    place(warp, {again ? now.at : now.at + 1, now.mask, waits && code.control == kMbarrierWait, false, now.depth});
    if (waits) ++machine.counts[c.instruction].waits;
    return waits;
  }

  bool wait(Context& c, const Code& code, const int32_t* o, uint32_t mask) {
    switch (code.control) {
      case kMbarrierWait: return wait_mbarrier(c, o, mask);
      case kClusterWait: return wait_cluster(c);
      case kProductWait: return wait_products(c, o[0]);
      case kClusterArrive: return arrive(c, kClusterBarrier, 0, false, o[0] == 0);
      default: break;
    }
    // The number and the count are constants, or, below 0, the complement of a slot.
    int lane = __builtin_ctz(mask);
    auto value = [&](int32_t x) { return x >= 0 ? x : static_cast<int32_t>(lanes<uint32_t>(c, ~x)[lane]); };
    int number = value(o[0]) & 15, wanted = value(o[1]);
    uint32_t live = mask | lanes_of(full(c));
    if (live != mask) machine.find(c, kDivergent, -1, live & ~mask);
    if (code.control == kBarrierSync && o[2] != kNone) vote(c, number, o, mask);
    return arrive(c, number, wanted, code.control == kBarrierSync);
  }

  // --- barriers -----------------------------------------------------------------------------------

  Barrier& at(int number) const {
    return number == kClusterBarrier ? block.cluster->barrier : block.barriers[number];
  }

  // All warps that may come to a barrier.
  template <class F>
  void for_warps(int number, F&& body) const {
    auto own = [&](Block& one) {
      for (FullWarp& warp : one.warps) body(warp);
    };
    if (number != kClusterBarrier) return own(block);
    for (auto& one : block.cluster->blocks) own(*one);
  }

  // Operands: number, count, which reduction, slot of the result, slot of the predicate.
  void vote(Context& c, int number, const int32_t* o, uint32_t mask) {
    uint32_t holds = predicate(c, o[4]);
    block.barriers[number].yes += __builtin_popcount(mask & holds);
    block.barriers[number].no += __builtin_popcount(mask & ~holds);
    full(c).reduction = o;
    full(c).asked = mask;
  }

  void answer(FullWarp& warp, const Barrier& barrier) {
    const int32_t* o = std::exchange(warp.reduction, nullptr);
    if (o == nullptr) return;
    Context c{&machine, &block, &warp, 0, 0};
    bool holds = o[2] == kEvery ? barrier.no == 0 : barrier.yes != 0;
    if (o[2] == kNumber) {
      for_lanes(warp.asked, [&](int lane) { lanes<uint32_t>(c, o[3])[lane] = barrier.yes; });
    } else if (o[3] >= 0) {
      uint32_t& result = predicate(c, o[3]);
      result = holds ? result | warp.asked : result & ~warp.asked;
    }
  }

  // The arrivals that a barrier waits for.
  int wanted(int number) const {
    const Barrier& barrier = at(number);
    if (barrier.wanted != 0) return barrier.wanted;
    int warps = 0;
    for_warps(number, [&](const FullWarp& warp) {
      warps += warp.state != State::kDone || warp.arrived[number] == barrier.generation + 1;
    });
    return warps * kLanes;
  }

  // `count`: of threads that are to arrive, or 0 for all. `hands_on`: what they have done before.
  bool arrive(Context& c, int number, int count, bool waits, bool hands_on = true) {
    FullWarp& warp = full(c);
    Barrier& barrier = at(number);
    barrier.wanted = count;
    barrier.arrived += kLanes;
    warp.arrived[number] = barrier.generation + 1;
    if (hands_on) barrier.clock.join(warp.clock);
    for (int n = 0; machine.global_races && n < 3; ++n) barrier.fenced[n].join(warp.fence[n]);
    if (number == kClusterBarrier) warp.cluster = barrier.generation;
    block.event();
    if (waits) {
      warp.state = State::kBarrier;
      warp.barrier = number;
    }
    if (barrier.arrived < wanted(number)) {
      meet(warp);  // what it does from here on, those who wait do not know
      return waits;
    }
    complete(number);
    if (!waits) meet(warp);
    return false;
  }

  void complete(int number) {
    Barrier& barrier = at(number);
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.done = std::exchange(barrier.clock, {});
    barrier.fenced_done = std::exchange(barrier.fenced, {});
    for_warps(number, [&](FullWarp& other) {
      bool here = other.state == State::kBarrier || other.state == State::kCluster;
      if (!here || other.barrier != static_cast<uint64_t>(number)) return;
      if (other.state == State::kCluster) other.passed = barrier.generation;
      other.state = State::kReady;
      answer(other, barrier);
      pass(other, barrier, number);
    });
    barrier.yes = barrier.no = 0;
  }

  // Behind a barrier a warp knows what all who came there knew, and its own time moves on. A barrier is a fence too, for
  // those that it is for. What one of them has fenced for others stays fenced behind it.
  void pass(FullWarp& warp, const Barrier& barrier, int number) const {
    warp.clock.join(barrier.done);
    for (int n = 0; machine.global_races && n < 3; ++n) warp.fence[n].join(barrier.fenced_done[n]);
    meet(warp);
    if (machine.hands_on) fence(machine, *block.cluster, warp, number == kClusterBarrier ? kInCluster : kInBlock, 0);
  }

  bool wait_cluster(Context& c) {
    FullWarp& warp = full(c);
    Barrier& barrier = at(kClusterBarrier);
    if (barrier.generation != warp.cluster) {
      warp.passed = barrier.generation;
      pass(warp, barrier, kClusterBarrier);
      return false;
    }
    warp.state = State::kCluster;
    warp.barrier = kClusterBarrier;
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

  // What is under way when all threads have exited.
  void end() {
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
    int64_t changes = machine.changes;
    int count = static_cast<int>(block.warps.size());
    for (int n = 0; n < count; ++n) {
      int pick = machine.schedule == kLazy ? count - 1 - n : n;
      int64_t steps = machine.fine ? kFineTurn : kTurn;
      if (machine.schedule == kRandom) {
        pick = static_cast<int>(machine.random() % count);
        steps = 1 + static_cast<int64_t>(machine.random() % 400);
        if (machine.chance(3)) land();
      }
      FullWarp& warp = block.warps[pick];
      if (warp.state != State::kReady) continue;
      run(warp, steps);
      going = true;
      if (!warp.polled) warp.polled_before.clear();
      polling &= warp.polled && warp.idle;
    }
    polling &= changes == machine.changes;
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
        const Barrier& barrier = this->at(static_cast<int>(warp.barrier));
        arrivals = wanted(static_cast<int>(warp.barrier)) - barrier.arrived;
      }
      machine.find(c, kDeadlock, -1, warp.barrier, -1, arrivals, bytes);
    }
  }
};

}  // namespace

// Every warp of the cluster that can goes on.
Step step(Machine& machine, Cluster& cluster) {
  std::vector<Runner> runners;
  for (auto& block : cluster.blocks) runners.push_back({machine, *block});
  auto any = [&](auto&& does) {
    bool some = false;
    for (Runner& runner : runners) some |= does(runner);
    return some;
  };
  auto land = [&] { return any([](Runner& one) { return one.land(); }); };
  if (any([](Runner& one) { return one.turn(); })) {
    if (any([](Runner& one) { return !one.polling; })) return Step::kGoing;
    return land() ? Step::kGoing : Step::kPolling;
  }
  bool done = machine.stopped || !any([](Runner& one) { return !Runner::is_done(one.block); });
  if (!done) {
    if (land()) return Step::kGoing;
    if (cluster.events != cluster.stuck) cluster.stuck = cluster.events, cluster.tries = 0;
    bool first = ++cluster.tries == 1;
    auto retry = [&](Runner& one) { return first ? one.split() : one.give_up(); };
    if (cluster.tries <= 4 && any(retry)) return Step::kGoing;
    for (Runner& runner : runners) runner.tell_deadlock();
  }
  for (Runner& runner : runners) runner.end();
  return Step::kDone;
}

}  // namespace fw
