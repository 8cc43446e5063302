// What the warps of a block do when: a build with PATCH_EMBED_TIMELINE writes it to memory, which
// benchmarks/timeline.py shows.

#pragma once

#include "kernel.h"
#include "ptx/warp.cuh"

namespace patch_embed {

// What has happened; the time since the stamp before was spent on it.
enum class Event : uint32_t {
  kFreed = 1,   // a slot of the ring, or a buffer to store from, is free
  kFed,         // the loads of a slot are issued
  kTurn,        // the tensor cores are this warpgroup's, or an accumulator is free
  kFilled,      // a slot is loaded
  kIssued,      // the products of a slot are issued
  kMultiplied,  // all products of a tile are done
  kLoaded,      // what is stored next is in registers: sums, or rows of the table
  kConverted,   // it is scaled, added to and rounded
  kStored,      // its stores are issued
  kTile,        // the warp has done its part of a tile: all since the same event before
};

#ifdef PATCH_EMBED_TIMELINE

// args.timeline is [blocks, warps, kStamps] of clock << 4 | event, zeros behind the last one. Lanes
// that stamp stay together; the first of them writes.
class Timeline {
 public:
  static constexpr uint32_t kStamps = 8192;

  __device__ explicit Timeline(const Arguments& args) : args_(args) {}

  __device__ void stamp(Event event) {
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const uint32_t now = ptx::clock() << 4 | static_cast<uint32_t>(event);
    const uint32_t lanes_before = (1u << threadIdx.x % 32) - 1;
    if (made_ < kStamps && !(__activemask() & lanes_before)) {
      args_.timeline[uint64_t{warp} * kStamps + made_] = now;
    }
    ++made_;
  }

  // The stamps behind this one come when these words are in registers.
  template <int count>
  __device__ void await(const uint32_t (&words)[count]) {
#pragma unroll
    for (uint32_t word : words) ptx::membar_cta_if(word);
  }

 private:
  const Arguments& args_;
  uint32_t made_ = 0;
};

#else

class Timeline {
 public:
  __device__ explicit Timeline(const Arguments&) {}
  __device__ void stamp(Event) {}
  template <int count>
  __device__ void await(const uint32_t (&)[count]) {}
};

#endif

}  // namespace patch_embed
