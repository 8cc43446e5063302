"""Contenders that measure the limits of the device's memory and of its matrix units."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.contenders import product
from pallas_patch_embed.commands.tune.timing import Contender


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A contender that measures a limit of the device, and the bytes or operations of one call."""

    contender: Contender
    bytes: int = 0
    operations: int = 0


def memory_ceilings(gigabytes: float = 1.0) -> dict[str, Ceiling]:
    """Returns contenders that measure the memory bandwidth with words of 4 bytes.

    "copy" writes as many bytes as it reads. "widen" writes two bytes for each byte that it reads,
    like the operator with one-byte dtypes if K = N.
    """
    n = int(gigabytes * 1e9) // 4
    words = jax.random.bits(jax.random.key(0), (n,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    widen = jax.jit(lambda x: x[:, None] ^ jnp.arange(1, 3, dtype=jnp.uint32))
    return {
        "copy": Ceiling(Contender(copy, (words,)), bytes=2 * words.nbytes),
        "widen": Ceiling(Contender(widen, (words,)), bytes=3 * words.nbytes),
    }


def product_ceiling(dtype: str, size: int) -> Ceiling:
    """Returns a product of two square matrices, which measures the rate of the matrix units."""

    @jax.jit
    def numbers(key):
        bits = jax.random.bits(key, (1, size, size), jnp.uint8)
        if dtype == "int8":
            return lax.bitcast_convert_type(bits, jnp.int8)
        return (bits.astype(jnp.float32) / 128 - 1).astype(dtype)

    a, b = map(numbers, jax.random.split(jax.random.key(0)))
    dot = jax.jit(functools.partial(product, axis=1))
    return Ceiling(Contender(dot, (a, b[0])), operations=2 * size**3)
