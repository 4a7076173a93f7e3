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

struct GlobalVisitor {  // an access to some of 16 bytes, or to a word
  const Accessor& who;
  const Block& block;
  int scope;  // of a strong access, or -1
  int32_t instruction;
  uint32_t mask;

  bool in_block(const GlobalAccess& before) const {
    if (before.cluster != block.cluster->number) return false;
    int warps = static_cast<int>(block.warps.size());
    return before.agent == who.warp || before.agent % block.cluster->warps / warps == block.rank;
  }

  // Both are atomic, and each one's scope includes the other.
  bool strong(const GlobalAccess& before) const {
    int between = in_block(before) ? kInBlock : before.cluster == block.cluster->number ? kInCluster : kInGrid;
    return before.scope >= between && scope >= between;
  }

  // Whether all lanes that have made an access to the same bytes pass a test.
  template <class F>
  bool lanes_of(const GlobalAccess& before, F&& test) const {
    for (int word = 0; word < 4; ++word) {
      auto lane = static_cast<uint8_t>(before.lanes >> 8 * word);
      if ((before.bytes & mask) >> 4 * word & 0xf && !test(static_cast<int>(lane))) return false;
    }
    return true;
  }

  bool ordered(const GlobalAccess& before) const {
    if (before.cluster != block.cluster->number) {
      const KnownOthers& others = who.clock->others;
      if (others == nullptr) return false;
      auto found = others->find(before.cluster);
      if (found == others->end()) return false;
      const KnownCluster& known = *found->second;
      if (before.time <= Clock::at(known.times, before.agent)) return true;
      if (known.parts.empty()) return false;
      Clock clock{known.times, known.parts, {}, nullptr};
      return lanes_of(before, [&](int lane) { return clock.knows(before.agent, before.time, lane); });
    }
    if (before.agent != who.agent || who.agent != who.warp) {
      if (before.time <= Clock::at(who.clock->known, before.agent)) return true;
      return lanes_of(before, [&](int lane) { return who.clock->knows(before.agent, before.time, lane); });
    }
    if (before.time < who.met || before.instruction == instruction) return true;
    return ((before.lanes ^ repeated(who.lane)) & named_words(before.bytes & mask)) == 0;
  }

  // Whether nothing orders the two.
  bool collides(const GlobalAccess& before) const {
    return before.time != 0 && (before.bytes & mask) != 0 && !ordered(before) && !strong(before);
  }

  bool same(const GlobalAccess& one) const {
    return one.time == who.time && one.agent == who.agent && one.cluster == block.cluster->number && one.scope == scope;
  }

  // Whether one access remains to be known if this one is noted.
  bool fits(const GlobalAccess& one) const { return one.time == 0 || (one.bytes & ~mask) == 0 || same(one); }

  void note(GlobalAccess& access) const {
    uint32_t lanes = repeated(who.lane);
    if (same(access)) {
      uint32_t mine = named_words(mask), others = (access.lanes ^ lanes) & mine & named_words(access.bytes);
      lanes = (access.lanes & ~mine) | (lanes & mine);
      for (uint32_t byte = 0xff; byte != 0 && others != 0; byte <<= 8) {
        if ((others & byte) != 0) lanes = (lanes & ~byte) | (repeated(kSeveral) & byte);
      }
      access.bytes |= static_cast<uint16_t>(mask);
    } else {
      access.bytes = static_cast<uint16_t>(mask);
    }
    access.lanes = lanes;
    access.scope = static_cast<int16_t>(scope);
    access.cluster = block.cluster->number;
    access.agent = who.agent;
    access.time = who.time;
    access.instruction = instruction;
  }

  // Of readers the last one of two blocks are known: a later write that none of the others is ordered with either.
  bool comes_after(const GlobalAccess& read) const { return read.time != 0 && !in_block(read); }

  void note_read(GlobalAccess& read, GlobalAccess& other_read) const {
    if (comes_after(read)) other_read = read;
    note(read);
  }

  // Whether 16 bytes need not be split.
  bool fits(const GlobalGranule& all, bool write) const {
    if (scope >= 0) return false;
    if (write) return fits(all.write);
    if (!comes_after(all.read)) return fits(all.read);
    return all.other_read.time == 0 || (all.other_read.bytes & ~all.read.bytes) == 0;
  }
};

// A word's part of an access to 16 bytes.
GlobalAccess part(const GlobalAccess& all, int word) {
  GlobalAccess own = all;
  own.bytes = all.bytes >> 4 * word & 0xf;
  own.lanes = repeated(all.lanes >> 8 * word);
  if (own.bytes == 0) own.time = 0;
  return own;
}

}  // namespace

void Machine::visit_granules(Context& context, const Accessor& who, size_t region, uint64_t offset, int bytes, bool write,
                             int scope) {
  auto check = [&](const GlobalVisitor& visitor, const GlobalAccess& before) {
    if (!visitor.collides(before)) return;
    bool narrow = before.scope >= 0 && scope >= 0;
    bool other = !visitor.in_block(before);
    find(context, kRace, who.lane, regions[region].base + offset, before.instruction,
         narrow ? kNarrowScope : other ? kOtherBlock : Detail{});
  };
  for (uint64_t n = offset / kGranule; n <= (offset + bytes - 1) / kGranule; ++n) {
    uint64_t begin = kGranule * n, first = std::max(offset, begin) - begin;
    uint64_t end = std::min(offset + bytes, begin + kGranule) - begin;
    GlobalVisitor visitor{who, *context.block, scope, context.instruction, (1u << end) - (1u << first)};
    GlobalGranule& all = granules[region].get()[n];
    all.touched = 1;
    if (all.split == 0 && visitor.fits(all, write)) {
      check(visitor, all.write);
      if (!write) {
        visitor.note_read(all.read, all.other_read);
        continue;
      }
      check(visitor, all.read);
      check(visitor, all.other_read);
      visitor.note(all.write);
      continue;
    }
    if (all.split == 0) {
      split.emplace_back();
      for (int w = 0; w < 4; ++w) split.back()[w] = {part(all.write, w), {}, part(all.read, w), part(all.other_read, w)};
      all.split = static_cast<uint32_t>(split.size());
    }
    uint32_t mask = visitor.mask;
    for (int w = 0; w < 4; ++w) {
      visitor.mask = mask >> 4 * w & 0xf;
      if (visitor.mask == 0) continue;
      GlobalWord& word = split[all.split - 1][w];
      check(visitor, word.write);
      check(visitor, word.strong);
      if (!write) {
        visitor.note_read(word.read, word.other_read);
        continue;
      }
      check(visitor, word.read);
      check(visitor, word.other_read);
      visitor.note(scope >= 0 ? word.strong : word.write);
    }
  }
}

}  // namespace fw
