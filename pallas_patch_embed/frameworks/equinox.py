"""The operator as a drop-in for equinox convolutions, and its use in existing models."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pallas_patch_embed.base.array_arguments import as_array
from pallas_patch_embed.frameworks import convolution
from pallas_patch_embed.patch_embedding.params import PerChannel
from pallas_patch_embed.patch_embedding.weight_rounding import Rounding


class PatchEmbed(eqx.nn.Conv):
    """A drop-in for `eqx.nn.Conv2d` with stride = kernel_size, which has the same parameters.

    y[n, h, w] = sum_k patches[h, w, k] * weight[n, k] + bias[n] + positions[h, w, n]

    The weight is packed in every call; the parameters stay floating-point.
    """

    patch_dtype: str = eqx.field(static=True)
    rounding: Rounding = eqx.field(static=True)
    image_mean: PerChannel | None = eqx.field(static=True)
    image_std: PerChannel | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = None,
        *,
        patch_dtype: str = "int8",
        rounding: Rounding = "nearest",
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        key: Any,
        **keywords: Any,
    ) -> None:
        """Draws weight [N, 3, p, p] and bias [N, 1, 1] as `eqx.nn.Conv2d` does.

        Args:
          in_channels: number of input channels, which must be 3.
          out_channels: N, the width of the embedding.
          kernel_size: size of a patch in pixels, p or (p, p).
          stride: must equal kernel_size; None means kernel_size.
          patch_dtype: dtype of patches and weight: "int8", "float8_e4m3fn", "bfloat16" or
            "float32".
          rounding: how int8 and float8 weights are rounded, as in `pack`: "nearest", or "feedback",
            which is more exact but slower, because the weight is packed in every call.
          image_mean, image_std: normalisation of the model's images, three numbers each for red,
            green and blue, as in `pack`. None for 0.5 and 0.5, which give [-1, 1].
          key: key of `jax.random`.
          keywords: further arguments of `eqx.nn.Conv2d`.

        Raises:
          ValueError: the arguments are not those of a patch embedding.
        """
        stride = kernel_size if stride is None else stride
        super().__init__(2, in_channels, out_channels, kernel_size, stride, key=key, **keywords)
        packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
        self.patch_dtype, self.rounding, self.image_mean, self.image_std = packing
        _patch_size("PatchEmbed", self)

    def __call__(self, x: Any, positions: Any = None, *, key: Any = None) -> jax.Array:
        """Embeds an image. Use `jax.vmap` to embed a batch.

        Args:
          x: [3, H, W], uint8, or floating-point and normalised.
          positions: [S, N], [1, S, N] or [h, w, N]; None to add no positions. They are added before
            the result is rounded.
          key: not used.

        Returns:
          [N, h, w] with h = H // p and w = W // p, as from `eqx.nn.Conv2d`.

        Raises:
          TypeError, ValueError: as for `embed_images`. Differentiation raises TypeError.
        """
        del key
        x = jnp.asarray(as_array(x, "PatchEmbed: the image"))
        if x.ndim != 3 or x.shape[0] != 3:
            raise ValueError(
                f"PatchEmbed: the image has shape {list(x.shape)}, expected [3, H, W]. Map a batch "
                "with jax.vmap."
            )
        image, size = jnp.moveaxis(x, 0, -1), self.kernel_size[0]
        convolution.check_whole("PatchEmbed", self.padding, image, size)
        y = convolution.embed(
            image,
            self.weight,
            None if self.bias is None else jnp.squeeze(self.bias, (1, 2)),
            positions,
            patch_size=size,
            layout="OIHW",
            packing=convolution.Packing(
                self.patch_dtype, self.rounding, self.image_mean, self.image_std
            ),
            dtype=None,
        )
        return jnp.moveaxis(y, -1, 0)


def replace(
    model: Any,
    *,
    patch_dtype: str = "int8",
    rounding: Rounding = "nearest",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    path: str | None = None,
) -> Any:
    """Returns a copy of the model in which convolutions of RGB images are `PatchEmbed`.

    The copy shares all arrays with the model. Its leaves have the same order, so
    `eqx.tree_deserialise_leaves` loads the same files into both. The model still adds its positions
    itself.

    Args:
      model: a pytree of modules.
      patch_dtype, rounding, image_mean, image_std: as in `PatchEmbed`.
      path: path of the only convolution to replace, such as "patch_embed.proj"; None for all with
        three input channels.

    Raises:
      ValueError: there is no such convolution, one is not a patch embedding, or a mean or standard
        deviation is wrong.
    """
    packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)._asdict()
    found = {
        _name(place): (node, node.in_channels)
        for place, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_convolution)
        if _is_convolution(node)
    }
    chosen = convolution.selected(found, path)
    for name, node in chosen.items():
        _patch_size(name, node)

    def swap(place: Any, node: Any) -> Any:
        return _with_packing(node, packing) if _name(place) in chosen else node

    return jax.tree_util.tree_map_with_path(swap, model, is_leaf=_is_convolution)


def _is_convolution(node: Any) -> bool:
    return type(node) in (eqx.nn.Conv, eqx.nn.Conv2d)


def _name(place: Any) -> str:
    return jax.tree_util.keystr(place, simple=True, separator=".")


def _with_packing(node: Any, packing: dict[str, Any]) -> PatchEmbed:
    """Converts a convolution to a PatchEmbed with the same parameters."""
    new = object.__new__(PatchEmbed)
    fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    for name, value in (fields | packing).items():
        object.__setattr__(new, name, value)
    return new


def _patch_size(name: str, module: Any) -> int:
    return convolution.patch_size(
        name,
        kernel_size=module.kernel_size,
        strides=module.stride,
        padding=module.padding,
        dilations=module.dilation,
        groups=module.groups,
        channels=module.in_channels,
        others={},
    )
