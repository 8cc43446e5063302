"""Code that wgmma and tcgen05.mma share: operands in shared memory, and exact products."""

import dataclasses
import functools

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, UnsupportedError
from tests.ptx_emulator.isa import FLOATS
from tests.ptx_emulator.memory import UNIT_BYTES, WORD_BYTES
from tests.ptx_emulator.tma import SWIZZLES

# The numpy type of each element type of an operand.
ELEMENTS = {name: FLOATS[name] for name in ("f16", "bf16", "e4m3", "e5m2")}
ELEMENTS |= {"s8": np.int8, "u8": np.uint8, "tf32": np.float32}

# The bits of a float32 that TF32 uses: sign, 8 bits of exponent, 10 bits of fraction.
TF32_MASK = 0xFFFFE000


@dataclasses.dataclass(frozen=True)
class SharedOperand:
    """An operand in shared memory, decoded from a matrix descriptor (9.7.15.5.1, 9.7.16.4.1).

    Attributes:
      start: offset in shared memory, in bytes.
      leading, stride: leading-dimension and stride byte offsets between core matrices.
      swizzle: bytes of a row of the swizzle; 0 without a swizzle.
      transposed: whether M or N is the contiguous dimension (MN-major) instead of K (K-major).
    """

    start: int
    leading: int
    stride: int
    swizzle: int
    transposed: bool

    @classmethod
    def from_wgmma_descriptor(cls, descriptor: int, *, transposed: bool) -> "SharedOperand":
        """Decodes a wgmma descriptor, whose swizzle is in bits 62 and 63."""
        swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
        if descriptor & (0x3FF << 52 | 0x7 << 46 | 0x3 << 30 | 0x3 << 14):
            raise EmulatorError(f"reserved bits of the descriptor {descriptor:#x} are set")
        return cls._from_fields(descriptor, swizzle, transposed)

    @classmethod
    def from_tcgen05_descriptor(
        cls, descriptor: int, machine, *, transposed: bool
    ) -> "SharedOperand":
        """Decodes a tcgen05 descriptor, whose swizzle is in bits 61 to 63."""
        swizzles = {0: 0, 2: 128, 4: 64, 6: 32}
        reserved = 0x1FF << 52 | 0x3 << 30 | 0x3 << 14
        if descriptor >> 61 not in swizzles or descriptor & reserved:
            raise EmulatorError(
                f"the descriptor {descriptor:#x} has an unknown swizzle, or reserved bits are set"
            )
        # Bits 46 to 48 are 0b001 in the ISA. 0b000 is only a warning, because it runs on hardware.
        if version := descriptor >> 46 & 0x7 ^ 1:
            message = f"bits 46 to 48 of the descriptor {descriptor:#x} are not 0b001"
            if version != 1:
                raise EmulatorError(message)
            machine.warn("descriptor version", message)
        return cls._from_fields(descriptor, swizzles[descriptor >> 61], transposed)

    @classmethod
    def _from_fields(cls, descriptor: int, swizzle: int, transposed: bool) -> "SharedOperand":
        """Decodes the fields that both chips share: addresses and offsets in units of 16 bytes."""
        if descriptor >> 49 & 0x7:
            raise UnsupportedError(
                f"the base offset of the descriptor {descriptor:#x} is not supported"
            )
        fields = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))
        start, leading, stride = (16 * field for field in fields)
        if swizzle and start % (8 * swizzle) >= swizzle:
            raise UnsupportedError(
                f"the descriptor {descriptor:#x} begins at {start}, not in the first row of the "
                f"swizzle's pattern of {8 * swizzle} bytes, and has no base offset"
            )
        return cls(start, leading, stride, swizzle, transposed)

    def read(self, block, rows: int, depth: int, dtype) -> np.ndarray:
        """Reads the elements, [rows, depth]: rows of M or N, and columns of K."""
        index = byte_offsets(self, rows, depth, np.dtype(dtype).itemsize)
        return block.shared.bytes[index].view(dtype)[..., 0]

    def record_read(
        self,
        block,
        rows,
        depth,
        dtype,
        agent: int,
        time: int,
        warp,
        lane: int | None,
        description: str,
    ) -> None:
        """Checks and records a read: bounds, order, and the fence between the proxies.

        Args:
          block: block whose shared memory is read.
          rows, depth, dtype: as for `read`.
          agent, time: agent that reads, and its time.
          warp, lane: issuer of the read; a lane of None stands for all lanes.
          description: name of the read in error messages.
        """
        index = byte_offsets(self, rows, depth, np.dtype(dtype).itemsize)
        low, high = int(index.min()), int(index.max())
        block.shared.check_bounds(low, high - low + 1, description)
        words, units = words_and_units(self, rows, depth, np.dtype(dtype).itemsize)
        block.shared.record_read(agent, time, words, warp.clock, description)
        block.shared.check_async_proxy_access(units, warp, lane, description)


@functools.cache
def byte_offsets(operand: SharedOperand, rows: int, depth: int, itemsize: int) -> np.ndarray:
    """Returns the offsets in shared memory of each element's bytes, [rows, depth, itemsize].

    These are the canonical layouts of 9.7.15.5.1. A core matrix has 8 rows of 16 bytes, or of the
    swizzle's bytes.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    row_bytes = operand.swizzle or 16
    if operand.transposed:
        along = row * itemsize
        if operand.swizzle:
            in_core = along % row_bytes + k % 8 * row_bytes
            offset = in_core + along // row_bytes * operand.leading + k // 8 * operand.stride
        else:
            in_core = along % 16 + k % 8 * 16
            offset = in_core + along // 16 * operand.stride + k // 8 * operand.leading
    else:
        along = k * itemsize
        if operand.swizzle:
            if operand.start % row_bytes + depth * itemsize > row_bytes:
                raise EmulatorError(f"{depth} columns of K leave the swizzled row: {operand}")
            offset = row % 8 * row_bytes + row // 8 * operand.stride + along
        else:
            in_core = row % 8 * 16 + along % 16
            offset = in_core + row // 8 * operand.stride + along // 16 * operand.leading
    offset = operand.start + offset
    offset = offset ^ (offset >> 7 & SWIZZLES[operand.swizzle]) << 4
    return offset[..., None] + np.arange(itemsize)


@functools.cache
def words_and_units(operand: SharedOperand, rows: int, depth: int, itemsize: int):
    """Returns the words of 4 bytes and units of 16 bytes that an operand occupies."""
    index = byte_offsets(operand, rows, depth, itemsize)
    return np.unique(index // WORD_BYTES), np.unique(index // UNIT_BYTES)


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiplies a [M, K] by b [N, K] transposed, in float64.

    The product is exact for all types, except for float8_e5m2 with very different magnitudes.
    """
    if a.dtype == np.float32:
        a, b = ((x.view(np.uint32) & np.uint32(TF32_MASK)).view(np.float32) for x in (a, b))
    return a.astype(np.float64) @ b.astype(np.float64).T


def accumulate(old: np.ndarray | None, added: np.ndarray, result_type: str) -> np.ndarray:
    """Adds a product to accumulators; returns raw 32-bit words.

    Float sums are rounded once. Hardware rounds differently, so only data with exact sums can be
    compared.

    Args:
      old: accumulators as raw words; None if the product overwrites them.
      added: the product in float64.
      result_type: s32 or f32.
    """
    if result_type == "s32":
        total = np.rint(added).astype(np.int64)
        total = total if old is None else total + old.view(np.int32)
        return (total & 0xFFFFFFFF).astype(np.uint32)
    total = added if old is None else added + old.view(np.float32)
    return total.astype(np.float32).view(np.uint32)
