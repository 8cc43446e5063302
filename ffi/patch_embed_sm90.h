// What the host has to know of the Hopper kernel.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed::sm90 {

// Two warpgroups that multiply, and one of which a thread feeds them.
constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kMultiplyingWarps = kConsumers * kWarpgroup / 32;

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

// Whether scale and table stay in registers, of which there are 240 at most.
constexpr bool holds_columns(Type out_dtype, bool has_table, int tile_n, int rows) {
  return sum_registers(tile_n, rows) + column_registers(out_dtype, has_table, tile_n, rows) +
             kOtherRegisters <= 240;
}

// Parts of which a thread reads the table before the products of a tile are done, where it does not stay.
constexpr int kAhead = 2;

// Slots of a weight that is streamed: as many as there is room for.
constexpr int weight_slots(int tile_n, int rows, int slots, bool stream_weight) {
  const int room = kMostSharedBytes - slots * rows * kRowBytes - 2048;
  return stream_weight ? room / (tile_n * kRowBytes) : 0;
}

// The first ones are for chunks of K that stay in shared memory: every so many one, of half tiles with so
// many rows, and of up to so many chunks. Of others those that come need the slots (NOTES.md).
constexpr int kStayEach = 4;
constexpr int kStaying = 3;
constexpr int kLeastRowsOfStaying = 128;
constexpr int kMostChunksOfStaying = 16;

// Slots of shared memory for the chunks of a streamed weight that stay, and how many of `chunks` stay.
// The references keep the kernels' machine code: with values nvcc 13.0 computes the slots otherwise.
constexpr PATCH_EMBED_HOST_DEVICE int staying_slots(int rows, const int& chunks) {
  return rows < kLeastRowsOfStaying || chunks > kMostChunksOfStaying ? 0 : kStaying;
}
constexpr PATCH_EMBED_HOST_DEVICE int staying_chunks(int rows, const int& chunks) {
  const int wanted = (chunks + kStayEach - 1) / kStayEach, slots = staying_slots(rows, chunks);
  return wanted < slots ? wanted : slots;
}

// Shared memory, from a multiple of 1024 on, as the 128-byte swizzle wants it. Behind it comes the
// weight: parts of [tile_n, kRowBytes], all of it, or those that stay and then the slots of a ring.
//
//   barrier              arrivals a phase        its n-th phase is complete when
//   filled[slot]         1, and bytes            the slot's n-th patches, and their weight, are there
//   freed[slot]          a warpgroup's warps     its n-th patches are multiplied
//   weight_freed[slot]   a warpgroup's warps     the weight's slot's n-th part is multiplied
//   turn[warpgroup]      the other one's warps   the other's products before its n-th are issued
//   columns_arrived      1, and bytes            scale and offset are there
//
// How a block, which is alone in its cluster, begins and ends:
//
//   step                   by                    why it comes here
//   initialise mbarriers   thread 0              fence.mbarrier_init publishes them to TMA
//   together               all threads           nobody waits for or signals a barrier before it exists
//   setmaxnreg             each warpgroup        the feeding one gives the registers that others get
//   feed                   one thread            exits behind its last load; the block is still alive
//   multiply and store     two warpgroups        wait for every filled[slot], so every load has arrived,
//                                                and for all products; y is written by ordinary stores
template <int tile_n, int rows, int slots, bool stream_weight>
struct alignas(1024) Shared {
  static constexpr int kWeightSlots = weight_slots(tile_n, rows, slots, stream_weight);

  uint8_t patches[slots][rows * kRowBytes];
  float scale[tile_n], offset[tile_n];
  uint64_t filled[slots], freed[slots], weight_freed[kWeightSlots], turn[kConsumers];
  uint64_t columns_arrived;

  // Of all shared memory, with the weight behind this, for so many chunks of K.
  static constexpr int64_t bytes(int chunks) {
    const int64_t parts = stream_weight ? kWeightSlots : chunks;
    return int64_t{sizeof(Shared)} + parts * tile_n * kRowBytes;
  }
};

// The tensor maps, innermost dimension first, with the 128-byte swizzle; `inner` is kRowBytes of K:
//
//   patches   [K, M], boxes of [inner, rows]
//   weight    [K, 2, 4, N / group, vector / 2], boxes of [inner, 2, 4, tile_n / group, vector / 2]; a
//             step in the dimensions is 1, 1, vector, group and 2 rows of the weight [N, K]

}  // namespace patch_embed::sm90
