"""Facts about GPUs (`Chip`), and where a program will run (`Target`)."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

KIB = 2**10
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU.

    The sources are NVIDIA's data sheets, the white papers of GA100, GA102, AD102, GH100 and
    GB202, and the CUDA C++ Programming Guide, section Compute Capabilities.

    The clock, the bandwidth, the sizes of memories and the rates are 0, or missing, if the GPU is
    not listed here (`chip_of`). Then no times are predicted.

    Attributes:
      name: name that NVIDIA's driver reports.
      capability: compute capability, (major, minor).
      multiprocessors: number of streaming multiprocessors.
      shared_memory: largest shared memory of one thread block, in bytes.
      tensor_memory: 32-bit columns of tensor memory of one multiprocessor; 0 before Blackwell.
      clock: boost clock in GHz.
      bandwidth: memory bandwidth in bytes per second.
      memory: size of the GPU's memory in bytes.
      l2: size of the L2 cache in bytes.
      rates: products that the tensor cores of a multiprocessor add up per cycle, by the dtypes of
        patches and weight that they multiply without conversion. float32 is the accumulator, or
        int32.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    tensor_memory: int
    clock: float
    bandwidth: int
    memory: int
    l2: int
    rates: tuple[tuple[str, int], ...]

    @property
    def tensor_dtypes(self) -> tuple[str, ...]:
        """The dtypes that the tensor cores multiply without conversion and as fast as bfloat16."""
        return tuple(dtype for dtype, _ in self.rates if not self.is_slow(dtype))

    @property
    def is_listed(self) -> bool:
        """Whether all of its facts are known."""
        return self.clock > 0

    def rate(self, dtype: str) -> int:
        """Returns the products per cycle of a multiprocessor, in bfloat16 if it must convert.

        It is 0 if the rates are not known.
        """
        rates = dict(self.rates)
        return rates.get(dtype, rates.get("bfloat16", 0))

    def is_slow(self, dtype: str) -> bool:
        """Returns whether products of patches and weight in this dtype are slower than bfloat16."""
        return self.rate(dtype) < self.rate("bfloat16")


def _rates(bfloat16: int, int8: int = 0, float8: int = 0) -> tuple[tuple[str, int], ...]:
    found = dict(bfloat16=bfloat16, int8=int8, float8_e4m3fn=float8)
    return tuple((dtype, rate) for dtype, rate in found.items() if rate)


_G = 10**9

# The columns: multiprocessors, shared memory, tensor memory, clock, bandwidth, memory, L2.

A100 = Chip(
    "NVIDIA A100", (8, 0), 108, 163 * KIB, 0, 1.41, 2039 * _G, 80 * _G, 40 * MIB, _rates(1024, 2048)
)
RTX_3090 = Chip(
    "RTX 3090", (8, 6), 82, 99 * KIB, 0, 1.695, 936 * _G, 24 * _G, 6 * MIB, _rates(256, 1024)
)
RTX_4090 = Chip(
    "RTX 4090", (8, 9), 128, 99 * KIB, 0, 2.52, 1008 * _G, 24 * _G, 72 * MIB, _rates(256, 1024, 512)
)
H100 = Chip(
    "NVIDIA H100 80GB HBM3",
    (9, 0),
    132,
    227 * KIB,
    0,
    1.98,
    3350 * _G,
    80 * _G,
    50 * MIB,
    _rates(2048, 4096, 4096),
)
H200 = dataclasses.replace(H100, name="NVIDIA H200", bandwidth=4800 * _G, memory=141 * _G)
B200 = Chip(
    "NVIDIA B200",
    (10, 0),
    148,
    227 * KIB,
    512,
    1.965,
    8000 * _G,
    180 * _G,
    126 * MIB,
    _rates(4096, 8192, 8192),
)
# tcgen05.mma has no kind::i8 on a B300 (PTX ISA). mma.sync multiplies int8 at 1 / 16 of bfloat16's
# rate: NVIDIA states 24 sparse POPS for the 72 GPUs of a GB300 NVL72, and 2 for an HGX B300's 8.
# At this clock that is 287 and, because it is rounded to whole POPS, 215 dense products per cycle.
B300 = dataclasses.replace(
    B200,
    name="NVIDIA B300",
    capability=(10, 3),
    memory=288 * _G,
    rates=_rates(4096, int8=256, float8=8192),
)
# Jetson Thor. Its data sheet states 2070 sparse TFLOPS of FP4 at 1.575 GHz, that is 16384 dense
# products per cycle, and the other dtypes have the ratios of a B200. The L2 cache is that which the
# driver reports.
THOR = Chip(
    "NVIDIA Thor",
    (11, 0),
    20,
    227 * KIB,
    512,
    1.575,
    273 * _G,
    128 * _G,
    32 * MIB,
    _rates(4096, 8192, 8192),
)
RTX_5090 = Chip(
    "RTX 5090",
    (12, 0),
    170,
    99 * KIB,
    0,
    2.407,
    1792 * _G,
    32 * _G,
    96 * MIB,
    _rates(256, 1024, 512),
)
# GB202 with products in float32 at the full rate: 4000 sparse TOPS of FP4 at 2.6 GHz (the clock of
# the stated 125 TFLOPS in float32) are 2048 dense products per cycle; float8 and int8 have half of
# that, and bfloat16 a quarter.
RTX_PRO_6000 = Chip(
    "NVIDIA RTX PRO 6000",
    (12, 0),
    188,
    99 * KIB,
    0,
    2.6,
    1792 * _G,
    96 * _G,
    128 * MIB,
    _rates(512, 1024, 1024),
)
# The chip of a DGX Spark. At Hot Chips 2025 NVIDIA stated 1 sparse PFLOPS of FP4 and 31 TFLOPS in
# float32, from which the clock and the rates follow as for the RTX PRO 6000, and 24 MB of L2 cache.
SPARK = Chip(
    "NVIDIA GB10",
    (12, 1),
    48,
    99 * KIB,
    0,
    2.52,
    273 * _G,
    128 * _G,
    24 * MIB,
    _rates(512, 1024, 1024),
)


# One chip for each compute capability, oldest first.
CHIPS = (A100, RTX_3090, RTX_4090, H200, B200, B300, THOR, RTX_5090, SPARK)

# Chips that share the compute capability of one of CHIPS.
NAMED_CHIPS = (H100, RTX_PRO_6000)


def chip_of(
    capability: tuple[int, int], multiprocessors: int | None = None, name: str | None = None
) -> Chip:
    """Returns the chip with this compute capability.

    An H100 and an RTX PRO 6000 have their own facts, which their names select. Of a capability that
    is not listed only the shared memory is known: at least 99 KiB, as of every one since 8.0.

    Args:
      capability: (major, minor).
      multiprocessors: number of streaming multiprocessors; None for that of the listed chip, or 1.
      name: name that NVIDIA's driver reports; None for that of the listed chip.
    """
    label = name or ""
    listed = next((chip for chip in CHIPS if chip.capability == capability), None)
    for chip in NAMED_CHIPS:
        if chip.capability == capability and label.startswith(chip.name):
            listed = chip
    if listed is None:
        return Chip(label, capability, multiprocessors or 1, 99 * KIB, 0, 0.0, 0, 0, 0, ())
    count = multiprocessors or listed.multiprocessors
    return dataclasses.replace(listed, name=name or listed.name, multiprocessors=count)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a program will run.

    Attributes:
      platform: "cpu", "cuda", "rocm", "tpu", ...
      chip: the NVIDIA GPU; None on other platforms, and if no GPU is known.
      known: False if the chip cannot be known yet, as in an export. Then `chip` is the most likely
        GPU: that of this process, if it has one.
    """

    platform: str
    chip: Chip | None = None
    known: bool = True

    @property
    def is_timed(self) -> bool:
        """Whether times can be predicted, because the chip and its facts are known."""
        return self.known and self.chip is not None and self.chip.is_listed

    @classmethod
    def of(cls, device: "jax.Device") -> "Target":
        """Returns the target for a device."""
        capability = str(getattr(device, "compute_capability", ""))
        if device.platform == "gpu" and capability[:1].isdigit():
            major, minor = map(int, capability.split("."))
            count, name = (getattr(device, x, None) for x in ("core_count", "device_kind"))
            return cls("cuda", chip_of((major, minor), count, name))
        return cls("rocm" if device.platform == "gpu" else device.platform)

    @classmethod
    def unknown(cls, platform: str = "cuda") -> "Target":
        """Returns the target of a program that may run on any device of this platform."""
        here = cls.of(default_device())
        return cls(platform, here.chip if here.platform == platform else None, known=False)

    def __str__(self) -> str:
        if self.chip is None:
            return self.platform
        return "{} {}.{}".format(self.platform, *self.chip.capability)


def default_device() -> "jax.Device":
    """Returns the device that JAX uses by default."""
    import jax  # Imported here because programs that import this module may set up JAX later.

    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def cuda_is_installed() -> bool:
    """Returns whether this process has JAX's CUDA backend, and with it NVIDIA's libraries."""
    import jax

    return Target.of(jax.devices()[0]).platform == "cuda"
