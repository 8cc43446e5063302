"""The public functions: they take arguments as they come, and make a `Request` of them."""

import dataclasses
import math
import operator
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_patch_embed.backends import Explanation
from pallas_patch_embed.backends import explain as explain_problem
from pallas_patch_embed.base.array_arguments import AnyArray, as_array, dtype_name, has_values
from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.gradients import not_differentiated
from pallas_patch_embed.base.problem import K_MULTIPLE, Shaped
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams, check_params
from pallas_patch_embed.patch_embedding.patches import check_range, cut_into_rows, encode_rows
from pallas_patch_embed.patch_embedding.request import (
    IMAGE_DTYPES,
    Request,
    check_images,
    path_of,
)


class Model(Protocol):
    """A model whose patch embedding is this operator, such as an `Encoder`.

    `explain` also reports the result of its method `layer_programs(B, S, target)`, if it has one: a
    tuple of `LayerProgram` for B images of S tokens on a `Target`.

    Attributes:
      patch_embed: the params of its call of the operator.
      dtype: the dtype of that call's result.
      positions: positions that the model resizes for each image and adds in that call; None if the
        params contain the positions.
    """

    @property
    def patch_embed(self) -> PatchEmbedParams: ...

    @property
    def dtype(self) -> str: ...

    @property
    def positions(self) -> jax.Array | None: ...


def patchify(images: AnyArray, params: PatchEmbedParams, *, clip: bool = False) -> jax.Array:
    """Cuts images into rows of patches and encodes the pixels in `params.dtype`.

    A uint8 image and the equal float image (u / 255 * 2 - 1 in float32, with any rounding) give
    identical patches in every dtype, because a float within 2^-21 of the value of a uint8 level is
    encoded as that level.

    Args:
      images: [..., H, W, C], uint8 or floating-point, where C is `params.channels`: 3 for RGB.
        Floating-point pixels are normalised with `params.image_mean` and `params.image_std`, by
        default to [-1, 1]. Pixels beyond the last whole patch of H or W are dropped, as in SigLIP.
        If `params.frames` is set, videos [..., F, H, W, C], where F is a multiple of
        `params.frames`.
      params: PatchEmbedParams; decides patch size, encoding and padding.
      clip: clips floating-point pixels to [-1, 1] instead of checking that they are in that range.
        NaN stays NaN, except in int8, where it becomes an unspecified level.

    Returns:
      [..., R + S, K_padded] of `params.dtype`: R rows of zeros if the params have a prefix of R
      rows, then S = (H // p) * (W // p) patches in row-major order. A video has S patches for each
      group of `params.frames` frames, in order of time. K is in the order height, width, channel
      (for videos channel, frame, height, width) and is padded with zeros. int8 holds pixel - 128,
      the other dtypes hold pixels in [-1, 1].

    Raises:
      TypeError: images or params have another type.
      ValueError: images have another shape or are smaller than a patch, or floating-point pixels
        are NaN or outside of [-1, 1] by more than rounding. The values of numpy arrays are always
        checked. Those of JAX arrays are checked outside of jit, by a reduction on the device for
        which the call waits, and under jit if the program is checkified.
    """
    check_params(params)
    images = as_array(images, "patchify: images")
    check_images(images, params)
    if not clip:
        images = check_range("images", images, params.encoding)
    return _encoded(cut_into_rows, jnp.asarray(images), params)


def encode_patches(patches: AnyArray, params: PatchEmbedParams, *, clip: bool = False) -> jax.Array:
    """Encodes patches that are already cut, such as those of NaFlex models, for `patch_embed`.

    Args:
      patches: [..., S, K] of pixels, uint8 or floating-point. Floating-point pixels are normalised
        with `params.image_mean` and `params.image_std`, by default to [-1, 1]. K = C * p * p in the
        order height, width, channel; with T frames K = C * T * p * p in the order channel, frame,
        height, width. Rows of padding may have any values in the same range, such as zeros.
      params: PatchEmbedParams; decides encoding and padding.
      clip: as for `patchify`.

    Returns:
      [..., R + S, K_padded] of `params.dtype`, with R rows of zeros in front, as from `patchify`.

    Raises:
      TypeError, ValueError: as for `patchify`.
    """
    check_params(params)
    patches = as_array(patches, "encode_patches: patches")
    dtype = dtype_name(patches)
    if dtype not in IMAGE_DTYPES:
        raise TypeError(
            f"encode_patches: patches have dtype {dtype}, expected pixels: uint8, or "
            "floating-point in [-1, 1]."
        )
    if patches.ndim < 2 or patches.shape[-1] != params.K:
        raise ValueError(
            f"encode_patches: patches have shape {list(patches.shape)}, expected [..., S, "
            f"{params.K}]: the pixels of a patch of {params.patch_size} x {params.patch_size}"
            f"{'' if params.frames is None else f' and {params.frames} frames'}, "
            f"{params.channels} channels each."
        )
    if not clip:
        patches = check_range("patches", patches, params.encoding)
    return _encoded(encode_rows, jnp.asarray(patches), params)


def _encoded(
    encoder: Callable[..., jax.Array], pixels: jax.Array, params: PatchEmbedParams
) -> jax.Array:
    """Returns the rows that `encoder` makes from pixels; differentiating them raises an error."""
    floating = jnp.issubdtype(pixels.dtype, jnp.floating)
    if floating and TABLE[params.dtype].holds_levels:
        pixels = not_differentiated(pixels, primitive.refuse_gradient)
    encoded = encoder(pixels, params.geometry, params.encoding)
    if floating and not TABLE[params.dtype].holds_levels:
        # The derivative would be zero for each pixel that is encoded as a uint8 level.
        encoded = primitive.without_gradient(pixels, lax.stop_gradient(encoded))
    return encoded


def patch_embed(
    patches: AnyArray,
    params: PatchEmbedParams,
    *,
    position_embedding: AnyArray | None = None,
    backend: str | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    tuned: str | os.PathLike[str] | None = None,
) -> jax.Array:
    """Embeds patches: multiplies by the weight, scales, and adds bias and positions.

    y[..., s, n] = out_dtype((sum_k patches[..., s, k] * weight[n, k]) * scale[n] + table[s, n])

    The operator is for inference and has no derivative. It works under jit, vmap, scan, shard_map
    and jax.export, and with NamedSharding and explicit meshes. Patches sharded along the batch or S
    and params sharded along N need no communication; patches or weights sharded along K are
    gathered first.

    Args:
      patches: [..., S, K_padded] of `params.dtype`, from `patchify` or `encode_patches`. There may
        be any number of leading axes, and a batch may be empty.
      params: PatchEmbedParams.
      position_embedding: [..., S, N] floating-point, replaces the stored positions. Its leading
        axes broadcast against those of patches; positions per image have all leading axes of
        patches. As at packing, the table is offset + positions, added in float32 and rounded to
        bfloat16 (not rounded if `params.dtype` is float32).
      backend: a name from `backend_names()`; by default the backend that `explain` reports.
      out_dtype: dtype of the result, bfloat16 or float32. The result is rounded once.
      tuned: path of a file that `pallas-patch-embed tune` wrote; by default the path in the
        environment variable PATCH_EMBED_TUNED. The configs in the file are used for the problems
        that it lists. It is read when a program is lowered. The path is static, like `backend`.

    Returns:
      [..., S, N] of out_dtype.

    Raises:
      TypeError: an argument has another type or dtype.
      ValueError: an argument has another shape, the backend or the output dtype is unknown, or the
        file of configs is damaged.
      NotImplementedError: `backend` names a backend that cannot serve the call; the message says
        why.
    """
    check_params(params)
    request = Request(
        as_array(patches, "patch_embed: patches"),
        params,
        positions=_as_positions(position_embedding),
        out_dtype=out_dtype,
        backend=backend,
        tuned=path_of(tuned),
    )
    return request.checked().run()


def embed_images(
    images: AnyArray,
    params: PatchEmbedParams,
    *,
    position_embedding: AnyArray | None = None,
    backend: str | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    clip: bool = False,
    cut: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
) -> jax.Array:
    """Embeds images: `patchify`, then `patch_embed`. A backend may cut uint8 images in its kernel.

    Args:
      images: as for `patchify`. Their grid of patches must be `params.grid`, unless
        position_embedding is given or the params have no positions.
      params: PatchEmbedParams.
      position_embedding: [..., S, N] floating-point, replaces the stored positions.
      backend: a name from `backend_names()`; by default the backend that `explain` reports.
      out_dtype: dtype of the result, bfloat16 or float32.
      clip: as for `patchify`.
      cut: None, or "kernel" to require a kernel that cuts uint8 images itself; the call is refused
        if there is none. It is static, like `backend`.
      tuned: as for `patch_embed`.

    Returns:
      [..., S, N] of out_dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `patchify` and `patch_embed`; also
        ValueError if the images have another grid or `cut` is unknown.
    """
    check_params(params)
    request = Request(
        as_array(images, "embed_images: images"),
        params,
        from_images=True,
        positions=_as_positions(position_embedding),
        out_dtype=out_dtype,
        backend=backend,
        cut=cut,
        tuned=path_of(tuned),
    ).checked()
    if not clip:
        source = check_range("images", request.source, params.encoding)
        request = dataclasses.replace(request, source=source)
    return request.run()


def explain(
    patches_or_shape: Shaped | Sequence[int],
    params: PatchEmbedParams | Model,
    *,
    position_embedding: Shaped | None = None,
    out_dtype: DTypeLike | None = None,
    device: Any = None,
    cut: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Says which backends serve these patches or images, and why the others do not.

    Nothing is computed.

    Args:
      patches_or_shape: the patches of a call of `patch_embed`, the images of a call of
        `embed_images`, or a shape: [..., S, K_padded] of patches or [..., H, W, C] of uint8 images.
        For an encoder its images, or a NaFlex encoder's patches [B, L, K], or their shape.
      params: PatchEmbedParams; or an encoder, whose call of the operator is explained.
      position_embedding, out_dtype: as in that call; an encoder decides them itself. out_dtype is
        bfloat16 by default.
      device: the device that would run the call, one of jax.devices() (jaxlib exports no type for
        it); by default the device that JAX would use.
      cut: as in a call of `embed_images`.
      tuned: as in that call.

    Returns:
      Explanation: rows (backend, serves, reason) the fastest backend first. Printing it gives a
      table. For an encoder it also says how its attention is computed, and why.

    Raises:
      TypeError, ValueError: as for `patch_embed` and `embed_images`.
    """
    given: Any = patches_or_shape
    packed: Any = params
    if hasattr(packed, "patch_embed"):
        if position_embedding is not None or out_dtype is not None:
            raise TypeError(
                "explain: position_embedding and out_dtype are given, but an encoder decides them. "
                "Leave them out, or pass encoder.patch_embed."
            )
        given, packed, position_embedding, out_dtype = _call_of(packed, given)
    check_params(packed)
    if has_values(given):
        given = as_array(given, "explain: patches or images")
    elif not hasattr(given, "shape") or not hasattr(given, "dtype"):
        given = _abstract_operand(given, packed)
    if has_values(position_embedding):
        position_embedding = _as_positions(position_embedding)
    dtype, channels = dtype_name(given), (packed.channels,)
    encoded = dtype == packed.dtype and given.shape[-1:] == (packed.K_padded,)
    channels_first = dtype == "uint8" and given.shape[-3:-2] == channels
    from_images = not encoded and (given.shape[-1:] == channels or channels_first)
    request = Request(
        given,
        packed,
        from_images=from_images,
        positions=position_embedding,
        out_dtype=jnp.bfloat16 if out_dtype is None else out_dtype,
        cut=cut,
        tuned=path_of(tuned),
    ).checked()
    device = default_device() if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(f"explain: device is {device!r}, expected one of jax.devices().")
    target = Target.of(device)
    explanation = explain_problem(request.problem, target, request.tuned, cut)
    layer_programs = getattr(params, "layer_programs", None)
    if layer_programs is None:
        return explanation
    *images, tokens, _ = request.problem.patches
    layers = layer_programs(math.prod(images), tokens, target)
    return dataclasses.replace(explanation, layers=layers)


def _call_of(model: Model, given: Any) -> tuple[Any, PatchEmbedParams, Shaped | None, str]:
    """Returns patches or images, params, positions and out_dtype of the model's call."""
    params = model.patch_embed
    check_params(params)
    shape = getattr(given, "shape", given)
    is_shape = isinstance(shape, Sequence)
    if model.positions is None or not is_shape or tuple(shape[-1:]) != (params.K,):
        return given, params, None, model.dtype
    # Positions that are resized for each image belong to patches, which the model encodes and pads.
    patches, positions = (*shape[:-1], params.K_padded), (*shape[:-1], params.N)
    return (
        jax.ShapeDtypeStruct(patches, jnp.dtype(params.dtype)),
        params,
        jax.ShapeDtypeStruct(positions, model.positions.dtype),
        model.dtype,
    )


def _as_positions(positions: Any) -> Any:
    return None if positions is None else as_array(positions, "position_embedding")


def _abstract_operand(shape: Any, params: PatchEmbedParams) -> Any:
    """Returns abstract uint8 images if the last axis is of channels, else abstract patches."""
    try:
        shape = tuple(map(operator.index, shape))
    except TypeError:
        given = reprlib.Repr(maxlevel=1).repr(shape)
        raise TypeError(
            f"explain: {given} is neither patches nor images, expected a JAX or numpy array, or a "
            f"shape, [..., S, K_padded] or [..., H, W, {params.channels}]."
        ) from None
    if min(shape, default=-1) < 0:
        raise ValueError(
            f"explain: the shape is {list(shape)}, expected [..., S, K_padded] of patches or "
            f"[..., H, W, {params.channels}] of images, without negative numbers."
        )
    if shape[-1:] != (params.channels,) and min(shape[-1:], default=0) < K_MULTIPLE:
        raise ValueError(
            f"explain: the shape is {list(shape)}, expected [..., S, {params.K_padded}] of patches "
            f"or [..., H, W, {params.channels}] of images."
        )
    dtype = "uint8" if shape[-1] == params.channels else params.dtype
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
