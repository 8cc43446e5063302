// Names with which the architectures' headers list the kernels that are compiled.

#pragma once

#include "kernel.h"

namespace patch_embed {

// Short names of the template arguments, which are parts of the names of kernels:
// patch_embed_sm90_{dtype}_{out_dtype}_{table or offset}_{tile_n}x{rows}_{b1, b2, split or
// cooperative}_s{slots}_{streamed or stationary}. A kernel that splits K has several configs, whose
// names have split2, split4 or split8 instead; on Hopper, which has no pairs, b2, b4 or b8. The lists of kernels have these arguments in the order of the name.
namespace spelled {
constexpr Type e4m3 = Type::kFloat8E4M3FN, i8 = Type::kInt8, bf16 = Type::kBFloat16;
constexpr Type f32 = Type::kFloat32, u8 = Type::kUInt8;
constexpr bool table = true, offset = false;
constexpr bool streamed = true, stationary = false;
constexpr Sharing b1 = Sharing::kOneBlock, b2 = Sharing::kPair;
constexpr Sharing split = Sharing::kSplit, cooperative = Sharing::kCooperative;
}  // namespace spelled

// The instances with a table and with offsets, for one dtype of the result and for every one.
// clang-format off
#define PATCH_EMBED_TERMS(X, dtype, out_dtype, ...) \
  X(dtype, out_dtype, table, __VA_ARGS__) X(dtype, out_dtype, offset, __VA_ARGS__)
#define PATCH_EMBED_OUTPUTS(X, dtype, ...) \
  PATCH_EMBED_TERMS(X, dtype, bf16, __VA_ARGS__) PATCH_EMBED_TERMS(X, dtype, f32, __VA_ARGS__)
// clang-format on

}  // namespace patch_embed
