// The Hopper kernel: y = (patches weight^T) * scale + table, rounded once.
//
// A worker is a thread block of three warpgroups, or a cluster of such blocks. It computes the same
// `tile_n` columns of N in all its tiles, and processes the segments that backends/schedule.py
// assigns to it. A segment is a sequence of row tiles that need the same rows of the table. The
// warpgroups have these roles:
//
//   feed                 the producer, one thread: loads patches by TMA into a ring of slots, in the
//                        order in which they are multiplied. A slot has a chunk of half of a tile's
//                        rows (of all rows in cooperative kernels): kRowBytes of K or, with images,
//                        kSlotLines lines of each patch.
//   multiply_and_store   two consumer warpgroups, each with half of every tile's rows. While one
//                        multiplies, the other one scales its sums, adds the table, and stores y
//                        (ping-pong).
//
// A worker with one or two tiles gains little from ping-pong, in which each half waits for the other
// one's products. In cooperative kernels both warpgroups multiply at the same time.
//
// A stationary weight is loaded with the patches of the worker's first half tile, and stays in
// shared memory. A weight that does not fit is streamed: its chunks are loaded with the patches of
// every half tile, into a separate ring. With 128 rows per warpgroup and at most 16 chunks, every
// fourth of the first 12 chunks stays in shared memory (staying_chunks in patch_embed_sm90.h).
//
// The terms are the rows of the table, or the offsets. If there are enough registers, the scale
// stays in registers for all tiles, and terms stay there for a segment. Otherwise terms are loaded
// for each tile: those of its first parts (kParts) before its products are done, and those of the
// other parts as storing frees registers. The scale is then loaded for each group of columns.
//
// If there are fewer tiles than multiprocessors, a cluster of 2, 4 or 8 blocks can compute each tile
// (`split`). Each block multiplies a part of K. Then the blocks exchange their partial sums through
// distributed shared memory, and each block completes and stores a part of the tile:
//
//   exchange             between multiply and store: each thread sends its sums to the threads of the
//                        same number in the other blocks, and adds up those that its block completes,
//                        in the order of the blocks' ranks. So results do not depend on timing.
//
// patch_embed_sm90.h describes the barriers, and how a block starts and ends.
//
// After wgmma a thread has pairs of neighbouring columns. TMA permutes the rows of the weight, so
// that in each group of columns a thread's kPairs pairs are kVector contiguous columns of y. Let q be
// the thread's index among the four threads of a row. Then its pair j * kGroups + g in wgmma's order
// is pair q * kPairs + j of group g of y.

#include "patch_embed_sm90.h"

#include "ptx/matrix_descriptor.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "split.cuh"
#include "timeline.cuh"

namespace patch_embed::sm90 {

// The slot that the `number`-th load into a ring fills, and the parity of the slot's phase. The ring
// has the slots from `begin` to `begin + size - 1`.
struct RingSlot {
  __device__ RingSlot(uint32_t number, uint32_t begin, uint32_t size)
      : begin(begin), end(begin + size), slot(begin + number % size), parity(number / size & 1) {}
  __device__ void advance() {
    if (++slot == end) {
      slot = begin;
      parity ^= 1;
    }
  }
  uint32_t begin, end, slot, parity;
};

// The two modes of the weight. `ring` is where a chunk of a streamed weight is if it does not stay.
// Some parameters are references because with values nvcc 13.0 generates different machine code from
// the code that was measured.
struct StationaryWeight {
  __device__ static bool stays(const Arguments&, int) { return true; }
  __device__ static uint32_t slot(const Arguments&, const int& k, const RingSlot&) { return k; }
  __device__ static void wait_until_freed(const Arguments&, int, const RingSlot&, ptx::Mbarrier*) {}
  __device__ static void free(const Arguments&, int, const RingSlot&, ptx::Mbarrier*) {}
};

template <int rows>
struct StreamedWeight {
  __device__ static bool stays(const Arguments& args, int k) {
    return k % kStayingStride == 0 && k < kStayingStride * staying_slots(rows, args.chunks);
  }
  __device__ static uint32_t slot(const Arguments& args, const int& k, const RingSlot& ring) {
    return stays(args, k) ? k / kStayingStride : ring.slot;
  }
  __device__ static void wait_until_freed(const Arguments& args, int k, const RingSlot& ring,
                                          ptx::Mbarrier* freed) {
    if (!stays(args, k)) ptx::mbarrier_wait(freed[ring.slot], ring.parity ^ 1);
  }
  __device__ static void free(const Arguments& args, int k, const RingSlot& ring,
                              ptx::Mbarrier* freed) {
    if (!stays(args, k)) ptx::mbarrier_arrive(freed[ring.slot]);
  }
};

template <Type dtype, Type out_dtype, bool has_table, int tile_n, int rows, int slots,
          bool stream_weight, Sharing sharing>
class Worker {
 public:
  static constexpr bool kSplit = sharing == Sharing::kSplit;
  static constexpr bool kCooperative = sharing == Sharing::kCooperative;
  static constexpr int kTileRows = kConsumers * rows, kSlotRows = slot_rows(sharing, rows);
  static constexpr bool kImages = dtype == Type::kUInt8;
  static constexpr Type kFactorType = factor_type(dtype);
  static constexpr int kChunkElements = kRowBytes / itemsize(dtype);
  static constexpr int kSlotRowBytes = slot_row_bytes(dtype);
  static constexpr int kProducts = kSlotRowBytes / ptx::kProductBytes;
  static constexpr int kPatchesBytes = kSlotRows * kSlotRowBytes;
  static constexpr int kWeightBytes = tile_n * kRowBytes;

  // A thread has kRows rows of a warpgroup's half of a tile, and in each row kVector contiguous
  // columns of every group of kGroup columns. It stores part by part; a part is kPartRows rows of a
  // group.
  static constexpr int kOutBytes = itemsize(out_dtype);
  static constexpr int kVector = vector(out_dtype, kSplit), kPairs = kVector / 2;
  static constexpr int kVectorWords = kVector * kOutBytes / 4;
  static constexpr int kGroup = group(out_dtype, kSplit), kGroups = tile_n / kGroup;
  static constexpr int kRowBlocks = rows / 64, kRows = kPartRows * kRowBlocks;
  static constexpr int kParts = kGroups * kRowBlocks;

  // The terms: for each part kPartRows rows of the table, with two bfloat16 numbers in a word; or
  // for each group one row of offsets, which are floats.
  static constexpr int kTermWords = has_table ? kPairs : kVector;
  static constexpr int kTermRows = has_table ? kPartRows : 1;
  static constexpr int kTerms = has_table ? kParts : kGroups;

  static constexpr Kept kKept = kept_in_registers(dtype, has_table, tile_n, rows);
  static constexpr bool kKeepsScale = kKept == Kept::kScaleAndTerms;
  static constexpr bool kKeepsTerms = kKept != Kept::kNothing;
  static constexpr int kSumRegisters = sum_registers(tile_n, rows);
  static constexpr int kKeptRegisters = (kKeepsScale ? scale_registers(tile_n) : 0) +
                                        (kKeepsTerms ? term_registers(has_table, tile_n, rows) : 0);

  // Kernels with narrow slices have registers for the worker's first segment, which they read while
  // the barriers are made. With few rows this saves about 0.2 us (docs/experiments/cuda.md).
  static constexpr bool kReadsAhead = tile_n <= 96;

  // Registers of a producer and of a consumer thread after setmaxnreg. At launch each of the 384
  // threads has 168 registers, and 3 * 168 = 40 + 2 * 232 = 24 + 2 * 240. Consumers have 240 only
  // if 232 are too few.
  static constexpr bool kNeedsMost =
      kSumRegisters + kKeptRegisters + pixel_registers(dtype, rows) + kOtherRegisters > 232;
  static constexpr int kFeedRegisters = kNeedsMost ? 24 : 40;
  static constexpr int kMultiplyRegisters = kNeedsMost ? kMostRegisters : 232;
  static_assert(
      kFeedRegisters + kConsumers * kMultiplyRegisters <=
          (1 + kConsumers) * registers_at_launch(kThreads),
      "setmaxnreg would wait forever: the warpgroups request more registers than the block has.");

  using Weight = std::conditional_t<stream_weight, StreamedWeight<rows>, StationaryWeight>;
  using Blocks = std::conditional_t<kSplit, Cluster, OneBlock>;
  using Memory = Shared<dtype, tile_n, rows, slots, stream_weight, sharing>;
  static_assert(tile_n % kGroup == 0, "a slice of N must have whole groups of columns.");
  static_assert(rows == 64 || rows == 128, "a warpgroup must have 64 or 128 rows of a tile.");
  static_assert(slots >= 2, "at least 2 slots are needed: one is filled during products.");
  static_assert(!kImages || (rows == 64 && !stream_weight),
                "images need 64 rows per warpgroup and a stationary weight.");
  static_assert(
      !kImages || slots >= kPatchSide / kSlotLines + kChunksAfterHandover,
      "early products need more slots, so that the previous phase of each slot is complete.");
  static_assert(!kCooperative || (!kImages && !stream_weight && rows == 64),
                "cooperative warpgroups need patches, 64 rows each, and a weight that stays.");
  static_assert(
      !kSplit || (!kImages && !stream_weight && rows == 64 && kKeepsTerms),
      "a split of K needs patches, 64 rows for each warpgroup, and a weight and terms that "
      "stay.");
  static_assert(!kSplit || (kParts * kPartRows == Memory::kVectors && kVector == 4),
                "a split of K needs rows of parts that have four columns.");
  static_assert(!kSplit || Memory::kVectors % kMostSplits == 0,
                "the blocks of a cluster must complete equal numbers of vectors.");
  static_assert(kSumRegisters + kOtherRegisters <= kMostRegisters,
                "too many sums for the registers.");
  static_assert(sizeof(Memory) % 1024 == 0,
                "the weight follows Shared and must be aligned to 1024 bytes for its swizzle.");
  static_assert(Memory::bytes(1) <= kMostSharedBytes,
                "rings and weight do not fit into shared memory.");
  static_assert(!stream_weight || Memory::kWeightSlots >= kMostStayingChunks + 2,
                "the weight needs at least 2 slots in addition to those of the staying chunks.");

  __device__ Worker(const Arguments& args, Memory& shared)
      : args_(args),
        shared_(shared),
        weight_(reinterpret_cast<uint8_t*>(&shared + 1)),
        column_(Blocks::worker() % (args.N / tile_n) * tile_n),
        segments_(args.segments + Blocks::worker() / (args.N / tile_n) * args.segment_count),
        first_segment_(segments_[0]),
        timeline_(args),
        split_(shared),
        share_begin_(split_.first_chunk(args.chunks)),
        share_end_(split_.end_chunk(args.chunks)) {}

  __device__ void run() {
    if (threadIdx.x == 0) make_barriers();
    if (threadIdx.x == kConsumers * kWarpgroup) {
      ptx::prefetch_tensormap(args_.patches);
      ptx::prefetch_tensormap(args_.weight);
    }
    __syncthreads();
    Blocks::arrive();
    // Broadcasts lane 0's value, so that the compiler knows that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == kConsumers) {
      ptx::setmaxnreg_dec<kFeedRegisters>();
      if (threadIdx.x / 32 == kConsumers * kWarpgroup / 32 && ptx::elect_sync()) feed();
      if constexpr (kSplit) {
        __syncwarp();
        ptx::barrier_cluster_wait();
      }
    } else {
      ptx::setmaxnreg_inc<kMultiplyRegisters>();
      multiply_and_store(warpgroup);
    }
  }

 private:
  using Sums = ptx::Sum<kFactorType>[kRowBlocks][tile_n / 2];

  // A thread's pixels of one slot, the A operands of its products. They are uint8 until make_int8.
  using Pixels = uint32_t[kProducts][4];

  // Scale and terms of a thread's columns, and the indices of its rows of the table in this
  // segment.
  struct Columns {
    float scale[kGroups][kVector];
    uint32_t terms[kTerms][kTermRows][kTermWords];
    uint32_t table_rows[kRows];
  };

  // Chunk k of a half tile (of a tile in cooperative kernels) has kSlotRowBytes bytes of K, from byte
  // k * kSlotRowBytes of the block's share on. It has a slot for its patches, and a slot for its
  // chunk of a streamed weight.
  struct Chunk {
    int k;
    RingSlot patches, weight;
  };

  // Returns the number of chunks of a half tile that this block multiplies. args_.chunks counts the
  // weight's chunks, which have kRowBytes also for images.
  __device__ int chunks() const {
    if constexpr (kImages) return kPatchSide / kSlotLines;
    if constexpr (kSplit) return share_end_ - share_begin_;
    return args_.chunks;
  }

  // Returns the number of chunks of the weight, of kRowBytes each, that the chunks before chunk k
  // need.
  __device__ static int weight_chunks_before(int k) {
    return (k * kSlotRowBytes + kRowBytes - 1) / kRowBytes;
  }

  // Returns whether the weight of chunk k stays in shared memory.
  __device__ bool stays(int k) const { return Weight::stays(args_, k); }

  // Returns chunk 0 of a warpgroup's half of the worker's n-th tile or, if the warpgroups are
  // cooperative, of the whole tile.
  __device__ Chunk first_chunk(uint32_t n, int warpgroup) const {
    const uint32_t half = n * kConsumers + warpgroup;
    const RingSlot patches((kCooperative ? n : half) * chunks(), 0, slots);
    // A stationary weight has no ring: Chunk::weight is not used.
    if constexpr (!stream_weight) return {0, patches, patches};
    const uint32_t streamed = args_.chunks - staying_chunks(rows, args_.chunks);
    return {0, patches,
            RingSlot(half * streamed, staying_slots(rows, args_.chunks),
                     Memory::kWeightSlots - staying_slots(rows, args_.chunks))};
  }

  __device__ void advance(Chunk& chunk) const {
    chunk.patches.advance();
    if (!stays(chunk.k++)) chunk.weight.advance();
  }

  // Returns the address of the weight of a chunk of patches.
  __device__ uint8_t* weight(const Chunk& chunk) const {
    return weight_ + Weight::slot(args_, chunk.k, chunk.weight) * kWeightBytes;
  }

  __device__ void make_barriers() {
    for (int i = 0; i < slots; ++i) {
      ptx::mbarrier_init(shared_.filled[i], 1);
      ptx::mbarrier_init(shared_.freed[i], (kCooperative ? kConsumers : 1) * kWarpgroup / 32);
    }
    for (auto& freed : shared_.weight_freed) ptx::mbarrier_init(freed, kWarpgroup / 32);
    for (auto& issued : shared_.other_products_issued) ptx::mbarrier_init(issued, kWarpgroup / 32);
    ptx::mbarrier_init(shared_.columns_arrived, 1);
    if constexpr (kSplit) {
      for (auto& buffer : shared_.sums_arrived) {
        for (auto& arrived : buffer) ptx::mbarrier_init(arrived, 1);
      }
    }
    ptx::fence_mbarrier_init();
  }

  // Calls begin_segment(segment) for each of the worker's segments, and visit(row, n) for each tile
  // of the segment. `row` is the tile's first row, and n its index among the worker's tiles.
  template <typename Begin, typename Visit>
  __device__ void for_each_tile(Begin begin_segment, Visit visit) {
    uint32_t n = 0;
    for (int i = 0; i < args_.segment_count; ++i) {
      const Segment segment = kReadsAhead && i == 0 ? first_segment_ : segments_[i];
      if (segment.tiles == 0) break;
      begin_segment(segment);
      for (int j = 0; j < segment.tiles; ++j) {
        visit((segment.first_tile + j * segment.stride) * kTileRows, n++);
        timeline_.stamp(Event::kTile);
      }
    }
  }

  // Waits for the phase of this parity. The timeline attributes the time to `event`.
  __device__ void wait(ptx::Mbarrier& barrier, uint32_t parity, Event event) {
    ptx::mbarrier_wait(barrier, parity);
    timeline_.stamp(event);
  }

  __device__ void load_columns() {
    constexpr int kBytes = sizeof(shared_.scale);
    ptx::mbarrier_arrive_expect_tx(shared_.columns_arrived, has_table ? kBytes : 2 * kBytes);
    ptx::cp_async_bulk(shared_.scale, args_.scale + column_, kBytes, shared_.columns_arrived);
    if constexpr (!has_table) {
      const float* offset = static_cast<const float*>(args_.table) + column_;
      ptx::cp_async_bulk(shared_.offset, offset, kBytes, shared_.columns_arrived);
    }
  }

  // Waits until the slots that this chunk fills are free.
  __device__ void wait_until_freed(const Chunk& chunk) {
    ptx::mbarrier_wait(shared_.freed[chunk.patches.slot], chunk.patches.parity ^ 1);
    Weight::wait_until_freed(args_, chunk.k, chunk.weight, shared_.weight_freed);
    timeline_.stamp(Event::kFreed);
  }

  // Issues the loads of a chunk: its patches, from row `row` on, and its weight.
  __device__ void load_chunk(const Chunk& chunk, int row, bool with_weight) {
    const int slot = chunk.patches.slot;
    ptx::Mbarrier& filled = shared_.filled[slot];
    int weight_chunk = chunk.k;
    uint8_t* target = weight(chunk);
    if constexpr (kImages) {
      // This is the first chunk of the weight that no earlier chunk of pixels needs. It is loaded
      // only if this chunk of pixels needs it.
      weight_chunk = weight_chunks_before(chunk.k);
      target = weight_ + weight_chunk * kWeightBytes;
      with_weight = with_weight && weight_chunks_before(chunk.k + 1) > weight_chunk;
    }
    ptx::mbarrier_arrive_expect_tx(filled, kPatchesBytes + (with_weight ? kWeightBytes : 0));
    if constexpr (kImages) {
      load_lines(shared_.patches[slot], chunk.k * kSlotLines, row, filled);
    } else {
      ptx::cp_async_bulk_tensor(shared_.patches[slot], args_.patches,
                                (share_begin_ + chunk.k) * kChunkElements, row, filled);
    }
    if (with_weight) {
      ptx::cp_async_bulk_tensor(target, args_.weight,
                                (share_begin_ + weight_chunk) * kChunkElements, 0, 0,
                                column_ / kGroup, 0, filled);
    }
    timeline_.stamp(Event::kLoadsIssued);
  }

  // Loads kSlotLines lines, from `line` on, of `rows` patches, as [kSlotLines, rows, kLineBytes].
  __device__ void load_lines(uint8_t* target, int line, int row, ptx::Mbarrier& filled) {
    const int grid_row = row / args_.grid_width;
    // Divides by row_patches, which is 1 or 2, with a shift, because this is computed for each
    // slot.
    const int pixel = row % args_.grid_width >> (args_.row_patches == kMostRowPatches);
#pragma unroll
    for (int i = 0; i < kSlotLines; ++i) {
      ptx::cp_async_bulk_tensor_im2col(target + i * rows * kLineBytes, args_.patches, 0, pixel, 0,
                                       grid_row, 0, line + i, filled);
    }
  }

  __device__ void feed() {
    load_columns();
    Chunk chunk = first_chunk(0, 0);
    for_each_tile([](const Segment&) {}, [&](int row, uint32_t n) {
      for (int warpgroup = 0; warpgroup < kTileRows / kSlotRows; ++warpgroup) {
        for (chunk.k = 0; chunk.k < chunks(); advance(chunk)) {
          wait_until_freed(chunk);
          const bool with_weight = !stays(chunk.k) || (n == 0 && warpgroup == 0);
          load_chunk(chunk, row + warpgroup * rows, with_weight);
        }
      }
    });
  }

  // Frees the slots of a chunk that is no longer read, because its products are done or its pixels
  // are in registers.
  __device__ void free(const Chunk& chunk) {
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive(shared_.freed[chunk.patches.slot]);
    Weight::free(args_, chunk.k, chunk.weight, shared_.weight_freed);
  }

  // Issues the products of a chunk as one wgmma group.
  __device__ void issue_products(Sums& sums, const Chunk& chunk, int warpgroup) {
    const int row = kCooperative ? warpgroup * rows : 0;
    const uint64_t a = ptx::matrix_descriptor(
        ptx::shared_address(shared_.patches[chunk.patches.slot] + row * kRowBytes));
    const uint64_t b = ptx::matrix_descriptor(ptx::shared_address(weight(chunk)));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowBytes; step += ptx::kProductBytes) {
      for (int block = 0; block < kRowBlocks; ++block) {
        ptx::wgmma<kFactorType, tile_n>(sums[block], ptx::advance(a, block * 64 * kRowBytes + step),
                                        ptx::advance(b, step), chunk.k > 0 || step > 0);
      }
    }
    ptx::wgmma_commit_group();
    timeline_.stamp(Event::kProductsIssued);
  }

  // Waits for the pixels of a chunk and loads those of this thread.
  __device__ void load_pixels(Pixels& pixels, const Chunk& chunk) {
    wait(shared_.filled[chunk.patches.slot], chunk.patches.parity, Event::kFilled);
    const uint32_t slot = ptx::shared_address(shared_.patches[chunk.patches.slot]);
    const uint32_t row =
        slot + threadIdx.x % kWarpgroup / 32 * 16 * kLineBytes + threadIdx.x % 16 * kLineBytes;
    const int second = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      // A product needs two units of 16 bytes of each row. Lanes 0 to 15 pass the addresses of the
      // first unit, and lanes 16 to 31 those of the second.
      const int unit = 2 * i + second;
      constexpr int kUnits = kLineBytes / 16;
      ptx::ldmatrix_x4(pixels[i], row + unit / kUnits * rows * kLineBytes + unit % kUnits * 16);
    }
  }

  // Converts each pixel u to u - 128. The pins keep this before the products that follow.
  __device__ static void make_int8(Pixels& pixels) {
#pragma unroll
    for (auto& words : pixels) {
      for (uint32_t& word : words) {
        word ^= 0x80808080;
        ptx::pin(word);
      }
    }
  }

  // Issues the products of a chunk of pixels as one wgmma group.
  __device__ void issue_products(Sums& sums, const Pixels& pixels, const Chunk& chunk) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int k = chunk.k * kSlotRowBytes + i * ptx::kProductBytes;
      const uint32_t b = ptx::shared_address(weight_ + k / kRowBytes * kWeightBytes);
      ptx::wgmma<kFactorType, tile_n>(
          sums[0], pixels[i], ptx::advance(ptx::matrix_descriptor(b), k % kRowBytes), k > 0);
    }
    ptx::wgmma_commit_group();
    timeline_.stamp(Event::kProductsIssued);
  }

  // Waits until all products are done and the sums are in registers. Frees the last chunk of
  // patches; chunks of pixels have been freed already.
  __device__ void wait_for_products(Sums& sums, const Chunk& last) {
    ptx::wgmma_wait_group<0>();
    if constexpr (!kImages) free(last);
    for (auto& block : sums) {
      for (auto& sum : block) ptx::pin(sum);
    }
    timeline_.stamp(Event::kMultiplied);
  }

  // Passes the tensor cores to the other warpgroup, which may then multiply.
  __device__ void hand_over(int warpgroup) {
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive(shared_.other_products_issued[1 - warpgroup]);
  }

  __device__ void multiply_patches(Sums& sums, Chunk chunk, int warpgroup) {
    Chunk previous = chunk;
    for (; chunk.k < chunks(); advance(chunk)) {
      wait(shared_.filled[chunk.patches.slot], chunk.patches.parity, Event::kFilled);
      issue_products(sums, chunk, warpgroup);
      if (!kCooperative && chunk.k == chunks() - 1) hand_over(warpgroup);
      ptx::wgmma_wait_group<1>();
      if (chunk.k > 0) free(previous);
      previous = chunk;
    }
    wait_for_products(sums, previous);
  }

  // While the products of chunk k - 1 may still read their registers, the pixels of chunk k + 1 are
  // loaded, and then the products of chunk k are issued. So three buffers are needed. The loop is
  // unrolled because registers cannot be indexed.
  __device__ void multiply_pixels(Sums& sums, Chunk chunk, uint32_t n, int warpgroup) {
    constexpr int kChunks = kPatchSide / kSlotLines;
    // The first tile's chunks are loaded with the weight. Its handover comes after the last chunk,
    // because it tells the other warpgroup that the whole weight has arrived.
    const int last_before_handover = kChunks - 1 - (n == 0 ? 0 : kChunksAfterHandover);
    Pixels pixels[kPixelBuffers];
    Chunk next = chunk;
    load_pixels(pixels[0], next);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      make_int8(pixels[k % kPixelBuffers]);
      if (k + 1 < kChunks) {
        advance(next);
        load_pixels(pixels[(k + 1) % kPixelBuffers], next);
      }
      issue_products(sums, pixels[k % kPixelBuffers], chunk);
      // The products have been issued. They depend on the pixels, so ldmatrix has read the slot. An
      // arrival alone would not wait for ldmatrix.
      free(chunk);
      if (k == last_before_handover) hand_over(warpgroup);
      ptx::wgmma_wait_group<1>();
      advance(chunk);
    }
    wait_for_products(sums, chunk);
  }

  __device__ void multiply(Sums& sums, uint32_t n, int warpgroup) {
    const Chunk chunk = first_chunk(n, warpgroup);
    if constexpr (!kCooperative) {
      // Warpgroup 0 starts: its first wait passes immediately, because the phase before phase 0
      // counts as complete.
      const uint32_t parity = (n & 1) ^ (warpgroup == 0);
      wait(shared_.other_products_issued[warpgroup], parity, Event::kMayMultiply);
    }
    if constexpr (kImages) {
      multiply_pixels(sums, chunk, n, warpgroup);
    } else {
      multiply_patches(sums, chunk, warpgroup);
    }
  }

  // Returns whether this block completes a row of a part. Others complete it only if K is split.
  __device__ bool completes(int part, int r) const {
    if constexpr (kSplit) return split_.completes(part * kPartRows + r);
    return true;
  }

  // Exchanges the partial sums of a tile. Vector v is row v % kPartRows of part v / kPartRows.
  __device__ void exchange(Sums& sums) {
    const auto sum_of = [&](int v, int i) -> auto& {
      return sums[0][4 * (i / 2 * kGroups + v / kPartRows) + 2 * (v % kPartRows) + i % 2];
    };
    split_.exchange(sum_of, [&](ptx::Mbarrier& arrived, uint32_t parity) {
      wait(arrived, parity, Event::kLoaded);
    });
  }

  // Returns the first of the thread's columns, relative to the worker's first column.
  __device__ static int thread_column() { return threadIdx.x % 4 * kVector; }

  // Returns the thread's r-th row, relative to the first row of its warpgroup's half of a tile.
  __device__ static int thread_row(int r) {
    return r / 2 * 64 + threadIdx.x % kWarpgroup / 32 * 16 + r % 2 * 8 + threadIdx.x % 32 / 4;
  }

  template <typename T, int count>
  __device__ static void load(T (&values)[count], const void* source) {
    using Words = std::conditional_t<sizeof(values) % 16 == 0, uint4, uint2>;
#pragma unroll
    for (int i = 0; i < sizeof(values) / sizeof(Words); ++i) {
      reinterpret_cast<Words*>(values)[i] = static_cast<const Words*>(source)[i];
    }
  }

  __device__ void load_scale(Columns& columns, int g) const {
    load(columns.scale[g], shared_.scale + g * kGroup + thread_column());
  }

  __device__ void load_terms(Columns& columns, int i) const {
    if constexpr (!has_table) {
      load(columns.terms[i][0], shared_.offset + i * kGroup + thread_column());
    } else {
      const auto* table = static_cast<const uint16_t*>(args_.table);
#pragma unroll
      for (int r = 0; r < kTermRows; ++r) {
        if (!completes(i, r)) continue;
        const uint32_t row = columns.table_rows[i % kRowBlocks * kPartRows + r];
        const int64_t first = int64_t{row} * args_.N + column_ + thread_column();
        ptx::ld_global_nc(columns.terms[i][r], table + first + i / kRowBlocks * kGroup);
      }
    }
  }

  __device__ static float term(const uint32_t (&terms)[kTermWords], int i) {
    if constexpr (!has_table) return __uint_as_float(terms[i]);
    return __uint_as_float(i % 2 ? terms[i / 2] & 0xFFFF0000 : terms[i / 2] << 16);
  }

  // Returns the address of the thread's first column in a row of y.
  __device__ uint8_t* address_in_y(int row) const {
    const int64_t first = int64_t{row} * args_.N + column_ + thread_column();
    return static_cast<uint8_t*>(args_.out) + first * kOutBytes;
  }

  // Scales two neighbouring sums, adds the terms, rounds, and writes one word of bfloat16 or two
  // words of float32.
  __device__ static void finish(uint32_t* words, const ptx::Sum<kFactorType>* sums,
                                const float* scale, const float (&terms)[2]) {
    float y[2];
    for (int i = 0; i < 2; ++i) y[i] = fmaf(static_cast<float>(sums[i]), scale[i], terms[i]);
    if constexpr (out_dtype == Type::kBFloat16) {
      words[0] = ptx::cvt_rn_bf16x2(y[0], y[1]);
    } else {
      words[0] = __float_as_uint(y[0]);
      words[1] = __float_as_uint(y[1]);
    }
  }

  // Returns the number of elements of `terms` that are loaded before part `part` is converted, if
  // terms do not stay in registers. Converting a part frees the registers of its sums. Then rows of
  // the table are loaded for two more parts if y is bfloat16, and for one more if y is float32;
  // offsets are loaded for the next group.
  __device__ static constexpr int terms_loaded(int part) {
    const int loaded = has_table ? kPartsReadAhead + kVector / 4 * part : part / kRowBlocks + 1;
    return loaded < kTerms ? loaded : kTerms;
  }

  // Loads the terms that stay in registers for a segment.
  __device__ void load_all_terms(Columns& columns) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) load_terms(columns, i);
    for (auto& terms : columns.terms) {
      for (auto& words : terms) timeline_.await(words);
    }
    timeline_.stamp(Event::kLoaded);
  }

  // Prepares the conversion of a part. Loads the scale, if it does not stay in registers. Waits for
  // terms that do not stay, but only in a build with the timeline, so that it shows the wait. Pins
  // rows of the table that stay.
  __device__ void prepare(Columns& columns, uint32_t (&terms)[kTermRows][kTermWords], int g,
                          int block) {
    if constexpr (!kKeepsScale) {
      if (block == 0) load_scale(columns, g);
    }
    if constexpr (!kKeepsTerms) {
#pragma unroll
      for (auto& words : terms) timeline_.await(words);
      timeline_.stamp(Event::kLoaded);
    } else if constexpr (has_table) {
      // Without these pins the compiler would convert the table to float32 before the loop over
      // tiles, which takes twice as many registers.
#pragma unroll
      for (auto& words : terms) {
        for (uint32_t& word : words) ptx::pin(word);
      }
    }
  }

  // Computes the thread's elements of y in a part, as words.
  __device__ void convert(uint32_t (&y)[kPartRows][kVectorWords],
                          const ptx::Sum<kFactorType> (&sums)[tile_n / 2],
                          const float (&scale)[kVector],
                          const uint32_t (&terms)[kTermRows][kTermWords], int part) {
    const int g = part / kRowBlocks;
#pragma unroll
    for (int r = 0; r < kPartRows; ++r) {
      if (!completes(part, r)) continue;
      const auto& words = terms[has_table ? r : 0];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        finish(&y[r][kVectorWords / kPairs * j], &sums[4 * (j * kGroups + g) + 2 * r],
               &scale[2 * j], {term(words, 2 * j), term(words, 2 * j + 1)});
      }
    }
    timeline_.stamp(Event::kConverted);
  }

  // Stores a part. `first` is the address of the thread's first column in `first_row`.
  __device__ void write(const uint32_t (&y)[kPartRows][kVectorWords], uint8_t* first, int first_row,
                        uint32_t eight_rows_bytes, int part) {
    const int g = part / kRowBlocks, block = part % kRowBlocks;
#pragma unroll
    for (int r = 0; r < kPartRows; ++r) {
      if (!completes(part, r)) continue;
      const int below = thread_row(block * kPartRows + r) - thread_row(0);
      uint8_t* const address = first + uint64_t{eight_rows_bytes} * (below / 8);
      if (first_row + below < args_.M) {
        using Words = std::conditional_t<kVectorWords == 4, uint4, uint2>;
        *reinterpret_cast<Words*>(address + g * kGroup * kOutBytes) =
            *reinterpret_cast<const Words*>(y[r]);
      }
    }
    timeline_.stamp(Event::kStoresIssued);
  }

  // Converts and stores the half tile of y that starts at `row`.
  __device__ void store(const Sums& sums, int row, Columns& columns) {
    const int first_row = row + thread_row(0);
    uint8_t* const first = address_in_y(first_row);
    uint32_t eight_rows_bytes = 8 * args_.N * kOutBytes;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int g = part / kRowBlocks, block = part % kRowBlocks;
      auto& terms = columns.terms[has_table ? part : g];
      prepare(columns, terms, g, block);
      // Makes the compiler compute addresses here. Otherwise it would keep them in registers, of
      // which there are too few.
      if constexpr (!kKeepsTerms) ptx::pin(eight_rows_bytes);
      alignas(16) uint32_t y[kPartRows][kVectorWords];
      convert(y, sums[block], columns.scale[g], terms, part);
      if constexpr (!kKeepsTerms) {
#pragma unroll
        for (int i = terms_loaded(part); i < terms_loaded(part + 1); ++i) load_terms(columns, i);
      }
      write(y, first, first_row, eight_rows_bytes, part);
    }
  }

  __device__ void multiply_and_store(int warpgroup) {
    Columns columns;
    ptx::mbarrier_wait(shared_.columns_arrived, 0);
    if constexpr (kKeepsScale) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_scale(columns, g);
    }

    const auto begin = [&](const Segment& segment) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        columns.table_rows[r] =
            (segment.table_row + warpgroup * rows + thread_row(r)) % args_.period;
      }
      if constexpr (kKeepsTerms) load_all_terms(columns);
    };

    // The barriers of the other blocks exist when these blocks have arrived.
    Blocks::wait();
    for_each_tile(begin, [&](int row, uint32_t n) {
      if constexpr (!kKeepsTerms) {
#pragma unroll
        for (int i = 0; i < terms_loaded(0); ++i) load_terms(columns, i);
      }
      Sums sums;
      multiply(sums, n, warpgroup);
      if constexpr (kSplit) {
        // A warp without rows has nothing to store, in all blocks of the cluster.
        if (row + int(threadIdx.x) / 32 * 16 >= args_.M) return;
        exchange(sums);
      }
      store(sums, row + warpgroup * rows, columns);
    });
  }

  const Arguments& args_;
  Memory& shared_;
  uint8_t* const weight_;
  const int column_;
  const Segment* const segments_;
  const Segment first_segment_;
  Timeline timeline_;

  // The block's part in the cluster, and its share of the chunks of K.
  Split<Blocks, ptx::Sum<kFactorType>, Memory> split_;
  const int share_begin_, share_end_;
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

}  // namespace patch_embed::sm90

// clang-format off
#define PATCH_EMBED_KERNEL(dtype, out_dtype, terms, tile_n, rows, sharing, slots, weight)         \
  extern "C" __global__ void __launch_bounds__(patch_embed::sm90::kThreads, 1)                    \
      patch_embed_sm90_##dtype##_##out_dtype##_##terms##_##tile_n##x##rows##_##sharing##_s##slots \
      ##_##weight(const __grid_constant__ patch_embed::Arguments args) {                          \
    namespace spelled = patch_embed::spelled;                                                     \
    using Worker = patch_embed::sm90::Worker<spelled::dtype, spelled::out_dtype, spelled::terms,  \
                                             tile_n, rows, slots, spelled::weight,                \
                                             spelled::sharing>;                                   \
    Worker(args, *reinterpret_cast<Worker::Memory*>(patch_embed::sm90::shared_memory)).run();     \
  }
// clang-format on

// PATCH_EMBED_DTYPE selects the kernels that are compiled: kFloat8E4M3FN, kInt8, kBFloat16 or
// kUInt8.
#define PATCH_EMBED_KERNELS_OF(dtype) PATCH_EMBED_SM90_##dtype(PATCH_EMBED_KERNEL)
#define PATCH_EMBED_KERNELS(dtype) PATCH_EMBED_KERNELS_OF(dtype)
PATCH_EMBED_KERNELS(PATCH_EMBED_DTYPE)
