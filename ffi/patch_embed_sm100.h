// Properties of the Blackwell kernel that the host needs: threads, tuning, shared memory and tensor
// maps.
//
// The barriers of a block:
//
//   barrier               arrivals per phase   who waits              the n-th phase completes when
//   filled[slot]          1 and bytes: the     multiply               the slot's n-th patches (or
//                         first block's feed                          lines of pixels) and weight
//                                                                     have arrived, in all blocks
//   freed[slot]           1: tcgen05.commit    feed, before it fills  the products of the slot's
//                         of multiply          the slot again and     n-th patches and weight are
//                                              before it exits        done
//   multiplied[i]         1: tcgen05.commit    the storing warps      the products of tile 2 n + i
//                         of multiply                                 are in accumulator i
//   accumulator_freed[i]  8 per block: its     multiply, before it    the storing warps have loaded
//                         storing warps        fills accumulator i    tile 2 n + i, or stored it
//                                              again                  (Tuning::kRelease)
//                                                                     With images the corrections of
//                                                                     the pixels come before the first
//                                                                     tile, as if they were one
//   sums_arrived[buffer][warp], only if K is split: see split.h
//
// `try_wait` sees only a phase's parity, so a waiter must know that the previous phase completed:
// each role waits for every phase of its barriers, one after another.
//
// Each block of a pair has these barriers. Only the first block's filled and accumulator_freed are
// used: loads and storing warps of both blocks arrive there. tcgen05.commit arrives at freed and
// multiplied of both blocks.
//
// How a block starts and ends. "Synchronise" is a barrier of all threads of the block, or of both
// blocks of a pair:
//
//   step                    performed by           explanation
//   initialise mbarriers    thread 0               fence.mbarrier_init publishes them to TMA, to the
//                                                  tensor cores and, by the next step, to the peer
//   wait for the peer       both blocks, relaxed   a pair may allocate only when both blocks have been
//                                                  launched, and no block is signalled before its
//                                                  barriers exist
//   arrive at the cluster   all threads, relaxed   only if K is split, in place of the wait for the
//                                                  peer: no block sends sums before other blocks have
//                                                  started and made their barriers. The storing
//                                                  warps wait before their first tile, the other warps
//                                                  when their role is over
//   allocate, relinquish    one warp of a block    both blocks of a pair do it collectively
//   write constants         two threads            only with images: the tensor cores multiply them
//   synchronise             all threads            publishes the address of tensor memory
//   setmaxnreg              each warpgroup         the first warpgroup releases registers that the
//                                                  storing warpgroups take
//   feed, multiply, store   each role
//   wait for freed[slot]    feed, of each block    after the last use of every slot: no commit to this
//                                                  block is pending, and all loads have arrived
//   wait for multiplied     store                  for every tile: the last commit has arrived
//   wait for stores' reads  store                  TMA has read the staging buffers. If K is split, y
//                                                  is written by ordinary stores instead, after the
//                                                  warps have waited for all partial sums
//   synchronise             all threads            the peer has arrived at accumulator_freed, and no
//                                                  thread uses tensor memory any more
//   deallocate              the allocating warp    a pair does it collectively, after both blocks have
//                                                  allocated; then the block exits

#pragma once

#include <cstdint>

#include "architecture.h"
#include "configs.h"
#include "kernel.h"
#include "split.h"

namespace patch_embed::sm100 {

// A block has one warpgroup whose first warps load and multiply, and two warpgroups that store.
constexpr int kStorers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (1 + kStorers) * kWarpgroup;
constexpr int kMultiplyingWarps = 1, kStoringWarps = kStorers * kWarpgroup / 32;

// Rows of a block's part of a tile.
constexpr int kRows = 128;

// Rows of tensor memory that a warp can read. This is also the number of rows of a TMA store.
constexpr int kWarpRows = 32;

// Number of accumulators in tensor memory: one tile is multiplied while the previous one is stored.
constexpr int kAccumulators = 2;

// Number of 32-bit columns of a multiprocessor's tensor memory, and number of columns that a block
// allocates, which must be a power of two.
constexpr int kTensorMemory = 512;
constexpr int tensor_memory_columns(int tile_n) {
  const int needed = kAccumulators * tile_n;
  return needed <= 128 ? 128 : needed <= 256 ? 256 : 512;
}

// Columns of a TMA store. Its rows have 128 bytes, or 64 bytes if a warp's part of a row of y is
// not a multiple of 128 bytes.
constexpr int store_columns(Type out_dtype, int tile_n) {
  const int warp_bytes = tile_n / kStorers * itemsize(out_dtype);
  return kRowBytes / itemsize(out_dtype) / (warp_bytes % kRowBytes ? 2 : 1);
}

// The time from which the next products may overwrite the accumulator of a tile.
enum class Release {
  kLoaded,  // when the tile's sums are in registers
  kStored,  // when the tile's stores have been issued
};

// Parameters of the storing warps, which do not change the result. The kernels are built with these
// values. A variant is a struct that inherits from Tuning, hides the members that it changes, and
// is the last template argument of Worker.
template <Type out_dtype, int tile_n, int slots>
struct Tuning {
  // Columns of an accumulator that a warp loads before one tcgen05.wait::ld: as many as fit into
  // registers in addition to scale and table. The value must divide the warp's tile_n / 2 columns.
  static constexpr int kStepColumns = tile_n < 256                  ? tile_n / 2
                                      : out_dtype == Type::kFloat32 ? 32
                                                                    : 64;

  // Columns of one tcgen05.ld of 16 rows: 16, 32 or 64. The value must divide kStepColumns.
  static constexpr int kLoadColumns = kStepColumns % 64 ? 32 : 64;

  // Number of staging buffers of a storing warp in shared memory, a power of two. Each buffer holds
  // the data of one TMA store. With 256 columns only one fits beside six slots and a weight that
  // stays, and beside five slots a second one would leave no room for chunks of a streamed weight.
  static constexpr int kStagingBuffers = tile_n == 256 && slots > 4 ? 1 : 2;

  // Number of stores that share a fence and a bulk group; with 1 each store is issued as soon as it
  // is staged. The value must divide the stores of a step and the number of buffers.
  static constexpr int kStoresPerGroup = 1;

  static constexpr Release kRelease = Release::kLoaded;

  // Number of cycles by which the warps of the second storing warpgroup start a tile later than
  // those of the first, with which they share a scheduler.
  static constexpr int kStaggerCycles = 0;

  // Whether a warp's part of the table stays in registers for a segment. If not, it is loaded for
  // each tile.
  static constexpr bool kKeepTable = true;
};

// Number of blocks that share the rows of a tile and its products: those of a pair.
constexpr int row_blocks(Sharing sharing) { return sharing == Sharing::kPair ? 2 : 1; }

// Bytes of a row of patches or of the weight in a slot, which is also the width of the swizzle:
// kRowBytes of K or, with images, one line of a patch. TMA writes kLineBytes of each line of pixels,
// and leaves alone the gap of 16 bytes that follows. What lies there is multiplied by zeros: a line
// of the weight ends after kLineBytes, and TMA fills the rest of its box with zeros. An integer times
// zero is zero, so the gap may hold anything.
constexpr int kLineSwizzle = 64;
static_assert(kLineBytes <= kLineSwizzle, "a line must fit into a row of the swizzle.");
constexpr int slot_row_bytes(Type dtype) {
  return dtype == Type::kUInt8 ? kLineSwizzle : kRowBytes;
}

// Shared memory of a block, which starts at a multiple of 1024 bytes because of the swizzle:
//
//   patches[slot]          kRows rows of slot_row_bytes
//   staged[warp][buffer]   data of one TMA store: kWarpRows rows of 128 or 64 bytes of y, swizzled.
//                          Nothing is staged if K is split
//   partial_sums           only if K is split: see split.h
//   barriers
//   corrections            only with images: -128 times the sum of each column's weights
//   address of tensor memory
//   weight                 after Shared: [tile_n / row_blocks, slot_row_bytes] for each chunk of K (of
//                          the block's share of K). If the weight is streamed, for each slot, followed
//                          by the chunks that stay
template <Type dtype, Type out_dtype, int tile_n, Sharing sharing, int slots, bool stream_weight,
          typename Tuned = Tuning<out_dtype, tile_n, slots>>
struct alignas(1024) Shared {
  static constexpr int kStoreBytes = store_columns(out_dtype, tile_n) * itemsize(out_dtype);
  static constexpr int kSlotRowBytes = slot_row_bytes(dtype);
  static constexpr int kWeightBytes = tile_n / row_blocks(sharing) * kSlotRowBytes;
  static constexpr int kStagingBuffers = sharing == Sharing::kSplit ? 0 : Tuned::kStagingBuffers;

  // Vectors of four sums that a storing thread has of a tile, and its buffers for those of other
  // blocks.
  static constexpr int kVectors = kRows * tile_n / (kStorers * kWarpgroup) / 4;
  static constexpr int kBuffers = sum_buffers(sharing);

  uint8_t patches[slots][kRows * kSlotRowBytes];
  uint8_t staged[kStoringWarps][kStagingBuffers][kWarpRows * kStoreBytes];
  uint32_t partial_sums[kBuffers][kVectors][kStorers * kWarpgroup][4];
  uint64_t sums_arrived[kBuffers][kStoringWarps];
  uint64_t filled[slots], freed[slots];
  uint64_t multiplied[kAccumulators], accumulator_freed[kAccumulators];
  // Not the last member: behind an array without elements nvcc 13.0 places the weight, at
  // `&shared + 1`, inside of the padding.
  int32_t corrections[dtype == Type::kUInt8 ? tile_n : 0];
  uint32_t tensor_memory;

  // Number of chunks of a streamed weight for which there is room beside the ring. They are the first
  // ones, and stay.
  static constexpr int most_staying() {
    const int room = kMostSharedBytes - int(sizeof(Shared)) - slots * kWeightBytes;
    return room > 0 ? room / kWeightBytes : 0;
  }

  // Number of chunks of the weight that stay, if K has `chunks` chunks.
  static constexpr int staying_chunks(int chunks) {
    return stream_weight && most_staying() < chunks ? most_staying() : chunks;
  }

  // Bytes of this struct and of the weight that follows it.
  static constexpr int64_t bytes(int chunks) {
    const int parts = staying_chunks(chunks) + (stream_weight ? slots : 0);
    return int64_t{sizeof(Shared)} + int64_t{parts} * kWeightBytes;
  }
};

// The tensor maps, with the innermost dimension first. The swizzle is as wide as the box's
// innermost dimension.
//
//   patches   [K, M], boxes of [kRowBytes of K, kRows]
//   images    lines of one patch, for kRows patches
//   weight    [K, N], boxes of [kRowBytes of K, tile_n / row_blocks]. With images [kLineBytes, N,
//             kPatchSide], boxes of [kLineSwizzle, tile_n / row_blocks, 1]: the bytes behind a line
//             are outside of the tensor, so TMA fills them with zeros, and counts them as loaded
//   y         [N, M], boxes of [store_columns, kWarpRows]; none if K is split

inline TensorMap patches_map(const Config& config, const Shapes& s) {
  if (config.dtype == Type::kUInt8) return lines_of_patches(s, 1, kRows, kLineSwizzle);
  return matrix(config.dtype, s.M, s.K, kRowBytes / itemsize(config.dtype), kRows);
}

inline TensorMap weight_map(const Config& config, const Shapes& s) {
  const int rows = config.tile_n / row_blocks(config.sharing);
  if (config.dtype != Type::kUInt8) {
    return matrix(config.dtype, s.N, s.K, kRowBytes / itemsize(config.dtype), rows);
  }
  return {Type::kInt8,
          3,
          {kLineBytes, cuuint64_t(s.N), kPatchSide},
          {cuuint64_t(s.K), kLineBytes},
          {kLineSwizzle, cuuint32_t(rows), 1},
          kLineSwizzle,
          false,
          {}};
}

inline constexpr Architecture kArchitecture = {
    /*number=*/100,
    kThreads,
    kMultiplyingWarps,
    kStoringWarps,
    /*split_name=*/"split",
    /*tile_rows=*/[](const Config& config) { return row_blocks(config.sharing) * config.rows; },
    /*chunks=*/
    [](const Config& config, const Shapes& s) {
  return config.dtype == Type::kUInt8 ? kPatchSide : int(s.K * itemsize(config.dtype) / kRowBytes);
},
    tensor_memory_columns,
    patches_map,
    weight_map,
    /*y=*/
    [](const Config& config, const Shapes& s) {
  if (config.splits() > 1) return TensorMap{};
  return matrix(config.out_dtype, s.M, s.N, store_columns(config.out_dtype, config.tile_n),
                kWarpRows);
},
};

// Shared of a kernel in the list below.
template <Type dtype, Type out_dtype, bool, int tile_n, int rows, Sharing sharing, int slots,
          bool weight>
using SharedOf = Shared<dtype, out_dtype, tile_n, sharing, slots, weight>;

// The kernels that are compiled for each dtype: X(dtype, out_dtype, terms, tile_n, rows, sharing,
// slots, weight). There are as many slots as fit into shared memory together with the weight of
// K = 768 and two staging buffers for each storing warp of 4 KiB, up to 8. Of kernels that are
// equally fast by the estimate the first is chosen: the one with more slots, which fit beside one
// buffer (256 columns) or smaller ones (192 columns in bfloat16), because the audit predicts that
// the latency of loads limits fewer slots (docs/experiments/blackwell.md). Kernels that split K have
// as many slots as fit together with 12 chunks of the weight. A slot of images has one line, and there
// are at most as many as a patch has lines.
// clang-format off
#define PATCH_EMBED_SM100_EVERY_DTYPE(X, dtype)                    \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, split, 4, stationary)          \
  PATCH_EMBED_OUTPUTS(X, dtype, 256, 128, b2, 5, streamed)              \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 128, b2, 5, streamed)              \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 128, b2, 6, streamed)              \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, b2, 8, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, b1, 6, streamed)
#define PATCH_EMBED_SM100_ONE_BYTE(X, dtype)                       \
  PATCH_EMBED_OUTPUTS(X, dtype, 256, 128, b2, 6, stationary)            \
  PATCH_EMBED_OUTPUTS(X, dtype, 256, 128, b2, 4, stationary)            \
  PATCH_EMBED_TERMS(X, dtype, bf16, 192, 128, b2, 7, stationary)        \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 128, b2, 5, stationary)            \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 128, b2, 7, stationary)            \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, b2, 8, stationary)             \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, b1, 7, stationary)             \
  PATCH_EMBED_SM100_EVERY_DTYPE(X, dtype)

#define PATCH_EMBED_SM100_kFloat8E4M3FN(X) PATCH_EMBED_SM100_ONE_BYTE(X, e4m3)
#define PATCH_EMBED_SM100_kInt8(X) PATCH_EMBED_SM100_ONE_BYTE(X, i8)
#define PATCH_EMBED_SM100_kBFloat16(X)                             \
  PATCH_EMBED_OUTPUTS(X, bf16, 128, 128, b2, 4, stationary)             \
  PATCH_EMBED_OUTPUTS(X, bf16, 64, 128, b2, 7, stationary)              \
  PATCH_EMBED_OUTPUTS(X, bf16, 64, 128, b1, 4, stationary)              \
  PATCH_EMBED_SM100_EVERY_DTYPE(X, bf16)
#define PATCH_EMBED_SM100_kUInt8(X)                                \
  PATCH_EMBED_OUTPUTS(X, u8, 256, 128, b2, 8, stationary)               \
  PATCH_EMBED_TERMS(X, u8, bf16, 192, 128, b2, 12, stationary)          \
  PATCH_EMBED_TERMS(X, u8, f32, 192, 128, b2, 8, stationary)            \
  PATCH_EMBED_OUTPUTS(X, u8, 128, 128, b2, 12, stationary)              \
  PATCH_EMBED_OUTPUTS(X, u8, 64, 128, b2, 16, stationary)               \
  PATCH_EMBED_OUTPUTS(X, u8, 64, 128, b1, 12, stationary)
// clang-format on

}  // namespace patch_embed::sm100
