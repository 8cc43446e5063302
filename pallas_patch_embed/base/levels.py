"""Levels: the int8 numbers that stand for activations of an encoder."""

import jax
import jax.numpy as jnp
from jax import lax

# The largest level. -128 does not occur.
LARGEST = 127


def to_levels(y: jax.Array) -> jax.Array:
    """Rounds float32 to the nearest level, ties to even, and clips it; for arrays and in kernels.

    The sum of a number and 1.5 * 2^23 is a float32 whose low bits are the rounded number.
    """
    y = jnp.clip(y, -float(LARGEST), float(LARGEST)) + 1.5 * 2.0**23
    return lax.bitcast_convert_type(y, jnp.int32).astype(jnp.int8)
