// What an instruction sees: a warp of 32 lanes with its registers, the block it is in, the machine.
//
// A program is decoded once, in Python: every operand is a slot, the offset of a register in the warp's
// register file. A slot holds 32 lanes of 2, 4 or 8 bytes, or, for a predicate, one 32-bit mask. Constants
// and special registers are slots too; -1 is a register that nobody reads. Whoever executes does not parse.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace fw {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;

struct Machine;  // global memory, findings, counters, the schedule (run.h)
struct Block;    // shared memory, barriers, warps (run.h)

struct Warp {
  uint8_t* registers = nullptr;
  int number = 0;  // within its block
};

struct Context {
  Machine* machine;
  Block* block;
  Warp* warp;
  int32_t instruction;  // its index in the program, for findings
  int32_t count;        // operands
};

// Executes one instruction for the lanes in `mask`. Operands are slots unless the instruction says otherwise.
using Handler = void (*)(Context& context, const int32_t* operand, uint32_t mask);

template <class T>
inline T* lanes(Context& context, int32_t slot) {
  return reinterpret_cast<T*>(context.warp->registers + slot);
}

inline uint32_t& predicate(Context& context, int32_t slot) {
  return *reinterpret_cast<uint32_t*>(context.warp->registers + slot);
}

// The loop over lanes, in two forms so that the usual one, all lanes, can be vectorised.
template <class F>
inline void for_lanes(uint32_t mask, F&& body) {
  if (mask == kAll) {
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}

// Every file of instructions adds its own, by PTX's spelling without the parts that change nothing (encode.py).
using Table = std::map<std::string, Handler>;
void add_arithmetic(Table& table);
void add_convert(Table& table);
void add_exchange(Table& table);
void add_matrix(Table& table);
void add_fragments(Table& table);
void add_memory(Table& table);
void add_words(Table& table);

}  // namespace fw
