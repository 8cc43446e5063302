"""The check of a kernel on a GPU: every element, fresh inputs, poisoned outputs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_patch_embed.problem import NAMED_SHAPES, NamedShape, named_shape, padded

DTYPES = ("float8_e4m3fn", "int8", "bfloat16")
OUT_DTYPES = ("bfloat16", "float32")
BITS = {"bfloat16": 7, "float32": 23}
RUNS = 20


def gpu():
    """The first GPU that JAX sees; None if there is none."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def draw(key, shape, dtype, B):
    """Random operands of a named shape; NaFlex has a table for every image."""
    S, N, K = shape.S, shape.N, padded(shape.K)
    keys = jax.random.split(key, 4)
    if dtype == "int8":
        bits = functools.partial(jax.random.bits, dtype=jnp.uint8)
        patches = lax.bitcast_convert_type(bits(keys[0], (B, S, K)), jnp.int8)
        weight = lax.bitcast_convert_type(bits(keys[1], (N, K)), jnp.int8)
    else:
        patches = jax.random.uniform(keys[0], (B, S, K), jnp.float32, -1, 1).astype(dtype)
        weight = (64 * jax.random.normal(keys[1], (N, K))).astype(dtype)
    # Terms as large as the product, some of which cancel it.
    scale = jnp.exp(jax.random.normal(keys[2], (N,)))
    magnitude = 74 * 74 * K**0.5 if dtype == "int8" else 37 * K**0.5
    table_shape = (B, S, N) if shape.name.startswith("NaFlex") else (S, N)
    table = (magnitude * scale * jax.random.normal(keys[3], table_shape)).astype(jnp.bfloat16)
    return patches, weight, scale, table


def rounded(x, out_dtype):
    """float32 rounded to out_dtype; inside jit XLA would drop a conversion there and back."""
    return lax.reduce_precision(x, 8, BITS[out_dtype])


def ulp(x, out_dtype):
    """The distance between neighbouring numbers of out_dtype at |x|."""
    exponent = jnp.frexp(jnp.maximum(jnp.abs(x), 2.0**-120))[1] - 1
    return jnp.ldexp(jnp.float32(1), exponent - BITS[out_dtype])


def int8_product(patches, weight):
    """The exact int32 product [..., S, N] of int8 operands.

    It is computed in float32, which is exact up to 2^24 = 1024 * 128 * 128. XLA's own int8 product
    is wrong with the tiles that it uses if it does not tune (jax 0.11.2).
    """
    return sum(
        jnp.einsum(
            "...sk,nk->...sn",
            patches[..., k : k + 1024].astype(jnp.float32),
            weight[:, k : k + 1024].astype(jnp.float32),
            precision="highest",
        ).astype(jnp.int32)
        for k in range(0, weight.shape[1], 1024)
    )


def float8_error(patches, weight):
    """A bound on the error of Hopper's float8 products, [..., S, N], before the scale.

    In each step the tensor cores align the products and the accumulator to the largest of them, and
    drop the bits below its 13th fraction bit (arXiv 2512.07004). So every addend, and the sum, errs
    by less than 2^-13 of the largest. A step has 16 or 32 products. The bound assumes 16, which
    means more steps and a larger bound, so it is valid for both.
    """
    step = 16
    parts = [
        jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, step), -2, 0)
        for x in (patches, weight)
    ]

    def add(carry, part):
        total, error = carry
        p, w = part
        largest = jnp.abs(p).max(-1)[..., None] * jnp.abs(w).max(-1)
        after = total + jnp.einsum("...sk,nk->...sn", p, w, precision="highest")
        largest = jnp.maximum(largest, jnp.maximum(jnp.abs(total), jnp.abs(after)) + error)
        return (after, error + (step + 2) * 2.0**-13 * largest), None

    zero = jnp.zeros((*patches.shape[:-1], weight.shape[0]), jnp.float32)
    return lax.scan(add, (zero, zero), tuple(parts))[0][1]


def check(y, operands, out_dtype):
    """(number of elements outside the bound, number of int8 results that are not the reference).

    The bounds are those of `bounds.assert_agrees`, widened because the reference itself is computed
    in float32. For float8, `float8_error` is added.
    """
    patches, weight, scale, table = operands
    table = table.astype(jnp.float32)
    y32 = y.astype(jnp.float32)
    if patches.dtype == jnp.int8:
        scaled = int8_product(patches, weight).astype(jnp.float32) * scale
        exact = rounded(scaled + table, out_dtype)
        largest = jnp.maximum(jnp.maximum(jnp.abs(scaled), jnp.abs(table)), jnp.abs(exact))
        wrong = ~(jnp.abs(y32 - exact) <= ulp(largest, out_dtype))
        return wrong.sum(), (y32 != exact).sum()
    p, w = patches.astype(jnp.float32), weight.astype(jnp.float32)
    contract = functools.partial(jnp.einsum, "...sk,nk->...sn", precision="highest")
    reference = contract(p, w) * scale + table
    magnitude = contract(jnp.abs(p), jnp.abs(w)) * scale
    bound = ulp(reference, out_dtype) + 2 * (p.shape[-1] + 3) * 2.0**-24 * magnitude
    if patches.dtype == jnp.float8_e4m3fn:
        bound += float8_error(patches, weight) * scale
    return (~(jnp.abs(y32 - reference) <= bound)).sum(), jnp.int32(0)


# Size of the poisoned array as a multiple of the output: larger than all buffers of a check. XLA
# allocates the largest buffer first, and later ones in the same memory.
POISON = 16


def poisoned(operands, shape, dtype):
    """The operands, made after an array of NaN whose memory the output will reuse.

    They are rounded to their dtype before they are used.
    """
    operands, nan = lax.optimization_barrier((operands, jnp.full((), jnp.nan, dtype)))
    poison = lax.optimization_barrier(jnp.broadcast_to(nan, (POISON, *shape)))
    return lax.optimization_barrier((operands, poison.reshape(-1)[-1]))


def programme(run, shape, dtype, out_dtype, B):
    """A function of keys: (outside the bound, moved, an element of the poison) for each."""

    def once(key):
        operands, read = poisoned(draw(key, shape, dtype, B), (B, shape.S, shape.N), out_dtype)
        # The barrier keeps the check from using the poisoned memory before the kernel does.
        y, operands = lax.optimization_barrier((run(*operands, out_dtype=out_dtype), operands))
        return *check(y, operands, out_dtype), read

    return lambda keys: lax.map(once, keys)


def runs_of(run, shape, dtype, out_dtype, B):
    """(outside the bound, moved, elements), summed over RUNS fresh inputs, in one jit."""
    keys = jax.random.split(jax.random.key(shape.S * shape.N + B), RUNS)
    # The reference need not be fast, so XLA does not tune it.
    options = {"xla_gpu_autotune_level": 0}
    compiled = jax.jit(programme(run, shape, dtype, out_dtype, B), compiler_options=options)
    beyond, moved, read = compiled(keys)
    assert jnp.isnan(read).all()
    return int(beyond.sum()), int(moved.sum()), RUNS * B * shape.S * shape.N


def pairwise():
    """Programs, 3 for each shape, in which every pair of values of two parameters occurs."""
    batches = (1, 3, 67)
    for i, shape in enumerate(NAMED_SHAPES):
        for j, B in enumerate(batches):
            yield shape, DTYPES[(i + j) % 3], OUT_DTYPES[(i // 3 + j) % 2], B


# In the tensor map of its weight, a stride is smaller than the size of another dimension.
WIDE = NamedShape("wide", 6, 24, 16384)

# TMA loads the lines of patches one by one, because the number next to each other is odd.
ODD = NamedShape("odd", 16, 240, 768)

# Shapes whose images TMA can cut, each with two batches, and one shape with all of them. Of large
# images there are at most so many that they have 100,000 patches.
CUT_BATCHES = (1, 8, 64, 512)
CUT_PROGRAMS = [
    (shape, OUT_DTYPES[(i // 2 + j) % 2], min(CUT_BATCHES[(i + 2 * j) % 4], 100_000 // shape.S))
    for i, shape in enumerate([*(shape for shape in NAMED_SHAPES if shape.patch == 16), ODD])
    for j in range(2)
]
CUT_PROGRAMS += [(named_shape("B/16 224"), "bfloat16", B) for B in (8, 64, 512, 4736)]


def uncut(patches, shape):
    """The uint8 images [B, H, W, 3] of int8 patches [B, S, K] of a named shape."""
    p, (h, w) = shape.patch, shape.grid
    levels = (patches.astype(jnp.int16) + 128).astype(jnp.uint8)
    cut = levels.reshape(-1, h, w, p, p, 3).swapaxes(2, 3)
    return cut.reshape(-1, h * p, w * p, 3)


PROGRAMS = [
    *pairwise(),
    (WIDE, "int8", "bfloat16", 3),
    *((named_shape("B/16 224"), dtype, "bfloat16", 4736) for dtype in DTYPES),
]
