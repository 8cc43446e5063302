// What the host has to know of the Blackwell kernel.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed::sm100 {

// Of a block: one warpgroup that feeds and multiplies, two that store; and its rows of a tile.
constexpr int kStorers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (1 + kStorers) * kWarpgroup;
constexpr int kStoringWarps = kStorers * kWarpgroup / 32;
constexpr int kRows = 128;

// Rows of tensor memory that a warp may read, and so rows of a TMA store.
constexpr int kWarpRows = 32;

// Tiles in tensor memory: one is multiplied, the other one is stored.
constexpr int kAccumulators = 2;

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
template <int slots, int store_bytes, int buffers>
struct alignas(1024) Shared {
  uint8_t patches[slots][kRows * kRowBytes];
  uint8_t staged[kStoringWarps][buffers][kWarpRows * store_bytes];
  uint64_t filled[slots], freed[slots], multiplied[kAccumulators], read[kAccumulators];
  uint32_t tensor_memory;

  static constexpr int bytes(int weight_parts, int weight_rows) {
    return static_cast<int>(sizeof(Shared)) + weight_parts * weight_rows * kRowBytes;
  }
};

// Buffers of a storing warp of the kernels that are built.
constexpr int kBuffers = 2;

// The tensor maps, innermost dimension first, each with the swizzle of its box's inner side:
//
//   patches   [K, M], boxes of [kRowBytes of K, kRows]
//   weight    [K, N], boxes of [kRowBytes of K, tile_n / blocks]
//   y         [N, M], boxes of [store_n, kWarpRows]

}  // namespace patch_embed::sm100
