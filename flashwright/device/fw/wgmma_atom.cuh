// The instruction itself. wgmma names every register of its result, so each width has its own: those that are
// multiples of 16. (CuTe has them all, in headers that take nvcc half a minute.)
#pragma once

#include <cstdint>

#include <fw/global.cuh>

namespace fw {

// 64 x Columns += 64 x k times k x Columns, where k is 16 elements of 16 bits or 32 of fp8: `d` are a thread's results,
// A is four registers of them or a descriptor of shared memory, B is one. MnMajor, in 16 bits: B lies as k rows of
// columns; LeftMnMajor: A does.
template <class T, int Columns, bool MnMajor, bool LeftMnMajor = false>
struct Wgmma;

#define FW_HELD(i)                                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),     \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FW_LIST_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FW_LIST_2 FW_LIST_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FW_LIST_3 FW_LIST_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FW_LIST_4 FW_LIST_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_LIST_5 FW_LIST_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FW_LIST_6 FW_LIST_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FW_LIST_7 FW_LIST_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FW_LIST_8 FW_LIST_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FW_LIST_9 FW_LIST_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FW_LIST_10 FW_LIST_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FW_LIST_11 FW_LIST_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FW_LIST_12 FW_LIST_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FW_LIST_13 FW_LIST_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FW_LIST_14 FW_LIST_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FW_LIST_15 FW_LIST_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FW_LIST_16 FW_LIST_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FW_HELD_1 FW_HELD(0)
#define FW_HELD_2 FW_HELD_1, FW_HELD(8)
#define FW_HELD_3 FW_HELD_2, FW_HELD(16)
#define FW_HELD_4 FW_HELD_3, FW_HELD(24)
#define FW_HELD_5 FW_HELD_4, FW_HELD(32)
#define FW_HELD_6 FW_HELD_5, FW_HELD(40)
#define FW_HELD_7 FW_HELD_6, FW_HELD(48)
#define FW_HELD_8 FW_HELD_7, FW_HELD(56)
#define FW_HELD_9 FW_HELD_8, FW_HELD(64)
#define FW_HELD_10 FW_HELD_9, FW_HELD(72)
#define FW_HELD_11 FW_HELD_10, FW_HELD(80)
#define FW_HELD_12 FW_HELD_11, FW_HELD(88)
#define FW_HELD_13 FW_HELD_12, FW_HELD(96)
#define FW_HELD_14 FW_HELD_13, FW_HELD(104)
#define FW_HELD_15 FW_HELD_14, FW_HELD(112)
#define FW_HELD_16 FW_HELD_15, FW_HELD(120)

// x0 .. x6: the numbers of the operands behind the results. fp8 cannot lie the other way, and there is nothing to say
// about it (`major`).
#define FW_SHARED(columns, list, held, kind, major, x0, x1, x2, x3, x4)                            \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #x2 ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" list "}, %" #x0 ", %" #x1    \
               ", add, 1, 1" major(", %" #x4 ", %" #x3) ";\n}"                                 \
               : held                                                                            \
               : "l"(a), "l"(b), "r"(add), "n"(MnMajor), "n"(LeftMnMajor))
#define FW_REGISTERS(columns, list, held, kind, major, x0, x1, x2, x3, x4, x5, x6)               \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #x5 ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" list "}, {%" #x0 ", %" #x1   \
               ", %" #x2 ", %" #x3 "}, %" #x4 ", add, 1, 1" major(", %" #x6) ";\n}"              \
               : held                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MnMajor))
#define FW_SAID(text) text
#define FW_UNSAID(text)

// `of` is one of the two above.
#define FW_OF_TYPE(of, columns, eighth, ...)                                                     \
  if constexpr (cute::is_same_v<T, bf16>) {                                                      \
    of(columns, FW_LIST_##eighth, FW_HELD_##eighth, "k16.f32.bf16.bf16", FW_SAID, __VA_ARGS__);   \
  } else if constexpr (cute::is_same_v<T, fp16>) {                                               \
    of(columns, FW_LIST_##eighth, FW_HELD_##eighth, "k16.f32.f16.f16", FW_SAID, __VA_ARGS__);     \
  } else if constexpr (cute::is_same_v<T, e4m3>) {                                               \
    of(columns, FW_LIST_##eighth, FW_HELD_##eighth, "k32.f32.e4m3.e4m3", FW_UNSAID, __VA_ARGS__); \
  } else {                                                                                       \
    of(columns, FW_LIST_##eighth, FW_HELD_##eighth, "k32.f32.e5m2.e5m2", FW_UNSAID, __VA_ARGS__); \
  }

#define FW_WGMMA(columns, eighth, x0, x1, x2, x3, x4, x5, x6)                                    \
  template <class T, bool MnMajor, bool LeftMnMajor>                                             \
  struct Wgmma<T, columns, MnMajor, LeftMnMajor> {                                               \
    static __device__ void run(float* d, uint64_t a, uint64_t b, int add) {                      \
      FW_OF_TYPE(FW_SHARED, columns, eighth, x0, x1, x2, x3, x4)                                 \
    }                                                                                            \
    static __device__ void run(float* d, uint32_t const (&a)[4], uint64_t b, int add) {          \
      FW_OF_TYPE(FW_REGISTERS, columns, eighth, x0, x1, x2, x3, x4, x5, x6)                      \
    }                                                                                            \
  };
FW_WGMMA(16, 1, 8, 9, 10, 11, 12, 13, 14)
FW_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
FW_WGMMA(48, 3, 24, 25, 26, 27, 28, 29, 30)
FW_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
FW_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
FW_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
FW_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
FW_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
FW_WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
FW_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
FW_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
FW_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
FW_WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
FW_WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
FW_WGMMA(240, 15, 120, 121, 122, 123, 124, 125, 126)
FW_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FW_WGMMA
#undef FW_OF_TYPE
#undef FW_UNSAID
#undef FW_SAID
#undef FW_REGISTERS
#undef FW_SHARED

}  // namespace fw
