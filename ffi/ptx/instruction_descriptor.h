// The 32-bit instruction descriptor of tcgen05.mma: types and shape (PTX ISA 9.7.16.4.2).

#pragma once

#include <cstdint>

#include "../kernel.h"

namespace patch_embed::ptx {

// Returns the descriptor of a product [rows, columns] of two operands of this dtype (uint8 and int8 if
// it is uint8), with K innermost in both:
//
//   bits   field                      kind::f8f6f4   kind::f16      kind::i8
//   0-3    sparsity, saturation       0              0              0
//   4-5    type of the accumulators   1: float32     1: float32     2: int32
//   7-9    type of the first operand  0: e4m3        1: bfloat16    1: int8, 0: uint8
//   10-12  type of the second operand 0: e4m3        1: bfloat16    1: int8
//   13-16  negated, transposed        0              0              0
//   17-22  columns, in units of 8
//   24-28  rows, in units of 16
//   30-31  shift of .ws               0              0              0
constexpr uint32_t instruction_descriptor(Type dtype, int rows, int columns) {
  const uint32_t sums = factor_type(dtype) == Type::kInt8 ? 2 : 1;
  const uint32_t second = dtype == Type::kFloat8E4M3FN ? 0 : 1;
  const uint32_t first = dtype == Type::kUInt8 ? 0 : second;
  return sums << 4 | first << 7 | second << 10 | static_cast<uint32_t>(columns / 8) << 17 |
         static_cast<uint32_t>(rows / 16) << 24;
}

}  // namespace patch_embed::ptx
