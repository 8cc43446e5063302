"""Operands in shared memory for the tests of the tensor cores."""

import functools

import numpy as np

from tests.ptx_emulator.references import float_value, swizzled_address

WGMMA, TCGEN05 = "9.7.15 wgmma", "9.7.16 tcgen05"

# Elements, operands in shared memory and descriptors.

# Number of bytes of shared memory for one operand.
PART = 40960

SIZES = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@functools.cache
def exact(kind):
    """Returns floats that are multiples of 1/8 and at most 8, as raw integers and as values."""
    step = {"f16": 1 << 7, "bf16": 1 << 4}.get(kind, 1)
    values = {raw: float_value(raw, kind) for raw in range(0, 256 ** SIZES[kind], step)}
    found = {raw: x for raw, x in values.items() if abs(x) <= 8 and x * 8 % 1 == 0}
    return np.array([*found]), np.array([*found.values()])


def drawn(kind, shape, seed):
    """Draws random elements, as raw integers and as values."""
    generator = np.random.default_rng([seed, *shape])
    if kind in ("s8", "u8"):
        raw = generator.integers(0, 256, shape, np.uint8)
        return raw, raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    raw, values = exact(kind)
    chosen = generator.integers(0, len(raw), shape)
    return raw[chosen], values[chosen]


class Layout:
    """The layout of an operand in shared memory (9.7.15.5.1.2, 9.7.16.3 and 4).

    Args:
      major: contiguous dimension, "K" or "MN".
      swizzle: bytes of a row of the swizzle.
      leading, stride: byte offsets in the descriptor; by default those of a dense layout.
      begin: offset of the first element in the operand's memory.
    """

    def __init__(self, major="K", swizzle=0, leading=None, stride=None, begin=0):
        self.major, self.swizzle, self.begin = major, swizzle, begin
        dense = {("K", False): (128, 256), ("K", True): (0, 8 * swizzle)}
        dense |= {("MN", False): (144 * 40, 144), ("MN", True): (32 * swizzle, 8 * swizzle)}
        found = dense[major, bool(swizzle)]
        self.leading = found[0] if leading is None else leading
        self.stride = found[1] if stride is None else stride

    def offset(self, row, k, size):
        """Returns the offset of element k in a row of M or N; `row` and `k` may be arrays."""
        along, across = (k * size, row) if self.major == "K" else (row * size, k)
        eights, one = divmod(across, 8)
        if self.swizzle and self.major == "K":
            at = eights * self.stride + one * self.swizzle + along
        elif self.swizzle:
            lines, rest = divmod(along, self.swizzle)
            at = lines * self.leading + eights * self.stride + one * self.swizzle + rest
        else:
            # Core matrices have 8 rows of 16 bytes.
            pieces, rest = divmod(along, 16)
            near, far = (eights, pieces) if self.major == "K" else (pieces, eights)
            at = near * self.stride + far * self.leading + one * 16 + rest
        return swizzled_address(self.begin + at, self.swizzle)

    def put(self, image, raw, size):
        """Writes the elements [row, k] into an array of bytes."""
        row, k = np.indices(raw.shape)
        at = self.offset(row, k, size)[..., None] + np.arange(size)
        image[at] = raw.astype(f"<u{size}")[..., None].view(np.uint8)

    def bits(self, chip):
        """Returns the bits of the descriptor without the address."""
        found = (self.leading >> 4) << 16 | (self.stride >> 4) << 32
        if chip == "Hopper":
            return found | {0: 0, 128: 1, 64: 2, 32: 3}[self.swizzle] << 62
        return found | 0b001 << 46 | {0: 0, 128: 2, 64: 4, 32: 6}[self.swizzle] << 61


def descriptor(name, offset, bits):
    """Returns PTX that makes a descriptor of the operand at `memory` + `offset`."""
    return f"""add.u32 %x, %memory, {offset}; shr.u32 %x, %x, 4; and.b32 %x, %x, 0x3FFF;
        cvt.u64.u32 {name}, %x; or.b64 {name}, {name}, {bits:#x};"""


def uploaded(size, array=0, fence="fence.proxy.async.shared::cta;"):
    """Returns PTX with which 128 threads copy an array to `memory`."""
    text = f"mad.wide.u32 %address, %thread, 16, %m{array}; mad.lo.u32 %x, %thread, 16, %memory;"
    for at in range(0, size, 2048):
        text += f"""ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%address+{at}];
            st.shared.v4.b32 [%x+{at}], {{%v0, %v1, %v2, %v3}};"""
    return f"{text} {fence} bar.sync 0;"


def declared(size):
    return f""".shared .align 1024 .b8 memory[{size}]; .shared .align 8 .b64 bar[2];
        .shared .align 4 .b32 slot[1]; .reg .b32 %memory, %bar, %x, %y, %v<4>, %tmem, %rank;
        .reg .b64 %address, %a_desc, %b_desc; .reg .pred %first, %first_warp, %p, %no, %yes, %over;
        mov.u32 %memory, memory; mov.u32 %bar, bar; mov.u32 %rank, %cluster_ctarank;
        setp.eq.u32 %first, %thread, 0; setp.lt.u32 %first_warp, %thread, 32;
        mov.pred %no, 0; mov.pred %yes, 1;
        @%first mbarrier.init.shared.b64 [%bar], 1;
        @%first fence.mbarrier_init.release.cluster; bar.sync 0;
    """


def padded(image):
    return image.tobytes() + bytes(-len(image) % 2048)


DENSE = (Layout(), Layout())


def flags(depth, a, signs="1, 1", turned="0, 0"):
    """Returns the operands that follow the predicate."""
    return f", {signs}" * (a not in ("s8", "u8")) + f", {turned}" * (depth == 16)


def registers(count, name="%c"):
    return "{" + ", ".join(f"{name}{i}" for i in range(count)) + "}"


LAYOUTS = [
    *(Layout("K", swizzle) for swizzle in (0, 32, 64, 128)),
    *(Layout("MN", swizzle) for swizzle in (0, 32, 64, 128)),
    Layout("K", 0, leading=144 * 33, stride=144),
    Layout("K", 64, stride=1024, begin=32),
    Layout("K", 128, stride=2048, begin=96),
    Layout("MN", 32, leading=256, stride=256 * 20),
    Layout("MN", 128, leading=4096, stride=1024),
    Layout("MN", 0, leading=128, stride=528),
]


def layout_name(layout):
    return f"{layout.major}-{layout.swizzle}-{layout.leading}-{layout.stride}-{layout.begin}"
