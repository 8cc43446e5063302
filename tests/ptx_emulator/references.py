"""References of the tests: floats and swizzles."""

import math

# Bits of exponent and fraction.
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "e4m3": (4, 3), "e5m2": (5, 2)}


def number(raw, kind):
    """The value of a float; Python's floats hold it exactly."""
    exponents, fractions = FORMATS[kind]
    sign = -1.0 if raw >> exponents + fractions & 1 else 1.0
    exponent, fraction = raw >> fractions & 2**exponents - 1, raw & 2**fractions - 1
    if exponent == 2**exponents - 1 and kind != "e4m3":
        return math.nan if fraction else sign * math.inf
    if kind == "e4m3" and (exponent, fraction) == (15, 7):
        return math.nan
    unit = max(exponent, 1) + 1 - 2 ** (exponents - 1) - fractions
    return sign * math.ldexp(fraction + (2**fractions if exponent else 0), unit)


def exchanged(address, swizzle):
    """5.5.7: the pieces of 16 bytes in a row of the swizzle's width change places; which ones do is
    said by the number of the line of 128 bytes, so that the pattern comes again after 8 widths."""
    if not swizzle:
        return address
    pieces = swizzle // 16
    row, piece, rest = address // swizzle, address % swizzle // 16, address % 16
    line = address // 128 % pieces
    return row * swizzle + (piece ^ line) * 16 + rest
