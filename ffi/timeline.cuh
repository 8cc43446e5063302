// What the roles of a block do when: a build with PATCH_EMBED_TIMELINE writes it to memory.

#pragma once

#include "kernel.h"

namespace patch_embed {

// What has happened; the time since the stamp before was spent on it.
enum class Event { kFreed, kFed, kTurn, kFilled, kIssued, kMultiplied, kLoaded, kStored };

#ifdef PATCH_EMBED_TIMELINE

// What the first thread of a warpgroup stamps: args.timeline is [blocks, warpgroups, kStamps] of
// clock << 8 | event, then zeros.
class Timeline {
 public:
  static constexpr int kStamps = 4096;

  __device__ Timeline(const Arguments& args, int warpgroups)
      : next_(args.timeline + (blockIdx.x * warpgroups + threadIdx.x / 128) * kStamps),
        left_(threadIdx.x % 128 == 0 ? kStamps : 0) {}

  __device__ void stamp(Event event) {
    if (left_ == 0) return;
    --left_;
    *next_++ = static_cast<uint64_t>(clock64()) << 8 | static_cast<uint64_t>(event);
  }

 private:
  uint64_t* next_;
  int left_;
};

#else

class Timeline {
 public:
  __device__ Timeline(const Arguments&, int) {}
  __device__ void stamp(Event) {}
};

#endif

}  // namespace patch_embed
