// The timeline. If PATCH_EMBED_TIMELINE is defined, the warps of a block write time stamps of their
// actions to memory, which benchmarks/timeline.py draws. In other builds stamp() does nothing.

#pragma once

#include "kernel.h"
#include "ptx/warp.cuh"

namespace patch_embed {

// The action that has just ended. It took the time since the warp's previous stamp.
enum class Event : uint32_t {
  kFreed = 1,       // a slot of the ring, or a staging buffer, has become free
  kLoadsIssued,     // the loads of a chunk have been issued
  kMayMultiply,     // the other warpgroup's products have been issued, or an accumulator is free
  kFilled,          // a slot has been filled
  kProductsIssued,  // the products of a chunk have been issued
  kMultiplied,      // all products of a tile are done
  kLoaded,          // sums, or rows of the table, have been loaded into registers
  kConverted,       // sums have been scaled, added to and rounded
  kStoresIssued,    // stores have been issued
  kTile,            // the warp has done its part of a tile; took the time since the last kTile
};

#ifdef PATCH_EMBED_TIMELINE

// args.timeline is an array [blocks, warps, kStamps] of clock << 4 | event, with zeros after a
// warp's last stamp. If several lanes stamp together, only the first of them writes.
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

  // Waits until these words have been loaded into registers.
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
