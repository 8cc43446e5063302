"""The operator as a drop-in for flax nnx convolutions, and its use in existing models."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from pallas_patch_embed.base.array_arguments import as_array
from pallas_patch_embed.frameworks import convolution
from pallas_patch_embed.patch_embedding.params import PerChannel
from pallas_patch_embed.patch_embedding.weight_rounding import Rounding


class PatchEmbed(nnx.Conv):
    """A drop-in for `nnx.Conv` with strides = kernel_size, which has the same parameters.

    y[..., h, w, n] = sum_k patches[..., h, w, k] * kernel[k, n] + bias[n] + positions[h, w, n]

    The kernel is packed in every call; the parameters stay floating-point.

    Args:
      in_features: number of input channels, which must be 3.
      out_features: N, the width of the embedding.
      kernel_size: size of a patch in pixels, (p, p).
      strides: must equal kernel_size; None means kernel_size.
      padding: "VALID" by default.
      patch_dtype: dtype of patches and kernel: "int8", "float8_e4m3fn", "bfloat16" or "float32".
      rounding: how int8 and float8 kernels are rounded, as in `pack`: "nearest", or "feedback",
        which is more exact but slower, because the kernel is packed in every call.
      image_mean, image_std: normalisation of the model's images, three numbers each for red, green
        and blue, as in `pack`. None for 0.5 and 0.5, which give [-1, 1].
      keywords: further arguments of `nnx.Conv`.

    Raises:
      ValueError: the arguments are not those of a patch embedding.
    """

    patch_dtype: str
    rounding: Rounding
    image_mean: PerChannel | None
    image_std: PerChannel | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Any,
        strides: Any = None,
        *,
        padding: Any = "VALID",
        patch_dtype: str = "int8",
        rounding: Rounding = "nearest",
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **keywords: Any,
    ) -> None:
        strides = kernel_size if strides is None else strides
        super().__init__(
            in_features, out_features, kernel_size, strides, padding=padding, **keywords
        )
        packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
        self.patch_dtype, self.rounding, self.image_mean, self.image_std = packing
        _patch_size("PatchEmbed", self)

    def __call__(self, images: Any, positions: Any = None) -> jax.Array:
        """Embeds images.

        Args:
          images: [..., H, W, 3], uint8, or floating-point and normalised.
          positions: [S, N], [1, S, N] or [h, w, N] for all images, or [..., S, N] for each image;
            None to add no positions. They are added before the result is rounded.

        Returns:
          [..., h, w, N] of `dtype` with h = H // p and w = W // p, as from `nnx.Conv`.

        Raises:
          TypeError, ValueError: as for `embed_images`. Differentiation raises TypeError.
        """
        images = as_array(images, "PatchEmbed: images")
        size = self.kernel_size[0]
        convolution.check_whole("PatchEmbed", self.padding, images, size)
        return convolution.embed(
            images,
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            positions,
            patch_size=size,
            layout="HWIO",
            packing=convolution.Packing(
                self.patch_dtype, self.rounding, self.image_mean, self.image_std
            ),
            dtype=self.dtype,
        )


def replace(
    model: Any,
    *,
    patch_dtype: str = "int8",
    rounding: Rounding = "nearest",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    path: str | None = None,
) -> list[str]:
    """Turns the model's convolutions of RGB images into `PatchEmbed`, in place.

    Parameters keep their names, values and sharding, so checkpoints load before and after the
    replacement. The model still adds its positions itself.

    Args:
      model: an `nnx.Module`.
      patch_dtype, rounding, image_mean, image_std: as in `PatchEmbed`.
      path: path of the only convolution to replace, such as "vision.patch_embeddings"; None for all
        with three input channels.

    Returns:
      The paths of the convolutions that were replaced.

    Raises:
      ValueError: there is no such convolution, one is not a patch embedding, or a mean or standard
        deviation is wrong. Then nothing is changed.
    """
    packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
    found = {
        ".".join(map(str, place)): (node, node.in_features)
        for place, node in nnx.iter_graph(model)
        if type(node) is nnx.Conv
    }
    chosen = convolution.selected(found, path)
    for name, node in chosen.items():
        _patch_size(name, node)
    for node in chosen.values():
        # The object itself is changed, because other parts of the model may refer to it.
        node.__class__ = PatchEmbed
        node.patch_dtype, node.rounding, node.image_mean, node.image_std = packing
    return list(chosen)


def _patch_size(name: str, module: Any) -> int:
    axes = len(module.kernel_size)
    custom = module.conv_general_dilated is not lax.conv_general_dilated
    return convolution.patch_size(
        name,
        kernel_size=module.kernel_size,
        strides=_per_axis(module.strides, axes),
        padding=module.padding,
        dilations=[
            *_per_axis(module.input_dilation, axes),
            *_per_axis(module.kernel_dilation, axes),
        ],
        groups=module.feature_group_count,
        channels=module.in_features,
        others={"mask": module.mask is not None, "conv_general_dilated": custom},
    )


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value or 1,) * axes if value is None or isinstance(value, int) else tuple(value)
