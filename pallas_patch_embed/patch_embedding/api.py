"""The public functions, which check their arguments and call the primitive."""

import operator
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_patch_embed.backends import Explanation, check_name, choose
from pallas_patch_embed.backends import explain as explain_problem
from pallas_patch_embed.base.array_arguments import AnyArray, as_array, dtype_name, has_values
from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.dtypes import OUT_DTYPES, TABLE
from pallas_patch_embed.base.problem import K_MULTIPLE, PatchLayout, Problem, Shaped
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.packing import prepend_prefix
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams, check_params
from pallas_patch_embed.patch_embedding.patches import check_range, encoded_rows, rows

CUTS = (None, "kernel")
IMAGE_DTYPES = ("uint8", "float16", "bfloat16", "float32", "float64")


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
    _check_images(images, params)
    if not clip:
        images = check_range("images", images, params.encoding)
    return _encoded(rows, jnp.asarray(images), params)


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
    return _encoded(encoded_rows, jnp.asarray(patches), params)


def _encoded(
    encoder: Callable[..., jax.Array], pixels: jax.Array, params: PatchEmbedParams
) -> jax.Array:
    """Returns the rows that `encoder` makes from pixels; differentiating them raises an error."""
    floating = jnp.issubdtype(pixels.dtype, jnp.floating)
    if floating and TABLE[params.dtype].holds_levels:
        pixels = primitive.not_differentiated(pixels)
    encoded = encoder(pixels, params.layout, params.encoding)
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
    patches = as_array(patches, "patch_embed: patches")
    position_embedding = _as_positions(position_embedding)
    out_dtype = _check_call(patches, params, position_embedding, backend, out_dtype)
    operands = (jnp.asarray(patches), params, position_embedding)
    return _bind(*operands, backend, out_dtype, _path(tuned))


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
    images = as_array(images, "embed_images: images")
    position_embedding = _as_positions(position_embedding)
    patches = _abstract_patches(images, params, position_embedding)
    _check_cut(cut, images, params)
    source = None if cut is None else images
    out_dtype = _check_call(patches, params, position_embedding, backend, out_dtype, images=source)
    if not clip:
        images = check_range("images", images, params.encoding)
    images = jnp.asarray(images)
    if images.dtype == jnp.uint8:
        # The backend's kernel cuts the images, or XLA cuts them for the backend.
        arguments = (images, params, position_embedding, backend, out_dtype, _path(tuned))
        return _bind(*arguments, layout=params.layout, cut=cut)
    patches = rows(images, params.layout, params.encoding)
    y = _bind(patches, params, position_embedding, backend, out_dtype, _path(tuned))
    if TABLE[params.dtype].holds_levels:
        # Because of the rounding to integers the derivative would be zero, without an error.
        y = primitive.without_gradient(images, y)
    return y


def explain(
    patches_or_shape: Shaped | Sequence[int],
    params: PatchEmbedParams,
    *,
    position_embedding: Shaped | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    device: Any = None,
    cut: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Says which backends serve these patches or images, and why the others do not.

    Nothing is computed.

    Args:
      patches_or_shape: the patches of a call of `patch_embed`, the images of a call of
        `embed_images`, or a shape: [..., S, K_padded] of patches or [..., H, W, C] of uint8 images.
      params: PatchEmbedParams.
      position_embedding, out_dtype: as in that call.
      device: the device that would run the call, one of jax.devices() (jaxlib exports no type for
        it); by default the device that JAX would use.
      cut: as in a call of `embed_images`.
      tuned: as in that call.

    Returns:
      Explanation: rows (backend, serves, reason) in the order in which backends are tried. Printing
      it gives a table.

    Raises:
      TypeError, ValueError: as for `patch_embed` and `embed_images`.
    """
    check_params(params)
    given: Any = patches_or_shape
    layout = None
    if has_values(given):
        given = as_array(given, "explain: patches or images")
    elif not hasattr(given, "shape") or not hasattr(given, "dtype"):
        given = _abstract_operand(given, params)
    if has_values(position_embedding):
        position_embedding = _as_positions(position_embedding)
    dtype, patches = dtype_name(given), given
    channels = (params.channels,)
    encoded = dtype == params.dtype and given.shape[-1:] == (params.K_padded,)
    channels_first = dtype == "uint8" and given.shape[-3:-2] == channels
    if not encoded and (given.shape[-1:] == channels or channels_first):
        patches = _abstract_patches(given, params, position_embedding)
        layout = params.layout if dtype == "uint8" else None
    _check_patches(patches, params)
    _check_cut(cut, given, params)
    table = _abstract_table(patches, params, position_embedding)
    out_dtype = _check_out_dtype(out_dtype)
    device = default_device() if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(f"explain: device is {device!r}, expected one of jax.devices().")
    source = patches if layout is None else given
    operands = (source, params.weight, params.scale, table)
    problem = Problem.of(*operands, out_dtype=out_dtype, layout=layout, cut=cut)
    return explain_problem(problem, Target.of(device), _path(tuned))


def _as_positions(positions: Any) -> Any:
    return None if positions is None else as_array(positions, "position_embedding")


def _path(tuned: Any) -> str | None:
    """Returns the absolute path of a file of configs, because the working directory may change."""
    if tuned is None:
        return None
    try:
        return os.path.abspath(os.fspath(tuned))
    except TypeError:
        raise TypeError(
            f"patch_embed: tuned is {tuned!r}, expected the path of a file that "
            "`pallas-patch-embed tune` wrote, or None."
        ) from None


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


def _abstract_patches(images: Any, params: PatchEmbedParams, positions: Any) -> Any:
    """Checks the images; returns the shape and dtype of their patches."""
    _check_images(images, params)
    shape = tuple(images.shape)
    grid = params.layout.grid(shape)
    if positions is None and params.has_positions and grid != params.grid:
        given, stored = (" x ".join(map(str, sides)) for sides in (grid, params.grid or ()))
        raise ValueError(
            f"embed_images: {' x '.join(map(str, shape[-params.layout.image_ndim : -1]))} pixels "
            f"are a {given} grid of patches of {params.patch_size} pixels, but the params have "
            f"positions for a {stored} grid. Resize the images, or pass the position_embedding of "
            "their grid."
        )
    return jax.ShapeDtypeStruct(params.layout.rows_shape(shape), jnp.dtype(params.dtype))


def _check_images(images: Any, params: PatchEmbedParams) -> None:
    dtype = dtype_name(images)
    if dtype not in IMAGE_DTYPES:
        raise TypeError(
            f"images have dtype {dtype}, expected uint8, or floating-point in [-1, 1]. Convert "
            "pixels of 0 to 255 with images.astype(numpy.uint8)."
        )
    shape, channels = tuple(images.shape), params.channels
    if len(shape) < 3 or shape[-1] != channels:
        colours = " with the colours red, green and blue as the last axis" if channels == 3 else ""
        advice = (
            "Convert the images to RGB." if channels == 3 else "Pass images of that many channels."
        )
        if channels == 1 and len(shape) >= 2:
            advice = "Add the axis with images[..., None]."
        elif len(shape) >= 3 and shape[-3] == channels:
            advice = "Move the channels last with numpy.moveaxis(images, -3, -1)."
        raise ValueError(
            f"images have shape {list(shape)}, expected [..., H, W, {channels}]{colours}. {advice}"
        )
    if params.frames is not None and (len(shape) < 4 or shape[-4] % params.frames):
        raise ValueError(
            f"images have shape {list(shape)}, but the params are for videos [..., F, H, W, "
            f"{channels}] where F is a multiple of {params.frames} frames. Repeat the last frame "
            f"of a video, or repeat an image {params.frames} times."
        )
    if min(shape[-3:-1]) < params.patch_size:
        raise ValueError(
            f"images of {shape[-3]} x {shape[-2]} pixels are smaller than a patch of "
            f"{params.patch_size} x {params.patch_size}. Resize them."
        )


def _check_patches(patches: Any, params: PatchEmbedParams) -> None:
    dtype = dtype_name(patches)
    if dtype != params.dtype:
        packing = f", or pack the params with dtype={dtype!r}" if dtype in TABLE else ""
        raise TypeError(
            f"patch_embed: patches have dtype {dtype}, but the params are packed for "
            f"{params.dtype}. Make patches with patchify(images, params), which encodes pixels"
            f"{packing}."
        )
    shape = tuple(patches.shape)
    if len(shape) < 2:
        raise ValueError(
            f"patch_embed: patches have shape {list(shape)}, expected [..., S, {params.K_padded}]: "
            "at least the axes S (positions) and K. Add the missing axis."
        )
    if shape[-1] != params.K_padded:
        raise ValueError(
            f"patch_embed: patches have K = {shape[-1]} but the packed weight has K = "
            f"{params.K_padded}.\nPack images with `patchify(images, params)`, which pads K for "
            f"you, or pad the last axis of {params.K} with zeros to {params.K_padded}."
        )


def _check_cut(cut: Any, source: Any, params: PatchEmbedParams) -> None:
    if cut not in CUTS:
        raise ValueError(
            f"embed_images: cut is {cut!r}, expected None, or 'kernel' to require a kernel that "
            "cuts the images."
        )
    dtype = dtype_name(source)
    if cut is not None and (dtype != "uint8" or source.shape[-1:] != (params.channels,)):
        raise ValueError(
            f"embed_images: cut={cut!r} needs uint8 images [..., H, W, {params.channels}], but the "
            f"images are {dtype}{list(source.shape)}. Pass uint8 images, or leave cut=None."
        )


def _check_call(
    patches: Any,
    params: PatchEmbedParams,
    positions: Any,
    backend: Any,
    out_dtype: Any,
    *,
    images: Any = None,
) -> str:
    """Checks the shapes and dtypes of all arguments; returns the name of out_dtype.

    `images` are given only if a kernel must cut them itself.
    """
    _check_patches(patches, params)
    table = _abstract_table(patches, params, positions)
    out_dtype = _check_out_dtype(out_dtype)
    check_name(backend)
    if backend is not None:
        source = patches if images is None else images
        problem = Problem.of(
            *(source, params.weight, params.scale, table),
            out_dtype=out_dtype,
            layout=None if images is None else params.layout,
            cut=None if images is None else "kernel",
        )
        choose(problem, Target.unknown(), backend)
    return out_dtype


def _abstract_table(patches: Any, params: PatchEmbedParams, positions: Any) -> Any:
    """Checks the positions; returns the shape and dtype of the array that `_table` makes."""
    rows, N, R = patches.shape[-2], params.N, params.prefix
    S = rows - R
    if S < 1:
        raise ValueError(
            f"patch_embed: patches have {rows} rows, but the params have a prefix, which needs "
            f"{R} rows of zeros in front of the patches. Make patches with patchify or "
            "encode_patches, which add these rows."
        )
    if positions is None:
        if params.table is None:
            return params.offset
        if not params.has_positions:
            return jax.ShapeDtypeStruct((rows, N), params.table.dtype)
        if params.table.shape[0] != rows:
            grid = " x ".join(map(str, params.grid or ()))
            raise ValueError(
                f"patch_embed: patches have S = {S} positions, but the params have positions for "
                f"a {grid} grid, S = {params.table.shape[0] - R}. Resize the images, or pass "
                "position_embedding."
            )
        return params.table
    dtype = dtype_name(positions)
    if not jnp.issubdtype(positions.dtype, jnp.floating):
        raise TypeError(
            f"position_embedding has dtype {dtype}, expected a floating-point array. Cast it with "
            "astype(numpy.float32)."
        )
    leading = tuple(patches.shape[:-2])
    shape = tuple(positions.shape)
    # Leading axes broadcast, but do not enlarge the result.
    outer = shape[:-2]
    fits = len(outer) <= len(leading) and all(
        size in (1, wanted) for size, wanted in zip(outer[::-1], leading[::-1])
    )
    if len(shape) < 2 or shape[-2:] != (S, N) or not fits:
        raise ValueError(
            f"position_embedding has shape {list(shape)}, expected {[S, N]} for all images or "
            f"{[*leading, S, N]} for each image: patches have shape {list(patches.shape)}, the "
            f"params have N = {N}"
            f"{f' and {R} rows of prefix, which keep their positions' if R else ''}. Resize the "
            "positions to the grid of the patches."
        )
    return jax.ShapeDtypeStruct((*outer, rows, N), jnp.dtype(params.table_dtype))


def _table(params: PatchEmbedParams, positions: Any, rows: int) -> jax.Array:
    """Returns what is added to the product: the stored table, offset + positions, or the offset."""
    if positions is None and params.table is None:
        return params.offset
    if positions is None and params.has_positions:
        assert params.table is not None
        return params.table
    if positions is None:
        table = jnp.broadcast_to(params.offset, (rows - params.prefix, params.N))
    else:
        positions = jnp.asarray(positions).astype(jnp.float32)
        table = lax.expand_dims(params.offset, range(positions.ndim - 1)) + positions
    if params.table_dtype == "bfloat16":
        # XLA may keep more precision in a bfloat16 that it does not write to memory.
        # reduce_precision rounds to bfloat16 in any case.
        table = lax.reduce_precision(table, exponent_bits=8, mantissa_bits=7)
    table = table.astype(params.table_dtype)
    if not params.prefix:
        return table
    assert params.table is not None
    return prepend_prefix(lax.slice_in_dim(params.table, 0, params.prefix), table)


def _bind(
    source: jax.Array,
    params: PatchEmbedParams,
    positions: Any,
    backend: str | None,
    out_dtype: str,
    tuned: str | None,
    *,
    layout: PatchLayout | None = None,
    cut: str | None = None,
) -> jax.Array:
    shape = source.shape if layout is None else layout.rows_shape(source.shape)
    table = _table(params, positions, shape[-2])
    operands = (source, params.weight, params.scale, table)
    static = dict(backend=backend, out_dtype=out_dtype, layout=layout, cut=cut, tuned=tuned)
    return primitive.patch_embed(*map(jnp.asarray, operands), **static)


def _check_out_dtype(out_dtype: Any) -> str:
    try:
        name = jnp.dtype(out_dtype).name
    except TypeError:
        name = None
    if name not in OUT_DTYPES or out_dtype is None:
        raise ValueError(
            f"patch_embed: out_dtype is {out_dtype!r}, expected bfloat16 or float32. Cast the "
            "result if you need another dtype."
        )
    return name
