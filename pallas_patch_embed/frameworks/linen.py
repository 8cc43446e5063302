"""The operator as a drop-in for flax linen convolutions, and its use in existing models."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from pallas_patch_embed.base.array_arguments import as_array
from pallas_patch_embed.frameworks import convolution
from pallas_patch_embed.patch_embedding.weight_rounding import Rounding

# A part of the key of jit's caches, so that programs traced outside of `intercept` are not used
# inside.
_intercepted = jax.make_user_context(default_value=None)


class PatchEmbed(nn.Conv):
    """A drop-in for `nn.Conv` with strides = kernel_size, which has the same parameters.

    y[..., h, w, n] = sum_k patches[..., h, w, k] * kernel[k, n] + bias[n] + positions[h, w, n]

    The kernel is packed in every call; the parameters stay floating-point. The attributes are those
    of `nn.Conv`, with the following differences:

    Attributes:
      strides: must equal kernel_size; None, the default, means kernel_size.
      padding: "VALID" by default.
      patch_dtype: dtype of patches and kernel: "int8", "float8_e4m3fn", "bfloat16" or "float32".
      rounding: how int8 and float8 kernels are rounded, as in `pack`: "nearest", or "feedback",
        which is more exact but slower, because the kernel is packed in every call.
      image_mean, image_std: normalisation of the model's images, three numbers each for red, green
        and blue, as in `pack`. None for 0.5 and 0.5, which give [-1, 1].
    """

    strides: Any = None
    padding: Any = "VALID"
    patch_dtype: str = "int8"
    rounding: Rounding = "nearest"
    image_mean: Sequence[float] | None = None
    image_std: Sequence[float] | None = None

    @nn.compact
    def __call__(self, images: Any, positions: Any = None) -> jax.Array:
        """Embeds images.

        Args:
          images: [..., H, W, 3], uint8, or floating-point and normalised.
          positions: [S, N], [1, S, N] or [h, w, N] for all images, or [..., S, N] for each image;
            None to add no positions. They are added before the result is rounded.

        Returns:
          [..., h, w, N] of `dtype` with h = H // p and w = W // p, as from `nn.Conv`.

        Raises:
          ValueError: the attributes are not those of a patch embedding, or as for `embed_images`.
          TypeError: as for `embed_images`. Differentiation with respect to an argument or a
            parameter also raises it.
        """
        images = as_array(images, "PatchEmbed: images")
        size = _patch_size(self, images)
        shape = (size, size, 3, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        packing = convolution.Packing.checked(
            self.patch_dtype, self.rounding, self.image_mean, self.image_std
        )
        return _embed(self, images, kernel, bias, positions, size, packing)


@contextlib.contextmanager
def intercept(
    *,
    patch_dtype: str = "int8",
    rounding: Rounding = "nearest",
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    path: str | None = None,
) -> Iterator[None]:
    """Replaces convolutions of RGB images in models that are called inside of this context.

    It is for models that cannot be edited. The operator replaces every call of an `nn.Conv` on
    images with three channels. The model keeps its parameters and its `init`, and still adds its
    positions itself. A function that jit compiled outside of the context is compiled again inside,
    and vice versa.

    Args:
      patch_dtype, rounding, image_mean, image_std: as in `PatchEmbed`.
      path: path of the only convolution to replace, such as "embedding" or "img/embedding"; None
        for all.

    Raises:
      ValueError: a mean or standard deviation is wrong; or, when the model is called, a convolution
        is not a patch embedding.

    Warns:
      UserWarning: convolutions were called, but none of them was to be replaced.
    """
    packing = convolution.Packing.checked(patch_dtype, rounding, image_mean, image_std)
    passed: list[str] = []
    replaced: list[str] = []

    def interceptor(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        module = context.module
        images = arguments[0] if arguments else keywords.get("inputs")
        if type(module) is not nn.Conv or context.method_name != "__call__":
            return call(*arguments, **keywords)
        wanted = images.shape[-1] == 3 if path is None else "/".join(module.path) == path
        if module.is_initializing():
            return call(*arguments, **keywords)
        (replaced if wanted else passed).append(_name(module))
        if not wanted:
            return call(*arguments, **keywords)
        size = _patch_size(module, images)
        kernel, bias = (
            meta.unbox(module.get_variable("params", name)) for name in ("kernel", "bias")
        )
        return _embed(module, images, kernel, bias, None, size, packing)

    with _intercepted((packing, path)), nn.intercept_methods(interceptor):
        yield
    # A function that jit has already compiled calls no module, so there is no warning for it.
    if passed and not replaced:
        wanted = "on images with three channels" if path is None else f"at {path!r}"
        warnings.warn(
            f"intercept: nothing was replaced. The model called no nn.Conv {wanted}, only "
            f"{', '.join(passed)}.",
            stacklevel=3,
        )


def _embed(
    module: Any,
    images: Any,
    kernel: Any,
    bias: Any,
    positions: Any,
    size: int,
    packing: convolution.Packing,
) -> jax.Array:
    convolution.check_whole(_name(module), module.padding, images, size)
    return convolution.embed(
        images,
        kernel,
        bias,
        positions,
        patch_size=size,
        layout="HWIO",
        packing=packing,
        dtype=module.dtype,
    )


def _name(module: Any) -> str:
    return f"{type(module).__name__} {'/'.join(module.path) or module.name!r}"


def _patch_size(module: Any, images: Any) -> int:
    kernel_size = _per_axis(module.kernel_size, 1)
    axes = len(kernel_size)
    own_strides = kernel_size if isinstance(module, PatchEmbed) else 1
    return convolution.patch_size(
        _name(module),
        kernel_size=kernel_size,
        strides=_per_axis(own_strides if module.strides is None else module.strides, axes),
        padding=module.padding,
        dilations=[
            *_per_axis(module.input_dilation or 1, axes),
            *_per_axis(module.kernel_dilation or 1, axes),
        ],
        groups=module.feature_group_count,
        channels=images.shape[-1] if images.ndim > 2 else 0,
        others={
            "mask": module.mask is not None,
            "conv_general_dilated": module.conv_general_dilated,
            "conv_general_dilated_cls": module.conv_general_dilated_cls,
        },
    )


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
