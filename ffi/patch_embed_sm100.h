// What the host has to know of the Blackwell kernel.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed::sm100 {

// Of a block: one warpgroup that feeds and multiplies, two that store; and its rows of a tile.
constexpr int kStorers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (1 + kStorers) * kWarpgroup;
constexpr int kMultiplyingWarps = 1, kStoringWarps = kStorers * kWarpgroup / 32;
constexpr int kRows = 128;

// Rows of tensor memory that a warp may read, and so rows of a TMA store.
constexpr int kWarpRows = 32;

// Tiles in tensor memory: one is multiplied, the other one is stored.
constexpr int kAccumulators = 2;

// Columns of 32 bits of a multiprocessor's tensor memory, and those that a block allocates: a power
// of two.
constexpr int kTensorMemory = 512;
constexpr int tensor_memory_columns(int tile_n) {
  const int needed = kAccumulators * tile_n;
  return needed <= 128 ? 128 : needed <= 256 ? 256 : 512;
}

// Columns of a TMA store: rows of 128 bytes, or of 64 bytes where 128 do not divide a warp's part of
// a row of y.
constexpr int store_columns(Type out_dtype, int tile_n) {
  const int warp_bytes = tile_n / kStorers * itemsize(out_dtype);
  return kRowBytes / itemsize(out_dtype) / (warp_bytes % kRowBytes ? 2 : 1);
}

// When the next products may overwrite the accumulator of a tile.
enum class Release {
  kLoaded,  // when the tile's sums are in registers
  kStored,  // when the tile's stores have been issued
};

// How a storing warp works. None of it changes the result, or what the kernel is called. Kernels are
// built with these values; a variant inherits them, hides those that it changes, and is a Worker's
// last template argument.
template <Type out_dtype, int tile_n>
struct Tuning {
  // Columns of an accumulator that a warp loads before one tcgen05.wait::ld: as many as there are
  // registers for beside scale and table. It divides the warp's tile_n / 2 columns.
  static constexpr int kStepColumns = tile_n < 256                     ? tile_n / 2
                                      : out_dtype == Type::kFloat32 ? 32
                                                                    : 64;

  // Columns of one tcgen05.ld of 16 rows: 16, 32 or 64. It divides the columns of a step.
  static constexpr int kLoadColumns = kStepColumns % 64 ? 32 : 64;

  // Buffers in shared memory of a storing warp; each holds what one TMA store reads. A power of two.
  static constexpr int kStagingBuffers = 2;

  // Stores that share a fence and a bulk group; with 1 each is issued as soon as it is staged. It
  // divides the stores of a step and the number of buffers.
  static constexpr int kStoresPerGroup = 1;

  static constexpr Release kRelease = Release::kLoaded;

  // Cycles by which the warps of the second storing warpgroup begin a tile later than those of the
  // first, with which they share a scheduler.
  static constexpr int kStaggerCycles = 0;

  // Whether a warp's part of the table stays in registers for a segment. If not, it is read for each
  // tile.
  static constexpr bool kKeepTable = true;
};

// Shared memory of a block, from a multiple of 1024 on, as the 128-byte swizzle wants it:
//
//   patches[slot]          kRows of kRowBytes of K
//   staged[warp][buffer]   kWarpRows of a store's columns of y: 128 or 64 bytes, swizzled
//   barriers, and where tensor memory is
//   weight                 behind Shared: [tile_n / blocks, kRowBytes] for each chunk of K, or for each
//                          slot if streamed
//
//   barrier                arrivals a phase        its n-th phase is complete when
//   filled[slot]           1, and bytes            the slot's n-th patches, and weight, are there, of
//                                                  all blocks; that of the first block counts
//   freed[slot]            1, by tcgen05.commit    its n-th patches, and weight, are multiplied
//   multiplied[i]          1, by tcgen05.commit    the products of tile 2 n + i are in tensor memory
//   read[i]                a storing warp's, of    they are in registers; that of the first block
//                          all blocks              counts
//
// Of a pair each block has barriers of its own, and tcgen05.commit arrives at those of both.
//
// How a block begins and ends. "Together" is a barrier of all threads of the block, and of the
// cluster where there are two blocks:
//
//   step                   by                      why it comes here
//   initialise mbarriers   thread 0                fence.mbarrier_init publishes them to TMA, to the
//                                                  tensor cores and, by the next step, to the peer
//   peer is there          both blocks, relaxed    a pair allocates only when both were launched, and
//                                                  nobody signals a block before its barriers exist
//   allocate, relinquish   one warp of each block  a pair does both collectively
//   together               all                     publishes the address of tensor memory
//   setmaxnreg             each warpgroup          the first gives the registers that the others get
//   feed, multiply, store  each role
//   wait for freed[slot]   feed, of each block     the last use of every slot: no commit is on its
//                                                  way to this block; its TMA loads have arrived
//   wait for multiplied    store                   every tile: the last commit has arrived
//   wait for stores' reads store                   TMA has read what was staged
//   together               all                     the peer's arrivals at read[i] have come, and
//                                                  nobody uses tensor memory any more
//   deallocate             the allocating warp     a pair does it collectively, ordered after both
//                                                  allocations; the block exits
template <Type out_dtype, int tile_n, int blocks, int slots, bool stream_weight,
          typename Tuned = Tuning<out_dtype, tile_n>>
struct alignas(1024) Shared {
  static constexpr int kStoreBytes = store_columns(out_dtype, tile_n) * itemsize(out_dtype);
  static constexpr int kWeightBytes = tile_n / blocks * kRowBytes;

  uint8_t patches[slots][kRows * kRowBytes];
  uint8_t staged[kStoringWarps][Tuned::kStagingBuffers][kWarpRows * kStoreBytes];
  uint64_t filled[slots], freed[slots], multiplied[kAccumulators], read[kAccumulators];
  uint32_t tensor_memory;

  // Of all shared memory, with the weight behind this, for so many chunks of K.
  static constexpr int64_t bytes(int chunks) {
    return int64_t{sizeof(Shared)} + int64_t{stream_weight ? slots : chunks} * kWeightBytes;
  }
};

// The tensor maps, innermost dimension first, each with the swizzle of its box's inner side:
//
//   patches   [K, M], boxes of [kRowBytes of K, kRows]
//   weight    [K, N], boxes of [kRowBytes of K, tile_n / blocks]
//   y         [N, M], boxes of [store_n, kWarpRows]

}  // namespace patch_embed::sm100
