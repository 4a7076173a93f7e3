// A launch as it runs: memory, blocks, warps, what is under way, and what was found wrong.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
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
enum Use : int32_t { kRead, kReadWrite, kOutput, kEmpty, kUnset };

enum FindingKind : int32_t {
  kOutOfBounds, kMisaligned, kReadOnly, kUnwritten, kRace, kDeadlock, kDivergent, kProxy, kTransaction,
  kRegister, kFence, kBarrier, kTrap,
};

struct Finding {
  int32_t kind, instruction, block, warp, lane, other;
  uint64_t address;
  int64_t detail[2];
};

struct Counts {
  int64_t executed = 0, lanes = 0, bytes = 0, wavefronts = 0, ideal = 0, sectors = 0, requests = 0, waits = 0;
};

enum Schedule : int32_t { kEager, kLazy, kRandom };

// --- time -----------------------------------------------------------------------------------------

// Whatever accesses memory is an agent with a time of its own: each warp, the copies and the stores of each warp
// that run on without it, the matrix products of each warpgroup; and each mbarrier, for what completes on it.
// A clock says up to which time of each agent everything is known to have happened. Clocks are joined where
// warps meet. An access that its agent does not know of may as well happen at the same time as its own.
struct Clock {
  std::vector<uint32_t> known;   // by agent
  std::vector<uint32_t> fenced;  // the same for the eyes of TMA and wgmma: known at a proxy fence

  static uint32_t at(const std::vector<uint32_t>& times, int agent) {
    return agent < static_cast<int>(times.size()) ? times[agent] : 0;
  }
  void learn(int agent, uint32_t time);
  void join(const Clock& other);
};

// An access to a word of shared memory.
struct Access {
  uint32_t time = 0;  // 0 is never
  int32_t instruction = -1;
  int16_t agent = -1;
  int8_t lane = -1;    // -2: several
  uint8_t bytes = 0;   // a bit for each; kVolatileBit for what is in `atomics`, kStrongBit for what is in `reads`
};
constexpr uint8_t kVolatileBit = 0x10, kStrongBit = 0x20;

// Accesses of which one may happen beside another without a race. Volatile ones are strong between warps, but
// do not order the lanes of a warp.
enum Strength : int32_t { kWeak, kVolatile, kStrong };

// Who accesses, as what.
struct Accessor {
  const Clock* clock;
  int agent;
  uint32_t time;
  int warp;
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
};

enum class State { kReady, kBarrier, kMbarrier, kCluster, kProduct, kDone };

struct Wrote {
  int32_t instruction = -1;
  uint32_t fences = 0;
};

struct FullWarp : Warp {
  std::vector<uint8_t> file;
  std::vector<uint8_t> local;       // each lane's own memory
  std::vector<uint8_t> local_written;  // which bytes of it were written
  std::vector<Fragment> fragments;  // by place, the lowest first
  State state = State::kReady;
  uint64_t barrier = 0;             // the number or the address of what it waits at
  const int32_t* reduction = nullptr;  // the operands of a barrier that reduces predicates, which it waits at
  uint32_t asked = 0;               // the lanes that get the result
  bool give_up = false;             // its next try to wait is in vain
  uint32_t cluster = 0;             // the generation of the cluster's barrier that it waits for
  std::array<uint32_t, 17> arrived{};  // at each barrier: 1 + the generation in which it came there last
  Clock clock;
  Clock fence;                      // what it knew at its last fence: what a relaxed store tells those who read it
  Clock seen;                       // what it has read by relaxed loads: known from the next fence on
  int polls = 0;                    // atomic loads and changes since it had its turn
  bool polled = false;              // whether these ended its turn
  int leader = -1;                  // the lane whose fragment goes on first, or -1: the one that is furthest behind
  uint32_t met = 1;                 // its time when its lanes last met
  Queue copies, products, stores;
  uint32_t fences = 1;              // of wgmma
  std::vector<Wrote> wrote;         // by slot / 8: who wrote a register, and after how many fences
  std::vector<int32_t> busy;        // by slot / 8: 1 + the wgmma that uses it
  std::vector<char> only_read;      // by slot / 8: as its left operand
  int64_t steps = 0;
};

struct Barrier {
  int wanted = 0, arrived = 0;  // 0 wanted: all threads that are still there
  int yes = 0, no = 0;          // predicates of those that have arrived
  uint32_t generation = 0;
  Clock clock, done;
};

struct Mbarrier {
  Access made;  // by its initialisation
  bool fenced = false;  // whether the warp that initialised it has executed fence.mbarrier_init since
  int agent = 0;
  int64_t count = 0, pending = 0, bytes = 0;
  int64_t expected = 0, completed = 0;  // bytes of this phase
  uint32_t phase = 0;
  uint32_t issued = 0;
  std::set<uint32_t> outstanding;
  Clock arriving, done;
};

struct Block {
  int number = 0;
  std::vector<uint8_t> shared;
  std::vector<uint8_t> written;  // which bytes of it anybody has written
  std::vector<FullWarp> warps;
  std::array<Barrier, 17> barriers;  // the last one is the cluster's
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Load> loads;
  std::map<uint64_t, Clock> released;  // by address: what those who read there learn (read_flag)
  std::vector<Access> writes;  // of each word of shared memory the last one
  std::vector<Access> reads;   // and of each word by each warp
  std::vector<Access> atomics;  // strong writes of each word by each warp; empty until there are any
  int agents = 0;
  int64_t events = 0;  // what somebody may have waited for

  void start();
  // Notes an access. The instruction that it collides with, or -1; `unfenced` where only a proxy fence lacks.
  int32_t touch(const Accessor& who, uint64_t address, int bytes, int32_t instruction, bool write, bool& unfenced);
  // An atomic load: what those who wrote there have released, the warp knows, at once or from its next fence on.
  void read_flag(FullWarp& warp, uint64_t address, bool acquires);
  // An atomic store, or a change: it releases what the warp knows, or what it knew at its last fence.
  void write_flag(FullWarp& warp, uint64_t address, bool releases, bool changes);
};
void fence(FullWarp& warp);

// Accesses to a word of global memory: by which block (-1: none, -2: several), its last one and the last one of another
// warp.
struct Visit {
  int32_t block = -1;
  Access last, other_warp;
};

// --- the machine ----------------------------------------------------------------------------------

struct Code {
  Handler run;
  int32_t first, count;  // its operands
  int32_t guard;         // slot, or -1
  int32_t negated;
  int32_t control;       // 0, or which kind of jump or wait it is
  int32_t touched, wrote, read;  // registers: where they are listed, how many are written, how many read
  int32_t meets;                 // which lanes execute it together: of Meeting
};

// With all lanes of the warp, or with those that the last operand names.
enum Meeting : int32_t { kAlone, kWithWarp, kWithMembers };

enum Control : int32_t {
  kNormal, kBranch, kExit, kBarrierSync, kBarrierArrive, kMbarrierWait, kClusterArrive, kClusterWait, kProductWait,
};

struct Machine {
  std::vector<Code> code;
  std::vector<int32_t> operands;
  std::vector<int32_t> touched;
  std::vector<WgmmaShape> shapes;  // by instruction; empty where there is no wgmma
  std::vector<Region> regions;
  std::vector<std::vector<uint8_t>> filled;  // of each output: which bytes were written
  // Of each tensor that is written, two for each word: plain accesses and reductions. Empty where none are made (red), or
  // where atom may order blocks.
  std::vector<std::vector<Visit>> visits;
  std::vector<uint8_t> parameters;
  std::vector<Finding> findings;  // of each kind at each instruction the first
  std::set<std::pair<int32_t, int32_t>> told;
  int64_t echoes = 0;
  std::vector<Counts> counts;
  bool hands_on = false;  // whether threads may tell others something by atomic accesses
  Schedule schedule = kEager;
  std::mt19937_64 random;
  bool stopped = false;

  void find(const Context& context, FindingKind kind, int lane, uint64_t address, int other = -1,
            int64_t first = 0, int64_t second = 0);
  // The bytes at an address, or null, which has then been told.
  uint8_t* global(Context& context, int lane, uint64_t address, int bytes, bool write, int align = 0,
                  bool reduces = false);
  // Tells a change of what is empty.
  void check_filled(Context& context, int lane, uint64_t address, int bytes);
  // Finds reductions and plain accesses to the same words that nothing orders.
  void visit(Context& context, int lane, size_t region, uint64_t offset, int bytes, bool reduces);
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
  return {&warp.clock, warp.number, warp.clock.known[warp.number], warp.number, lane, false, warp.met, strength};
}

// The lanes of a warp meet: what each of them did before, the others know.
inline void meet(FullWarp& warp) { warp.met = ++warp.clock.known[warp.number]; }

// The address of an operand (slot, bytes of the register, offset) in a lane.
inline uint64_t address_of(Context& c, const int32_t* o, int lane) {
  uint64_t base = o[1] == 8 ? lanes<uint64_t>(c, o[0])[lane] : lanes<uint32_t>(c, o[0])[lane];
  return base + static_cast<int64_t>(o[2]);
}

// Where generic addresses mean something else than global memory.
constexpr uint64_t kSharedWindow = uint64_t{0x7f} << 40, kLocalWindow = uint64_t{0x7e} << 40,
                   kParameterWindow = uint64_t{0x7d} << 40, kWindow = uint64_t{1} << 40;

void run_block(Machine& machine, Block& block);
void finish(Block& block, FullWarp& warp, Queue& queue, size_t kept);  // all groups but the last ones
void close(Queue& queue);
Mbarrier* mbarrier(Context& context, int lane, uint64_t address);
// Arrivals, or bytes that have come, may complete a phase.
void arrived(Context& context, int lane, uint64_t address, Mbarrier& barrier, int64_t count);
void completed(Context& context, int lane, uint64_t address, Mbarrier& barrier, int64_t bytes);

void add_barrier(Table& table);
void add_async(Table& table);
void add_atomic(Table& table);

}  // namespace fw
