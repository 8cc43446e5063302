"""Random operands, exact references, and the error bounds of every backend."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import pallas_patch_embed as ppe
from pallas_patch_embed.base.dtypes import DTYPES as DTYPES

UNIT_ROUNDOFF = 2.0**-24


def draw_params(rng, *, patch_size, grid, N, dtype, positions=True):
    """Draws params with a random kernel, bias and positions; the channels' magnitudes differ."""
    p, S = patch_size, grid[0] * grid[1]
    kernel = rng.normal(0, 1, (p, p, 3, N)) * 10 ** rng.uniform(-3, 0, N)
    table = rng.normal(0, 1, (S, N)) if positions else None
    return ppe.pack(kernel, rng.normal(0, 1, N), table, patch_size=p, grid=grid, dtype=dtype)


def draw_images(rng, *shape):
    """Draws random uint8 pixels."""
    return rng.integers(0, 256, shape, np.uint8)


def as_float64(x):
    return np.asarray(x).astype(np.float64)


def ulp_bfloat16(x):
    """Returns the distance between bfloat16 numbers at |x|, at least that between subnormals."""
    exponent = np.frexp(np.maximum(np.abs(x), 2.0**-126))[1] - 1
    return np.ldexp(1.0, exponent - 7)


def ulp_float32(x):
    return ulp_bfloat16(x) * 2.0**-16


def assert_agrees(y, patches, params, table=None, *, moved=1e-4):
    """Asserts that y is the operator's result for these patches, element by element.

    For int8 the accumulator is exact, so the result is that of one float32 product and sum. A fused
    multiply-add may move a fraction `moved` of the elements by one ulp of the largest of product,
    table and result (which can be in the next binade).

    For other dtypes the bound is 1 ulp(ref) + (K + 3) * 2^-24 * scale * sum_k |p * w|. A float32
    sum of K products in any order errs by at most (K - 1) * 2^-24 times the sum of their
    magnitudes. Rounding the products (exact unless they are float32), and rounding the
    accumulator's product with the scale, add less than 4 * 2^-24 of that sum. Adding the table and
    the final rounding together err by less than 1 ulp of the result.
    """
    assert np.asarray(y).dtype in (jnp.bfloat16, jnp.float32)
    ulp = ulp_float32 if np.asarray(y).dtype == np.float32 else ulp_bfloat16
    y = as_float64(y)
    if table is None:
        table = params.offset if params.table is None else params.table
    table, scale = as_float64(table), as_float64(params.scale)
    p, w = as_float64(patches), as_float64(params.weight)
    product = p @ w.T
    assert y.shape == (*patches.shape[:-1], params.N)
    if params.dtype == "int8":
        scaled = product.astype(np.float32) * np.asarray(params.scale)
        exact = (scaled + table.astype(np.float32)).astype(np.float32)
        if ulp is ulp_bfloat16:
            exact = exact.astype(jnp.bfloat16)
        error = np.abs(y - as_float64(exact))
        largest = np.maximum(np.maximum(np.abs(scaled), np.abs(table)), np.abs(as_float64(exact)))
        assert (error <= ulp(largest)).all()
        if ulp is ulp_bfloat16:
            assert np.count_nonzero(error) <= max(1, moved * error.size)
        return
    reference = product * scale + table
    magnitude = (np.abs(p) @ np.abs(w).T) * scale
    bound = ulp(reference) + (patches.shape[-1] + 3) * UNIT_ROUNDOFF * magnitude
    error = np.abs(y - reference)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), (
        f"{np.count_nonzero(error > bound)} of {error.size} elements beyond the bound; the worst "
        f"is {y.flat[worst]}, expected {reference.flat[worst]} +- {bound.flat[worst]}"
    )


def assert_bit_equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def leaves_with_axis(params, axes):
    """Returns vmap's in_axes for params, from a dict of name -> axis."""
    names = ("weight", "scale", "offset", "table")
    return dataclasses.replace(params, **{name: axes.get(name) for name in names})
