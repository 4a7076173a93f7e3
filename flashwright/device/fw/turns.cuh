// Additions to global memory in a stated order, so that sums have the same bits in every run.
#pragma once

namespace fw {

// The turns of a warp. Thread blocks add to the same tile, and in each of them the same warp adds to the same part of it: so
// each tile has a counter for each warp, which says how many thread blocks have added that part, and no warp waits for
// another one of its own thread block. Counters begin at 0. The thread blocks of earlier turns start earlier.
struct Turns {
  int* taken = nullptr;  // the counter of a turn that is not passed on yet

  // Waits until so many thread blocks have added their part.
  __device__ void take(int* counters, int turn) {
    taken = counters + threadIdx.x / 32;
    asm volatile(
        "{\n"
        ".reg .pred reached;\n"
        ".reg .b32 count;\n"
        "AGAIN:\n"
        "ld.acquire.gpu.global.b32 count, [%0];\n"
        "setp.eq.s32 reached, count, %1;\n"
        "@!reached bra AGAIN;\n"
        "}" ::"l"(taken),
        "r"(turn)
        : "memory");
    __syncwarp();
  }

  // Lets the next thread block add, if a turn was taken: waits until all that this warp has added is there. The later it
  // comes, the less there is to wait for. A predicate, since a branch would keep what is in registers apart.
  __device__ void hand_over() {
    __syncwarp();
    asm volatile(
        "{\n"
        ".reg .pred passes;\n"
        "setp.ne.b32 passes, %1, 0;\n"
        "@passes red.release.gpu.global.add.s32 [%0], 1;\n"
        "}" ::"l"(taken),
        "r"(static_cast<int>(taken != nullptr && threadIdx.x % 32 == 0))
        : "memory");
    taken = nullptr;
  }
};

}  // namespace fw
