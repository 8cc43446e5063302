"""Batches of images with any aspect ratio."""

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from pallas_patch_embed.base.array_arguments import AnyArray, as_array
from pallas_patch_embed.base.grids import largest_grid
from pallas_patch_embed.base.problem import is_known
from pallas_patch_embed.encoders.config import Config
from pallas_patch_embed.layers.attention import Segments
from pallas_patch_embed.layers.attention_sm90 import PACKED_ROWS
from pallas_patch_embed.patch_embedding.patches import Encoding, encode


def batch_naflex(
    images: Iterable[AnyArray], config: Config, max_num_patches: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.bool]]:
    """Cuts images of different sizes into patches and pads them to one batch, on the host.

    Args:
      images: B arrays [H, W, C] uint8 with C = `config.channels`, 3 for RGB. H and W are multiples
        of `config.patch`.
      config: config of the encoder that will encode the batch.
      max_num_patches: L, the length to which every image is padded.

    Returns:
      The arguments of a NaFlex encoder: patches [B, L, K] float32, pixels u / 255 * 2 - 1 in the
      order height, width, channel, with 0 as padding; spatial_shapes [B, 2] int32, height and width
      of each image in patches; mask [B, L] bool, False for padding.

    Raises:
      TypeError: an image is not a uint8 array, or config is not a Config.
      ValueError: an image has another shape, a side that is not a multiple of the patch, or more
        than `max_num_patches` patches.
    """
    L = _check_batch("batch_naflex", config, max_num_patches)
    cut = list(_cut("batch_naflex", images, config, L))
    patches = np.zeros((len(cut), L, config.channels * config.patch**2), np.float32)
    spatial_shapes = np.zeros((len(cut), 2), np.int32)
    for i, (grid, rows) in enumerate(cut):
        patches[i, : len(rows)] = rows
        spatial_shapes[i] = grid
    mask = np.arange(L) < spatial_shapes.prod(1, keepdims=True)
    return patches, spatial_shapes, mask


# Images begin at multiples of so many tokens, because the attention's kernel stores so many at a
# time.
ALIGNMENT = PACKED_ROWS


def aligned(patches: int) -> int:
    """Returns the number of tokens that an image of so many patches takes in a row."""
    return -(-patches // ALIGNMENT) * ALIGNMENT


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("patches", "spatial_shapes", "starts"),
    meta_fields=("max_num_patches",),
)
@dataclasses.dataclass(frozen=True)
class PackedImages:
    """Patches of N images behind one another in R rows of T tokens, a pytree for `Encoder.packed`.

    Attributes:
      patches: [R, T, K] float32 in [-1, 1], in the order height, width, channel; 0 where no image
        is.
      spatial_shapes: [N, 2] int32, height and width of each image in patches; 0, 0 for an image
        that only fills up the batch.
      starts: [N, 2] int32, the row and the first token of each image, a multiple of 8, as T is.
      max_num_patches: the largest number of patches that an image may have, which is static.
    """

    patches: Any
    spatial_shapes: Any
    starts: Any
    max_num_patches: int

    @property
    def fill(self) -> float:
        """The part of the tokens that are patches."""
        return float(np.asarray(self.spatial_shapes).prod(1).sum() / self.patches[..., 0].size)

    @property
    def segments(self) -> Segments:
        """Where the tokens of each image are."""
        row, start = jnp.split(self.starts.astype(jnp.int32), 2, axis=1)
        first = (row * self.patches.shape[1] + start)[:, 0]
        lengths = self.spatial_shapes.astype(jnp.int32).prod(1)
        return Segments(first, lengths, self.max_num_patches)

    def unpack(self, tokens: Any) -> list[Any]:
        """Splits rows of tokens [R, T, ...] into those of each image [height, width, ...]."""
        found = []
        sides, starts = (np.asarray(x).tolist() for x in (self.spatial_shapes, self.starts))
        for (h, w), (row, start) in zip(sides, starts):
            found.append(tokens[row, start : start + h * w].reshape(h, w, *tokens.shape[2:]))
        return found

    def check(self, K: int) -> None:
        """Raises TypeError or ValueError if the arrays do not fit together, or overlap."""
        name = "encoder.packed: "
        advice = "Make them with siglip2.pack_naflex."
        patches, sides, starts = self.patches, self.spatial_shapes, self.starts
        if not jnp.issubdtype(patches.dtype, jnp.floating):
            raise TypeError(
                f"{name}patches have dtype {patches.dtype}, expected floating-point pixels in "
                f"[-1, 1]. {advice}"
            )
        if patches.ndim != 3 or patches.shape[-1] != K or patches.shape[1] % ALIGNMENT:
            raise ValueError(
                f"{name}patches have shape {list(patches.shape)}, expected [R, T, {K}], where T is "
                f"a multiple of {ALIGNMENT}. {advice}"
            )
        shapes = sides.shape, starts.shape
        integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (sides, starts))
        if not integers or shapes != ((len(sides), 2),) * 2:
            raise ValueError(
                f"{name}spatial_shapes are {sides.dtype}{list(sides.shape)} and starts "
                f"{starts.dtype}{list(starts.shape)}, expected integers [N, 2]. {advice}"
            )
        if not (is_known(sides) and is_known(starts)):
            return
        sides, starts = (np.asarray(jax.device_get(x), np.int64) for x in (sides, starts))
        R, T, _ = patches.shape
        lengths = sides.prod(1)
        ends = starts[:, 1] + lengths
        wrong = (sides < 0).any(1) | (lengths > self.max_num_patches) | (starts < 0).any(1)
        unaligned = starts[:, 1] % ALIGNMENT > 0
        wrong |= (lengths > 0) & ((starts[:, 0] >= R) | (ends > T) | unaligned)
        order = np.lexsort((starts[:, 1], starts[:, 0]))
        order = order[lengths[order] > 0]
        same_row = starts[order[:-1], 0] == starts[order[1:], 0]
        wrong[order[1:]] |= same_row & (starts[order[1:], 1] < ends[order[:-1]])
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"{name}image {i} has {sides[i].tolist()} patches from row and token "
                f"{starts[i].tolist()} on, expected at most {self.max_num_patches} patches within "
                f"{R} rows of {T} tokens, from a multiple of {ALIGNMENT} on, which no other image "
                f"has. {advice}"
            )


jax.export.register_pytree_node_serialization(
    PackedImages,
    serialized_name="pallas_patch_embed.siglip2.PackedImages",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def pack_naflex(
    images: Iterable[AnyArray],
    config: Config,
    max_num_patches: int,
    *,
    tokens: int | None = None,
    rows: int | None = None,
    number: int | None = None,
) -> PackedImages:
    """Cuts images of different sizes into patches and lays them behind one another, on the host.

    The largest images are laid first, each into the first row that has room for it.

    Args:
      images, config, max_num_patches: as for `batch_naflex`.
      tokens: T, the length of a row, a multiple of 8 and at least max_num_patches; by default
        eight times max_num_patches rounded up to a multiple of 8.
      rows: R; by default as many as are needed.
      number: N; by default the number of images. With `rows` and `number` the shapes are the same
        for different images, so that they are encoded by the same program.

    Returns:
      PackedImages, in the order of the images.

    Raises:
      TypeError: as for `batch_naflex`.
      ValueError: as for `batch_naflex`, or the images do not fit.
    """
    L = _check_batch("pack_naflex", config, max_num_patches)
    least = aligned(L)
    T = 8 * least if tokens is None else _positive("pack_naflex: tokens", tokens)
    if T < least or T % ALIGNMENT:
        raise ValueError(
            f"pack_naflex: tokens is {T}, expected a multiple of {ALIGNMENT} and at least {least}, "
            f"the room for an image of max_num_patches = {L} patches."
        )
    cut = list(_cut("pack_naflex", images, config, L))
    N = len(cut) if number is None else _positive("pack_naflex: number", number)
    if len(cut) > N:
        raise ValueError(
            f"pack_naflex: number is {N}, but there are {len(cut)} images. Pass fewer images."
        )
    lengths = [len(patches) for _, patches in cut]
    places, used = first_fit(lengths, T)
    R = max(used, 1) if rows is None else _positive("pack_naflex: rows", rows)
    if used > R:
        raise ValueError(
            f"pack_naflex: rows is {R}, but the images need {used} rows of {T} tokens. Pass fewer "
            "images, or increase rows."
        )
    patches = np.zeros((R, T, config.channels * config.patch**2), np.float32)
    spatial_shapes, starts = np.zeros((2, N, 2), np.int32)
    for i, ((grid, of_image), (row, start)) in enumerate(zip(cut, places)):
        patches[row, start : start + len(of_image)] = of_image
        spatial_shapes[i], starts[i] = grid, (row, start)
    return PackedImages(patches, spatial_shapes, starts, L)


def first_fit(lengths: Sequence[int], tokens: int) -> tuple[list[tuple[int, int]], int]:
    """Finds a place for each image in rows of `tokens` tokens, the longest images first.

    Returns:
      The (row, first token) of each image, in the order of `lengths`, and the number of rows.
    """
    places = [(0, 0)] * len(lengths)
    ends: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, end in enumerate(ends) if end + lengths[i] <= tokens), len(ends))
        if row == len(ends):
            ends.append(0)
        places[i] = row, ends[row]
        ends[row] += aligned(lengths[i])
    return places, len(ends)


def _positive(name: str, value: Any) -> int:
    """Checks a positive integer."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} is {value!r}, expected a positive integer.")
    return found


def _check_batch(function: str, config: Any, max_num_patches: Any) -> int:
    if not isinstance(config, Config):
        raise TypeError(f"{function}: config is {type(config).__name__}, expected encoder.config.")
    return _positive(f"{function}: max_num_patches", max_num_patches)


def _cut(
    function: str, images: Any, config: Config, L: int
) -> Iterator[tuple[tuple[int, int], npt.NDArray[np.float32]]]:
    """Yields the grid and the patches [h * w, K] of each image."""
    p, C = config.patch, config.channels
    if getattr(images, "ndim", None) in (0, 2, 3) or not isinstance(images, Iterable):
        raise TypeError(
            f"{function}: images is {type(images).__name__}, expected several arrays [H, W, {C}], "
            "one for each image. Put a single image into a list."
        )
    pixel = jax.device_get(_pixels())
    for i, image in enumerate(images):
        name = f"{function}: image {i}"
        array = as_array(image, name)
        h, w = _grid_of(array, name, config, L)
        levels = np.asarray(array).reshape(h, p, w, p, C).swapaxes(1, 2).reshape(h * w, -1)
        yield (h, w), pixel[levels]


@jax.jit
def _pixels() -> jax.Array:
    """Computes the encoding of every uint8 level, [256] float32."""
    return encode(lax.iota(jnp.uint8, 256), Encoding("float32"))


def _grid_of(image: Any, name: str, config: Config, L: int) -> tuple[int, int]:
    """Checks an image; returns its (height, width) in patches."""
    patch, channels = config.patch, config.channels
    if image.dtype != np.uint8:
        raise TypeError(
            f"{name} is {image.dtype}, expected a uint8 array [H, W, {channels}] of pixels from 0 "
            "to 255."
        )
    if image.ndim != 3 or image.shape[-1] != channels:
        advice = "Convert it to RGB." if channels == 3 else "Move the channels last."
        raise ValueError(
            f"{name} has shape {list(image.shape)}, expected [H, W, {channels}]. {advice}"
        )
    H, W, _ = image.shape
    if H % patch or W % patch or 0 in (H, W):
        nearest = [max(1, round(side / patch)) * patch for side in (H, W)]
        raise ValueError(
            f"{name} has {H} x {W} pixels, expected multiples of the patch size, {patch}. Resize "
            f"it; the nearest size is {nearest[0]} x {nearest[1]}."
        )
    h, w = H // patch, W // patch
    if h * w > L:
        fitting = [side * patch for side in largest_grid(H, W, patch, L)]
        raise ValueError(
            f"{name} of {H} x {W} pixels has {h * w} patches, expected at most max_num_patches = "
            f"{L}. Resize it to {fitting[0]} x {fitting[1]}, or increase max_num_patches."
        )
    return h, w
