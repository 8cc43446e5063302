// What the kernels that split K have in common, for the host and the kernels.
//
// A cluster of 2, 4 or kMostSplits blocks computes a tile together. A block multiplies a contiguous
// share of the chunks of K. A thread has the sums of a part of the tile in vectors of four, and the
// threads of the same number in all blocks have the same part. Each block completes an equal share of
// every thread's vectors: it receives the other blocks' sums of these vectors (an exchange, split.cuh),
// adds them up, and stores them.
//
// The warps of the same number in all blocks of a cluster exchange partial sums, once for each tile in
// which the warp has rows of y. These are the same tiles in all blocks. In an exchange a warp sends its
// sums to each other block by st.async, which stores them there and adds their bytes to sums_arrived
// of the receiving warp. Then the warp waits for the sums that it gets:
//
//   barrier                     arrivals per phase      who waits             the n-th phase completes
//   sums_arrived[buffer][warp]  1: lane 0 of the warp;  that warp, before it  when the partial sums of
//                               bytes: the same warp    adds up the sums      the warp's exchange
//                               of the other blocks                           2 n + buffer have arrived
//                                                                             from all other blocks
//
// The exchanges of a warp use two buffers in turn, each with its barrier. No barrier needs to say that
// a buffer may be written again:
//
//   - When a warp sends the sums of exchange n + 2, it has waited for those of exchange n + 1. So the
//     warp of each other block has sent its sums of exchange n + 1, and before that it has read the
//     buffer of exchange n.
//   - For the same reason the other warp has waited for its phase of exchange n, so the bytes of
//     exchange n + 2 never count for that phase. The bytes of exchange n + 1 may arrive before the
//     last bytes of exchange n, so a single barrier would not be enough.
//   - Bytes may arrive before the arrival that expects them: the phase does not complete without it.
//   - All stores of other blocks into a block belong to exchanges for which one of its warps waits. So
//     no block exits while another one may write to its shared memory. No block reads the memory of
//     another one, and st.async sends registers, so a block may exit while its stores are under way.
//
// Before its first exchange a warp waits for a barrier of the cluster, at which the other blocks have
// arrived when their mbarriers exist. The warps that exchange nothing wait for it before they exit, so
// that no thread leaves out the wait.

#pragma once

#include <cstdint>

#include "kernel.h"
#include "ptx/matrix_descriptor.h"  // PATCH_EMBED_HOST_DEVICE

namespace patch_embed {

// Number of buffers for the partial sums of a tile that a block receives. Shared of a kernel has
//
//   kVectors                                   vectors of four sums that a thread has
//   partial_sums[buffer][vector][thread][4]    its sums of other blocks
//   sums_arrived[buffer][warp]                 the barriers
constexpr int kSumBuffers = 2;
constexpr int sum_buffers(Sharing sharing) { return sharing == Sharing::kSplit ? kSumBuffers : 0; }

// Index of the first chunk of a block's share. The shares of two blocks differ by at most one chunk.
constexpr PATCH_EMBED_HOST_DEVICE int first_chunk_of_share(int rank, int splits, int chunks) {
  return rank * chunks / splits;
}

}  // namespace patch_embed
