// Copies by TMA (PTX ISA 9.7.9.25). A load into shared memory arrives at an mbarrier. A store
// belongs to a bulk group of the thread that issues it.

#pragma once

#include <cuda.h>

#include "mbarrier.cuh"

namespace patch_embed::ptx {

// 9.7.9.25.4.1: loads contiguous bytes. The addresses and `bytes` must be multiples of 16.
__device__ __forceinline__ void cp_async_bulk(void* target, const void* source, uint32_t bytes,
                                              Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(&arrived))
      : "memory");
}

// 9.7.9.25.5.2: loads the box at these coordinates, innermost first.
__device__ __forceinline__ void cp_async_bulk_tensor(void* target, const CUtensorMap& map, int x,
                                                     int y, Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&arrived))
      : "memory");
}

// The same load in a pair of blocks. It arrives at a barrier of either block, at an address from
// `mapa`.
__device__ __forceinline__ void cp_async_bulk_tensor_of_pair(void* target, const CUtensorMap& map,
                                                             int x, int y, uint32_t arrived) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(arrived)
      : "memory");
}

// The loads of a box in three dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor(void* target, const CUtensorMap& map, int x,
                                                     int y, int z, Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&arrived))
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_of_pair(void* target, const CUtensorMap& map,
                                                             int x, int y, int z,
                                                             uint32_t arrived) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(arrived)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor(void* target, const CUtensorMap& map, int x,
                                                     int y, int z, int v, int w,
                                                     Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w), "r"(shared_address(&arrived))
      : "memory");
}

// 9.7.13.4: makes this thread's accesses to shared memory visible to TMA and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The load in im2col mode (5.5.4). It loads consecutive pixels, starting at pixel (w, h) of
// image n, each shifted by `offset_w` and `offset_h`. Pixels are counted along w, then h, then n,
// inside of the bounding box of the tensor map.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col(void* target, const CUtensorMap& map,
                                                            int c, int w, int h, int n,
                                                            uint16_t offset_w, uint16_t offset_h,
                                                            Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(shared_address(target)),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(shared_address(&arrived)), "h"(offset_w),
      "h"(offset_h)
      : "memory");
}

// The same load in a pair of blocks. It arrives at a barrier of either block, at an address from
// `mapa`.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_of_pair(
    void* target, const CUtensorMap& map, int c, int w, int h, int n, uint16_t offset_w,
    uint16_t offset_h, uint32_t arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(shared_address(target)),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(arrived), "h"(offset_w), "h"(offset_h)
      : "memory");
}

// 9.7.9.25.5.2: stores the box at these coordinates, except the part that is outside of the tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap& map, int x, int y,
                                                           const void* source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
          &map),
      "r"(x), "r"(y), "r"(shared_address(source))
      : "memory");
}

// 9.7.9.25.6.1
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// 9.7.9.25.6.2: waits until all but the last `pending` store groups of this thread have finished reading
// shared memory.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// 9.7.9.15
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace patch_embed::ptx
