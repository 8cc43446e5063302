"""Code that the modules of all frameworks share: the check of a convolution, and the computation.

A convolution is a patch embedding if it computes one product per patch of an RGB image: it has a
square kernel, strides equal to the kernel size, three input channels, and no padding, dilation or
groups.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_patch_embed.base.array_arguments import as_array
from pallas_patch_embed.patch_embedding.api import embed_images
from pallas_patch_embed.patch_embedding.packing import pack
from pallas_patch_embed.patch_embedding.params import PerChannel, check_normalisation
from pallas_patch_embed.patch_embedding.weight_rounding import Rounding, check_rounding

EXPECTED = (
    "Expected a square kernel [p, p], strides [p, p], three input channels (RGB), padding VALID, "
    "no dilation and one group."
)


class Packing(NamedTuple):
    """The arguments of `pack` that a module keeps.

    Attributes:
      patch_dtype: dtype of patches and packed weight, as in `pack`.
      rounding: "nearest" or "feedback", as in `pack`.
      image_mean, image_std: from `check_normalisation`; None for [-1, 1].
    """

    patch_dtype: str
    rounding: Rounding
    image_mean: PerChannel | None
    image_std: PerChannel | None

    @classmethod
    def checked(cls, patch_dtype: str, rounding: Any, image_mean: Any, image_std: Any) -> "Packing":
        """Makes a Packing; raises ValueError if the rounding or the normalisation is wrong."""
        normalisation = check_normalisation(image_mean, image_std)
        return cls(patch_dtype, check_rounding(rounding), *normalisation)


def patch_size(
    name: str,
    *,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: Any,
    dilations: Iterable[int],
    groups: int,
    channels: int,
    others: dict[str, Any],
) -> int:
    """Checks that a convolution is a patch embedding; returns its patch size.

    Args:
      name: name of the convolution, for the error message.
      kernel_size, strides: one number for each axis of the image.
      padding: "VALID", "SAME" or numbers in any nesting. "SAME" adds nothing to images of whole
        patches, and `check_whole` refuses other images.
      dilations: dilations of the input and the kernel.
      groups: number of groups of channels.
      channels: number of input channels.
      others: values of attributes that must be None or False, such as a mask, by their names.

    Raises:
      ValueError: the convolution is not a patch embedding; the message lists all reasons.
    """
    kernel_size, strides = tuple(kernel_size), tuple(strides)
    padded = (
        padding.upper() not in ("VALID", "SAME")
        if isinstance(padding, str)
        else any(amount != 0 for amount in jax.tree.leaves(padding))
    )
    faults = [
        text
        for text, wrong in (
            (f"kernel_size is {kernel_size}", len(kernel_size) != 2 or len(set(kernel_size)) != 1),
            (f"strides are {strides}", strides != kernel_size),
            (f"padding is {padding!r}", padded),
            ("it is dilated", any(factor != 1 for factor in dilations)),
            (f"it has {groups} groups", groups != 1),
            (f"it has {channels} input channels", channels != 3),
            *(
                (f"{other} is {value!r}", value not in (None, False))
                for other, value in others.items()
            ),
        )
        if wrong
    ]
    if faults:
        raise ValueError(f"{name} is not a patch embedding: {', '.join(faults)}. {EXPECTED}")
    return kernel_size[0]


def check_whole(name: str, padding: Any, images: Any, size: int) -> None:
    """Refuses images that padding SAME would pad."""
    sides = tuple(images.shape[-3:-1])
    if isinstance(padding, str) and padding.upper() != "VALID" and any(n % size for n in sides):
        raise ValueError(
            f"{name} has padding {padding!r}, which would pad images of {sides[0]} x {sides[1]} "
            f"pixels to whole patches of {size} x {size}. Resize or pad the images first."
        )


def selected(found: dict[str, tuple[Any, int]], path: str | None) -> dict[str, Any]:
    """Selects the convolutions to replace; returns them by their paths in the model.

    Args:
      found: (convolution, number of its input channels) by path, for all convolutions of the model.
      path: path of the only convolution to replace; None for all with three input channels.

    Raises:
      ValueError: no convolution is selected; the message lists those of the model.
    """
    chosen = {
        name: convolution
        for name, (convolution, channels) in found.items()
        if (channels == 3 if path is None else name == path)
    }
    if not chosen:
        wanted = "with three input channels" if path is None else f"at {path!r}"
        listed = ", ".join(f"{name!r} ({channels})" for name, (_, channels) in found.items())
        raise ValueError(
            f"replace: the model has no convolution {wanted}. Its convolutions, with their numbers "
            f"of input channels, are: {listed or 'none'}. Pass a model with a patch embedding that "
            "has not been replaced yet."
        )
    return chosen


def embed(
    images: Any,
    kernel: Any,
    bias: Any,
    positions: Any,
    *,
    patch_size: int,
    layout: Literal["HWIO", "OIHW"],
    packing: Packing,
    dtype: Any,
) -> jax.Array:
    """Computes a convolution plus positions in one operator.

    Args:
      images: [..., H, W, 3], uint8, or floating-point and normalised.
      kernel: [p, p, 3, N] or [N, 3, p, p]. It is packed in every call, so that a change of the
        parameters takes effect.
      bias: [N] or None.
      positions: [S, N], [h, w, N] or [1, S, N] for all images, or [..., S, N] for each image; None
        to add no positions.
      patch_size, layout: side of the kernel in pixels, and the order of its axes.
      packing: further arguments of `pack`.
      dtype: dtype of the result; None for the dtype that the convolution would return.

    Returns:
      [..., h, w, N] with h = H // p and w = W // p.

    Raises:
      TypeError, ValueError: as for `pack` and `embed_images`.
    """
    images = as_array(images, "images")
    params = pack(
        kernel,
        bias,
        None,
        patch_size=patch_size,
        layout=layout,
        dtype=packing.patch_dtype,
        rounding=packing.rounding,
        image_mean=packing.image_mean,
        image_std=packing.image_std,
    )
    if dtype is None:
        floats = [
            x for x in (images, bias) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        dtype = jnp.result_type(kernel, *floats)
    out_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    grid = tuple(side // patch_size for side in images.shape[-3:-1])
    if positions is not None:
        positions = jnp.asarray(as_array(positions, "positions"))
        if positions.shape[:-1] == grid or all(axis == 1 for axis in positions.shape[:-2]):
            # All images share one table, which kernels keep instead of reading it for every image.
            positions = _reshaped(positions, math.prod(positions.shape[:-1]), leading=0)
    y = embed_images(images, params, position_embedding=positions, out_dtype=out_dtype)
    return _reshaped(y, *grid, leading=y.ndim - 2).astype(dtype)


def _reshaped(x: jax.Array, *axes: int, leading: int) -> jax.Array:
    """Reshapes x to its first `leading` axes, then `axes`, then its last axis.

    Reshaping an array with explicit sharding requires out_sharding.
    """
    sharding = jax.typeof(x).sharding
    out_sharding = None
    if AxisType.Explicit in sharding.mesh.axis_types:
        spec = (*sharding.spec[:leading], *[None] * len(axes), sharding.spec[-1])
        out_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return x.reshape(*x.shape[:leading], *axes, x.shape[-1], out_sharding=out_sharding)
