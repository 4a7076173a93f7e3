// Blocks of a cluster that access each other's shared memory.
#include <algorithm>

#include "run.h"

namespace fw {

namespace {

// Whether a warp knows that all blocks of its cluster run: it has met them, or this one has told it something.
bool has_begun(const FullWarp& warp, const Block& home) {
  if (warp.passed != 0) return true;
  auto known = [&](const FullWarp& one) { return warp.clock.knows(one.agent, 1, -1); };
  return std::any_of(home.warps.begin(), home.warps.end(), known);
}

}  // namespace

void check_visit(Context& context, const Accessor& who, Block& home, uint64_t address) {
  Machine& machine = *context.machine;
  if (!has_begun(full(context), home)) machine.find(context, kRace, who.lane, address, -1, kNotBegun);
  if (home.exit >= 0) machine.find(context, kRace, who.lane, address, home.exit, kExited);
  LastVisit& last = home.visitors[who.agent];
  Access access;
  access.time = who.time;
  access.instruction = context.instruction;
  access.agent = static_cast<int16_t>(who.agent);
  last = {access, context.block, context.warp->number, who.lane, address};
}

void check_exit(Machine& machine, Block& block) {
  Clock all;
  for (const FullWarp& warp : block.warps) all.join(warp.clock);
  for (auto& [agent, last] : block.visitors) {
    if (all.knows(agent, last.access.time, last.lane)) continue;
    FullWarp warp;
    warp.number = last.warp;
    Context context{&machine, const_cast<Block*>(last.block), &warp, last.access.instruction, 0};
    machine.find(context, kRace, last.lane, last.address, block.exit, kExited);
  }
}

namespace {

// Operands: result, address, rank.
template <class T>
void map_address(Context& c, const int32_t* o, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    T address = lanes<T>(c, o[1])[lane];
    uint32_t rank = lanes<uint32_t>(c, o[2])[lane];
    if (rank >= c.block->cluster->blocks.size()) {
      c.machine->find(c, kOutOfBounds, lane, address % kWindow % kOwnShared, -1, rank);
      rank = c.block->rank;
    }
    T window = address - static_cast<T>(address % kWindow);
    lanes<T>(c, o[0])[lane] = window + static_cast<T>(at_rank(address % kWindow, rank));
  });
}

template <class T>
void rank_of(Context& c, const int32_t* o, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint64_t rank = lanes<T>(c, o[1])[lane] % kWindow >> kRankShift;
    lanes<uint32_t>(c, o[0])[lane] = rank == 0 ? c.block->rank : static_cast<uint32_t>(rank - 1);
  });
}

// --- copies to another block ------------------------------------------------------------------------

// A copy from the own shared memory. Operands: destination, mbarrier, source, slot of the size.
void copy_bulk(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t to = address_of(c, o, lane) % kWindow, address = address_of(c, o + 3, lane) % kWindow;
    uint64_t from = address_of(c, o + 6, lane) % kWindow;
    uint32_t size = lanes<uint32_t>(c, o[9])[lane];
    if (to % 16 != 0 || from % 16 != 0 || size % 16 != 0) {
      c.machine->find(c, kMisaligned, lane, to % 16 != 0 ? to : from);
      continue;
    }
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    uint32_t number = ++barrier->issued;
    Accessor who{&warp.clock, barrier->agent, number, warp.agent, lane, true};
    bool there = true;
    for (uint32_t n = 0; n < size && there; n += 16) {
      there = c.machine->shared_async(c, who, from + n, 16, false) && c.machine->shared_async(c, who, to + n, 16, true);
    }
    barrier->outstanding.insert(number);
    c.machine->load(*c.block, [c, lane, to, from, size, address, number, there]() mutable {
      uint64_t source = from, target = to;
      Block *giver = home_of(c, source), *taker = home_of(c, target);
      if (there) std::memcpy(taker->shared.data() + target, giver->shared.data() + source, size);
      land_bytes(c, lane, address, number, size);
    });
  }
  c.machine->counts[c.instruction].bytes += __builtin_popcount(mask);
}

// Operands: address, mbarrier, bytes of an element, bytes of a register, how many, their slots.
void store_async(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  int each = o[6], width = o[7], count = o[8], bytes = each * count;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t to = address_of(c, o, lane) % kWindow, address = address_of(c, o + 3, lane) % kWindow;
    if (to % bytes != 0) {
      c.machine->find(c, kMisaligned, lane, to);
      continue;
    }
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    uint32_t number = ++barrier->issued;
    bool there = c.machine->shared_async(c, {&warp.clock, barrier->agent, number, warp.agent, lane, false}, to, bytes, true);
    std::array<uint8_t, 32> value{};
    for (int n = 0; n < count; ++n) {
      std::memcpy(&value[n * each], c.warp->registers + o[9 + n] + lane * width, each);
    }
    barrier->outstanding.insert(number);
    c.machine->load(*c.block, [c, lane, to, value, bytes, address, number, there]() mutable {
      uint64_t target = to;
      Block* home = home_of(c, target);
      if (there) std::memcpy(home->shared.data() + target, value.data(), bytes);
      land_bytes(c, lane, address, number, bytes);
    });
  }
  c.machine->counts[c.instruction].bytes += int64_t{bytes} * __builtin_popcount(mask);
}

}  // namespace

void add_cluster(Table& table) {
  table["mapa.shared::cluster.u32"] = table["mapa.u32"] = map_address<uint32_t>;
  table["mapa.shared::cluster.u64"] = table["mapa.u64"] = map_address<uint64_t>;
  table["getctarank.shared::cluster.u32"] = table["getctarank.u32"] = rank_of<uint32_t>;
  table["getctarank.shared::cluster.u64"] = table["getctarank.u64"] = rank_of<uint64_t>;
  table["cp.async.bulk.copy"] = copy_bulk;
  table["st.async"] = store_async;
}

}  // namespace fw
