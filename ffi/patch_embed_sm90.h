// What the host has to know of the Hopper kernel.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed::sm90 {

// Two warpgroups that multiply, and one of which a thread feeds them.
constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;

// Of the 16 bytes of y that a thread writes at once.
constexpr int vector(Type out_dtype) { return 16 / itemsize(out_dtype); }

// Neighbouring columns of the four threads that share a row.
constexpr int group(Type out_dtype) { return 4 * vector(out_dtype); }

// Rows of a thread that it stores one behind the other: as many as it has of 64 rows of a tile.
constexpr int kPartRows = 2;

// Registers of a multiplying thread: sums; scale and what is added, in words of two bfloat16 of each
// row, or in floats; others: less, and it spills.
constexpr int sum_registers(int tile_n, int rows) { return rows / 64 * tile_n / 2; }

constexpr int column_registers(Type out_dtype, bool has_table, int tile_n, int rows) {
  const int terms = has_table ? rows / 64 * kPartRows * vector(out_dtype) / 2 : vector(out_dtype);
  return tile_n / group(out_dtype) * (vector(out_dtype) + terms);
}

constexpr int kOtherRegisters = 48;

// Whether scale and table stay in registers, of which there are 240 at most; else the table's rows are
// copied to shared memory.
constexpr bool holds_columns(Type out_dtype, bool has_table, int tile_n, int rows) {
  return sum_registers(tile_n, rows) + column_registers(out_dtype, has_table, tile_n, rows) +
             kOtherRegisters <= 240;
}

constexpr bool copies_table(Type out_dtype, bool has_table, int tile_n, int rows) {
  return has_table && !holds_columns(out_dtype, has_table, tile_n, rows);
}

// Parts that are copied ahead: before the products of a tile are done, and while others are stored.
constexpr int kAhead = 3;

// Bytes of what is added, in shared memory: copied parts of the table, or the offset.
constexpr int term_bytes(Type out_dtype, bool has_table, int tile_n, int rows) {
  if (!copies_table(out_dtype, has_table, tile_n, rows)) return tile_n * int{sizeof(float)};
  return kConsumers * kWarpgroup * kAhead * kPartRows * vector(out_dtype) * 2;
}

// Shared memory, from a multiple of 1024 on, as the 128-byte swizzle wants it. Behind it comes the
// weight: parts of [tile_n, kRowBytes], one for each chunk of K, or for each slot if streamed.
//
//   barrier              arrivals a phase        its n-th phase is complete when
//   filled[slot]         1, and bytes            the slot's n-th patches, and weight, are there
//   freed[slot]          a warpgroup's warps     its n-th patches, and weight, are multiplied
//   turn[warpgroup]      the other one's warps   the other's products before its n-th are issued
//   columns_arrived      1, and bytes            scale and offset are there
template <int tile_n, int rows, int slots, int term_bytes>
struct alignas(1024) Shared {
  uint8_t patches[slots][rows * kRowBytes];
  float scale[tile_n];
  alignas(16) uint8_t terms[term_bytes];
  uint64_t filled[slots], freed[slots], turn[kConsumers], columns_arrived;

  static constexpr int bytes(int weight_parts) {
    return static_cast<int>(sizeof(Shared)) + weight_parts * tile_n * kRowBytes;
  }
};

// The tensor maps, innermost dimension first, with the 128-byte swizzle; `inner` is kRowBytes of K:
//
//   patches   [K, M], boxes of [inner, rows]
//   weight    [K, 2, vector / 2, 4, N / group], boxes of [inner, 2, 1, 4, tile_n / group]; a step
//             in the dimensions is 1, 1, 2, vector and group rows of the weight [N, K]

}  // namespace patch_embed::sm90
