"""Keras 3 on JAX: a convolution computed by the operator, and its swap inside of a model."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import keras

from pallas_patch_embed.frameworks import convolution
from pallas_patch_embed.params import check_normalisation

# patch_dtype, and what `check_normalisation` returns.
Packing = tuple[str, convolution.Normalisation]

# Layers of keras-hub that are a patch convolution plus positions, and nothing else.
WITH_POSITIONS = ("SigLIPVisionEmbedding", "Gemma3VisionEmbedding")


class PatchEmbed(keras.layers.Conv2D):
    """A drop-in for `keras.layers.Conv2D` with strides = kernel_size, and the same weights.

    y[b, h, w, n] = sum_k patches[b, h, w, k] * kernel[k, n] + bias[n] + positions[h, w, n]

    The kernel is packed inside of the call; the weights stay floating-point.

    Args:
      filters: N.
      kernel_size: p, or (p, p).
      strides: None for kernel_size.
      patch_dtype: dtype of patches and kernel: "int8", "float8_e4m3fn", "bfloat16" or "float32".
      image_mean, image_std: for red, green and blue, as in `pack`: how the model's images are
        normalised. None for 0.5 and 0.5, which give [-1, 1].
      keywords: those of `keras.layers.Conv2D`.

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
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **keywords: Any,
    ) -> None:
        _check_backend()
        strides = kernel_size if strides is None else strides
        super().__init__(filters, kernel_size, strides, **keywords)
        self.patch_dtype = patch_dtype
        self.image_mean, self.image_std = check_normalisation(image_mean, image_std)
        _patch_size(self, 3)

    def call(self, inputs: Any, positions: Any = None) -> jax.Array:
        """Embeds images.

        Args:
          inputs: images [B, H, W, 3], uint8, or floating-point and normalised.
          positions: [S, N], [1, S, N] or [h, w, N] for all images, [B, S, N] for each; None for
            none. They are added before the only rounding.

        Returns:
          [B, h, w, N] of the compute dtype, as `Conv2D`, with h = H // p and w = W // p.

        Raises:
          TypeError, ValueError: as `embed_images`. A gradient raises TypeError, too.
        """
        packing = self.patch_dtype, (self.image_mean, self.image_std)
        return _embed(self, packing, inputs, positions)

    def compute_output_shape(self, inputs_shape: Any, positions_shape: Any = None) -> Any:
        """[B, h, w, N]."""
        del positions_shape
        return super().compute_output_shape(inputs_shape)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        names = ("patch_dtype", "image_mean", "image_std")
        return super().get_config() | {name: getattr(self, name) for name in names}


# Not as a decorator: that hides the class where Keras is a stand-in, as for the site.
keras.saving.register_keras_serializable(package="pallas_patch_embed")(PatchEmbed)


def replace(
    model: Any,
    *,
    patch_dtype: str = "int8",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    path: str | None = None,
) -> list[str]:
    """Lets the operator compute the model's convolutions of RGB images, in place.

    The layers stay `Conv2D` with their weights, so files of weights load before and after, and a
    saved model loads without this package, unchanged. In keras-hub's SigLIP and Gemma 3 the
    positions become part of the operator; elsewhere the model adds them. What Keras compiled for
    the model is compiled again; a function of yours that jit has compiled is not.

    Args:
      model: a built `keras.Model` or layer.
      patch_dtype, image_mean, image_std: as in `PatchEmbed`.
      path: path of the only convolution to replace, its `layer.path`; None for all with three input
        channels.

    Returns:
      The paths of those that were replaced.

    Raises:
      ValueError: there is none, or one is not a patch embedding, or a mean or standard deviation
        is wrong; then nothing is changed.
      RuntimeError: Keras does not run on JAX.
    """
    _check_backend()
    packing = patch_dtype, check_normalisation(image_mean, image_std)
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


def _embed(layer: Any, packing: Packing, inputs: Any, positions: Any = None) -> jax.Array:
    patch_dtype, normalisation = packing
    size = layer.kernel_size[0]
    convolution.check_whole(layer.path, layer.padding, inputs, size)
    return convolution.embed(
        inputs,
        keras.ops.convert_to_tensor(layer.kernel),
        keras.ops.convert_to_tensor(layer.bias) if layer.use_bias else None,
        positions,
        patch_size=size,
        layout="HWIO",
        patch_dtype=patch_dtype,
        normalisation=normalisation,
        dtype=layer.compute_dtype,
    )


def _embed_with_positions(
    layer: Any, packing: Packing, inputs: Any, training: Any = None
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
