// Instructions for lanes, registers, conversions and loads of a warp.

#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.h"

namespace patch_embed::ptx {

// 9.7.13.14: returns whether this lane is elected. The same lane is elected every time.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{ .reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected; }"
      : "=r"(elected));
  return elected;
}

// 10: return the number of this cluster, the number of blocks of a cluster, and this block's rank
// in its cluster.
__device__ __forceinline__ uint32_t clusterid_x() {
  uint32_t number;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}
__device__ __forceinline__ uint32_t cluster_nctarank() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.19.5: sets the number of registers of each thread of this warpgroup.
template <int count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// 9.7.13.1: waits until `threads` threads have arrived at this numbered barrier. Barrier 0 is that of
// __syncthreads.
template <int barrier, int threads>
__device__ __forceinline__ void bar_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

// 9.7.9.21: rounds two floats to bfloat16 and packs them, the first into the lower half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 9.7.9.9: loads words of global memory that no thread writes while the kernel runs.
__device__ __forceinline__ void ld_global_nc(uint32_t (&words)[4], const void* source) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(__cvta_generic_to_global(source)));
}

__device__ __forceinline__ void ld_global_nc(uint32_t (&words)[2], const void* source) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "l"(__cvta_generic_to_global(source)));
}

// 9.7.14.5.15: loads four matrices of 8 x 16 bytes. Lane 8 m + r passes the address of row r of
// matrix m. Lane 4 r + c receives bytes 4 c to 4 c + 3 of row r of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// 9.7.14.5.16: stores four matrices of 8 x 8 elements of 16 bits. Lane 4 r + c passes elements 2 c
// and 2 c + 1 of row r of each matrix. Lane 8 m + r passes the address of row r of matrix m.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(row))),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// 10: returns the lower half of the multiprocessor's cycle counter.
__device__ __forceinline__ uint32_t clock() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
  return cycles;
}

// Waits until a word has been loaded, because it depends on the word: it executes a fence
// (9.7.13.4) only if the word equals one unlikely value.
__device__ __forceinline__ void membar_cta_if(uint32_t word) {
  asm volatile(
      "{ .reg .pred found;\n"
      "setp.eq.u32 found, %0, 0x7FA5C0DE;\n"
      "@found membar.cta; }" ::"r"(word));
}

// The type of a sum of products.
template <Type dtype>
using Sum = std::conditional_t<factor_type(dtype) == Type::kInt8, int32_t, float>;

// Return the bits of a number, and the number with these bits.
__device__ __forceinline__ uint32_t bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ uint32_t bits(int32_t value) { return static_cast<uint32_t>(value); }
__device__ __forceinline__ void from_bits(float& value, uint32_t bits) {
  value = __uint_as_float(bits);
}
__device__ __forceinline__ void from_bits(int32_t& value, uint32_t bits) {
  value = static_cast<int32_t>(bits);
}

// Generates no instruction. The compiler must assume that the value changes here, so it cannot
// compute anything from it earlier.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void pin(int32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }

}  // namespace patch_embed::ptx
