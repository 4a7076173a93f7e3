// What threads tell each other by flags and fences, and which plain accesses to global memory of several blocks nothing
// orders.
#include <algorithm>

#include "run.h"

namespace fw {
namespace {

using Times = std::vector<uint32_t>;

bool covers(const Times& more, const Times& less) {
  for (size_t n = 0; n < less.size(); ++n) {
    if (less[n] > (n < more.size() ? more[n] : 0)) return false;
  }
  return true;
}

bool covers(const KnownCluster& more, const KnownCluster& less) {
  auto has = [&](const Part& one) {
    if (one.time <= Clock::at(more.times, one.agent)) return true;
    auto found = std::lower_bound(more.parts.begin(), more.parts.end(), one);
    return found != more.parts.end() && !(one < *found) && one.time <= found->time;
  };
  return covers(more.times, less.times) && std::all_of(less.parts.begin(), less.parts.end(), has);
}

bool covers(const Others& more, const Others& less) {
  return std::all_of(less.begin(), less.end(), [&](auto& one) {
    auto found = more.find(one.first);
    return found != more.end() && (found->second == one.second || covers(*found->second, *one.second));
  });
}

void add(Others& all, int32_t cluster, const std::shared_ptr<const KnownCluster>& times) {
  std::shared_ptr<const KnownCluster>& known = all[cluster];
  if (known == nullptr || covers(*times, *known)) {
    known = times;
  } else if (known != times && !covers(*known, *times)) {
    Clock both{known->times, known->parts, {}, nullptr};
    both.join({times->times, times->parts, {}, nullptr});
    known = std::make_shared<const KnownCluster>(KnownCluster{both.known, both.parts});
  }
}

}  // namespace

// Clusters that have met know the same: they share it.
void join(KnownOthers& mine, const KnownOthers& theirs) {
  if (theirs == nullptr || mine == theirs) return;
  if (mine == nullptr || covers(*theirs, *mine)) {
    mine = theirs;
  } else if (!covers(*mine, *theirs)) {
    auto all = std::make_shared<Others>(*mine);
    for (auto& [cluster, times] : *theirs) add(*all, cluster, times);
    mine = all;
  }
}

namespace {

void learn(FullWarp& warp, const Clock& told) {
  // What a lane of this warp has released, another one of it may be told.
  warp.met = std::max(warp.met, Clock::at(told.known, warp.agent) + 1);
  for (const Part& one : told.parts) {
    if (one.agent == warp.agent) warp.met = std::max(warp.met, one.time + 1);
  }
  warp.clock.join(told);
}

// What some lanes know, and thereby release: of the other lanes of their warp what these had done when they last met.
Clock released(const FullWarp& warp, uint32_t lanes) {
  Clock told = warp.clock;
  uint32_t now = std::exchange(told.known[warp.agent], warp.met - 1);
  if (lanes != 0) told.learn({{warp.agent, lanes, now}});
  return told;
}

// What a lane may tell of what lanes of its warp have fenced: its own part, and what was fenced before they met.
Clock fenced_by(const FullWarp& warp, const Clock& fence, int lane) {
  Clock told = fence;
  std::vector<Part> parts = std::exchange(told.parts, {});
  for (Part& one : parts) {
    if (one.agent == warp.agent && one.time >= warp.met) one.lanes &= 1u << lane;
    if (one.lanes != 0) told.learn({one});
  }
  return told;
}

// What a warp knows, for those of other clusters; and back.
KnownOthers for_others(const Clock& clock, const Cluster& cluster) {
  auto all = clock.others == nullptr ? std::make_shared<Others>() : std::make_shared<Others>(*clock.others);
  add(*all, cluster.number, std::make_shared<const KnownCluster>(KnownCluster{clock.known, clock.parts}));
  return all;
}

Clock from_others(const KnownOthers& known, const Cluster& cluster) {
  Clock clock;
  clock.others = known;
  if (known == nullptr) return clock;
  if (auto own = known->find(cluster.number); own != known->end()) {
    clock.known = own->second->times;
    clock.parts = own->second->parts;
  }
  return clock;
}

// The scopes in which something may be told: in the block always, in the cluster if it has several, else if it is asked.
template <class F>
void for_scopes(const Machine& machine, const Cluster& cluster, int widest, F&& body) {
  body(kInBlock);
  if (widest >= kInCluster && cluster.blocks.size() > 1) body(kInCluster);
  if (widest >= kInGrid && machine.global_races) body(kInGrid);
}

int owner_of(const Context& context, int scope) {
  return scope == kInBlock ? context.block->number : scope == kInCluster ? context.block->cluster->number : 0;
}

Flags& flags_of(const Context& context, uint64_t address) {
  bool shared = address / kWindow * kWindow == kSharedWindow;
  return shared || !context.machine->global_races ? context.block->cluster->flags : context.machine->flags;
}

}  // namespace

void fence(const Machine& machine, const Cluster& cluster, FullWarp& warp, int scope, uint32_t lanes) {
  for_scopes(machine, cluster, scope, [&](int n) {
    learn(warp, warp.seen[n]);
    warp.seen[n] = {};
  });
  Clock told = released(warp, lanes);
  for_scopes(machine, cluster, scope, [&](int n) {
    Clock before = std::exchange(warp.fence[n], told);
    warp.fence[n].join(before);  // other lanes had fences too
  });
  ++warp.clock.known[warp.agent];
}

void read_flag(Context& context, uint64_t address, int scope, bool acquires) {
  Flags& flags = flags_of(context, address);
  auto found = flags.find(address);
  if (found == flags.end()) return;
  FullWarp& warp = full(context);
  const Cluster& cluster = *context.block->cluster;
  for_scopes(*context.machine, cluster, scope, [&](int n) {
    const Flag& flag = found->second;
    if (flag.owner[n] != owner_of(context, n)) return;
    Clock told = n == kInGrid ? from_others(flag.grid, cluster) : flag.told[n];
    if (acquires) learn(warp, told);
    else warp.seen[n].join(told);
  });
}

void write_flag(Context& context, uint64_t address, int scope, int lane, bool releases, bool changes) {
  FullWarp& warp = full(context);
  const Cluster& cluster = *context.block->cluster;
  Flags& flags = flags_of(context, address);
  if (!changes) flags.erase(address);
  for_scopes(*context.machine, cluster, scope, [&](int n) {
    Clock told = releases ? released(warp, 1u << lane) : fenced_by(warp, warp.fence[n], lane);
    if (told.known.empty()) return;
    Flag& flag = flags[address];
    if (std::exchange(flag.owner[n], owner_of(context, n)) != flag.owner[n]) flag.told[n % kInGrid] = {};
    if (n == kInGrid) join(flag.grid, for_others(told, cluster));
    else flag.told[n].join(told);
  });
  if (releases) ++warp.clock.known[warp.agent];
}

// --- global memory ----------------------------------------------------------------------------------

namespace {

struct WordAccess {
  const Accessor& who;
  const Block& block;
  int scope;  // of a strong access, or -1
  int32_t instruction;
  uint8_t mask;

  bool in_block(const GlobalAccess& before) const {
    int warps = static_cast<int>(block.warps.size());
    return before.cluster == block.cluster->number && before.agent % block.cluster->warps / warps == block.rank;
  }

  // Both are atomic, and each one's scope includes the other.
  bool strong(const GlobalAccess& before) const {
    int between = in_block(before) ? kInBlock : before.cluster == block.cluster->number ? kInCluster : kInGrid;
    return before.scope >= between && scope >= between;
  }

  bool ordered(const GlobalAccess& before) const {
    if (before.cluster != block.cluster->number) {
      const KnownOthers& others = who.clock->others;
      if (others == nullptr) return false;
      auto found = others->find(before.cluster);
      if (found == others->end()) return false;
      const KnownCluster& known = *found->second;
      if (before.time <= Clock::at(known.times, before.agent)) return true;
      return !known.parts.empty() && Clock{known.times, known.parts, {}, nullptr}.knows(before.agent, before.time, before.lane);
    }
    if (before.agent != who.agent || who.agent != who.warp) {
      return who.clock->knows(before.agent, before.time, before.lane);
    }
    return before.time < who.met || before.lane == who.lane || before.instruction == instruction;
  }

  // Whether nothing orders the two.
  bool collides(const GlobalAccess& before) const {
    return before.time != 0 && (before.bytes & mask) != 0 && !strong(before) && !ordered(before);
  }

  void note(GlobalAccess& access) const {
    bool same = access.cluster == block.cluster->number && access.agent == who.agent && access.time == who.time;
    bool alike = same && access.scope == scope;
    access.bytes = alike ? access.bytes | mask : mask;
    access.lane = same && access.lane != who.lane ? -2 : static_cast<int8_t>(who.lane);
    access.scope = static_cast<int8_t>(scope);
    access.cluster = block.cluster->number;
    access.agent = static_cast<int16_t>(who.agent);
    access.time = who.time;
    access.instruction = instruction;
  }
};

}  // namespace

void Machine::visit_words(Context& context, const Accessor& who, size_t region, uint64_t offset, int bytes, bool write,
                          int scope) {
  for (uint64_t n = offset / 4; n <= (offset + bytes - 1) / 4; ++n) {
    uint64_t first = std::max(offset, 4 * n) - 4 * n, end = std::min<uint64_t>(offset + bytes, 4 * n + 4) - 4 * n;
    WordAccess visitor{who, *context.block, scope, context.instruction, static_cast<uint8_t>((1u << end) - (1u << first))};
    GlobalWord& word = words[region].get()[n];
    auto check = [&](const GlobalAccess& before) {
      if (!visitor.collides(before)) return;
      bool narrow = before.scope >= 0 && scope >= 0;
      bool other = !visitor.in_block(before);
      find(context, kRace, who.lane, regions[region].base + offset, before.instruction,
           narrow ? kNarrowScope : other ? kOtherBlock : 0);
    };
    check(word.write);
    check(word.strong);
    if (!write) {
      // Of readers the last one of two blocks are known: a later write that none of the others is ordered with either.
      if (!visitor.in_block(word.read) && word.read.time != 0) word.other_read = word.read;
      visitor.note(word.read);
      continue;
    }
    check(word.read);
    check(word.other_read);
    visitor.note(scope >= 0 ? word.strong : word.write);
  }
}

}  // namespace fw
