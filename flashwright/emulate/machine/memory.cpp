// Loads, stores, atomic operations, ldmatrix, stmatrix and copies that a thread starts by itself.
#include <algorithm>

#include "run.h"

namespace fw {

namespace {

constexpr int64_t kMostEchoes = 10'000'000;  // violations of a launch: seconds; then it is stopped

}  // namespace

void Machine::find(const Context& context, FindingKind kind, int lane, uint64_t address, int other,
                   int64_t first, int64_t second) {
  // What is broken once is broken often; a kernel that goes astray is stopped.
  if (++echoes >= kMostEchoes) stopped = true;
  if (kind != kDeadlock && !told.insert({kind, context.instruction}).second) return;
  findings.push_back({kind, context.instruction, context.block->number, context.warp->number, lane, other,
                      address + window, {first, second}, {-1, -1, -1, -1}});
  if (lane < 0) return;
  const std::vector<Call>& calls = full(context).calls[lane];
  for (size_t n = 0; n < std::min<size_t>(4, calls.size()); ++n) {
    findings.back().callers[n] = calls[calls.size() - 1 - n].back - 1;
  }
}

int64_t Machine::region_of(uint64_t address, int bytes) {
  auto holds = [&](const Region& one) { return address >= one.base && address + bytes <= one.base + one.size; };
  if (recent < regions.size() && holds(regions[recent])) return static_cast<int64_t>(recent);
  auto behind = std::upper_bound(regions.begin(), regions.end(), address, [](uint64_t a, const Region& r) { return a < r.base; });
  if (behind == regions.begin() || !holds(*(behind - 1))) return -1;
  return static_cast<int64_t>(recent = behind - 1 - regions.begin());
}

uint8_t* Machine::global(Context& context, int lane, uint64_t address, int bytes, bool write, int align,
                         int scope, const Accessor* who) {
  if ((address & ((align ? align : bytes) - 1)) != 0) {  // powers of two
    find(context, kMisaligned, lane, address);
    return nullptr;
  }
  int64_t n = region_of(address, bytes);
  if (n < 0) {
    find(context, kOutOfBounds, lane, address);
    return nullptr;
  }
  Region& region = regions[n];
  if (region.use == kHeap) return allocated(context, lane, address, bytes, write);
  uint64_t offset = address - region.base;
  if (write && (region.use == kRead || region.use == kUnset)) {
    find(context, kReadOnly, lane, address);
    return nullptr;
  }
  if (region.use >= kOutput) {
    uint8_t* marks = (region.marks != nullptr ? region.marks : (*filled)[n].data()) + offset;
    if (write) std::fill_n(marks, bytes, 1);
    else if (std::count(marks, marks + bytes, 0)) find(context, kUnwritten, lane, address);
  }
  if (!visits.empty() && region.use != kRead) visit(context, lane, n, offset, bytes, scope >= 0);
  if (global_races && granules[n] != nullptr) {
    visit_granules(context, who ? *who : accessor(full(context), lane), n, offset, bytes, write, scope);
  }
  return region.data + offset;
}

namespace {

// Marks what is written; false where what is read was not.
bool mark(Block& block, uint64_t address, int bytes, bool write) {
  auto marks = block.written.begin() + address;
  if (write) std::fill_n(marks, bytes, 1);
  return write || std::count(marks, marks + bytes, 0) == 0;
}

}  // namespace

bool Machine::shared_async(Context& context, Accessor who, uint64_t address, int bytes, bool write) {
  const uint64_t given = address;
  Block* home = home_of(context, address);
  if (home == nullptr || address + bytes > home->shared.size()) {
    find(context, kOutOfBounds, who.lane, given);
    return false;
  }
  Block& block = *home;
  if (home != context.block) check_visit(context, who, block, given);
  bool unfenced = false;
  int32_t other = shared_races ? block.touch(who, address, bytes, context.instruction, write, unfenced) : -1;
  if (other >= 0) find(context, unfenced ? kProxy : kRace, who.lane, given, other);
  if (!mark(block, address, bytes, write)) tell_unwritten(context, who.lane, block, address, given, bytes);
  return true;
}

uint8_t* Machine::shared(Context& context, int lane, uint64_t address, int bytes, bool write, Strength strength) {
  if ((address & (bytes - 1)) != 0) {  // a power of two
    find(context, kMisaligned, lane, address);
    return nullptr;
  }
  Block& block = *context.block;
  if (!write && shared_races && strength == kWeak && block.reads_freely(full(context), lane, address, bytes, context.instruction)) {
    return block.shared.data() + address;
  }
  if (!shared_async(context, accessor(full(context), lane, strength), address, bytes, write)) return nullptr;
  Block* home = home_of(context, address);
  return home->shared.data() + address;
}

void Machine::check_filled(Context& context, int lane, uint64_t address, int bytes) {
  int64_t n = region_of(address, bytes);
  if (n < 0 || regions[n].use != kEmpty) return;
  const uint8_t* marks = regions[n].marks != nullptr ? regions[n].marks : (*filled)[n].data();
  marks += address - regions[n].base;
  if (std::count(marks, marks + bytes, 0)) find(context, kUnwritten, lane, address);
}

void Machine::find_conflict(Context& context, const uint64_t* address, uint32_t mask, int bytes,
                            const std::function<const uint8_t*(int)>& from) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    if (address[lane] / kWindow * kWindow == kLocalWindow) continue;  // each lane has its own
    for (uint32_t later = rest & (rest - 1); later != 0; later &= later - 1) {
      int other = __builtin_ctz(later);
      if (address[lane] != address[other] || std::memcmp(from(lane), from(other), bytes) == 0) continue;
      find(context, kRace, lane, address[lane], context.instruction, other);
      return;
    }
  }
}

namespace {

// kCluster is the shared memory of all blocks of the cluster.
enum class Space { kGlobal, kShared, kCluster, kGeneric, kParameter, kLocal };

// By which others may be told something; kOrdered is ld.acquire or st.release.
enum class Order { kPlain, kVolatile, kRelaxed, kOrdered };

uint8_t* within(Context& c, uint8_t* data, size_t size, int lane, uint64_t address, int bytes) {
  if (address + bytes <= size) return data + address;
  c.machine->find(c, kOutOfBounds, lane, address);
  return nullptr;
}

uint8_t* parameter(Context& c, int lane, uint64_t address, int bytes) {
  auto& all = c.machine->parameters;
  return within(c, all.data(), all.size(), lane, address, bytes);
}

}  // namespace

// A copy of a struct may read its padding: something of what is read has to be written, not all.
uint8_t* local(Context& c, int lane, uint64_t address, int bytes, bool write) {
  auto& all = full(c).local;
  size_t each = all.size() / kLanes;
  uint8_t* found = within(c, all.data() + lane * each, each, lane, address, bytes);
  if (found == nullptr) return found;
  auto marks = full(c).local_written.begin() + (found - all.data());
  if (write) std::fill_n(marks, bytes, 1);
  else if (std::count(marks, marks + bytes, 0) == bytes) c.machine->find(c, kUnwritten, lane, address);
  return found;
}

namespace {

Space resolve(Space space, uint64_t& address) {
  if (space != Space::kGeneric) {
    if (space != Space::kGlobal) address %= kWindow;
    return space;
  }
  uint64_t window = address / kWindow * kWindow;
  if (window == kSharedWindow || window == kLocalWindow || window == kParameterWindow) {
    address -= window;
    return window == kSharedWindow ? Space::kCluster : window == kLocalWindow ? Space::kLocal : Space::kParameter;
  }
  return Space::kGlobal;
}

template <Order kOrder>
uint8_t* at(Context& c, Space space, int lane, uint64_t address, int bytes, bool write, int scope) {
  constexpr Strength kStrength =
      kOrder == Order::kPlain ? kWeak : kOrder == Order::kVolatile ? kVolatile : kStrong;
  switch (space) {
    case Space::kParameter: return parameter(c, lane, address, bytes);
    case Space::kLocal: return local(c, lane, address, bytes, write);
    case Space::kShared:  // only its own: what mapa gives is not in this window
      if (address < kOwnShared) return c.machine->shared(c, lane, address, bytes, write, kStrength);
      c.machine->find(c, kOutOfBounds, lane, address);
      return nullptr;
    case Space::kCluster: return c.machine->shared(c, lane, address, bytes, write, kStrength);
    default: return c.machine->global(c, lane, address, bytes, write, 0, scope);
  }
}

}  // namespace

uint8_t* generic(Context& c, int lane, uint64_t address, int bytes, bool write) {
  Space space = resolve(Space::kGeneric, address);
  return at<Order::kPlain>(c, space, lane, address, bytes, write, -1);
}

namespace {

template <Order kOrder>
void hand_on(Context& c, Space space, uint64_t address, int lane, bool write, int scope) {
  if (kOrder == Order::kPlain || !c.machine->hands_on) return;
  bool shared = space == Space::kShared || space == Space::kCluster;
  uint64_t flag = shared ? kSharedWindow + shared_by_all(c, address) : address;
  if (write) return write_flag(c, flag, scope, lane, kOrder == Order::kOrdered, false);
  poll(c, flag);
  read_flag(c, flag, scope, kOrder == Order::kOrdered);
}

// --- what it costs --------------------------------------------------------------------------------

// Addresses of a warp's access. Shared memory has 32 banks of 4 bytes; a wavefront takes from each bank one
// word, which any number of lanes may share. Wide accesses go by quarters or halves of the warp.
struct Traffic {
  uint64_t address[kLanes];
  int count = 0;

  void shared(Counts& counts, int bytes) const {
    int together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    int words = std::max(bytes / 4, 1);
    for (int first = 0; first < count; first += together) {
      int end = std::min(first + together, count), worst = 1;
      uint32_t seen[32][kLanes];
      int used[32] = {};
      for (int n = first; n < end; ++n) {
        for (int w = 0; w < words; ++w) {
          auto word = static_cast<uint32_t>(address[n] / 4 + w);
          int bank = word % 32;
          if (std::find(seen[bank], seen[bank] + used[bank], word) == seen[bank] + used[bank]) {
            seen[bank][used[bank]++] = word;
            worst = std::max(worst, used[bank]);
          }
        }
      }
      counts.wavefronts += worst;
      counts.ideal += 1;
    }
  }

  // No access is wider than 16 bytes: aligned, it lies in one sector of 32.
  void global(Counts& counts) const {
    uint64_t sectors[kLanes];
    int many = 0;
    for (int n = 0; n < count; ++n) {
      if (std::find(sectors, sectors + many, address[n] / 32) == sectors + many) sectors[many++] = address[n] / 32;
    }
    counts.sectors += many;
    counts.requests += 1;
  }
};

void count(Context& c, Space space, const Traffic& traffic, int bytes) {
  Counts& counts = c.machine->counts[c.instruction];
  counts.bytes += int64_t{bytes} * traffic.count;
  if (space == Space::kShared || space == Space::kCluster) traffic.shared(counts, bytes);
  if (space == Space::kGlobal) traffic.global(counts);
}

// --- loads and stores -----------------------------------------------------------------------------

// Operands: bytes of an element, bytes of a register, whether it is signed, how many, the registers, the
// slot of the address and its bytes, the offset; then the scope, of an atomic access. Numbers are themselves, not slots.
struct Moved {
  int bytes, width, is_signed, count;
  const int32_t* registers;
  const int32_t* address;

  explicit Moved(const int32_t* o)
      : bytes(o[0]), width(o[1]), is_signed(o[2]), count(o[3]), registers(o + 4), address(o + 4 + o[3]) {}
};

// Calls move(lane, bytes in memory or null) for every lane.
template <Space kSpace, Order kOrder, class Move>
void access(Context& c, const Moved& a, uint32_t mask, bool write, Move move) {
  Traffic traffic;
  Space space = kSpace;
  int scope = kOrder == Order::kPlain ? -1 : a.address[3];
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = address_of(c, a.address, lane);
    space = resolve(kSpace, address);
    if (kSpace == Space::kGeneric) c.machine->window = address_of(c, a.address, lane) - address;
    traffic.address[traffic.count++] = address;
    move(lane, at<kOrder>(c, space, lane, address, a.bytes * a.count, write, scope));
    hand_on<kOrder>(c, space, address, lane, write, scope);
  }
  c.machine->window = 0;
  count(c, space, traffic, a.bytes * a.count);
}

template <Space kSpace, Order kOrder = Order::kPlain>
void load(Context& c, const int32_t* o, uint32_t mask) {
  Moved a(o);
  access<kSpace, kOrder>(c, a, mask, false, [&](int lane, const uint8_t* from) {
    for (int n = 0; n < a.count; ++n) {
      uint64_t value = 0;
      if (from != nullptr) std::memcpy(&value, from + n * a.bytes, a.bytes);
      if (a.is_signed && a.bytes < 8 && (value >> (8 * a.bytes - 1) & 1)) value |= ~uint64_t{0} << (8 * a.bytes);
      if (a.registers[n] >= 0) std::memcpy(c.warp->registers + a.registers[n] + lane * a.width, &value, std::min(a.width, 8));
    }
  });
}

// Undefined values that a lane stores: those in shared memory are told when they are read, those in local memory are not.
template <Space kSpace>
void store_undefined(Context& c, const Moved& a, int lane) {
  uint64_t address = address_of(c, a.address, lane);
  Space space = resolve(kSpace, address);
  for (int n = 0; n < a.count; ++n) {
    Undefined value;
    if (space == Space::kLocal || !is_undefined(full(c), a.registers[n], lane, value)) continue;
    if (space == Space::kGlobal) return tell_undefined(c, value);
    uint64_t own = address + n * a.bytes;
    Block* home = home_of(c, own);
    for (int byte = 0; home != nullptr && own + a.bytes <= home->shared.size() && byte < a.bytes; ++byte) {
      home->written[own + byte] = 0;
      home->undefined[static_cast<uint32_t>(own + byte)] = value;
    }
  }
}

template <Space kSpace, Order kOrder = Order::kPlain>
void store(Context& c, const int32_t* o, uint32_t mask) {
  Moved a(o);
  if (kSpace != Space::kLocal) ++c.machine->changes;
  uint8_t value[kLanes][32];
  uint64_t address[kLanes];
  access<kSpace, kOrder>(c, a, mask, true, [&](int lane, uint8_t* to) {
    for (int n = 0; n < a.count; ++n) {
      std::memcpy(&value[lane][n * a.bytes], c.warp->registers + a.registers[n] + lane * a.width, a.bytes);
    }
    if (to != nullptr) std::memcpy(to, value[lane], a.bytes * a.count);
    if (kSpace != Space::kLocal) address[lane] = address_of(c, a.address, lane);
  });
  if (kSpace == Space::kLocal) return;  // each lane has its own
  if (!full(c).undefined.empty()) for_lanes(mask, [&](int lane) { store_undefined<kSpace>(c, a, lane); });
  c.machine->check_conflicts(c, address, mask, a.bytes * a.count, [&](int lane) { return value[lane]; });
}

// --- matrices of 8 x 8 ----------------------------------------------------------------------------

// Operands: how many matrices, whether transposed, the registers, then the address.
// Lane 8 i + r has the address of row r of matrix i; lane l gets elements 2 (l % 4) and the next of row l / 4.
struct Matrices {
  int many, transposed;
  const int32_t* registers;
  const int32_t* address;
  uint16_t rows[4][8][8] = {};
  uint8_t* place[kLanes] = {};

  Matrices(Context& c, const int32_t* o, uint32_t mask, bool write)
      : many(o[0]), transposed(o[1]), registers(o + 2), address(o + 2 + o[0]) {
    if (mask != kAll) c.machine->find(c, kDivergent, -1, mask);
    Traffic traffic;
    for (int lane = 0; lane < 8 * many; ++lane) {
      uint64_t where = address_of(c, address, lane) % kWindow;
      traffic.address[traffic.count++] = where;
      place[lane] = c.machine->shared(c, lane, where, 16, write);
    }
    count(c, Space::kShared, traffic, 16);
  }

  uint16_t& element(int matrix, int lane, int which) {
    int row = lane / 4, column = 2 * (lane % 4) + which;
    return transposed ? rows[matrix][column][row] : rows[matrix][row][column];
  }
};

void load_matrix(Context& c, const int32_t* o, uint32_t mask) {
  Matrices all(c, o, mask, false);
  for (int lane = 0; lane < 8 * all.many; ++lane) {
    if (all.place[lane] != nullptr) std::memcpy(all.rows[lane / 8][lane % 8], all.place[lane], 16);
  }
  for_lanes(mask, [&](int lane) {
    for (int n = 0; n < all.many; ++n) {
      lanes<uint32_t>(c, all.registers[n])[lane] = all.element(n, lane, 0) | uint32_t{all.element(n, lane, 1)} << 16;
    }
  });
}

void store_matrix(Context& c, const int32_t* o, uint32_t mask) {
  Matrices all(c, o, mask, true);
  for (int n = 0; n < all.many; ++n) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t pair = lanes<uint32_t>(c, all.registers[n])[lane];
      all.element(n, lane, 0) = static_cast<uint16_t>(pair);
      all.element(n, lane, 1) = static_cast<uint16_t>(pair >> 16);
    }
  }
  uint64_t address[kLanes];
  for (int lane = 0; lane < 8 * all.many; ++lane) {
    address[lane] = address_of(c, all.address, lane) % kWindow;
    if (all.place[lane] != nullptr) std::memcpy(all.place[lane], all.rows[lane / 8][lane % 8], 16);
  }
  uint32_t used = all.many == 4 ? kAll : (1u << 8 * all.many) - 1;
  c.machine->check_conflicts(c, address, used, 16, [&](int lane) {
    return reinterpret_cast<const uint8_t*>(all.rows[lane / 8][lane % 8]);
  });
}

// --- copies that are waited for later -------------------------------------------------------------

// Operands: destination, source, size, slot of the source's size or -1.
void copy_async(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  Block& block = *c.block;
  Traffic traffic;
  std::vector<Piece> pieces;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    Piece piece{static_cast<uint32_t>(address_of(c, o, lane) % kWindow), o[6], nullptr, {}};
    int taken = o[7] < 0 ? piece.bytes : std::min<int>(lanes<uint32_t>(c, o[7])[lane], piece.bytes);
    uint64_t from = address_of(c, o + 3, lane);
    if (taken > 0) {
      traffic.address[traffic.count++] = from;
      uint8_t* data = c.machine->global(c, lane, from, piece.bytes, false);
      if (data != nullptr) std::memcpy(piece.fill, data, taken);
    }
    Accessor who{&warp.clock, warp.copies.agent, warp.copies.time, warp.agent, lane, false};
    if (piece.shared % piece.bytes != 0) {
      c.machine->find(c, kMisaligned, lane, piece.shared);
    } else if (c.machine->shared_async(c, who, piece.shared, piece.bytes, true)) {
      pieces.push_back(piece);
    }
  }
  count(c, Space::kGlobal, traffic, o[6]);
  c.machine->begin(warp.copies, [&block, pieces = std::move(pieces)] {
    for (const Piece& piece : pieces) std::memcpy(block.shared.data() + piece.shared, piece.fill, piece.bytes);
  });
}

void commit(Context& c, const int32_t*, uint32_t) { close(full(c).copies); }

void wait_group(Context& c, const int32_t* o, uint32_t) { finish(*c.block, full(c), full(c).copies, o[0]); }

void wait_all(Context& c, const int32_t*, uint32_t) {
  close(full(c).copies);
  finish(*c.block, full(c), full(c).copies, 0);
}

void nothing(Context&, const int32_t*, uint32_t) {}

// Operands: the scope.
void fence_all(Context& c, const int32_t* o, uint32_t mask) {
  if (c.machine->hands_on) fence(*c.machine, *c.block->cluster, full(c), o[0], mask);
}

void meet_lanes(Context& c, const int32_t*, uint32_t) { meet(full(c)); }

template <uint64_t window, bool to>
void convert(Context& c, const int32_t* o, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint64_t value = lanes<uint64_t>(c, o[1])[lane];
    lanes<uint64_t>(c, o[0])[lane] = to ? value % kWindow : value + window;
  });
}

}  // namespace

void Machine::begin(Queue& queue, std::function<void()> work) {
  if (schedule == kEager || chance(4)) {
    // What came before it in its queue is done before it.
    for (Group& group : queue.closed) group.perform();
    queue.current.perform();
    work();
  } else {
    queue.current.work.push_back(std::move(work));
  }
}

void close(Queue& queue) {
  queue.current.time = queue.time++;
  queue.closed.push_back(std::move(queue.current));
  queue.current = {};
  ++queue.open;
}

void finish(Block& block, FullWarp& warp, Queue& queue, size_t kept) {
  while (queue.closed.size() > kept) {
    Group& group = queue.closed.front();
    group.perform();
    for (auto [slot, by] : group.busy) warp.busy[slot / 8] = 0;
    warp.clock.learn(queue.agent, group.time);  // of what is finished it knows from now on
    queue.closed.pop_front();
  }
  // A register may be in a later group too.
  for (const Group& group : queue.closed) {
    for (auto [slot, by] : group.busy) warp.busy[slot / 8] = by + 1;
  }
  block.event();
}

namespace {

template <Order kOrder>
void add_ordered(Table& table, const std::string& load_name, const std::string& store_name) {
  table["ld" + load_name + ".global"] = load<Space::kGlobal, kOrder>;
  table["ld" + load_name + ".shared"] = load<Space::kShared, kOrder>;
  table["ld" + load_name + ".cluster"] = load<Space::kCluster, kOrder>;
  table["ld" + load_name] = load<Space::kGeneric, kOrder>;
  table["st" + store_name + ".global"] = store<Space::kGlobal, kOrder>;
  table["st" + store_name + ".shared"] = store<Space::kShared, kOrder>;
  table["st" + store_name + ".cluster"] = store<Space::kCluster, kOrder>;
  table["st" + store_name] = store<Space::kGeneric, kOrder>;
}

}  // namespace

void add_memory(Table& table) {
  table["ld.param"] = load<Space::kParameter>;
  table["ld.global"] = table["ld.const"] = load<Space::kGlobal>;
  table["ld.shared"] = load<Space::kShared>;
  table["ld.cluster"] = load<Space::kCluster>;
  table["ld.local"] = load<Space::kLocal>;
  table["ld"] = load<Space::kGeneric>;
  table["st.global"] = store<Space::kGlobal>;
  table["st.shared"] = store<Space::kShared>;
  table["st.cluster"] = store<Space::kCluster>;
  table["st.local"] = store<Space::kLocal>;
  table["st"] = store<Space::kGeneric>;
  table["ldmatrix"] = load_matrix;
  table["stmatrix"] = store_matrix;
  table["cp.async"] = copy_async;
  table["cp.async.commit_group"] = commit;
  table["cp.async.wait_group"] = wait_group;
  table["cp.async.wait_all"] = wait_all;
  add_ordered<Order::kVolatile>(table, ".volatile", ".volatile");
  add_ordered<Order::kRelaxed>(table, ".relaxed", ".relaxed");
  add_ordered<Order::kOrdered>(table, ".acquire", ".release");
  table["nothing"] = nothing;
  table["fence"] = fence_all;
  table["bar.warp"] = meet_lanes;
  table["cvta.shared.u64"] = convert<kSharedWindow, false>;
  table["cvta.to.shared.u64"] = convert<kSharedWindow, true>;
  table["cvta.local.u64"] = convert<kLocalWindow, false>;
  table["cvta.to.local.u64"] = convert<kLocalWindow, true>;
  table["cvta.param.u64"] = convert<kParameterWindow, false>;
  table["cvta.to.param.u64"] = convert<kParameterWindow, true>;
}

}  // namespace fw
