// Products of a warpgroup (PTX ISA 9.7.15).

#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.h"

namespace patch_embed::ptx {

// 9.7.15.7.1: orders register accesses before the next products. It is needed before the first
// product, and after any other access to the accumulators.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// 9.7.15.7.2
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// 9.7.15.7.3: waits until at most `pending` groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Bytes of K that one wgmma multiplies.
constexpr int kProductBytes = 32;

// 9.7.15.5.2: d = a b^T + (accumulate ? d : 0), for a [64, 32 bytes] and b [n, 32 bytes] in shared
// memory. In thread t of the warpgroup, d[i] is at row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2) and
// column 8 (i / 4) + 2 (t % 4) + i % 2.
template <Type dtype, int n>
__device__ __forceinline__ void wgmma(Sum<dtype> (&d)[n / 2], uint64_t a, uint64_t b,
                                      bool accumulate);

// The same product with a in registers (9.7.15.5.1.1). In thread t of the warpgroup, a[i] has four
// bytes of K, from byte 4 (t % 4) + 16 (i / 2) on, of row 16 (t / 32) + t % 32 / 4 + 8 (i % 2). The
// registers must not change before wgmma_wait_group has waited for the products.
template <Type dtype, int n>
__device__ __forceinline__ void wgmma(Sum<dtype> (&d)[n / 2], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate);

// Macros for the operands of the accumulators and for their list "%0, %1, ...", ten numbers at a
// time.
// clang-format off
#define TEN(t)                                                                              \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t \
  "9, "
#define NUMBERS_32 TEN() TEN(1) TEN(2) "%30, %31"
#define NUMBERS_48 TEN() TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_64 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#define NUMBERS_96                                               \
  TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) \
  "%90, %91, %92, %93, %94, %95"
#define EIGHT(c, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define THIRTY_TWO(c, i) EIGHT(c, i), EIGHT(c, i + 8), EIGHT(c, i + 16), EIGHT(c, i + 24)
#define SUMS_32(c) THIRTY_TWO(c, 0)
#define SUMS_48(c) THIRTY_TWO(c, 0), EIGHT(c, 32), EIGHT(c, 40)
#define SUMS_64(c) THIRTY_TWO(c, 0), THIRTY_TWO(c, 32)
#define SUMS_96(c) THIRTY_TWO(c, 0), THIRTY_TWO(c, 32), THIRTY_TWO(c, 64)

#define WGMMA(dtype, n, instruction, count, a_, b_, constraint, scales)                          \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma<Type::dtype, n>(Sum<Type::dtype> (&d)[n / 2], uint64_t a, \
                                                        uint64_t b, bool accumulate) {          \
    asm volatile("{ .reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #count ", 0;\n"          \
                 "wgmma.mma_async.sync.aligned.m64n" #n instruction " {" NUMBERS_##count "}, "  \
                 "%" #a_ ", %" #b_ ", accumulate" scales "; }"                                  \
                 : SUMS_##count(constraint)                                                     \
                 : "r"(static_cast<int>(accumulate)), "l"(a), "l"(b));                          \
  }
#define WGMMA_REGISTERS(dtype, n, instruction, count, a0, a1, a2, a3, b_, constraint)            \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma<Type::dtype, n>(                                        \
      Sum<Type::dtype> (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {      \
    asm volatile("{ .reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #count ", 0;\n"          \
                 "wgmma.mma_async.sync.aligned.m64n" #n instruction " {" NUMBERS_##count "}, "  \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", accumulate; }"            \
                 : SUMS_##count(constraint)                                                     \
                 : "r"(static_cast<int>(accumulate)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
                   "l"(b));                                                                     \
  }
#define WGMMA_OF_WIDTH(n, count, a, b)                                                        \
  WGMMA(kFloat8E4M3FN, n, "k32.f32.e4m3.e4m3", count, a, b, "+f", ", 1, 1")                   \
  WGMMA(kBFloat16, n, "k16.f32.bf16.bf16", count, a, b, "+f", ", 1, 1, 0, 0")                 \
  WGMMA(kInt8, n, "k32.s32.s8.s8", count, a, b, "+r", "")
// clang-format on

WGMMA_OF_WIDTH(64, 32, 33, 34)
WGMMA_OF_WIDTH(96, 48, 49, 50)
WGMMA_OF_WIDTH(128, 64, 65, 66)
WGMMA_OF_WIDTH(192, 96, 97, 98)
WGMMA_REGISTERS(kInt8, 64, "k32.s32.s8.s8", 32, 33, 34, 35, 36, 37, "+r")
WGMMA_REGISTERS(kInt8, 128, "k32.s32.s8.s8", 64, 65, 66, 67, 68, 69, "+r")
WGMMA_REGISTERS(kInt8, 192, "k32.s32.s8.s8", 96, 97, 98, 99, 100, 101, "+r")

#undef TEN
#undef NUMBERS_32
#undef NUMBERS_48
#undef NUMBERS_64
#undef NUMBERS_96
#undef EIGHT
#undef THIRTY_TWO
#undef SUMS_32
#undef SUMS_48
#undef SUMS_64
#undef SUMS_96
#undef WGMMA
#undef WGMMA_REGISTERS
#undef WGMMA_OF_WIDTH

}  // namespace patch_embed::ptx
