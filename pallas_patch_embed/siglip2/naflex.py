"""Batches of images with any aspect ratio, and the resizing of their positions."""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from pallas_patch_embed.grids import largest_grid
from pallas_patch_embed.patches import Encoding, encode
from pallas_patch_embed.problem import AnyArray
from pallas_patch_embed.siglip2.config import Config


def batch_naflex(
    images: Iterable[AnyArray], config: Config, max_num_patches: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.bool]]:
    """Cuts images of different sizes into patches and pads them to one batch, on the host.

    Args:
      images: B arrays [H, W, 3] uint8. H and W are multiples of `config.patch`.
      config: config of the encoder that will encode the batch.
      max_num_patches: L, the length to which every image is padded.

    Returns:
      The arguments of a NaFlex encoder: patches [B, L, K] float32, pixels u / 255 * 2 - 1 in the
      order height, width, channel, with 0 as padding; spatial_shapes [B, 2] int32, height and width
      of each image in patches; mask [B, L] bool, False for padding.

    Raises:
      TypeError: an image is not a uint8 array, or config is not a Config.
      ValueError: an image has another shape, a side that is not a multiple of the patch, or more
        than `max_num_patches` patches.
    """
    if not isinstance(config, Config):
        raise TypeError(
            f"batch_naflex: config is {type(config).__name__}, expected encoder.config."
        )
    try:
        L = 0 if isinstance(max_num_patches, bool) else operator.index(max_num_patches)
    except TypeError:
        L = 0
    if L < 1:
        raise ValueError(
            f"batch_naflex: max_num_patches is {max_num_patches!r}, expected a positive integer."
        )
    p, K = config.patch, 3 * config.patch**2
    images = list(images)
    pixel = jax.device_get(_pixels())
    patches = np.zeros((len(images), L, K), np.float32)
    spatial_shapes = np.zeros((len(images), 2), np.int32)
    for i, image in enumerate(images):
        h, w = _grid_of(image, i, p, L)
        rows = np.asarray(image).reshape(h, p, w, p, 3).swapaxes(1, 2).reshape(h * w, K)
        patches[i, : h * w] = pixel[rows]
        spatial_shapes[i] = h, w
    mask = np.arange(L) < spatial_shapes.prod(1, keepdims=True)
    return patches, spatial_shapes, mask


@jax.jit
def _pixels() -> jax.Array:
    """Computes the encoding of every uint8 level, [256] float32."""
    return encode(lax.iota(jnp.uint8, 256), Encoding("float32"))


def _grid_of(image: Any, i: int, patch: int, L: int) -> tuple[int, int]:
    """Checks an image; returns its (height, width) in patches."""
    name = f"batch_naflex: image {i}"
    if getattr(image, "dtype", None) != np.uint8:
        given = getattr(image, "dtype", type(image).__name__)
        raise TypeError(
            f"{name} is {given}, expected a uint8 array [H, W, 3] of pixels from 0 to 255."
        )
    if image.ndim != 3 or image.shape[-1] != 3:
        raise ValueError(
            f"{name} has shape {list(image.shape)}, expected [H, W, 3]. Convert it to RGB."
        )
    H, W, _ = image.shape
    if H % patch or W % patch or 0 in (H, W):
        nearest = [max(1, round(side / patch)) * patch for side in (H, W)]
        raise ValueError(
            f"{name} has {H} x {W} pixels, expected multiples of the patch size, {patch}. Resize "
            f"it; the nearest size is {nearest[0]} x {nearest[1]}."
        )
    h, w = H // patch, W // patch
    if h * w > L:
        fitting = [side * patch for side in largest_grid(H, W, patch, L)]
        raise ValueError(
            f"{name} of {H} x {W} pixels has {h * w} patches, expected at most max_num_patches = "
            f"{L}. Resize it to {fitting[0]} x {fitting[1]}, or increase max_num_patches."
        )
    return h, w


def resize_positions(positions: jax.Array, spatial_shapes: jax.Array, L: int) -> jax.Array:
    """Resizes a grid of positions to the grid of every image, in row-major order.

    The interpolation is bilinear with pixel centres at half-integers, and antialiased if the grid
    shrinks, like torch's interpolate(mode="bilinear", antialias=True) in transformers' Siglip2 and
    jax.image.resize in big_vision's naflex_vit.

    Args:
      positions: [h, w, D] float32.
      spatial_shapes: [B, 2] integer, (height, width) of each image in patches, at least 1. It may
        be traced.
      L: number of positions of each image in the result.

    Returns:
      [B, L, D] float32. Positions beyond height * width repeat those of the last row.
    """
    h, w, D = positions.shape
    height, width = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    token = lax.broadcasted_iota(jnp.int32, (1, L), 1)
    rows = _bilinear(jnp.minimum(token // width, height - 1), height, h)
    columns = _bilinear(token % width, width, w)
    weights = (rows[..., :, None] * columns[..., None, :]).reshape(-1, L, h * w)
    return jnp.matmul(weights, positions.reshape(h * w, D), precision=lax.Precision.HIGHEST)


def _bilinear(index: jax.Array, size: jax.Array, source: int) -> jax.Array:
    """Computes the weights [..., source] of the source's elements for element `index` of `size`."""
    step = source / size.astype(jnp.float32)
    centre = (index.astype(jnp.float32) + 0.5) * step - 0.5
    element = lax.broadcasted_iota(jnp.float32, (1,) * centre.ndim + (source,), centre.ndim)
    distance = jnp.abs(centre[..., None] - element)
    weights = jnp.maximum(0.0, 1.0 - distance / jnp.maximum(step, 1.0)[..., None])
    return weights / weights.sum(-1, keepdims=True)
