// Products in tensor memory (PTX ISA 9.7.16). `blocks` is the cta_group: one block or a pair.

#pragma once

#include <cstdint>

#include "../kernel.h"
#include "mbarrier.cuh"

namespace patch_embed::ptx {

// 9.7.16.7: allocates `columns` columns of tensor memory and writes their address to `address`. All
// lanes of a warp execute it. With two blocks one warp of each executes it; the first one may wait
// for the second (9.7.16.5), so both blocks must have been launched.
template <int blocks, int columns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t& address) {
  if constexpr (blocks == 2) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(&address)),
                 "n"(columns)
                 : "memory");
  } else {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(&address)),
                 "n"(columns)
                 : "memory");
  }
}

template <int blocks>
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  if constexpr (blocks == 2) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
  } else {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
}

template <int blocks, int columns>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address) {
  if constexpr (blocks == 2) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address),
                 "n"(columns));
  } else {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address),
                 "n"(columns));
  }
}

// 9.7.16.11: these fences order accesses to tensor memory before and after a synchronisation of
// threads.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// 9.7.16.10: d = a b^T + (accumulate ? d : 0), for 32 bytes of K of a and b in shared memory.
template <Type dtype, int blocks>
__device__ __forceinline__ void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b,
                                            uint32_t instruction, bool accumulate) {
#define PATCH_EMBED_MMA(group, kind)                                      \
  asm volatile(                                                           \
      "{ .reg .pred accumulate;\nsetp.ne.b32 accumulate, %4, 0;\n"        \
      "tcgen05.mma.cta_group::" #group ".kind::" #kind                    \
      " [%0], %1, %2, %3, accumulate; }" ::"r"(d),                        \
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<int>(accumulate)) \
      : "memory")
  if constexpr (dtype == Type::kFloat8E4M3FN && blocks == 2) PATCH_EMBED_MMA(2, f8f6f4);
  if constexpr (dtype == Type::kFloat8E4M3FN && blocks == 1) PATCH_EMBED_MMA(1, f8f6f4);
  if constexpr (dtype == Type::kBFloat16 && blocks == 2) PATCH_EMBED_MMA(2, f16);
  if constexpr (dtype == Type::kBFloat16 && blocks == 1) PATCH_EMBED_MMA(1, f16);
  if constexpr (dtype == Type::kInt8 && blocks == 2) PATCH_EMBED_MMA(2, i8);
  if constexpr (dtype == Type::kInt8 && blocks == 1) PATCH_EMBED_MMA(1, i8);
#undef PATCH_EMBED_MMA
}

// 9.7.16.12: arrives at the barrier when all products that this thread has issued are done. In a
// pair it arrives at this barrier in both blocks.
template <int blocks>
__device__ __forceinline__ void tcgen05_commit(Mbarrier& barrier) {
  if constexpr (blocks == 2) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%0], %1;" ::"r"(shared_address(&barrier)),
        "h"(uint16_t{0b11})
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
            shared_address(&barrier))
        : "memory");
  }
}

// 9.7.16.8: loads 16 rows and 8 * (words / 4) columns of tensor memory. Words 4 j to 4 j + 3 of
// lane 4 r + c are columns 8 j + 2 c and 8 j + 2 c + 1 of row r, and the same columns of row r + 8.
template <int words>
__device__ __forceinline__ void tcgen05_ld_16x256b(uint32_t (&d)[words], uint32_t address);

#define EIGHT_NUMBERS(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define NUMBERS_8 EIGHT_NUMBERS(0, 1, 2, 3, 4, 5, 6, 7)
#define NUMBERS_16 NUMBERS_8 ", " EIGHT_NUMBERS(8, 9, 10, 11, 12, 13, 14, 15)
// clang-format off
#define NUMBERS_32                                               \
  NUMBERS_16 ", " EIGHT_NUMBERS(16, 17, 18, 19, 20, 21, 22, 23) ", " \
      EIGHT_NUMBERS(24, 25, 26, 27, 28, 29, 30, 31)
#define EIGHT_WORDS(i)                                                                      \
  "=r"(d[i]), "=r"(d[i + 1]), "=r"(d[i + 2]), "=r"(d[i + 3]), "=r"(d[i + 4]), "=r"(d[i + 5]), \
      "=r"(d[i + 6]), "=r"(d[i + 7])
#define WORDS_8 EIGHT_WORDS(0)
#define WORDS_16 WORDS_8, EIGHT_WORDS(8)
#define WORDS_32 WORDS_16, EIGHT_WORDS(16), EIGHT_WORDS(24)
#define PATCH_EMBED_LOAD(words, repeat)                                                          \
  template <>                                                                                    \
  __device__ __forceinline__ void tcgen05_ld_16x256b<words>(uint32_t (&d)[words],                \
                                                            uint32_t address) {                  \
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x" #repeat ".b32 {" NUMBERS_##words "}, [%" #words \
                 "];"                                                                            \
                 : WORDS_##words                                                                 \
                 : "r"(address));                                                                \
  }
// clang-format on
PATCH_EMBED_LOAD(8, 2)
PATCH_EMBED_LOAD(16, 4)
PATCH_EMBED_LOAD(32, 8)
#undef EIGHT_NUMBERS
#undef NUMBERS_8
#undef NUMBERS_16
#undef NUMBERS_32
#undef EIGHT_WORDS
#undef WORDS_8
#undef WORDS_16
#undef WORDS_32
#undef PATCH_EMBED_LOAD

// 9.7.16.8: waits until all loads of this thread have filled their registers.
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace patch_embed::ptx
