"""Resizing of positional embeddings to another grid of patches, as reference implementations do it.

All interpolations have pixel centres at half-integers:

  bilinear              antialiased if the grid shrinks: torch's interpolate(mode="bilinear",
                        antialias=True) and jax.image.resize, in big_vision's naflex_vit and
                        transformers' Siglip2
  bicubic               torch's interpolate(mode="bicubic"), with a = -0.75, edges repeated and no
                        antialiasing: in transformers' SigLIP, CLIP, DINOv2 and ViT
  bicubic-antialiased   torch's interpolate(mode="bicubic", antialias=True), with a = -0.5, in timm
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.patch_embedding.params import check_grid

type Interpolation = Literal["bilinear", "bicubic", "bicubic-antialiased"]

INTERPOLATIONS = ("bilinear", "bicubic", "bicubic-antialiased")

# The parameter a of the cubic kernel (Keys, 1981) in torch: with antialiasing it is Pillow's.
CUBIC, CUBIC_ANTIALIASED = -0.75, -0.5

# The cubic kernel reaches two elements beyond an edge, where the edge is repeated.
REACH = 2


def check_interpolation(interpolation: Any) -> Interpolation:
    """Returns an interpolation's name; raises ValueError if it is not one of INTERPOLATIONS."""
    if not isinstance(interpolation, str) or interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation is {interpolation!r}, expected one of {', '.join(INTERPOLATIONS)}."
        )
    return interpolation  # type: ignore[return-value]


def resize_positions(
    positions: AnyArray,
    grid: Sequence[int],
    *,
    interpolation: Interpolation = "bilinear",
    prefix: int = 0,
) -> jax.Array:
    """Resizes positional embeddings to another grid of patches.

    Pixel centres are at half-integers. `positions` may be traced.

    Args:
      positions: floating-point [h, w, N], or [S, N] or [1, S, N] for a square grid.
      grid: (height, width) of the result, in patches.
      interpolation: "bilinear", antialiased if the grid shrinks, as in big_vision and in
        transformers' Siglip2; "bicubic" as in transformers' SigLIP, CLIP, DINOv2 and ViT, which
        does not antialias; or "bicubic-antialiased" as in timm.
      prefix: R, the number of positions of class and register tokens, which are the first rows and
        stay as they are.

    Returns:
      float32, in the form of `positions`: [height, width, N], or [R + height * width, N] with a
      leading axis of 1 if `positions` have one.

    Raises:
      TypeError: positions are not a floating-point array.
      ValueError: another argument has a wrong value, or the positions do not form a square.
    """
    height, width = check_grid(grid)
    check_interpolation(interpolation)
    try:
        R = -1 if isinstance(prefix, bool) else operator.index(prefix)
    except TypeError:
        R = -1
    if R < 0:
        raise ValueError(f"prefix is {prefix!r}, expected the number of class and register tokens.")
    array = as_array(positions, "resize_positions: positions")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"resize_positions: positions have dtype {array.dtype}, expected a floating-point "
            "array. Cast it with astype(numpy.float32)."
        )
    shape = tuple(array.shape)
    is_grid = len(shape) == 3 and shape[0] != 1 and not R
    S = 0 if len(shape) not in (2, 3) or 0 in shape else math.prod(shape[:-1]) - R
    side = math.isqrt(max(S, 0))
    if S < 1 or not (is_grid or ((len(shape) == 2 or shape[0] == 1) and side * side == S)):
        raise ValueError(
            f"resize_positions: positions have shape {list(shape)}, expected [h, w, N], or [S, N] "
            f"or [1, S, N] with S = {f'{R} + ' if R else ''}a square number. Reshape "
            "positions of another grid to [h, w, N], without those of class tokens."
        )
    N = shape[-1]
    if not isinstance(array, jax.Array):
        # A copy, because the computation reads the array after this function has returned. A
        # transfer guard refuses numpy arrays as arguments of a jitted function.
        array = jax.device_put(np.array(array, np.float32))
    sides = shape[:2] if is_grid else (side, side)
    # As an argument: XLA may compute a constant with another rounding.
    spatial_shapes = jax.device_put(np.asarray([[height, width]], np.int32))
    resized = _resized(array, spatial_shapes, sides, height * width, interpolation, R)
    return resized.reshape(height, width, N) if is_grid else resized.reshape(*shape[:-2], -1, N)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _resized(
    positions: jax.Array,
    spatial_shapes: jax.Array,
    sides: tuple[int, int],
    L: int,
    interpolation: Interpolation,
    prefix: int,
) -> jax.Array:
    """Returns the rows [prefix + L, N] of `resize_positions`."""
    rows = positions.astype(jnp.float32).reshape(-1, positions.shape[-1])
    stored = rows[prefix:].reshape(*sides, -1)
    resized = resize_to_each(stored, spatial_shapes, L, interpolation)[0]
    return jnp.concatenate([rows[:prefix], resized])


def resize_to_each(
    positions: jax.Array,
    spatial_shapes: jax.Array,
    L: int,
    interpolation: Interpolation = "bilinear",
) -> jax.Array:
    """Resizes a grid of positions to the grid of every image, in row-major order.

    Args:
      positions: [h, w, D] float32.
      spatial_shapes: [B, 2] integer, (height, width) of each image in patches, at least 1. It may
        be traced.
      L: number of positions of each image in the result.
      interpolation: as in `resize_positions`.

    Returns:
      [B, L, D] float32. Positions beyond height * width repeat those of the last row.
    """
    height, width = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    token = lax.broadcasted_iota(jnp.int32, (1, L), 1)
    return positions_of(token, height, width, positions, interpolation)


def positions_of(
    token: jax.Array,
    height: jax.Array,
    width: jax.Array,
    positions: jax.Array,
    interpolation: Interpolation = "bilinear",
) -> jax.Array:
    """Computes the positions of tokens in images of different grids.

    Args:
      token: [B, L] or [1, L] int32, the number of a token in its image, in row-major order. Those
        beyond height * width get positions of the last row.
      height, width: [B, L] or [B, 1] int32, the grid of the token's image, at least 1.
      positions, interpolation: as in `resize_to_each`.

    Returns:
      [B, L, D] float32.
    """
    h, w, D = positions.shape
    rows = _weights(jnp.minimum(token // width, height - 1), height, h, interpolation)
    columns = _weights(token % width, width, w, interpolation)
    weights = rows[..., :, None] * columns[..., None, :]
    weights = weights.reshape(*weights.shape[:2], h * w)
    return jnp.matmul(weights, positions.reshape(h * w, D), precision=lax.Precision.HIGHEST)


def _weights(
    index: jax.Array, size: jax.Array, source: int, interpolation: Interpolation
) -> jax.Array:
    """Computes the weights [..., source] of the source's elements for element `index` of `size`."""
    step = source / size.astype(jnp.float32)
    centre = (index.astype(jnp.float32) + 0.5) * step - 0.5
    reach = REACH if interpolation == "bicubic" else 0
    shape = (1,) * centre.ndim + (source + 2 * reach,)
    element = lax.broadcasted_iota(jnp.float32, shape, centre.ndim) - reach
    distance = jnp.abs(centre[..., None] - element)
    if interpolation == "bicubic":
        weights = _cubic(distance, CUBIC)
        first, inner, last = jnp.split(weights, (reach, reach + source), axis=-1)
        weights = inner.at[..., 0].add(first.sum(-1)).at[..., -1].add(last.sum(-1))
    else:
        distance = distance / jnp.maximum(step, 1.0)[..., None]
        if interpolation == "bilinear":
            weights = jnp.maximum(0.0, 1.0 - distance)
        else:
            weights = _cubic(distance, CUBIC_ANTIALIASED)
    return weights / weights.sum(-1, keepdims=True)


def _cubic(x: jax.Array, a: float) -> jax.Array:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0.0))
