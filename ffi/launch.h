// The launch and the tensor maps of a kernel, as a pure function of the kernel and the shapes.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "architecture.h"

namespace patch_embed {

struct Launch {
  int thread_blocks;
  int cluster;            // thread blocks of a cluster
  int threads;            // threads of a block
  int64_t shared_memory;  // dynamic shared memory of a block, in bytes
  int chunks;             // chunks of the weight
  TensorMap patches, weight, y;

  // The remaining members are not needed for the launch. They describe the kernel to tools that
  // model it.
  int multiplying_warps;      // warps of a block that issue products
  int storing_warps;          // warps of a block that store y; the same warps on Hopper
  int tensor_memory_columns;  // columns of 32 bits that a block allocates; 0 on Hopper
  int staying_chunks;         // chunks of the weight that stay in a worker's shared memory
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

// The name of a kernel, which contains its config.
inline std::string kernel_name(const Config& c, const std::string& blocks) {
  return "patch_embed_sm" + std::to_string(c.architecture->number) + "_" + spell(c.dtype) + "_" +
         spell(c.out_dtype) + (c.has_table ? "_table_" : "_offset_") + std::to_string(c.tile_n) +
         "x" + std::to_string(c.rows) + "_" + blocks + "_s" + std::to_string(c.slots) +
         (c.stream_weight ? "_streamed" : "_stationary");
}
inline std::string kernel_name(const Config& c) {
  if (c.sharing == Sharing::kCooperative) return kernel_name(c, "cooperative");
  const bool split = c.sharing == Sharing::kSplit;
  return kernel_name(c, (split ? c.architecture->split_name : "b") + std::to_string(c.blocks));
}

// The name of a kernel's machine code, which PATCH_EMBED_KERNEL in the .cu files composes. Kernels
// that split K among 2, 4 or 8 blocks have the same machine code.
inline std::string symbol_name(const Config& c) {
  return c.splits() > 1 ? kernel_name(c, "split") : kernel_name(c);
}

// A kernel's config and names, for the host.
struct Kernel {
  Kernel(const Config& config, int64_t (*shared_memory_bytes)(int chunks),
         int (*staying_chunks)(int chunks), std::vector<int> capabilities)
      : config(config),
        name(kernel_name(config)),
        symbol(symbol_name(config)),
        shared_memory_bytes(shared_memory_bytes),
        staying_chunks(staying_chunks),
        capabilities(std::move(capabilities)) {}

  Config config;
  std::string name, symbol;
  int64_t (*shared_memory_bytes)(int chunks);  // Shared::bytes of the kernel
  int (*staying_chunks)(int chunks);           // Shared::staying_chunks of the kernel
  std::vector<int> capabilities;               // compute capabilities of the GPUs that run it
};

// These rules of cuTensorMapEncodeIm2col (CUDA driver API) do not depend on the shape of the
// images. check_images() checks the rules for strides and dimensions.
static_assert(kLineBytes % 16 == 0, "strides must be multiples of 16 bytes.");
static_assert(kMostRowPatches * kLineBytes <= 256, "a pixel must have at most 256 channels.");
static_assert(kPatchSide <= 128, "in four dimensions corners must be within 128 pixels.");
static_assert(kPatchSide - 1 <= 255, "in four dimensions an offset must be 0 to 255.");
constexpr int kMostPixels = 1024;
constexpr int64_t kMostStride = (int64_t{1} << 40) - 1, kMostDimension = int64_t{1} << 32;

// Returns why the kernel cannot cut these images, or an empty text.
inline std::string check_images(const Config& config, const Shapes& s) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  const std::string patchify = " Leave cut=None, so that XLA cuts the images.";
  const int side = kPatchSide;
  if (s.K != 3 * side * side) {
    return "K is " + text(s.K) + ", expected " + text(3 * side * side) + ": TMA cuts patches of " +
           text(side) + " x " + text(side) + " pixels." + patchify;
  }
  if (s.height <= 0 || s.height % side || s.width <= 0 || s.width % side) {
    return "images have " + text(s.height) + " x " + text(s.width) +
           " pixels, expected multiples of " + text(side) + ": the kernel cannot drop pixels." +
           patchify;
  }
  if (kPatchSide * 3 * s.width > kMostStride || s.M / (s.width / side) > kMostDimension) {
    return "images have " + text(s.height) + " x " + text(s.width) +
           " pixels, expected at most 2^32 rows of patches of less than 2^40 bytes each." +
           patchify;
  }
  if (s.height / side > kMostDimension / (s.width / side) ||
      s.M % (s.height / side * (s.width / side))) {
    return "y has " + text(s.M) + " rows, expected a multiple of the " + text(s.height / side) +
           " x " + text(s.width / side) + " patches of an image.";
  }
  if (config.stream_weight || config.rows > kMostPixels) {
    return "only kernels that have a stationary weight, and load at most " + text(kMostPixels) +
           " patches at once, can cut images.";
  }
  return "";
}

// Fills `launch`. Returns why the kernel does not support these shapes, or an empty text.
inline std::string launch_of(const Kernel& kernel, const Shapes& s, Launch* launch) {
  const Config& config = kernel.config;
  const Architecture& architecture = *config.architecture;
  const auto text = [](int64_t value) { return std::to_string(value); };
  const int64_t row_bytes = s.K * itemsize(config.dtype);
  if (s.M < 0 || s.M > INT32_MAX - architecture.tile_rows(config)) {
    return "patches have M = " + text(s.M) +
           " rows, expected fewer than 2^31 minus the rows of a tile. Split them.";
  }
  if (row_bytes <= 0 || row_bytes % kRowBytes) {
    return "K is " + text(s.K) + ", expected a multiple of " + text(kRowBytes) +
           " bytes. Pad patches and weight with zeros.";
  }
  if (s.N <= 0 || s.N % config.tile_n) {
    return "N is " + text(s.N) + ", expected a multiple of the kernel's " + text(config.tile_n) +
           " columns. Use a kernel whose columns divide N.";
  }
  if (config.dtype == Type::kUInt8) {
    if (const std::string wrong = check_images(config, s); !wrong.empty()) return wrong;
  }
  const int64_t slices = s.N / config.tile_n;
  if (8 * s.N * itemsize(config.out_dtype) > INT32_MAX || s.K > INT32_MAX || s.period > INT32_MAX ||
      s.segments > INT32_MAX || s.workers > INT32_MAX / (slices * config.blocks)) {
    return "one of these numbers is 2^31 or more: the bytes of eight rows of y, K, the rows of the "
           "table, the segments of a worker, the thread blocks. Split the operands.";
  }
  if (s.workers < 1 || s.segments < 1 || (s.period < 1 && s.M > 0)) {
    return "the schedule has " + text(s.workers) + " workers with " + text(s.segments) +
           " segments each, and the table has " + text(s.period) +
           " rows, expected at least 1 of each. Use the segments of schedule.segments().";
  }
  const int chunks = architecture.chunks(config, s), splits = config.splits();
  if (chunks < splits) {
    return "K is " + text(s.K) + ", expected at least " + text(splits * kRowBytes) + " bytes, " +
           text(kRowBytes) + " for each block. Use a kernel with fewer blocks.";
  }
  const int64_t shared_memory = kernel.shared_memory_bytes((chunks + splits - 1) / splits);
  if (shared_memory > kMostSharedBytes) {
    return "K = " + text(s.K) + " needs " + text(shared_memory) +
           " bytes of shared memory, expected at most " + text(kMostSharedBytes) +
           ". Use a kernel with a streamed weight.";
  }
  *launch = {
      int(slices * s.workers * config.blocks),
      config.blocks,
      architecture.threads,
      shared_memory,
      chunks,
      architecture.patches(config, s),
      architecture.weight(config, s),
      architecture.y(config, s),
      architecture.multiplying_warps,
      architecture.storing_warps,
      architecture.tensor_memory_columns(config.tile_n),
      kernel.staying_chunks(chunks),
  };
  return "";
}

// The JSON texts that the library returns to Python (backends/cuda.py).
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
  return "{\"thread_blocks\": " + std::to_string(launch.thread_blocks) +
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

inline std::string to_json(const Kernel& kernel, bool built) {
  const Config& config = kernel.config;
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::string capabilities;
  for (int one : kernel.capabilities) {
    capabilities += (capabilities.empty() ? "" : ", ") + std::to_string(one);
  }
  return "{\"name\": \"" + kernel.name +
         "\", \"capability\": " + std::to_string(config.architecture->number) + ", \"dtype\": \"" +
         spell(config.dtype) + "\", \"out_dtype\": \"" + spell(config.out_dtype) +
         "\", \"has_table\": " + flag(config.has_table) +
         ", \"tile_m\": " + std::to_string(config.architecture->tile_rows(config)) +
         ", \"tile_n\": " + std::to_string(config.tile_n) +
         ", \"rows\": " + std::to_string(config.rows) +
         ", \"cooperative\": " + flag(config.sharing == Sharing::kCooperative) +
         ", \"blocks\": " + std::to_string(config.blocks) +
         ", \"slots\": " + std::to_string(config.slots) +
         ", \"stream_weight\": " + flag(config.stream_weight) + ", \"built\": " + flag(built) +
         ", \"splits\": " + std::to_string(config.splits()) + ", \"capabilities\": [" +
         capabilities + "]}";
}

}  // namespace patch_embed
