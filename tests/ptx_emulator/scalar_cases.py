"""Operands for each scalar instruction, and its meaning according to the PTX ISA (9.0).

The references are exact: Python integers, and fractions that are rounded once.
"""

import dataclasses
import functools
import itertools
import math
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction

from tests.ptx_emulator.references import FORMATS, float_value

INTEGER, FLOAT, HALF = "9.7.1 integer", "9.7.3 floating point", "9.7.4 half precision"
COMPARE, LOGIC, MOVE = "9.7.6 comparison", "9.7.8 logic", "9.7.9 data movement"
SYNC, MATRIX, MISC = "9.7.13 synchronisation", "9.7.14 matrices", "9.7.19 miscellaneous"

LANES = range(32)


def width(kind):
    """Returns the number of bits of a type."""
    if kind == "pred":
        return 1
    if kind.endswith("x2"):
        return 2 * width(kind[:-2])
    return sum(FORMATS[kind], 1) if kind in FORMATS else int(kind[1:])


def stored(kind):
    """Returns the number of bits of a register for this type; no register has 8 bits."""
    return max(16, width(kind))


def encoded(value, kind):
    """Returns the bits of the nearest float, with ties to even; types of 8 bits saturate."""
    exponents, fractions = FORMATS[kind]
    infinity = (2**exponents - 1) << fractions
    most = {"e4m3": 0x7E, "e5m2": 0x7B}.get(kind, infinity)
    if value != value:
        return infinity | 2**fractions - 1
    sign = (math.copysign(1, value) < 0) << exponents + fractions
    if value == 0 or abs(value) == math.inf:
        return sign | (most if value else 0)
    magnitude = abs(Fraction(value))
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    bias = 2 ** (exponents - 1) - 1
    exponent = max(exponent, 1 - bias)
    steps = round(magnitude / Fraction(2) ** (exponent - fractions))
    return sign | min(steps + ((exponent + bias - 1) << fractions), most)


def decode(raw, kind):
    """Returns the value of raw bits; for packed types, both values with the low half first."""
    if kind.endswith("x2"):
        half = width(kind) // 2
        return tuple(decode(raw >> i * half & 2**half - 1, kind[:-2]) for i in range(2))
    if kind in FORMATS:
        return float_value(raw, kind)
    return raw - (raw >> width(kind) - 1 << width(kind)) if kind[0] == "s" else raw


def encode(value, kind, bits):
    """Returns the bits of a register with this value, extended according to its type (9.4.1)."""
    if kind.endswith("x2"):
        low, high = (encode(part, kind[:-2], bits) for part in value)
        return low | high << width(kind) // 2
    if kind in FORMATS:
        return encoded(value, kind)
    return decode(int(value) & 2 ** width(kind) - 1, kind) & 2**bits - 1


def with_one_nan(raw, kind):
    """Replaces every NaN by the same one."""
    if kind.endswith("x2") or kind in FORMATS:
        value = decode(raw, kind)
        parts = value if isinstance(value, tuple) else (value,)
        return raw if parts == parts and all(x == x for x in parts) else encode(value, kind, 64)
    return raw


# Operands.


def drawn(bits, seed):
    """Draws a random number of `bits` bits for each lane."""
    generator = random.Random(f"{bits} {seed}")
    return [generator.getrandbits(bits) for _ in LANES]


@functools.cache
def edges(kind):
    """Returns raw values of edge cases, the eight most important ones first."""
    if kind == "pred":
        return [0, 1]
    bits = width(kind)
    if kind.endswith("x2"):
        half = edges(kind[:-2])
        return [a | b << bits // 2 for a, b in zip(half, half[1:] + half[:1])]
    if kind in FORMATS:
        exponents, fractions = FORMATS[kind]
        infinity, one = (2**exponents - 1) << fractions, (2 ** (exponents - 1) - 1) << fractions
        quiet, normal = 1 << fractions - 1, 1 << fractions
        found = [0, infinity, infinity + quiet, one, 1, normal - 1, normal, normal + 1]
        found += [one - 1, one + 1, one + quiet, infinity - 1, infinity + 1]
        return [sign << bits - 1 | raw for raw in found for sign in (0, 1)]
    top = 1 << bits - 1
    found = [0, 1, 2 * top - 1, top, top - 1, top + 1, 2, 2 * top - 2, top - 2]
    if bits == 32:
        # Shifts and bit fields are tested at the width and beyond.
        found += [7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 0x1020]
    return found


@functools.cache
def ties(kind):
    """Returns numbers in the middle of two floats of narrower types, and their neighbours."""
    found = []
    generator = random.Random(kind)
    for narrow, (exponents, fractions) in FORMATS.items():
        if kind in ("s32", "u32", "b32"):
            for power in range(fractions + 2, 32):
                odd = generator.randrange(2**fractions) << 1 | 1
                middle = (1 << fractions + 1 | odd) << power - fractions - 1
                found += [middle + i & 2**32 - 1 for i in (-1, 0, 1)]
        if kind == "f32" and narrow != "f32":
            most = {"e4m3": 0x7E, "e5m2": 0x7B}.get(narrow, ((2**exponents - 1) << fractions) - 1)
            for raw in {0, 1, most - 1, most, *(generator.randrange(most) for _ in range(16))}:
                step = float_value(max(raw, 1), narrow) - float_value(max(raw, 1) - 1, narrow)
                middle = encoded(float_value(raw, narrow) + step / 2, "f32")
                found += [middle + i | raw % 2 << 31 for i in (-1, 0, 1)]
    return found


def fused_ties(kind):
    """Returns operands whose a * b is in the middle of two floats; c decides the rounding."""
    fractions = FORMATS[kind][1]
    a = encoded(1 + Fraction(1, 2**fractions), kind)
    for sign, b in itertools.product((1, -1), (1.5, 1.25, 1.75)):
        for c in (0.0, *(Fraction(s, 2 ** (i * fractions)) for s in (1, -1) for i in (2, 3, 4))):
            yield a, encoded(sign * b, kind), encoded(c, kind)
        for tiny in (1, 1 | 1 << width(kind) - 1):
            yield a, encoded(sign * b, kind), tiny


@functools.cache
def operands(kinds, wide, count):
    """Returns rows of raw operands: pairs of edge cases, then edge cases with random numbers."""
    generator = random.Random(f"{kinds} {wide}")
    rows = list(itertools.product(*map(edges, kinds)))
    generator.shuffle(rows)
    rows.sort(key=lambda row: any(raw not in edges(kind)[:8] for raw, kind in zip(row, kinds)))
    if len(kinds) == 1:
        rows += [(raw,) for raw in ties(kinds[0])]
    if len(set(kinds)) == 1 and len(kinds) == 3 and kinds[0].removesuffix("x2") in FORMATS:
        kind, copies = kinds[0].removesuffix("x2"), 2 if kinds[0].endswith("x2") else 1
        rows[:0] = [
            tuple(sum(raw << i * width(kind) for i in range(copies)) for raw in row)
            for row in fused_ties(kind)
        ]
    rows = rows[: count if len(kinds) == 1 else count // 2]
    choices = [edges(kind) + ties(kind) for kind in kinds]
    scale = generator.choices(range(2, 65), k=count)
    while len(rows) < count:
        most = scale[len(rows)]
        rows.append(
            tuple(
                generator.choice(some)
                if generator.random() < 0.4
                else generator.getrandbits(width(kind) if kind[0] in "fbe" else most)
                & 2 ** width(kind) - 1
                for kind, some in zip(kinds, choices)
            )
        )
    if wide:
        rows = [
            tuple(
                raw | generator.getrandbits(64) << width(kind) & 2**64 - 1
                for raw, kind in zip(row, kinds)
            )
            for row in rows
        ]
    return rows


# The instructions of single lanes, with their opcodes and meanings.


@dataclasses.dataclass(frozen=True)
class OpcodeCase:
    """An opcode with its section, the types of results and operands, and its meaning.

    The reference takes values (`decode`) and returns values, or None where the ISA leaves them
    open. With `wide` all registers have 64 bits.
    """

    opcode: str
    section: str
    results: tuple[str, ...]
    kinds: tuple[str, ...]
    reference: Callable
    wide: bool = False

    def __str__(self):
        return self.opcode + " of wider registers" * self.wide


def cases(section, template, reference, kinds=None, result=None):
    """Yields a case for every opcode of "name{.modifier,...}", whose last part is the type."""
    parts = re.split(r"[{}]", template)
    for chosen in itertools.product(*(part.split(",") for part in parts)):
        opcode = "".join(chosen)
        kind = opcode.rsplit(".")[-1]
        its = tuple(kind if k == "T" else f"b{width(kind)}" if k == "bits" else k for k in kinds)
        meaning = reference(kind) if getattr(reference, "by_type", False) else reference
        yield OpcodeCase(opcode, section, (result or its[0],), its, meaning)


def by_type(function):
    """Marks a reference that depends on the type."""
    function.by_type = True
    return function


def exact(a, b, c):
    """Computes a * b + c exactly; zeros, infinities and NaN follow the rules of floats."""
    found = a * b + c
    if found == 0 or not math.isfinite(found):
        return found
    return Fraction(a) * Fraction(b) + Fraction(c)


def smaller(a, b):
    """Returns the smaller value; prefers numbers to NaN, and -0 is smaller than +0."""
    if a != a or b != b:
        return b if a != a else a
    return min(a, b, key=lambda x: (x, math.copysign(1, x)))


def larger(a, b):
    return -smaller(-a, -b)


def truncated(a, b):
    """Divides, rounding toward zero; division by zero is unspecified (9.7.1.8)."""
    return int(Fraction(a, b)) if b else None


@by_type
def rotated(kind):
    return lambda a: int(f"{a:0{width(kind)}b}"[::-1], 2)


@by_type
def leading_zeros(kind):
    return lambda a: next(
        (i for i in range(width(kind)) if a >> width(kind) - 1 - i & 1), width(kind)
    )


def of_field(operand, last):
    """Returns position or length of a bit field: 0 to 255 in the ISA, beyond that as on an H200."""
    return operand & 0xFF if last < 63 else min(operand, 0xFF)


@by_type
def extracted(kind):
    """Returns a function that extracts a bit field as in 9.7.1.19, bit by bit."""
    last = width(kind) - 1

    def function(a, b, c):
        position, length = of_field(b, last), of_field(c, last)
        sign = kind[0] == "s" and length and a >> min(position + length - 1, last) & 1
        inside = [i < length and position + i <= last for i in range(last + 1)]
        return sum((a >> position + i & 1 if inside[i] else sign) << i for i in range(last + 1))

    return function


@by_type
def inserted(kind):
    """Returns a function that inserts a bit field as in 9.7.1.20, bit by bit."""

    def function(a, b, c, d):
        position, length = of_field(c, width(kind) - 1), of_field(d, width(kind) - 1)
        for i in range(length):
            if position + i < width(kind):
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    return function


def shifted_together(to_left, wraps):
    """Returns a funnel shift as in 9.7.8.7, whose low half is a."""

    def function(a, b, c):
        n = c & 31 if wraps else min(c, 32)
        return b << n | a >> 32 - n if to_left else b << 32 - n | a >> n

    return function


def permuted(a, b, c):
    """Permutes bytes as in 9.7.9.7."""
    found = 0
    for i in range(4):
        choice = c >> 4 * i & 15
        byte = (a | b << 32) >> 8 * (choice & 7) & 0xFF
        found |= (0xFF * (byte >> 7) if choice & 8 else byte) << 8 * i
    return found


def of_halves(function):
    return lambda *pairs: tuple(function(*parts) for parts in zip(*pairs))


def or_nan(function):
    return lambda a, b: math.nan if a != a or b != b else function(a, b)


def power_of_two(a):
    """Returns 2^a, of which the emulator's ex2 is the nearest float32; a subnormal one is zero."""
    if a != a or a == math.inf or a < -1022:
        return a if a != -math.inf and not a < -1022 else 0.0
    found = math.exp2(a) if a < 1024 else math.inf
    return found if found >= 2.0**-126 else 0.0


def reciprocal(a):
    """Returns 1 / a, of which the emulator's rcp is the nearest float32."""
    if a != a:
        return a
    return math.copysign(math.inf, a) if a == 0 else 1 / a


COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
COMBINATIONS = {"": None, ".and": operator.and_, ".or": operator.or_, ".xor": operator.xor}


def comparison(name, combine):
    """Returns a reference for p|q of setp.

    With a NaN, ordered comparisons are false, and unordered ones (-u) are true.
    """
    compare, unordered = COMPARISONS[name[:2]], name.endswith("u")

    def function(a, b, other=False):
        found = unordered if a != a or b != b else compare(a, b)
        return [combine(x, bool(other)) if combine else x for x in (found, not found)]

    return function


def all_cases():
    ints, wider = "{u16,s16,u32,s32,u64,s64}", {"16": "32", "32": "64"}
    two, three = ("T", "T"), ("T", "T", "T")
    arithmetic = {
        "add": lambda a, b: exact(a, 1.0, b),
        "sub": lambda a, b: exact(b, -1.0, a),
        "mul": lambda a, b: exact(a, b, -0.0),
    }
    for name, function in arithmetic.items():
        whole = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[name]
        yield from cases(INTEGER, f"{name}{'.lo' * (name == 'mul')}.{ints}", whole, two)
        for section, kind in ((FLOAT, "f32"), (HALF, "f16"), (HALF, "bf16")):
            yield from cases(section, f"{name}{{,.rn}}.{kind}", function, two)
            yield from cases(section, f"{name}{{,.rn}}.{kind}x2", of_halves(function), two)
    for section, kind in ((FLOAT, "f32"), (HALF, "f16"), (HALF, "bf16")):
        yield from cases(section, f"fma.rn.{kind}", exact, three)
        yield from cases(section, f"fma.rn.{kind}x2", of_halves(exact), three)
    for kind in ("u16", "s16", "u32", "s32"):
        result = kind[0] + wider[kind[1:]]
        yield from cases(INTEGER, f"mul.wide.{kind}", operator.mul, two, result)
        kinds = (kind, kind, result)
        yield from cases(INTEGER, f"mad.wide.{kind}", lambda a, b, c: a * b + c, kinds, result)
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits = width(kind)
        yield from cases(INTEGER, f"mul.hi.{kind}", lambda a, b, n=bits: a * b >> n, two)
    yield from cases(INTEGER, f"mad.lo.{ints}", lambda a, b, c: a * b + c, three)
    yield from cases(INTEGER, "div.{u32,s32,u64,s64}", truncated, two)
    remainder = lambda a, b: a - b * truncated(a, b) if b else None  # noqa: E731
    yield from cases(INTEGER, "rem.{u32,s32,u64,s64}", remainder, two)
    for name, whole, function in (("min", min, smaller), ("max", max, larger)):
        yield from cases(INTEGER, f"{name}.{ints}", whole, two)
        yield from cases(FLOAT, f"{name}.f32", function, two)
        yield from cases(HALF, f"{name}.{{f16,bf16}}", function, two)
        yield from cases(HALF, f"{name}.{{f16x2,bf16x2}}", of_halves(function), two)
    yield from cases(FLOAT, "min.NaN.f32", or_nan(smaller), two)
    yield from cases(FLOAT, "max.NaN.f32", or_nan(larger), two)
    yield from cases(FLOAT, "ex2.approx.ftz.f32", power_of_two, ("T",))
    yield from cases(FLOAT, "rcp.approx.f32", reciprocal, ("T",))
    for name, function in (("neg", operator.neg), ("abs", abs)):
        yield from cases(INTEGER, f"{name}.{{s16,s32,s64}}", function, ("T",))
        yield from cases(FLOAT, f"{name}.f32", function, ("T",))
    yield from cases(INTEGER, "popc.{b32,b64}", lambda a: bin(a).count("1"), ("T",), "u32")
    yield from cases(INTEGER, "clz.{b32,b64}", leading_zeros, ("T",), "u32")
    yield from cases(INTEGER, "brev.{b32,b64}", rotated, ("T",))
    yield from cases(INTEGER, "bfe.{u32,s32,u64,s64}", extracted, ("T", "u32", "u32"))
    yield from cases(INTEGER, "bfi.{b32,b64}", inserted, ("T", "T", "u32", "u32"))

    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        yield from cases(LOGIC, f"{name}.{{pred,b16,b32,b64}}", function, two)
    yield from cases(LOGIC, "not.{pred,b16,b32,b64}", operator.invert, ("T",))
    by = ("T", "u32")
    yield from cases(LOGIC, "shl.{b16,b32,b64}", lambda a, n: a << min(n, 64), by)
    right = "shr.{b16,b32,b64,u16,u32,u64,s16,s32,s64}"
    yield from cases(LOGIC, right, lambda a, n: a >> min(n, 64), by)
    for side, mode in itertools.product("lr", ("wrap", "clamp")):
        function = shifted_together(side == "l", mode == "wrap")
        yield from cases(LOGIC, f"shf.{side}.{mode}.b32", function, ("b32", "b32", "u32"))

    for name, (suffix, combine) in itertools.product(COMPARISONS, COMBINATIONS.items()):
        kinds = ["u16", "s16", "u32", "s32", "u64", "s64", "f32"]
        kinds += ["b16", "b32", "b64"] * (name in ("eq", "ne"))
        for kind, u in [*((kind, "") for kind in kinds), ("f32", "u")]:
            sources = (kind, kind, "pred") if combine else (kind, kind)
            opcode = f"setp.{name}{u}{suffix}.{kind}"
            yield OpcodeCase(
                opcode, COMPARE, ("pred", "pred"), sources, comparison(name + u, combine)
            )
    # Moving a float changes none of its bits, so moves of floats are tested with types of bits.
    every = "{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32}"
    select = lambda a, b, c: a if c else b  # noqa: E731
    yield from cases(COMPARE, f"selp.{every}", select, ("bits", "bits", "pred"))
    yield from cases(MOVE, f"mov.{every}", lambda a: a, ("bits",))
    yield from cases(MOVE, "mov.pred", lambda a: a, ("pred",))
    yield from cases(MOVE, "prmt.b32", permuted, ("T", "T", "T"))

    whole = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
    for to, of in itertools.permutations(whole, 2):
        for wide in (False, True):
            yield OpcodeCase(f"cvt.{to}.{of}", MOVE, (to,), (of,), lambda a: a, wide)
    for to, of in itertools.product(("f32", "f16", "bf16"), ("s32", "u32")):
        yield OpcodeCase(f"cvt.rn.{to}.{of}", MOVE, (to,), (of,), lambda a: a)
    for to, of in (("rn.f16", "f32"), ("rn.bf16", "f32"), ("f32", "f16"), ("f32", "bf16")):
        yield OpcodeCase(f"cvt.{to}.{of}", MOVE, (to.removeprefix("rn."),), (of,), lambda a: a)
    for to in ("f16x2", "bf16x2", "satfinite.e4m3x2", "satfinite.e5m2x2"):
        result = to.removeprefix("satfinite.")
        yield OpcodeCase(f"cvt.rn.{to}.f32", MOVE, (result,), ("f32", "f32"), lambda a, b: (b, a))
    for of in ("e4m3x2", "e5m2x2"):
        yield OpcodeCase(f"cvt.rn.f16x2.{of}", MOVE, ("f16x2",), (of,), lambda a: a)


CASES = list(all_cases())
