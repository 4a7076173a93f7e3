// Values that a shuffle has read from a lane that does not execute it. They are undefined: what is computed from them is
// undefined too, and a finding where it is stored, changes memory or is an address. What no lane uses is no finding.
//
// A branch that depends on one is none either: the lanes whose results are not needed often take one.
#include "run.h"

namespace fw {

void tell_undefined(Context& c, const Undefined& value) {
  Context shuffle = c;
  shuffle.instruction = value.shuffle;
  uint64_t window = std::exchange(c.machine->window, 0);  // its detail is a lane, not an address
  c.machine->find(shuffle, kDivergent, value.reader, value.source, c.instruction, kUndefined);
  c.machine->window = window;
}

void set_undefined(FullWarp& warp, int32_t slot, uint32_t mask, const Undefined& value) {
  if (slot < 0) return;
  if (warp.undefined.empty()) {
    if (value.lanes == 0) return;
    warp.undefined.resize(warp.file.size() / 8 + 1);
  }
  Undefined& own = warp.undefined[slot / 8];
  uint32_t kept = own.lanes & ~mask;
  if ((value.lanes & mask) != 0) own = value;
  own.lanes = kept | (value.lanes & mask);
}

void pass_undefined(Context& c, const Code& code, const int32_t* o, uint32_t mask) {
  FullWarp& warp = full(c);
  if (code.passes == kItself) return;
  auto at = [&](int32_t slot) { return warp.undefined[slot / 8]; };
  const int32_t* touched = c.machine->touched.data() + code.touched;
  Undefined result;
  auto take = [&](const Undefined& source, uint32_t lanes) {
    lanes &= source.lanes;
    if (lanes == 0) return;
    uint32_t all = result.lanes | lanes;
    result = source;
    result.lanes = all;
  };
  if (code.guard >= 0) take(at(code.guard), mask);
  if (code.passes == kSelects) {
    uint32_t first = predicate(c, o[3]);
    take(at(o[1]), first), take(at(o[2]), ~first), take(at(o[3]), kAll);
  } else if (code.passes == kAddress) {  // of a store, behind its values
    take(at(o[4 + o[3]]), mask);
  } else {
    for (int n = 0; n < code.read; ++n) take(at(touched[code.wrote + n]), mask);
  }
  bool used = code.passes == kUses || code.passes == kAddress;
  if (used && (result.lanes & mask) != 0) tell_undefined(c, result);
  if (used) result.lanes = 0;
  if (code.passes == kAcross && (result.lanes & mask) != 0) result.lanes = kAll;
  for (int n = 0; n < code.wrote; ++n) set_undefined(warp, touched[n], mask, result);
}

bool is_undefined(const FullWarp& warp, int32_t slot, int lane, Undefined& value) {
  if (slot < 0 || warp.undefined.empty() || (warp.undefined[slot / 8].lanes >> lane & 1) == 0) return false;
  value = warp.undefined[slot / 8];
  return true;
}

void Machine::tell_unwritten(Context& context, int lane, const Block& home, uint64_t own, uint64_t address, int bytes) {
  for (int n = 0; !home.undefined.empty() && n < bytes; ++n) {
    auto found = home.undefined.find(static_cast<uint32_t>(own + n));
    if (found != home.undefined.end() && home.written[own + n] == 0) return tell_undefined(context, found->second);
  }
  find(context, kUnwritten, lane, address);
}

}  // namespace fw
