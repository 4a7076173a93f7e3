// A launch as it runs: memory, blocks, warps, what is under way, and what was found wrong.
#pragma once

#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine.h"
#include "wgmma.h"

namespace fw {

// --- what the caller sees (emulate.py has the same) ------------------------------------------------

// Global memory: only what the launch was given exists.
struct Region {
  uint64_t base;
  uint64_t size;
  uint8_t* data;
  int32_t use;
  uint8_t* marks;  // which bytes of what is empty were written, by earlier launches too; or none
};

// What a launch may do with a region. An output has nothing in it yet, though a kernel before this one may have set it to
// zero: it may be added to. What is empty has nothing in it for sure. A constant that is unset may not even be written.
// The heap is the memory of malloc (heap.h).
enum Use : int32_t { kRead, kReadWrite, kOutput, kEmpty, kUnset, kHeap };

enum FindingKind : int32_t {
  kOutOfBounds, kMisaligned, kReadOnly, kUnwritten, kRace, kDeadlock, kDivergent, kProxy, kTransaction,
  kRegister, kFence, kBarrier, kTrap,
};

// In the first detail of a finding: of an access to another block's shared memory, of a wait that never ends, of a value
// that a shuffle has read from a lane that does not execute it.
enum Detail : int64_t { kNotBegun = -1, kExited = -2, kNobodyWrites = -2, kOtherBlock = -3, kNarrowScope = -4, kUndefined = -5 };

struct Finding {
  int32_t kind, instruction, block, warp, lane, other;
  uint64_t address;
  int64_t detail[2];
  int32_t callers[4];  // the calls that the lane is in, the innermost first; -1: no more
};

// In which order the clusters of a grid begin, and which of those that have begun goes on.
enum BlockOrder : int32_t { kInOrder, kReversed, kShuffled, kTogether };

struct Counts {
  int64_t executed = 0, lanes = 0, bytes = 0, wavefronts = 0, ideal = 0, sectors = 0, requests = 0, waits = 0;

  void add(const Counts& other) {
    executed += other.executed, lanes += other.lanes, bytes += other.bytes, wavefronts += other.wavefronts;
    ideal += other.ideal, sectors += other.sectors, requests += other.requests, waits += other.waits;
  }
};

enum Schedule : int32_t { kEager, kLazy, kRandom };

// Memory of malloc. What was freed is not given away again as long as there is other memory: accesses to it are found.
struct Heap {
  struct Allocation {
    uint64_t size;
    int32_t freed;  // -1: not, -2: by an earlier launch, else by which instruction
  };

  uint64_t base = 0, size = 0, next = 0;
  uint8_t* data = nullptr;  // `size` bytes, then a mark for each that is written, then the allocations as they are kept
  uint64_t room = 0;        // for these
  std::map<uint64_t, Allocation> all;  // by address

  void open(const Region& region);  // as an earlier launch has left it
  void close();
  uint64_t allocate(uint64_t bytes);  // 0: there is no room
  // The allocation that an address is in, or behind, or all.end().
  std::map<uint64_t, Allocation>::iterator around(uint64_t address);
};

// --- time -----------------------------------------------------------------------------------------

// Whatever accesses memory is an agent with a time of its own: each warp, the copies and the stores of each warp
// that run on without it, the matrix products of each warpgroup; and each mbarrier, for what completes on it.
// A clock says up to which time of each agent everything is known to have happened. Clocks are joined where
// warps meet. An access that its agent does not know of may as well happen at the same time as its own.

// What is known of other clusters, where that is asked: by their numbers. It is not changed, and many share it.
struct KnownCluster;
using Others = std::map<int32_t, std::shared_ptr<const KnownCluster>>;
using KnownOthers = std::shared_ptr<const Others>;
void join(KnownOthers& mine, const KnownOthers& theirs);

// What some lanes of a warp have done up to a time, since the lanes last met: they released it, the others did not.
struct Part {
  int32_t agent;
  uint32_t lanes, time;

  bool operator<(const Part& other) const { return agent != other.agent ? agent < other.agent : lanes < other.lanes; }
};

struct Access;

struct Clock {
  std::vector<uint32_t> known;   // by agent
  std::vector<Part> parts;       // more than that, of some warps; in order
  std::vector<uint32_t> fenced;  // the same for the eyes of TMA and wgmma: known at a proxy fence
  KnownOthers others;

  static uint32_t at(const std::vector<uint32_t>& times, int agent) {
    return agent < static_cast<int>(times.size()) ? times[agent] : 0;
  }
  void learn(int agent, uint32_t time);
  void learn(const std::vector<Part>& more);
  void join(const Clock& other);
  // Whether an access has happened: that to some bytes, or that of a lane (-1: of any).
  bool knows(const Access& access, uint8_t bytes) const;
  bool knows(int agent, uint32_t time, int lane) const;
};

struct KnownCluster {
  std::vector<uint32_t> times;
  std::vector<Part> parts;
};

// An access to a word of shared memory.
struct Access {
  uint32_t time = 0;  // 0 is never
  int32_t instruction = -1;
  uint32_t lanes = 0;  // of each byte the lane; kSeveral where there are several
  int16_t agent = -1;
  uint8_t bytes = 0;   // a bit for each; kVolatileBit for what is in `atomics`, kStrongBit for what is in `reads`
};
static_assert(sizeof(Access) == 16, "there are many of them");
constexpr uint8_t kVolatileBit = 0x10, kStrongBit = 0x20, kSeveral = 0xfe;

// The same byte four times; and the bytes of a word that a mask of four bits names.
inline uint32_t repeated(uint32_t byte) { return (byte & 0xff) * 0x01010101u; }
inline uint32_t named(uint8_t bytes) { return ((bytes & 0xfu) * 0x00204081u & 0x01010101u) * 0xff; }

// Lanes of a warp may each have their own bytes of a word. `same`: whether the access is one with what is noted.
inline void note_lane(Access& access, int lane, uint8_t bytes, bool same) {
  uint32_t lanes = repeated(lane);
  if (same && access.lanes != lanes) {
    uint32_t mine = named(bytes), others = (access.lanes ^ lanes) & mine & named(access.bytes);
    lanes = (access.lanes & ~mine) | (lanes & mine);
    for (uint32_t byte = 0xff; byte != 0 && others != 0; byte <<= 8) {
      if ((others & byte) != 0) lanes = (lanes & ~byte) | (repeated(kSeveral) & byte);
    }
  }
  access.lanes = lanes;
}

// Accesses of which one may happen beside another without a race. Volatile ones are strong between warps, but
// do not order the lanes of a warp.
enum Strength : int32_t { kWeak, kVolatile, kStrong };

// How far a fence or an atomic access reaches.
enum Scope : int32_t { kInBlock, kInCluster, kInGrid };

// Who accesses, as what.
struct Accessor {
  const Clock* clock;
  int agent;
  uint32_t time;
  int warp;  // its agent
  int lane;  // -1 for what is not done by one lane
  bool async;  // through the asynchronous proxy
  uint32_t met = 0;  // the time since when the lanes of the warp have not met
  Strength strength = kWeak;
};

// --- what is under way ----------------------------------------------------------------------------

// A piece of a copy from global memory to shared memory, or back.
struct Piece {
  uint32_t shared;
  int32_t bytes;
  uint8_t* global;    // null: outside of the tensor
  uint8_t fill[16];   // what then comes instead
};

struct Group {  // of asynchronous work that is waited for together
  std::vector<std::function<void()>> work;

  void perform() {
    for (auto& one : work) one();
    work.clear();
  }

  std::vector<std::pair<int32_t, int32_t>> busy;  // registers that are its own until then, and whose
  uint32_t time = 0;                              // of its last part
};

// Groups in order: one queue each for a warp's copies, matrix products and stores.
struct Queue {
  int agent = 0;
  uint32_t open = 1;  // the number of the group that is being filled
  uint32_t time = 1;  // of what is added to it: more than the number where an mbarrier tracks a part of a group
  std::deque<Group> closed;
  Group current;
};

struct Load {  // by TMA, on its way
  std::function<void()> land;
};

// --- blocks ---------------------------------------------------------------------------------------

struct Fragment {  // lanes of a warp that are at the same place
  int32_t at;
  uint32_t mask;
  bool parked = false;  // waits at an mbarrier
  bool held = false;    // waits for other lanes of the warp, to execute an instruction together
  int32_t depth = 0;    // of calls
};

// A call that a lane is in: where it goes on, and its frame there.
struct Call {
  int32_t back;
  uint64_t frame;
  std::shared_ptr<std::vector<uint8_t>> saved;  // the registers of a function that it was in already
};

enum class State { kReady, kBarrier, kMbarrier, kCluster, kProduct, kDone };

struct Wrote {
  int32_t instruction = -1;
  uint32_t fences = 0;
};

// A value that a shuffle has read from a lane that does not execute it (undefined.cpp).
struct Undefined {
  uint32_t lanes = 0;  // of a register
  int32_t shuffle = -1;
  int8_t reader = 0, source = 0;
};

struct FullWarp : Warp {
  int agent = 0;  // its number within the cluster
  std::vector<uint8_t> file;
  std::vector<uint8_t> local;       // each lane's own memory
  std::vector<uint8_t> local_written;  // which bytes of it were written
  std::vector<Fragment> fragments;  // by place: the deepest in calls first, then the lowest
  std::array<std::vector<Call>, kLanes> calls;
  State state = State::kReady;
  uint64_t barrier = 0;             // the number or the address of what it waits at
  const int32_t* reduction = nullptr;  // the operands of a barrier that reduces predicates, which it waits at
  uint32_t asked = 0;               // the lanes that get the result
  bool give_up = false;             // its next try to wait is in vain
  uint32_t cluster = 0;             // the generation of the cluster's barrier that it waits for
  uint32_t passed = 0;              // how many of these have been completed before it went on
  std::array<uint32_t, 17> arrived{};  // at each barrier: 1 + the generation in which it came there last
  Clock clock;
  // By scope: what it knew at its last fence, which a relaxed store tells those who read it; and what it has read by
  // relaxed loads, which is known from the next fence on.
  std::array<Clock, 3> fence, seen;
  int polls = 0;                    // atomic loads and changes since it had its turn
  bool polled = false;              // whether these ended its turn
  bool idle = false;                // and all of them read where it has read before
  uint64_t polled_at = 0;           // where it has read last
  int32_t polled_by = -1;           // the instruction that read there
  std::set<uint64_t> polled_before; // where it has read since it last did something else
  int leader = -1;                  // the lane whose fragment goes on first, or -1: the one that is furthest behind
  uint32_t met = 1;                 // its time when its lanes last met
  Queue copies, products, stores;
  uint32_t fences = 1;              // of wgmma
  std::vector<Wrote> wrote;         // by slot / 8: who wrote a register, and after how many fences
  std::vector<int32_t> busy;        // by slot / 8: 1 + the wgmma that uses it
  std::vector<char> only_read;      // by slot / 8: as its left operand
  std::vector<Undefined> undefined;  // by slot / 8; empty until there are any
  int64_t steps = 0;
};

struct Barrier {
  int wanted = 0, arrived = 0;  // 0 wanted: all threads that are still there
  int yes = 0, no = 0;          // predicates of those that have arrived
  uint32_t generation = 0;
  Clock clock, done;
  std::array<Clock, 3> fenced, fenced_done;  // by scope: what those who have come there knew at their last fences
};

struct Mbarrier {
  Block* home = nullptr;
  Access made;  // by its initialisation
  bool fenced = false;  // whether the warp that initialised it has executed fence.mbarrier_init since
  uint32_t generation = 0;  // of the cluster's barrier, when it was fenced
  int agent = 0;
  int64_t count = 0, pending = 0, bytes = 0;
  int64_t expected = 0, completed = 0;  // bytes of this phase
  uint32_t phase = 0;
  uint32_t issued = 0;
  std::set<uint32_t> outstanding;
  Clock arriving, done;
};

// Accesses that have not happened, by word: the system hands out zeros page by page, and most pages are never touched.
struct Free {
  void operator()(void* one) const { std::free(one); }
};

class Accesses {
 public:
  void assign(size_t count) {
    all.reset(static_cast<Access*>(std::calloc(count + 1, sizeof(Access))));
    if (all == nullptr) throw std::bad_alloc();
  }
  bool empty() const { return all == nullptr; }
  Access& operator[](size_t n) { return all.get()[n]; }

 private:
  std::unique_ptr<Access, Free> all;
};

struct Cluster;

// An access from another block of the cluster.
struct Visitor {
  Access access;
  int warp = 0;  // its agent
};

// Its last access to a block of the cluster.
struct LastVisit {
  Access access;
  const Block* block = nullptr;
  int warp = 0;  // its number
  int lane = -1;
  uint64_t address = 0;
};

constexpr int kClusterBarrier = 16;  // behind those of the block

struct Block {
  int number = 0;
  int rank = 0;  // within its cluster
  Cluster* cluster = nullptr;
  std::vector<uint8_t> shared;
  std::vector<uint8_t> written;  // which bytes of it anybody has written
  std::unordered_map<uint32_t, Undefined> undefined;  // of bytes that count as not written: what was stored there
  std::vector<FullWarp> warps;
  std::array<Barrier, kClusterBarrier> barriers;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::map<uint32_t, std::pair<int, uint32_t>> agents;  // of mbarriers by address, and what the last one there issued
  std::vector<Load> loads;
  size_t words = 0;
  Accesses writes;  // of each word of shared memory the last one
  Accesses reads;   // and of each word by each warp
  Accesses atomics;  // strong writes of each word by each warp; empty until there are any
  std::unordered_map<uint64_t, std::vector<Visitor>> remote_reads, remote_atomics;  // the same, by other blocks
  std::map<int, LastVisit> visitors;  // by agent
  int32_t exit = -1;  // the instruction by which its last thread has exited

  void start();
  void event();  // somebody may have waited for it
  // Notes an access. The instruction that it collides with, or -1; `unfenced` where only a proxy fence lacks.
  int32_t touch(const Accessor& who, uint64_t address, int bytes, int32_t instruction, bool write, bool& unfenced);
  // The same for the usual case, a plain read of written bytes that a warp knows of. False: ask `touch`.
  bool reads_freely(const FullWarp& warp, int lane, uint64_t address, int bytes, int32_t instruction);

 private:
  bool is_own(int agent) const;
};

// What those who read an address learn: by the scope of who has written there, and which block or cluster that was.
struct Flag {
  std::array<int, 3> owner{-1, -1, 0};
  std::array<Clock, 2> told;
  KnownOthers grid;
};
using Flags = std::unordered_map<uint64_t, Flag>;

// The blocks that are launched together and see each other's shared memory; often just one.
struct Cluster {
  int number = 0;
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
  Barrier barrier;
  int warps = 0;  // of all blocks
  int agents = 0;
  int64_t events = 0;  // what somebody may have waited for
  int64_t stuck = -1;  // how many there were when nobody could go on
  int tries = 0;       // to go on since
  Flags flags;

  void start();
};
inline bool Block::reads_freely(const FullWarp& warp, int lane, uint64_t address, int bytes, int32_t instruction) {
  if (address + bytes > shared.size() || !atomics.empty() || !remote_atomics.empty()) return false;
  uint64_t first = address / 4, end = (address + bytes + 3) / 4;
  for (uint64_t n = first; n < end; ++n) {
    const Access& last = writes[n];
    bool own = last.agent == warp.agent;
    if (last.time == 0 || (own && last.time >= warp.met && last.lanes != repeated(lane))) return false;
    if (!own && last.time > Clock::at(warp.clock.known, last.agent)) return false;
  }
  for (int n = 0; n < bytes; ++n) {
    if (written[address + n] == 0) return false;
  }
  uint32_t time = warp.clock.known[warp.agent];
  for (uint64_t n = first; n < end; ++n) {
    auto mask = static_cast<uint8_t>(bytes >= 4 ? 0xf : ((1u << bytes) - 1) << address % 4);
    Access& read = reads[n * warps.size() + warp.number];
    bool same = read.agent == warp.agent && read.time == time;
    note_lane(read, lane, mask, same);
    read.bytes = same ? (read.bytes | mask) & 0xf : mask;
    read.agent = static_cast<int16_t>(warp.agent);
    read.time = time;
    read.instruction = instruction;
  }
  return true;
}
inline void Block::event() { ++cluster->events; }
inline bool Block::is_own(int agent) const { return agent / static_cast<int>(warps.size()) == rank; }
// A fence of some lanes; of none where all of them have just met.
void fence(const Machine& machine, const Cluster& cluster, FullWarp& warp, int scope, uint32_t lanes);
// An atomic load: what those who wrote there have released, the warp knows, at once or from its next fence on.
void read_flag(Context& context, uint64_t address, int scope, bool acquires);
// An atomic store, or a change, by a lane: it releases what the lane knows, or what it knew at its last fence.
void write_flag(Context& context, uint64_t address, int scope, int lane, bool releases, bool changes);

// Accesses to a word of global memory: by which block (-1: none, -2: several), its last one and the last one of another
// warp.
struct Visit {
  int32_t block = -1;
  Access last, other_warp;
};

// The same by any block, where races in global memory are looked for: to some of 16 bytes, or to a word.
struct GlobalAccess {
  uint32_t time;  // 0 is never
  int32_t instruction;
  int32_t cluster;
  int32_t agent;
  uint32_t lanes;  // of each word the lane; kSeveral where there are several
  uint16_t bytes;
  int16_t scope;  // of an atomic access, else -1
};

// The bytes of `lanes` for the words that a mask of 16 bytes names.
inline uint32_t named_words(uint32_t bytes) {
  uint32_t any = (bytes | bytes >> 1 | bytes >> 2 | bytes >> 3) & 0x1111;
  return ((any & 0x1) | (any & 0x10) << 4 | (any & 0x100) << 8 | (any & 0x1000) << 12) * 0xff;
}

// The last plain and the last atomic change of a word, and its last reads by two blocks.
struct GlobalWord {
  GlobalAccess write, strong, read, other_read;
};

// The same of 16 bytes that are accessed together; else their words are split.
struct GlobalGranule {
  volatile uint8_t touched;  // written before anything is read: else the system makes each page twice
  uint32_t split;            // 1 + the number of their words in Machine::split, or 0
  GlobalAccess write, read, other_read;
};
constexpr uint64_t kGranule = 16;

// --- the machine ----------------------------------------------------------------------------------

struct Code {
  Handler run;
  int32_t first, count;  // its operands
  int32_t guard;         // slot, or -1
  int32_t negated;
  int32_t control;       // 0, or which kind of jump or wait it is
  int32_t touched, wrote, read;  // registers: where they are listed, how many are written, how many read
  int32_t meets;                 // which lanes execute it together: of Meeting
  int32_t passes;                // where undefined values go: of Passing
};

// With all lanes of the warp, or with those that the last operand names.
enum Meeting : int32_t { kAlone, kWithWarp, kWithMembers };

// What becomes of undefined values that an instruction reads: each lane's result is undefined; that of all lanes; that of
// the lanes that select it; they are used, or are if they are its address; a shuffle and a store look for themselves.
enum Passing : int32_t { kByLane, kAcross, kSelects, kUses, kAddress, kItself };

enum Control : int32_t {
  kNormal, kBranch, kExit, kBarrierSync, kBarrierArrive, kMbarrierWait, kClusterArrive, kClusterWait, kProductWait,
  kCall = 16, kLeave, kBranchIf,
};

struct Machine {
  std::vector<Code> code;
  std::vector<int32_t> operands;
  std::vector<int32_t> touched;
  std::vector<WgmmaShape> shapes;  // by instruction; empty where there is no wgmma
  std::vector<Region> regions;  // by their addresses
  size_t recent = 0;            // the one that was accessed last
  std::shared_ptr<std::vector<std::vector<uint8_t>>> filled;  // of each output: which bytes were written
  // Of each tensor that is written, two for each word: plain accesses and reductions. Empty where none are made (red), or
  // where atom may order blocks.
  std::vector<std::vector<Visit>> visits;
  std::vector<uint8_t> parameters;
  std::vector<Finding> findings;  // of each kind at each instruction the first
  std::set<std::pair<int32_t, int32_t>> told;
  uint64_t window = 0;  // of the generic address of the access that is made: findings have it
  int64_t echoes = 0;
  std::vector<Counts> counts;
  Heap heap;
  std::string printed;
  std::vector<std::unique_ptr<GlobalGranule, Free>> granules;  // of each tensor, if they are looked for
  std::deque<std::array<GlobalWord, 4>> split;
  bool global_races = false;
  Flags flags;  // in global memory
  bool shared_races = true;
  bool reduces = false, orders = false, talks = false;  // whether it has `red`, `atom`, any atomic or ordered access
  bool hands_on = false;  // whether threads may tell others something by atomic accesses
  Schedule schedule = kEager;
  bool fine = false;    // whether warps have short turns
  int64_t changes = 0;  // stores, and atomic operations that have changed something
  std::mt19937_64 random;
  bool stopped = false;

  void find(const Context& context, FindingKind kind, int lane, uint64_t address, int other = -1,
            int64_t first = 0, int64_t second = 0);
  // The number of the region that has some bytes, or -1.
  int64_t region_of(uint64_t address, int bytes);
  // The bytes at an address, or null, which has then been told.
  // `scope`: that of an atomic access, or -1. `who`: if it is not the lane itself.
  uint8_t* global(Context& context, int lane, uint64_t address, int bytes, bool write, int align = 0,
                  int scope = -1, const Accessor* who = nullptr);
  uint8_t* allocated(Context& context, int lane, uint64_t address, int bytes, bool write);
  // Tells a read of shared memory that was not written, or where something undefined was stored: `own` is the address in
  // its block.
  void tell_unwritten(Context& context, int lane, const Block& home, uint64_t own, uint64_t address, int bytes);
  // Tells a change of what is empty.
  void check_filled(Context& context, int lane, uint64_t address, int bytes);
  // Finds reductions and plain accesses to the same words that nothing orders.
  void visit(Context& context, int lane, size_t region, uint64_t offset, int bytes, bool reduces);
  // Finds accesses to the same words, of which one is no atomic one of a sufficient scope, that nothing orders.
  void visit_granules(Context& context, const Accessor& who, size_t region, uint64_t offset, int bytes, bool write,
                      int scope);
  uint8_t* shared(Context& context, int lane, uint64_t address, int bytes, bool write, Strength strength = kWeak);
  // The same for asynchronous work of a group or an mbarrier.
  bool shared_async(Context& context, Accessor who, uint64_t address, int bytes, bool write);
  // Tells lanes that store different bytes to the same address in one instruction: which of them wins is unknown.
  // `from` gives a lane's bytes.
  template <class F>
  void check_conflicts(Context& context, const uint64_t* address, uint32_t mask, int bytes, F&& from) {
    uint64_t last = 0;
    bool rising = true;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      uint64_t next = address[__builtin_ctz(rest)];
      rising &= next > last || rest == mask;
      last = next;
    }
    if (!rising) find_conflict(context, address, mask, bytes, from);
  }
  void find_conflict(Context& context, const uint64_t* address, uint32_t mask, int bytes,
                     const std::function<const uint8_t*(int)>& from);
  // Work that may be done at any time until its group is waited for.
  void begin(Queue& queue, std::function<void()> work);
  void load(Block& block, std::function<void()> land);
  bool chance(int of) { return schedule == kRandom && random() % of == 0; }
};

inline FullWarp& full(const Context& context) { return *static_cast<FullWarp*>(context.warp); }

inline Accessor accessor(const FullWarp& warp, int lane, Strength strength = kWeak) {
  return {&warp.clock, warp.agent, warp.clock.known[warp.agent], warp.agent, lane, false, warp.met, strength};
}

// The lanes of a warp meet: what each of them did before, the others know.
inline void meet(FullWarp& warp) { warp.met = ++warp.clock.known[warp.agent]; }

// The address of an operand (slot, bytes of the register, offset) in a lane.
inline uint64_t address_of(Context& c, const int32_t* o, int lane) {
  if (o[1] == 8) return lanes<uint64_t>(c, o[0])[lane] + static_cast<int64_t>(o[2]);
  return static_cast<uint32_t>(lanes<uint32_t>(c, o[0])[lane] + o[2]);  // of 32 bits, where a register is below 0
}

// Hands undefined values on, from what an instruction reads to what it writes; tells those that are used.
void pass_undefined(Context& context, const Code& code, const int32_t* operand, uint32_t mask);
void set_undefined(FullWarp& warp, int32_t slot, uint32_t mask, const Undefined& value);
bool is_undefined(const FullWarp& warp, int32_t slot, int lane, Undefined& value);
void tell_undefined(Context& context, const Undefined& value);

// Where generic addresses mean something else than global memory.
constexpr uint64_t kSharedWindow = uint64_t{0x7f} << 40, kLocalWindow = uint64_t{0x7e} << 40,
                   kParameterWindow = uint64_t{0x7d} << 40, kWindow = uint64_t{1} << 40;

// Addresses of shared memory name a block of the cluster from this bit on: 0 is the own one, n + 1 that of rank n.
constexpr int kRankShift = 24;
constexpr uint64_t kOwnShared = uint64_t{1} << kRankShift;
inline uint64_t at_rank(uint64_t address, int rank) {
  return address % kOwnShared | (static_cast<uint64_t>(rank) + 1) << kRankShift;
}
// The block that has an address in shared memory, or null; the address becomes one of its own.
inline Block* home_of(const Context& context, uint64_t& address) {
  if (address < kOwnShared) return context.block;
  auto& blocks = context.block->cluster->blocks;
  uint64_t rank = (address >> kRankShift) - 1;
  address %= kOwnShared;
  return rank < blocks.size() ? blocks[rank].get() : nullptr;
}
// An address of shared memory as all blocks of the cluster name it.
inline uint64_t shared_by_all(const Context& context, uint64_t address) {
  address %= kWindow;
  return address < kOwnShared ? at_rank(address, context.block->rank) : address;
}
// An atomic access to an address, which changes it or not: others get their turn now and then.
void poll(Context& context, uint64_t address, bool changes = false);
// Checks an access to another block's shared memory: the block has begun, and has not ended.
void check_visit(Context& context, const Accessor& who, Block& home, uint64_t address);
// Tells the accesses of other blocks that may come after the end of this one.
void check_exit(Machine& machine, Block& block);

// What a cluster did in its turn. One that polls waits for others to write something.
enum class Step { kGoing, kPolling, kDone };
Step step(Machine& machine, Cluster& cluster);

// The clusters of a launch.
struct Grid {
  int64_t clusters = 0;
  int64_t resident = 1;  // so many at a time
  BlockOrder order = kInOrder;
  uint64_t seed = 0;
  std::function<std::unique_ptr<Cluster>(int64_t)> make;
};
void run_grid(Machine& machine, const Grid& grid);
// The same by several threads, each with a machine of its own: clusters that do not talk to each other. What the first
// machine has then found and counted is what it would have by itself.
void run_apart(std::vector<std::unique_ptr<Machine>>& machines, const Grid& grid);

void finish(Block& block, FullWarp& warp, Queue& queue, size_t kept);  // all groups but the last ones
void close(Queue& queue);
Mbarrier* mbarrier(Context& context, int lane, uint64_t address);
// The same where it is, or null.
Mbarrier* mbarrier_of(const Context& context, uint64_t address);
// Bytes of asynchronous work of a number have come.
void land_bytes(Context& context, int lane, uint64_t address, uint32_t number, int64_t bytes);
// Arrivals, or bytes that have come, may complete a phase.
void arrived(Context& context, int lane, uint64_t address, Mbarrier& barrier, int64_t count);
void completed(Context& context, int lane, uint64_t address, Mbarrier& barrier, int64_t bytes);

// Lanes enter the functions that they call, or return. Puts each at its new place by `place(at, mask)`.
using Placed = std::function<void(int32_t, uint32_t)>;
void call(Context& context, const int32_t* operand, uint32_t mask, int32_t at, const Placed& place);
void leave(Context& context, const int32_t* operand, uint32_t mask, const Placed& place);

// The bytes at an address of local memory, or at a generic one, or null, which has then been told.
uint8_t* local(Context& context, int lane, uint64_t address, int bytes, bool write);
uint8_t* generic(Context& context, int lane, uint64_t address, int bytes, bool write);

// An atomic operation on each number in some bytes of global memory (encode.py's OPERATIONS and TYPES).
void reduce(int32_t operation, int32_t type, uint8_t* to, const uint8_t* from, int bytes);

void add_barrier(Table& table);
void add_builtin(Table& table);
void add_call(Table& table);
void add_async(Table& table);
void add_atomic(Table& table);
void add_cluster(Table& table);

}  // namespace fw
