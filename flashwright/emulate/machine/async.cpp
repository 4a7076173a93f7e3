// What runs on without the thread that started it: TMA, and wgmma.
#include <algorithm>

#include "run.h"
#include "tensor_map.h"

namespace fw {

void Machine::load(Block& block, std::function<void()> land) {
  if (schedule == kEager || chance(4)) land();
  else block.loads.push_back({std::move(land)});
}

Mbarrier* mbarrier_of(const Context& context, uint64_t address) {
  Block* home = home_of(context, address);
  if (home == nullptr) return nullptr;
  auto found = home->mbarriers.find(static_cast<uint32_t>(address));
  return found == home->mbarriers.end() ? nullptr : &found->second;
}

void land_bytes(Context& c, int lane, uint64_t address, uint32_t number, int64_t bytes) {
  Mbarrier* barrier = mbarrier_of(c, address);
  if (barrier == nullptr) return c.machine->find(c, kBarrier, lane, address);
  barrier->outstanding.erase(number);
  completed(c, lane, address, *barrier, bytes);
}

namespace {

// --- TMA ------------------------------------------------------------------------------------------

bool read_map(Context& c, const int32_t* o, int lane, TensorMap& map) {
  uint64_t address = address_of(c, o, lane);
  const uint8_t* bytes = nullptr;
  auto& given = c.machine->parameters;
  if (address / kWindow * kWindow == kParameterWindow) {
    uint64_t offset = address - kParameterWindow;
    if (offset + 128 <= given.size()) bytes = given.data() + offset;
  } else {
    bytes = c.machine->global(c, lane, address, 128, false, 64);
  }
  if (bytes != nullptr && tensor_map(bytes, map)) return true;
  c.machine->find(c, kOutOfBounds, lane, address);
  return false;
}

// The pieces of a box, or of a plain run of bytes; false where one of them cannot be.
struct Cut {
  Context& c;
  Accessor who;
  bool load;
  std::vector<Piece> pieces;
  int64_t bytes = 0;

  void add(uint32_t shared, uint64_t global, int size, const TensorMap* map, bool inside) {
    bytes += size;
    Piece piece{shared, size, nullptr, {}};
    if (inside) {
      piece.global = c.machine->global(c, who.lane, global, size, !load, 1, -1, load ? nullptr : &who);
      if (piece.global == nullptr) return;
    } else if (!load) {
      return;
    } else {
      fill_value(*map, piece.fill, size);
    }
    if (c.machine->shared_async(c, who, shared, size, load)) pieces.push_back(piece);
  }

  // Boxes that an H200 ends the kernel for, with an illegal instruction: those that do not begin at a
  // multiple of 16 bytes, and stores that begin before the tensor, as a load may. The box is moved
  // all the same: whoever waits for it would only be the next finding.
  void check_start(const TensorMap& map, const int32_t* at, int many) {
    auto tell = [&](FindingKind kind, int axis) {
      c.machine->find(c, kind, who.lane, map.base, -1, axis, at[axis]);
    };
    if (int64_t{at[0]} * map.element_bytes % 16 != 0) tell(kMisaligned, 0);
    for (int n = 0; !load && n < many; ++n) {
      if (at[n] < 0) tell(kOutOfBounds, n);
    }
  }

  // Operands: how many coordinates, and their slots.
  void box(const TensorMap& map, const int32_t* o, uint32_t shared) {
    int32_t at[5] = {};
    for (int n = 0; n < o[0]; ++n) at[n] = lanes<int32_t>(c, o[1 + n])[who.lane];
    uint32_t align = map.swizzle == 0 ? 16 : 128;
    if (shared % align != 0) c.machine->find(c, kMisaligned, who.lane, shared);
    check_start(map, at, o[0]);
    for_pieces(map, at, shared, [&](uint32_t place, uint64_t global, int size, bool inside) {
      add(place, global, size, &map, inside);
    });
  }

  void run(uint64_t global, uint32_t shared, int64_t size) {
    if (global % 16 != 0 || shared % 16 != 0 || size % 16 != 0) {
      c.machine->find(c, kMisaligned, who.lane, global % 16 ? global : shared);
      return;
    }
    for (int64_t n = 0; n < size; n += 16) add(shared + n, global + n, 16, nullptr, true);
  }

  // Operands: whether there is a map, then map and coordinates, or an address and the slot of the size.
  void all(const int32_t* o, uint32_t shared, bool counted = true) {
    TensorMap map;
    if (o[0] == 0) run(address_of(c, o + 1, who.lane), shared, lanes<uint32_t>(c, o[4])[who.lane]);
    else if (read_map(c, o + 1, who.lane, map)) box(map, o + 4, shared);
    if (!counted) return;
    Counts& counts = c.machine->counts[c.instruction];
    counts.bytes += bytes;
    counts.sectors += (bytes + 31) / 32;
    counts.requests += 1;
  }
};

// A load to the shared memory of one block, that of its mbarrier.
void load_one(Context& c, const int32_t* o, int lane, uint32_t shared, uint32_t address, bool counted) {
  FullWarp& warp = full(c);
  Mbarrier* barrier = mbarrier(c, lane, address);
  if (barrier == nullptr) return;
  uint32_t number = ++barrier->issued;
  Cut cut{c, {&warp.clock, barrier->agent, number, warp.agent, lane, true}, true, {}, 0};
  cut.all(o, shared, counted);
  barrier->outstanding.insert(number);
  c.machine->load(*c.block, [c, lane, address, number, bytes = cut.bytes, pieces = std::move(cut.pieces)]() mutable {
    for (const Piece& piece : pieces) {
      const uint8_t* from = piece.global == nullptr ? piece.fill : piece.global;
      uint64_t to = piece.shared;
      Block* home = home_of(c, to);
      std::memcpy(home->shared.data() + to, from, piece.bytes);
    }
    land_bytes(c, lane, address, number, bytes);
  });
}

// Operands: destination, mbarrier, the slot of the mask of blocks that get it or -1, then those of Cut::all.
void load_bulk(Context& c, const int32_t* o, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto shared = static_cast<uint32_t>(address_of(c, o, lane) % kWindow);
    auto address = static_cast<uint32_t>(address_of(c, o + 3, lane) % kWindow);
    if (o[6] < 0) {
      load_one(c, o + 7, lane, shared, address, true);
      continue;
    }
    bool first = true;
    for (uint32_t to = lanes<uint16_t>(c, o[6])[lane]; to != 0; to &= to - 1) {
      int rank = __builtin_ctz(to);
      auto place = [&](uint32_t x) { return static_cast<uint32_t>(at_rank(x, rank)); };
      load_one(c, o + 7, lane, place(shared), place(address), std::exchange(first, false));
    }
  }
}

// Operands: source, then those of Cut::all.
void store_bulk(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  Block& block = *c.block;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto shared = static_cast<uint32_t>(address_of(c, o, lane) % kWindow);
    Cut cut{c, {&warp.clock, warp.stores.agent, warp.stores.time, warp.agent, lane, true}, false, {}, 0};
    cut.all(o + 3, shared);
    c.machine->begin(warp.stores, [&block, pieces = std::move(cut.pieces)] {
      for (const Piece& piece : pieces) std::memcpy(piece.global, block.shared.data() + piece.shared, piece.bytes);
    });
  }
}

// The same, but each number is combined with what is in global memory. Operands: operation, type, then as in a store.
void reduce_bulk(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  Block& block = *c.block;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto shared = static_cast<uint32_t>(address_of(c, o + 2, lane) % kWindow);
    Cut cut{c, {&warp.clock, warp.stores.agent, warp.stores.time, warp.number, lane, true}, false, {}, 0};
    cut.all(o + 5, shared);
    c.machine->begin(warp.stores, [&block, operation = o[0], type = o[1], pieces = std::move(cut.pieces)] {
      for (const Piece& piece : pieces) {
        if (piece.global != nullptr) reduce(operation, type, piece.global, block.shared.data() + piece.shared, piece.bytes);
      }
    });
  }
}

void store_commit(Context& c, const int32_t*, uint32_t) { close(full(c).stores); }
void store_wait(Context& c, const int32_t* o, uint32_t) { finish(*c.block, full(c), full(c).stores, o[0]); }

// --- cp.async and mbarriers -----------------------------------------------------------------------

// Arrives when the copies that were started before are there. What else the warp did, those who wait do not know.
// Operands: address, whether the barrier counts it among its arrivals (.noinc).
void arrive_copied(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto address = static_cast<uint32_t>(address_of(c, o, lane) % kWindow);
    Mbarrier* barrier = mbarrier(c, lane, address);
    if (barrier == nullptr) continue;
    if (!o[3]) ++barrier->pending;
    c.machine->load(*c.block, [c, lane, address, time = warp.copies.time]() mutable {
      Queue& copies = full(c).copies;
      for (Group& group : copies.closed) group.perform();
      copies.current.perform();
      Mbarrier* barrier = mbarrier_of(c, address);
      if (barrier == nullptr) return;
      barrier->arriving.learn(copies.agent, time);
      arrived(c, lane, address, *barrier, 1);
    });
  }
  ++warp.copies.time;  // what it copies from here on is not waited for
}

// --- wgmma ----------------------------------------------------------------------------------------

// Operands: whether A is in registers, whether A and B are MN-major, signs of A and B, slot of the predicate that
// says whether to accumulate, how many accumulators, their slots, then the slots of A (four, or its descriptor's)
// and of B's descriptor.
struct Product {
  bool a_registers, a_mn, b_mn;
  int a_sign, b_sign, many;
  int32_t accumulate;
  const int32_t *d, *a;
  int32_t b;

  explicit Product(const int32_t* o)
      : a_registers(o[0]), a_mn(o[1]), b_mn(o[2]), a_sign(o[3]), b_sign(o[4]), many(o[6]), accumulate(o[5]),
        d(o + 7), a(d + many), b(a[a_registers ? 4 : 1]) {}
};

void read_chunks(Context& c, const std::vector<uint32_t>& chunks) {
  FullWarp& warp = full(c);
  Accessor who{&warp.clock, warp.products.agent, warp.products.time, warp.agent, -1, true};
  for (uint32_t address : chunks) c.machine->shared_async(c, who, address, 16, false);
  c.machine->counts[c.instruction].bytes += 16 * static_cast<int64_t>(chunks.size());
}

void gather(const Block& block, const std::vector<uint32_t>& chunks, std::vector<uint8_t>& bytes) {
  bytes.assign(16 * chunks.size(), 0);
  for (size_t n = 0; n < chunks.size(); ++n) {
    if (chunks[n] + 16 <= block.shared.size()) std::memcpy(&bytes[16 * n], block.shared.data() + chunks[n], 16);
  }
}

void multiply(const Block& block, FullWarp& warp, const WgmmaShape& shape, const Product& p, bool accumulate,
              const std::vector<uint32_t>& a_chunks, const std::vector<uint32_t>& b_chunks) {
  std::vector<uint8_t> a_bytes, b_bytes;
  gather(block, a_chunks, a_bytes);
  gather(block, b_chunks, b_bytes);
  auto lanes_of = [&](int32_t slot) { return reinterpret_cast<uint32_t*>(warp.registers + slot); };
  const uint32_t* a[4] = {};
  for (int n = 0; p.a_registers && n < 4; ++n) a[n] = lanes_of(p.a[n]);
  std::vector<uint32_t*> d(p.many);
  for (int n = 0; n < p.many; ++n) d[n] = lanes_of(p.d[n]);
  wgmma_multiply(shape, p.a_registers ? a : nullptr, a_bytes.data(), p.a_mn, b_bytes.data(), p.b_mn, accumulate,
                 p.a_sign, p.b_sign, d.data());
}

// Registers that were written since the last fence, or that another product still works on. Accumulators may
// be handed from one product to the next, and several products may read the same left operand.
void check_registers(Context& c, const Product& p) {
  FullWarp& warp = full(c);
  auto check = [&](int32_t slot, bool accumulator) {
    const Wrote& wrote = warp.wrote[slot / 8];
    if (wrote.instruction >= 0 && wrote.fences == warp.fences) {
      c.machine->find(c, kFence, -1, slot, wrote.instruction);
    }
    bool shared = accumulator || warp.only_read[slot / 8];
    if (!shared && warp.busy[slot / 8] != 0 && warp.busy[slot / 8] - 1 != c.instruction) {
      c.machine->find(c, kRegister, -1, slot, warp.busy[slot / 8] - 1);
    }
  };
  size_t before = c.machine->findings.size();
  for (int n = 0; n < p.many && c.machine->findings.size() == before; ++n) check(p.d[n], true);
  for (int n = 0; p.a_registers && n < 4 && c.machine->findings.size() == before; ++n) check(p.a[n], false);
}

void product(Context& c, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  const WgmmaShape& shape = c.machine->shapes[c.instruction];
  Product p(o);
  if (mask != kAll) c.machine->find(c, kDivergent, -1, mask);
  int lane = __builtin_ctz(mask);
  std::vector<uint32_t> a_chunks, b_chunks;
  if (!p.a_registers) {
    wgmma_chunks(shape, lanes<uint64_t>(c, p.a[0])[lane], p.a_mn, 64, 16 * (warp.number % 4), a_chunks);
  }
  wgmma_chunks(shape, lanes<uint64_t>(c, p.b)[lane], p.b_mn, shape.n, -1, b_chunks);
  read_chunks(c, a_chunks);
  read_chunks(c, b_chunks);
  check_registers(c, p);
  auto hold = [&](int32_t slot) {
    warp.busy[slot / 8] = c.instruction + 1;
    warp.products.current.busy.push_back({slot, c.instruction});
  };
  std::for_each(p.d, p.d + p.many, hold);
  for (int n = 0; n < p.many; ++n) warp.only_read[p.d[n] / 8] = false;
  if (p.a_registers) {
    std::for_each(p.a, p.a + 4, hold);
    for (int n = 0; n < 4; ++n) warp.only_read[p.a[n] / 8] = true;
  }
  bool accumulate = predicate(c, p.accumulate) >> lane & 1;
  Block& block = *c.block;
  c.machine->begin(warp.products, [&block, &warp, &shape, p, accumulate, a_chunks, b_chunks] {
    multiply(block, warp, shape, p, accumulate, a_chunks, b_chunks);
  });
}

void product_fence(Context& c, const int32_t*, uint32_t) { ++full(c).fences; }

// Whoever waits for the others of its warpgroup looks again.
void product_commit(Context& c, const int32_t*, uint32_t) {
  close(full(c).products);
  c.block->event();
  for (FullWarp& warp : c.block->warps) {
    if (warp.state == State::kProduct) warp.state = State::kReady;
  }
}

}  // namespace

void add_async(Table& table) {
  table["cp.async.bulk.load"] = load_bulk;
  table["cp.async.bulk.store"] = store_bulk;
  table["cp.async.bulk.reduce"] = reduce_bulk;
  table["cp.async.bulk.commit_group"] = store_commit;
  table["cp.async.bulk.wait_group"] = store_wait;
  table["cp.async.mbarrier.arrive"] = arrive_copied;
  table["wgmma"] = product;
  table["wgmma.fence"] = product_fence;
  table["wgmma.commit_group"] = product_commit;
}

}  // namespace fw
