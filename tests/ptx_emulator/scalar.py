"""Arithmetic, logic, comparison and conversion: what each lane does alone."""

import dataclasses

import ml_dtypes
import numpy as np

from ptx_emulator.errors import UnsupportedError
from ptx_emulator.isa import (
    FLOATS,
    LANES,
    SIGNED,
    SINCE_BLACKWELL,
    UNSIGNED,
    instruction,
    numpy_type,
)
from ptx_emulator.parser import Pair, Vector, bits

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"

# The elements of packed types.
PACKED = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}

# Types of floats that are computed; what only moves floats names their bits.
COMPUTED = ("f32", "f16", "bf16", *PACKED)


SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


def modifiers(line) -> list[str]:
    """The parts of an opcode behind its name."""
    return line.opcode.split(".")[1:]


def kind_of(line) -> str:
    """The last part: the type."""
    return modifiers(line)[-1]


def pair(operand):
    """Both parts of a|b; of another operand the second one is None."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def with_one_nan(values):
    """Floats as arithmetic leaves them: every NaN has all bits but the sign (found on an H200)."""
    nan = np.isnan(values)
    if not nan.any():
        return values
    dtype = values.dtype
    one = UNSIGNED[8 * dtype.itemsize]((1 << 8 * dtype.itemsize - 1) - 1).view(dtype)
    return np.where(nan, one, values)


def elementwise(build, line, function, kinds: list[str] | None = None, result: str | None = None):
    """Applies a function of numpy arrays of the operands' types."""
    destination, *sources = line.operands
    kinds = kinds or [kind_of(line)] * len(sources)
    # Of a ufunc or of a Python function; a ufunc would take one more as where its result goes.
    count = getattr(function, "nin", None) or function.__code__.co_argcount
    if not len(sources) == len(kinds) == count:
        raise UnsupportedError(f"{len(sources)} operands instead of {count}")
    result = result or kinds[0]
    reads = [build.read(operand, kind) for operand, kind in zip(sources, kinds, strict=True)]
    views = [numpy_type(PACKED.get(kind, kind)) for kind in kinds]
    write = build.write(destination, result)
    dtype, raw = numpy_type(PACKED.get(result, result)), UNSIGNED[bits(result)]

    def execute(warp, mask):
        values = [np.ascontiguousarray(read(warp)).view(view) for read, view in zip(reads, views)]
        found = np.asarray(function(*values)).astype(dtype, copy=False)
        if result in COMPUTED:
            found = with_one_nan(found)
        write(warp, np.ascontiguousarray(found).view(raw), mask)

    return execute


def fused(a, b, c):
    """a * b + c, rounded once for types up to float32 whose products float64 holds exactly.

    The sum in float64 is rounded twice; that differs only if the first rounding makes a tie, which
    rounding to odd prevents.
    """
    if a.dtype == np.float64:
        raise UnsupportedError("a fused multiply-add of float64")
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    if a.dtype == np.float32 and not _may_round_twice(total).any():
        return total.astype(np.float32)
    # The error of the sum, exactly (Knuth); where it is not zero the last bit is made odd.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    word = total.view(np.uint64)
    inexact = (error != 0) & np.isfinite(total) & ((word & np.uint64(1)) == 0)
    toward = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
    odd = (word.view(np.int64) + np.where(inexact, toward, 0)).view(np.float64)
    return narrowed(odd, a.dtype)


def _may_round_twice(total):
    """Whether float64 may be a tie of float32 because it was rounded: 29 bits are dropped of what
    float32 has as a normal number."""
    tie = total.view(np.uint64) & np.uint64((1 << 29) - 1) == np.uint64(1 << 28)
    return tie | ((np.abs(total) < SMALLEST_NORMAL) & (total != 0))


def narrowed(values, dtype):
    """float64 rounded once to a type: ml_dtypes goes to bfloat16 by way of float32.

    On that way it is rounded to odd, so that no ties appear.
    """
    if dtype != FLOATS["bf16"]:
        return values.astype(dtype)
    near = values.astype(np.float32)
    word = near.view(np.int32)
    inexact = (near != values) & np.isfinite(near) & (word & 1 == 0)
    toward = np.where(np.abs(near) < np.abs(values), 1, -1)
    return (word + np.where(inexact, toward, 0).astype(np.int32)).view(np.float32).astype(dtype)


@instruction(INTEGER, "add{.u16,.s16,.u32,.s32,.u64,.s64}")
@instruction(FLOAT, "add{,.rn}.f32")
@instruction(FLOAT, "add{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@instruction(HALF, "add{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def add(build, line):
    return elementwise(build, line, lambda a, b: a + b)


@instruction(INTEGER, "sub{.u16,.s16,.u32,.s32,.u64,.s64}")
@instruction(FLOAT, "sub{,.rn}.f32")
@instruction(FLOAT, "sub{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@instruction(HALF, "sub{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def sub(build, line):
    return elementwise(build, line, lambda a, b: a - b)


@instruction(INTEGER, "mul.lo{.u16,.s16,.u32,.s32,.u64,.s64}")
@instruction(FLOAT, "mul{,.rn}.f32")
@instruction(FLOAT, "mul{,.rn}.f32x2", targets=SINCE_BLACKWELL)
@instruction(HALF, "mul{,.rn}{.f16,.f16x2,.bf16,.bf16x2}")
def mul(build, line):
    return elementwise(build, line, lambda a, b: a * b)


def wide(kind: str) -> str:
    """The type of twice the width."""
    return f"{kind[0]}{2 * bits(kind)}"


def double(array):
    """The same numbers in twice the width."""
    table = SIGNED if array.dtype.kind == "i" else UNSIGNED
    return array.astype(table[16 * array.dtype.itemsize])


@instruction(INTEGER, "mul.wide{.u16,.s16,.u32,.s32}")
def mul_wide(build, line):
    kind = kind_of(line)
    return elementwise(
        build, line, lambda a, b: double(a) * double(b), [kind, kind], result=wide(kind)
    )


@instruction(INTEGER, "mul.hi{.u32,.s32,.u64,.s64}")
def mul_hi(build, line):
    def function(a, b):
        return wrapped(a.astype(object) * b.astype(object) >> bits(kind_of(line)), a.dtype)

    return elementwise(build, line, function)


@instruction(INTEGER, "mad.lo{.u16,.s16,.u32,.s32,.u64,.s64}")
def mad(build, line):
    return elementwise(build, line, lambda a, b, c: a * b + c)


@instruction(INTEGER, "mad.wide{.u16,.s16,.u32,.s32}")
def mad_wide(build, line):
    kind = kind_of(line)
    kinds = [kind, kind, wide(kind)]
    return elementwise(build, line, lambda a, b, c: double(a) * double(b) + c, kinds, wide(kind))


@instruction(FLOAT, "fma.rn.f32")
@instruction(FLOAT, "fma.rn.f32x2", targets=SINCE_BLACKWELL)
@instruction(HALF, "fma.rn{.f16,.f16x2,.bf16,.bf16x2}")
def fma(build, line):
    return elementwise(build, line, fused)


def quotient(a, b):
    """Division that rounds toward zero; by zero all bits are set (9.7.1.8 leaves it open)."""
    safe = np.where(b == 0, np.ones_like(b), b)
    magnitude = np.abs(a.astype(object)) // np.abs(safe.astype(object))
    signed = np.where((a < 0) == (safe < 0), magnitude, -magnitude)
    return np.where(b == 0, -1, signed)


def wrapped(values, dtype):
    """Python integers as a numpy type, modulo its range."""
    width = 8 * np.dtype(dtype).itemsize
    unsigned = [int(value) & ((1 << width) - 1) for value in np.asarray(values, object).flat]
    return np.array(unsigned, UNSIGNED[width]).view(dtype)


@instruction(INTEGER, "div{.u32,.s32,.u64,.s64}")
def div(build, line):
    return elementwise(build, line, lambda a, b: wrapped(quotient(a, b), a.dtype))


@instruction(INTEGER, "rem{.u32,.s32,.u64,.s64}")
def rem(build, line):
    def function(a, b):
        return wrapped(a.astype(object) - quotient(a, b) * b.astype(object), a.dtype)

    return elementwise(build, line, function)


def smaller(a, b):
    """The number of a number and a NaN; -0 is below +0 (9.7.3.11), which numpy leaves open."""
    found = np.fmin(a, b)
    return found if a.dtype.kind in "iu" else np.where(a == b, np.where(np.signbit(a), a, b), found)


def larger(a, b):
    """As `smaller`."""
    found = np.fmax(a, b)
    return found if a.dtype.kind in "iu" else np.where(a == b, np.where(np.signbit(a), b, a), found)


@instruction(INTEGER, "min{.u16,.s16,.u32,.s32,.u64,.s64}")
@instruction(FLOAT, "min.f32")
@instruction(HALF, "min{.f16,.f16x2,.bf16,.bf16x2}")
def minimum(build, line):
    return elementwise(build, line, smaller)


@instruction(INTEGER, "max{.u16,.s16,.u32,.s32,.u64,.s64}")
@instruction(FLOAT, "max.f32")
@instruction(HALF, "max{.f16,.f16x2,.bf16,.bf16x2}")
def maximum(build, line):
    return elementwise(build, line, larger)


@instruction(INTEGER, "neg{.s16,.s32,.s64}")
@instruction(FLOAT, "neg.f32")
def negative(build, line):
    return elementwise(build, line, np.negative)


@instruction(INTEGER, "abs{.s16,.s32,.s64}")
@instruction(FLOAT, "abs.f32")
def absolute(build, line):
    return elementwise(build, line, np.abs)


@instruction(INTEGER, "popc{.b32,.b64}")
def popc(build, line):
    return elementwise(build, line, np.bitwise_count, [kind_of(line)], result="u32")


@instruction(INTEGER, "clz{.b32,.b64}")
def clz(build, line):
    width = bits(kind_of(line))

    def function(a):
        return [width - int(value).bit_length() for value in a]

    return elementwise(build, line, function, [kind_of(line)], result="u32")


@instruction(INTEGER, "brev{.b32,.b64}")
def brev(build, line):
    width = bits(kind_of(line))

    def function(a):
        return np.array([int(f"{int(v):0{width}b}"[::-1], 2) for v in a], UNSIGNED[width])

    return elementwise(build, line, function)


def byte(operand, width: int) -> int:
    """Position or length of a bit field.

    The ISA has them from 0 to 255; beyond, an H200 takes the lowest byte for 32 bits and the
    largest for 64.
    """
    return min(int(operand), 0xFF) if width == 64 else int(operand) & 0xFF


@instruction(INTEGER, "bfe{.u32,.s32,.u64,.s64}")
def bfe(build, line):
    kind = kind_of(line)
    width = bits(kind)

    def field(value, position, length):
        position, length = byte(position, width), byte(length, width)
        raw = int(value) & ((1 << width) - 1)
        # Beyond the end of the value the field has its sign, which is 0 for unsigned types.
        sign = raw >> min(position + length - 1, width - 1) & 1 if kind[0] == "s" and length else 0
        inside = max(0, min(length, width - position))
        found = raw >> position & ((1 << inside) - 1)
        return found | (((1 << width) - 1) ^ ((1 << inside) - 1) if sign else 0)

    def function(a, position, length):
        return wrapped([field(*x) for x in zip(a, position, length)], a.dtype)

    return elementwise(build, line, function, [kind, "u32", "u32"])


@instruction(INTEGER, "bfi{.b32,.b64}")
def bfi(build, line):
    kind = kind_of(line)

    def field(value, target, position, length):
        position, length = byte(position, bits(kind)), byte(length, bits(kind))
        mask = ((1 << length) - 1) << position & ((1 << bits(kind)) - 1)
        return int(target) & ~mask | int(value) << position & mask

    def function(a, b, position, length):
        return wrapped([field(*x) for x in zip(a, b, position, length)], a.dtype)

    return elementwise(build, line, function, [kind, kind, "u32", "u32"])


@instruction(LOGIC, "and{.pred,.b16,.b32,.b64}")
def logical_and(build, line):
    return elementwise(build, line, np.bitwise_and)


@instruction(LOGIC, "or{.pred,.b16,.b32,.b64}")
def logical_or(build, line):
    return elementwise(build, line, np.bitwise_or)


@instruction(LOGIC, "xor{.pred,.b16,.b32,.b64}")
def logical_xor(build, line):
    return elementwise(build, line, np.bitwise_xor)


@instruction(LOGIC, "not{.pred,.b16,.b32,.b64}")
def logical_not(build, line):
    return elementwise(build, line, np.bitwise_not)


@instruction(LOGIC, "lop3.b32")
def lop3(build, line):
    *operands, table = line.operands
    table = build.immediate(table)
    if not 0 <= table <= 0xFF:
        raise UnsupportedError(f"the table {table} of lop3")

    def function(a, b, c):
        found = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found

    return elementwise(build, _with_operands(line, operands), function)


def _with_operands(line, operands):
    """The instruction with other operands."""
    return dataclasses.replace(line, operands=tuple(operands))


@instruction(LOGIC, "shl{.b16,.b32,.b64}")
def shl(build, line):
    kind = kind_of(line)

    def function(a, count):
        shifted = a << np.minimum(count, bits(kind) - 1).astype(a.dtype)
        return np.where(count < bits(kind), shifted, a.dtype.type(0))

    return elementwise(build, line, function, [kind, "u32"])


@instruction(LOGIC, "shr{.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64}")
def shr(build, line):
    kind = kind_of(line)

    def function(a, count):
        shifted = a >> np.minimum(count, bits(kind) - 1).astype(a.dtype)
        # Of signed types the sign is what is shifted in, however far.
        return shifted if kind[0] == "s" else np.where(count < bits(kind), shifted, a.dtype.type(0))

    return elementwise(build, line, function, [kind, "u32"])


@instruction(LOGIC, "shf{.l,.r}{.wrap,.clamp}.b32")
def shf(build, line):
    left, wraps = "l" in modifiers(line), "wrap" in modifiers(line)

    def function(low, high, count):
        count = count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32))
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        far = count.astype(np.uint64)
        return ((both << far) >> np.uint64(32) if left else both >> far).astype(np.uint32)

    return elementwise(build, line, function, ["b32", "b32", "u32"])


@instruction(MOVE, "prmt.b32")
def prmt(build, line):
    def function(a, b, selector):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        found = np.zeros(LANES, np.uint64)
        for i in range(4):
            choice = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            found |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return found.astype(np.uint32)

    return elementwise(build, line, function)


ORDERED = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNORDERED = {f"{name}u": compare for name, compare in ORDERED.items()}
INTEGERS = "{.u16,.s16,.u32,.s32,.u64,.s64}"


@instruction(COMPARE, *(f"setp.{name}{{,.and,.or,.xor}}{INTEGERS}" for name in ORDERED))
@instruction(COMPARE, "setp{.eq,.ne}{,.and,.or,.xor}{.b16,.b32,.b64}")
@instruction(COMPARE, *(f"setp.{name}{{,.and,.or,.xor}}.f32" for name in (*ORDERED, *UNORDERED)))
def setp(build, line):
    name, *middle, kind = modifiers(line)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    combine = combine[middle[0]] if middle else None
    destination, a, b, *other = line.operands
    first, second = pair(destination)
    reads = build.read(a, kind), build.read(b, kind)
    if len(other) != bool(combine):
        raise UnsupportedError(f"{2 + len(other)} operands instead of {2 + bool(combine)}")
    dtype = numpy_type(kind)
    write = build.write(first, "pred")
    write_second = build.write(second, "pred") if second else None
    read_other = build.read(other[0], "pred") if combine else None

    def execute(warp, mask):
        x, y = (read(warp).view(dtype) for read in reads)
        if name in UNORDERED:
            found = UNORDERED[name](x, y) | np.isnan(x) | np.isnan(y)
        else:
            found = ORDERED[name](x, y)
        results = [found, ~found]
        if combine:
            results = [combine(result, read_other(warp)) for result in results]
        write(warp, results[0], mask)
        if write_second:
            write_second(warp, results[1], mask)

    return execute


@instruction(COMPARE, "selp{.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64,.f32}")
def selp(build, line):
    kind = f"b{bits(kind_of(line))}"
    return elementwise(
        build, line, lambda a, b, chosen: np.where(chosen, a, b), [kind, kind, "pred"], kind
    )


@instruction(MOVE, "mov{.pred,.b16,.b32,.b64,.u16,.u32,.u64,.s16,.s32,.s64,.f32}")
def mov(build, line):
    kind = kind_of(line)
    destination, source = line.operands
    if isinstance(source, Vector):
        return _pack(build, kind, destination, source)
    if isinstance(destination, Vector):
        return _unpack(build, kind, destination, source)
    read, write = build.read(source, kind), build.write(destination, kind)
    return lambda warp, mask: write(warp, read(warp), mask)


def _pack(build, kind, destination, source):
    width = bits(kind) // len(source.items)
    reads = [build.read(item, f"b{width}") for item in source.items]
    write, dtype = build.write(destination, kind), UNSIGNED[bits(kind)]

    def execute(warp, mask):
        found = np.zeros(LANES, dtype)
        for i, read in enumerate(reads):
            found |= read(warp).astype(dtype) << dtype(i * width)
        write(warp, found, mask)

    return execute


def _unpack(build, kind, destination, source):
    width = bits(kind) // len(destination.items)
    read, dtype = build.read(source, kind), UNSIGNED[bits(kind)]
    writes = [build.write(item, f"b{width}") for item in destination.items]

    def execute(warp, mask):
        values = read(warp).copy()
        for i, write in enumerate(writes):
            write(warp, (values >> dtype(i * width)).astype(UNSIGNED[width]), mask)

    return execute


WHOLE = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@instruction(MOVE, *(f"cvt.{to}.{of}" for to in WHOLE for of in WHOLE if to != of))
def convert_integer(build, line):
    to, of = modifiers(line)
    destination, source = line.operands
    read = build.read(source, of, wider=True)
    write = build.write(destination, to, wider=True)
    before, after = numpy_type(of), numpy_type(to)
    return lambda warp, mask: write(warp, read(warp).view(before).astype(after), mask)


SMALL = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def saturated(values, dtype):
    """Rounded to a type without infinities: what is larger becomes the largest number."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values.astype(np.float32), -largest, largest).astype(dtype)


@instruction(MOVE, "cvt.rn{.f32,.f16,.bf16}{.s32,.u32}", "cvt.rn{.f16,.bf16}.f32")
@instruction(MOVE, "cvt{.f32.f16,.f32.bf16}")
def convert_float(build, line):
    to, of = modifiers(line)[-2:]
    destination, source = line.operands
    read, write = build.read(source, of), build.write(destination, to)
    before, after = numpy_type(of), numpy_type(to)

    def execute(warp, mask):
        values = read(warp).view(before)
        exact = values.astype(np.float64) if before in (np.int32, np.uint32) else values
        found = narrowed(exact, after)
        # bfloat16 is widened by moving its bits.
        write(warp, found if of == "bf16" else with_one_nan(found), mask)

    return execute


@instruction(MOVE, "cvt.rn{.bf16x2,.f16x2}.f32")
@instruction(MOVE, "cvt.rn.satfinite{.e4m3x2,.e5m2x2}.f32")
def convert_pair(build, line):
    """Two values to one register, the first one to its upper half."""
    to = modifiers(line)[-2]
    destination, *sources = line.operands
    reads = [build.read(source, "f32") for source in sources]
    element = FLOATS[SMALL.get(to) or PACKED[to]]
    width = 8 * np.dtype(element).itemsize
    write = build.write(destination, f"b{2 * width}")

    def execute(warp, mask):
        values = [read(warp).view(np.float32) for read in reads]
        convert = saturated if to in SMALL else (lambda x, dtype: x.astype(dtype))
        found = [with_one_nan(convert(x, element)) for x in values]
        raw = [np.ascontiguousarray(x).view(UNSIGNED[width]) for x in found]
        both = raw[0].astype(UNSIGNED[2 * width]) << UNSIGNED[2 * width](width)
        write(warp, both | raw[1].astype(UNSIGNED[2 * width]), mask)

    return execute


@instruction(MOVE, "cvt.rn.f16x2{.e4m3x2,.e5m2x2}")
def convert_small(build, line):
    of = modifiers(line)[-1]
    read, write = build.read(line.operands[1], "b16"), build.write(line.operands[0], "b32")

    def execute(warp, mask):
        values = np.ascontiguousarray(read(warp)).view(FLOATS[SMALL[of]]).astype(np.float16)
        write(warp, np.ascontiguousarray(with_one_nan(values)).view(np.uint32), mask)

    return execute
