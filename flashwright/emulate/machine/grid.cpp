// The clusters of a launch: which of them have begun, and whose turn it is.
//
// A cluster that only polls waits for another one to write something. It passes its turn, and as long as there is room
// the next cluster begins. Where all that are resident poll and none can begin, nothing will change any more.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <system_error>
#include <thread>

#include "run.h"

namespace fw {
namespace {

constexpr int64_t kIdleTurns = 1 << 16;  // of all clusters together
constexpr int64_t kIdleRounds = 1 << 9;  // of each of them, at least
constexpr int kToldWaits = 64;           // of those that wait for ever so many are told

class Scheduler {
 public:
  Scheduler(Machine& machine, const Grid& grid) : machine(machine), grid(grid), random(grid.seed) {
    if (grid.order != kShuffled) return;
    shuffled.resize(grid.clusters);
    std::iota(shuffled.begin(), shuffled.end(), int64_t{0});
    for (size_t n = shuffled.size(); n > 1; --n) std::swap(shuffled[n - 1], shuffled[random() % n]);
  }

  void all() {
    while (!machine.stopped) {
      bool eager = grid.order == kTogether || grid.order == kShuffled;
      while ((resident.empty() || eager) && begin()) {}
      if (resident.empty()) return;
      if (grid.order == kShuffled) current = random() % resident.size();
      go_on();
    }
  }

 private:
  void go_on() {
    Step made = step(machine, *resident[current]);
    if (made == Step::kDone) {
      resident.erase(resident.begin() + static_cast<int64_t>(current));
      if (current >= resident.size()) current = 0;
      idle = 0;
    } else if (made == Step::kPolling) {
      if (++idle > std::max(kIdleTurns, kIdleRounds * static_cast<int64_t>(resident.size()))) return tell_waits();
      if (begin()) current = resident.size() - 1;
      else current = (current + 1) % resident.size();
    } else {
      idle = 0;
      if (grid.order == kTogether) current = (current + 1) % resident.size();
    }
  }

  // The next cluster, if there is one and room for it.
  bool begin() {
    if (begun == grid.clusters || static_cast<int64_t>(resident.size()) >= grid.resident) return false;
    int64_t number = begun++;
    if (grid.order == kReversed) number = grid.clusters - 1 - number;
    if (grid.order == kShuffled) number = shuffled[number];
    resident.push_back(grid.make(number));
    idle = 0;
    return true;
  }

  void tell_waits() {
    int told = 0;
    for (auto& cluster : resident) {
      for (auto& block : cluster->blocks) {
        for (FullWarp& warp : block->warps) {
          if (!warp.polled || warp.polled_by < 0 || told == kToldWaits) continue;
          Context context{&machine, block.get(), &warp, warp.polled_by, 0};
          machine.find(context, kDeadlock, -1, warp.polled_at, -1, kNobodyWrites, grid.clusters - begun);
          ++told;
        }
      }
    }
    machine.stopped = true;
  }

  Machine& machine;
  const Grid& grid;
  std::mt19937_64 random;
  std::vector<int64_t> shuffled;
  std::vector<std::unique_ptr<Cluster>> resident;
  size_t current = 0;
  int64_t begun = 0;
  int64_t idle = 0;  // turns since anything went on
};

// Findings, each with the number of its cluster.
using Found = std::vector<std::pair<int64_t, Finding>>;

// Clusters in turn, until there are none or one before them has stopped the launch.
void work(Machine& machine, const Grid& grid, std::atomic<int64_t>& next, std::atomic<int64_t>& end, Found& found) {
  for (int64_t number = next++; number < end; number = next++) {
    auto cluster = grid.make(number);
    while (!machine.stopped && step(machine, *cluster) != Step::kDone) {}
    for (const Finding& one : machine.findings) found.emplace_back(number, one);
    machine.findings.clear();
    if (!machine.stopped) continue;
    int64_t known = end;
    while (number + 1 < known && !end.compare_exchange_weak(known, number + 1)) {}
    return;
  }
}

}  // namespace

void run_apart(std::vector<std::unique_ptr<Machine>>& machines, const Grid& grid) {
  std::atomic<int64_t> next{0}, end{grid.clusters};
  std::vector<Found> found(machines.size());
  std::vector<std::thread> threads;
  try {
    for (size_t n = 1; n < machines.size(); ++n) {
      threads.emplace_back([&, n] { work(*machines[n], grid, next, end, found[n]); });
    }
  } catch (const std::system_error&) {  // there are no more threads: the others do the work
  }
  work(*machines[0], grid, next, end, found[0]);
  for (std::thread& thread : threads) thread.join();
  Found all;
  for (Found& one : found) all.insert(all.end(), one.begin(), one.end());
  std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first < b.first; });
  Machine& first = *machines[0];
  first.told.clear();
  for (auto& [number, one] : all) {
    bool fresh = one.kind == kDeadlock || first.told.insert({one.kind, one.instruction}).second;
    if (fresh && number < end) first.findings.push_back(one);
  }
  for (size_t n = 1; n < machines.size(); ++n) {
    for (size_t i = 0; i < first.counts.size(); ++i) first.counts[i].add(machines[n]->counts[i]);
  }
}

void run_grid(Machine& machine, const Grid& grid) {
  machine.fine = grid.order == kShuffled;
  Scheduler(machine, grid).all();
}

}  // namespace fw
