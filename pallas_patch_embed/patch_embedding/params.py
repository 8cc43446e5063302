"""PatchEmbedParams, the pytree that `packing.pack` returns: its checks, saving and loading."""

import dataclasses
import json
import math
import operator
import os
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.files import written_atomically
from pallas_patch_embed.base.problem import PatchGeometry, padded
from pallas_patch_embed.patch_embedding.patches import Encoding

# Type of one number for each channel of the images, such as red, green and blue.
type PerChannel = tuple[float, ...]

# The version increases when a static field is added. FIELDS_BEFORE lists the static fields in files
# of each older version.
FILE_FORMAT = "pallas_patch_embed.PatchEmbedParams."
FILE_VERSION = "3"
FIELDS_BEFORE = {
    "1": ("patch_size", "grid", "dtype", "K"),
    "2": (
        *("patch_size", "grid", "dtype", "K"),
        *("image_mean", "image_std", "prefix", "frames"),
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PatchEmbedParams:
    """The pytree of the parameters of a patch embedding, which `pack` packs for the kernels.

    In int8 a pixel u is stored as i = u - 128, which represents the value (2i + 1) / 255. The
    factor 2 / 255 is part of `scale`, and the constant sum_k w[n, k] / 255 is part of `offset`.

    Attributes:
      weight: [N, K_padded] of `dtype`, with K padded with zeros to a multiple of 128. K is in the
        order height, width, channel; with frames in the order channel, frame, height, width.
      scale: [N] float32, the factor of each channel's accumulator.
      offset: [N] float32, bias plus the encoding's constant.
      table: [R + S, N] bfloat16 (float32 if `dtype` is float32): R rows of prefix + positions, then
        S rows of offset + positions. Without positions [R, N], or None if there is no prefix
        either; then S is arbitrary, and the offset is added to each patch.
      patch_size: side of a patch in pixels. This field and all following ones are static.
      grid: (height, width) of the image in patches, with frames (time, height, width). None if
        there are no positions and `pack` was given no grid.
      dtype: dtype of patches and weight: "float32", "bfloat16", "float8_e4m3fn" or "int8".
      K: numbers in one patch without padding, channels * patch_size**2 * (frames or 1).
      image_mean, image_std: normalisation of floating-point images, (u / 255 - mean) / std for each
        channel. None means 0.5 and 0.5, which give [-1, 1].
      prefix: R, the number of rows (class and register tokens) in front of the rows of patches.
      frames: frames of a video in one patch; None for images.
      channels: channels of the images: 3 for RGB.
    """

    weight: jax.Array
    scale: jax.Array
    offset: jax.Array
    table: jax.Array | None
    patch_size: int = dataclasses.field(metadata={"static": True})
    grid: tuple[int, ...] | None = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    K: int = dataclasses.field(metadata={"static": True})
    image_mean: PerChannel | None = dataclasses.field(default=None, metadata={"static": True})
    image_std: PerChannel | None = dataclasses.field(default=None, metadata={"static": True})
    prefix: int = dataclasses.field(default=0, metadata={"static": True})
    frames: int | None = dataclasses.field(default=None, metadata={"static": True})
    channels: int = dataclasses.field(default=3, metadata={"static": True})

    @property
    def geometry(self) -> PatchGeometry:
        """How an image becomes rows of patches."""
        return PatchGeometry(self.patch_size, self.frames, self.prefix)

    @property
    def encoding(self) -> Encoding:
        """How pixels are normalised and encoded."""
        return Encoding(self.dtype, self.image_mean, self.image_std, self.frames is None)

    @property
    def has_positions(self) -> bool:
        """Whether positions are stored; if so, images must have `grid`."""
        return self.table is not None and self.table.shape[0] > self.prefix

    @property
    def K_padded(self) -> int:
        """The length of a patch row, K rounded up to a multiple of 128."""
        return padded(self.K)

    @property
    def N(self) -> int:
        """The width of the embedding."""
        return self.scale.shape[-1]

    @property
    def table_dtype(self) -> str:
        """The dtype of the table: float32 if `dtype` is float32, otherwise bfloat16."""
        return TABLE[self.dtype].table

    @property
    def nbytes(self) -> int:
        """Total size of all leaves in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        grid = "any" if self.grid is None else "x".join(map(str, self.grid))
        more = [f"prefix {self.prefix}"] if self.prefix else []
        more += [f"frames {self.frames}"] if self.frames is not None else []
        more += [f"channels {self.channels}"] if self.channels != 3 else []
        if self.image_mean is not None:
            more.append(f"mean {self.image_mean}, std {self.image_std}")
        leaves = ", ".join(
            f"{name} {_describe(getattr(self, name))}"
            for name in ("weight", "scale", "offset", "table")
        )
        return (
            f"PatchEmbedParams({self.dtype}, patch {self.patch_size}, grid {grid}, K {self.K}"
            f"{''.join(f', {x}' for x in more)}: {leaves})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters to a safetensors file, with the static fields as metadata.

        Float8 weights are stored as bytes (U8), because safetensors.numpy cannot read F8_E4M3. The
        file appears only when it is complete.
        """
        check_params(self)
        tensors = {
            name: np.ascontiguousarray(getattr(self, name))
            for name in ("weight", "scale", "offset", "table")
            if getattr(self, name) is not None
        }
        tensors["weight"] = tensors["weight"].view(_stored_dtype(self.dtype))
        static = {name: getattr(self, name) for name in _static_fields()}
        metadata = {"format": FILE_FORMAT + FILE_VERSION, "static": json.dumps(static)}
        content = safetensors.numpy.save(tensors, metadata)
        with written_atomically(path) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PatchEmbedParams":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file is damaged, or `save` did not write it.
          OSError: there is no such file, or it cannot be read.
        """
        path = os.fsdecode(path)
        with open(path, "rb"):
            pass
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(
                f"PatchEmbedParams.load: {path!r} is not a readable safetensors file "
                f"({error}). Expected a file that PatchEmbedParams.save wrote."
            ) from error
        try:
            return _from_file(tensors, metadata)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"PatchEmbedParams.load: {path!r} does not contain PatchEmbedParams: "
                f"{str(error).rstrip('.')}. Expected a file that PatchEmbedParams.save wrote; pack "
                "the checkpoint again with pack(...)."
            ) from error


# jax.export serialises a program together with the pytrees of its arguments.
jax.export.register_pytree_node_serialization(
    PatchEmbedParams,
    serialized_name="pallas_patch_embed.PatchEmbedParams",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: _with_defaults(json.loads(data)),
)


def _static_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(PatchEmbedParams) if field.metadata]


def _with_defaults(static: list[Any]) -> tuple[Any, ...]:
    """Adds defaults for the static fields that a program exported by an older version lacks."""
    defaults = [f.default for f in dataclasses.fields(PatchEmbedParams) if f.metadata]
    return tuple(
        tuple(x) if isinstance(x, list) else x for x in [*static, *defaults[len(static) :]]
    )


def _describe(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _stored_dtype(dtype: str) -> np.dtype:
    return np.dtype(TABLE[dtype].stored)


def _from_file(tensors: dict[str, Any], metadata: dict[str, str]) -> PatchEmbedParams:
    version = metadata.get("format", "").removeprefix(FILE_FORMAT)
    fields = FIELDS_BEFORE | {FILE_VERSION: tuple(_static_fields())}
    if version not in fields:
        newest = FILE_FORMAT + FILE_VERSION
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {newest!r} or older")
    static = json.loads(metadata["static"])
    if not isinstance(static, dict) or set(static) != set(fields[version]):
        raise ValueError(f"its static fields are {static!r}, expected {', '.join(fields[version])}")
    static["patch_size"] = check_patch_size(static["patch_size"])
    static["dtype"] = dtype = check_dtype(static["dtype"])
    frames, prefix = static.get("frames"), static.get("prefix", 0)
    if frames is not None and not (type(frames) is int and frames >= 1):
        raise ValueError(f"frames is {frames!r}, expected a positive integer or null")
    if not (type(prefix) is int and prefix >= 0):
        raise ValueError(f"prefix is {prefix!r}, expected an integer that is not negative")
    channels = check_channels(static.get("channels", 3))
    K = patch_length(static["patch_size"], channels, frames)
    if static["K"] != K:
        raise ValueError(f"K is {static['K']!r}, expected {K}")
    if static["grid"] is not None:
        static["grid"] = check_grid(static["grid"], frames)
    mean, std = static.pop("image_mean", None), static.pop("image_std", None)
    static["image_mean"], static["image_std"] = check_normalisation(mean, std, channels)
    if unknown := set(tensors) - {"weight", "scale", "offset", "table"}:
        raise ValueError(f"it has unknown tensors {sorted(unknown)}")
    weight = tensors["weight"]
    if weight.dtype != _stored_dtype(dtype):
        raise ValueError(f"weight is stored as {weight.dtype}, expected {_stored_dtype(dtype)}")
    params = PatchEmbedParams(
        weight=weight.view(jnp.dtype(dtype)),
        scale=tensors["scale"],
        offset=tensors["offset"],
        table=tensors.get("table"),
        **static,
    )
    check_params(params)
    for name in ("weight", "scale", "offset", "table"):
        leaf = getattr(params, name)
        if leaf is not None and not np.isfinite(leaf.astype(np.float32)).all():
            raise ValueError(f"{name} has values that are NaN or infinite")
    if (params.scale <= 0).any() or params.weight[:, K:].astype(np.float32).any():
        raise ValueError("it has a scale that is not positive, or a weight in the padding of K")
    return jax.tree.map(jax.device_put, params)


def check_params(params: PatchEmbedParams) -> None:
    """Refuses params whose leaves contradict each other or the static fields.

    Raises:
      TypeError: `params` is not PatchEmbedParams, or a leaf has a wrong dtype.
      ValueError: a leaf has a wrong shape.
    """
    if not isinstance(params, PatchEmbedParams):
        raise TypeError(
            f"params is {type(params).__name__}, expected PatchEmbedParams. Make it with "
            "pallas_patch_embed.pack(...) or PatchEmbedParams.load(path)."
        )
    if params.K != (K := patch_length(params.patch_size, params.channels, params.frames)):
        frames = "" if params.frames is None else f", {params.frames} frames"
        raise ValueError(
            f"params have K = {params.K}, but patches of {params.patch_size} x "
            f"{params.patch_size} pixels{frames} and {params.channels} channels have K = "
            f"{K}. Pack the parameters again."
        )
    if (params.image_mean is None) != (params.image_std is None):
        raise ValueError(
            f"params have image_mean {params.image_mean} and image_std {params.image_std}, "
            "expected both or neither. Pack the kernel again with the image_mean and image_std of "
            "the model's preprocessor."
        )
    N = params.scale.shape[0] if getattr(params.scale, "ndim", 0) == 1 else "N"
    expected = {
        "weight": ((N, params.K_padded), params.dtype),
        "scale": ((N,), "float32"),
        "offset": ((N,), "float32"),
    }
    if params.table is None and params.prefix:
        raise ValueError(
            f"params have a prefix of {params.prefix} rows but no table. Pack the parameters again."
        )
    if params.table is not None:
        R = S = params.prefix
        if R == 0 or getattr(params.table, "shape", None) != (R, N):
            if params.grid is None:
                raise ValueError(
                    "params have a table of positions but no grid. Pack the parameters again."
                )
            S = R + math.prod(params.grid)
        expected["table"] = ((S, N), params.table_dtype)
    for name, (shape, dtype) in expected.items():
        leaf = getattr(params, name)
        fits = getattr(leaf, "shape", None) == shape
        if not fits or np.dtype(leaf.dtype).name != dtype:
            wanted = f"{dtype}[{', '.join(map(str, shape))}]"
            given = f"params.{name} is {_describe(leaf)}, expected {wanted}"
            advice = (
                "Pack the parameters again instead of converting their leaves. If the params are "
                "stacked, map over them with jax.vmap."
            )
            raise (TypeError if fits else ValueError)(f"{given}. {advice}")


def _integer(value: Any) -> int:
    """Returns an integer as an int; 0 for booleans and for everything else."""
    try:
        return 0 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return 0


def check_patch_size(patch_size: Any) -> int:
    """Returns the patch size as an int; raises ValueError unless it is a positive integer."""
    if (size := _integer(patch_size)) < 1:
        raise ValueError(
            f"patch_size is {patch_size!r}, expected a positive integer: the side of a square "
            "patch in pixels, 14, 16 or 32 in SigLIP models."
        )
    return size


def check_dtype(dtype: Any, name: str = "dtype", among: Collection[str] = TABLE) -> str:
    """Returns the name of a dtype, given as a name or a dtype.

    Raises:
      ValueError: it is not one of `among`.
    """
    try:
        found = dtype if isinstance(dtype, str) else str(jnp.dtype(dtype).name)
    except TypeError:
        found = ""
    if found not in among:
        raise ValueError(f"{name} is {dtype!r}, expected one of {', '.join(among)}.")
    return found


def check_grid(grid: Any, frames: int | None = None) -> tuple[int, ...]:
    """Returns the grid as ints, two for images and three for videos.

    With frames, (height, width) means (1, height, width).

    Raises:
      ValueError: the grid has another number of sides, or one that is not a positive integer.
    """
    try:
        sides = tuple(0 if isinstance(side, bool) else operator.index(side) for side in grid)
    except (TypeError, ValueError):
        sides = ()
    if frames is not None and len(sides) == 2:
        sides = (1, *sides)
    if len(sides) != (2 if frames is None else 3) or min(sides) < 1:
        expected = "(height, width)" if frames is None else "(time, height, width)"
        raise ValueError(
            f"grid is {grid!r}, expected {expected} in patches, all positive integers."
        )
    return sides


def check_channels(channels: Any) -> int:
    """Returns the number of channels as an int.

    Raises:
      ValueError: it is not a positive integer.
    """
    if (number := _integer(channels)) < 1:
        raise ValueError(
            f"channels is {channels!r}, expected a positive integer: the number of the images' "
            "channels, 3 for RGB."
        )
    return number


def check_normalisation(
    mean: Any, std: Any, channels: int = 3
) -> tuple[PerChannel | None, PerChannel | None]:
    """Returns mean and std as a float for each channel, or None and None if they are 0.5 and 0.5.

    Raises:
      ValueError: one is not as many numbers in [0, 1], or a standard deviation is 0.
    """
    neutral = (0.5,) * channels
    found = []
    for name, value in (("image_mean", mean), ("image_std", std)):
        try:
            colours = tuple(map(float, neutral if value is None else value))
        except (TypeError, ValueError):
            colours = ()
        positive = name == "image_mean" or min(colours, default=0) > 0
        if len(colours) != channels or not all(0 <= x <= 1 for x in colours) or not positive:
            each = f"of the {channels} channels" if channels > 1 else "channel"
            expected = f"numbers in [0, 1], one for each {each}"
            if channels == 3:
                expected = "three numbers in [0, 1] for red, green and blue"
            raise ValueError(
                f"{name} is {value!r}, expected {expected}"
                f"{'' if name == 'image_mean' else ', all positive'}. Take them from the model's "
                "preprocessor, and divide them by 255 if they are for pixels of 0 to 255."
            )
        found.append(colours)
    if found == [neutral] * 2:
        return None, None
    return found[0], found[1]


def patch_length(patch_size: int, channels: int, frames: int | None) -> int:
    """Returns K, the count of numbers in one patch."""
    return channels * patch_size**2 * (frames or 1)
