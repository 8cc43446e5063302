// The kernels that are compiled.

#pragma once

#include "kernel.h"

namespace patch_embed {

// Short names of the template arguments, which are parts of the names of kernels:
// patch_embed_sm90_{dtype}_{out_dtype}_{table or offset}_{tile_n}x{rows}_{b1, split or
// cooperative}_s{slots}_{streamed or stationary}. A kernel that splits K has several configs; plan.h
// names them.
namespace spelled {
constexpr Type e4m3 = Type::kFloat8E4M3FN, i8 = Type::kInt8, bf16 = Type::kBFloat16;
constexpr Type f32 = Type::kFloat32, u8 = Type::kUInt8;
constexpr bool table = true, offset = false;
constexpr bool streamed = true, stationary = false;
constexpr Sharing b1 = Sharing::kPingpong, split = Sharing::kSplit;
constexpr Sharing cooperative = Sharing::kCooperative;
}  // namespace spelled

// The instances for every dtype of the result, with a table and with offsets.
// clang-format off
#define PATCH_EMBED_OUTPUTS(X, dtype, ...)                               \
  X(dtype, bf16, table, __VA_ARGS__) X(dtype, bf16, offset, __VA_ARGS__) \
  X(dtype, f32, table, __VA_ARGS__) X(dtype, f32, offset, __VA_ARGS__)
// clang-format on

// The instances of the Hopper kernel: X(dtype, out_dtype, terms, tile_n, rows, sharing, slots,
// weight). `slots` is the number of slots for patches. Kernels for bfloat16 and for images have as
// many slots as fit into shared memory, up to 16. If the weight is stationary, there must also be
// room for the weight of K = 768, or, if K is split, for 12 chunks of it. With 128 columns of
// bfloat16 there is room for the weight of K = 640. Cooperative kernels are for few rows.
// clang-format off
#define PATCH_EMBED_SM90_EVERY_DTYPE(X, dtype)                           \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 64, cooperative, 8, stationary)      \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 64, split, 8, stationary)            \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 64, b1, 7, streamed)                \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 128, b1, 5, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 128, b1, 6, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 128, b1, 8, streamed)
#define PATCH_EMBED_SM90_ONE_BYTE(X, dtype)                              \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 64, b1, 10, stationary)             \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 64, b1, 8, stationary)              \
  PATCH_EMBED_OUTPUTS(X, dtype, 96, 64, b1, 8, stationary)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 96, 64, cooperative, 8, stationary)      \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 64, b1, 8, stationary)               \
  PATCH_EMBED_SM90_EVERY_DTYPE(X, dtype)

#define PATCH_EMBED_SM90_kFloat8E4M3FN(X) PATCH_EMBED_SM90_ONE_BYTE(X, e4m3)
#define PATCH_EMBED_SM90_kInt8(X) PATCH_EMBED_SM90_ONE_BYTE(X, i8)
#define PATCH_EMBED_SM90_kBFloat16(X)                                    \
  PATCH_EMBED_OUTPUTS(X, bf16, 128, 64, b1, 8, stationary)               \
  PATCH_EMBED_OUTPUTS(X, bf16, 96, 64, b1, 10, stationary)               \
  PATCH_EMBED_OUTPUTS(X, bf16, 96, 64, cooperative, 5, stationary)       \
  PATCH_EMBED_OUTPUTS(X, bf16, 64, 64, b1, 16, stationary)               \
  PATCH_EMBED_OUTPUTS(X, bf16, 128, 64, b1, 9, streamed)                 \
  PATCH_EMBED_SM90_EVERY_DTYPE(X, bf16)
#define PATCH_EMBED_SM90_kUInt8(X)                                       \
  PATCH_EMBED_OUTPUTS(X, u8, 192, 64, b1, 13, stationary)                \
  PATCH_EMBED_OUTPUTS(X, u8, 128, 64, b1, 16, stationary)                \
  PATCH_EMBED_OUTPUTS(X, u8, 64, 64, b1, 16, stationary)
#define PATCH_EMBED_SM90_CONFIGS(X)                                                         \
  PATCH_EMBED_SM90_kFloat8E4M3FN(X) PATCH_EMBED_SM90_kInt8(X) PATCH_EMBED_SM90_kBFloat16(X) \
  PATCH_EMBED_SM90_kUInt8(X)
// clang-format on

// The instances of the Blackwell kernel: X(dtype, out_dtype, terms, tile_n, blocks, slots, weight).
// A block computes 128 rows of a tile. There are as many slots as fit into shared memory together
// with the weight of K = 768 and four buffers of 16 KiB, up to 8.
// clang-format off
#define PATCH_EMBED_SM100_STREAMED(X, dtype)                       \
  PATCH_EMBED_OUTPUTS(X, dtype, 256, 2, 5, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 2, 5, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 2, 6, streamed)               \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 2, 8, streamed)                \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 1, 6, streamed)
#define PATCH_EMBED_SM100_ONE_BYTE(X, dtype)                       \
  PATCH_EMBED_OUTPUTS(X, dtype, 256, 2, 4, stationary)             \
  PATCH_EMBED_OUTPUTS(X, dtype, 192, 2, 5, stationary)             \
  PATCH_EMBED_OUTPUTS(X, dtype, 128, 2, 7, stationary)             \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 2, 8, stationary)              \
  PATCH_EMBED_OUTPUTS(X, dtype, 64, 1, 7, stationary)              \
  PATCH_EMBED_SM100_STREAMED(X, dtype)

#define PATCH_EMBED_SM100_kFloat8E4M3FN(X) PATCH_EMBED_SM100_ONE_BYTE(X, e4m3)
#define PATCH_EMBED_SM100_kInt8(X) PATCH_EMBED_SM100_ONE_BYTE(X, i8)
#define PATCH_EMBED_SM100_kBFloat16(X)                             \
  PATCH_EMBED_OUTPUTS(X, bf16, 128, 2, 4, stationary)              \
  PATCH_EMBED_OUTPUTS(X, bf16, 64, 2, 7, stationary)               \
  PATCH_EMBED_OUTPUTS(X, bf16, 64, 1, 4, stationary)               \
  PATCH_EMBED_SM100_STREAMED(X, bf16)
#define PATCH_EMBED_SM100_CONFIGS(X) \
  PATCH_EMBED_SM100_kFloat8E4M3FN(X) PATCH_EMBED_SM100_kInt8(X) PATCH_EMBED_SM100_kBFloat16(X)
// clang-format on

}  // namespace patch_embed
