"""Levels: the numbers of 8 bits, int8 or float8, that stand for activations of an encoder."""

from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.base.dtypes import TABLE


def to_levels(y: jax.Array, dtype: str, *, in_kernel: bool = False) -> jax.Array:
    """Rounds float32 to the nearest level, ties to even, and clips it.

    Args:
      y: float32.
      dtype: one of `EIGHT_BITS`. XLA rounds to float8 twice on a CPU, first to float16.
      in_kernel: whether a Pallas kernel does it, which then rounds in one addition.
    """
    largest = TABLE[dtype].largest
    y = jnp.clip(y, -largest, largest)
    if not TABLE[dtype].holds_levels:
        return y.astype(dtype)
    if not in_kernel:
        return lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN).astype(dtype)
    # The sum of a number and 1.5 * 2^23 is a float32 whose low bits are the rounded number. XLA's
    # programs must not use this: where a thread stores the low byte of a single sum, ptxas of CUDA
    # 12.8 to 13.0 converts the sum instead (docs/upstream.md). Kernels store several at once.
    return lax.bitcast_convert_type(y + 1.5 * 2.0**23, jnp.int32).astype(dtype)


def refuse_gradient() -> NoReturn:
    """Refuses to differentiate levels, whose derivative is zero, or as coarse as they are."""
    raise TypeError(
        "The blocks of an encoder in 8 bits have no derivative, because they round to levels. "
        "Differentiate an encoder with dtype 'bfloat16' or 'float32', or only what follows the "
        "blocks, with jax.lax.stop_gradient around what is in front of them."
    )
