"""Levels: the numbers of 8 bits, int8 or float8, that stand for activations of an encoder."""

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_patch_embed.base.dtypes import TABLE


def to_levels(y: jax.Array, dtype: str) -> jax.Array:
    """Rounds float32 to the nearest level, ties to even, and clips it; for arrays and in kernels.

    Args:
      y: float32.
      dtype: one of `EIGHT_BITS`. XLA rounds to float8 twice on a CPU, first to float16.
    """
    largest = TABLE[dtype].largest
    y = jnp.clip(y, -largest, largest)
    if not TABLE[dtype].holds_levels:
        return y.astype(dtype)
    # The sum of a number and 1.5 * 2^23 is a float32 whose low bits are the rounded number.
    return lax.bitcast_convert_type(y + 1.5 * 2.0**23, jnp.int32).astype(dtype)


def refuse_gradient() -> NoReturn:
    """Refuses to differentiate levels, whose derivative is zero, or as coarse as they are."""
    raise TypeError(
        "The blocks of an encoder in 8 bits have no derivative, because they round to levels. "
        "Differentiate an encoder with dtype 'bfloat16' or 'float32', or only what follows the "
        "blocks, with jax.lax.stop_gradient around what is in front of them."
    )


@jax.custom_jvp
def not_differentiated(x: jax.Array) -> jax.Array:
    """Returns x, which will be rounded to levels; differentiating by x raises."""
    return x


@functools.partial(not_differentiated.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        refuse_gradient()
    return primals[0], tangents[0]
