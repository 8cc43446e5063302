// The description of an architecture's kernel for the host. Each architecture has one, kArchitecture
// in its own header, and architectures.h lists them.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace patch_embed {

struct Architecture;

// The template arguments of a kernel, and its number of blocks.
struct Config {
  const Architecture* architecture;
  Type dtype, out_dtype;  // dtype of patches and weight or of images; dtype of y
  bool has_table;         // whether it adds rows of a bfloat16 table or one row of float32 offsets
  int tile_n;             // columns of a tile
  int rows;               // rows of a warpgroup's (Hopper) or a block's (Blackwell) part of a tile
  Sharing sharing;
  int blocks;          // thread blocks of a worker; two or more form a cluster
  int slots;           // slots of the ring of patches
  bool stream_weight;  // whether the weight is loaded for each tile or stays in shared memory

  // Number of blocks among which the chunks of K are split.
  constexpr int splits() const { return sharing == Sharing::kSplit ? blocks : 1; }
};

// Shapes of the operands: patches [M, K], weight [N, K], table [period, N], and the segments of the
// schedule, [workers, segments, 4]. A kernel that cuts images has images [images, height, width, 3]
// instead of patches.
struct Shapes {
  int64_t M, N, K;
  int64_t period;
  int64_t workers, segments;
  int64_t height = 0, width = 0;  // 0 if the operand is patches
};

// The arguments of cuTensorMapEncodeTiled or, if `im2col` is set, of cuTensorMapEncodeIm2col, with
// the innermost dimension first.
struct TensorMap {
  Type type;
  int rank;  // 0 if the kernel has no such map
  cuuint64_t shape[5];
  cuuint64_t strides[4];  // in bytes, from the second dimension on
  cuuint32_t box[5];      // with im2col: channels of a pixel, and number of pixels
  int swizzle;            // in bytes
  bool im2col;
  // With im2col: the offset of the bounding box's last corner from that of the tensor. The offset
  // of the first corner is 0.
  int corner[3];
};

// Returns the tensor map of a row-major matrix. Its boxes are as wide as the swizzle.
inline TensorMap matrix(Type type, int64_t rows, int64_t columns, int box_columns, int box_rows) {
  TensorMap map{};
  map.type = type;
  map.rank = 2;
  map.shape[0] = columns;
  map.shape[1] = rows;
  map.strides[0] = columns * itemsize(type);
  map.box[0] = box_columns;
  map.box[1] = box_rows;
  map.swizzle = box_columns * itemsize(type);
  return map;
}

// Returns the tensor map of images. The channels of a "pixel" are the lines of `patches` (one or two)
// neighbouring patches. The tensor's width is the number of such pixels, its height the lines of a
// patch, and its last dimension the rows of patches of all images. The bounding box is one line high.
// A load starts at a patch and covers `rows` patches in the order of the rows of y; its offset selects
// the line of each patch.
inline TensorMap lines_of_patches(const Shapes& s, int patches, int rows, int swizzle) {
  const int64_t grid_width = s.width / kPatchSide, line = 3 * s.width;
  const int row_bytes = patches * kLineBytes;
  return {Type::kUInt8,
          4,
          {cuuint64_t(row_bytes), cuuint64_t(grid_width / patches), kPatchSide,
           cuuint64_t(s.M / grid_width)},
          {cuuint64_t(row_bytes), cuuint64_t(line), cuuint64_t(kPatchSide * line)},
          {cuuint32_t(row_bytes), cuuint32_t(rows / patches)},
          swizzle,
          true,
          {0, 1 - kPatchSide}};
}

struct Architecture {
  int number;              // the number after `sm` in the names of kernels
  int threads;             // threads of a block
  int multiplying_warps;   // warps of a block that issue products
  int storing_warps;       // warps of a block that store y
  const char* split_name;  // how names of kernels that split K begin the number of blocks

  int (*tile_rows)(const Config&);                     // rows of a tile
  int (*chunks)(const Config&, const Shapes&);         // chunks of the weight
  int (*tensor_memory_columns)(int tile_n);            // 32-bit columns that a block allocates
  TensorMap (*patches)(const Config&, const Shapes&);  // the tensor maps
  TensorMap (*weight)(const Config&, const Shapes&);
  TensorMap (*y)(const Config&, const Shapes&);  // without a rank if TMA does not store y
};

}  // namespace patch_embed
