// Copies of single threads from global to shared memory: PTX ISA 9.7.9.25.3. They are counted in groups
// of the thread that issues them.

#pragma once

#include "mbarrier.cuh"

namespace patch_embed::ptx {

// 9.7.9.25.3.1
template <int bytes>
__device__ __forceinline__ void cp_async(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(target)),
               "l"(__cvta_generic_to_global(source)), "n"(bytes)
               : "memory");
}

// 9.7.9.25.3.2
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// 9.7.9.25.3.3: until all groups of this thread but the last `pending` are there.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace patch_embed::ptx
