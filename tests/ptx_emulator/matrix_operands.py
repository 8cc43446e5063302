"""The tensor cores: operands in shared memory, and their products."""

import dataclasses
import functools

import numpy as np

from ptx_emulator.errors import EmulatorError, UnsupportedError
from ptx_emulator.isa import (
    FLOATS,
)
from ptx_emulator.memory import UNIT, WORD
from ptx_emulator.tma import SWIZZLES

ELEMENTS = {name: FLOATS[name] for name in ("f16", "bf16", "e4m3", "e5m2")}
ELEMENTS |= {"s8": np.int8, "u8": np.uint8, "tf32": np.float32}

# The bits of a float32 that count in TF32.
TF32 = 0xFFFFE000


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An operand in shared memory, as a 64-bit descriptor gives it (9.7.15.5.1, 9.7.16.4.1).

    Attributes:
      begin: offset in shared memory.
      leading, stride: bytes between core matrices.
      swizzle: bytes.
      transposed: whether rows (M or N) are neighbours instead of columns of K.
    """

    begin: int
    leading: int
    stride: int
    swizzle: int
    transposed: bool

    @classmethod
    def of_hopper(cls, descriptor: int, *, transposed: bool) -> "Matrix":
        """A descriptor of wgmma."""
        swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
        if descriptor & (0x3FF << 52 | 0x7 << 46 | 0x3 << 30 | 0x3 << 14):
            raise EmulatorError(f"reserved bits of the descriptor {descriptor:#x} are set")
        return cls._of(descriptor, swizzle, transposed)

    @classmethod
    def of_blackwell(cls, descriptor: int, machine, *, transposed: bool) -> "Matrix":
        """A descriptor of tcgen05."""
        kinds = {0: 0, 2: 128, 4: 64, 6: 32}
        reserved = 0x1FF << 52 | 0x3 << 30 | 0x3 << 14
        if descriptor >> 61 not in kinds or descriptor & reserved:
            raise EmulatorError(f"the descriptor {descriptor:#x}: swizzle, or reserved bits")
        if version := descriptor >> 46 & 0x7 ^ 1:
            message = f"bits 46 to 48 of the descriptor {descriptor:#x} are not 0b001"
            if version != 1:
                raise EmulatorError(message)
            machine.warn("descriptor version", message)
        return cls._of(descriptor, kinds[descriptor >> 61], transposed)

    @classmethod
    def _of(cls, descriptor: int, swizzle: int, transposed: bool) -> "Matrix":
        if descriptor >> 49 & 0x7:
            raise UnsupportedError(f"the base offset of the descriptor {descriptor:#x}")
        fields = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))
        begin, leading, stride = (16 * field for field in fields)
        if swizzle and begin % (8 * swizzle) >= swizzle:
            raise UnsupportedError(
                f"the descriptor {descriptor:#x} begins at {begin}, not in the first row of the "
                f"swizzle's pattern of {8 * swizzle} bytes, and has no base offset"
            )
        return cls(begin, leading, stride, swizzle, transposed)

    def read(self, block, rows: int, columns: int, dtype) -> np.ndarray:
        """The elements, [rows, columns]."""
        index = index_of(self, rows, columns, np.dtype(dtype).itemsize)
        return block.shared.bytes[index].view(dtype)[..., 0]

    def note(
        self, block, rows, columns, dtype, agent: int, time: int, warp, lane: int | None, what: str
    ) -> None:
        """Checks a read that is issued now, by a lane or by all: bounds, order, and proxies."""
        index = index_of(self, rows, columns, np.dtype(dtype).itemsize)
        low, high = int(index.min()), int(index.max())
        block.shared.check(low, high - low + 1, what)
        words, units = touched(self, rows, columns, np.dtype(dtype).itemsize)
        block.shared.reads(agent, time, words, warp.clock, what)
        block.shared.asynchronous(units, warp, lane, what)


@functools.cache
def index_of(matrix: Matrix, rows: int, columns: int, itemsize: int) -> np.ndarray:
    """Offsets of the bytes of element [row, k], in the canonical layouts (9.7.15.5.1)."""
    row, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    span = matrix.swizzle or 16
    if matrix.transposed:
        at = row * itemsize
        if matrix.swizzle:
            offset = at % span + at // span * matrix.leading + k % 8 * span + k // 8 * matrix.stride
        else:
            offset = at % 16 + at // 16 * matrix.stride + k % 8 * 16 + k // 8 * matrix.leading
    else:
        at = k * itemsize
        if matrix.swizzle:
            if matrix.begin % span + columns * itemsize > span:
                raise EmulatorError(f"{columns} columns of K leave the swizzled row: {matrix}")
            offset = row % 8 * span + row // 8 * matrix.stride + at
        else:
            offset = row % 8 * 16 + row // 8 * matrix.stride + at // 16 * matrix.leading + at % 16
    offset = matrix.begin + offset
    offset = offset ^ (offset >> 7 & SWIZZLES[matrix.swizzle]) << 4
    return offset[..., None] + np.arange(itemsize)


@functools.cache
def touched(matrix: Matrix, rows: int, columns: int, itemsize: int):
    """Words and units of 16 bytes of an operand."""
    index = index_of(matrix, rows, columns, itemsize)
    return np.unique(index // WORD), np.unique(index // UNIT)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [M, K] times b [N, K]^T in float64: exact for all types here but large float8_e5m2."""
    if a.dtype == np.float32:
        a, b = ((x.view(np.uint32) & np.uint32(TF32)).view(np.float32) for x in (a, b))
    return a.astype(np.float64) @ b.astype(np.float64).T


def accumulated(old: np.ndarray | None, added: np.ndarray, kind: str) -> np.ndarray:
    """Old accumulators (raw words) plus a product, as raw words.

    A chip rounds a float product in its own way: only exact data is comparable.
    """
    if kind == "s32":
        total = np.rint(added).astype(np.int64)
        total = total if old is None else total + old.view(np.int32)
        return (total & 0xFFFFFFFF).astype(np.uint32)
    total = added if old is None else added + old.view(np.float32)
    return total.astype(np.float32).view(np.uint32)
