// How a worker runs as one block, or as a cluster of blocks that split K and exchange their partial
// sums. split.h describes the barriers.

#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "split.h"

namespace patch_embed {

// The two modes of a worker: one block, or a cluster of blocks that split K.
struct OneBlock {
  __device__ static uint32_t worker() { return blockIdx.x; }
  __device__ static uint32_t rank() { return 0; }
  __device__ static uint32_t count() { return 1; }
  __device__ static void arrive() {}
  __device__ static void wait() {}
};

struct Cluster {
  __device__ static uint32_t worker() { return ptx::clusterid_x(); }
  __device__ static uint32_t rank() { return ptx::cluster_ctarank(); }
  __device__ static uint32_t count() { return ptx::cluster_nctarank(); }
  __device__ static void arrive() { ptx::barrier_cluster_arrive_relaxed(); }
  __device__ static void wait() { ptx::barrier_cluster_wait(); }
};

// A block's part in its cluster. `Sum` is int32_t or float, and `Shared` the kernel's shared memory.
// The threads that have sums are those from `first_thread` on.
template <typename Blocks, typename Sum, typename Shared, int first_thread = 0>
class Split {
 public:
  static constexpr int kVectors = Shared::kVectors;

  __device__ explicit Split(Shared& shared)
      : shared_(shared), rank_(Blocks::rank()), splits_(Blocks::count()) {}

  // Return the index of the first chunk of the block's share, and the index after its last chunk.
  __device__ int first_chunk(int chunks) const {
    return first_chunk_of_share(rank_, splits_, chunks);
  }
  __device__ int end_chunk(int chunks) const {
    return first_chunk_of_share(rank_ + 1, splits_, chunks);
  }

  // Returns whether this block completes vector v.
  __device__ bool completes(int v) const { return v * splits_ / kVectors == rank_; }

  // Sends the thread's sums to the blocks that complete them, and adds up the partial sums of the
  // vectors that this block completes. The other sums remain partial. sum_of(v, i) returns a
  // reference to the thread's i-th sum of vector v, and wait(barrier, parity) waits for a phase.
  template <typename SumOf, typename Wait>
  __device__ void exchange(SumOf sum_of, Wait wait) {
    const int buffer = exchanges_ % kSumBuffers, parity = exchanges_ / kSumBuffers % 2;
    ++exchanges_;
    ptx::Mbarrier& arrived = shared_.sums_arrived[buffer][thread() / 32];
    // Each block begins with the vectors of the next rank, so that not all blocks send to the same
    // block at the same time. The loop visits all vectors twice, because registers cannot be indexed.
#pragma unroll
    for (int i = 0; i < 2 * kVectors; ++i) {
      const uint32_t target = i * splits_ / kVectors;
      if (target <= rank_ || target >= rank_ + splits_) continue;
      const int v = i % kVectors;
      const uint32_t rank = v == i ? target : target - splits_;
      uint32_t words[4];
      for (int j = 0; j < 4; ++j) words[j] = ptx::bits(sum_of(v, j));
      ptx::st_async(ptx::mapa(partial_sums(buffer, v, rank_), rank), words,
                    ptx::mapa(&arrived, rank));
    }
    if (threadIdx.x % 32 == 0) {
      constexpr int kBytes = kVectors * 32 * 16;
      ptx::mbarrier_arrive_expect_tx(arrived, kBytes - kBytes / splits_);
    }
    wait(arrived, parity);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (completes(v)) add_up(sum_of, buffer, v);
    }
  }

 private:
  // The thread's number among those that have sums.
  __device__ static uint32_t thread() { return threadIdx.x - first_thread; }

  // Returns the place of this thread's partial sums of a vector in a buffer of the block that
  // completes the vector. They come from block `source`.
  __device__ uint32_t (&partial_sums(int buffer, int v, uint32_t source))[4] {
    return shared_.partial_sums[buffer][v * splits_ % kVectors + source][thread()];
  }

  // Adds up the partial sums of a vector, always in the order of ranks.
  template <typename SumOf>
  __device__ void add_up(SumOf sum_of, int buffer, int v) {
    union Sums {
      uint4 words;
      Sum sums[4];
    } found[kMostSplits];
#pragma unroll
    for (int source = 0; source < kMostSplits; ++source) {
      if (source < splits_) {
        found[source].words = reinterpret_cast<const uint4&>(partial_sums(buffer, v, source));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Sum& own = sum_of(v, i);
      Sum total = rank_ == 0 ? own : found[0].sums[i];
#pragma unroll
      for (int source = 1; source < kMostSplits; ++source) {
        if (source < splits_) total += source == rank_ ? own : found[source].sums[i];
      }
      own = total;
    }
  }

  Shared& shared_;
  const uint32_t rank_, splits_;
  uint32_t exchanges_ = 0;  // number of exchanges of this warp
};

}  // namespace patch_embed
