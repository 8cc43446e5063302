// How fast TMA brings rows to shared memory, alone: see benchmarks/tma_rows.py.
//
// One thread of each block issues phases of kLoads loads into a ring of slots. Before it fills a slot
// again it waits until what is in it has arrived, and for nothing else. In a cluster each block issues
// its share of every phase, and TMA sends what it loads to all blocks of the cluster.

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace tma_rows {

using namespace patch_embed;

constexpr int kLoads = 4;
constexpr int kMostSlots = 16;

// Load l is load u = l % loads of tile l / loads. It begins at the tile's first row, and at line
// u / parts of it. A line is loaded in `parts` pieces, `step` elements apart.
struct Arguments {
  CUtensorMap map;
  int64_t* cycles;   // of each block
  uint8_t* arrived;  // the last phase of each block; null if it is not wanted
  int32_t phases;    // of a block
  int32_t last;      // phases that differ: after them the first tile follows again
  int32_t loads, parts, step;
  int32_t rows;    // of a tile
  int32_t width;   // rows of the last dimension but one; 1 if there is none
  int32_t bytes;   // of a load
  int32_t stride;  // bytes of a load's place in a slot
  int32_t slots;
};

// How a load names its first row and its line: im2col with offsets, rows of a matrix, or lines of images.
enum class Mode { kIm2col, kMatrix, kLines };

// The instruction, with a mask of the blocks that receive the box if there are several.
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

template <Mode mode, int cluster>
__device__ void issue(uint32_t target, const Arguments& args, int l, uint32_t arrived) {
  const int row = l / args.loads * args.rows, u = l % args.loads;
  const int x = u % args.parts * args.step, line = u / args.parts;
  const int w = row % args.width, n = row / args.width;
  const uint16_t all = (1 << cluster) - 1;
  if constexpr (mode == Mode::kIm2col) {
    TMA_ROWS_ISSUE("4d.shared::cluster.global.im2col",
                   "[%0], [%1, {%3, %4, %5, %6}], [%7], {%8, %9}", "r"(target), "l"(&args.map),
                   "h"(all), "r"(x), "r"(w), "r"(0), "r"(n), "r"(arrived), "h"(uint16_t{0}),
                   "h"(uint16_t(line)));
  } else if constexpr (mode == Mode::kMatrix) {
    TMA_ROWS_ISSUE("2d.shared::cluster.global.tile", "[%0], [%1, {%3, %4}], [%5]", "r"(target),
                   "l"(&args.map), "h"(all), "r"(x), "r"(n), "r"(arrived));
  } else {
    TMA_ROWS_ISSUE("3d.shared::cluster.global.tile", "[%0], [%1, {%3, %4, %5}], [%6]", "r"(target),
                   "l"(&args.map), "h"(all), "r"(x), "r"(line), "r"(n), "r"(arrived));
  }
}

template <Mode mode, int cluster>
__device__ void run(const Arguments& args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ ptx::Mbarrier filled[kMostSlots], freed[kMostSlots];
  const int slot_bytes = kLoads * args.stride, clusters = gridDim.x / cluster;
  const int rank = blockIdx.x % cluster, first = blockIdx.x / cluster;
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
    int slot = 0, parity = 1;
    for (int i = 0; i < args.phases; ++i) {
      if (i >= args.slots) ptx::mbarrier_wait(filled[slot], parity);
      ptx::mbarrier_arrive_expect_tx(filled[slot], kLoads * args.bytes);
      if constexpr (cluster > 1) {
        // No block may send to a slot that another one still waits for.
        for (int other = 0; other < cluster; ++other) {
          ptx::mbarrier_arrive_cluster(ptx::mapa(&freed[slot], other));
        }
        ptx::mbarrier_wait(freed[slot], parity ^ 1);
      }
      const int phase = (first + i * clusters) % args.last;
      for (int j = rank; j < kLoads; j += cluster) {
        issue<mode, cluster>(ptx::shared_address(memory + slot * slot_bytes + j * args.stride),
                             args, phase * kLoads + j, ptx::shared_address(&filled[slot]));
      }
      if (++slot == args.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    // The slots that are still being filled, in the order in which they were.
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

#define TMA_ROWS_KERNEL(name, mode, cluster)                                        \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(128) \
      name##_##cluster(const __grid_constant__ tma_rows::Arguments args) {          \
    tma_rows::run<tma_rows::Mode::mode, cluster>(args);                             \
  }
#define TMA_ROWS_KERNELS(name, mode) \
  TMA_ROWS_KERNEL(name, mode, 1) TMA_ROWS_KERNEL(name, mode, 2) TMA_ROWS_KERNEL(name, mode, 4)
TMA_ROWS_KERNELS(im2col, kIm2col)
TMA_ROWS_KERNELS(matrix, kMatrix)
TMA_ROWS_KERNELS(lines, kLines)
