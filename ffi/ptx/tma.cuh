// Copies from global to shared memory by TMA, which arrive at an mbarrier: PTX ISA 9.7.9.25.

#pragma once

#include <cuda.h>

#include "mbarrier.cuh"

namespace patch_embed::ptx {

// 9.7.9.25.4.1: neighbouring bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(void* target, const void* source, uint32_t bytes,
                                              Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(&arrived))
      : "memory");
}

// 9.7.9.25.5.2: the box at these coordinates, innermost first.
__device__ __forceinline__ void cp_async_bulk_tensor(void* target, const CUtensorMap& map, int x,
                                                     int y, Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&arrived))
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

// 9.7.9.15
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace patch_embed::ptx
