"""Independent references for the tests: the values of floats, and TMA's swizzles."""

import math

# Numbers of bits of the exponent and of the fraction of each float type.
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "e4m3": (4, 3), "e5m2": (5, 2)}


def float_value(raw, ptx_type):
    """Returns the value of a float given by its bits, which Python's floats represent exactly."""
    exponent_bits, fraction_bits = FORMATS[ptx_type]
    sign = -1.0 if raw >> exponent_bits + fraction_bits & 1 else 1.0
    exponent, fraction = raw >> fraction_bits & 2**exponent_bits - 1, raw & 2**fraction_bits - 1
    # e4m3 has no infinities and a single NaN.
    if exponent == 2**exponent_bits - 1 and ptx_type != "e4m3":
        return math.nan if fraction else sign * math.inf
    if ptx_type == "e4m3" and (exponent, fraction) == (15, 7):
        return math.nan
    unit = max(exponent, 1) + 1 - 2 ** (exponent_bits - 1) - fraction_bits
    return sign * math.ldexp(fraction + (2**fraction_bits if exponent else 0), unit)


def swizzled_address(address, swizzle):
    """Returns the address where TMA with a swizzle puts a byte of shared memory (5.5.7).

    A row has as many bytes as the swizzle. Its chunks of 16 bytes are permuted: their number is
    XORed with the number of the line of 128 bytes, so that the pattern repeats after 8 lines.
    """
    if not swizzle:
        return address
    chunks = swizzle // 16
    row, chunk, rest = address // swizzle, address % swizzle // 16, address % 16
    line = address // 128 % chunks
    return row * swizzle + (chunk ^ line) * 16 + rest
