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
      tensor_dtypes: dtypes of patches and weight that the tensor cores multiply without conversion.
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
    tensor_dtypes: tuple[str, ...]


_INT8, _FLOAT8 = ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn")
_ALL = ("bfloat16", "int8", "float8_e4m3fn")
_G = 10**9

A100 = Chip("NVIDIA A100", (8, 0), 108, 163 * KIB, 0, 1.41, 2039 * _G, 80 * _G, 40 * MIB, _INT8)
RTX_3090 = Chip("RTX 3090", (8, 6), 82, 99 * KIB, 0, 1.695, 936 * _G, 24 * _G, 6 * MIB, _INT8)
RTX_4090 = Chip("RTX 4090", (8, 9), 128, 99 * KIB, 0, 2.52, 1008 * _G, 24 * _G, 72 * MIB, _ALL)
H200 = Chip("NVIDIA H200", (9, 0), 132, 227 * KIB, 0, 1.98, 4800 * _G, 141 * _G, 50 * MIB, _ALL)
B200 = Chip(
    "NVIDIA B200", (10, 0), 148, 227 * KIB, 512, 1.965, 8000 * _G, 180 * _G, 126 * MIB, _ALL
)
# The tensor cores of a B300 have no kind::i8 (PTX ISA, tcgen05.mma).
B300 = Chip(
    "NVIDIA B300", (10, 3), 148, 227 * KIB, 512, 1.965, 8000 * _G, 288 * _G, 126 * MIB, _FLOAT8
)
RTX_5090 = Chip("RTX 5090", (12, 0), 170, 99 * KIB, 0, 2.407, 1792 * _G, 32 * _G, 96 * MIB, _ALL)

# One chip for each compute capability, oldest first.
CHIPS = (A100, RTX_3090, RTX_4090, H200, B200, B300, RTX_5090)


def chip_of(
    capability: tuple[int, int], multiprocessors: int | None = None, name: str | None = None
) -> Chip:
    """Returns the chip with this compute capability.

    For a capability that is not in `CHIPS`, the facts are those of the closest older one.

    Args:
      capability: (major, minor).
      multiprocessors: number of streaming multiprocessors; None for that of the listed chip.
      name: name that NVIDIA's driver reports; None for that of the listed chip.
    """
    like = next((chip for chip in reversed(CHIPS) if chip.capability <= capability), CHIPS[0])
    count = multiprocessors or like.multiprocessors
    return dataclasses.replace(
        like, name=name or like.name, capability=capability, multiprocessors=count
    )


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
