// Which accesses to shared memory are ordered, and which are not; the same for reductions in global memory.
#include <algorithm>

#include "run.h"

namespace fw {

constexpr size_t kFlags = 256;  // a warp that reads more of them in turn does not wait for one

void Clock::learn(int agent, uint32_t time) {
  if (agent >= static_cast<int>(known.size())) known.resize(agent + 1);
  known[agent] = std::max(known[agent], time);
}

void Clock::learn(const std::vector<Part>& more) {
  if (parts.empty() && more.empty()) return;
  std::vector<Part> all;
  auto add = [&](const Part& one) {
    if (one.time <= at(known, one.agent)) return;
    bool same = !all.empty() && all.back().agent == one.agent && all.back().lanes == one.lanes;
    if (same) all.back().time = std::max(all.back().time, one.time);
    else all.push_back(one);
  };
  auto mine = parts.begin();
  for (const Part& one : more) {
    for (; mine != parts.end() && *mine < one; ++mine) add(*mine);
    add(one);
  }
  std::for_each(mine, parts.end(), add);
  parts = std::move(all);
}

bool Clock::knows(int agent, uint32_t time, int lane) const {
  if (time <= at(known, agent)) return true;
  return std::any_of(parts.begin(), parts.end(), [&](const Part& one) {
    return one.agent == agent && time <= one.time && (lane < 0 || lane >= kLanes || (one.lanes >> lane & 1) != 0);
  });
}

bool Clock::knows(const Access& access, uint8_t bytes) const {
  if (access.time <= at(known, access.agent)) return true;
  for (int byte = 0; !parts.empty() && byte < 4; ++byte) {
    bool counts = (access.bytes & bytes) >> byte & 1;
    if (counts && !knows(access.agent, access.time, static_cast<uint8_t>(access.lanes >> 8 * byte))) return false;
  }
  return !parts.empty();
}

void Clock::join(const Clock& other) {
  for (auto times : {&Clock::known, &Clock::fenced}) {
    auto& mine = this->*times;
    const auto& theirs = other.*times;
    if (mine.size() < theirs.size()) mine.resize(theirs.size());
    for (size_t n = 0; n < theirs.size(); ++n) mine[n] = std::max(mine[n], theirs[n]);
  }
  learn(other.parts);
  fw::join(others, other.others);
}

void Cluster::start() {
  for (auto& block : blocks) warps += static_cast<int>(block->warps.size());
  agents = 4 * warps;
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    blocks[rank]->rank = static_cast<int>(rank);
    blocks[rank]->cluster = this;
    blocks[rank]->start();
  }
}

void Block::start() {
  int count = static_cast<int>(warps.size()), all = cluster->warps;
  words = shared.size() / 4 + 1;
  writes.assign(words);
  reads.assign(words * count);
  for (FullWarp& warp : warps) {
    warp.agent = rank * count + warp.number;
    warp.clock.known.assign(cluster->agents, 0);
    warp.clock.known[warp.agent] = 1;
    warp.copies.agent = all + warp.agent;
    warp.products.agent = 2 * all + rank * count + warp.number / 4;  // four warps multiply together
    warp.stores.agent = 3 * all + warp.agent;
  }
}

namespace {

bool collides(const Access& before, const Accessor& who, int32_t instruction, uint8_t bytes) {
  if (before.time == 0 || (before.bytes & bytes) == 0) return false;
  if (before.agent != who.agent || who.agent != who.warp) return !who.clock->knows(before, bytes);
  // Its own warp: lanes go their own ways until they are told to meet (bar.warp.sync).
  // Of lanes that write at once, one wins: which, does not matter where they write the same.
  if (before.time < who.met || before.instruction == instruction) return false;
  return ((before.lanes ^ repeated(who.lane)) & named(before.bytes & bytes)) != 0;
}

void note(Access& access, const Accessor& who, int32_t instruction, uint8_t bytes) {
  bool same = access.agent == who.agent && access.time == who.time;
  note_lane(access, who.lane, bytes, same);
  uint8_t flags = kVolatileBit | kStrongBit;  // of which all accesses must be, to be a bit of both
  access.bytes = same ? ((access.bytes | bytes) & 0xf) | (access.bytes & bytes & flags) : bytes;
  access.agent = static_cast<int16_t>(who.agent);
  access.time = who.time;
  access.instruction = instruction;
}

Access& access_of(std::vector<Visitor>& visitors, int warp) {
  auto found = std::find_if(visitors.begin(), visitors.end(), [&](auto& one) { return one.warp == warp; });
  if (found != visitors.end()) return found->access;
  visitors.push_back({{}, warp});
  return visitors.back().access;
}

}  // namespace

int32_t Block::touch(const Accessor& who, uint64_t address, int bytes, int32_t instruction, bool write,
                     bool& unfenced) {
  int32_t other = -1;
  int count = static_cast<int>(warps.size()), own = who.warp - rank * count;
  bool remote = !is_own(who.warp);
  if (write && who.strength != kWeak && !remote && atomics.empty()) atomics.assign(words * count);
  for (uint64_t n = address / 4; n <= (address + bytes - 1) / 4; ++n) {
    uint64_t first = std::max(address, 4 * n) - 4 * n, end = std::min(address + bytes, 4 * n + 4) - 4 * n;
    auto mask = static_cast<uint8_t>((1u << end) - (1u << first));
    auto check_write = [&](const Access& last) {
      if (collides(last, who, instruction, mask)) {
        other = last.instruction;
      } else if (who.async && last.time != 0 && last.agent < 2 * cluster->warps && (last.bytes & mask) != 0 &&
                 last.time > Clock::at(who.clock->fenced, last.agent)) {
        other = last.instruction;  // written by a store or by cp.async
        unfenced = true;
      }
    };
    check_write(writes[n]);
    auto check_atomic = [&](const Access& last, bool same) {
      bool lanes = who.strength == kVolatile && same && (last.bytes & kVolatileBit) != 0;
      if (who.strength == kWeak || lanes) check_write(last);
    };
    for (int w = 0; !atomics.empty() && w < count; ++w) check_atomic(atomics[n * count + w], w == own);
    if (!remote_atomics.empty()) {
      for (const Visitor& one : remote_atomics[n]) check_atomic(one.access, one.warp == who.warp);
    }
    if (!write) {
      Access& read = remote ? access_of(remote_reads[n], who.warp) : reads[n * count + own];
      note(read, who, instruction, who.strength == kWeak ? mask : mask | kStrongBit);
      continue;
    }
    auto check_read = [&](const Access& last) {
      if (who.strength != kWeak && (last.bytes & kStrongBit) != 0) return;
      if (collides(last, who, instruction, mask)) other = last.instruction, unfenced = false;
    };
    Access* readers = &reads[n * count];
    for (int r = 0; r < count; ++r) check_read(readers[r]);
    if (!remote_reads.empty()) {
      for (const Visitor& one : remote_reads[n]) check_read(one.access);
    }
    if (who.strength == kWeak) {
      note(writes[n], who, instruction, mask);
      continue;
    }
    Access& changed = remote ? access_of(remote_atomics[n], who.warp) : atomics[n * count + own];
    note(changed, who, instruction, who.strength == kStrong ? mask : mask | kVolatileBit);
  }
  return other;
}

void poll(Context& context, uint64_t address, bool changes) {
  FullWarp& warp = full(context);
  ++warp.polls;
  if (changes) return;
  warp.polled_by = context.instruction;
  if (std::exchange(warp.polled_at, address) == address) return;
  if (warp.polled_before.insert(address).second) warp.idle = false;
  if (warp.polled_before.size() > kFlags) warp.polled_before.clear();
}

void Machine::visit(Context& context, int lane, size_t region, uint64_t offset, int bytes, bool reduces) {
  FullWarp& warp = full(context);
  Accessor who = accessor(warp, lane);
  int block = context.block->number;
  for (uint64_t n = offset / 4; n <= (offset + bytes - 1) / 4; ++n) {
    Visit& own = visits[region][2 * n + reduces];
    const Visit& other = visits[region][2 * n + !reduces];
    for (const Access& before : {other.last, other.other_warp}) {
      if (before.time == 0) continue;
      if (other.block != block || collides(before, who, context.instruction, 0xf)) {
        find(context, kRace, lane, regions[region].base + offset, before.instruction);
      }
    }
    if (own.block != block) own = {own.block == -1 ? block : -2, {}, {}};
    if (own.last.agent != who.agent) own.other_warp = own.last;
    note(own.last, who, context.instruction, 0xf);
  }
}

}  // namespace fw
