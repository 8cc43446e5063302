// The Blackwell kernel: y = (patches weight^T) * scale + table, rounded once.
//
// A worker is a cluster of two thread blocks, or one, of three warpgroups each. It owns `tile_n`
// columns of N for its whole life and walks the runs of row tiles that backends/schedule.py gives it,
// with 128 rows of every tile for each block:
//
//   feed       one thread: TMA of patches into a ring of slots.
//   multiply   one thread, of the first block: tcgen05.mma for both blocks, into one of two
//              accumulators in tensor memory.
//   store      two warpgroups, half of the columns each; a warp has 32 rows. It loads the other
//              accumulator, scales it, adds the table, and stores it by TMA, from buffers of its own:
//              warps wait for products, never for each other.
//
// The weight comes with the patches: with those of the worker's first tile, to stay, or with all of
// them. Scale and table stay in registers for a run.
//
// Shared memory, barriers, and the order in which a block begins and ends are tables in
// patch_embed_sm100.h. `mbarrier.try_wait` sees only a phase's parity, so a thread that waits for a
// phase must know that the previous one is complete: each waits for every phase of a barrier in turn.

#include "patch_embed_sm100.h"

#include <cstddef>

#include "configs.h"
#include "ptx/instruction_descriptor.h"
#include "ptx/matrix_descriptor.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "timeline.cuh"

namespace patch_embed::sm100 {

// Registers of a thread of the first and of the storing warpgroups after setmaxnreg.
constexpr int kFirstRegisters = 40, kStoreRegisters = 232;
static_assert(kFirstRegisters + kStorers * kStoreRegisters <=
                  (1 + kStorers) * registers_at_launch(kThreads),
              "setmaxnreg would wait for ever: the warpgroups want more registers than there are.");

// Registers that a storing thread needs beside sums, scale and table: less, and it spills.
constexpr int other_registers(Type out_dtype) { return out_dtype == Type::kFloat32 ? 16 : 8; }

// Bytes of K of a product.
constexpr int kProductBytes = 32;

// Warps of the first warpgroup.
constexpr int kFeedingWarp = 0, kMultiplyingWarp = 1, kAllocatingWarp = 2;

template <Type dtype, Type out_dtype, bool has_table, int tile_n, int blocks, int slots,
          bool stream_weight, typename Tuned = Tuning<out_dtype, tile_n>>
class Worker {
 public:
  static constexpr int kTileRows = blocks * kRows;
  static constexpr int kTileK = kRowBytes / itemsize(dtype);
  static constexpr int kWeightRows = tile_n / blocks;
  static constexpr int kPatchBytes = kRows * kRowBytes, kWeightBytes = kWeightRows * kRowBytes;

  // Columns of a storing warp, of a store and of a core matrix, of which a thread has 2.
  static constexpr int kColumns = tile_n / kStorers;
  static constexpr int kStoreColumns = store_columns(out_dtype, tile_n);
  static constexpr int kOutBytes = itemsize(out_dtype);
  static constexpr int kStoreBytes = kStoreColumns * kOutBytes;
  static constexpr int kStores = kColumns / kStoreColumns;
  static constexpr int kCore = 8;

  // A thread has a row of each of 4 core matrices that lie one below the other.
  static constexpr int kThreadRows = kWarpRows / kCore;
  static constexpr int kTermRows = has_table ? kThreadRows : 1;

  static constexpr int kTensorColumns = tensor_memory_columns(tile_n);
  static constexpr uint32_t kInstruction =
      ptx::instruction_descriptor(dtype, kTileRows, tile_n);

  static constexpr int kStepColumns = Tuned::kStepColumns, kLoadColumns = Tuned::kLoadColumns;
  static constexpr int kBuffers = Tuned::kStagingBuffers, kGroup = Tuned::kStoresPerGroup;
  static constexpr bool kKeepTable = Tuned::kKeepTable;

  using Memory = Shared<out_dtype, tile_n, blocks, slots, stream_weight, Tuned>;
  static_assert(blocks == 1 || blocks == 2, "a worker is one block or a pair.");
  static_assert(tile_n % 64 == 0, "a slice of N is a multiple of 64 columns.");
  static_assert(kAccumulators * tile_n <= kTensorMemory,
                "the accumulators do not fit in tensor memory.");
  static_assert(slots >= 2, "one slot is multiplied while another one is filled.");
  static_assert(kLoadColumns == 16 || kLoadColumns == 32 || kLoadColumns == 64,
                "a load has 16, 32 or 64 columns of 16 rows.");
  static_assert(kStepColumns % kLoadColumns == 0 && kColumns % kStepColumns == 0,
                "loads make a step, and steps the columns of a warp.");
  static_assert(kStepColumns % kStoreColumns == 0, "stores make a step.");
  static_assert(kStepColumns / kStoreColumns % kGroup == 0, "groups of stores make a step.");
  static_assert(kBuffers % kGroup == 0, "groups of stores make the buffers.");
  static_assert((kBuffers & (kBuffers - 1)) == 0,
                "the number of a store, which wraps, tells its buffer.");
  static_assert(Tuned::kStaggerCycles >= 0, "a warp cannot begin before its accumulator is there.");
  static_assert(kStepColumns + kColumns / 4 +
                        (kKeepTable ? kColumns : kStepColumns) / 4 * kTermRows +
                        other_registers(out_dtype) <=
                    kStoreRegisters,
                "sums, scale and table need more registers than there are.");
  static_assert(kPatchBytes % 1024 == 0 && kWeightBytes % 1024 == 0 &&
                    kWarpRows * kStoreBytes % 1024 == 0,
                "what is swizzled begins at a multiple of 1024 bytes.");
  static_assert(sizeof(Memory::filled) + sizeof(Memory::freed) + sizeof(Memory::multiplied) +
                        sizeof(Memory::read) + sizeof(Memory::tensor_memory) <=
                    1024,
                "the host counts 1024 bytes for the barriers.");
  static_assert(offsetof(Memory, staged) == slots * kPatchBytes &&
                    offsetof(Memory, filled) ==
                        slots * kPatchBytes + kStoringWarps * kBuffers * kWarpRows * kStoreBytes,
                "ring, buffers and barriers follow each other without a gap.");
  static_assert(sizeof(Memory) % 1024 == 0, "the weight behind it is swizzled.");
  static_assert(Memory::bytes(1) <= kMostSharedBytes,
                "ring, buffers and weight do not fit in shared memory.");

  __device__ Worker(const Arguments& args, Memory& shared)
      : args_(args),
        shared_(shared),
        weight_(reinterpret_cast<uint8_t*>(&shared + 1)),
        rank_(blockIdx.x % blocks),
        column_(blockIdx.x / blocks % (args.N / tile_n) * tile_n),
        worker_(blockIdx.x / blocks / (args.N / tile_n)),
        timeline_(args) {}

  __device__ void run() {
    // From one lane, so that the compiler knows that it is the same for all.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) make_barriers();
    if (warp == kMultiplyingWarp && ptx::elect_sync()) {
      ptx::prefetch_tensormap(args_.patches);
      ptx::prefetch_tensormap(args_.weight);
      ptx::prefetch_tensormap(args_.y);
    }
    __syncwarp();
    if constexpr (blocks == 2) await_peer();
    if (warp == kAllocatingWarp) {
      ptx::tcgen05_alloc<blocks, kTensorColumns>(shared_.tensor_memory);
      ptx::tcgen05_relinquish_alloc_permit<blocks>();
    }
    synchronise();
    const uint32_t accumulators = shared_.tensor_memory;
    if (warp * 32 < kWarpgroup) {
      ptx::setmaxnreg_dec<kFirstRegisters>();
      if (warp == kFeedingWarp && ptx::elect_sync()) feed();
      if (warp == kMultiplyingWarp && rank_ == 0 && ptx::elect_sync()) multiply(accumulators);
    } else {
      ptx::setmaxnreg_inc<kStoreRegisters>();
      store(warp, accumulators);
    }
    __syncwarp();
    synchronise();
    if (warp == kAllocatingWarp) ptx::tcgen05_dealloc<blocks, kTensorColumns>(accumulators);
  }

 private:
  // What tcgen05.ld gives: for 16 rows each, the columns of a step.
  using Sums = uint32_t[2][kStepColumns / kLoadColumns][kLoadColumns / 2];

  // Two neighbouring columns of each core matrix.
  struct Terms {
    float2 rows[kTermRows][(kKeepTable ? kColumns : kStepColumns) / kCore];
  };

  // A use of the ring; those of a worker are numbered.
  struct Entry {
    __device__ explicit Entry(uint32_t number) : slot(number % slots), parity(number / slots & 1) {}
    uint32_t slot, parity;
  };

  // The accumulator of the n-th tile.
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
      ptx::mbarrier_init(shared_.read[i], blocks * kStoringWarps);
    }
    ptx::fence_mbarrier_init();
  }

  // Waits until all threads of the pair have started and both blocks' mbarriers are initialised. A
  // pair may allocate tensor memory only when its peer has been launched (PTX ISA, tcgen05.alloc).
  // Relaxed: of what was written before, only the initialisations have to be seen, and
  // fence.mbarrier_init publishes those.
  __device__ static void await_peer() {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  }

  // All threads of all blocks come together, and what they did in tensor memory is done.
  __device__ static void synchronise() {
    ptx::tcgen05_fence_before_thread_sync();
    if constexpr (blocks == 2) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    } else {
      __syncthreads();
    }
    ptx::tcgen05_fence_after_thread_sync();
  }

  // Calls begin(run) for each run, and visit(row, n) for each of its tiles: this block's first row,
  // and the tile's number among the worker's. Returns how many there were.
  template <typename Begin, typename Visit>
  __device__ uint32_t for_each_tile(Begin begin, Visit visit) {
    uint32_t n = 0;
    for (int i = 0; i < args_.run_count; ++i) {
      const Run run = args_.runs[int64_t{worker_} * args_.run_count + i];
      if (run.tiles == 0) break;
      begin(run);
      for (int j = 0; j < run.tiles; ++j) {
        visit((run.first_tile + j * run.stride) * kTileRows + rank_ * kRows, n++);
        timeline_.stamp(Event::kTile);
      }
    }
    return n;
  }

  __device__ void wait(ptx::Mbarrier& barrier, uint32_t parity, Event event) {
    ptx::mbarrier_wait(barrier, parity);
    timeline_.stamp(event);
  }

  // Waits for what tensor memory has, or is free of.
  __device__ void wait_for_tensor_memory(ptx::Mbarrier& barrier, uint32_t parity, Event event) {
    ptx::mbarrier_wait(barrier, parity);
    ptx::tcgen05_fence_after_thread_sync();
    timeline_.stamp(event);
  }

  // To the first block's barrier.
  __device__ void load(void* target, const CUtensorMap& map, int x, int y, ptx::Mbarrier& arrived) {
    if constexpr (blocks == 2) {
      ptx::cp_async_bulk_tensor_of_pair(target, map, x, y, ptx::mapa(&arrived, 0));
    } else {
      ptx::cp_async_bulk_tensor(target, map, x, y, arrived);
    }
  }

  // Issues the loads of chunk k: patches from this row on, and its part of the weight.
  __device__ void load_chunk(const Entry& entry, int k, int row, bool with_weight) {
    ptx::Mbarrier& filled = shared_.filled[entry.slot];
    if (rank_ == 0) {
      const int bytes = kPatchBytes + (with_weight ? kWeightBytes : 0);
      ptx::mbarrier_arrive_expect_tx(filled, blocks * bytes);
    }
    load(shared_.patches[entry.slot], args_.patches, k * kTileK, row, filled);
    if (with_weight) {
      load(weight_ + (stream_weight ? entry.slot : k) * kWeightBytes, args_.weight, k * kTileK,
           column_ + rank_ * kWeightRows, filled);
    }
    timeline_.stamp(Event::kFed);
  }

  __device__ void feed() {
    const uint32_t tiles = for_each_tile([](const Run&) {}, [&](int row, uint32_t n) {
      for (int k = 0; k < args_.chunks; ++k) {
        const Entry entry(n * args_.chunks + k);
        wait(shared_.freed[entry.slot], entry.parity ^ 1, Event::kFreed);
        load_chunk(entry, k, row, stream_weight || n == 0);
      }
    });
    // The last use of every slot: those of the entries that would come next are freed. The ISA does not
    // say that commits arrive in order, so that the last tile's would do.
    for (int i = 0; i < slots; ++i) {
      const Entry entry(tiles * args_.chunks + i);
      ptx::mbarrier_wait(shared_.freed[entry.slot], entry.parity ^ 1);
    }
  }

  // Issues the products of chunk k, and frees its slot when they are done.
  __device__ void issue_products(uint32_t sums, const Entry& entry, int k) {
    const uint32_t weight_part = stream_weight ? entry.slot : k;
    const uint64_t a =
        ptx::tcgen05_matrix_descriptor(ptx::shared_address(shared_.patches[entry.slot]));
    const uint64_t b =
        ptx::tcgen05_matrix_descriptor(ptx::shared_address(weight_ + weight_part * kWeightBytes));
#pragma unroll
    for (int step = 0; step < kRowBytes; step += kProductBytes) {
      ptx::tcgen05_mma<dtype, blocks>(sums, ptx::advance(a, step), ptx::advance(b, step),
                                      kInstruction, k > 0 || step > 0);
    }
    ptx::tcgen05_commit<blocks>(shared_.freed[entry.slot]);
    timeline_.stamp(Event::kIssued);
  }

  __device__ void multiply(uint32_t accumulators) {
    for_each_tile([](const Run&) {}, [&](int, uint32_t n) {
      const Accumulator accumulator(n);
      wait_for_tensor_memory(shared_.read[accumulator.index], accumulator.parity ^ 1, Event::kTurn);
      const uint32_t sums = accumulators + accumulator.index * tile_n;
      for (int k = 0; k < args_.chunks; ++k) {
        const Entry entry(n * args_.chunks + k);
        wait(shared_.filled[entry.slot], entry.parity, Event::kFilled);
        issue_products(sums, entry, k);
      }
      ptx::tcgen05_commit<blocks>(shared_.multiplied[accumulator.index]);
    });
  }

  // A thread's row of the first core matrix, and its columns in a row of one.
  __device__ static int thread_row() { return threadIdx.x % 32 / 4; }
  __device__ static int thread_column() { return threadIdx.x % 4 * 2; }

  // What is added from this column of N on: rows of the table, or offsets.
  template <int count>
  __device__ void load_terms(float2 (&rows)[kTermRows][count], uint32_t table_row,
                             int column) const {
#pragma unroll
    for (int r = 0; r < kTermRows; ++r) {
      if constexpr (has_table) {
        const uint32_t row = (table_row + r * kCore + thread_row()) % args_.period;
        const auto* words = reinterpret_cast<const uint32_t*>(
            static_cast<const uint16_t*>(args_.table) + int64_t{row} * args_.N + column +
            thread_column());
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

  // The columns of a step, of a warp's rows, from this address of tensor memory on.
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
    if constexpr (dtype == Type::kInt8) {
      return {static_cast<float>(static_cast<int>(low)), static_cast<float>(static_cast<int>(high))};
    } else {
      return {__uint_as_float(low), __uint_as_float(high)};
    }
  }

  // The thread's columns of core matrix j of a step, in its r-th row.
  __device__ static float2 finish(const Sums& sums, int r, int j, float2 scale, float2 term) {
    constexpr int kLoaded = kLoadColumns / kCore;
    const auto& loaded = sums[r / 2][j / kLoaded];
    const int at = j % kLoaded * 4 + r % 2 * 2;
    return __ffma2_rn(to_float(loaded[at], loaded[at + 1]), scale, term);
  }

  // Where a thread writes in a buffer, into rows of kStoreBytes whose units of 16 bytes are swizzled:
  // its part of the first core matrices. Those j columns of them further are at an exclusive or away.
  // stmatrix wants from lane 8 m + i the place of row i of the m-th of four core matrices in a row;
  // floats are written in pairs, by the thread that has them.
  __device__ static uint32_t first_place() {
    const uint32_t lane = threadIdx.x % 32;
    const bool pairs = out_dtype == Type::kFloat32;
    const uint32_t row = pairs ? lane / 4 : lane % kCore;
    const uint32_t unit = pairs ? lane % 4 / 2 : lane / kCore;
    const uint32_t exchanged = unit ^ (kStoreBytes == 128 ? row : row / 2);
    return row * kStoreBytes + exchanged * 16 + (pairs ? lane % 2 * 8 : 0);
  }

  // Waits until the stores that had the next group of buffers have read them.
  __device__ void wait_for_buffers(bool elected) {
    if (elected) ptx::cp_async_bulk_wait_group_read<kBuffers / kGroup - 1>();
    __syncwarp();
    timeline_.stamp(Event::kFreed);
  }

  // Puts store s of a step into a buffer.
  __device__ void stage(const Sums& sums, int s, const float2* scale, const Terms& terms,
                               int first_term, uint8_t* buffer, uint32_t first_place) {
    constexpr int kCores = kStoreColumns / kCore, kCoreBytes = kCore * kOutBytes;
    const int first = s * kCores;
    const auto value = [&](int r, int j) {
      return finish(sums, r, first + j, scale[first + j],
                    terms.rows[has_table ? r : 0][first_term + first + j]);
    };
    const int step = out_dtype == Type::kFloat32 ? 1 : 4;
#pragma unroll
    for (int j = 0; j < kCores; j += step) {
      uint8_t* place = buffer + (first_place ^ (j * kCoreBytes));
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r, place += kCore * kStoreBytes) {
        if constexpr (out_dtype == Type::kFloat32) {
          *reinterpret_cast<float2*>(place) = value(r, j);
        } else {
          uint32_t words[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float2 y = value(r, j + m);
            words[m] = ptx::cvt_rn_bf16x2(y.x, y.y);
          }
          ptx::stmatrix_x4(place, words);
        }
      }
    }
    timeline_.stamp(Event::kConverted);
  }

  // Issues the stores of a group, of which `number` is the last one; its columns begin at `column`.
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
    timeline_.stamp(Event::kStored);
  }

  // Until a later cycle for each further storing warp of a scheduler.
  __device__ static void wait_for_turn(int member) {
    if constexpr (Tuned::kStaggerCycles > 0) {
      const uint32_t begin = ptx::clock();
      while (ptx::clock() - begin < static_cast<uint32_t>(member * Tuned::kStaggerCycles)) {
      }
    }
  }

  __device__ void release_accumulator(uint32_t index, bool elected) {
    ptx::tcgen05_fence_before_thread_sync();
    if (!elected) return;
    if constexpr (blocks == 2) {
      ptx::mbarrier_arrive_cluster(ptx::mapa(&shared_.read[index], 0));
    } else {
      ptx::mbarrier_arrive(shared_.read[index]);
    }
  }

  __device__ void store(int warp, uint32_t accumulators) {
    const int member = warp * 32 / kWarpgroup - 1, quarter = warp % (kWarpgroup / 32);
    const int first_column = column_ + member * kColumns, first_row = quarter * kWarpRows;
    const uint32_t first_sum = accumulators + (first_row << 16) + member * kColumns;
    auto& staged = shared_.staged[warp - kWarpgroup / 32];
    const bool elected = ptx::elect_sync();
    uint32_t place = first_place();
    ptx::pin(place);
    float2 scale[kColumns / kCore];
    load_floats(scale, args_.scale + first_column);
    Terms terms;
    if constexpr (kKeepTable && !has_table) load_terms(terms.rows, 0, first_column);
    uint32_t table_row = 0;

    const auto begin = [&](const Run& run) {
      table_row = run.table_row + rank_ * kRows + first_row;
      if constexpr (kKeepTable && has_table) load_terms(terms.rows, table_row, first_column);
    };

    for_each_tile(begin, [&](int row, uint32_t n) {
      const Accumulator accumulator(n);
      wait_for_tensor_memory(shared_.multiplied[accumulator.index], accumulator.parity,
                             Event::kMultiplied);
      wait_for_turn(member);
#pragma unroll
      for (int first = 0; first < kColumns; first += kStepColumns) {
        if constexpr (!kKeepTable) load_terms(terms.rows, table_row, first_column + first);
        Sums sums;
        load_sums(sums, first_sum + accumulator.index * tile_n + first);
        const bool last = first + kStepColumns == kColumns;
        if (last && Tuned::kRelease == Release::kLoaded) release_accumulator(accumulator.index, elected);
#pragma unroll
        for (int s = 0; s < kStepColumns / kStoreColumns; ++s) {
          const uint32_t number = n * kStores + first / kStoreColumns + s;
          auto& buffer = staged[number % kBuffers];
          if (s % kGroup == 0) wait_for_buffers(elected);
          stage(sums, s, scale + first / kCore, terms, kKeepTable ? first / kCore : 0, buffer, place);
          if (s % kGroup < kGroup - 1) continue;
          issue_stores(staged, number, first_column + first + s * kStoreColumns, row + first_row,
                       elected);
        }
        if (last && Tuned::kRelease == Release::kStored) release_accumulator(accumulator.index, elected);
      }
    });
    if (elected) ptx::cp_async_bulk_wait_group_read<0>();
  }

  const Arguments& args_;
  Memory& shared_;
  uint8_t* const weight_;
  const int rank_, column_, worker_;
  Timeline timeline_;
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

}  // namespace patch_embed::sm100

#define PATCH_EMBED_KERNEL(dtype, out_dtype, columns, tile_n, blocks, slots, weight)               \
  extern "C" __global__ void __launch_bounds__(patch_embed::sm100::kThreads, 1)                   \
      __cluster_dims__(blocks, 1, 1)                                                              \
      patch_embed_sm100_##dtype##_##out_dtype##_##columns##_##tile_n##x128_b##blocks##_s##slots##_## \
      weight(const __grid_constant__ patch_embed::Arguments args) {                               \
    namespace spelled = patch_embed::spelled;                                                     \
    using Worker = patch_embed::sm100::Worker<spelled::dtype, spelled::out_dtype,                 \
                                              spelled::columns, tile_n, blocks, slots,            \
                                              spelled::weight>;                                   \
    Worker(args, *reinterpret_cast<Worker::Memory*>(patch_embed::sm100::shared_memory)).run();    \
  }

// PATCH_EMBED_DTYPE is kFloat8E4M3FN, kInt8 or kBFloat16: the kernels of which dtype are compiled.
#define PATCH_EMBED_KERNELS_OF(dtype) PATCH_EMBED_SM100_##dtype(PATCH_EMBED_KERNEL)
#define PATCH_EMBED_KERNELS(dtype) PATCH_EMBED_KERNELS_OF(dtype)
PATCH_EMBED_KERNELS(PATCH_EMBED_DTYPE)
