"""Resizing of whole pictures on the devices that embed them."""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding
from numpy.lib.array_utils import byte_bounds

from pallas_patch_embed.embed.preprocessing import Preprocessing, Whole
from pallas_patch_embed.layers.resize import (
    FILTERS,
    MOST_SIDE,
    Taps,
    columns_first,
    padded,
    resize,
    stacked,
    taps,
    unpack,
)

# Number of pictures in a call. They are padded to the largest of them, so they are sorted by size.
CALL = 32

# Size in bytes of the pieces that are copied to a device. XLA copies an array that is not in pinned
# memory with one thread: 36 MB of pictures took 6.2 ms as one array and 1.7 ms in 16 pieces.
PIECE = 2**20

# Fewest pieces in a program.
FEWEST_PIECES = 16

# Number of batches whose pictures may still be copied when the batch after them is decoded.
HELD = 2

# Memory in bytes for whole pictures on their way to the devices. Pictures whose number is so large
# that they would need more are resized on the host.
MEMORY = 3 * 2**30

# Largest size in bytes of the images of a batch, whose places are int32.
MOST_BATCH = 2**30


def largest_whole(pictures: int) -> Whole:
    """Returns the largest picture that is resized on the device, if so many are on their way."""
    return Whole(MEMORY // pictures, MOST_SIDE)


def refusal(preprocessing: Preprocessing, batch: int) -> str:
    """Returns why a device cannot resize pictures with the pixels of the host; "" if it can.

    Args:
      preprocessing: the conversion of pictures to images.
      batch: number of images that the device computes at a time.
    """
    if preprocessing.size is None:
        return "the images of a NaFlex encoder have different sizes"
    if max(preprocessing.size) > MOST_SIDE or batch * preprocessing.most_bytes > MOST_BATCH:
        return "the images of a batch are too large"
    if _filter(preprocessing) not in FILTERS:
        return f"the filter is {_filter(preprocessing)}, expected one of {', '.join(FILTERS)}"
    if _order_of_pillow() is None:
        return "the installed Pillow computes other pixels than Pillow 11 to 13"
    return ""


def _filter(preprocessing: Preprocessing) -> str:
    from PIL import Image

    return Image.Resampling(preprocessing.resample).name.lower()


@functools.cache
def _order_of_pillow() -> bool | None:
    """Returns whether the installed Pillow ever resizes the columns first.

    Pillow 13 does, and earlier versions do not. None if it computes other pixels in either order,
    as Pillow-SIMD does.
    """
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (128, 64, 3), np.uint8)
    to = 32, 32
    pictures = np.zeros((1, *noise.shape), np.uint8)
    pictures[0] = noise
    axes = [stacked([taps(noise.shape[i], to[i], "bicubic")], 1) for i in (0, 1)]
    wanted = np.asarray(Image.fromarray(noise).resize(to, Image.Resampling.BICUBIC))
    for order in (True, False):
        if np.array_equal(resize(pictures, *axes, columns_first=order)[0], wanted):
            return order
    return None


def _pieces(memory: np.ndarray, begin: int, end: int) -> tuple[list[np.ndarray], int]:
    """Returns pieces of memory, one after another, with the bytes from `begin` to `end`.

    They are views, unless the memory is too small for whole pieces.

    Returns:
      The pieces, and where `begin` is in them.
    """
    size = -(-(end - begin) // PIECE) * PIECE
    first = min(begin, len(memory) - size)
    if first < 0:
        copied = np.zeros(size, np.uint8)
        copied[: end - begin] = memory[begin:end]
        memory, begin, first = copied, 0, 0
    return np.split(memory[first : first + size], size // PIECE), begin - first


def _places(pictures: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """Returns for each picture memory that it is in, as an array of bytes, and where it begins.

    A picture whose memory is its own is copied, together with all others of this kind.
    """
    found: dict[int, tuple[np.ndarray, int]] = {}
    for i, picture in enumerate(pictures):
        memory = picture.base
        if isinstance(memory, np.ndarray) and memory.ndim == 1 and picture.flags.c_contiguous:
            found[i] = memory, byte_bounds(picture)[0] - byte_bounds(memory)[0]
    alone = [i for i in range(len(pictures)) if i not in found]
    if alone:
        ends = np.cumsum([pictures[i].size for i in alone])
        joined = np.empty(-(-ends[-1] // PIECE) * PIECE, np.uint8)
        np.concatenate([pictures[i].reshape(-1) for i in alone], out=joined[: ends[-1]])
        found |= {i: (joined, end - pictures[i].size) for i, end in zip(alone, ends.tolist())}
    return [found[i] for i in range(len(pictures))]


@jax.jit
def _joined(pieces: Sequence[jax.Array]) -> jax.Array:
    """Returns pieces as one array."""
    return jnp.concatenate(pieces)


@jax.jit
def _in_order(parts: Sequence[jax.Array], places: npt.NDArray[np.int32]) -> jax.Array:
    """Returns the images of several calls in the order of these places."""
    return jnp.concatenate(parts)[places]


class _Step(NamedTuple):
    """How a picture is resized.

    Attributes:
      columns_first: whether the columns are resized before the rows.
      axes: the coefficients of both axes.
    """

    columns_first: bool
    axes: list[Taps]


class Resizer:
    """Resizes the pictures of a batch on the devices, and crops or pads them.

    Pictures that follow each other in memory are copied to a device together, from where they are.
    So a picture must stay unchanged until `copied` says that it was copied.

    Args:
      preprocessing: the conversion of pictures to images, for which there is no `refusal`.
      split: the sharding of a batch.
    """

    def __init__(self, preprocessing: Preprocessing, split: NamedSharding):
        assert preprocessing.size is not None
        self._preprocessing, self._split = preprocessing, split
        self._size, self._filter = preprocessing.size, _filter(preprocessing)
        self._ever_columns_first = _order_of_pillow()
        # What was copied to the devices in this batch and those before it.
        self._copies: collections.deque[list[jax.Array]] = collections.deque([[]])
        crop = preprocessing.crop
        self._fill = crop.fill if crop is not None else (0, 0, 0)

    def __call__(self, pictures: Sequence[np.ndarray], whole: Sequence[bool]) -> jax.Array:
        """Starts to resize pictures.

        Args:
          pictures: arrays [H, W, 3] uint8, equally many for each device.
          whole: for each picture, whether it is yet to be resized.

        Returns:
          [pictures, height, width, 3] uint8, divided among the devices.
        """
        devices = self._split.mesh.devices.flat
        n = len(pictures) // len(devices)
        parts = [
            self._on(device, pictures[i * n : (i + 1) * n], whole[i * n : (i + 1) * n])
            for i, device in enumerate(devices)
        ]
        shape = len(pictures), *self._size, 3
        return jax.make_array_from_single_device_arrays(shape, self._split, parts)

    def copied(self) -> None:
        """Ends a batch; waits until the pictures of the batch `HELD` batches before were copied."""
        self._copies.append([])
        while len(self._copies) > HELD + 1:
            jax.block_until_ready(self._copies.popleft())

    def _on(
        self, device: jax.Device, pictures: Sequence[np.ndarray], whole: Sequence[bool]
    ) -> jax.Array:
        """Starts to resize pictures on one device."""
        steps = [self._step(picture, each) for picture, each in zip(pictures, whole)]

        def order_of(i: int) -> bool:
            return steps[i].columns_first

        order = sorted(range(len(pictures)), key=lambda i: (order_of(i), pictures[i].size))
        calls = [
            call
            for _, group in itertools.groupby(order, order_of)
            for call in itertools.batched(group, CALL)
        ]
        sizes = [
            tuple(padded(max(pictures[i].shape[axis] for i in call)) for axis in (0, 1))
            for call in calls
        ]
        # A row of the largest program follows the last picture.
        packed, begins = self._packed(device, pictures, 3 * max(width for _, width in sizes))
        B = min(CALL, len(pictures))
        parts, places = [], np.empty(len(pictures), np.int32)
        for number, (call, size) in enumerate(zip(calls, sizes)):
            begin, width = np.zeros((2, B), np.int32)
            begin[: len(call)] = begins[list(call)]
            width[: len(call)] = [pictures[i].shape[1] for i in call]
            axes = (stacked([steps[i].axes[axis] for i in call], B) for axis in (0, 1))
            parts.append(
                resize(
                    unpack(packed, begin, width, shape=(*size, 3)),
                    *axes,
                    columns_first=order_of(call[0]),
                    fill=self._fill,
                )
            )
            places[list(call)] = number * B + np.arange(len(call))
        return _in_order(parts, places)

    def _packed(
        self, device: jax.Device, pictures: Sequence[np.ndarray], more: int
    ) -> tuple[jax.Array, npt.NDArray[np.int32]]:
        """Starts to copy pictures and `more` bytes to a device; returns where each one begins."""
        runs: list[tuple[np.ndarray, int, int]] = []  # The memory, where it begins, where it ends.
        of_run, begins = np.empty((2, len(pictures)), np.int64)
        for i, (memory, begin) in enumerate(_places(pictures)):
            if runs and runs[-1][0] is memory and runs[-1][2] == begin:
                first = runs.pop()[1]
            else:
                first = begin
            of_run[i], begins[i] = len(runs), begin - first
            runs.append((memory, first, begin + pictures[i].size))
        pieces: list[np.ndarray] = []
        offsets = []
        for run in runs:
            added, begin = _pieces(*run)
            offsets.append(len(pieces) * PIECE + begin)
            pieces += added
        end = offsets[-1] + runs[-1][2] - runs[-1][1]
        # There are few programs, because the number of pieces is a power of two.
        number = max(FEWEST_PIECES, 1 << (-(-(end + more) // PIECE) - 1).bit_length())
        copies = jax.device_put(pieces, device, may_alias=False)
        self._copies[-1] += copies
        packed = _joined([*copies, *copies[-1:] * (number - len(copies))])
        return packed, (np.array(offsets)[of_run] + begins).astype(np.int32)

    def _step(self, picture: np.ndarray, whole: bool) -> _Step:
        """Returns how a picture is resized; one that is not whole stays as it is."""
        height, width, _ = picture.shape
        size, corner = (height, width), (0, 0)
        to = self._preprocessing.resized_from(height, width) if whole else size
        if whole and self._preprocessing.crop is not None:
            corner = self._preprocessing.crop.corner(to, self._size)
        axes = [taps(size[i], to[i], self._filter, corner[i], self._size[i]) for i in (0, 1)]
        return _Step(bool(self._ever_columns_first and columns_first(size, to)), axes)
