// The list of architectures that have kernels.

#pragma once

#include "patch_embed_sm100.h"
#include "patch_embed_sm90.h"

// X(architecture, dtype of patches, compute capabilities of the GPUs that run the kernels). Each row
// is compiled from patch_embed_sm{architecture}.cu. CMakeLists.txt and backends/cuda_build.py read
// the rows too. Of the Blackwell GPUs only those of compute capability 10.0 have int8 tensor cores
// (PTX ISA, tcgen05.mma). kUInt8 is the type of images that a kernel cuts itself.
// clang-format off
#define PATCH_EMBED_ARCHITECTURES(X) \
  X(90, kFloat8E4M3FN, 90)           \
  X(90, kInt8, 90)                   \
  X(90, kBFloat16, 90)               \
  X(90, kUInt8, 90)                  \
  X(100, kFloat8E4M3FN, 100, 103)    \
  X(100, kInt8, 100)                 \
  X(100, kBFloat16, 100, 103)        \
  X(100, kUInt8, 100)
// clang-format on
