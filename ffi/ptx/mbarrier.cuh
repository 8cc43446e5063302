// Barriers in shared memory (PTX ISA 9.7.13.15) and cluster barriers (9.7.13.3).

#pragma once

#include <cstdint>

namespace patch_embed::ptx {

// 9.7.13.15.2: an opaque object of 64 bits.
using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.13.15.9
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// 9.7.13.4: makes mbarrier_init visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.13.15.13
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// 9.7.13.15.13: arrives, and adds `bytes` to the bytes that the phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// 9.7.9.23: returns the address of the same variable in the block of this rank of the cluster.
__device__ __forceinline__ uint32_t mapa(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// 9.7.9.12: stores 16 bytes into shared memory of any block of the cluster, and adds them to the
// bytes that have arrived at a barrier of the same block. Both addresses come from `mapa`.
__device__ __forceinline__ void st_async(uint32_t target, const uint32_t (&words)[4],
                                         uint32_t arrived) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(arrived)
      : "memory");
}

// 9.7.13.15.13: arrives at a barrier of any block of the cluster, at an address from `mapa`. It
// orders execution, which is enough for the fences of tensor memory (9.7.16.6.4), and makes no
// memory visible to other blocks. .release.cluster would, but it costs a MEMBAR.ALL.GPU. Without
// these words the scope would be one block.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// 9.7.13.15.16: waits for a limited time; returns whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_try_wait_parity(Mbarrier& barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete; }"
      : "=r"(complete)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return complete;
}

// Waits until the phase of this parity is complete. On a new barrier the phase of parity 1 counts
// as complete.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// 9.7.13.3
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// 9.7.13.3: arrives without ordering memory accesses. fence_mbarrier_init still makes
// initialisations visible.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace patch_embed::ptx
