// mbarriers: arrivals and bytes complete a phase, and whoever waits for it knows what they knew.
#include <algorithm>
#include <tuple>

#include "run.h"

namespace fw {

Mbarrier* mbarrier(Context& context, int lane, uint64_t address) {
  address %= kWindow;
  uint64_t own = address;
  Block* home = home_of(context, own);
  if (home != nullptr && home != context.block) check_visit(context, accessor(full(context), lane), *home, address);
  auto found = home == nullptr ? context.block->mbarriers.end() : home->mbarriers.find(static_cast<uint32_t>(own));
  if (home == nullptr || found == home->mbarriers.end()) {
    context.machine->find(context, kBarrier, lane, address);
    return nullptr;
  }
  const Mbarrier& barrier = found->second;
  const Access& made = barrier.made;
  // A relaxed barrier of the cluster hands on nothing but initialisations that were fenced.
  bool shown = barrier.fenced && full(context).passed > barrier.generation;
  if (!shown && !full(context).clock.knows(made, 0xf)) {
    context.machine->find(context, kRace, lane, address, made.instruction);
  }
  return &found->second;
}

namespace {

void settle(Mbarrier& barrier) {
  Block& block = *barrier.home;
  block.event();
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.expected = barrier.completed = 0;
  uint32_t landed = barrier.outstanding.empty() ? barrier.issued : *barrier.outstanding.begin() - 1;
  barrier.arriving.learn(barrier.agent, landed);
  barrier.done = barrier.arriving;
  for (FullWarp& warp : block.warps) {
    if (warp.state == State::kMbarrier) warp.state = State::kReady;  // it asks again
    for (Fragment& fragment : warp.fragments) fragment.parked = false;
  }
}

}  // namespace

void arrived(Context& c, int lane, uint64_t address, Mbarrier& barrier, int64_t count) {
  barrier.pending -= count;
  if (barrier.pending < 0) {
    c.machine->find(c, kBarrier, lane, address, -1, barrier.count);
    barrier.pending = 0;
  }
  settle(barrier);
}

void completed(Context& c, int lane, uint64_t address, Mbarrier& barrier, int64_t bytes) {
  barrier.bytes -= bytes;
  barrier.completed += bytes;
  if (barrier.pending == 0 && barrier.bytes < 0) {
    c.machine->find(c, kTransaction, lane, address, -1, barrier.expected, barrier.completed);
    barrier.bytes = 0;
  }
  settle(barrier);
}

namespace {

// Operands: address, count.
void init(Context& c, const int32_t* o, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, o, lane) % kWindow;
    if (address >= kOwnShared) c.machine->find(c, kOutOfBounds, lane, address);
    if (address >= kOwnShared || c.machine->shared(c, lane, address, 8, true) == nullptr) continue;
    auto place = static_cast<uint32_t>(address);
    Mbarrier& barrier = c.block->mbarriers[place];
    if (barrier.home != nullptr) c.block->agents[place] = {barrier.agent, barrier.issued};
    barrier = {};
    barrier.home = c.block;
    barrier.made = c.block->writes[address / 4];
    auto [known, fresh] = c.block->agents.try_emplace(place, 0, 0);  // the time of an mbarrier's agent goes on
    if (fresh) known->second.first = c.block->cluster->agents++;
    std::tie(barrier.agent, barrier.issued) = known->second;
    barrier.count = barrier.pending = lanes<uint32_t>(c, o[3])[lane];
  }
}

void invalidate(Context& c, const int32_t* o, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto found = c.block->mbarriers.find(static_cast<uint32_t>(address_of(c, o, lane) % kWindow));
    if (found == c.block->mbarriers.end()) continue;
    c.block->agents[found->first] = {found->second.agent, found->second.issued};
    c.block->mbarriers.erase(found);
  }
}

// Operands: address, slot of the token or -1, slot of the arrivals or -1, slot of the bytes or -1, whether it arrives (2: and is
// no longer counted).
void arrive(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, o, lane) % kWindow;
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    if (o[3] >= 0) lanes<uint64_t>(c, o[3])[lane] = barrier->phase;
    if (o[5] >= 0) {
      barrier->bytes += lanes<uint32_t>(c, o[5])[lane];
      barrier->expected += lanes<uint32_t>(c, o[5])[lane];
    }
    if (o[6]) barrier->arriving.join(warp.clock);
    int64_t count = o[4] >= 0 ? lanes<uint32_t>(c, o[4])[lane] : 1;
    if (o[6] == 2) barrier->count -= count;
    arrived(c, lane, address, *barrier, o[6] ? count : 0);
  }
  meet(warp);  // what it does from here on, those who wait do not know
}

// Bytes that a thread says have come. Operands: address, slot of the bytes.
void complete(Context& c, const int32_t* o, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, o, lane) % kWindow;
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier != nullptr) completed(c, lane, address, *barrier, lanes<uint32_t>(c, o[3])[lane]);
  }
}

// The asynchronous proxy sees the mbarriers that this warp has initialised.
void fence_init(Context& c, const int32_t*, uint32_t) {
  for (auto& [address, barrier] : c.block->mbarriers) {
    if (barrier.fenced || barrier.made.agent != full(c).agent) continue;
    barrier.fenced = true;
    barrier.generation = c.block->cluster->barrier.generation;
  }
}

// Everything that this warp knows of is now seen by TMA and wgmma too.
void fence_proxy(Context& c, const int32_t*, uint32_t) {
  FullWarp& warp = full(c);
  Clock known{{}, {}, warp.clock.known, nullptr};
  warp.clock.join(known);
  for (const Part& one : warp.clock.parts) {  // of all lanes: what lanes have released for it is enough
    uint32_t& fenced = warp.clock.fenced[one.agent];
    fenced = std::max(fenced, one.time);
  }
  meet(warp);
}

// Operands: slot, bytes of it, by how many bits it is shifted.
void clock(Context& c, const int32_t* o, uint32_t mask) {
  uint64_t value = static_cast<uint64_t>(full(c).steps) >> o[2];
  for_lanes(mask, [&](int lane) { std::memcpy(c.warp->registers + o[0] + lane * o[1], &value, o[1]); });
}

void trap(Context& c, const int32_t*, uint32_t mask) {
  c.machine->find(c, kTrap, __builtin_ctz(mask), 0);
  c.machine->stopped = true;
}

}  // namespace

void add_barrier(Table& table) {
  table["mbarrier.init"] = init;
  table["mbarrier.inval"] = invalidate;
  table["mbarrier.arrive"] = arrive;
  table["mbarrier.complete_tx"] = complete;
  table["fence.proxy.async"] = fence_proxy;
  table["fence.mbarrier_init"] = fence_init;
  table["trap"] = trap;
  table["clock"] = clock;
}

}  // namespace fw
