// wgmma.mma_async: where its operands lie in shared memory, and what it computes.
//
// Nothing here waits, reads memory or finds fault. Who executes the instruction asks for the
// addresses of an operand (wgmma_chunks), reads them in that order when the time has come, and
// hands the bytes over (wgmma_multiply), for each of the four warps of the warpgroup.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fw {

struct WgmmaShape {
  enum Type : int { kF32, kF16, kBF16, kE4M3, kE5M2, kTF32, kS8, kU8, kS32 };

  int n = 0, k = 0;                  // m is 64: 16 rows for each warp
  int element_bytes = 2;             // of A and B: 2 (f16, bf16), 1 (e4m3, e5m2, s8, u8), 4 (tf32)
  int d = kF32, a = kF16, b = kF16;  // of Type
  bool satfinite = false;            // s32 stays at its limits

  int accumulators() const { return d == kF16 ? n / 4 : n / 2; }  // registers of D, of 32 bits
};

// From PTX's name, with or without .sync and .aligned, as
// wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16; false where it is none of these. Single
// bits and .sp are not.
bool wgmma_shape(const std::string& name, WgmmaShape& shape);

// The shared-memory byte addresses of the 16-byte chunks of an operand: `extent` (64 of A, n of B)
// rows of 32 bytes along K. With rows_from >= 0 only rows rows_from .. rows_from + 15, those of
// one warp. Eight rows are 16 chunks: K-major, two a row; MN-major, one for each k. MN-major is for
// elements of 2 bytes only; PTX has no other.
void wgmma_chunks(const WgmmaShape& shape, uint64_t descriptor, bool mn_major, int extent,
                  int rows_from, std::vector<uint32_t>& chunks);

// D = scale_a A scale_b B + (accumulate ? D : 0), for the 16 rows of one warp; the scales are 1 or
// -1. A is in four registers, a_registers[i] its 32 lanes, or, where that is null, in a_bytes:
// the chunks' bytes in the order of wgmma_chunks with rows_from = 16 (warp % 4). b_bytes likewise,
// all n of it. d: accumulators() registers of 32 lanes, read and written in place, and not read
// without accumulate.
void wgmma_multiply(const WgmmaShape& shape, const uint32_t* const* a_registers,
                    const uint8_t* a_bytes, bool a_mn_major, const uint8_t* b_bytes,
                    bool b_mn_major, bool accumulate, int scale_a, int scale_b,
                    uint32_t* const* d);

}  // namespace fw
