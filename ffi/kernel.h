// Declarations for the host (binding.cc) and the kernels (patch_embed_sm*.cu).
//
// A worker is a thread block, or a cluster of blocks that share each tile. It computes the same
// `tile_n` columns of N in all its tiles, and processes the segments of row tiles that
// backends/schedule.py assigns to it.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace patch_embed {

// kUInt8 is the type of images that a kernel cuts itself.
enum class Type { kFloat8E4M3FN, kInt8, kBFloat16, kFloat32, kUInt8 };

constexpr int itemsize(Type type) {
  return type == Type::kFloat32 ? 4 : type == Type::kBFloat16 ? 2 : 1;
}

// The type of the weight: int8 for images. On Hopper it is also the type of the other factor, because
// pixels are converted to int8.
constexpr Type factor_type(Type dtype) { return dtype == Type::kUInt8 ? Type::kInt8 : dtype; }

// Shared memory available to one thread block, in bytes: 227 KiB on Hopper and on Blackwell.
constexpr int kMostSharedBytes = 227 * 1024;

// Registers of each thread at launch if a block is alone on its multiprocessor: an equal share of
// 65536, rounded down to a multiple of 8 (CUDA C++ Programming Guide, compute capabilities 9.0 and
// 10.0). setmaxnreg moves registers between warpgroups. A request for more registers than are free
// waits forever.
constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// Bytes of K in a chunk: one row of the 128-byte swizzle.
constexpr int kRowBytes = 128;

// Constants for images that a kernel cuts itself. TMA loads one line of many patches at once.
constexpr int kPatchSide = 16;
constexpr int kLineBytes = 3 * kPatchSide;

// On Hopper a load has the lines of two neighbouring patches in each row, or of one patch if an
// image has an odd number of patches in a row, because TMA takes 3.2 cycles for a row of 48 bytes and
// at most 4.3 for a row of 96 bytes if all multiprocessors load (docs/experiments/cuda.md). A line
// has 48 bytes of K and a product takes 32, so a slot has two lines, which are three products.
constexpr int kMostRowPatches = 2;
constexpr int kSlotLines = 2;
static_assert(kMostRowPatches == 2, "load_lines divides by a shift of one bit.");
constexpr int row_patches(int64_t grid_width) { return grid_width % 2 ? 1 : kMostRowPatches; }

// A segment of the schedule: tiles of one worker that need the same rows of the table. It is one
// row of the result of schedule.segments(). Its tiles are first_tile, first_tile + stride and so
// on.
struct Segment {
  int32_t first_tile, tiles, stride, table_row;
};

// The only parameter of the kernels.
struct Arguments {
  CUtensorMap patches;      // [M, K]; or images, see lines_of_patches() in architecture.h
  CUtensorMap weight;       // [N, K]; in more dimensions on Hopper, and for images on Blackwell
  CUtensorMap y;            // [M, N]; only for Blackwell kernels that store by TMA
  const float* scale;       // [N]
  const void* table;        // [period, N] bfloat16, or [N] float32
  void* out;                // [M, N]
  const Segment* segments;  // [workers, segment_count]
  int32_t M, N;
  int32_t chunks;         // number of chunks of the weight
  int32_t period;         // number of rows after which the table repeats
  int32_t segment_count;  // number of segments of each worker; those at the end may have no tiles
  int32_t grid_width;     // for images: number of patches in a row of an image
  int32_t row_patches;    // for images on Hopper: patches whose lines form one row of a load
#ifdef PATCH_EMBED_TIMELINE
  uint32_t* timeline;  // see timeline.cuh
#endif
};

// How the blocks of a worker and their warpgroups share a tile.
enum class Sharing {
  kOneBlock,     // one block; on Hopper one consumer warpgroup multiplies its half of a tile while
                 // the other one stores its half (ping-pong)
  kPair,         // two blocks, each with half of the rows (Blackwell)
  kSplit,        // as kOneBlock in each of 2, 4 or kMostSplits blocks, which split K
  kCooperative,  // one block; both warpgroups multiply at the same time and share loads (Hopper)
};
constexpr int kMostSplits = 8;

}  // namespace patch_embed
