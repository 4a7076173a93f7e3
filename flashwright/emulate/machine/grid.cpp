// The clusters of a launch: which of them have begun, and whose turn it is.
//
// A cluster that only polls waits for another one to write something. It passes its turn, and as long as there is room
// the next cluster begins. Where all that are resident poll and none can begin, nothing will change any more.
#include <algorithm>
#include <numeric>

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

}  // namespace

void run_grid(Machine& machine, const Grid& grid) {
  machine.fine = grid.order == kShuffled;
  Scheduler(machine, grid).all();
}

}  // namespace fw
