"""PatchEmbedParams: the pytree that `packing.pack` makes, its checks, saving and loading."""

import dataclasses
import json
import math
import operator
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from pallas_patch_embed.files import written_whole
from pallas_patch_embed.problem import DTYPES, padded

FILE_FORMAT = "pallas_patch_embed.PatchEmbedParams.1"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PatchEmbedParams:
    """The parameters of a patch embedding, packed for the kernels by `pack`. A pytree.

    For int8 a pixel u enters as i = u - 128 and stands for (2i + 1) / 255: the factor 2 / 255 is
    part of `scale`, the constant sum_k w[n, k] / 255 part of `offset`.

    Attributes:
      weight: [N, K_padded] of `dtype`; K in the order height, width, channel, padded with zeros to
        a multiple of 128.
      scale: [N] float32, the factor of each channel's accumulator.
      offset: [N] float32, bias plus the encoding's constant.
      table: [S, N] bfloat16 (float32 if `dtype` is float32), offset + positions; None without
        positions: then S is arbitrary, and only the offset is added.
      patch_size: side of a patch in pixels. Static, like the following.
      grid: (height, width) of the image in patches; None if there are no positions and none was
        given.
      dtype: "float32", "bfloat16", "float8_e4m3fn" or "int8".
      K: 3 * patch_size**2, without the padding.
    """

    weight: jax.Array
    scale: jax.Array
    offset: jax.Array
    table: jax.Array | None
    patch_size: int = dataclasses.field(metadata={"static": True})
    grid: tuple[int, int] | None = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    K: int = dataclasses.field(metadata={"static": True})

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
        """The dtype of positions, float32 with float32 patches and otherwise bfloat16."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        grid = "any" if self.grid is None else f"{self.grid[0]}x{self.grid[1]}"
        leaves = ", ".join(
            f"{name} {_describe(getattr(self, name))}"
            for name in ("weight", "scale", "offset", "table")
        )
        return (
            f"PatchEmbedParams({self.dtype}, patch {self.patch_size}, grid {grid}, K {self.K}: "
            f"{leaves})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters as safetensors, the static fields as metadata.

        Float8 weights are stored as their bytes, U8, because numpy's safetensors cannot read
        F8_E4M3. The file appears whole or not at all.
        """
        check_params(self)
        tensors = {
            name: np.ascontiguousarray(getattr(self, name))
            for name in ("weight", "scale", "offset", "table")
            if getattr(self, name) is not None
        }
        tensors["weight"] = tensors["weight"].view(_stored_dtype(self.dtype))
        static = {name: getattr(self, name) for name in ("patch_size", "grid", "dtype", "K")}
        metadata = {"format": FILE_FORMAT, "static": json.dumps(static)}
        content = safetensors.numpy.save(tensors, metadata)
        with written_whole(path) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PatchEmbedParams":
        """Reads what `save` wrote.

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
                f"({error}). Expected one that PatchEmbedParams.save wrote."
            ) from error
        try:
            return _from_file(tensors, metadata)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"PatchEmbedParams.load: {path!r} has no PatchEmbedParams: "
                f"{error}. Expected a file that PatchEmbedParams.save wrote; pack the checkpoint "
                "again with pack(...)."
            ) from error


# jax.export serialises a program together with the pytrees of its arguments.
jax.export.register_pytree_node_serialization(
    PatchEmbedParams,
    serialized_name="pallas_patch_embed.PatchEmbedParams",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(
        tuple(x) if isinstance(x, list) else x for x in json.loads(data)
    ),
)


def _describe(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _stored_dtype(dtype: str) -> np.dtype:
    return np.dtype("uint8") if dtype == "float8_e4m3fn" else np.dtype(jnp.dtype(dtype))


def _from_file(tensors: dict[str, Any], metadata: dict[str, str]) -> PatchEmbedParams:
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {FILE_FORMAT!r}")
    static = json.loads(metadata["static"])
    if not isinstance(static, dict) or set(static) != {"patch_size", "grid", "dtype", "K"}:
        raise ValueError(f"its static fields are {static!r}")
    patch_size, dtype = check_patch_size(static["patch_size"]), check_dtype(static["dtype"])
    K = 3 * patch_size**2
    if static["K"] != K:
        raise ValueError(f"K is {static['K']!r}, expected {K}")
    grid = None if static["grid"] is None else check_grid(static["grid"])
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
        patch_size=patch_size,
        grid=grid,
        dtype=dtype,
        K=K,
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
      TypeError: not PatchEmbedParams, or a leaf has a wrong dtype.
      ValueError: a leaf has a wrong shape.
    """
    if not isinstance(params, PatchEmbedParams):
        raise TypeError(
            f"params are {type(params).__name__}, expected PatchEmbedParams. Make them with "
            "pallas_patch_embed.pack(...) or PatchEmbedParams.load(path)."
        )
    N = params.scale.shape[0] if getattr(params.scale, "ndim", 0) == 1 else "N"
    expected = {
        "weight": ((N, params.K_padded), params.dtype),
        "scale": ((N,), "float32"),
        "offset": ((N,), "float32"),
    }
    if params.table is not None:
        if params.grid is None:
            raise ValueError("params have a table of positions but no grid. Pack them again.")
        expected["table"] = ((math.prod(params.grid), N), params.table_dtype)
    for name, (shape, dtype) in expected.items():
        leaf = getattr(params, name)
        fits = getattr(leaf, "shape", None) == shape
        if not fits or np.dtype(leaf.dtype).name != dtype:
            wanted = f"{dtype}[{', '.join(map(str, shape))}]"
            given = f"params.{name} is {_describe(leaf)}, expected {wanted}"
            advice = (
                "Pack the params again instead of converting their leaves; map stacked params with "
                "jax.vmap."
            )
            raise (TypeError if fits else ValueError)(f"{given}. {advice}")


def check_patch_size(patch_size: Any) -> int:
    """Returns the patch size as an int; refuses everything but positive integers."""
    try:
        size = 0 if isinstance(patch_size, bool | np.bool_) else operator.index(patch_size)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"patch_size is {patch_size!r}, expected a positive integer: the side of a square "
            "patch in pixels, 14, 16 or 32 in SigLIP models."
        )
    return size


def check_dtype(dtype: Any, name: str = "dtype", among: tuple[str, ...] = DTYPES) -> str:
    """Returns the name of a dtype, given as a name or a dtype; refuses those not `among`."""
    try:
        found = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        found = None
    if found not in among:
        raise ValueError(f"{name} is {dtype!r}, expected one of {', '.join(among)}.")
    return found


def check_grid(grid: Any) -> tuple[int, int]:
    """Returns the grid as two ints; refuses everything but two positive integers."""
    try:
        h, w = (0 if isinstance(side, bool) else operator.index(side) for side in grid)
    except (TypeError, ValueError):
        h = w = 0
    if h < 1 or w < 1:
        raise ValueError(f"grid is {grid!r}, expected (height, width) in patches, both positive.")
    return h, w
