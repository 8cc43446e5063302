// Properties of the Hopper kernel that the host needs: threads, shared memory, tensor maps.
//
// The barriers of a block:
//
//   barrier             arrivals per phase     who waits             the n-th phase completes when
//   filled[slot]        1 and bytes: producer  a consumer            the slot's n-th patches, and
//                                              warpgroup; both if    the weight loaded with them,
//                                              they are cooperative  have arrived
//   freed[slot]         4: the warps of the    producer, before it   the products of the slot's n-th
//                       warpgroup that reads   fills the slot again  patches are done, or its n-th
//                       the slot; 8 of both                          pixels are in registers
//                       if they are cooperative
//   weight_freed[slot]  4: the same warps      producer, before it   the products of the n-th chunk
//                                              fills the slot again  in this slot of the weight are
//                                                                    done
//   other_products_issued[warpgroup], only with ping-pong
//                       4: the warps of the    that warpgroup,       the other warpgroup has issued
//                       other warpgroup        before its products   all products of its n-th tile;
//                                                                    with images all but those of
//                                                                    the last kChunksAfterHandover
//                                                                    chunks
//   columns_arrived     1 and bytes: producer  both consumer         scale has arrived, and offset if
//                                              warpgroups, once      there is no table
//   sums_arrived[buffer][warp], only if K is split: see split.h
//
// `try_wait` sees only a phase's parity, so a waiter must know that the previous phase completed.
// The producer waits for every phase of freed and weight_freed, one after another. Cooperative
// warpgroups both wait for every phase of filled, one after another.
//
// With ping-pong a consumer warpgroup waits only for the phases of filled that belong to its own
// half tiles. But before its products it waits for other_products_issued, whose phase completes
// only when the other warpgroup has issued the products of all earlier half tiles, and so has
// waited for their phases. This arrival is called the handover. It also tells warpgroup 1 that a
// stationary weight has arrived. For its n-th tile warpgroup 1 waits for phase n of
// other_products_issued[1], and warpgroup 0 for phase n - 1 of other_products_issued[0]. Warpgroup
// 0's first wait passes immediately, because a new barrier reports the phase before phase 0 as
// complete.
//
// With images a warpgroup hands over before it has issued the products of its last
// kChunksAfterHandover chunks, except in its first tile, whose chunks are loaded with the weight.
// The other warpgroup then does not know whether the phases of these chunks have completed. It does
// not need to know this: the ring has at least kChunksAfterHandover more slots than a half tile has
// chunks, so the previous load of each slot that it waits for is older than these chunks.
//
// How a block starts and ends:
//
//   step                   performed by          explanation
//   read a segment         all threads           only with narrow slices: the worker's first segment
//                                                arrives while the next two steps are performed
//   initialise mbarriers   thread 0              fence.mbarrier_init publishes them to TMA, and to
//                                                the other blocks of the cluster
//   __syncthreads          all threads           no thread uses a barrier before it exists
//   barrier.cluster        all threads arrive;   only if K is split: no block sends sums before the
//                          consumers wait before other blocks have started and made their barriers.
//                          their first tile, the The producer waits so that no thread leaves out
//                          producer at its end   the wait
//   setmaxnreg             each warpgroup        the producer releases registers that consumers take
//   feed                   one thread            it exits after its last load, before the block does
//   multiply and store     two warpgroups        they wait for every phase of filled, so all loads
//                                                have arrived, for all products and, if K is split,
//                                                for all partial sums; y is written by ordinary stores

#pragma once

#include <cstdint>

#include "architecture.h"
#include "configs.h"
#include "kernel.h"
#include "split.h"

namespace patch_embed::sm90 {

// A block has two consumer warpgroups, which multiply and store, and one producer warpgroup, of which
// a single thread issues the loads.
constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kMultiplyingWarps = kConsumers * kWarpgroup / 32;

// Number of contiguous columns of y that a thread stores at once: 16 bytes, or four columns if K is
// split, so that a tile has enough vectors for eight blocks.
constexpr int vector(Type out_dtype, bool split) { return split ? 4 : 16 / itemsize(out_dtype); }

// Number of contiguous columns that the four threads of a row store at once.
constexpr int group(Type out_dtype, bool split) { return 4 * vector(out_dtype, split); }

// Rows of a part. A thread converts and stores its share of a tile part by part. One wgmma has 64
// rows, of which a thread has two, and a part is one vector of each of these two rows.
constexpr int kPartRows = 2;

// Registers of a consumer thread for the sums of one tile.
constexpr int sum_registers(int tile_n, int rows) { return rows / 64 * tile_n / 2; }

// Registers of a consumer thread for the scale, which is float32.
constexpr int scale_registers(int tile_n) { return tile_n / 4; }

// Registers of a consumer thread for the terms. The terms are added to the scaled sums: they are
// rows of a table, with two bfloat16 numbers in a register, or one row of float32 offsets.
constexpr int term_registers(bool has_table, int tile_n, int rows) {
  return tile_n / 4 * (has_table ? rows / 64 * kPartRows / 2 : 1);
}

// Bytes of each row in a slot of the ring: kRowBytes of K, or with images two lines of a patch.
constexpr int slot_row_bytes(Type dtype) {
  return dtype == Type::kUInt8 ? kSlotLines * kLineBytes : kRowBytes;
}

// Registers of a consumer thread for pixels: those of two slots whose products are in flight or
// about to be issued, and of a third slot that is being loaded. The tensor cores read patches from
// shared memory, but pixels from registers, where they are converted to int8.
constexpr int kPixelBuffers = 3;
constexpr int pixel_registers(Type dtype, int rows) {
  const int slot = rows * slot_row_bytes(dtype) / kWarpgroup / 4;
  return dtype == Type::kUInt8 ? kPixelBuffers * slot : 0;
}

// Registers that a consumer thread needs in addition to sums, scale and terms: for addresses, loop
// counters, and the part that is being converted. The number was chosen from reports of ptxas
// (nvcc 13.0): with 40, kernels of 192 columns and 128 rows per warpgroup would get 232 registers
// per thread instead of 240, and those with a table would spill 60 to 76 bytes.
constexpr int kOtherRegisters = 48;

// setmaxnreg gives a consumer thread at most this many registers.
constexpr int kMostRegisters = 240;

// Number of chunks of pixels that a warpgroup multiplies after the handover. The tensor cores read
// pixels from registers only as fast as a warp issues products. So both warpgroups issue products
// for a while: while one loads its next pixels, the tensor cores compute the products of the other.
constexpr int kChunksAfterHandover = 3;

// The operands that stay in registers for a segment of the schedule. A thread loads the other
// operands again for each tile.
enum class Kept { kNothing, kTerms, kScaleAndTerms };

constexpr Kept kept_in_registers(Type dtype, bool has_table, int tile_n, int rows) {
  const int terms = term_registers(has_table, tile_n, rows);
  const int room = kMostRegisters - kOtherRegisters - pixel_registers(dtype, rows) -
                   sum_registers(tile_n, rows) - terms;
  if (room >= scale_registers(tile_n)) return Kept::kScaleAndTerms;
  // Terms are kept without the scale only for images. For patches this has not been measured.
  return dtype == Type::kUInt8 && room >= 0 ? Kept::kTerms : Kept::kNothing;
}

// Number of parts whose terms are loaded before the products of a tile are done, if terms do not
// stay in registers.
constexpr int kPartsReadAhead = 2;

// Number of slots for chunks of a streamed weight: as many as fit into shared memory in addition to
// `slots` slots of patches and 2 KiB for the other members of Shared.
constexpr int weight_slots(int tile_n, int rows, int slots, bool stream_weight) {
  const int room = kMostSharedBytes - slots * rows * kRowBytes - 2048;
  return stream_weight ? room / (tile_n * kRowBytes) : 0;
}

// Some chunks of a streamed weight are loaded once and stay in the first slots: chunks 0, 4 and 8.
// With 128 rows per warpgroup, products and loads together almost saturate shared memory, so it
// helps to load three of twelve chunks only once. With 64 rows, or with more than 16 chunks, it is
// faster to use these slots for the streamed chunks (docs/experiments/cuda.md).
constexpr int kStayingStride = 4;
constexpr int kMostStayingChunks = 3;
constexpr int kLeastRowsIfSomeStay = 128;
constexpr int kMostChunksIfSomeStay = 16;

// Number of slots that are reserved for the chunks that stay, and number of chunks that stay. The
// parameters are references because with values nvcc 13.0 generates different machine code from the
// code that was measured.
constexpr PATCH_EMBED_HOST_DEVICE int staying_slots(int rows, const int& chunks) {
  return rows < kLeastRowsIfSomeStay || chunks > kMostChunksIfSomeStay ? 0 : kMostStayingChunks;
}
constexpr PATCH_EMBED_HOST_DEVICE int staying_chunks(int rows, const int& chunks) {
  const int wanted = (chunks + kStayingStride - 1) / kStayingStride;
  const int slots = staying_slots(rows, chunks);
  return wanted < slots ? wanted : slots;
}

// Rows of patches in a slot: those of one warpgroup, or of both.
constexpr int slot_rows(Sharing sharing, int rows) {
  return sharing == Sharing::kCooperative ? kConsumers * rows : rows;
}

// Shared memory of a block. It starts at a multiple of 1024 bytes, as the 128-byte swizzle
// requires. The weight follows this struct, in chunks of [tile_n, kRowBytes]: all chunks of a
// stationary weight (of the block's share of K), or the chunks of a streamed weight that stay,
// followed by the ring.
template <Type dtype, int tile_n, int rows, int slots, bool stream_weight, Sharing sharing>
struct alignas(1024) Shared {
  static constexpr int kWeightSlots = weight_slots(tile_n, rows, slots, stream_weight);

  // Vectors of four sums that a consumer thread has, which are the rows of parts, and its buffers for
  // those of other blocks.
  static constexpr int kVectors = sum_registers(tile_n, rows) / 4;
  static constexpr int kBuffers = sum_buffers(sharing);

  uint8_t patches[slots][slot_rows(sharing, rows) * slot_row_bytes(dtype)];
  uint32_t partial_sums[kBuffers][kVectors][kConsumers * kWarpgroup][4];
  float scale[tile_n], offset[tile_n];
  uint64_t filled[slots], freed[slots], weight_freed[kWeightSlots];
  uint64_t sums_arrived[kBuffers][kMultiplyingWarps];
  uint64_t other_products_issued[kConsumers], columns_arrived;

  // Number of chunks of the weight that stay, if K has `chunks` chunks.
  static constexpr int staying_chunks(int chunks) {
    return stream_weight ? sm90::staying_chunks(rows, chunks) : chunks;
  }

  // Bytes of this struct and of the weight that follows it, if a block multiplies `chunks` chunks.
  static constexpr int64_t bytes(int chunks) {
    const int64_t parts = stream_weight ? kWeightSlots : chunks;
    return int64_t{sizeof(Shared)} + parts * tile_n * kRowBytes;
  }
};

// The tensor maps, with the innermost dimension first. They have the 128-byte swizzle unless stated
// otherwise. `inner` is the number of elements of K in kRowBytes.
//
//   patches   [K, M], boxes of [inner, rows of a slot]
//   images    lines of row_patches (one or two) neighbouring patches, for `rows` patches, without a
//             swizzle. ldmatrix reads the lines without bank conflicts: 8 rows with a stride of 48
//             bytes start at 8 different multiples of 16 bytes modulo 128.
//   weight    [K, 2, 4, N / group, vector / 2], boxes of [inner, 2, 4, tile_n / group, vector / 2].
//             The strides of the dimensions after K are, in this order, 1, vector, group and 2 rows
//             of the weight [N, K]. `vector` and `group` are those of the kernel: if K is split,
//             the order of the columns is that of float32 results also for bfloat16.

// Returns the tensor map of the weight, which views [N, K] as [pairs, N / group, 4, 2, K]. With the
// rows in this order, wgmma leaves contiguous columns of y in each thread
// (backends/mosaic/layouts.py).
inline TensorMap weight_map(const Config& config, const Shapes& s) {
  const bool split = config.splits() > 1;
  const int vector = sm90::vector(config.out_dtype, split);
  const int group = sm90::group(config.out_dtype, split);
  const cuuint64_t row = s.K * itemsize(config.dtype);
  return {factor_type(config.dtype),
          5,
          {cuuint64_t(s.K), 2, 4, cuuint64_t(s.N / group), cuuint64_t(vector / 2)},
          {row, vector * row, group * row, 2 * row},
          {cuuint32_t(kRowBytes / itemsize(config.dtype)), 2, 4, cuuint32_t(config.tile_n / group),
           cuuint32_t(vector / 2)},
          kRowBytes,
          false,
          {}};
}

// Returns the tensor map of patches, or of images.
inline TensorMap patches_map(const Config& config, const Shapes& s) {
  if (config.dtype == Type::kUInt8) {
    return lines_of_patches(s, row_patches(s.width / kPatchSide), config.rows, 0);
  }
  return matrix(config.dtype, s.M, s.K, kRowBytes / itemsize(config.dtype),
                slot_rows(config.sharing, config.rows));
}

inline constexpr Architecture kArchitecture = {
    /*number=*/90,
    kThreads,
    kMultiplyingWarps,
    /*storing_warps=*/kMultiplyingWarps,
    /*split_name=*/"b",
    /*tile_rows=*/[](const Config& config) { return kConsumers * config.rows; },
    /*chunks=*/
    [](const Config& config, const Shapes& s) {
  return int(s.K * itemsize(config.dtype) / kRowBytes);
},
    /*tensor_memory_columns=*/[](int) { return 0; },
    patches_map,
    weight_map,
    /*y=*/[](const Config&, const Shapes&) { return TensorMap{}; },
};

// Shared of a kernel in the list below.
template <Type dtype, Type, bool, int tile_n, int rows, Sharing sharing, int slots, bool weight>
using SharedOf = Shared<dtype, tile_n, rows, slots, weight, sharing>;

// The kernels that are compiled for each dtype: X(dtype, out_dtype, terms, tile_n, rows, sharing,
// slots, weight). `slots` is the number of slots for patches. Kernels for bfloat16 and for images
// have as many slots as fit into shared memory, up to 16. If the weight is stationary, there must
// also be room for the weight of K = 768, or, if K is split, for 12 chunks of it. With 128 columns of
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
// clang-format on

}  // namespace patch_embed::sm90
