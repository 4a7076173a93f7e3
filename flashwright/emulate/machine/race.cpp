// Which accesses to shared memory are ordered, and which are not; the same for reductions in global memory.
#include <algorithm>

#include "run.h"

namespace fw {

void Clock::learn(int agent, uint32_t time) {
  if (agent >= static_cast<int>(known.size())) known.resize(agent + 1);
  known[agent] = std::max(known[agent], time);
}

void Clock::join(const Clock& other) {
  for (auto times : {&Clock::known, &Clock::fenced}) {
    auto& mine = this->*times;
    const auto& theirs = other.*times;
    if (mine.size() < theirs.size()) mine.resize(theirs.size());
    for (size_t n = 0; n < theirs.size(); ++n) mine[n] = std::max(mine[n], theirs[n]);
  }
}

void Block::start() {
  int count = static_cast<int>(warps.size());
  writes.assign(shared.size() / 4 + 1, {});
  reads.assign(writes.size() * count, {});
  agents = 4 * count;
  for (FullWarp& warp : warps) {
    warp.clock.known.assign(agents, 0);
    warp.clock.known[warp.number] = 1;
    warp.copies.agent = count + warp.number;
    warp.products.agent = 2 * count + warp.number / 4;  // four warps multiply together
    warp.stores.agent = 3 * count + warp.number;
  }
}

namespace {

// The same byte four times; and the bytes of a word that a mask of four bits names.
uint32_t repeated(uint32_t byte) { return (byte & 0xff) * 0x01010101u; }
uint32_t named(uint8_t bytes) { return ((bytes & 0xfu) * 0x00204081u & 0x01010101u) * 0xff; }

bool collides(const Access& before, const Accessor& who, int32_t instruction, uint8_t bytes) {
  if (before.time == 0 || (before.bytes & bytes) == 0) return false;
  if (before.agent != who.agent || who.agent != who.warp) return before.time > Clock::at(who.clock->known, before.agent);
  // Its own warp: lanes go their own ways until they are told to meet (bar.warp.sync).
  // Of lanes that write at once, one wins: which, does not matter where they write the same.
  if (before.time < who.met || before.instruction == instruction) return false;
  return ((before.lanes ^ repeated(who.lane)) & named(before.bytes & bytes)) != 0;
}

void note(Access& access, const Accessor& who, int32_t instruction, uint8_t bytes) {
  bool same = access.agent == who.agent && access.time == who.time;
  uint32_t lanes = repeated(who.lane);
  if (same) {  // lanes of a warp may each have their own bytes of a word
    uint32_t mine = named(bytes), others = (access.lanes ^ lanes) & mine & named(access.bytes);
    lanes = (access.lanes & ~mine) | (lanes & mine);
    for (uint32_t byte = 0xff; byte != 0 && others != 0; byte <<= 8) {
      if ((others & byte) != 0) lanes = (lanes & ~byte) | (repeated(kSeveral) & byte);
    }
  }
  access.lanes = lanes;
  uint8_t flags = kVolatileBit | kStrongBit;  // of which all accesses must be, to be a bit of both
  access.bytes = same ? ((access.bytes | bytes) & 0xf) | (access.bytes & bytes & flags) : bytes;
  access.agent = static_cast<int16_t>(who.agent);
  access.time = who.time;
  access.instruction = instruction;
}

}  // namespace

int32_t Block::touch(const Accessor& who, uint64_t address, int bytes, int32_t instruction, bool write,
                     bool& unfenced) {
  int32_t other = -1;
  int count = static_cast<int>(warps.size());
  if (write && who.strength != kWeak && atomics.empty()) atomics.resize(reads.size());
  for (uint64_t n = address / 4; n <= (address + bytes - 1) / 4; ++n) {
    uint64_t first = std::max(address, 4 * n) - 4 * n, end = std::min(address + bytes, 4 * n + 4) - 4 * n;
    auto mask = static_cast<uint8_t>((1u << end) - (1u << first));
    auto check_write = [&](const Access& last) {
      if (collides(last, who, instruction, mask)) {
        other = last.instruction;
      } else if (who.async && last.time != 0 && last.agent < 2 * count && (last.bytes & mask) != 0 &&
                 last.time > Clock::at(who.clock->fenced, last.agent)) {
        other = last.instruction;  // written by a store or by cp.async
        unfenced = true;
      }
    };
    check_write(writes[n]);
    for (int w = 0; !atomics.empty() && w < count; ++w) {
      const Access& last = atomics[n * count + w];
      bool lanes = who.strength == kVolatile && w == who.warp && (last.bytes & kVolatileBit) != 0;
      if (who.strength == kWeak || lanes) check_write(last);
    }
    Access* readers = &reads[n * count];
    if (!write) {
      note(readers[who.warp], who, instruction, who.strength == kWeak ? mask : mask | kStrongBit);
      continue;
    }
    for (int r = 0; r < count; ++r) {
      if (who.strength != kWeak && (readers[r].bytes & kStrongBit) != 0) continue;
      if (collides(readers[r], who, instruction, mask)) other = readers[r].instruction, unfenced = false;
    }
    if (who.strength == kWeak) note(writes[n], who, instruction, mask);
    else note(atomics[n * count + who.warp], who, instruction, who.strength == kStrong ? mask : mask | kVolatileBit);
  }
  return other;
}

namespace {

void learn(FullWarp& warp, const Clock& told) {
  // What a lane of this warp has released, another one of it may be told.
  warp.met = std::max(warp.met, Clock::at(told.known, warp.number) + 1);
  warp.clock.join(told);
}

}  // namespace

void fence(FullWarp& warp) {
  learn(warp, warp.seen);
  warp.seen = {};
  warp.fence = warp.clock;
  ++warp.clock.known[warp.number];
}

void Block::read_flag(FullWarp& warp, uint64_t address, bool acquires) {
  ++warp.polls;
  auto found = released.find(address);
  if (found == released.end()) return;
  if (acquires) learn(warp, found->second);
  else warp.seen.join(found->second);
}

void Block::write_flag(FullWarp& warp, uint64_t address, bool releases, bool changes) {
  const Clock& told = releases ? warp.clock : warp.fence;
  if (!changes) released.erase(address);
  if (!told.known.empty()) released[address].join(told);
  if (releases) ++warp.clock.known[warp.number];
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
