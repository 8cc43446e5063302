// The 64-bit descriptors of operands in shared memory for wgmma (PTX ISA 9.7.15.5.1) and
// tcgen05.mma (9.7.16.4.1).

#pragma once

#include <cstdint>

// Marks functions that both the host and the kernels call.
#ifdef __CUDACC__
#define PATCH_EMBED_HOST_DEVICE __host__ __device__
#else
#define PATCH_EMBED_HOST_DEVICE
#endif

namespace patch_embed::ptx {

// Rows of a core matrix. The 128-byte swizzle repeats after the same number of rows.
constexpr uint32_t kSwizzledRows = 8;

// Encodes an address or a distance in 14 bits, in units of 16 bytes.
constexpr PATCH_EMBED_HOST_DEVICE uint64_t descriptor_field(uint32_t bytes) {
  return (bytes & 0x3FFFF) >> 4;
}

// Returns the descriptor of contiguous rows of 128 bytes of K, with the 128-byte swizzle:
//
//   bits   field                  value
//   0-13   start address          address of the first row, plus the offset of the product in K
//   16-29  leading dimension      1; not used with a swizzle
//   32-45  stride dimension       1024 bytes, from 8 rows to the next 8
//   49-51  base offset            0: the rows start at a multiple of 1024 bytes
//   62-63  swizzle                1: 128 bytes
constexpr PATCH_EMBED_HOST_DEVICE uint64_t matrix_descriptor(uint32_t address) {
  return descriptor_field(address) | uint64_t{1} << 16 |
         descriptor_field(kSwizzledRows * 128) << 32 | uint64_t{1} << 62;
}

// Returns the descriptor for tcgen05.mma, of contiguous rows of `swizzle` bytes of K, 128 or 64, with
// a swizzle of this width. It differs in these fields:
//
//   32-45  stride dimension       8 * swizzle bytes
//   46-48  version                0b001
//   49-51  base offset            0: the rows start at a multiple of 8 * swizzle bytes
//   52     leading dimension mode 0: relative
//   61-63  swizzle                2: 128 bytes, 4: 64 bytes
constexpr PATCH_EMBED_HOST_DEVICE uint64_t tcgen05_matrix_descriptor(uint32_t address,
                                                                     uint32_t swizzle) {
  return descriptor_field(address) | uint64_t{1} << 16 |
         descriptor_field(kSwizzledRows * swizzle) << 32 | uint64_t{1} << 46 |
         uint64_t{swizzle == 128 ? 2u : 4u} << 61;
}

// Returns the descriptor of the matrix that starts `bytes` bytes later.
constexpr PATCH_EMBED_HOST_DEVICE uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + descriptor_field(bytes);
}

}  // namespace patch_embed::ptx
