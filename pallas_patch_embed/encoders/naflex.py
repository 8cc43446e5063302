"""Batches of images with any aspect ratio."""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.encoders.config import Config
from pallas_patch_embed.patch_embedding.patches import Encoding, encode


def batch_naflex(
    images: Iterable[AnyArray], config: Config, max_num_patches: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.bool]]:
    """Cuts images of different sizes into patches and pads them to one batch, on the host.

    Args:
      images: B arrays [H, W, C] uint8 with C = `config.channels`, 3 for RGB. H and W are multiples
        of `config.patch`.
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
    p, C = config.patch, config.channels
    K = C * p**2
    if getattr(images, "ndim", None) in (0, 2, 3) or not isinstance(images, Iterable):
        raise TypeError(
            f"batch_naflex: images is {type(images).__name__}, expected several arrays [H, W, "
            f"{C}], one for each image. Put a single image into a list."
        )
    images = [as_array(image, f"batch_naflex: image {i}") for i, image in enumerate(images)]
    pixel = jax.device_get(_pixels())
    patches = np.zeros((len(images), L, K), np.float32)
    spatial_shapes = np.zeros((len(images), 2), np.int32)
    for i, image in enumerate(images):
        h, w = _grid_of(image, i, config, L)
        rows = np.asarray(image).reshape(h, p, w, p, C).swapaxes(1, 2).reshape(h * w, K)
        patches[i, : h * w] = pixel[rows]
        spatial_shapes[i] = h, w
    mask = np.arange(L) < spatial_shapes.prod(1, keepdims=True)
    return patches, spatial_shapes, mask


@jax.jit
def _pixels() -> jax.Array:
    """Computes the encoding of every uint8 level, [256] float32."""
    return encode(lax.iota(jnp.uint8, 256), Encoding("float32"))


def _grid_of(image: Any, i: int, config: Config, L: int) -> tuple[int, int]:
    """Checks an image; returns its (height, width) in patches."""
    name, patch, channels = f"batch_naflex: image {i}", config.patch, config.channels
    if image.dtype != np.uint8:
        raise TypeError(
            f"{name} is {image.dtype}, expected a uint8 array [H, W, {channels}] of pixels from 0 "
            "to 255."
        )
    if image.ndim != 3 or image.shape[-1] != channels:
        advice = "Convert it to RGB." if channels == 3 else "Move the channels last."
        raise ValueError(
            f"{name} has shape {list(image.shape)}, expected [H, W, {channels}]. {advice}"
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
