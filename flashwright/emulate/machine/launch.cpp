// A launch, as ctypes hands it over: decoded, and run.
#include <algorithm>
#include <cfenv>

#include "run.h"

namespace fw {
namespace {

Table table() {
  Table all;
  add_arithmetic(all);
  add_convert(all);
  add_exchange(all);
  add_matrix(all);
  add_memory(all);
  add_barrier(all);
  add_async(all);
  add_atomic(all);
  add_call(all);
  add_builtin(all);
  add_words(all);
  add_fragments(all);
  add_cluster(all);
  return all;
}

const Table& known() {
  static const Table all = table();
  return all;
}

}  // namespace
}  // namespace fw

extern "C" {

struct fw_launch {
  const char* const* names;  // of each instruction; empty for jumps and waits
  const int32_t* code;       // eight numbers each: those of fw::Code behind the handler
  int32_t instructions;
  const int32_t* operands;
  int32_t operand_count;
  const int32_t* touched;
  int32_t touched_count;
  const uint8_t* registers;  // a warp's register file before it starts, constants included
  int32_t register_bytes;
  const int32_t* specials;   // pairs: kind, slot
  int32_t special_count;
  const fw::Region* regions;
  int32_t region_count;
  const uint8_t* parameters;
  int32_t parameter_bytes;
  int32_t grid[3];
  int32_t block[3];
  int32_t cluster[3];
  int32_t order;             // of clusters
  int64_t resident;          // how many at a time
  uint64_t order_seed;
  uint64_t workspace;        // of a cooperative launch, or 0
  int32_t races;             // where they are looked for: 0 nowhere, 1 in shared memory, 2 in global memory too
  int32_t threads;           // of the host, at most
  int32_t shared_bytes;
  int32_t local_bytes;
  int32_t schedule;
  uint64_t seed;
  fw::Finding* findings;
  int32_t finding_room;
  fw::Counts* counts;  // one for each instruction, added to
  uint8_t* printed;    // 8 bytes for the length of all that was printed, then as much of it as there is room for
  int32_t printed_room;
};

}  // extern "C"

namespace {

// Whether it is a load that others may have told something: ld.volatile, ld.relaxed, ld.acquire.
bool is_strong(const std::string& name) {
  return name.rfind("ld.volatile", 0) == 0 || name.rfind("ld.relaxed", 0) == 0 || name.rfind("ld.acquire", 0) == 0;
}

// Which lanes execute an instruction together.
int32_t meeting(const fw_launch& launch, int32_t n) {
  const std::string name = launch.names[n];
  switch (launch.code[8 * n + 4]) {
    case fw::kBarrierSync: case fw::kBarrierArrive: case fw::kClusterArrive: case fw::kClusterWait:
    case fw::kProductWait: return fw::kWithWarp;
    default: break;
  }
  auto begins = [&](const char* stem) { return name.rfind(stem, 0) == 0; };
  if (begins("mma.") || begins("ldmatrix") || begins("stmatrix") || begins("movmatrix") || begins("wgmma.") ||
      begins("wmma.") || begins("product")) {
    return fw::kWithWarp;
  }
  bool members = begins("shfl.") || begins("vote.") || begins("match.") || begins("redux.") || begins("elect.") ||
                 begins("bar.warp");
  return members ? fw::kWithMembers : fw::kAlone;
}

// What becomes of undefined values that it reads.
int32_t passing(const std::string& name) {
  auto begins = [&](const char* stem) { return name.rfind(stem, 0) == 0; };
  if (begins("shfl.")) return fw::kItself;
  if (begins("selp.")) return fw::kSelects;
  if (name == "st" || (begins("st.") && !begins("st.async"))) return fw::kAddress;
  for (const char* stem : {"vote.", "match.", "redux.", "mma.", "movmatrix", "product"}) {
    if (begins(stem)) return fw::kAcross;
  }
  for (const char* stem : {"ld", "st", "atom", "red", "cp.", "wmma.", "mbarrier."}) {
    if (begins(stem)) return fw::kUses;
  }
  return fw::kByLane;
}

// The index of the first instruction that is not known, or -1.
int32_t decode(const fw_launch& launch, fw::Machine& machine) {
  for (int32_t n = 0; n < launch.instructions; ++n) {
    const int32_t* c = launch.code + 8 * n;
    std::string name = launch.names[n];
    bool product = name.rfind("wgmma.mma_async", 0) == 0;
    if (product) {
      machine.shapes.resize(launch.instructions);
      if (!fw::wgmma_shape(name, machine.shapes[n])) return n;
      name = "wgmma";
    }
    machine.reduces |= name == "red";
    machine.orders |= name == "atom";
    machine.talks |= name.rfind("atom", 0) == 0 || name.rfind("red.", 0) == 0 || name == "red" || name == "vprintf" || is_strong(name);
    machine.hands_on |= name == "atom" || is_strong(name);
    auto found = fw::known().find(name);
    if (found == fw::known().end() && !name.empty()) return n;
    machine.code.push_back({found == fw::known().end() ? nullptr : found->second, c[0], c[1], c[2], c[3], c[4],
                            c[5], c[6], c[7], meeting(launch, n), passing(name)});
  }
  machine.operands.assign(launch.operands, launch.operands + launch.operand_count);
  machine.touched.assign(launch.touched, launch.touched + launch.touched_count);
  machine.regions.assign(launch.regions, launch.regions + launch.region_count);
  std::sort(machine.regions.begin(), machine.regions.end(), [](auto& a, auto& b) { return a.base < b.base; });
  machine.parameters.assign(launch.parameters, launch.parameters + launch.parameter_bytes);
  machine.shared_races = launch.races != 0;
  machine.global_races = launch.races == 2;
  machine.schedule = static_cast<fw::Schedule>(launch.schedule);
  machine.random.seed(launch.seed);
  machine.counts.resize(launch.instructions);
  return -1;
}

// What is remembered of global memory.
void remember(const fw_launch& launch, fw::Machine& machine) {
  machine.filled = std::make_shared<std::vector<std::vector<uint8_t>>>();
  for (const fw::Region& region : machine.regions) {
    bool marked = region.use >= fw::kOutput && region.use != fw::kHeap && region.marks == nullptr;
    machine.filled->emplace_back(marked ? region.size : 0, 0);
    if (region.use == fw::kHeap) machine.heap.open(region);
  }
  for (const fw::Region& region : machine.regions) {
    bool written = region.use != fw::kRead && region.use != fw::kHeap;
    if (machine.reduces && !machine.orders && !machine.global_races) machine.visits.emplace_back(written ? 2 * (region.size / 4 + 1) : 0);
    bool changes = machine.global_races && written && region.use != fw::kUnset;
    void* granules = changes ? std::calloc(region.size / fw::kGranule + 1, sizeof(fw::GlobalGranule)) : nullptr;
    machine.granules.emplace_back(static_cast<fw::GlobalGranule*>(granules));
  }
}

// Special registers, in the order of encode.py's SPECIALS.
uint32_t special(const fw_launch& launch, int kind, int number, int warp, int lane) {
  const int32_t *size = launch.block, *grid = launch.grid, *cluster = launch.cluster;
  int t = warp * fw::kLanes + lane;
  const int32_t thread[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
  const int32_t place[3] = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
  auto within = [&](int axis) { return static_cast<uint32_t>(place[axis] % cluster[axis]); };
  uint32_t bit = 1u << lane;
  if (kind < 3) return thread[kind];
  if (kind < 6) return size[kind - 3];
  if (kind < 9) return place[kind - 6];
  if (kind < 12) return grid[kind - 9];
  if (kind >= 23 && kind < 26) return place[kind - 23] / cluster[kind - 23];
  if (kind >= 26 && kind < 29) return grid[kind - 26] / cluster[kind - 26];
  if (kind >= 29 && kind < 32) return within(kind - 29);
  if (kind >= 32 && kind < 35) return cluster[kind - 32];
  switch (kind) {
    case 12: return lane;
    case 13: return warp;
    case 14: return bit;
    case 15: return bit - 1;
    case 16: return bit | (bit - 1);
    case 17: return ~(bit - 1);
    case 18: return ~(bit | (bit - 1));
    case 19: return (size[0] * size[1] * size[2] + 31) / 32;
    case 20: return number % 132;
    case 21: return 132;
    case 22: return launch.shared_bytes;
    case 35: return within(0) + cluster[0] * (within(1) + cluster[1] * within(2));
    case 36: return cluster[0] * cluster[1] * cluster[2];
    case 37: return static_cast<uint32_t>(launch.workspace >> 32);
    case 38: return static_cast<uint32_t>(launch.workspace);
    default: return 0;
  }
}

void prepare(const fw_launch& launch, fw::Block& block, int64_t number) {
  const int32_t* size = launch.block;
  int threads = size[0] * size[1] * size[2];
  block.number = static_cast<int>(number);
  block.shared.assign(launch.shared_bytes, 0xff);
  block.written.assign(launch.shared_bytes, 0);
  block.warps.resize((threads + fw::kLanes - 1) / fw::kLanes);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    fw::FullWarp& warp = block.warps[w];
    warp.number = static_cast<int>(w);
    warp.file.assign(launch.registers, launch.registers + launch.register_bytes);
    warp.registers = warp.file.data();
    warp.local.assign(static_cast<size_t>(launch.local_bytes) * fw::kLanes, 0xff);
    warp.local_written.assign(warp.local.size(), 0);
    warp.wrote.resize(launch.register_bytes / 8 + 1);
    warp.busy.resize(launch.register_bytes / 8 + 1);
    warp.only_read.resize(launch.register_bytes / 8 + 1);
    int live = std::min(threads - static_cast<int>(w) * fw::kLanes, fw::kLanes);
    warp.fragments = {{0, live == fw::kLanes ? fw::kAll : (1u << live) - 1}};
    for (int32_t n = 0; n < launch.special_count; ++n) {
      auto* values = reinterpret_cast<uint32_t*>(warp.registers + launch.specials[2 * n + 1]);
      for (int lane = 0; lane < fw::kLanes; ++lane) {
        values[lane] = special(launch, launch.specials[2 * n], block.number, warp.number, lane);
      }
    }
  }
}

// Clusters in the order of their numbers, blocks in that of their ranks.
std::unique_ptr<fw::Cluster> make_cluster(const fw_launch& launch, int64_t number) {
  const int32_t *grid = launch.grid, *size = launch.cluster;
  auto cluster = std::make_unique<fw::Cluster>();
  cluster->number = static_cast<int>(number);
  int64_t across = grid[0] / size[0], down = grid[1] / size[1];
  int64_t x = number % across * size[0], y = number / across % down * size[1], z = number / across / down * size[2];
  for (int rank = 0; rank < size[0] * size[1] * size[2]; ++rank) {
    int64_t at[3] = {x + rank % size[0], y + rank / size[0] % size[1], z + rank / size[0] / size[1]};
    cluster->blocks.push_back(std::make_unique<fw::Block>());
    prepare(launch, *cluster->blocks.back(), at[0] + grid[0] * (at[1] + grid[1] * at[2]));
  }
  cluster->start();
  return cluster;
}

}  // namespace

// The names of all instructions, one per line.
extern "C" const char* fw_names() {
  static const std::string all = [] {
    std::string listed;
    for (auto& [name, handler] : fw::known()) listed += name + '\n';
    return listed;
  }();
  return all.c_str();
}

// How many findings there are; below 0, -1 less the index of an instruction that is not known: then nothing is run.
extern "C" int32_t fw_run(const fw_launch* launch) {
  std::vector<std::unique_ptr<fw::Machine>> machines;
  machines.push_back(std::make_unique<fw::Machine>());
  fw::Machine& machine = *machines.front();
  int32_t unknown = decode(*launch, machine);
  if (unknown >= 0) return -1 - unknown;
  remember(*launch, machine);
  std::fenv_t before;  // whoever was loaded before may have left this thread rounding otherwise
  std::fegetenv(&before);
  std::fesetenv(FE_DFL_ENV);
  fw::Grid grid;
  grid.clusters = int64_t{launch->grid[0] / launch->cluster[0]} * (launch->grid[1] / launch->cluster[1]) *
                  (launch->grid[2] / launch->cluster[2]);
  grid.resident = std::max<int64_t>(launch->resident, 1);
  grid.order = static_cast<fw::BlockOrder>(launch->order);
  grid.seed = launch->order_seed;
  grid.make = [&](int64_t number) { return make_cluster(*launch, number); };
  auto shared = [](const fw::Region& region) { return region.use == fw::kHeap; };
  bool alone = std::none_of(machine.regions.begin(), machine.regions.end(), shared);
  bool apart = alone && !machine.talks && machine.schedule != fw::kRandom && grid.order == fw::kInOrder && launch->races != 2;
  for (int64_t n = 1; apart && n < std::min<int64_t>(launch->threads, grid.clusters); ++n) {
    machines.push_back(std::make_unique<fw::Machine>());
    decode(*launch, *machines.back());
    machines.back()->filled = machine.filled;
  }
  if (machines.size() > 1) fw::run_apart(machines, grid);
  else fw::run_grid(machine, grid);
  for (int32_t n = 0; n < launch->instructions; ++n) launch->counts[n] = machine.counts[n];
  machine.heap.close();
  int64_t length = machine.printed.size(), shown = std::min<int64_t>(length, launch->printed_room - 8);
  std::memcpy(launch->printed, &length, sizeof length);
  std::copy_n(machine.printed.data(), shown, launch->printed + 8);
  auto count = static_cast<int32_t>(machine.findings.size());
  std::copy_n(machine.findings.begin(), std::min(count, launch->finding_room), launch->findings);
  std::fesetenv(&before);
  return count;
}
