// What the host has to know of the Hopper kernel.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed::sm90 {

// Two warpgroups that multiply, and one of which a thread feeds them.
constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;

// What a block may have.
constexpr int kMostSharedBytes = 227 * 1024;

// Shared memory, from a multiple of 1024 on, as the 128-byte swizzle wants it. Behind it comes the
// weight: parts of [tile_n, kRowBytes], one for each chunk of K, or for each slot if streamed.
//
//   barrier              arrivals a phase        its n-th phase is complete when
//   filled[slot]         1, and bytes            the slot's n-th patches, and weight, are there
//   freed[slot]          a warpgroup's warps     its n-th patches, and weight, are multiplied
//   turn[warpgroup]      the other one's warps   the other's products before its n-th are issued
//   columns_arrived      1, and bytes            scale and offset are there
template <int tile_n, int rows, int slots>
struct alignas(1024) Shared {
  uint8_t patches[slots][rows * kRowBytes];
  float scale[tile_n];
  float offset[tile_n];
  uint64_t filled[slots], freed[slots], turn[kConsumers], columns_arrived;

  static constexpr int bytes(int weight_parts) {
    return static_cast<int>(sizeof(Shared)) + weight_parts * tile_n * kRowBytes;
  }
};

// Of the 16 bytes of y that a thread writes at once.
constexpr int vector(Type out_dtype) { return 16 / itemsize(out_dtype); }

// Neighbouring columns of the four threads that share a row.
constexpr int group(Type out_dtype) { return 4 * vector(out_dtype); }

// The tensor maps, innermost dimension first, with the 128-byte swizzle; `inner` is kRowBytes of K:
//
//   patches   [K, M], boxes of [inner, rows]
//   weight    [K, 2, vector / 2, 4, N / group], boxes of [inner, 2, 1, 4, tile_n / group]; a step
//             in the dimensions is 1, 1, 2, vector and group rows of the weight [N, K]

}  // namespace patch_embed::sm90
