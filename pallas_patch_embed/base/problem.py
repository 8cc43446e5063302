"""The shapes and dtypes of a call (`Problem`), and the shapes of released models."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

K_MULTIPLE = 128


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, or a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def is_known(value: Any) -> bool:
    """Returns whether the values can be read: not traced by jit, and all held by this process."""
    return not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)


def padded(K: int) -> int:
    """Rounds K up to a multiple of 128, which gives whole 128-byte swizzle rows in every dtype."""
    return -(-K // K_MULTIPLE) * K_MULTIPLE


class PatchGeometry(NamedTuple):
    """Geometry of the patches of images [..., H, W, C] or videos [..., F, H, W, C].

    Attributes:
      patch_size: side of a patch in pixels.
      frames: frames of a video in one patch; None for images.
      prefix: number of rows of zeros in front of the patches. In these rows the result is equal to
        the table.
    """

    patch_size: int
    frames: int | None = None
    prefix: int = 0

    @property
    def image_ndim(self) -> int:
        """Number of axes of one image or video."""
        return 3 if self.frames is None else 4

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the number of patches along each axis of images or videos of this shape."""
        *_, H, W, _ = shape
        sides = (H // self.patch_size, W // self.patch_size)
        return sides if self.frames is None else (shape[-4] // self.frames, *sides)

    def patches_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape [..., R + S, K_padded] of the rows cut from images of this shape."""
        K = self.patch_size**2 * shape[-1] * (self.frames or 1)
        rows = self.prefix + math.prod(self.grid(shape))
        return (*shape[: -self.image_ndim], rows, padded(K))


# The operands of an epilogue's levels.
LEVELS = ["factor", "shift"]


class Epilogue(NamedTuple):
    """What a dense layer does with its sums, besides scaling them and adding a bias.

        y[m, n] = activation(sum_k x[m, k] w[n, k] * scale[n] * row_scale[m] + table[n])
                  + residual[m, n]

    With levels the result has the dtype of x, int8 or float8: y * factor[n] + shift, rounded to
    nearest and clipped to the largest magnitude of a weight (`PatchDtype.largest`).

    Attributes:
      activation: one of `ACTIVATIONS`; empty for none.
      row_scale: whether rows have scales, [M] float32.
      residual: whether a residual is added, [M, N] bfloat16.
      levels: whether the result is in 8 bits, with factor [N] and shift [1] float32.
      parts: if not 0, weight, scale, table, factor and shift have two further leading axes, of
        layers and of this number of parts, and the operand `layer`, [1] int32, chooses a layer,
        whose parameters kernels read in place. (XLA would copy them in front of each call, see
        base/lowering.py.) There is a result [M, N] for each part; the problem's N is the sum.
    """

    activation: str = ""
    row_scale: bool = False
    residual: bool = False
    levels: bool = False
    parts: int = 0

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands, in their order."""
        names = {
            "row_scale": ["row_scale"],
            "residual": ["residual"],
            "levels": LEVELS,
            "parts": ["layer"],
        }
        return tuple(name for field in names if getattr(self, field) for name in names[field])


NO_EPILOGUE = Epilogue()


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes and dtypes of one call of the operator on one device.

    y[..., s, n] = out_dtype((sum_k patches[..., s, k] * weight[n, k]) * scale[n] + table[s, n])

    Leading axes of all operands broadcast against each other as in numpy; `jax.vmap` adds them.

    Attributes:
      patches: shape [..., S, K].
      weight: shape [..., N, K].
      scale: shape [..., N], float32.
      table: shape [..., S, N], or [..., 1, N] or [N] for one row that is added to every position.
      dtype: dtype of patches and weight.
      table_dtype: bfloat16 or float32.
      out_dtype: dtype of the result, bfloat16 or float32; with levels that of x.
      geometry: geometry of the patches that are cut from uint8 images; None if patches are given.
      images: shape [..., H, W, C] of those images, or [..., F, H, W, C] of videos.
      epilogue: of a dense layer, what happens to its sums; that of the patch embedding is empty.
    """

    patches: tuple[int, ...]
    weight: tuple[int, ...]
    scale: tuple[int, ...]
    table: tuple[int, ...]
    dtype: str
    table_dtype: str
    out_dtype: str
    geometry: PatchGeometry | None = None
    images: tuple[int, ...] | None = None
    epilogue: Epilogue = NO_EPILOGUE

    @classmethod
    def of(
        cls,
        source: Shaped,
        weight: Shaped,
        scale: Shaped,
        table: Shaped,
        *,
        out_dtype: str,
        geometry: PatchGeometry | None = None,
    ) -> "Problem":
        """Makes the problem of these operands; `source` is images if `geometry` is given."""
        shape = tuple(source.shape)
        return cls(
            patches=shape if geometry is None else geometry.patches_shape(shape),
            weight=tuple(weight.shape),
            scale=tuple(scale.shape),
            table=tuple(table.shape),
            dtype=np.dtype(weight.dtype).name,
            table_dtype=np.dtype(table.dtype).name,
            out_dtype=out_dtype,
            geometry=geometry,
            images=None if geometry is None else shape,
        )

    @property
    def of_patches(self) -> "Problem":
        """The same problem with patches as its input instead of images."""
        return dataclasses.replace(self, geometry=None, images=None)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is symbolic, as in an exported program for every number of images."""
        shapes = self.patches, self.weight, self.scale, self.table
        return any(jax.export.is_symbolic_dim(size) for shape in shapes for size in shape)

    @property
    def rows(self) -> int:
        """Rows of patches, M: the product of all axes but K."""
        return math.prod(self.patches[:-1])

    @property
    def pixels(self) -> int:
        """Bytes of the images; 0 if patches are given."""
        return 0 if self.images is None else math.prod(self.images)

    @property
    def K(self) -> int:
        """Length of a row of patches, including the padding."""
        return self.patches[-1]

    @property
    def N(self) -> int:
        """Width of the embedding; of a dense layer with parts, of all results together."""
        return self.weight[-2]

    @property
    def outputs(self) -> int:
        """Number of results, which share the N columns equally."""
        return max(self.epilogue.parts, 1)

    @property
    def columns(self) -> int:
        """Number of columns of each result."""
        return self.N // self.outputs

    @property
    def has_table(self) -> bool:
        """Whether a table of rows is added (True), or one offset [N] for all rows."""
        return len(self.table) > 1

    @functools.cached_property
    def table_period(self) -> int | None:
        """Rows of patches after which the table repeats; None if it does not repeat."""
        if not self.has_table:
            return 1
        *leading, S, _ = self.table
        while leading and leading[0] == 1:
            leading = leading[1:]
        batch = self.patches[:-2]
        fits = S == self.patches[-2] and tuple(leading) == batch[len(batch) - len(leading) :]
        if not fits or len(self.table) > len(self.patches):
            return None
        return S * math.prod(leading)


@dataclasses.dataclass(frozen=True)
class NamedShape:
    """The patch embedding of one released model.

    Attributes:
      name: model and resolution.
      patch: side of a patch in pixels.
      image: side of the image in pixels; a remainder of image / patch is dropped.
      N: width of the model.
      prefix: rows of class and register tokens in front of the patches.
      frames: frames of a video in one patch; None for images.
    """

    name: str
    patch: int
    image: int
    N: int
    prefix: int = 0
    frames: int | None = None

    @property
    def grid(self) -> tuple[int, int]:
        side = self.image // self.patch
        return side, side

    @property
    def S(self) -> int:
        """Rows of one image, including the prefix."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def K(self) -> int:
        """Count of numbers in one patch, without padding."""
        return 3 * self.patch**2 * (self.frames or 1)


# Models of SigLIP (arXiv 2303.15343) and SigLIP 2 (arXiv 2502.14786), and the vision tower of
# Gemma 3 (arXiv 2503.19786). NaFlex models have positions per image, and by default at most 256
# patches per image.
NAMED_SHAPES = tuple(
    NamedShape(f"{name}/{patch} {image}", patch, image, N)
    for name, patch, N, images in (
        ("B", 16, 768, (224, 256, 384, 512)),
        ("B", 32, 768, (256,)),
        ("L", 16, 1024, (256, 384, 512)),
        ("So400m", 16, 1152, (256, 384, 512)),
        ("So400m", 14, 1152, (224, 384)),
        ("g-opt", 16, 1536, (256, 384)),
        ("NaFlex B", 16, 768, (256,)),
        ("NaFlex So400m", 16, 1152, (256,)),
        ("Gemma 3", 14, 1152, (896,)),
    )
    for image in images
)


# Other ViTs: CLIP (arXiv 2103.00020), DINOv2 (arXiv 2304.07193) at the resolution of its stored
# positions, and the vision towers of Qwen2-VL (arXiv 2409.12191) and Qwen3-VL (arXiv 2511.21631),
# which accept images of any size.
VIT_SHAPES = (
    NamedShape("CLIP B/16 224", 16, 224, 768, prefix=1),
    NamedShape("CLIP B/32 224", 32, 224, 768, prefix=1),
    NamedShape("CLIP L/14 224", 14, 224, 1024, prefix=1),
    NamedShape("CLIP L/14 336", 14, 336, 1024, prefix=1),
    NamedShape("DINOv2 S/14 518", 14, 518, 384, prefix=1),
    NamedShape("DINOv2 B/14 518", 14, 518, 768, prefix=1),
    NamedShape("DINOv2 L/14 518", 14, 518, 1024, prefix=1),
    NamedShape("DINOv2 g/14 518", 14, 518, 1536, prefix=1),
    NamedShape("Qwen2-VL/14 448", 14, 448, 1280, frames=2),
    NamedShape("Qwen3-VL 4B/16 512", 16, 512, 1024, frames=2),
    NamedShape("Qwen3-VL 8B/16 512", 16, 512, 1152, frames=2),
)


def named_shape(name: str) -> NamedShape:
    """Returns the shape with this name.

    Raises:
      ValueError: no shape has this name; the message lists the names.
    """
    shapes = {shape.name: shape for shape in (*NAMED_SHAPES, *VIT_SHAPES)}
    if name not in shapes:
        raise ValueError(f"The shape is {name!r}, expected one of {', '.join(shapes)}.")
    return shapes[name]
