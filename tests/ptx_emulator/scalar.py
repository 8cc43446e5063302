"""Arithmetic, logic, comparison, moves and conversion, separately for each lane."""

import dataclasses

import ml_dtypes
import numpy as np

from tests.ptx_emulator.errors import UnsupportedError
from tests.ptx_emulator.isa import (
    FLOATS,
    SIGNED,
    SINCE_BLACKWELL,
    UNSIGNED,
    WARP_SIZE,
    defines,
    dtype_of,
)
from tests.ptx_emulator.parser import Pair, Vector, bits

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"

# The element type of each packed type.
PACKED = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}

# Result types of floating-point arithmetic, whose NaN are canonical. Instructions that only move
# floats are defined with integer types, so that they keep all bits.
FLOAT_TYPES = ("f32", "f16", "bf16", *PACKED)


SMALLEST_NORMAL_F32 = float(np.finfo(np.float32).smallest_normal)


def modifiers(instruction) -> list[str]:
    """Returns the parts of an opcode after its name, without the dots."""
    return instruction.opcode.split(".")[1:]


def type_of(instruction) -> str:
    """Returns the type, the last part of an opcode."""
    return modifiers(instruction)[-1]


def pair(operand):
    """Returns both operands of a|b; for any other operand, returns the operand and None."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def with_canonical_nan(values):
    """Replaces every NaN by that of an H200, which has all bits set except for the sign."""
    nan = np.isnan(values)
    if not nan.any():
        return values
    dtype = values.dtype
    canonical = UNSIGNED[8 * dtype.itemsize]((1 << 8 * dtype.itemsize - 1) - 1).view(dtype)
    return np.where(nan, canonical, values)


def elementwise(
    binder,
    instruction,
    function,
    operand_types: list[str] | None = None,
    result_type: str | None = None,
):
    """Makes an `execute` that applies a function to the operands as numpy arrays of their types.

    Args:
      binder, instruction: arguments of all functions that make `execute`.
      function: a numpy ufunc or a Python function.
      operand_types: PTX types of the source operands; by default the opcode's last part.
      result_type: PTX type of the destination; by default that of the first source.
    """
    destination, *sources = instruction.operands
    operand_types = operand_types or [type_of(instruction)] * len(sources)
    # Unlike a Python function, a ufunc would accept one more argument, as its output.
    count = getattr(function, "nin", None) or function.__code__.co_argcount
    if not len(sources) == len(operand_types) == count:
        raise UnsupportedError(f"the instruction has {len(sources)} operands instead of {count}")
    result_type = result_type or operand_types[0]
    reads = [
        binder.reader(operand, ptx_type)
        for operand, ptx_type in zip(sources, operand_types, strict=True)
    ]
    views = [dtype_of(PACKED.get(ptx_type, ptx_type)) for ptx_type in operand_types]
    write = binder.writer(destination, result_type)
    dtype, raw = dtype_of(PACKED.get(result_type, result_type)), UNSIGNED[bits(result_type)]

    def execute(warp, mask):
        values = [np.ascontiguousarray(read(warp)).view(view) for read, view in zip(reads, views)]
        result = np.asarray(function(*values)).astype(dtype, copy=False)
        if result_type in FLOAT_TYPES:
            result = with_canonical_nan(result)
        write(warp, np.ascontiguousarray(result).view(raw), mask)

    return execute


def fused_multiply_add(a, b, c):
    """Computes a * b + c, rounded once, for types whose products float64 represents exactly.

    The sum is rounded to float64 and then to the type. Two roundings differ from one only if the
    first rounding creates a tie. So it rounds to odd, which never creates one.
    """
    if a.dtype == np.float64:
        raise UnsupportedError("a fused multiply-add of float64 is not supported")
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    if a.dtype == np.float32 and not _may_need_single_rounding(total).any():
        return total.astype(np.float32)
    # Knuth's TwoSum gives the exact error of the sum. If it is not zero, the last bit becomes odd.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    word = total.view(np.uint64)
    inexact = (error != 0) & np.isfinite(total) & ((word & np.uint64(1)) == 0)
    toward = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
    odd = (word.view(np.int64) + np.where(inexact, toward, 0)).view(np.float64)
    return round_once(odd, a.dtype)


def _may_need_single_rounding(total):
    """Returns whether a float64 may lie in the middle of two float32, where rounding twice errs.

    A normal float32 drops the last 29 bits of a float64. For subnormal numbers the answer is yes.
    """
    tie = total.view(np.uint64) & np.uint64((1 << 29) - 1) == np.uint64(1 << 28)
    return tie | ((np.abs(total) < SMALLEST_NORMAL_F32) & (total != 0))


def round_once(values, dtype):
    """Rounds float64 to a type once.

    ml_dtypes converts to bfloat16 through float32. The step to float32 rounds to odd here, so that
    it creates no ties.
    """
    if dtype != FLOATS["bf16"]:
        return values.astype(dtype)
    near = values.astype(np.float32)
    word = near.view(np.int32)
    inexact = (near != values) & np.isfinite(near) & (word & 1 == 0)
    toward = np.where(np.abs(near) < np.abs(values), 1, -1)
    return (word + np.where(inexact, toward, 0).astype(np.int32)).view(np.float32).astype(dtype)


@defines(INTEGER, "add{.u16,.s16,.u32,.s32,.u64,.s64}")
@defines(FLOAT, "add{,.rn}.f32")
@defines(FLOAT, "add{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@defines(HALF, "add{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def add(binder, instruction):
    return elementwise(binder, instruction, lambda a, b: a + b)


@defines(INTEGER, "sub{.u16,.s16,.u32,.s32,.u64,.s64}")
@defines(FLOAT, "sub{,.rn}.f32")
@defines(FLOAT, "sub{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@defines(HALF, "sub{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def sub(binder, instruction):
    return elementwise(binder, instruction, lambda a, b: a - b)


@defines(INTEGER, "mul.lo{.u16,.s16,.u32,.s32,.u64,.s64}")
@defines(FLOAT, "mul{,.rn}.f32")
@defines(FLOAT, "mul{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@defines(HALF, "mul{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def mul(binder, instruction):
    return elementwise(binder, instruction, lambda a, b: a * b)


def doubled_type(ptx_type: str) -> str:
    """Returns the type with twice the width."""
    return f"{ptx_type[0]}{2 * bits(ptx_type)}"


def widen(array):
    """Converts integers to the type with twice the width."""
    table = SIGNED if array.dtype.kind == "i" else UNSIGNED
    return array.astype(table[16 * array.dtype.itemsize])


@defines(INTEGER, "mul.wide{.u16,.s16,.u32,.s32}")
def mul_wide(binder, instruction):
    ptx_type = type_of(instruction)
    return elementwise(
        binder,
        instruction,
        lambda a, b: widen(a) * widen(b),
        [ptx_type, ptx_type],
        result_type=doubled_type(ptx_type),
    )


@defines(INTEGER, "mul.hi{.u16,.s16,.u32,.s32,.u64,.s64}")
def mul_hi(binder, instruction):
    def function(a, b):
        return wrap(a.astype(object) * b.astype(object) >> bits(type_of(instruction)), a.dtype)

    return elementwise(binder, instruction, function)


@defines(INTEGER, "mad.lo{.u16,.s16,.u32,.s32,.u64,.s64}")
def mad(binder, instruction):
    return elementwise(binder, instruction, lambda a, b, c: a * b + c)


@defines(INTEGER, "mad.wide{.u16,.s16,.u32,.s32}")
def mad_wide(binder, instruction):
    ptx_type = type_of(instruction)
    operand_types = [ptx_type, ptx_type, doubled_type(ptx_type)]
    return elementwise(
        binder,
        instruction,
        lambda a, b, c: widen(a) * widen(b) + c,
        operand_types,
        doubled_type(ptx_type),
    )


@defines(FLOAT, "fma.rn.f32")
@defines(FLOAT, "fma.rn.f32x2", targets=SINCE_BLACKWELL)
@defines(HALF, "fma.rn{.f16,.f16x2,.bf16,.bf16x2}")
def fma(binder, instruction):
    return elementwise(binder, instruction, fused_multiply_add)


def divide(a, b):
    """Divides, rounding toward zero. Division by zero, which 9.7.1.8 leaves open, sets all bits."""
    safe = np.where(b == 0, np.ones_like(b), b)
    magnitude = np.abs(a.astype(object)) // np.abs(safe.astype(object))
    signed = np.where((a < 0) == (safe < 0), magnitude, -magnitude)
    return np.where(b == 0, -1, signed)


def wrap(values, dtype):
    """Converts Python integers to a numpy type, modulo its range."""
    width = 8 * np.dtype(dtype).itemsize
    unsigned = [int(value) & ((1 << width) - 1) for value in np.asarray(values, object).flat]
    return np.array(unsigned, UNSIGNED[width]).view(dtype)


@defines(INTEGER, "div{.u32,.s32,.u64,.s64}")
def div(binder, instruction):
    return elementwise(binder, instruction, lambda a, b: wrap(divide(a, b), a.dtype))


@defines(INTEGER, "rem{.u32,.s32,.u64,.s64}")
def rem(binder, instruction):
    def function(a, b):
        return wrap(a.astype(object) - divide(a, b) * b.astype(object), a.dtype)

    return elementwise(binder, instruction, function)


def minimum_number(a, b):
    """Returns the smaller value; prefers numbers to NaN, and -0 is smaller than +0 (9.7.3.11)."""
    result = np.fmin(a, b)
    if a.dtype.kind in "iu":
        return result
    return np.where(a == b, np.where(np.signbit(a), a, b), result)


def maximum_number(a, b):
    """Returns the larger value, with the rules of `minimum_number`."""
    result = np.fmax(a, b)
    if a.dtype.kind in "iu":
        return result
    return np.where(a == b, np.where(np.signbit(a), b, a), result)


@defines(INTEGER, "min{.u16,.s16,.u32,.s32,.u64,.s64}")
@defines(FLOAT, "min.f32")
@defines(HALF, "min{.f16,.f16x2,.bf16,.bf16x2}")
def minimum(binder, instruction):
    return elementwise(binder, instruction, minimum_number)


@defines(INTEGER, "max{.u16,.s16,.u32,.s32,.u64,.s64}")
@defines(FLOAT, "max.f32")
@defines(HALF, "max{.f16,.f16x2,.bf16,.bf16x2}")
def maximum(binder, instruction):
    return elementwise(binder, instruction, maximum_number)


def or_nan(function):
    """Returns a function of two arrays that is NaN where one of them is."""

    def of_both(a, b):
        return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), function(a, b))

    return of_both


@defines(FLOAT, "min.NaN.f32")
def minimum_or_nan(binder, instruction):
    return elementwise(binder, instruction, or_nan(minimum_number))


@defines(FLOAT, "max.NaN.f32")
def maximum_or_nan(binder, instruction):
    return elementwise(binder, instruction, or_nan(maximum_number))


def rounded(function, *, flushes: bool):
    """Returns a function of float32 that is computed in float64 and rounded.

    Subnormal results become zero if it `flushes`. A GPU approximates these functions: ex2 within
    2^-22 of the result (9.7.3.21), and rcp within 1 ulp (9.7.3.16).
    """

    def rounded(a):
        with np.errstate(all="ignore"):
            y = function(a.astype(np.float64)).astype(np.float32)
        if not flushes:
            return y
        return np.where(np.abs(y) < SMALLEST_NORMAL_F32, np.copysign(np.float32(0), y), y)

    return rounded


@defines(FLOAT, "ex2.approx.ftz.f32")
def exponential(binder, instruction):
    return elementwise(binder, instruction, rounded(np.exp2, flushes=True))


@defines(FLOAT, "rcp.approx.f32")
def reciprocal(binder, instruction):
    return elementwise(binder, instruction, rounded(np.reciprocal, flushes=False))


@defines(INTEGER, "neg{.s16,.s32,.s64}")
@defines(FLOAT, "neg.f32")
def negative(binder, instruction):
    return elementwise(binder, instruction, np.negative)


@defines(INTEGER, "abs{.s16,.s32,.s64}")
@defines(FLOAT, "abs.f32")
def absolute(binder, instruction):
    return elementwise(binder, instruction, np.abs)


@defines(INTEGER, "popc{.b32,.b64}")
def popc(binder, instruction):
    return elementwise(
        binder, instruction, np.bitwise_count, [type_of(instruction)], result_type="u32"
    )


@defines(INTEGER, "clz{.b32,.b64}")
def clz(binder, instruction):
    width = bits(type_of(instruction))

    def function(a):
        return [width - int(value).bit_length() for value in a]

    return elementwise(binder, instruction, function, [type_of(instruction)], result_type="u32")


@defines(INTEGER, "brev{.b32,.b64}")
def brev(binder, instruction):
    width = bits(type_of(instruction))

    def function(a):
        return np.array([int(f"{int(v):0{width}b}"[::-1], 2) for v in a], UNSIGNED[width])

    return elementwise(binder, instruction, function)


def byte_operand(operand, width: int) -> int:
    """Returns the position or length of a bit field, which is 0 to 255 in the ISA.

    For larger operands an H200 takes the lowest byte if the field has 32 bits, and 255 if it has
    64 bits.
    """
    return min(int(operand), 0xFF) if width == 64 else int(operand) & 0xFF


@defines(INTEGER, "bfe{.u32,.s32,.u64,.s64}")
def bfe(binder, instruction):
    ptx_type = type_of(instruction)
    width = bits(ptx_type)

    def field(value, position, length):
        position, length = byte_operand(position, width), byte_operand(length, width)
        raw = int(value) & ((1 << width) - 1)
        # Bits of the field past the end of the value are copies of the sign, or 0 if unsigned.
        sign = (
            raw >> min(position + length - 1, width - 1) & 1 if ptx_type[0] == "s" and length else 0
        )
        inside = max(0, min(length, width - position))
        result = raw >> position & ((1 << inside) - 1)
        return result | (((1 << width) - 1) ^ ((1 << inside) - 1) if sign else 0)

    def function(a, position, length):
        return wrap([field(*x) for x in zip(a, position, length)], a.dtype)

    return elementwise(binder, instruction, function, [ptx_type, "u32", "u32"])


@defines(INTEGER, "bfi{.b32,.b64}")
def bfi(binder, instruction):
    ptx_type = type_of(instruction)

    def field(value, target, position, length):
        position, length = (
            byte_operand(position, bits(ptx_type)),
            byte_operand(length, bits(ptx_type)),
        )
        mask = ((1 << length) - 1) << position & ((1 << bits(ptx_type)) - 1)
        return int(target) & ~mask | int(value) << position & mask

    def function(a, b, position, length):
        return wrap([field(*x) for x in zip(a, b, position, length)], a.dtype)

    return elementwise(binder, instruction, function, [ptx_type, ptx_type, "u32", "u32"])


@defines(LOGIC, "and{.pred,.b16,.b32,.b64}")
def logical_and(binder, instruction):
    return elementwise(binder, instruction, np.bitwise_and)


@defines(LOGIC, "or{.pred,.b16,.b32,.b64}")
def logical_or(binder, instruction):
    return elementwise(binder, instruction, np.bitwise_or)


@defines(LOGIC, "xor{.pred,.b16,.b32,.b64}")
def logical_xor(binder, instruction):
    return elementwise(binder, instruction, np.bitwise_xor)


@defines(LOGIC, "not{.pred,.b16,.b32,.b64}")
def logical_not(binder, instruction):
    return elementwise(binder, instruction, np.bitwise_not)


@defines(LOGIC, "lop3.b32")
def lop3(binder, instruction):
    *operands, table = instruction.operands
    table = binder.immediate(table)
    if not 0 <= table <= 0xFF:
        raise UnsupportedError(f"the table {table} of lop3 does not exist, expected 0 to 255")

    def function(a, b, c):
        result = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return elementwise(binder, _replace_operands(instruction, operands), function)


def _replace_operands(instruction, operands):
    """Returns a copy of the instruction with other operands."""
    return dataclasses.replace(instruction, operands=tuple(operands))


@defines(LOGIC, "shl{.b16,.b32,.b64}")
def shl(binder, instruction):
    ptx_type = type_of(instruction)

    def function(a, count):
        shifted = a << np.minimum(count, bits(ptx_type) - 1).astype(a.dtype)
        return np.where(count < bits(ptx_type), shifted, a.dtype.type(0))

    return elementwise(binder, instruction, function, [ptx_type, "u32"])


@defines(LOGIC, "shr{.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64}")
def shr(binder, instruction):
    ptx_type = type_of(instruction)

    def function(a, count):
        shifted = a >> np.minimum(count, bits(ptx_type) - 1).astype(a.dtype)
        # Signed types shift in copies of the sign, even if the shift exceeds the width.
        return (
            shifted
            if ptx_type[0] == "s"
            else np.where(count < bits(ptx_type), shifted, a.dtype.type(0))
        )

    return elementwise(binder, instruction, function, [ptx_type, "u32"])


@defines(LOGIC, "shf{.l,.r}{.wrap,.clamp}.b32")
def shf(binder, instruction):
    left, wraps = "l" in modifiers(instruction), "wrap" in modifiers(instruction)

    def function(low, high, count):
        count = count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32))
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        far = count.astype(np.uint64)
        return ((both << far) >> np.uint64(32) if left else both >> far).astype(np.uint32)

    return elementwise(binder, instruction, function, ["b32", "b32", "u32"])


@defines(MOVE, "prmt.b32")
def prmt(binder, instruction):
    def function(a, b, selector):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(WARP_SIZE, np.uint64)
        for i in range(4):
            choice = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return result.astype(np.uint32)

    return elementwise(binder, instruction, function)


COMPARISONS = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNORDERED_COMPARISONS = {f"{name}u": compare for name, compare in COMPARISONS.items()}
INTEGER_SUFFIXES = "{.u16,.s16,.u32,.s32,.u64,.s64}"


@defines(COMPARE, *(f"setp.{name}{{,.and,.or,.xor}}{INTEGER_SUFFIXES}" for name in COMPARISONS))
@defines(COMPARE, "setp{.eq,.ne}{,.and,.or,.xor}{.b16,.b32,.b64}")
@defines(
    COMPARE,
    *(f"setp.{name}{{,.and,.or,.xor}}.f32" for name in (*COMPARISONS, *UNORDERED_COMPARISONS)),
)
def setp(binder, instruction):
    name, *middle, ptx_type = modifiers(instruction)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    combine = combine[middle[0]] if middle else None
    destination, a, b, *other = instruction.operands
    first, second = pair(destination)
    reads = binder.reader(a, ptx_type), binder.reader(b, ptx_type)
    if len(other) != bool(combine):
        raise UnsupportedError(f"it has {2 + len(other)} operands instead of {2 + bool(combine)}")
    dtype = dtype_of(ptx_type)
    write = binder.writer(first, "pred")
    write_second = binder.writer(second, "pred") if second else None
    read_other = binder.reader(other[0], "pred") if combine else None

    def execute(warp, mask):
        x, y = (read(warp).view(dtype) for read in reads)
        if name in UNORDERED_COMPARISONS:
            holds = UNORDERED_COMPARISONS[name](x, y) | np.isnan(x) | np.isnan(y)
        else:
            holds = COMPARISONS[name](x, y)
        results = [holds, ~holds]
        if combine:
            results = [combine(result, read_other(warp)) for result in results]
        write(warp, results[0], mask)
        if write_second:
            write_second(warp, results[1], mask)

    return execute


@defines(COMPARE, "selp{.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64,.f32}")
def selp(binder, instruction):
    ptx_type = f"b{bits(type_of(instruction))}"
    return elementwise(
        binder,
        instruction,
        lambda a, b, chosen: np.where(chosen, a, b),
        [ptx_type, ptx_type, "pred"],
        ptx_type,
    )


@defines(MOVE, "mov{.pred,.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64,.f32}")
def mov(binder, instruction):
    ptx_type = type_of(instruction)
    destination, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(binder, ptx_type, destination, source)
    if isinstance(destination, Vector):
        return _unpack(binder, ptx_type, destination, source)
    read, write = binder.reader(source, ptx_type), binder.writer(destination, ptx_type)
    return lambda warp, mask: write(warp, read(warp), mask)


def _pack(binder, ptx_type, destination, source):
    width = bits(ptx_type) // len(source.items)
    reads = [binder.reader(item, f"b{width}") for item in source.items]
    write, dtype = binder.writer(destination, ptx_type), UNSIGNED[bits(ptx_type)]

    def execute(warp, mask):
        packed = np.zeros(WARP_SIZE, dtype)
        for i, read in enumerate(reads):
            packed |= read(warp).astype(dtype) << dtype(i * width)
        write(warp, packed, mask)

    return execute


def _unpack(binder, ptx_type, destination, source):
    width = bits(ptx_type) // len(destination.items)
    read, dtype = binder.reader(source, ptx_type), UNSIGNED[bits(ptx_type)]
    writes = [binder.writer(item, f"b{width}") for item in destination.items]

    def execute(warp, mask):
        values = read(warp).copy()
        for i, write in enumerate(writes):
            write(warp, (values >> dtype(i * width)).astype(UNSIGNED[width]), mask)

    return execute


INTEGER_TYPES = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@defines(
    MOVE,
    *(
        f"cvt.{target_type}.{source_type}"
        for target_type in INTEGER_TYPES
        for source_type in INTEGER_TYPES
        if target_type != source_type
    ),
)
def convert_integer(binder, instruction):
    target_type, source_type = modifiers(instruction)
    destination, source = instruction.operands
    read = binder.reader(source, source_type, wider=True)
    write = binder.writer(destination, target_type, wider=True)
    source_dtype, target_dtype = dtype_of(source_type), dtype_of(target_type)
    return lambda warp, mask: write(warp, read(warp).view(source_dtype).astype(target_dtype), mask)


FLOAT8_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def saturate(values, dtype):
    """Rounds to a type with .satfinite: larger values become the largest finite number."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values.astype(np.float32), -largest, largest).astype(dtype)


@defines(MOVE, "cvt.rn{.f32,.f16,.bf16}{.s32,.u32}", "cvt.rn{.f16,.bf16}.f32")
@defines(MOVE, "cvt{.f32.f16,.f32.bf16}")
def convert_float(binder, instruction):
    target_type, source_type = modifiers(instruction)[-2:]
    destination, source = instruction.operands
    read, write = binder.reader(source, source_type), binder.writer(destination, target_type)
    source_dtype, target_dtype = dtype_of(source_type), dtype_of(target_type)

    def execute(warp, mask):
        values = read(warp).view(source_dtype)
        exact = values.astype(np.float64) if source_dtype in (np.int32, np.uint32) else values
        result = round_once(exact, target_dtype)
        # Widening bfloat16 moves its bits, which keeps every NaN.
        write(warp, result if source_type == "bf16" else with_canonical_nan(result), mask)

    return execute


@defines(MOVE, "cvt.rn{.bf16x2,.f16x2}.f32")
@defines(MOVE, "cvt.rn.satfinite{.e4m3x2,.e5m2x2}.f32")
def convert_to_pair(binder, instruction):
    """Converts two values to a packed register, the first one to its upper half."""
    target_type = modifiers(instruction)[-2]
    destination, *sources = instruction.operands
    reads = [binder.reader(source, "f32") for source in sources]
    element = FLOATS[FLOAT8_PAIRS.get(target_type) or PACKED[target_type]]
    width = 8 * np.dtype(element).itemsize
    write = binder.writer(destination, f"b{2 * width}")

    def execute(warp, mask):
        values = [read(warp).view(np.float32) for read in reads]
        convert = saturate if target_type in FLOAT8_PAIRS else (lambda x, dtype: x.astype(dtype))
        converted = [with_canonical_nan(convert(x, element)) for x in values]
        raw = [np.ascontiguousarray(x).view(UNSIGNED[width]) for x in converted]
        both = raw[0].astype(UNSIGNED[2 * width]) << UNSIGNED[2 * width](width)
        write(warp, both | raw[1].astype(UNSIGNED[2 * width]), mask)

    return execute


@defines(MOVE, "cvt.rn.f16x2{.e4m3x2,.e5m2x2}")
def convert_float8_pair(binder, instruction):
    source_type = modifiers(instruction)[-1]
    read, write = (
        binder.reader(instruction.operands[1], "b16"),
        binder.writer(instruction.operands[0], "b32"),
    )

    def execute(warp, mask):
        values = (
            np.ascontiguousarray(read(warp))
            .view(FLOATS[FLOAT8_PAIRS[source_type]])
            .astype(np.float16)
        )
        write(warp, np.ascontiguousarray(with_canonical_nan(values)).view(np.uint32), mask)

    return execute
