"""The operator as a drop-in for convolutions of Keras 3 on JAX, and its use in existing models."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import keras

from pallas_patch_embed.frameworks import convolution
from pallas_patch_embed.patch_embedding.weight_rounding import Rounding

# Layers of keras-hub that consist only of a patch convolution and the addition of positions.
WITH_POSITIONS = ("SigLIPVisionEmbedding", "Gemma3VisionEmbedding")


class PatchEmbed(keras.layers.Conv2D):
    """A drop-in for `keras.layers.Conv2D` with strides = kernel_size, which has the same weights.

    y[b, h, w, n] = sum_k patches[b, h, w, k] * kernel[k, n] + bias[n] + positions[h, w, n]

    The kernel is packed in every call; the weights stay floating-point.

    Args:
      filters: N, the width of the embedding.
      kernel_size: size of a patch in pixels, p or (p, p).
      strides: must equal kernel_size; None means kernel_size.
      patch_dtype: dtype of patches and kernel: "int8", "float8_e4m3fn", "bfloat16" or "float32".
      rounding: how int8 and float8 kernels are rounded, as in `pack`: "nearest", or "feedback",
        which is more exact but slower, because the kernel is packed in every call.
      image_mean, image_std: normalisation of the model's images, three numbers each for red, green
        and blue, as in `pack`. None for 0.5 and 0.5, which give [-1, 1].
      keywords: further arguments of `keras.layers.Conv2D`.

    Raises:
      ValueError: the arguments are not those of a patch embedding.
      RuntimeError: Keras does not run on JAX.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = None,
        patch_dtype: str = "int8",
        rounding: Rounding = "nearest",
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **keywords: Any,
    ) -> None:
        _check_backend()
        strides = kernel_size if strides is None else strides
        super().__init__(filters, kernel_size, strides, **keywords)
        packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
        self.patch_dtype, self.rounding, self.image_mean, self.image_std = packing
        _patch_size(self, 3)

    def call(self, inputs: Any, positions: Any = None) -> jax.Array:
        """Embeds images.

        Args:
          inputs: images [B, H, W, 3], uint8, or floating-point and normalised.
          positions: [S, N], [1, S, N] or [h, w, N] for all images, or [B, S, N] for each image;
            None to add no positions. They are added before the result is rounded.

        Returns:
          [B, h, w, N] of the compute dtype with h = H // p and w = W // p, as from `Conv2D`.

        Raises:
          TypeError, ValueError: as for `embed_images`. Differentiation raises TypeError.
        """
        packing = convolution.Packing(
            self.patch_dtype, self.rounding, self.image_mean, self.image_std
        )
        return _embed(self, packing, inputs, positions)

    def compute_output_shape(self, inputs_shape: Any, positions_shape: Any = None) -> Any:
        """Returns the shape (B, h, w, N) of the result."""
        del positions_shape
        return super().compute_output_shape(inputs_shape)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        names = convolution.Packing._fields
        return super().get_config() | {name: getattr(self, name) for name in names}


# This is not a decorator, because a decorator would hide the class from the documentation's site,
# which is built with a stand-in for Keras.
keras.saving.register_keras_serializable(package="pallas_patch_embed")(PatchEmbed)


def replace(
    model: Any,
    *,
    patch_dtype: str = "int8",
    rounding: Rounding = "nearest",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    path: str | None = None,
) -> list[str]:
    """Replaces the computation of the model's convolutions of RGB images, in place.

    The layers remain `Conv2D` and keep their weights. So files of weights load before and after the
    replacement, and a saved model loads without this package, as the original model. In keras-hub's
    SigLIP and Gemma 3 the operator also adds the positions; other models still add them themselves.
    Functions that Keras has compiled for the model are compiled again, but not functions that you
    have compiled with jax.jit.

    Args:
      model: a built `keras.Model` or layer.
      patch_dtype, rounding, image_mean, image_std: as in `PatchEmbed`.
      path: `layer.path` of the only convolution to replace; None for all with three input channels.

    Returns:
      The paths of the convolutions that were replaced.

    Raises:
      ValueError: there is no such convolution, one is not a patch embedding, or a mean or standard
        deviation is wrong. Then nothing is changed.
      RuntimeError: Keras does not run on JAX.
    """
    _check_backend()
    packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
    layers = list(model._flatten_layers())
    found = {
        layer.path: (layer, layer.kernel.shape[-2] * layer.groups)
        for layer in layers
        if type(layer) is keras.layers.Conv2D and layer.built
    }
    chosen = convolution.selected(found, path)
    for layer in chosen.values():
        _patch_size(layer, layer.kernel.shape[-2] * layer.groups)
    for layer in chosen.values():
        layer.call = functools.partial(_embed, layer, packing)
    for layer in layers:
        if isinstance(layer, keras.Model):
            layer.predict_function = layer.test_function = layer.train_function = None
        if type(layer).__name__ in WITH_POSITIONS and layer.patch_embedding.path in chosen:
            layer.call = functools.partial(_embed_with_positions, layer, packing)
    return list(chosen)


def _check_backend() -> None:
    if (backend := keras.backend.backend()) != "jax":
        raise RuntimeError(
            f"pallas_patch_embed.frameworks.keras: Keras runs on {backend}, expected jax. Set the "
            "environment variable KERAS_BACKEND=jax before Keras is imported."
        )


def _embed(
    layer: Any, packing: convolution.Packing, inputs: Any, positions: Any = None
) -> jax.Array:
    size = layer.kernel_size[0]
    convolution.check_whole(layer.path, layer.padding, inputs, size)
    return convolution.embed(
        inputs,
        keras.ops.convert_to_tensor(layer.kernel),
        keras.ops.convert_to_tensor(layer.bias) if layer.use_bias else None,
        positions,
        patch_size=size,
        layout="HWIO",
        packing=packing,
        dtype=layer.compute_dtype,
    )


def _embed_with_positions(
    layer: Any, packing: convolution.Packing, inputs: Any, training: Any = None
) -> jax.Array:
    positions = layer.position_embedding(layer.position_ids)
    y = _embed(layer.patch_embedding, packing, inputs, positions)
    return keras.ops.reshape(y, (y.shape[0], -1, y.shape[-1]))


def _patch_size(layer: Any, channels: int) -> int:
    return convolution.patch_size(
        layer.path or layer.name,
        kernel_size=layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        dilations=layer.dilation_rate,
        groups=layer.groups,
        channels=channels,
        others={
            "activation": layer.activation is not keras.activations.linear and layer.activation,
            "data_format": layer.data_format != "channels_last" and layer.data_format,
            "lora_enabled": layer.lora_enabled,
        },
    )
