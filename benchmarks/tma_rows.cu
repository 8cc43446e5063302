// Measures the rate at which TMA alone loads rows to shared memory; see benchmarks/tma_rows.py.
//
// One thread of each block issues phases of kLoads loads into a ring of slots. Before it refills a
// slot it waits only until the slot's previous loads have arrived. In a cluster each block issues
// its share of every phase, and TMA sends the loaded rows to all blocks of the cluster.
//
// The thread must not be slower than TMA. So the parameters of the loads' coordinates are known at
// compile time, and the coordinates are computed before the thread waits.

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace tma_rows {

using namespace patch_embed;

constexpr int kLoads = 4;
constexpr int kMostSlots = 16;

struct Arguments {
  CUtensorMap map;
  int64_t* cycles;   // duration of each block
  uint8_t* arrived;  // receives the bytes of each block's last phase; may be null
  int32_t phases;    // number of phases of a block
  int32_t last;      // number of different phases; then the loads start again at the first tile
  int32_t bytes;     // bytes of a load
  int32_t stride;    // bytes from one load's place in a slot to the next
  int32_t slots;
};

// How a load addresses its first row and its line: im2col with offsets, rows of a matrix, or lines
// of images.
enum class Mode { kIm2col, kMatrix, kLines };

// Load l is load u = l % loads of tile l / loads. It begins at line u / parts, in the row that
// contains the tile's first byte of each line: tiles are `tile` bytes apart, rows `span` bytes. A
// line is loaded in `parts` pieces, `step` elements apart. `width` is the size of the tensor's
// second-to-last dimension.
template <Mode mode_, int loads, int parts, int step, int tile, int span, int width>
struct Layout {
  static constexpr Mode mode = mode_;
  struct Place {
    int x, line, w, n;
  };
  __device__ static Place place(uint32_t l) {
    const uint32_t row = l / loads * tile / span, u = l % loads;
    return {int(u % parts * step), int(u / parts), int(row % width), int(row / width)};
  }
};

// Issues the TMA instruction; in a cluster, with a mask of the blocks that receive the box.
#define TMA_ROWS_ISSUE(form, operands, ...)                                             \
  if constexpr (cluster == 1) {                                                         \
    asm volatile("cp.async.bulk.tensor." form ".mbarrier::complete_tx::bytes " operands \
                 ";" ::__VA_ARGS__                                                      \
                 : "memory");                                                           \
  } else {                                                                              \
    asm volatile("cp.async.bulk.tensor." form                                           \
                 ".mbarrier::complete_tx::bytes.multicast::cluster " operands           \
                 ", %2;" ::__VA_ARGS__                                                  \
                 : "memory");                                                           \
  }

template <typename Layout, int cluster>
__device__ void issue(uint32_t target, const Arguments& args, const typename Layout::Place& at,
                      uint32_t arrived) {
  const uint16_t all = (1 << cluster) - 1;
  if constexpr (Layout::mode == Mode::kIm2col) {
    TMA_ROWS_ISSUE("4d.shared::cluster.global.im2col",
                   "[%0], [%1, {%3, %4, %5, %6}], [%7], {%8, %9}", "r"(target), "l"(&args.map),
                   "h"(all), "r"(at.x), "r"(at.w), "r"(0), "r"(at.n), "r"(arrived),
                   "h"(uint16_t{0}), "h"(uint16_t(at.line)));
  } else if constexpr (Layout::mode == Mode::kMatrix) {
    TMA_ROWS_ISSUE("2d.shared::cluster.global.tile", "[%0], [%1, {%3, %4}], [%5]", "r"(target),
                   "l"(&args.map), "h"(all), "r"(at.x), "r"(at.n), "r"(arrived));
  } else {
    TMA_ROWS_ISSUE("3d.shared::cluster.global.tile", "[%0], [%1, {%3, %4, %5}], [%6]", "r"(target),
                   "l"(&args.map), "h"(all), "r"(at.x), "r"(at.line), "r"(at.n), "r"(arrived));
  }
}

template <typename Layout, int cluster>
__device__ void run(const Arguments& args) {
  constexpr int kShare = kLoads / cluster;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ ptx::Mbarrier filled[kMostSlots], freed[kMostSlots];
  const int slot_bytes = kLoads * args.stride, clusters = gridDim.x / cluster;
  const int rank = blockIdx.x % cluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.slots; ++i) {
      ptx::mbarrier_init(filled[i], 1);
      ptx::mbarrier_init(freed[i], cluster);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x == 0) {
    const int64_t begin = clock64();
    int slot = 0, parity = 1, phase = blockIdx.x / cluster % args.last;
    for (int i = 0; i < args.phases; ++i) {
      typename Layout::Place places[kShare];
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        places[j] = Layout::place(phase * kLoads + rank + j * cluster);
        for (int* coordinate : {&places[j].x, &places[j].line, &places[j].w, &places[j].n}) {
          ptx::pin(*coordinate);
        }
      }
      phase += clusters;
      while (phase >= args.last) phase -= args.last;
      if (i >= args.slots) ptx::mbarrier_wait(filled[slot], parity);
      ptx::mbarrier_arrive_expect_tx(filled[slot], kLoads * args.bytes);
      if constexpr (cluster > 1) {
        // A block may send to a slot only when no block of the cluster waits for its old loads.
        for (int other = 0; other < cluster; ++other) {
          ptx::mbarrier_arrive_cluster(ptx::mapa(&freed[slot], other));
        }
        ptx::mbarrier_wait(freed[slot], parity ^ 1);
      }
      const uint32_t target = ptx::shared_address(memory) + slot * slot_bytes;
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        issue<Layout, cluster>(target + (rank + j * cluster) * args.stride, args, places[j],
                               ptx::shared_address(&filled[slot]));
      }
      if (++slot == args.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    // Waits for the slots that are still being filled, in the order in which they were issued.
    for (int i = args.phases < args.slots ? args.phases : args.slots; i > 0; --i) {
      const int number = args.phases - i;
      ptx::mbarrier_wait(filled[number % args.slots], number / args.slots & 1);
    }
    args.cycles[blockIdx.x] = clock64() - begin;
  }
  __syncthreads();
  if (args.arrived) {
    const uint8_t* const slot = memory + (args.phases - 1) % args.slots * slot_bytes;
    for (int i = threadIdx.x; i < slot_bytes; i += blockDim.x) {
      args.arrived[int64_t{blockIdx.x} * slot_bytes + i] = slot[i];
    }
  }
  // A block's barriers and memory must last until all blocks have finished.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

}  // namespace tma_rows

#define TMA_ROWS_KERNEL(cluster, name, mode, ...)                                      \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(128)    \
      name##_##cluster(const __grid_constant__ tma_rows::Arguments args) {             \
    tma_rows::run<tma_rows::Layout<tma_rows::Mode::mode, __VA_ARGS__>, cluster>(args); \
  }
#define TMA_ROWS_KERNELS(...)     \
  TMA_ROWS_KERNEL(1, __VA_ARGS__) \
  TMA_ROWS_KERNEL(2, __VA_ARGS__) \
  TMA_ROWS_KERNEL(4, __VA_ARGS__)
// benchmarks/tma_rows.py defines TMA_ROWS, a list of X(name, mode, loads, parts, ...).
TMA_ROWS(TMA_ROWS_KERNELS)
