"""The dtypes of patches and weight, with a row of facts for each one in `TABLE`.

Which dtypes a kernel multiplies is a fact about the kernel (`backends/tiles.py`), and which ones
tensor cores multiply a fact about the chip (`chips.py`).
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PatchDtype:
    """A dtype of patches and weight.

    Attributes:
      name: name of the dtype.
      scaled: whether each output channel of the weight has a scale, and is rounded to this dtype
        after it was divided by the scale.
      accumulator: dtype of the sum over K.
      table: dtype of the table, and of positions.
      stored: dtype of the weight in a safetensors file. safetensors.numpy cannot read F8_E4M3, so
        float8 weights are stored as bytes.
      cuda: spelling in the names of the CUDA kernels.
      triton: spelling in the signatures of the Triton kernel.
    """

    name: str
    scaled: bool
    accumulator: str
    table: str
    stored: str
    cuda: str
    triton: str

    @property
    def holds_levels(self) -> bool:
        """Whether numbers are integers, at equal distances.

        Patches then hold the levels of pixels, u - 128, rather than numbers in [-1, 1].
        """
        return jnp.issubdtype(self.name, jnp.integer)

    @property
    def unit(self) -> float:
        """The pixel in [-1, 1] that a patch's number 1 stands for: 2 / 255 for levels."""
        return 2 / 255 if self.holds_levels else 1.0

    @property
    def largest(self) -> float:
        """Largest magnitude of a weight. For int8 it is 127, so that -128 does not occur."""
        information = jnp.iinfo if self.holds_levels else jnp.finfo
        return float(information(self.name).max)


_ROWS = (
    PatchDtype("float32", False, "float32", "float32", "float32", "f32", "fp32"),
    PatchDtype("bfloat16", False, "float32", "bfloat16", "bfloat16", "bf16", "bf16"),
    PatchDtype("float8_e4m3fn", True, "float32", "bfloat16", "uint8", "e4m3", "fp8e4nv"),
    PatchDtype("int8", True, "int32", "bfloat16", "int8", "i8", "i8"),
)
TABLE = {row.name: row for row in _ROWS}

DTYPES = tuple(TABLE)
OUT_DTYPES = ("bfloat16", "float32")

# The dtypes of the dense layers of an encoder in 8 bits, and of all encoders.
EIGHT_BITS = tuple(name for name, row in TABLE.items() if row.scaled)
LAYER_DTYPES = (*OUT_DTYPES, *EIGHT_BITS)
