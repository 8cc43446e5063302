// What the host (binding.cc) and the kernels (patch_embed_sm90.cu, patch_embed_sm100.cu) agree on.
//
// A worker is a thread block or a cluster of two. It owns `tile_n` columns of N for its whole life and
// walks the runs of row tiles that backends/schedule.py gives it.

#pragma once

#include <cuda.h>

#include <cstdint>

// Of functions that the host and the kernels call.
#ifdef __CUDACC__
#define PATCH_EMBED_HOST_DEVICE __host__ __device__
#else
#define PATCH_EMBED_HOST_DEVICE
#endif

namespace patch_embed {

enum class Type { kFloat8E4M3FN, kInt8, kBFloat16, kFloat32 };

constexpr int itemsize(Type type) {
  return type == Type::kFloat32 ? 4 : type == Type::kBFloat16 ? 2 : 1;
}

// Shared memory that a block may have, on both chips.
constexpr int kMostSharedBytes = 227 * 1024;

// Registers of a thread when a kernel begins that is alone on its multiprocessor: the 65536 of the
// multiprocessor, in multiples of 8 (CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0).
// setmaxnreg moves them between warpgroups; a request for more than are left never returns.
constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// Bytes of K in a slot of the ring: a row of the 128-byte swizzle.
constexpr int kRowBytes = 128;

// Sequence of tiles with the same rows of the table; a row of what schedule.runs() returns.
struct Run {
  int32_t first_tile, tiles, stride, table_row;
};

// The kernels' only parameter.
struct Arguments {
  CUtensorMap patches;  // [M, K]
  CUtensorMap weight;   // [N, K], in the view that the kernel wants
  CUtensorMap y;        // [M, N]; where the kernel stores by TMA
  const float* scale;   // [N]
  const void* table;    // [period, N] bfloat16, or [N] float32
  void* out;            // [M, N]
  const Run* runs;      // [workers, runs]
  int32_t M, N;
  int32_t chunks;  // of kRowBytes of K
  int32_t period;  // rows after which the table repeats
  int32_t run_count;  // of a worker
#ifdef PATCH_EMBED_TIMELINE
  uint32_t* timeline;  // timeline.cuh
#endif
};

// The template parameters of a kernel; config.tile_n and so on in Python.
struct Config {
  int capability;  // 90 or 100
  Type dtype, out_dtype;
  bool has_table;  // rows of bfloat16, else one row of float32
  int tile_n;
  int rows;  // of a warpgroup's (Hopper) or block's (Blackwell) share of a tile
  int blocks;  // of a cluster
  int slots;  // of the ring
  bool stream_weight;

  // Two warpgroups on Hopper, the blocks of a cluster on Blackwell.
  constexpr int tile_m() const { return (capability == 90 ? 2 : blocks) * rows; }
};

}  // namespace patch_embed
