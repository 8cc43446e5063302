// How a kernel is launched, and what it then does: a pure function of the kernel and the shapes.

#pragma once

#include <cstdint>
#include <string>

#include "kernel.h"
#include "patch_embed_sm100.h"
#include "patch_embed_sm90.h"

namespace patch_embed {

// Shapes of the operands: patches [M, K], weight [N, K], table [period, N], and the segments of the
// schedule, [workers, segments, 4]. A kernel that cuts images gets them instead of patches: [images,
// height, width, 3] pixels.
struct Shapes {
  int64_t M, N, K;
  int64_t period;
  int64_t workers, segments;
  int64_t height = 0, width = 0;  // 0 if there are patches
};

// The arguments of cuTensorMapEncodeTiled, or, if `im2col`, of cuTensorMapEncodeIm2col; innermost
// dimension first.
struct TensorMap {
  Type type;
  int rank;  // 0 if the kernel has no such map
  cuuint64_t shape[5];
  cuuint64_t strides[4];  // in bytes, from the second dimension on
  cuuint32_t box[5];      // of im2col: channels of a pixel, and pixels
  int swizzle;            // in bytes
  bool im2col;
  int corner
      [3];  // of im2col: from the tensor's last pixel to the bounding box's; the first one is 0
};

struct Launch {
  int grid;               // thread blocks
  int cluster;            // thread blocks of a cluster
  int threads;            // threads of a block
  int64_t shared_memory;  // dynamic shared memory of a block, in bytes
  int chunks;             // chunks of kRowBytes in K
  TensorMap patches, weight, y;

  // The launch does not need the rest: it describes the kernel to tools that model it.
  int multiplying_warps;      // warps of a block that issue products
  int storing_warps;          // warps of a block that store y; on Hopper the same warps
  int tensor_memory_columns;  // columns of 32 bits that a block allocates; 0 on Hopper
  int staying_chunks;         // chunks of the weight that are loaded once and stay in shared memory
};

inline const char* spell(Type type) {
  switch (type) {
    case Type::kFloat8E4M3FN:
      return "e4m3";
    case Type::kInt8:
      return "i8";
    case Type::kBFloat16:
      return "bf16";
    case Type::kFloat32:
      return "f32";
    case Type::kUInt8:
      return "u8";
  }
  return "";
}

// The name of a kernel spells its config. PATCH_EMBED_KERNEL in the .cu files spells it the same way.
inline std::string kernel_name(const Config& c) {
  return "patch_embed_sm" + std::to_string(c.capability) + "_" + spell(c.dtype) + "_" +
         spell(c.out_dtype) + (c.has_table ? "_table_" : "_offset_") + std::to_string(c.tile_n) +
         "x" + std::to_string(c.rows) + "_b" + std::to_string(c.blocks) + "_s" +
         std::to_string(c.slots) + (c.stream_weight ? "_streamed" : "_stationary");
}

// A kernel as the host knows it.
struct Kernel {
  Kernel(const Config& config, int64_t (*shared_memory_bytes)(int chunks))
      : config(config), name(kernel_name(config)), shared_memory_bytes(shared_memory_bytes) {}

  Config config;
  std::string name;
  int64_t (*shared_memory_bytes)(int chunks);  // Shared::bytes of the kernel
};

// The map of a row-major matrix, with boxes as wide as their swizzle.
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

// The map of the Hopper kernel's weight: [N, K] as [pairs, N / group, 4, 2, K]. In this order wgmma
// leaves 16 neighbouring bytes of y in a thread (backends/mosaic/layouts.py).
inline TensorMap fragments(const Config& config, int64_t N, int64_t K) {
  const int vector = sm90::vector(config.out_dtype), group = sm90::group(config.out_dtype);
  const cuuint64_t row = K * itemsize(config.dtype);
  return {factor_type(config.dtype),
          5,
          {cuuint64_t(K), 2, 4, cuuint64_t(N / group), cuuint64_t(vector / 2)},
          {row, vector * row, group * row, 2 * row},
          {cuuint32_t(kRowBytes / itemsize(config.dtype)), 2, 4, cuuint32_t(config.tile_n / group),
           cuuint32_t(vector / 2)},
          kRowBytes,
          false,
          {}};
}

// The map of images, see patch_embed_sm90.h.
inline TensorMap lines_of_patches(const Config& config, const Shapes& s) {
  const int64_t grid_width = s.width / kPatchSide, line = 3 * s.width;
  const int patches = row_patches(grid_width), row_bytes = patches * kLineBytes;
  return {config.dtype,
          4,
          {cuuint64_t(row_bytes), cuuint64_t(grid_width / patches), kPatchSide,
           cuuint64_t(s.M / grid_width)},
          {cuuint64_t(row_bytes), cuuint64_t(line), cuuint64_t(kPatchSide * line)},
          {cuuint32_t(row_bytes), cuuint32_t(config.rows / patches)},
          0,
          true,
          {0, 1 - kPatchSide}};
}

// The rules of cuTensorMapEncodeIm2col (CUDA driver API) that hold for all images. Those for strides and
// dimensions are checked for each shape.
static_assert(kLineBytes % 16 == 0, "strides are multiples of 16 bytes.");
static_assert(kMostRowPatches * kLineBytes <= 256, "a pixel has at most 256 channels.");
static_assert(kPatchSide <= 128, "corners of four dimensions are within 128 of the tensor's.");
static_assert(kPatchSide - 1 <= 255, "offsets of four dimensions are 0 to 255.");
constexpr int kMostPixels = 1024;
constexpr int64_t kMostStride = (int64_t{1} << 40) - 1, kMostDimension = int64_t{1} << 32;

// What is wrong with images for a kernel that cuts them, or an empty text.
inline std::string check_images(const Config& config, const Shapes& s) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  const std::string patchify = " Leave cut=None: then XLA cuts the images.";
  const int side = kPatchSide;
  if (s.K != 3 * side * side) {
    return "K is " + text(s.K) + ", expected " + text(3 * side * side) + ": TMA cuts patches of " +
           text(side) + " x " + text(side) + " pixels." + patchify;
  }
  if (s.height <= 0 || s.height % side || s.width <= 0 || s.width % side) {
    return "images have " + text(s.height) + " x " + text(s.width) +
           " pixels, expected multiples of " + text(side) + ": TMA cuts without a remainder." +
           patchify;
  }
  if (kPatchSide * 3 * s.width > kMostStride || s.M / (s.width / side) > kMostDimension) {
    return "images have " + text(s.height) + " x " + text(s.width) +
           " pixels, expected rows of patches of less than 2^40 bytes, and at most 2^32 of them." +
           patchify;
  }
  if (s.M % (s.height / side * (s.width / side))) {
    return "y has " + text(s.M) + " rows, expected a multiple of the " +
           text(s.height / side * (s.width / side)) + " patches of an image.";
  }
  if (config.capability != 90 || config.stream_weight || config.rows > kMostPixels) {
    return "images are cut by Hopper's kernels with a stationary weight alone, and by loads of at "
           "most " +
           text(kMostPixels) + " patches.";
  }
  return "";
}

// Fills `launch`. Returns what is wrong with the shapes, or an empty text.
inline std::string plan(const Kernel& kernel, const Shapes& s, Launch* launch) {
  const Config& config = kernel.config;
  const auto text = [](int64_t value) { return std::to_string(value); };
  const int64_t row_bytes = s.K * itemsize(config.dtype);
  if (s.M < 0 || s.M > INT32_MAX - config.tile_m()) {
    return "patches have M = " + text(s.M) +
           " rows, expected fewer than 2^31 less a tile. Split them.";
  }
  if (row_bytes <= 0 || row_bytes % kRowBytes) {
    return "K is " + text(s.K) + ", expected a multiple of " + text(kRowBytes) +
           " bytes. Pad patches and weight with zeros.";
  }
  if (s.N <= 0 || s.N % config.tile_n) {
    return "N is " + text(s.N) + ", expected a multiple of the kernel's " + text(config.tile_n) +
           " columns. Take a kernel whose columns divide N.";
  }
  const bool images = config.dtype == Type::kUInt8;
  if (images) {
    if (const std::string wrong = check_images(config, s); !wrong.empty()) return wrong;
  }
  const int64_t slices = s.N / config.tile_n;
  if (8 * s.N * itemsize(config.out_dtype) > INT32_MAX || s.K > INT32_MAX || s.period > INT32_MAX ||
      s.segments > INT32_MAX || s.workers > INT32_MAX / (slices * config.blocks)) {
    return "eight rows of y, K, the rows of the table or the segments are 2^31 or more. "
           "Split the operands.";
  }
  if (s.workers < 1 || s.segments < 1 || (s.period < 1 && s.M > 0)) {
    return "the segments are those of " + text(s.workers) + " workers with " + text(s.segments) +
           " segments each, and the table has " + text(s.period) +
           " rows, expected at least 1 of each. Take those of schedule.segments().";
  }
  const int chunks = int(row_bytes / kRowBytes);
  const int64_t shared_memory = kernel.shared_memory_bytes(chunks);
  const bool hopper = config.capability == 90;
  if (shared_memory > kMostSharedBytes) {
    return "K = " + text(s.K) + " needs " + text(shared_memory) +
           " bytes of shared memory, there are " + text(kMostSharedBytes) +
           ". Take a kernel with a streamed weight.";
  }
  const int tile_k = kRowBytes / itemsize(config.dtype);
  *launch = {
      int(slices * s.workers * config.blocks),
      config.blocks,
      hopper ? sm90::kThreads : sm100::kThreads,
      shared_memory,
      chunks,
      images ? lines_of_patches(config, s) : matrix(config.dtype, s.M, s.K, tile_k, config.rows),
      hopper ? fragments(config, s.N, s.K)
             : matrix(config.dtype, s.N, s.K, tile_k, config.tile_n / config.blocks),
      hopper ? TensorMap{}
             : matrix(config.out_dtype, s.M, s.N,
                      sm100::store_columns(config.out_dtype, config.tile_n), sm100::kWarpRows),
      hopper ? sm90::kMultiplyingWarps : sm100::kMultiplyingWarps,
      hopper ? sm90::kMultiplyingWarps : sm100::kStoringWarps,
      hopper ? 0 : sm100::tensor_memory_columns(config.tile_n),
      !config.stream_weight ? chunks
      : hopper              ? sm90::staying_chunks(config.rows, chunks)
                            : 0,
  };
  return "";
}

// JSON, in which the library tells Python what it knows (backends/cuda.py).
inline std::string to_json(const TensorMap& map) {
  if (!map.rank) return "null";
  const auto list = [](auto* values, int size) {
    std::string text = "[";
    for (int i = 0; i < size; i++) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + "]";
  };
  return std::string("{\"type\": \"") + spell(map.type) +
         "\", \"shape\": " + list(map.shape, map.rank) +
         ", \"strides\": " + list(map.strides, map.rank - 1) +
         ", \"box\": " + list(map.box, map.im2col ? 2 : map.rank) +
         (map.im2col ? ", \"corner\": " + list(map.corner, map.rank - 2) : "") +
         ", \"swizzle\": " + std::to_string(map.swizzle) + "}";
}

inline std::string to_json(const Launch& launch) {
  return "{\"grid\": " + std::to_string(launch.grid) +
         ", \"cluster\": " + std::to_string(launch.cluster) +
         ", \"threads\": " + std::to_string(launch.threads) +
         ", \"shared_memory\": " + std::to_string(launch.shared_memory) +
         ", \"chunks\": " + std::to_string(launch.chunks) +
         ", \"patches\": " + to_json(launch.patches) + ", \"weight\": " + to_json(launch.weight) +
         ", \"y\": " + to_json(launch.y) +
         ", \"multiplying_warps\": " + std::to_string(launch.multiplying_warps) +
         ", \"storing_warps\": " + std::to_string(launch.storing_warps) +
         ", \"tensor_memory_columns\": " + std::to_string(launch.tensor_memory_columns) +
         ", \"staying_chunks\": " + std::to_string(launch.staying_chunks) + "}";
}

inline std::string to_json(const Config& config, bool built) {
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  return "{\"name\": \"" + kernel_name(config) +
         "\", \"capability\": " + std::to_string(config.capability) + ", \"dtype\": \"" +
         spell(config.dtype) + "\", \"out_dtype\": \"" + spell(config.out_dtype) +
         "\", \"has_table\": " + flag(config.has_table) +
         ", \"tile_m\": " + std::to_string(config.tile_m()) +
         ", \"tile_n\": " + std::to_string(config.tile_n) +
         ", \"rows\": " + std::to_string(config.rows) +
         ", \"blocks\": " + std::to_string(config.blocks) +
         ", \"slots\": " + std::to_string(config.slots) +
         ", \"stream_weight\": " + flag(config.stream_weight) + ", \"built\": " + flag(built) + "}";
}

}  // namespace patch_embed
