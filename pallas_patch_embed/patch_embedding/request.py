"""A call of the operator: its arguments, what is checked about them, and how they are bound.

`patch_embed`, `embed_images`, `explain` and encoders make a `Request` with params that they have
checked. `checked` makes all other checks that need no values, and `run` makes none. So a function
that is traced after its arguments were checked makes a Request without `checked`.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_patch_embed.backends import check_name, choose
from pallas_patch_embed.base.array_arguments import dtype_name
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import OUT_DTYPES, TABLE
from pallas_patch_embed.base.problem import PatchGeometry, Problem
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.packing import prepend_prefix
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams
from pallas_patch_embed.patch_embedding.patches import cut_into_rows

CUTS = (None, "kernel")
IMAGE_DTYPES = ("uint8", "float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a call. `source` and `positions` are arrays, or have their shape and dtype.

    Attributes:
      source: patches [..., S, K_padded], or images as for `patchify`.
      params: PatchEmbedParams.
      from_images: whether `source` is images.
      positions: position_embedding, or None for the stored positions.
      out_dtype: dtype of the result; its name after `checked`.
      backend: the user's choice; None for the fastest backend that serves.
      cut: "kernel" if a kernel must cut the images; None if XLA may cut them.
      tuned: absolute path of the user's file of measured configs, or None.
    """

    source: Any
    params: PatchEmbedParams
    from_images: bool = False
    positions: Any = None
    out_dtype: DTypeLike = "bfloat16"
    backend: str | None = None
    cut: str | None = None
    tuned: str | None = None

    @property
    def geometry(self) -> PatchGeometry | None:
        """The geometry of the patches that XLA or a kernel cuts from uint8 images, or None."""
        return self.params.geometry if self.from_images and self.source.dtype == jnp.uint8 else None

    @property
    def patches(self) -> Any:
        """The patches, or the shape and dtype of those that are cut from the images."""
        if not self.from_images:
            return self.source
        shape = self.params.geometry.patches_shape(tuple(self.source.shape))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.params.dtype))

    @property
    def problem(self) -> Problem:
        """The problem of the call on one device."""
        source = self.patches if self.geometry is None else self.source
        table = _abstract_table(self.patches, self.params, self.positions)
        operands = (source, self.params.weight, self.params.scale, table)
        out_dtype = jnp.dtype(self.out_dtype).name
        return Problem.of(*operands, out_dtype=out_dtype, geometry=self.geometry)

    def checked(self) -> "Request":
        """Returns the request with the name of out_dtype, after all checks.

        Raises:
          TypeError, ValueError: an argument has another type, dtype or shape.
          NotImplementedError: the backend that the user chose cannot serve on any device.
        """
        if self.from_images:
            check_images(self.source, self.params)
            _check_grid(self.source, self.params, self.positions)
        _check_cut(self.cut, self.source, self.params)
        patches = self.patches
        _check_patches(patches, self.params)
        _abstract_table(patches, self.params, self.positions)
        found = dataclasses.replace(self, out_dtype=_check_out_dtype(self.out_dtype))
        check_name(self.backend)
        if self.backend is not None:
            choose(found.problem, Target.unknown(), self.backend, cut=self.cut)
        return found

    def run(self) -> jax.Array:
        """Computes the call, without checks."""
        params, images = self.params, jnp.asarray(self.source)
        source = images
        if self.from_images and self.geometry is None:
            source = cut_into_rows(images, params.geometry, params.encoding)
        operands = (source, params.weight, params.scale, _table(self))
        y = primitive.patch_embed(
            *map(jnp.asarray, operands),
            backend=self.backend,
            out_dtype=jnp.dtype(self.out_dtype).name,
            geometry=self.geometry,
            cut=self.cut,
            tuned=self.tuned,
        )
        if source is not images and TABLE[params.dtype].holds_levels:
            # Because of the rounding to integers the derivative would be zero, without an error.
            y = primitive.without_gradient(images, y)
        return y


def check_images(images: Any, params: PatchEmbedParams) -> None:
    """Refuses images of another dtype or shape, and images smaller than a patch."""
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


def _check_grid(images: Any, params: PatchEmbedParams, positions: Any) -> None:
    """Refuses images whose grid of patches is not that of the stored positions."""
    shape = tuple(images.shape)
    grid = params.geometry.grid(shape)
    if positions is None and params.has_positions and grid != params.grid:
        given, stored = (" x ".join(map(str, sides)) for sides in (grid, params.grid or ()))
        raise ValueError(
            f"embed_images: {' x '.join(map(str, shape[-params.geometry.image_ndim : -1]))} pixels "
            f"are a {given} grid of patches of {params.patch_size} pixels, but the params have "
            f"positions for a {stored} grid. Resize the images, or pass the position_embedding of "
            "their grid."
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
    """Refuses an unknown `cut`, and one for anything but uint8 images."""
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


def _table(request: Request) -> jax.Array:
    """Returns what is added to the product: the stored table, offset + positions, or the offset."""
    params, positions = request.params, request.positions
    if positions is None and params.table is None:
        return params.offset
    if positions is None and params.has_positions:
        assert params.table is not None
        return params.table
    if positions is None:
        table = jnp.broadcast_to(
            params.offset, (request.patches.shape[-2] - params.prefix, params.N)
        )
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


def path_of(tuned: Any) -> str | None:
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
