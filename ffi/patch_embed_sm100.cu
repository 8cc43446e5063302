// The Blackwell kernel: y = (patches weight^T) * scale + table, rounded once.
//
// A worker is a cluster of two thread blocks, or one block, of three warpgroups each. It computes
// the same `tile_n` columns of N in all its tiles, and processes the segments of row tiles that
// backends/schedule.py assigns to it. Each block has 128 rows of every tile. The roles are:
//
//   feed       the producer, one thread: loads patches by TMA into a ring of slots.
//   multiply   one thread of the first block: issues tcgen05.mma for both blocks, into one of two
//              accumulators in tensor memory.
//   store      two warpgroups, each with half of the columns; a warp has 32 rows. A warp loads the
//              other accumulator, scales it, adds the table, and stores it by TMA from its own
//              staging buffers, so that warps wait for products and never for each other.
//
// The weight is loaded together with patches: with those of the worker's first tile if it stays in
// shared memory, or with those of every tile if it is streamed. Of a streamed weight the first chunks
// stay, as many as there is room for. Scale and table stay in registers for a segment.
//
// With images a slot has one line of each patch, which TMA cuts in im2col mode, and the tensor cores
// multiply the pixels u as they are, from 0 to 255. Patches are u - 128, so the sums must be corrected
// by -128 times the sum of each column's weights. The tensor cores compute these corrections during
// the worker's first tile, as the product of a matrix of -128s and the weight, in the accumulator that
// is free. The storing warps add them to the sums as integers: the sums reach 255 * 127 * 768, which
// float32 does not represent exactly, but corrected sums are below 2^24. So the results are equal bit
// for bit to those from patches.
//
// If there are fewer tiles than multiprocessors, a cluster of 2, 4 or 8 blocks can compute each tile
// (`split`). Each block multiplies a part of K. Then the storing warps exchange their partial sums
// through distributed shared memory, and each block completes a part of the tile and stores it from
// registers. The sums are added in the order of the blocks' ranks, so results do not depend on timing.
//
// patch_embed_sm100.h describes the barriers, and how a block starts and ends.

#include "patch_embed_sm100.h"

#include <cstddef>

#include "ptx/instruction_descriptor.h"
#include "ptx/matrix_descriptor.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "split.cuh"
#include "timeline.cuh"

namespace patch_embed::sm100 {

// Registers that a storing thread needs in addition to sums, scale and table, and with images those
// for the corrections that it uses next. If a variant leaves fewer registers, it spills.
constexpr int other_registers(Type out_dtype) { return out_dtype == Type::kFloat32 ? 16 : 8; }
constexpr int kCorrectionRegisters = 8;

// Bytes of K that one tcgen05.mma multiplies.
constexpr int kProductBytes = 32;

// Roles of the first warpgroup's warps.
constexpr int kFeedingWarp = 0, kMultiplyingWarp = 1, kAllocatingWarp = 2;

template <Type dtype, Type out_dtype, bool has_table, int tile_n, Sharing sharing, int slots,
          bool stream_weight, typename Tuned = Tuning<out_dtype, tile_n, slots>>
class Worker {
 public:
  static constexpr bool kSplit = sharing == Sharing::kSplit;
  static constexpr int kBlocks = row_blocks(sharing);
  static constexpr int kTileRows = kBlocks * kRows;
  static constexpr bool kImages = dtype == Type::kUInt8;
  static constexpr Type kFactorType = factor_type(dtype);
  static constexpr int kTileK = kRowBytes / itemsize(dtype);
  static constexpr int kWeightRows = tile_n / kBlocks;
  static constexpr int kSlotRowBytes = slot_row_bytes(dtype);
  static constexpr int kPatchesBytes = kRows * kSlotRowBytes;
  static constexpr int kWeightBytes = kWeightRows * kSlotRowBytes;

  // Bytes that TMA writes for a slot's patches, and counts. A line of pixels is followed by a gap.
  static constexpr int kLoadedBytes = kImages ? kRows * kLineBytes : kPatchesBytes;

  // Columns of a storing warp, of a TMA store, and of a core matrix. A thread has two columns of
  // each core matrix.
  static constexpr int kColumns = tile_n / kStorers;
  static constexpr int kStoreColumns = store_columns(out_dtype, tile_n);
  static constexpr int kOutBytes = itemsize(out_dtype);
  static constexpr int kStoreBytes = kStoreColumns * kOutBytes;
  static constexpr int kStores = kColumns / kStoreColumns;
  static constexpr int kCore = 8;

  // A thread has one row of each of four core matrices, which are one below the other. The terms
  // are added to the scaled sums: a row of the table for each of these rows, or one row of offsets
  // for all.
  static constexpr int kThreadRows = kWarpRows / kCore;
  static constexpr int kTermRows = has_table ? kThreadRows : 1;

  // Registers of a thread after setmaxnreg, in the first warpgroup and in the storing warpgroups.
  static constexpr int kFirstRegisters = kImages ? 24 : 40, kStoreRegisters = kImages ? 240 : 232;
  static_assert(
      kFirstRegisters + kStorers * kStoreRegisters <=
          (1 + kStorers) * registers_at_launch(kThreads),
      "setmaxnreg would wait forever: the warpgroups request more registers than the block has.");

  static constexpr int kTensorColumns = tensor_memory_columns(tile_n);
  static constexpr uint32_t kInstruction = ptx::instruction_descriptor(dtype, kTileRows, tile_n);

  // With images the corrections are the accumulators' first content, before that of the first tile.
  // Both of their factors are int8.
  static constexpr uint32_t kCorrections = kImages ? 1 : 0;
  static constexpr uint32_t kCorrectingInstruction =
      ptx::instruction_descriptor(kFactorType, kTileRows, tile_n);

  static constexpr int kStepColumns = Tuned::kStepColumns, kLoadColumns = Tuned::kLoadColumns;
  static constexpr int kBuffers = Tuned::kStagingBuffers, kGroup = Tuned::kStoresPerGroup;
  static constexpr bool kKeepTable = Tuned::kKeepTable;

  using Blocks = std::conditional_t<kSplit, Cluster, OneBlock>;
  using Memory = Shared<dtype, out_dtype, tile_n, sharing, slots, stream_weight, Tuned>;
  static constexpr int kFirstStaying = stream_weight ? slots : 0;
  static constexpr int kMostStaying = Memory::most_staying();
  static_assert(sharing != Sharing::kCooperative,
                "one thread multiplies for all storing warps, which always cooperate.");
  static_assert(tile_n % 64 == 0, "a slice of N must be a multiple of 64 columns.");
  static_assert(kAccumulators * tile_n <= kTensorMemory,
                "the accumulators do not fit into tensor memory.");
  static_assert(slots >= 2, "at least 2 slots are needed: one is filled during products.");
  static_assert(kLoadColumns == 16 || kLoadColumns == 32 || kLoadColumns == 64,
                "a load must have 16, 32 or 64 columns of 16 rows.");
  static_assert(kStepColumns % kLoadColumns == 0 && kColumns % kStepColumns == 0,
                "loads must divide a step, and steps must divide the columns of a warp.");
  static_assert(kStepColumns % kStoreColumns == 0, "stores must divide a step.");
  static_assert(kStepColumns / kStoreColumns % kGroup == 0,
                "groups of stores must divide the stores of a step.");
  static_assert(kBuffers % kGroup == 0, "groups of stores must divide the buffers.");
  static_assert((kBuffers & (kBuffers - 1)) == 0,
                "the number of buffers must be a power of two, because store numbers wrap.");
  static_assert(Tuned::kStaggerCycles >= 0, "kStaggerCycles must not be negative.");
  static_assert(kStepColumns + kColumns / 4 +
                        (kKeepTable ? kColumns : kStepColumns) / 4 * kTermRows +
                        other_registers(out_dtype) + (kImages ? kCorrectionRegisters : 0) <=
                    kStoreRegisters,
                "sums, scale and table need too many registers.");
  static_assert(kPatchesBytes % 1024 == 0 && kWeightBytes % 1024 == 0 &&
                    kWarpRows * kStoreBytes % 1024 == 0,
                "swizzled buffers must start at multiples of 1024 bytes.");
  static_assert(sizeof(Memory::filled) + sizeof(Memory::freed) + sizeof(Memory::multiplied) +
                        sizeof(Memory::accumulator_freed) + sizeof(Memory::tensor_memory) <=
                    1024,
                "the barriers need more than the 1024 bytes between buffers and weight.");
  static_assert(!kImages || (!kSplit && !stream_weight),
                "images need a weight that stays, and no split of K.");
  static_assert(!kImages || sizeof(Memory::staged) >= kPatchesBytes,
                "the matrix of -128s needs more bytes than the staging buffers have.");
  static_assert(!kSplit || (!stream_weight && kKeepTable && kStepColumns == kColumns),
                "a split of K needs a weight and terms that stay, and tiles of one step.");
  static_assert(!kSplit || Memory::kVectors % kMostSplits == 0,
                "the blocks of a cluster must complete equal numbers of vectors.");
  static_assert(kSplit || (offsetof(Memory, staged) == slots * kPatchesBytes &&
                           offsetof(Memory, filled) ==
                               slots * kPatchesBytes +
                                   kStoringWarps * kBuffers * kWarpRows * kStoreBytes),
                "ring, buffers and barriers must be contiguous.");
  static_assert(sizeof(Memory) % 1024 == 0,
                "the weight follows Shared and must be aligned to 1024 bytes for its swizzle.");
  static_assert(Memory::bytes(1) <= kMostSharedBytes,
                "ring, buffers and weight do not fit into shared memory.");

  __device__ Worker(const Arguments& args, Memory& shared)
      : args_(args),
        shared_(shared),
        weight_(reinterpret_cast<uint8_t*>(&shared + 1)),
        rank_(blockIdx.x % kBlocks),
        column_(Blocks::worker() / kBlocks % (args.N / tile_n) * tile_n),
        worker_(Blocks::worker() / kBlocks / (args.N / tile_n)),
        timeline_(args),
        split_(shared),
        share_begin_(split_.first_chunk(args.chunks)),
        share_end_(split_.end_chunk(args.chunks)) {}

  __device__ void run() {
    // Broadcasts lane 0's value, so that the compiler knows that the value is uniform in a warp.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) make_barriers();
    if (warp == kMultiplyingWarp && ptx::elect_sync()) {
      ptx::prefetch_tensormap(args_.patches);
      ptx::prefetch_tensormap(args_.weight);
      if constexpr (!kSplit) ptx::prefetch_tensormap(args_.y);
    }
    __syncwarp();
    if constexpr (kImages) write_constants();
    if constexpr (kBlocks == 2) await_peer();
    Blocks::arrive();
    if (warp == kAllocatingWarp) {
      ptx::tcgen05_alloc<kBlocks, kTensorColumns>(shared_.tensor_memory);
      ptx::tcgen05_relinquish_alloc_permit<kBlocks>();
    }
    synchronise();
    const uint32_t accumulators = shared_.tensor_memory;
    if (warp * 32 < kWarpgroup) {
      ptx::setmaxnreg_dec<kFirstRegisters>();
      if (warp == kFeedingWarp && ptx::elect_sync()) feed();
      if (warp == kMultiplyingWarp && rank_ == 0 && ptx::elect_sync()) multiply(accumulators);
      if constexpr (kSplit) {
        __syncwarp();
        Blocks::wait();
      }
    } else {
      ptx::setmaxnreg_inc<kStoreRegisters>();
      store(warp, accumulators);
    }
    __syncwarp();
    synchronise();
    if (warp == kAllocatingWarp) ptx::tcgen05_dealloc<kBlocks, kTensorColumns>(accumulators);
  }

 private:
  // The sums of a step in the layout of tcgen05.ld, for each half of a warp's rows and for each
  // load.
  using Sums = uint32_t[2][kStepColumns / kLoadColumns][kLoadColumns / 2];

  // The terms of the thread's two columns of every core matrix.
  struct Terms {
    float2 rows[kTermRows][(kKeepTable ? kColumns : kStepColumns) / kCore];
  };

  // The slot of the ring that the worker's `number`-th load fills, and the parity of the slot's
  // phase.
  struct RingSlot {
    __device__ explicit RingSlot(uint32_t number)
        : index(number % slots), parity(number / slots & 1) {}
    uint32_t index, parity;
  };

  // The accumulator of the worker's (n - kCorrections)-th tile, and the parity of its phase.
  struct Accumulator {
    __device__ explicit Accumulator(uint32_t n)
        : index(n % kAccumulators), parity(n / kAccumulators & 1) {}
    uint32_t index, parity;
  };

  __device__ void make_barriers() {
    for (int i = 0; i < slots; ++i) {
      ptx::mbarrier_init(shared_.filled[i], 1);
      ptx::mbarrier_init(shared_.freed[i], 1);
    }
    for (int i = 0; i < kAccumulators; ++i) {
      ptx::mbarrier_init(shared_.multiplied[i], 1);
      ptx::mbarrier_init(shared_.accumulator_freed[i], kBlocks * kStoringWarps);
    }
    if constexpr (kSplit) {
      for (auto& buffer : shared_.sums_arrived) {
        for (auto& arrived : buffer) ptx::mbarrier_init(arrived, 1);
      }
    }
    ptx::fence_mbarrier_init();
  }

  // Writes 32 times -128 in int8 to the staging buffers, which are not in use yet. This is the first
  // row of a matrix. The other rows may hold anything, because only the first row of its product with
  // the weight is read.
  __device__ void write_constants() {
    if (threadIdx.x >= kProductBytes / sizeof(uint4)) return;
    const uint4 constants = {0x80808080, 0x80808080, 0x80808080, 0x80808080};
    reinterpret_cast<uint4*>(shared_.staged)[threadIdx.x] = constants;
    ptx::fence_proxy_async();
  }

  // Returns the number of chunks that this block multiplies.
  __device__ int chunks() const { return kSplit ? share_end_ - share_begin_ : args_.chunks; }

  // Waits until all threads of the pair have started and both blocks' mbarriers are initialised. A
  // pair may allocate tensor memory only after both blocks have been launched (PTX ISA,
  // tcgen05.alloc). The arrival is relaxed, because only the initialisations must be visible to the
  // peer, and fence.mbarrier_init publishes those.
  __device__ static void await_peer() {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  }

  // Synchronises all threads of all blocks, and orders their accesses to tensor memory.
  __device__ static void synchronise() {
    ptx::tcgen05_fence_before_thread_sync();
    if constexpr (kBlocks == 2) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    } else {
      __syncthreads();
    }
    ptx::tcgen05_fence_after_thread_sync();
  }

  // Calls begin(segment) for each of the worker's segments, and visit(row, n) for each tile of the
  // segment. `row` is this block's first row, and n the tile's index among the worker's tiles.
  // Returns the number of tiles.
  template <typename Begin, typename Visit>
  __device__ uint32_t for_each_tile(Begin begin, Visit visit) {
    uint32_t n = 0;
    for (int i = 0; i < args_.segment_count; ++i) {
      const Segment segment = args_.segments[int64_t{worker_} * args_.segment_count + i];
      if (segment.tiles == 0) break;
      begin(segment);
      for (int j = 0; j < segment.tiles; ++j) {
        visit((segment.first_tile + j * segment.stride) * kTileRows + rank_ * kRows, n++);
        timeline_.stamp(Event::kTile);
      }
    }
    return n;
  }

  // Waits for the phase of this parity. The timeline attributes the time to `event`.
  __device__ void wait(ptx::Mbarrier& barrier, uint32_t parity, Event event) {
    ptx::mbarrier_wait(barrier, parity);
    timeline_.stamp(event);
  }

  // Waits in the same way, for a thread that then reads or overwrites an accumulator.
  __device__ void wait_for_accumulator(ptx::Mbarrier& barrier, uint32_t parity, Event event) {
    ptx::mbarrier_wait(barrier, parity);
    ptx::tcgen05_fence_after_thread_sync();
    timeline_.stamp(event);
  }

  // Loads the box at these coordinates by TMA. The load arrives at the first block's barrier.
  template <typename... Coordinates>
  __device__ void load(ptx::Mbarrier& arrived, void* target, const CUtensorMap& map,
                       Coordinates... at) {
    if constexpr (kBlocks == 2) {
      ptx::cp_async_bulk_tensor_of_pair(target, map, at..., ptx::mapa(&arrived, 0));
    } else {
      ptx::cp_async_bulk_tensor(target, map, at..., arrived);
    }
  }

  // Loads a line of kRows patches, from row `row` on.
  __device__ void load_line(ptx::Mbarrier& arrived, void* target, int line, int row) {
    const int grid_row = row / args_.grid_width, patch = row % args_.grid_width;
    if constexpr (kBlocks == 2) {
      ptx::cp_async_bulk_tensor_im2col_of_pair(target, args_.patches, 0, patch, 0, grid_row, 0,
                                               line, ptx::mapa(&arrived, 0));
    } else {
      ptx::cp_async_bulk_tensor_im2col(target, args_.patches, 0, patch, 0, grid_row, 0, line,
                                       arrived);
    }
  }

  // Returns whether the weight of chunk k stays in shared memory, and where the weight of a chunk is.
  __device__ static bool stays(int k) { return !stream_weight || k < kMostStaying; }
  __device__ uint8_t* weight(const RingSlot& slot, int k) const {
    return weight_ + (stays(k) ? kFirstStaying + k : slot.index) * kWeightBytes;
  }

  // Issues the loads of chunk k of the block's share: its patches, from row `row` on, and its part of
  // the weight.
  __device__ void load_chunk(const RingSlot& slot, int k, int row, bool with_weight) {
    ptx::Mbarrier& filled = shared_.filled[slot.index];
    if (rank_ == 0) {
      const int bytes = kLoadedBytes + (with_weight ? kWeightBytes : 0);
      ptx::mbarrier_arrive_expect_tx(filled, kBlocks * bytes);
    }
    const int x = (share_begin_ + k) * kTileK;
    if constexpr (kImages) {
      load_line(filled, shared_.patches[slot.index], k, row);
    } else {
      load(filled, shared_.patches[slot.index], args_.patches, x, row);
    }
    if (with_weight) {
      const int column = column_ + rank_ * kWeightRows;
      if constexpr (kImages) {
        load(filled, weight(slot, k), args_.weight, 0, column, k);
      } else {
        load(filled, weight(slot, k), args_.weight, x, column);
      }
    }
    timeline_.stamp(Event::kLoadsIssued);
  }

  __device__ void feed() {
    const uint32_t tiles = for_each_tile([](const Segment&) {}, [&](int row, uint32_t n) {
      for (int k = 0; k < chunks(); ++k) {
        const RingSlot slot(n * chunks() + k);
        wait(shared_.freed[slot.index], slot.parity ^ 1, Event::kFreed);
        load_chunk(slot, k, row, !stays(k) || n == 0);
      }
    });
    // Waits until the last use of every slot is over, as if each were filled once more. Waiting
    // only for the last commit is not enough, because the ISA does not say that commits arrive in
    // order.
    for (int i = 0; i < slots; ++i) {
      const RingSlot slot(tiles * chunks() + i);
      ptx::mbarrier_wait(shared_.freed[slot.index], slot.parity ^ 1);
    }
  }

  // Returns the descriptor of a chunk of patches or of the weight.
  __device__ static uint64_t matrix(const void* chunk) {
    return ptx::tcgen05_matrix_descriptor(ptx::shared_address(chunk), kSlotRowBytes);
  }

  // Issues the products of the matrix of -128s and chunk k of the weight. All bytes of a row are equal.
  __device__ void issue_corrections(uint32_t sums, const RingSlot& slot, int k) {
    const uint64_t a = matrix(shared_.staged), b = matrix(weight(slot, k));
#pragma unroll
    for (int step = 0; step < kSlotRowBytes; step += kProductBytes) {
      ptx::tcgen05_mma<kFactorType, kBlocks>(sums, a, ptx::advance(b, step), kCorrectingInstruction,
                                             k > 0 || step > 0);
    }
  }

  // Issues the products of chunk k, and the commit that frees its slot when the products are done.
  __device__ void issue_products(uint32_t sums, const RingSlot& slot, int k) {
    const uint64_t a = matrix(shared_.patches[slot.index]), b = matrix(weight(slot, k));
#pragma unroll
    for (int step = 0; step < kSlotRowBytes; step += kProductBytes) {
      ptx::tcgen05_mma<kFactorType, kBlocks>(sums, ptx::advance(a, step), ptx::advance(b, step),
                                             kInstruction, k > 0 || step > 0);
    }
    ptx::tcgen05_commit<kBlocks>(shared_.freed[slot.index]);
    timeline_.stamp(Event::kProductsIssued);
  }

  __device__ void multiply(uint32_t accumulators) {
    for_each_tile([](const Segment&) {}, [&](int, uint32_t n) {
      const Accumulator accumulator(n + kCorrections);
      wait_for_accumulator(shared_.accumulator_freed[accumulator.index], accumulator.parity ^ 1,
                           Event::kMayMultiply);
      const uint32_t sums = accumulators + accumulator.index * tile_n;
      for (int k = 0; k < chunks(); ++k) {
        const RingSlot slot(n * chunks() + k);
        wait(shared_.filled[slot.index], slot.parity, Event::kFilled);
        if (kImages && n == 0) issue_corrections(accumulators, slot, k);
        issue_products(sums, slot, k);
      }
      if (kImages && n == 0) ptx::tcgen05_commit<kBlocks>(shared_.multiplied[0]);
      ptx::tcgen05_commit<kBlocks>(shared_.multiplied[accumulator.index]);
    });
  }

  // Return the thread's row in a core matrix, and its first column.
  __device__ static int thread_row() { return threadIdx.x % 32 / 4; }
  __device__ static int thread_column() { return threadIdx.x % 4 * 2; }

  // Loads terms, from column `column` of N on: rows of the table, of which the warp's first one is
  // `table_row`, or offsets.
  template <int count>
  __device__ void load_terms(float2 (&rows)[kTermRows][count], uint32_t table_row,
                             int column) const {
#pragma unroll
    for (int r = 0; r < kTermRows; ++r) {
      if constexpr (has_table) {
        const uint32_t row = (table_row + r * kCore + thread_row()) % args_.period;
        const auto* words =
            reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(args_.table) +
                                              int64_t{row} * args_.N + column + thread_column());
#pragma unroll
        for (int j = 0; j < count; ++j) {
          const uint32_t word = words[j * kCore / 2];
          rows[r][j] = {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
        }
      } else {
        load_floats(rows[r], static_cast<const float*>(args_.table) + column);
      }
    }
  }

  template <int count>
  __device__ static void load_floats(float2 (&values)[count], const float* source) {
#pragma unroll
    for (int j = 0; j < count; ++j) {
      values[j] = *reinterpret_cast<const float2*>(source + j * kCore + thread_column());
    }
  }

  // Loads the sums of a step from tensor memory.
  __device__ void load_sums(Sums& sums, uint32_t address) {
#pragma unroll
    for (int i = 0; i < kStepColumns / kLoadColumns; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::tcgen05_ld_16x256b(sums[half][i], address + (half * 16 << 16) + i * kLoadColumns);
      }
    }
    ptx::tcgen05_wait_ld();
#pragma unroll
    for (auto& half : sums) {
      for (auto& loaded : half) {
        for (uint32_t& sum : loaded) ptx::pin(sum);
      }
    }
    timeline_.stamp(Event::kLoaded);
  }

  __device__ static float2 to_float(uint32_t low, uint32_t high) {
    if constexpr (kFactorType == Type::kInt8) {
      return {static_cast<float>(static_cast<int>(low)),
              static_cast<float>(static_cast<int>(high))};
    } else {
      return {__uint_as_float(low), __uint_as_float(high)};
    }
  }

  // Returns the place of the corrections of the thread's two columns of core matrix j of its warp.
  __device__ int2& correction(int storer, int j) {
    int32_t* const first = shared_.corrections + storer * kColumns + thread_column();
    return reinterpret_cast<int2*>(first)[j * kCore / 2];
  }

  // Loads the corrections, which are the first row of their accumulator, and writes them to shared
  // memory, because there are no registers left for them with 256 columns and a table.
  __device__ void load_corrections(int storer, uint32_t first_sum, bool elected) {
    wait_for_accumulator(shared_.multiplied[0], 0, Event::kMultiplied);
#pragma unroll
    for (int first = 0; first < kColumns; first += kLoadColumns) {
      uint32_t sums[kLoadColumns / 2];
      ptx::tcgen05_ld_16x256b(sums, first_sum + first);
      ptx::tcgen05_wait_ld();
      for (uint32_t& sum : sums) ptx::pin(sum);
      if (threadIdx.x % kWarpgroup >= kCore / 2) continue;
#pragma unroll
      for (int j = 0; j < kLoadColumns / kCore; ++j) {
        correction(storer, first / kCore + j) = {int(sums[4 * j]), int(sums[4 * j + 1])};
      }
    }
    timeline_.stamp(Event::kLoaded);
    free_accumulator(0, elected);
    ptx::bar_sync<1, kStorers * kWarpgroup>();
  }

  // Corrects and scales two sums and adds the terms, for the thread's r-th row of core matrix j of a
  // step.
  __device__ static float2 finish(const Sums& sums, int r, int j, int2 correction, float2 scale,
                                  float2 term) {
    constexpr int kLoaded = kLoadColumns / kCore;
    const auto& loaded = sums[r / 2][j / kLoaded];
    const int first = j % kLoaded * 4 + r % 2 * 2;
    return __ffma2_rn(to_float(loaded[first] + correction.x, loaded[first + 1] + correction.y),
                      scale, term);
  }

  // Returns the offset in a staging buffer at which a thread writes its part of the first core
  // matrices. A row has kStoreBytes, and its units of 16 bytes are swizzled, so core matrix j is at
  // the exclusive or of this offset and j times its width. For bfloat16, lane 8 m + i passes to
  // stmatrix the address of row i of the m-th of four neighbouring core matrices. For float32 each
  // thread writes its own pairs.
  __device__ static uint32_t staging_offset() {
    const uint32_t lane = threadIdx.x % 32;
    const bool pairs = out_dtype == Type::kFloat32;
    const uint32_t row = pairs ? lane / 4 : lane % kCore;
    const uint32_t unit = pairs ? lane % 4 / 2 : lane / kCore;
    const uint32_t swizzled = unit ^ (kStoreBytes == 128 ? row : row / 2);
    return row * kStoreBytes + swizzled * 16 + (pairs ? lane % 2 * 8 : 0);
  }

  // Waits until TMA has read the buffers in which the next group of stores will be staged.
  __device__ void wait_for_buffers(bool elected) {
    if (elected) ptx::cp_async_bulk_wait_group_read<kBuffers / kGroup - 1>();
    __syncwarp();
    timeline_.stamp(Event::kFreed);
  }

  // Computes the elements of y for store s of a step, and writes them to a buffer. With images
  // `corrections` are those of the step. There are no registers for more than a few of them.
  __device__ void stage(const Sums& sums, int s, const float2* scale, const Terms& terms,
                        int first_term, const int2* corrections, uint8_t* buffer, uint32_t offset) {
    constexpr int kCores = kStoreColumns / kCore, kCoreBytes = kCore * kOutBytes;
    const int first = s * kCores;
    // Core matrices that are written at once.
    constexpr int kWritten = out_dtype == Type::kFloat32 ? 1 : 4;
    int2 correction[kWritten] = {};
    const auto value = [&](int r, int j) {
      return finish(sums, r, first + j, correction[j % kWritten], scale[first + j],
                    terms.rows[has_table ? r : 0][first_term + first + j]);
    };
#pragma unroll
    for (int j = 0; j < kCores; j += kWritten) {
      if constexpr (kImages) {
#pragma unroll
        for (int m = 0; m < kWritten; ++m) {
          correction[m] = corrections[(first + j + m) * kCore / 2];
        }
      }
      uint8_t* address = buffer + (offset ^ (j * kCoreBytes));
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r, address += kCore * kStoreBytes) {
        if constexpr (out_dtype == Type::kFloat32) {
          *reinterpret_cast<float2*>(address) = value(r, j);
        } else {
          uint32_t words[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float2 y = value(r, j + m);
            words[m] = ptx::cvt_rn_bf16x2(y.x, y.y);
          }
          ptx::stmatrix_x4(address, words);
        }
      }
    }
    timeline_.stamp(Event::kConverted);
  }

  // Issues a group of stores. `number` is the index of the last store among the warp's stores, and
  // `column` its first column.
  template <typename Buffers>
  __device__ void issue_stores(const Buffers& staged, uint32_t number, int column, int row,
                               bool elected) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (elected) {
      for (int g = kGroup - 1; g >= 0; --g) {
        ptx::cp_async_bulk_tensor_store(args_.y, column - g * kStoreColumns, row,
                                        staged[(number - g) % kBuffers]);
      }
      ptx::cp_async_bulk_commit_group();
    }
    timeline_.stamp(Event::kStoresIssued);
  }

  // Delays the warps of the second storing warpgroup.
  __device__ static void stagger(int storer) {
    if constexpr (Tuned::kStaggerCycles > 0) {
      const uint32_t begin = ptx::clock();
      while (ptx::clock() - begin < static_cast<uint32_t>(storer * Tuned::kStaggerCycles)) {
      }
    }
  }

  // If K is split, vector v of a thread is its v / kRowVectors-th row, in kVectorCores core matrices.
  static constexpr int kVectorCores = 2, kRowVectors = kColumns / kCore / kVectorCores;

  // Calls visit(word, v, i) for the word of a thread's i-th sum of each vector v.
  template <typename Visit>
  __device__ static void for_each_sum(Sums& sums, Visit visit) {
    constexpr int kLoaded = kLoadColumns / kCore;
#pragma unroll
    for (int v = 0; v < Memory::kVectors; ++v) {
      const int r = v / kRowVectors;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = v % kRowVectors * kVectorCores + i / 2;
        visit(sums[r / 2][j / kLoaded][j % kLoaded * 4 + r % 2 * 2 + i % 2], v, i);
      }
    }
  }

  // Exchanges the partial sums of a tile with the other blocks.
  __device__ void exchange(Sums& sums) {
    ptx::Sum<dtype> vectors[Memory::kVectors][4];
    for_each_sum(sums, [&](uint32_t& word, int v, int i) { ptx::from_bits(vectors[v][i], word); });
    const auto sum_of = [&](int v, int i) -> auto& { return vectors[v][i]; };
    split_.exchange(sum_of, [&](ptx::Mbarrier& arrived, uint32_t parity) {
      wait(arrived, parity, Event::kLoaded);
    });
    for_each_sum(sums, [&](uint32_t& word, int v, int i) { word = ptx::bits(vectors[v][i]); });
  }

  // Stores the elements of y that this block completes. The warp's first row and column are `row` and
  // `column`.
  __device__ void store_share(const Sums& sums, const float2* scale, const Terms& terms, int row,
                              int column) {
#pragma unroll
    for (int v = 0; v < Memory::kVectors; ++v) {
      const int r = v / kRowVectors, own_row = row + r * kCore + thread_row();
      if (!split_.completes(v) || own_row >= args_.M) continue;
      auto* const y = static_cast<uint8_t*>(args_.out) +
                      (int64_t{own_row} * args_.N + column + thread_column()) * kOutBytes;
#pragma unroll
      for (int m = 0; m < kVectorCores; ++m) {
        const int j = v % kRowVectors * kVectorCores + m;
        const float2 value = finish(sums, r, j, {}, scale[j], terms.rows[has_table ? r : 0][j]);
        if constexpr (out_dtype == Type::kFloat32) {
          *reinterpret_cast<float2*>(y + j * kCore * kOutBytes) = value;
        } else {
          *reinterpret_cast<uint32_t*>(y + j * kCore * kOutBytes) =
              ptx::cvt_rn_bf16x2(value.x, value.y);
        }
      }
    }
    timeline_.stamp(Event::kStoresIssued);
  }

  // Arrives for this warp at the first block's barrier, after which the next products may overwrite
  // the accumulator.
  __device__ void free_accumulator(uint32_t index, bool elected) {
    ptx::tcgen05_fence_before_thread_sync();
    if (!elected) return;
    if constexpr (kBlocks == 2) {
      ptx::mbarrier_arrive_cluster(ptx::mapa(&shared_.accumulator_freed[index], 0));
    } else {
      ptx::mbarrier_arrive(shared_.accumulator_freed[index]);
    }
  }

  __device__ void store(int warp, uint32_t accumulators) {
    const int storer = warp * 32 / kWarpgroup - 1, quarter = warp % (kWarpgroup / 32);
    const int first_column = column_ + storer * kColumns, first_row = quarter * kWarpRows;
    const uint32_t first_sum = accumulators + (first_row << 16) + storer * kColumns;
    auto& staged = shared_.staged[warp - kWarpgroup / 32];
    const bool elected = ptx::elect_sync();
    uint32_t offset = staging_offset();
    ptx::pin(offset);
    float2 scale[kColumns / kCore];
    load_floats(scale, args_.scale + first_column);
    Terms terms;
    if constexpr (kKeepTable && !has_table) load_terms(terms.rows, 0, first_column);
    uint32_t table_row = 0;
    bool corrects = kImages;

    const auto begin = [&](const Segment& segment) {
      table_row = segment.table_row + rank_ * kRows + first_row;
      if (corrects) load_corrections(storer, first_sum, elected);
      corrects = false;
      if constexpr (kKeepTable && has_table) load_terms(terms.rows, table_row, first_column);
    };

    // The barriers of the other blocks exist when these blocks have arrived.
    Blocks::wait();
    for_each_tile(begin, [&](int row, uint32_t n) {
      const Accumulator accumulator(n + kCorrections);
      wait_for_accumulator(shared_.multiplied[accumulator.index], accumulator.parity,
                           Event::kMultiplied);
      stagger(storer);
#pragma unroll
      for (int first = 0; first < kColumns; first += kStepColumns) {
        if constexpr (!kKeepTable) load_terms(terms.rows, table_row, first_column + first);
        Sums sums;
        load_sums(sums, first_sum + accumulator.index * tile_n + first);
        const bool last = first + kStepColumns == kColumns;
        if (last && Tuned::kRelease == Release::kLoaded)
          free_accumulator(accumulator.index, elected);
        if constexpr (kSplit) {
          // A warp without rows has nothing to store, in all blocks of the cluster.
          if (row + first_row < args_.M) {
            exchange(sums);
            store_share(sums, scale, terms, row + first_row, first_column);
          }
        } else {
#pragma unroll
          for (int s = 0; s < kStepColumns / kStoreColumns; ++s) {
            const uint32_t number = n * kStores + first / kStoreColumns + s;
            auto& buffer = staged[number % kBuffers];
            if (s % kGroup == 0) wait_for_buffers(elected);
            stage(sums, s, scale + first / kCore, terms, kKeepTable ? first / kCore : 0,
                  &correction(storer, first / kCore), buffer, offset);
            if (s % kGroup < kGroup - 1) continue;
            issue_stores(staged, number, first_column + first + s * kStoreColumns, row + first_row,
                         elected);
          }
        }
        if (last && Tuned::kRelease == Release::kStored)
          free_accumulator(accumulator.index, elected);
      }
    });
    if (elected) ptx::cp_async_bulk_wait_group_read<0>();
  }

  const Arguments& args_;
  Memory& shared_;
  uint8_t* const weight_;
  const int rank_, column_, worker_;
  Timeline timeline_;

  // The block's part in a cluster that splits K, and its share of the chunks of K.
  Split<Blocks, ptx::Sum<dtype>, Memory, kWarpgroup> split_;
  const int share_begin_, share_end_;
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

}  // namespace patch_embed::sm100

// The number of blocks that split K is chosen at the launch.
#define PATCH_EMBED_CLUSTER_b1 __cluster_dims__(1, 1, 1)
#define PATCH_EMBED_CLUSTER_b2 __cluster_dims__(2, 1, 1)
#define PATCH_EMBED_CLUSTER_split

// clang-format off
#define PATCH_EMBED_KERNEL(dtype, out_dtype, terms, tile_n, rows, sharing, slots, weight)          \
  extern "C" __global__ void __launch_bounds__(patch_embed::sm100::kThreads, 1)                    \
      PATCH_EMBED_CLUSTER_##sharing                                                                \
      patch_embed_sm100_##dtype##_##out_dtype##_##terms##_##tile_n##x##rows##_##sharing##_s##slots \
      ##_##weight(const __grid_constant__ patch_embed::Arguments args) {                           \
    namespace spelled = patch_embed::spelled;                                                      \
    static_assert(rows == patch_embed::sm100::kRows, "a block has 128 rows of a tile.");           \
    using Worker = patch_embed::sm100::Worker<                                                     \
        spelled::dtype, spelled::out_dtype, spelled::terms, tile_n, spelled::sharing, slots,       \
        spelled::weight>;                                                                          \
    Worker(args, *reinterpret_cast<Worker::Memory*>(patch_embed::sm100::shared_memory)).run();     \
  }
// clang-format on

// PATCH_EMBED_DTYPE selects the kernels that are compiled: kFloat8E4M3FN, kInt8, kBFloat16 or
// kUInt8.
#define PATCH_EMBED_KERNELS_OF(dtype) PATCH_EMBED_SM100_##dtype(PATCH_EMBED_KERNEL)
#define PATCH_EMBED_KERNELS(dtype) PATCH_EMBED_KERNELS_OF(dtype)
PATCH_EMBED_KERNELS(PATCH_EMBED_DTYPE)
